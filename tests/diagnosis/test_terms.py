"""The terms of a request's time: their sum is the whole, whatever happened; and worked examples by hand."""

from __future__ import annotations

from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

import headway as hw
from headway.core.record import Cause
from headway.diagnosis.history import History
from headway.diagnosis.terms import STALL_S, TERMS, Stay, Times, terms

DONE, FAILED, MOVED, PREEMPTED = Cause.FINISHED, Cause.CRASHED, Cause.MOVED, Cause.PREEMPTED


def stay(from_s: float, to_s: float, cause: Cause = DONE, **more: float) -> Stay:
    return Stay(0, from_s, to_s, cause, **more)


EXAMPLES = {
    "held, then a stream": (
        Times(0, 3, 5, 11), [stay(2, 5)], {"held": 2, "first token": 1, "decode": 2},
    ),
    "the engine says when it began": (
        Times(0, 3, 5, 11), [stay(1, 5, admitted_s=2.5)], {"held": 1, "queue": 1.5, "prefill": 0.5, "decode": 2},
    ),
    "not streamed": (Times(0, nan, 5, 11), [stay(1, 5)], {"held": 1, "engine": 4}),
    "never placed": (Times(1, nan, 5, 0), [], {"held": 4}),
    "failed before a token": (
        Times(0, 6, 8, 11), [stay(0, 4, FAILED), stay(5, 8)],
        {"held": 0, "failover": 5, "first token": 1, "decode": 2},
    ),
    "failed, and refused": (Times(0, nan, 7, 0), [stay(1, 4, FAILED)], {"held": 1, "failover": 6}),
    "failed in its stream": (
        Times(0, 1, 9, 11), [stay(0, 4, FAILED), stay(5, 9, resumed_s=7)],
        {"held": 0, "failover": 3, "first token": 1, "decode": 5},
    ),
    "moved in its stream": (
        Times(0, 1, 9, 11), [stay(0, 4, MOVED), stay(4, 9, resumed_s=4.5)],
        {"held": 0, "move": 0.5, "first token": 1, "decode": 7.5},
    ),
    "prefilled by another replica": (
        Times(0, 3, 4, 11), [stay(0, 2, MOVED), stay(2, 4)], {"held": 0, "move": 0, "first token": 3, "decode": 1},
    ),
    "preempted in its stream": (
        Times(0, 1, 9, 11), [stay(0, 4, PREEMPTED), stay(6, 9, admitted_s=6.5, resumed_s=7)],
        {"held": 0, "preemption": 3, "first token": 1, "decode": 5},
    ),
    "a gap": (
        Times(0, 1, 12, 12, longest_gap_s=6.0), [stay(0, 12)],
        {"held": 0, "first token": 1, "decode": 5.5, "stall": 5.5},
    ),
    "gaps that are alike": (
        Times(0, 1, 12, 12, longest_gap_s=1.5), [stay(0, 12)], {"held": 0, "first token": 1, "decode": 11},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EXAMPLES)
def test_terms_are_those_of_the_example(name: str) -> None:
    times, stays, expected = EXAMPLES[name]
    found = terms(times, stays)
    assert found == pytest.approx({term: value for term, value in expected.items() if value or term == "held"})


seconds = st.floats(0, 100, allow_nan=False)
maybe = st.one_of(seconds, st.just(nan))


@st.composite
def requests(draw: st.DrawFn) -> tuple[Times, list[Stay]]:
    """Any records, also such as nobody would write."""
    arrival_s, end_s = sorted((draw(seconds), draw(seconds)))
    stays = [
        Stay(0, draw(seconds), draw(seconds), draw(st.sampled_from(list(Cause))), draw(maybe), draw(maybe))
        for _ in range(draw(st.integers(0, 4)))
    ]
    first_s = draw(st.one_of(st.just(nan), st.floats(arrival_s, end_s)))
    tokens, gap_s = draw(st.integers(0, 50)), draw(st.one_of(seconds, st.just(inf)))
    return Times(arrival_s, first_s, end_s, tokens, gap_s), sorted(stays, key=lambda each: (each.from_s, each.to_s))


@given(requests())
def test_terms_add_up_to_the_whole(request: tuple[Times, list[Stay]]) -> None:
    times, stays = request
    found = terms(times, stays)
    assert sum(found.values()) == pytest.approx(times.end_s - times.arrival_s, abs=1e-9)
    assert all(value >= -1e-12 for value in found.values()) and list(found) == [t for t in TERMS if t in found]
    if "stall" in found:
        assert times.longest_gap_s >= STALL_S and "decode" in found


def test_terms_of_a_simulated_day_are_what_its_records_say() -> None:
    """With preemptions, and a replica that crashes: an engine that tells its queue has no term that is unknown."""
    result = hw.simulate({
        "name": "day", "seed": 3,
        "workload": {
            "arrivals": 20, "num_requests": 150, "prompt_tokens": {"kind": "uniform", "min": 50, "max": 900},
            "output_tokens": {"kind": "uniform", "min": 1, "max": 300},
        },
        "fleet": [{
            "name": "pool", "model": "qwen3-8b", "gpu": "h100", "engine": "vllm-0.15", "replicas": 2,
            "kv_capacity_tokens": 6000,
        }],
        "faults": [{"at_s": 3.0, "replica": 0, "down_s": 2.0}],
        "policies": {"routing": "least-loaded"},
    })  # fmt: skip
    history = History(result.records, {})
    seen: set[str] = set()
    for row in history.rows.tolist():
        times, stays = history.times(row), history.stays(row)
        found = terms(times, stays)
        assert sum(found.values()) == pytest.approx(times.end_s - times.arrival_s)
        if len(stays) == 1 and found.keys() >= {"queue", "prefill"}:
            assert found["queue"] == pytest.approx(history.value("admitted_s", row) - stays[0].from_s)
        seen |= found.keys()
    assert {"held", "queue", "prefill", "decode", "preemption", "failover"} <= seen and "first token" not in seen
