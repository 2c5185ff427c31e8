"""The terms of a request's time. Terms do not overlap, and their sum is the whole time.

`held`: before the first placement. `failover`: at replicas that failed before a token came, between replicas, and until
the next replica has continued the answer. `move` and `preemption`: the same after a move and after a preemption. Then
`queue` and `prefill`, or `first token` for both if the engine does not separate them. `decode`: from the first token
on; `stall` is the excess of the longest gap over the others. `engine`: the whole time of an answer that was not
streamed.
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
"""Terms in the order of a request's life."""
STALL_S, STALL_FACTOR = 0.25, 5.0
"""A gap is a stall if it exceeds this time and this multiple of the other gaps' mean."""
_LOST = {
    Cause.CRASHED: "failover",
    Cause.MOVED: "move",
    Cause.PREEMPTED: "preemption",
    Cause.SWAPPED: "preemption",
}
"""The term between a stay and the next one, by the reason for the stay's end."""


class Stay(Struct, frozen=True):
    """A request's time at one replica, in seconds of the run."""

    replica: int
    from_s: float
    to_s: float
    cause: Cause
    """Why it ended."""
    admitted_s: float = nan
    """Time at which the engine began the prompt; NaN: not reported."""
    resumed_s: float = nan
    """The first token here of an answer that had begun elsewhere; NaN: unknown."""


class Times(Struct, frozen=True):
    """The recorded times of one request, in seconds of the run. NaN: it did not happen, or the time is unknown."""

    arrival_s: float
    first_token_s: float
    end_s: float
    generated_tokens: int
    longest_gap_s: float = 0.0
    num_sequences: int = 1

    @property
    def sequence_tokens(self) -> float:
        """Tokens of one of the answer's sequences, in the mean."""
        return self.generated_tokens / self.num_sequences


def terms(times: Times, stays: Sequence[Stay]) -> dict[str, float]:
    """Seconds by term for the terms that the request had; `held` is always included."""
    found: dict[str, float] = {"held": 0.0}
    for term, from_s, to_s in _parts(times, stays):
        if to_s > from_s:
            found[term] = found.get(term, 0.0) + to_s - from_s
    decode_s = found.get("decode", 0.0)
    if stall_s := _stall_s(decode_s, times):
        found["decode"], found["stall"] = decode_s - stall_s, stall_s
    return {term: found[term] for term in TERMS if term in found}


def _stall_s(decode_s: float, times: Times) -> float:
    """Excess of the longest gap over the mean of the other gaps; 0 if it is too small to count."""
    gap_s, num_others = min(times.longest_gap_s, decode_s), times.sequence_tokens - 2
    if num_others < 1 or gap_s < STALL_S:
        return 0.0
    mean_s = (decode_s - gap_s) / num_others
    return gap_s - mean_s if gap_s > STALL_FACTOR * mean_s else 0.0


def _parts(times: Times, stays: Sequence[Stay]) -> Iterator[tuple[str, float, float]]:
    """Consecutive (term, from, to) from the arrival to the end."""
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
