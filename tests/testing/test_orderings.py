"""The checks of orderings pass sound orderings and catch broken ones."""

from __future__ import annotations

import random
from typing import Any

import pytest

from headway.testing import BrokenPolicyError, check_ordering


class Arrivals:
    quantum: Any = None
    preemptive: Any = False

    def rank(self, request: Any, now: float) -> Any:
        return (request.arrival_s,)


class NoQuantum(Arrivals):
    quantum = 0


class Undecided(Arrivals):
    preemptive = None


class ShapesDiffer(Arrivals):
    def rank(self, request: Any, now: float) -> Any:
        return (request.tier,) if request.tier else (request.tier, request.arrival_s)


class RanksNone(Arrivals):
    def rank(self, request: Any, now: float) -> Any:
        return (request.deadline_s, request.arrival_s)


class RanksNan(Arrivals):
    def rank(self, request: Any, now: float) -> Any:
        return (float("nan") if request.deadline_s is None else request.deadline_s,)


class Counts(Arrivals):
    def __init__(self) -> None:
        self.calls = 0

    def rank(self, request: Any, now: float) -> Any:
        self.calls += 1
        return (self.calls,)


class Ages(Arrivals):
    def rank(self, request: Any, now: float) -> Any:
        return (request.tier - (now - request.arrival_s) // 100,)


class AgesAsItSays(Ages):
    def next_change(self, request: Any, now: float) -> float | None:
        return float(request.arrival_s + ((now - request.arrival_s) // 100 + 1) * 100)


class ChangesInThePast(Arrivals):
    def next_change(self, request: Any, now: float) -> float | None:
        return now


class Demotes(Arrivals):
    def rank(self, request: Any, now: float) -> Any:
        return (request.generated_tokens // 20, request.arrival_s)


class DemotesAsItSays(Demotes):
    def next_change_tokens(self, request: Any) -> int | None:
        return 20 - int(request.generated_tokens) % 20


class Random64(Arrivals):
    def rank(self, request: Any, now: float) -> Any:
        return (random.getrandbits(1) * 0,)


@pytest.mark.parametrize(
    ("ordering", "says"),
    [
        (NoQuantum, "quantum is 0"),
        (Undecided, "preemptive is None"),
        (ShapesDiffer, "several shapes"),
        (RanksNone, "cannot be compared"),
        (RanksNan, "have no order"),
        (Counts, "ranked the same requests differently"),
        (Ages, "the rank moved"),
        (ChangesInThePast, "it must be later"),
        (Demotes, "got worse after"),
        (Random64, "the global random"),
    ],
)
def test_broken_ordering_is_caught(ordering: Any, says: str) -> None:
    with pytest.raises(BrokenPolicyError, match=says):
        check_ordering(ordering)


@pytest.mark.parametrize("ordering", [Arrivals, AgesAsItSays, DemotesAsItSays])
def test_sound_ordering_passes(ordering: Any) -> None:
    check_ordering(ordering)
