"""Agent traces in Mooncake's form: programs of calls that wait for each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway import scenario
from headway.config.scenario import assemble
from headway.config.strict_yaml import Places
from headway.core.errors import HeadwayError
from headway.core.request import Request, Segment
from headway.workload.agent_calls import read_calls
from headway.workload.generate import build, generate
from headway.workload.programs import Programs
from headway.workload.read import detect, read
from headway.workload.readers.shared import ReadOptions
from headway.workload.spec import TraceSpec, WorkloadSpec

LENGTHS = {"input_length": 40, "output_length": 5}
SESSIONS: list[dict[str, Any]] = [
    {"session_id": "a", "timestamp": 2000, "input_length": 32, "output_length": 8, "hash_ids": [0, 1]},
    {"session_id": "b", "created_time": 1000, "input_tokens": 20, "output_tokens": 5, "hash_ids": [0, 2]},
    {"session_id": "a", "delay": 500, "input_length": 50, "output_length": 8, "hash_ids": [0, 1, 3, 4]},
    {"session_id": "b", "timestamp": 4000, "input_length": 33, "output_length": 5, "hash_ids": [0, 6, 5]},
]
GRAPH: list[dict[str, Any]] = [
    {"request_id": "plan", "session_id": "main", "timestamp": 100, **LENGTHS},
    {
        "request_id": "end",
        "session_id": "main",
        "wait_for": ["left", "right"],
        "delay": 10,
        "tool_wait_ms": 40,
        **LENGTHS,
    },
    {"request_id": "left", "session_id": "one", "wait_for": ["plan"], "delay": 1000, **LENGTHS},
    {"request_id": "right", "session_id": "two", "wait_for": ["plan"], "tool_wait_ms": 2000, **LENGTHS},
    {"request_id": "other", "timestamp": 50, **LENGTHS},
]


def put(folder: Path, lines: list[dict[str, Any]]) -> Path:
    path = folder / "agents.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_calls_of_a_session_follow_each_other(tmp_path: Path) -> None:
    path = put(tmp_path, SESSIONS)
    assert detect(path) == "mooncake-agents"
    calls = read_calls(path, ReadOptions())
    assert calls.offsets.tolist() == [0, 2, 4] and calls.after == [(), (0,), (), (2,)]
    assert calls.rows.arrival_s.tolist() == [0.0, 0.0, 1.0, 1.0], "session b starts first, a second before"
    assert calls.delay_s.tolist() == [0.0, 3.0, 0.0, 0.5], "without a delay, the timestamps are that far apart"
    assert calls.rows.prompt_tokens.tolist() == [20, 33, 32, 50]
    assert calls.segments(1) == [
        (Segment(0, 16), Segment(1, 16)),
        (Segment(0, 16), Segment(1, 16), Segment(3, 16), Segment(4, 2)),
    ], "hash blocks of 16 tokens are the ones that fit all lines"


def test_calls_wait_for_others(tmp_path: Path) -> None:
    calls = read_calls(put(tmp_path, GRAPH), ReadOptions())
    assert calls.offsets.tolist() == [0, 1, 5] and calls.after == [(), (), (1,), (1,), (2, 3)]
    assert np.allclose(calls.delay_s, [0, 0, 1, 2, 0.05])
    flat = read(put(tmp_path, GRAPH))
    assert np.allclose(flat.arrival_s, [0, 0.05, 1.05, 2.05, 2.1]) and "as if answers" in flat.notes[0]
    assert flat.column("session_id").tolist() == [0, 1, 1, 1, 1]


def test_a_program_is_played_call_by_call(tmp_path: Path) -> None:
    source = build(WorkloadSpec(trace=str(put(tmp_path, SESSIONS))), 0)
    assert isinstance(source, Programs) and source.num_requests == 4
    first = source.pop(Request)
    assert (first.arrival_s, first.session_id, first.prompt_tokens) == (0.0, 0, 20)
    assert source.peek_s() == 1.0
    records = scenario.run(
        assemble(
            {
                "workload": {"trace": str(tmp_path / "agents.jsonl")},
                "fleet": [{"model": "llama-3.1-8b", "gpu": "h100", "engine": "vllm-0.15"}],
            },
            Places(),
            Path(),
        )
    )
    assert len(records.records.requests["end_s"]) == 4 and records.summary.cached_prompt_share == pytest.approx(
        (16 + 16 + 32) / 135
    )


def test_options_choose_and_move_whole_programs(tmp_path: Path) -> None:
    path = str(put(tmp_path, SESSIONS))
    late = generate(WorkloadSpec(trace=TraceSpec(path, from_s=0.5, rate_scale=2.0)), 0)
    assert late.arrival_s.tolist() == [0.25, 0.75] and late.prompt_tokens.tolist() == [32, 50]
    moved = generate(WorkloadSpec(trace=path, arrivals=0.1, tenants={"x": 1.0, "y": 1.0}), 3)
    gaps = {each: np.diff(moved.arrival_s[moved.column("session_id") == each])[0] for each in (0, 1)}
    assert gaps == pytest.approx({0: 3.0, 1: 0.5})
    tenants = {(session, tenant) for session, tenant in zip(*map(moved.column, ("session_id", "tenant")), strict=True)}
    assert len(tenants) == 2, "the calls of a program are of one tenant"


BAD: dict[str, tuple[list[dict[str, Any]], str]] = {
    "unknown call": ([{**GRAPH[0], "wait_for": ["plam"]}], "line 1: wait_for: 'plam'; expected a request_id of"),
    "loop": (
        [{"request_id": "a", "wait_for": ["b"], **LENGTHS}, {"request_id": "b", "wait_for": ["a"], **LENGTHS}],
        "line 1: wait_for: a loop",
    ),
    "inner loop": (
        [GRAPH[0], {**GRAPH[2], "wait_for": ["plan", "right"]}, {**GRAPH[3], "wait_for": ["left"]}],
        "line 2: wait_for: a loop; expected a call that waits for none",
    ),
    "twice": ([GRAPH[0], GRAPH[0]], "line 2: request_id: 'plan' is in a line above, too"),
    "no start": ([{"session_id": "a", **LENGTHS}], "line 1: timestamp: missing"),
    "length": ([{**SESSIONS[0], "output_length": 0}], "line 1: output_length: 0; expected 1 to"),
    "delay": ([SESSIONS[0], {**SESSIONS[2], "delay": -5}], "line 2: delay and tool_wait_ms: -5.0; expected"),
    "hashes": ([SESSIONS[0], {**SESSIONS[2], "hash_ids": [1]}], "line 1: 2 hash_ids for 32 tokens; no usual size"),
    "nameless": ([{"session_id": 1, "timestamp": 1, "wait_for": ["a"], **LENGTHS}], "line 1: wait_for: expected a"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_makes_no_sense_is_told_by_line(name: str, tmp_path: Path) -> None:
    lines, message = BAD[name]
    path = put(tmp_path, lines)
    with pytest.raises(HeadwayError, match=r"^[^\n]*$") as error:
        read(path)
    assert str(error.value).startswith(f"{path}: {message}")


def test_bad_lines_are_left_out(tmp_path: Path) -> None:
    found = read(put(tmp_path, [*SESSIONS, {"session_id": "a"}]), skip_bad=True)
    assert len(found) == 4 and "line 5: input_length: 0" in found.notes[0]


def test_chats_of_bailian_are_sessions(tmp_path: Path) -> None:
    lines = [
        {"chat_id": 7, "parent_chat_id": -1, "timestamp": 61.5, "input_length": 20, "output_length": 3,
         "hash_ids": [8, 9]},
        {"chat_id": 8, "parent_chat_id": -1, "timestamp": 62.0, "input_length": 5, "output_length": 3,
         "hash_ids": [4]},
        {"chat_id": 9, "parent_chat_id": 7, "timestamp": 63.5, "input_length": 33, "output_length": 3, "turn": 2,
         "hash_ids": [8, 10, 11]},
    ]  # fmt: skip
    path = put(tmp_path, lines)
    assert detect(path) == "bailian"
    found = read(path)
    assert found.arrival_s.tolist() == [0, 0.5, 2] and found.column("session_id").tolist() == [7, 8, 7]
    assert [each.tokens for each in Request(*list(found.tuples())[2]).prefix] == [16, 16, 1]
