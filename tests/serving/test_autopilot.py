"""The autopilot at a gateway: it keeps what gains, takes back what does not, and survives a crash at any write."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import serving
from headway.autopilot.evidence import Bounds
from headway.autopilot.machine import Change, Observed, State
from headway.autopilot.staging import Staging
from headway.cli import main
from headway.control.policies import Policies
from headway.core.errors import HeadwayError
from headway.gateway.telemetry.reloads import Reload
from headway.planning.advise.trials import Outcome, gain
from headway.records import parts
from headway.serving import autopilot, autopilot_state
from headway.serving.autopilot import Autopilot
from headway.serving.autopilot_state import AutopilotFiles, Stored
from headway.serving.proposals import saving_of
from headway.serving.reload import FleetFile
from headway.workload.readers import run_parts
from keys import ADMIN, digest
from serving import chat, send, until

pytest.importorskip("httptools")

POOL = {"name": "pool", "model": "qwen3-8b", "gpu": "h100", "engine": "vllm-0.15", "endpoints": ["http://127.0.0.1:1"]}
ALLOW = {"allow": ["routing"], "max_usd_per_h": 100}
BEFORE, AFTER = "round-robin", "least-loaded"


class Crash(BaseException):
    """The process is gone."""


class Clock:
    """Runs from a second on, so that no test depends on the hour at which it runs."""

    def __init__(self, start_s: float) -> None:
        self._ahead_s = start_s - time.monotonic()

    @property
    def now(self) -> float:
        return self._ahead_s + time.monotonic()


NIGHT_S = 1767574800.0
"""01:00 UTC of a day: before the hour at which changes are looked for."""


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    path = tmp_path / "fleet.yaml"
    path.write_text(
        yaml.safe_dump({"fleet": [POOL], "policies": {"routing": BEFORE}, "autopilot": ALLOW, "slo": {"e2e_s": 60}})
    )
    return path


def proposal(name: str = "routing: least-loaded", value: Any = AFTER, low: float = 0.2) -> dict[str, Any]:
    return {
        "name": name,
        "kinds": ["routing"],
        "changes": [{"key": ["policies", "routing"], "value": value}],
        "attainment": {"mean": low + 0.1, "low": low, "high": low + 0.2},
    }


def answer(*proposals: dict[str, Any]) -> dict[str, Any]:
    return {"is_withheld": False, "proposals": list(proposals), "today": {"attainment": 0.5}}


def staged(fleet: Path, staging: Staging, value: str = AFTER, began_s: float = NIGHT_S) -> None:
    """Have a change staged, as if the process had been killed there."""
    files = AutopilotFiles(fleet)
    document = yaml.safe_load(files.text())
    changed = yaml.safe_dump(document | {"policies": {"routing": value}})
    change = Change(
        f"routing: {value}",
        ("routing",),
        files.version_of(files.text()),
        files.version_of(changed),
        Bounds(0.2, 0.4),
        0.0,
        staging,
    )
    files.save(Stored(State("staged", change), began_s))


def pilot(fleet: Path, ask: Any = None, refuses: str = "") -> Autopilot:
    """An autopilot at a gateway that only notes its policies; `refuses`: the reload of this router fails."""
    file = FleetFile(fleet, lambda read: read)
    gateway = SimpleNamespace(
        telemetry=SimpleNamespace(trial=None, decisions=None, usd=0.0),
        clock=Clock(1000.0),
        plan=file.plan,
        driver=SimpleNamespace(requests={}, take_turns=lambda on: None),
        replicas=[],
        autopilot=None,
        request_reload=None,
    )

    async def reload(cause: str) -> Reload:
        plan = file.read_again(gateway.plan)
        if str(plan.policies.router) == refuses:
            return Reload(0.0, cause, "failed", error="no")
        gateway.plan = plan
        return Reload(0.0, cause, "applied")

    gateway.request_reload = reload
    gateway.reconfigure = lambda plan: setattr(gateway, "plan", plan)
    night = Clock(NIGHT_S)
    made = Autopilot(gateway, file, fleet.parent, ask, lambda: night.now)  # type: ignore[arg-type]
    made._trial.requests_per_s = lambda now: 50.0  # type: ignore[method-assign]
    return made


def router(made: Autopilot) -> str:
    return str(made._gateway.plan.policies.router)


def run(made: Autopilot, gains: dict[str, float] | None = None) -> None:
    """Go on until nothing is tried any more; pairs take no time, and show these gains by router."""

    async def pair(change: Change, before: Any, after: Any) -> None:
        made._serve(after)
        assert router(made) != str(before.router)
        made._serve(before)
        await made._step(Observed((gains or {})[str(after.router)]))

    made._pair = pair  # type: ignore[method-assign]

    async def go() -> None:
        while True:
            await made._next()
            if made._stored.state.stage in ("idle", "promoted", "rolled back"):
                return

    asyncio.run(go())


def asked(*proposals: dict[str, Any]) -> Any:
    async def ask(kinds: Any) -> dict[str, Any]:
        assert kinds == ("routing",)
        return answer(*proposals)

    return ask


def routing_of(fleet: Path) -> str:
    return str(yaml.safe_load(fleet.read_text())["policies"]["routing"])


@pytest.mark.parametrize(("gain", "outcome", "routing"), [(0.3, "promoted", AFTER), (-0.3, "rolled back", BEFORE)])
def test_what_gains_is_kept_and_what_loses_is_taken_back(gain: float, outcome: str, routing: str, fleet: Path) -> None:
    made = pilot(fleet, asked(proposal()))
    asyncio.run(made.look_now())
    run(made, {AFTER: gain})
    assert routing_of(fleet) == routing == router(made)
    (past,) = made.state().past
    assert (past.outcome, past.change) == (outcome, "routing: least-loaded") and past.reason
    asyncio.run(made.look_now())
    run(made)  # what was rolled back is not tried again, and what is promoted is no proposal any more
    assert len(made.state().past) == 1


DOLLARS = {"target": 0.99, "today": {"attainment": 0.995, "usd_per_hour": 10.0}}


def saves(low: float, attainment: float = 0.0) -> dict[str, Any]:
    """A proposal that saves at least this share of the dollars, and does not change the SLO attainment for certain."""
    usd = {key: 730 * 10 * share for key, share in (("low", low), ("mean", low + 0.05), ("high", low + 0.1))}
    gain = {"mean": attainment, "low": attainment - 0.001, "high": attainment + 0.001}
    return proposal() | {"attainment": gain, "usd_per_month": usd}


@pytest.mark.parametrize(("share", "outcome"), [(0.3, "promoted"), (0.02, "rolled back"), (-0.3, "rolled back")])
def test_a_change_that_saves_dollars_is_judged_by_the_dollars_of_its_periods(
    share: float, outcome: str, fleet: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The fleet costs $1 a second, and this share less with the change; every request meets its SLOs."""
    asking = asked(saves(0.2))

    async def ask(kinds: Any) -> dict[str, Any]:
        return await asking(kinds) | DOLLARS

    made = pilot(fleet, ask)
    now_s, spent = 0.0, SimpleNamespace(trial=made._trial, decisions=None, usd=0.0)
    made._gateway.telemetry = spent

    async def wait(wait_s: float, change: Change, policies: Policies) -> None:
        nonlocal now_s
        now_s += wait_s
        spent.usd += wait_s * (1 - share if str(policies.router) == AFTER else 1.0)
        for period in made._trial.periods:
            period.num = period.num_met = 2000

    made._wait = wait  # type: ignore[method-assign]
    made._gateway.clock = type("", (), {"now": property(lambda _: now_s)})()  # type: ignore[assignment]
    asyncio.run(made.look_now())

    async def go() -> None:
        while not made.state().past:
            await made._next()

    asyncio.run(go())
    (past,) = made.state().past
    assert past.outcome == outcome and "of the dollars" in past.reason, past.reason
    assert made.state().saved == pytest.approx(share / max(1, 1 - share))
    assert routing_of(fleet) == (AFTER if outcome == "promoted" else BEFORE)
    assert main(["autopilot", "status", str(fleet)]) == 0
    assert f"{made.state().saved:.1%} of the dollars saved" in capsys.readouterr().out


@given(st.floats(0.01, 0.9), st.floats(0.5, 1), st.floats(0.5, 1))
def test_a_loss_that_is_accepted_is_worth_no_more_than_the_saving(low: float, met: float, target: float) -> None:
    """By the valuation with which `headway advise` ranks proposals."""
    found = saving_of(saves(low), {"target": target, "today": {"attainment": met, "usd_per_hour": 10.0}})
    assert found is not None and 0 < found.most_lost <= 0.01 and found.least == pytest.approx(low / 2)
    before, after = Outcome(10.0, met, 1), Outcome(10.0 * (1 - found.least), met - found.most_lost, 1)
    assert gain(after, before, target).worth >= -1e-9
    if found.most_lost < 0.01:
        assert gain(after, before, target).worth == pytest.approx(0.0, abs=1e-9)


def test_a_proposal_that_neither_gains_nor_saves_for_certain_has_no_saving() -> None:
    assert saving_of(saves(-0.01), DOLLARS) is None and saving_of(proposal(), answer()) is None


@pytest.mark.ci
@pytest.mark.parametrize("is_before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("gain", [0.3, -0.3])
def test_a_crash_at_any_write_leaves_the_old_or_the_promoted_fleet_and_goes_on(
    gain: float, is_before: bool, fleet: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process is killed before or after its n-th write, for all n, each time in a new folder."""
    real, text = autopilot_state._write, fleet.read_text()
    for at in range(100):
        folder = fleet.parent / f"run{at}"
        folder.mkdir()
        path = folder / "fleet.yaml"
        path.write_text(text)
        num = 0

        def write(target: Path, data: bytes) -> None:
            nonlocal num
            num += 1
            if num == at + 1 and is_before:  # noqa: B023
                raise Crash
            real(target, data)
            if num == at + 1:  # noqa: B023
                raise Crash

        monkeypatch.setattr(autopilot_state, "_write", write)
        has_crashed = False
        try:
            made = pilot(path, asked(proposal()))
            asyncio.run(made.look_now())
            run(made, {AFTER: gain})
        except Crash:
            has_crashed = True
        monkeypatch.setattr(autopilot_state, "_write", real)
        stored = AutopilotFiles(path).load()
        was_promoted = stored.state.verdict == "promote"
        assert routing_of(path) in ((BEFORE, AFTER) if was_promoted else (BEFORE,))
        again = pilot(path, asked(proposal()))
        assert router(again) == routing_of(path)
        run(again, {AFTER: gain})
        if not again.state().past and again.state().stage == "idle":  # it was killed before anything was staged
            asyncio.run(again.look_now())
            run(again, {AFTER: gain})
        assert routing_of(path) == (AFTER if gain > 0 else BEFORE) == router(again)
        assert again.state().stage == ("promoted" if gain > 0 else "rolled back")
        if not has_crashed:
            assert at > 5
            return
    raise AssertionError("it never came to an end")


def test_no_call_of_a_file_takes_the_event_loop(fleet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: dict[str, bool] = {}

    def noted(name: str, function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            try:
                asyncio.get_running_loop()
                calls[name] = True
            except RuntimeError:
                calls.setdefault(name, False)
            return function(*arguments)

        return call

    made = pilot(fleet, asked(proposal()))
    names = ("save", "is_stopped", "stop", "resume", "look_now", "take_request", "text", "version_of", "use", "is_at")
    for name in names:
        monkeypatch.setattr(AutopilotFiles, name, noted(name, getattr(AutopilotFiles, name)))
    asyncio.run(made.look_now())
    run(made, {AFTER: 0.3})
    asyncio.run(made.stop())
    assert made.state().stopped
    asyncio.run(made.resume())
    assert not made.state().stopped and made.state().stage == "promoted"
    assert calls == dict.fromkeys(names, False)


def test_a_disk_that_hangs_ends_what_is_tried(fleet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The policies are those of before; the change goes on or is taken back once the disk answers."""
    staged(fleet, Staging(0.0, 0.01, 0.0, 9))
    made, answers = pilot(fleet), threading.Event()
    served, serve, is_stopped = list[str](), made._serve, AutopilotFiles.is_stopped

    def serve_and_hang(policies: Policies) -> None:
        serve(policies)
        served.append(router(made))
        if router(made) == AFTER:  # no call that answers has a limit this short
            monkeypatch.setattr(autopilot, "DISK_S", 0.1)

    def hung(files: AutopilotFiles) -> bool:
        return (AFTER not in served or answers.wait(30)) and is_stopped(files)

    monkeypatch.setattr(made, "_serve", serve_and_hang)
    monkeypatch.setattr(AutopilotFiles, "is_stopped", hung)

    async def story() -> None:
        with pytest.raises(HeadwayError, match="did not answer within"):
            while True:
                await made._next()
        assert AFTER in served and router(made) == BEFORE and made.state().stage == "staged"
        monkeypatch.setattr(autopilot, "DISK_S", 30.0)
        answers.set()
        await made.stop()
        await made._next()
        assert made.state().past[0].reason == "stopped by the operator" and router(made) == BEFORE

    asyncio.run(story())


def test_a_promotion_that_cannot_be_reloaded_is_taken_back(fleet: Path) -> None:
    made = pilot(fleet, asked(proposal()), refuses=AFTER)
    asyncio.run(made.look_now())
    run(made, {AFTER: 0.3})
    assert routing_of(fleet) == BEFORE == router(made)
    assert made.state().past[0].reason == "it cannot be reloaded: no"


def test_a_fleet_file_that_is_changed_by_hand_wins(fleet: Path) -> None:
    staged(fleet, Staging(0.0, 0.01, 0.0, 9))
    by_hand = fleet.read_text().replace(BEFORE, "random")
    fleet.write_text(by_hand)
    made = pilot(fleet)
    run(made, {})
    assert fleet.read_text() == by_hand and router(made) == "random"
    assert made.state().past[0].reason == "the fleet file was changed by hand"


@pytest.mark.parametrize(
    ("settings", "proposals", "why"),
    [
        ({"freeze": "00:00-24:00"}, [proposal()], "no change begins in a freeze window"),
        ({"max_usd_per_h": 0.5}, [proposal()], r"the fleet may cost \$\d+\.\d\d an hour, above the \$0\.50 allowed"),
        ({}, [], "no change is distinguishable from today's fleet"),
        ({}, [proposal(low=0.0)], "not to add to the SLO attainment"),
        ({}, [proposal(value="no-such")], "unknown router 'no-such'"),
        ({"judge_s": 1}, [proposal()], "cannot be told within"),
    ],
)
def test_what_is_not_allowed_does_not_begin_and_says_why(
    settings: dict[str, Any], proposals: list[dict[str, Any]], why: str, fleet: Path
) -> None:
    fleet.write_text(yaml.safe_dump(yaml.safe_load(fleet.read_text()) | {"autopilot": ALLOW | settings}))
    made = pilot(fleet, asked(*proposals))
    asyncio.run(made.look_now())
    try:
        run(made)
    except HeadwayError as error:
        asyncio.run(made._note(str(error)))
    assert made.state().stage == "idle" and routing_of(fleet) == BEFORE
    assert re.search(why, made.state().reason), made.state().reason


def test_a_kill_switch_during_the_search_is_obeyed(fleet: Path) -> None:
    async def ask(kinds: Any) -> dict[str, Any]:
        AutopilotFiles(fleet).stop()
        return answer(proposal())

    made = pilot(fleet, ask)
    asyncio.run(made.look_now())
    run(made)
    assert (made.state().stage, made.state().stopped) == ("idle", True) and "is stopped" in made.state().reason


def test_the_kill_switch_works_by_command_with_or_without_a_gateway(
    fleet: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["autopilot", "status", str(fleet)]) == 2
    assert "no headway serve --autopilot has served fleet.yaml" in capsys.readouterr().err
    staged(fleet, Staging(0.0, 0.01, 0.0, 9))
    assert main(["autopilot", "stop", str(fleet)]) == 0
    made = pilot(fleet, asked(proposal()))
    run(made, {})
    assert made.state().past[0].reason == "stopped by the operator" and routing_of(fleet) == BEFORE
    asyncio.run(made.look_now())
    run(made)
    assert made.state().stage == "rolled back" and made.state().stopped
    assert main(["autopilot", "resume", str(fleet)]) == 0
    asyncio.run(made._next())
    assert not made.state().stopped
    capsys.readouterr()
    assert main(["autopilot", "status", str(fleet), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["past"][0]["outcome"] == "rolled back"


@pytest.mark.parametrize("wrong", [{"freeze": "Monday 8-10"}, {"time_zone": "Nowhere"}, {"allow": []}, {"at": "25:00"}])
def test_a_wrong_section_is_refused(wrong: dict[str, Any], fleet: Path) -> None:
    fleet.write_text(yaml.safe_dump(yaml.safe_load(fleet.read_text()) | {"autopilot": ALLOW | wrong}))
    with pytest.raises(HeadwayError, match=rf"autopilot.*{next(iter(wrong))}|autopilot: "):
        FleetFile(fleet, lambda read: read)


# With processes.

HALF = """
from headway.core.decision import Placement

class Half:
    \"\"\"Fails for every other request.\"\"\"

    def __init__(self):
        self.num = 0

    def route(self, request, view):
        self.num += 1
        if self.num % 2:
            raise ValueError("planted")
        return Placement(view.replicas[0].id)
"""


@pytest.fixture
def engines() -> Iterator[list[serving.Process]]:
    made = [serving.emulator(), serving.emulator()]
    with serving.closing(*made):
        yield made


def _traffic(front: serving.Process, is_over: threading.Event) -> None:
    while not is_over.is_set():
        try:
            chat(front, max_tokens=1).text()
        except OSError:
            time.sleep(0.05)


STAGES = {
    "nothing is tried": (None, None, False),
    "staged": ("staged", None, False),
    "to be promoted": ("judged", "promote", False),
    "half promoted": ("judged", "promote", True),
    "to be rolled back": ("judged", "roll back", False),
    "promoted": ("promoted", "promote", True),
    "rolled back": ("rolled back", "roll back", False),
}
"""Where the gateway is killed: the stage, the verdict, and whether the fleet file is the new version by then."""


@pytest.mark.ci
@pytest.mark.parametrize("killed_in", STAGES)
def test_after_kill_9_in_any_stage_the_fleet_file_is_the_old_or_the_promoted_version_and_records_are_kept(
    killed_in: str, tmp_path: Path
) -> None:
    stage, verdict, is_new = STAGES[killed_in]
    path = serving.fleet_file(
        tmp_path,
        ["http://127.0.0.1:1"],
        policies={"routing": BEFORE},
        autopilot={"allow": ["routing"], "at": None},
        slo={"e2e_s": 60},
        gateway={"admin_keys": [digest("root")], "records_period_s": 0.1, "hold_s": 0},
    )
    files, before = AutopilotFiles(path), path.read_text()
    if stage is not None:
        staged(path, Staging(0.0, 60.0, 0.0, 40), began_s=time.time())
        stored = files.load()
        files.save(
            msgspec.structs.replace(
                stored, state=msgspec.structs.replace(stored.state, stage=stage, verdict=verdict, gains=(0.3,))
            )
        )
        if is_new:
            files.use("fleet.v2.yaml")
    options = ("--autopilot", "--records", str(tmp_path / "records"), "--decisions", str(tmp_path / "log.jsonl"))
    outcome = {"promote": "promoted", "roll back": "rolled back"}.get(verdict or "", stage or "idle")
    for run in (1, 2):
        front = serving.gateway(path, *options)
        with serving.closing(front):
            reply = chat(front, max_tokens=1)
            assert reply.status == 503 and reply.text()  # no engine is there; it is recorded none the less
            until(lambda: send(front, "/autopilot", headers=ADMIN).json()["stage"] == outcome)  # noqa: B023
            until(lambda: len(run_parts.numbers(tmp_path / "records")) == run)  # noqa: B023
            front.kill()
    assert len(parts.load(tmp_path / "records")[0].workload["arrival_s"]) == 2
    after = path.read_text()
    assert after == ((tmp_path / "fleet.v2.yaml").read_text() if outcome == "promoted" else before)
    assert main(["autopilot", "status", str(path), "--json"]) == 0
    if stage == "judged":
        assert len(files.load().past) == 1 and f"is {outcome}" in (tmp_path / "log.jsonl").read_text()


@pytest.mark.ci
@pytest.mark.parametrize(
    ("before", "after", "outcome", "workers"),
    [
        ("own:Half", "least-loaded", "promoted", "2"),
        ("round-robin", "own:Half", "rolled back", "1"),
    ],
)
def test_a_change_goes_on_after_kill_9_and_is_judged_by_what_clients_got(
    before: str, after: str, outcome: str, workers: str, engines: list[serving.Process], tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(HALF)
    path = serving.fleet_file(
        tmp_path,
        [each.url for each in engines],
        policies={"routing": before},
        autopilot={"allow": ["routing"]},
        slo={"e2e_s": 60},
        gateway={"admin_keys": [digest("root")], "records_period_s": 0.5},
    )
    staged(path, Staging(0.1, 0.5, 0.0, 40), after, time.time())
    text = path.read_text()
    beside = ("--records", str(tmp_path / "records"), "--decisions", str(tmp_path / "log.jsonl"))
    options = ("--autopilot", *beside, "--workers", workers)

    def state(front: serving.Process) -> Any:
        return send(front, "/autopilot", headers=ADMIN).json()

    with serving.up(serving.gateway(path, *options), 2) as killed:
        assert state(killed)["stage"] == "staged"
        killed.kill()
    assert path.read_text() == text
    with serving.up(serving.gateway(path, *options), 2) as front:
        is_over, written = threading.Event(), front.process.stderr
        assert written is not None
        threading.Thread(target=written.read, daemon=True).start()  # the errors of the planted policy are long
        clients = [threading.Thread(target=_traffic, args=(front, is_over)) for _ in range(2)]
        for each in clients:
            each.start()
        try:
            until(lambda: state(front)["past"])
        finally:
            is_over.set()
            for each in clients:
                each.join()
        found = state(front)
        until(lambda: f"is {outcome}" in (tmp_path / "log.jsonl").read_text())
    assert found["stage"] == outcome == found["past"][0]["outcome"]
    assert (found["gain"] > 0.3) == (outcome == "promoted")
    assert routing_of(path) == (after if outcome == "promoted" else before)
