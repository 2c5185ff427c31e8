"""The terms of a request's time. They follow each other or part each other's time, so that their sum is the whole.

`held` before the first placement. `failover`: at replicas that failed before a token came, between replicas, and until
the next one has gone on with the answer. `move` and `preemption`: the same after a move, and after a preemption. Then
`queue` and `prefill`, together `first token` where the engine does not tell them apart. `decode` from the first token
on, of which `stall` is what the longest gap had beyond the others. `engine`: all of an answer that came at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isnan, nan

from msgspec import Struct

from headway.core.record import Cause

TERMS = (
    "held",
    "failover",
    "move",
    "preemption",
    "queue",
    "prefill",
    "first token",
    "decode",
    "stall",
    "engine",
)
"""In the order of a request's life."""
STALL_S, STALL_FACTOR = 0.25, 5.0
"""A gap is a stall if it is so long, and so many times as long as the others' mean."""
_LOST = {
    Cause.CRASHED: "failover",
    Cause.MOVED: "move",
    Cause.PREEMPTED: "preemption",
    Cause.SWAPPED: "preemption",
}
"""What follows a stay that ended for this reason."""


class Stay(Struct, frozen=True):
    """A request's time at one replica, in seconds of the run."""

    replica: int
    from_s: float
    to_s: float
    cause: Cause
    """Why it ended."""
    admitted_s: float = nan
    """When the engine began with the prompt; NaN: it does not say."""
    resumed_s: float = nan
    """The first token here, of an answer that had begun elsewhere; NaN: unknown."""


class Times(Struct, frozen=True):
    """What is recorded of one request, in seconds of the run. NaN: it did not happen, or nobody knows when."""

    arrival_s: float
    first_token_s: float
    end_s: float
    generated_tokens: int
    longest_gap_s: float = 0.0


def terms(times: Times, stays: Sequence[Stay]) -> dict[str, float]:
    """Seconds by term, those of `TERMS` that the request had; `held` always."""
    found: dict[str, float] = {"held": 0.0}
    for term, from_s, to_s in _parts(times, stays):
        if to_s > from_s:
            found[term] = found.get(term, 0.0) + to_s - from_s
    decode_s = found.get("decode", 0.0)
    if stall_s := _stall_s(decode_s, times):
        found["decode"], found["stall"] = decode_s - stall_s, stall_s
    return {term: found[term] for term in TERMS if term in found}


def _stall_s(decode_s: float, times: Times) -> float:
    """By how much the longest gap exceeds the mean of the others; 0: not by enough."""
    gap_s, num_others = min(times.longest_gap_s, decode_s), times.generated_tokens - 2
    if num_others < 1 or gap_s < STALL_S:
        return 0.0
    mean_s = (decode_s - gap_s) / num_others
    return gap_s - mean_s if gap_s > STALL_FACTOR * mean_s else 0.0


def _parts(times: Times, stays: Sequence[Stay]) -> Iterator[tuple[str, float, float]]:
    """(term, from, to) one after the other, from the arrival to the end."""
    now_s, between, first_s = times.arrival_s, "held", times.first_token_s
    for i, stay in enumerate(stays):
        from_s, is_last = min(max(stay.from_s, now_s), times.end_s), i == len(stays) - 1
        to_s = times.end_s if is_last and stay.cause not in _LOST else min(max(stay.to_s, from_s), times.end_s)
        yield between, now_s, from_s
        if first_s <= from_s:
            resumed_s = stay.resumed_s if from_s <= stay.resumed_s <= to_s else from_s
            yield between, from_s, resumed_s
            yield "decode", resumed_s, to_s
        elif first_s <= to_s:
            yield from _until_first_token(stay, from_s, first_s)
            yield "decode", first_s, to_s
        elif stay.cause in (Cause.CRASHED, Cause.SWAPPED):
            yield _LOST[stay.cause], from_s, to_s
        elif isnan(first_s):
            yield "engine", from_s, to_s
        else:  # a prompt that is computed here and used elsewhere, or that is computed again
            yield from _until_first_token(stay, from_s, to_s)
        now_s, between = to_s, _LOST.get(stay.cause, between)
    yield between, now_s, times.end_s


def _until_first_token(stay: Stay, from_s: float, to_s: float) -> Iterator[tuple[str, float, float]]:
    if isnan(stay.admitted_s):
        yield "first token", from_s, to_s
    else:
        admitted_s = min(max(stay.admitted_s, from_s), to_s)
        yield "queue", from_s, admitted_s
        yield "prefill", admitted_s, to_s
