"""Planner processes: plans that fail or take long, and scaling that follows them with local processes."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

import processes
import serving
from headway import serving as composition
from headway.core.errors import HeadwayError
from headway.planning.cascade import replan as replanfile
from processes import running
from serving import chat, until

pytest.importorskip("httptools")
from headway.gateway.workers.planner_process import PlannerProcess, PlannerProcesses
from planner_work import Tally


def _answer(clerk: PlannerProcess, number: int) -> Any:
    clerk.start(number)
    until(lambda: not clerk.is_busy)
    return clerk.result()


def test_the_process_keeps_its_state_and_survives_a_failed_plan(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clerks = PlannerProcesses()
    clerk = clerks(Tally())
    try:
        total, there = _answer(clerk, 3)
        assert total == 3 and there != os.getpid()
        assert _answer(clerk, -1) is None
        words = "a plan could not be made, and the one before stays: HeadwayError: no plan for -1"
        assert words in caplog.text
        assert _answer(clerk, -1) is None and caplog.text.count(words) == 1, "the same is said once"
        assert _answer(clerk, -2) is None and "no plan for -2" in caplog.text
        assert _answer(clerk, 4) == (7, there)
        assert _answer(clerk, 0) is None and "its process has ended" in caplog.text
        assert _answer(clerk, 5)[0] == 5, "another process, which begins anew"
    finally:
        clerks.close()


def test_a_process_that_hangs_is_killed_and_the_next_plan_made(caplog: pytest.LogCaptureFixture) -> None:
    planner = PlannerProcess(Tally(), limit_s=serving.PATIENCE_S)
    try:
        _, pid = _answer(planner, 3)
        os.kill(pid, signal.SIGSTOP)
        planner.limit_s = 0.1
        assert _answer(planner, 4) is None and "took more than 0.1 s" in caplog.text
        planner.limit_s = serving.PATIENCE_S
        assert _answer(planner, 5)[0] == 5
    finally:
        planner.close()


def test_work_that_cannot_be_pickled_fails_the_plan(caplog: pytest.LogCaptureFixture) -> None:
    clerk = PlannerProcesses()(lambda number: number)
    assert _answer(clerk, 1) is None and "a plan could not be made" in caplog.text


LINES = {"step_s": 1.0, "period_s": 2.0, "startup_s": 0.5, "tps": {"pool": 60.0}}


@contextmanager
def clients(front: serving.Process, num: int, **options: Any) -> Iterator[None]:
    """So many clients, each of which asks again as soon as it has its answer."""
    is_over = threading.Event()

    def send() -> None:
        while not is_over.is_set():
            answer = chat(front, "word " * 100, max_tokens=20, **options).json()
            assert answer["usage"]["completion_tokens"] == 20

    threads = [threading.Thread(target=send) for _ in range(num)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


@pytest.mark.ci
def test_lt_i_follows_its_plans_up_and_down(tmp_path: Path) -> None:
    """An hour of two seconds: demand that the gateway has seen, forecast and planned for, is served by processes."""
    pool = processes.pool(3)
    scaling = {"name": "lt-i", "plan": LINES, "planner": "ilp", "forecaster": "last-value", "interval_s": 0.2}
    with serving.up(
        serving.gateway(serving.fleet_file(tmp_path, [], pool=pool, policies={"scaling": scaling})), 1
    ) as front:
        with clients(front, 2):
            serving.all_up(front, 3)
        serving.all_up(front, 1)
        until(lambda: len(running(*pool["processes"]["ports"])) == 1)
        assert "a plan was made in" in front.stop()


class Log:
    """What a gateway writes, as it comes."""

    def __init__(self, front: serving.Process) -> None:
        self.lines: list[str] = []
        assert front.process.stderr is not None
        self._pipe = front.process.stderr
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with suppress(ValueError):  # closed
            while line := self._pipe.readline():
                self.lines.append(line.decode())

    def count(self, words: str) -> int:
        return sum(words in line for line in self.lines)


@pytest.mark.ci
def test_lt_ua_scales_only_as_far_as_memory_needs(tmp_path: Path) -> None:
    """The plan wants three; KV caches are next to empty, so none is started."""
    scaling = {"name": "lt-ua", "plan": LINES, "interval_s": 0.2, "cooldown_s": 0.2, "last_s": 1.0}
    with serving.up(
        serving.gateway(serving.fleet_file(tmp_path, [], pool=processes.pool(3), policies={"scaling": scaling})), 1
    ) as front:
        log = Log(front)
        with clients(front, 2):
            until(lambda: log.count("a plan was made in") >= 3)
        assert serving.send(front, "/health").json()["replicas"] == 1


@pytest.mark.ci
def test_streams_continue_during_planning_and_the_process_ends_with_the_gateway(tmp_path: Path) -> None:
    """What a replica serves is found by simulation here, which takes seconds of a core; the gateway is killed."""
    scaling = {"name": "lt-i", "plan": {**LINES, "tps": {}}, "planner": "ilp", "interval_s": 0.1}
    with serving.up(
        serving.gateway(serving.fleet_file(tmp_path, [], pool=processes.pool(2), policies={"scaling": scaling})), 1
    ) as front:
        log = Log(front)
        stream = chat(front, ignore_eos=True, max_tokens=20_000, stream=True)
        events = stream.events()
        next(events)
        until(lambda: _clerks_of(front.process.pid))
        for _ in range(50):
            next(events)
        assert not log.count("a plan was made in")
        while not log.count("a plan was made in"):
            next(events)
        stream.close()
        (clerk,) = _clerks_of(front.process.pid)
        os.kill(front.process.pid, signal.SIGKILL)
        until(lambda: not Path(f"/proc/{clerk}").exists())


def _clerks_of(pid: int) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == pid and "headway.gateway.workers.planner_process" in (folder / "cmdline").read_text():
                    found.append(int(folder.name))
            except OSError:
                continue
    return found


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        ("lt-i", "lt-i knows of no pool what a replica serves, and would leave them all as they are"),
        ({"name": "lt-ua", "plan": {"step_s": 60.0}}, "lt-ua knows of no pool"),
        ({"name": "lt-i", "plan": LINES, "forecaster": "ets-leak"}, "is fitted on demand that is still to come"),
    ],
)
def test_a_scaler_without_the_inputs_of_its_plans_is_refused(tmp_path: Path, scaling: Any, words: str) -> None:
    path = serving.fleet_file(tmp_path, [], pool=processes.pool(2), policies={"scaling": scaling})
    with pytest.raises(HeadwayError) as error:
        composition.load(path)
    assert words in str(error.value) and str(path) in str(error.value)


def test_a_scaler_that_learns_what_a_replica_serves_needs_no_plan(tmp_path: Path) -> None:
    path = serving.fleet_file(tmp_path, [], pool=processes.pool(2), policies={"scaling": "headway"})
    composition.load(path)


SMALL, LARGE = "qwen3-8b", "llama-3.1-8b"


def _cascade(folder: Path, *options: str, **replan: Any) -> Path:
    """Two models on four GPUs, whose answers score 70 and 90, and of which the small one's will do at first."""
    pools, first = [], processes.ports(8)[0]
    for i, (name, model, sure) in enumerate((("small", SMALL, "0.7"), ("large", LARGE, "0.9"))):
        command = [sys.executable, "-m", "headway", "emulate", "--model", model, "--gpu", "h100", "--port", "{port}"]
        how = {
            "command": [*command, "--confidence", sure, *options],
            "ports": [first + 4 * i, first + 4 * i + 3],
            "stop_s": 2.0,
            "keep_env": ["PYTHONPATH"],
            "env": {"CUDA_VISIBLE_DEVICES": "{gpus}"},
        }
        pools.append({"name": name, "model": model, "gpu": "h100", "engine": "vllm-0.15", "processes": how})
    spec = {"quality": 75, "every_s": 2, "audit_share": 0.5, "least_audited": 5, "num_gpus": 4, "interval_s": 0.2}
    cascade = {
        "name": "best",
        "models": [SMALL, LARGE],
        "policy": {"name": "thresholds", "thresholds": 60},
        "judge": {"by": "confidence"},
        "replan": {**spec, **replan},
    }
    path = folder / "fleet.yaml"
    path.write_text(yaml.safe_dump({"fleet": pools, "cascade": cascade, "gateway": {"scrape_period_s": 0.1}}))
    return path


def _gpus(pid: int) -> list[str]:
    words = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return next(word for word in words if word.startswith("CUDA_VISIBLE_DEVICES=")).partition("=")[2].split(",")


@pytest.mark.ci
def test_a_replanned_cascade_replaces_replicas_by_ones_of_another_shape(tmp_path: Path) -> None:
    """Few requests, then more. Audited requests are judged at both models, so it shows that 70 is less than 75."""
    path = _cascade(tmp_path, "--tp", "{tp}")
    first = yaml.safe_load(path.read_text())["fleet"][0]["processes"]["ports"][0]
    with serving.up(serving.gateway(path), 2) as front:
        log, before = Log(front), set(running(first, first + 7).values())
        with clients(front, 1, model="best"):
            until(lambda: serving.metric(front, "headway_judgements_total") > 30)
            with clients(front, 4, model="best"):
                until(lambda: log.count("planned anew at"))
                until(lambda: set(running(first, first + 7).values()) - before)
                until(lambda: chat(front, model="best", max_tokens=5).json()["model"] == LARGE)
        plan = next(line for line in log.lines if "planned anew at" in line)
        assert "thresholds 60" not in plan and "+" in plan.partition(";")[2]
        until(lambda: serving.send(front, "/health").json()["up"] == len(running(first, first + 7)))
        used = [gpu for pid in running(first, first + 7).values() for gpu in _gpus(pid)]
        assert len(used) == len(set(used)) and set(used) <= set("0123"), "no GPU has two"
        assert log.count("a plan was made in") >= 1


@pytest.mark.ci
def test_scaling_acts_on_a_cascades_pools_between_plans(tmp_path: Path) -> None:
    """Only the small model is asked. It gets the GPUs that the plan leaves free, and gives them back."""
    path = _cascade(tmp_path, every_s=3600)
    made = yaml.safe_load(path.read_text())
    scaling = {"name": "target-utilization", "kv_use": None, "in_flight": 2, "interval_s": 0.2, "stabilization_s": 1}
    path.write_text(yaml.safe_dump(made | {"policies": {"scaling": scaling}}))
    first = made["fleet"][0]["processes"]["ports"][0]
    with serving.up(serving.gateway(path), 2) as front:
        with clients(front, 8, model=SMALL):
            serving.all_up(front, 4)
            assert (len(running(first, first + 3)), len(running(first + 4, first + 7))) == (3, 1)
        serving.all_up(front, 2)
        until(lambda: len(running(first, first + 7)) == 2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"endpoints": ["http://127.0.0.1:1"], "processes": None}, "cascade.replan: fleet[1] has `endpoints`, where"),
        ({"ports": 2}, "fleet[1].processes.ports: 2 of them; expected 4, as many replicas as a plan may have"),
    ],
)
def test_pools_on_which_a_plan_cannot_be_rolled_out_are_refused(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    path = _cascade(tmp_path)
    made = yaml.safe_load(path.read_text())
    pool = made["fleet"][1]
    if "ports" in change:
        pool["processes"]["ports"][1] = pool["processes"]["ports"][0] + change["ports"] - 1
    else:
        pool |= change
    path.write_text(yaml.safe_dump(made))
    with pytest.raises(HeadwayError) as error:
        composition.load(path)
    assert words in str(error.value)


def test_shapes_that_no_process_can_start_are_reported(tmp_path: Path) -> None:
    for options, words in (((), "{tp} and {pp} are nowhere"), (("--tp", "{tp}"), "{pp} is nowhere")):
        chosen, _ = composition.load(_cascade(tmp_path, *options))
        lines = replanfile.start_notes(chosen.spec, chosen.fleet)
        assert lines[0] == "planned anew every 2 s if need be, for quality 75 on 4 GPUs"
        assert len(lines) == 3 and all(words in line for line in lines[1:])
        assert ("small-tp2" in {pool.name for pool in chosen.fleet.pools}) == bool(options)
