"""Explanations of records and decisions that are written by hand: what is known, and what is expected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from headway.cli import main
from headway.control.decisions import Decision, OfferedReplica
from headway.control.live import NEVER, Live
from headway.core.decision import Placement
from headway.core.errors import HeadwayError
from headway.core.record import Cause, Outcome, ReplicaRecord
from headway.diagnosis import explain, routers, slowest
from headway.diagnosis.history import DecisionLog, History, nearest
from headway.diagnosis.history import read as read_history
from headway.gateway.telemetry.recording import Recording
from headway.records import parts
from headway.records.part_writer import PartWriter

FLEET = """
fleet:
  - {name: pool, model: qwen3-8b, gpu: h100, engine: vllm-0.15, endpoints: ["http://127.0.0.1:1", "http://127.0.0.1:2"]}
policies: {routing: {name: least-kv}}
"""
STARTED_S = 1_700_000_000.0


class Run:
    """A gateway's recording, with requests as a test says."""

    def __init__(self, folder: Path, started_s: float = STARTED_S, num_replicas: int = 2) -> None:
        self._writer = PartWriter(folder, {"fleet": FLEET})
        self._recording = Recording(enabled=True, write=self._writer.write)
        self._recording._started_s = started_s
        self._replicas = [
            ReplicaRecord(
                i, "pool", "qwen3-8b", "h100", "", 1, 2.0, 700.0, 400_000, 64, ((0.0, 99.0),), name=f"pool/{i}"
            )
            for i in range(num_replicas)
        ]
        self._num = 0

    def ends(
        self, name: str, arrival_s: float, placed_s: float, first_s: float, end_s: float, *, replica: int = 0,
        prompt: int = 100, tokens: int = 11, attempts: int = 1, outcome: Outcome = Outcome.FINISHED, gap_s: float = 0.0,
        stays: tuple[tuple[int, float, float, Cause], ...] = (), tenant: str = "",
    ) -> None:  # fmt: skip
        live = Live(self._num, arrival_s, prompt, tokens, model="qwen3-8b", tenant=tenant)
        live.generated_tokens = tokens
        recorder = self._recording.recorder
        recorder.requests.write((
            live.id, outcome, attempts, 0, replica, placed_s, NEVER, first_s, first_s, end_s, tokens, 0, NEVER, 0, -1,
            NEVER,
        ))  # fmt: skip
        for number, (at, from_s, to_s, cause) in enumerate(stays):
            recorder.segments.write((live.id, at, number, -1, from_s, from_s, NEVER, 0, 0, to_s, cause))
        self._recording.add(live, "", name, gap_s, None)
        self._num += 1

    def close(self) -> None:
        self._recording.flush(self._replicas, 99.0)
        self._writer.close()


def placed(name: str, time_s: float, choice: int, loads: list[tuple[int, int]], **more: Any) -> Decision:
    """A placement, with the requests in flight and waiting of each replica."""
    offered = tuple(
        OfferedReplica(i, in_flight, waiting, 0.5, 0.25, f"pool/{i}", in_flight, 100 * in_flight, 0, 100 + i, 1000)
        for i, (in_flight, waiting) in enumerate(loads)
    )
    return Decision(
        STARTED_S + time_s, "placed", name, "qwen3-8b", 0, "answering", choice=choice, replicas=offered, **more
    )


def log(path: Path, *decisions: Decision) -> Path:
    path.write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in decisions))
    return path


@pytest.fixture
def day(tmp_path: Path) -> Path:
    run = Run(tmp_path / "records")
    run.ends("held", 1.0, 6.0, 6.1, 6.2)
    run.ends(
        "failed",
        2.0,
        2.0,
        9.1,
        9.2,
        replica=1,
        attempts=2,
        stays=((0, 2.0, 8.0, Cause.CRASHED), (1, 9.0, 9.2, Cause.FINISHED)),
    )
    run.ends("prompt", 20.0, 20.0, 21.6, 21.7, prompt=30_000)
    run.ends("queued", 30.0, 30.0, 38.0, 38.1)
    run.ends("answer", 40.0, 40.0, 40.1, 48.1, tokens=1001)
    run.ends("slow", 50.0, 50.0, 50.1, 58.1)
    run.ends("crowded", 55.0, 55.0, 55.1, 63.1, tokens=601)
    run.ends("stall", 60.0, 60.0, 60.1, 68.1, tokens=101, gap_s=7.0)
    run.ends("whole", 70.0, 70.0, NEVER, 79.0, tokens=101)
    run.ends("refused", 80.0, NEVER, NEVER, 84.0, replica=-1, tokens=0, outcome=Outcome.REJECTED)
    run.close()
    log(
        tmp_path / "decisions.jsonl",
        placed("held", 6.0, 0, [(3, 0), (9, 9)], held_s=5.0, why="no replica has room"),
        placed("failed", 2.0, 0, [(1, 0), (2, 0)]),
        placed("failed", 9.0, 1, [(1, 0), (2, 0)][1:], attempt=1),
        placed("queued", 30.0, 0, [(7, 5), (8, 0)], scores=((0, 1.5), (1, 2.5))),
    )
    return tmp_path


CAUSES = {
    "held": ("held", 5.0, "the gateway held it: no replica has room"),
    "failed": ("failover", 7.0, "it failed once, at pool/0, and went on elsewhere"),
    "prompt": ("first token", 1.6, "its prompt of 30,000 tokens, which takes"),
    "queued": ("first token", 8.0, "times as long as expected; whether it queued in the engine is unknown; 5 requests"),
    "answer": ("decode", 8.0, "1,001 output tokens, for which"),
    "slow": ("decode", 8.0, "11 output tokens, "),
    "crowded": ("decode", 8.0, "601 output tokens, 1.9 times as long as expected"),
    "stall": ("stall", 6.99, "no token came for 7 s"),
    "whole": ("engine", 9.0, "100 prompt and 101 output tokens, for which"),
    "refused": ("held", 4.0, "the gateway held it, and never placed it"),
}


class First:
    __slots__ = ()

    def route(self, request: Any, view: Any) -> Placement:
        return Placement(view.replicas[0].id)


class InTurn(First):
    __slots__ = ("num",)

    def __init__(self) -> None:
        self.num = 0

    def route(self, request: Any, view: Any) -> Placement:
        self.num += 1
        return super().route(request, view)


@pytest.mark.parametrize("name", CAUSES)
def test_the_biggest_term_and_its_cause(day: Path, name: str) -> None:
    found = explain(read_history(day / "records"), name, day / "decisions.jsonl")
    biggest, seconds, cause = CAUSES[name]
    times = {term.term: term.seconds for term in found.terms}
    assert found.biggest == biggest and times[biggest] == pytest.approx(seconds, abs=0.005)
    assert cause in found.cause
    assert sum(value or 0.0 for value in times.values()) == pytest.approx(found.e2e_s)
    assert found.arrived is not None and found.arrived.startswith("2023-11-14T22:13:2" if name == "held" else "2023")


def test_expectations_grow_with_the_prompt_and_with_company(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for i, prompt in enumerate((1000, 8000)):
        run.ends(f"alone {prompt}", 10.0 * i, 10.0 * i, 10.0 * i + 1, 10.0 * i + 5, prompt=prompt, tokens=101)
    for i in range(5):
        run.ends(f"crowd {i}", 50.0, 50.0 + 1e-6 * i, 51.0, 55.0, prompt=8000, tokens=101)
    run.ends("elsewhere", 50.0, 50.1, 51.0, 55.0, prompt=8000, tokens=101, replica=1)
    run.close()
    history = read_history(tmp_path)

    def expected(name: str) -> tuple[float, float]:
        found = {term.term: term.expected_s for term in explain(history, name).terms}
        assert found["held"] == 0
        return found["first token"] or 0.0, found["decode"] or 0.0

    small, big, last, other = map(expected, ("alone 1000", "alone 8000", "crowd 4", "elsewhere"))
    assert 0 < small[0] < big[0] < last[0] and 0 < small[1] < big[1] < last[1]
    assert other == pytest.approx(big), "of an idle replica"


def test_routers_are_rehearsed_from_what_was_logged(day: Path) -> None:
    """Those that need no more choose as they do in a fleet with these counts; the others say what they lack."""
    decisions = explain(read_history(day / "records"), "queued", day / "decisions.jsonl").decisions
    assert decisions is not None
    (decision,) = decisions
    assert [(each.replica, each.score, each.is_chosen) for each in decision.candidates] == [
        ("pool/0", 1.5, True),
        ("pool/1", 2.5, False),
    ]
    others = {each.router: each for each in decision.others}
    assert others["least-loaded"].replica == "pool/1", "8 requests in flight, and not 7 with 5 that wait"
    assert others["least-kv"].replica == "pool/0"
    assert others["jsq-tokens"].replica == "pool/0" and others["session-affinity"].replica == "pool/1"
    assert others["random"].unknown == "draws at random"
    assert others["round-robin"].unknown == "remembers earlier requests"
    assert others["prefix-affinity"].unknown == "reads what is not recorded: the request's prefix"
    assert all((each.replica is None) == bool(each.unknown) for each in decision.others)
    assert not any("oracle" in name for name in others)


def test_a_router_without_a_dictionary_is_rehearsed_as_well(day: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As compiled classes are, and those with slots."""
    monkeypatch.setattr(routers, "ROUTERS", {"first": First, "in turn": InTurn})
    decisions = explain(read_history(day / "records"), "queued", day / "decisions.jsonl").decisions
    assert decisions is not None
    first, in_turn = decisions[0].others
    assert (first.replica, in_turn.unknown) == ("pool/0", "remembers earlier requests")


def test_of_requests_with_one_id_the_last_is_explained(tmp_path: Path) -> None:
    run = Run(tmp_path / "records")
    for at_s in (1.0, 30.0, 60.0):
        run.ends("again", at_s, at_s, at_s + 1, at_s + 2)
    run.close()
    path = log(
        tmp_path / "log", *(placed("again", at_s, int(at_s) % 2, [(1, 0), (1, 0)]) for at_s in (1.0, 30.0, 60.0))
    )
    found = explain(read_history(tmp_path / "records"), "again", path)
    assert found.row == 2 and found.same_id == (0, 1) and found.decisions is not None
    assert [decision.replica for decision in found.decisions] == ["pool/0"], "not those of the others"


def test_replicas_of_a_gateway_that_was_started_again_have_their_own_numbers(tmp_path: Path) -> None:
    for i in range(2):
        run = Run(tmp_path / "records", STARTED_S + 1000 * i)
        run.ends(f"run {i}", 1.0, 1.0, 2.0, 3.0, replica=1)
        run.close()
    path = log(tmp_path / "log", placed("run 1", 1001.0, 1, [(4, 0), (2, 0)]))
    found = explain(read_history(tmp_path / "records"), "run 1", path)
    assert found.replica == "pool/1" and found.decisions is not None
    assert (
        found.decisions[0].replica == "pool/1"
        and {each.router: each.replica for each in found.decisions[0].others}["least-loaded"] == "pool/1"
    )


def test_parts_of_an_older_version_have_no_ids_and_join_those_that_do(tmp_path: Path) -> None:
    for i in range(2):
        run = Run(tmp_path, STARTED_S + 1000 * i)
        run.ends("named", 1.0, 1.0, 2.0, 3.0, tenant="ann", gap_s=0.5)
        run.close()
    first = tmp_path / "parts" / "000001" / "arrivals.parquet"
    table = pa.parquet.read_table(first)
    older = [name for name in table.column_names if name not in ("request_id", "longest_gap_s", "resumed_s", "lora")]
    pa.parquet.write_table(table.select(older), first)
    both = read_history(tmp_path)
    assert [both.request_id(row) for row in (0, 1)] == ["0", "named"] and both.records.tenants == ("ann",)
    assert [both.times(row).longest_gap_s for row in (0, 1)] == [0.0, 0.5]
    assert parts.finish(tmp_path) is not None
    again = read_history(tmp_path)
    assert [again.request_id(row) for row in (0, 1)] == ["0", "named"]
    assert explain(again, "named").row == 1


def test_a_log_may_be_rotated_torn_and_short_of_lines(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log(tmp_path / "log.1", placed("a", 1.0, 0, [(0, 0)]))
    rest = b'{"what":"dropped","num":3}\n' + msgspec.json.encode(placed("a", 3.0, 0, [(0, 0)]))[:80]
    path.write_bytes(msgspec.json.encode(placed("a", 2.0, 0, [(0, 0)])) + b"\n" + rest)
    found = DecisionLog(path, ["a"])
    assert [each.time_s - STARTED_S for each in found.of("a", None, None)] == [1.0, 2.0] and found.num_dropped == 3
    path.write_bytes(b'{"request":"a"}\n')
    with pytest.raises(HeadwayError, match=r"log: line 1: not a line of a decision log"):
        DecisionLog(path, ["a"])
    with pytest.raises(HeadwayError, match=r"none: cannot be read"):
        DecisionLog(tmp_path / "none", ["a"])


def test_an_unknown_id_is_an_error_with_the_nearest(day: Path) -> None:
    history = read_history(day / "records")
    with pytest.raises(HeadwayError, match=r"no request 'hold'; the nearest are held"):
        explain(history, "hold")
    with pytest.raises(HeadwayError, match=r"no request 'zzzzzz'; no id is like it"):
        explain(history, "zzzzzz")
    assert nearest("chat-1", ["other", "chat-17", "chat-2"])[0] == "chat-17"


def test_the_slowest_by_each_latency(day: Path) -> None:
    history = read_history(day / "records")
    assert [each.request for each in slowest(history, 2)] == ["whole", "queued"]
    assert [each.request for each in slowest(history, 2, "ttft")] == ["queued", "failed"]
    assert [each.request for each in slowest(history, 1, "tpot")] == ["slow"]
    assert len(slowest(history, 99)) == 10 and len(slowest(history, 99, "ttft")) == 8, "two have no first token"


def test_the_command_prints_one_screen_or_json(day: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records, decisions = str(day / "records"), str(day / "decisions.jsonl")
    assert main(["why", "queued", "--records", records, "--decisions", decisions]) == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) <= 40 and "> pool/0" in text and "router: least-kv" in text
    assert "queue " in text and "unknown" in text and "queue + prefill" in text
    assert main(["why", "--slowest", "3", "--records", records]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and lines[1].startswith("whole")
    assert main(["why", "queued", "--records", records, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["decisions"] is None and {"term": "queue", "seconds": None, "expected_s": None} in found["terms"]
    for wrong in (["why", "--records", records], ["why", "a"], ["why", "a", "--slowest", "3", "--records", records]):
        assert main(wrong) == 2 and "expected" in capsys.readouterr().err


def test_a_fleet_file_that_cannot_be_used_is_said(day: Path, tmp_path: Path) -> None:
    history = read_history(day / "records")
    history.fleet_text = "fleet: [{name: pool, model: no-such-model, gpu: h100}]"
    found = explain(history, "held")
    assert all(term.expected_s in (None, 0) for term in found.terms)
    assert any(note.startswith("nothing is expected") and "--fleet" in note for note in found.notes)
    file = tmp_path / "fleet.yaml"
    file.write_text(FLEET)
    assert any(term.expected_s for term in explain(history, "held", fleet=file).terms)
    file.write_text(history.fleet_text)
    with pytest.raises(HeadwayError, match="no-such-model"):
        explain(history, "held", fleet=file)


def test_records_without_a_request_are_no_error(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.close()
    history = read_history(tmp_path)
    assert isinstance(history, History) and slowest(history, 3) == []
