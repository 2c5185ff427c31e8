"""Every registered policy holds to what every policy must, and the checks catch those that do not."""

from __future__ import annotations

import random
import time
from random import Random
from typing import Any

import pytest

from headway.core.decision import Placement
from headway.testing.conformance import check_ordering, check_router
from headway.testing.strict_views import BrokenPolicyError


class First:
    def route(self, request: Any, view: Any) -> Placement:
        return Placement(view.replicas[0].id)


class ChoosesNobody(First):
    def route(self, request: Any, view: Any) -> Placement:
        return Placement(99)


class PairsUnasked(First):
    def route(self, request: Any, view: Any) -> Any:
        return Placement(view.replicas[0].id, view.replicas[-1].id)


class PairsAcrossCombos(PairsUnasked):
    pairs = True


class SaysAnId(First):
    def route(self, request: Any, view: Any) -> Any:
        return view.replicas[0].id


class RemembersIndex(First):
    """Breaks when replicas vanish."""

    index = 0

    def route(self, request: Any, view: Any) -> Placement:
        self.index = max(self.index, len(view.replicas) - 1)
        return Placement(view.replicas[self.index].id)


class SharesState(First):
    seen: list[int] = []  # noqa: RUF012 - the mistake that the check is for

    def route(self, request: Any, view: Any) -> Placement:
        self.seen.append(request.id)
        return Placement(view.replicas[len(self.seen) // 7 % len(view.replicas)].id)


class HoldsALambda(First):
    def __init__(self) -> None:
        self.key = lambda replica: replica.id


class ForgetsInPickle(First):
    count = 0

    def __getstate__(self) -> dict[str, Any]:
        return {"count": 0}

    def route(self, request: Any, view: Any) -> Placement:
        self.count += 1
        return Placement(view.replicas[self.count % len(view.replicas)].id)


class SortsInPlace(First):
    def route(self, request: Any, view: Any) -> Placement:
        view.replicas.sort(key=lambda replica: -replica.id)
        return Placement(view.replicas[0].id)


class WritesToAView(First):
    def route(self, request: Any, view: Any) -> Placement:
        view.replicas[0].num_in_flight += 1
        return Placement(view.replicas[0].id)


class KeepsTheView(First):
    def route(self, request: Any, view: Any) -> Placement:
        self.last = view.replicas[0]
        return Placement(self.last.id)


class ReadsOldViews(First):
    last: Any = None

    def route(self, request: Any, view: Any) -> Placement:
        last, self.last = self.last, view.replicas[0]
        return Placement(last.id if last and last.num_waiting < 0 else view.replicas[0].id)


class KnowsTheFuture(First):
    def route(self, request: Any, view: Any) -> Placement:
        return Placement(min(view.replicas, key=lambda replica: replica.output_tokens_left).id)


class KnowsLengths(First):
    def route(self, request: Any, view: Any) -> Placement:
        return Placement(view.replicas[request.output_tokens % len(view.replicas)].id)


class ReadsWhatIsNotThere(First):
    def route(self, request: Any, view: Any) -> Placement:
        return Placement(min(view.replicas, key=lambda replica: replica.queue_length).id)


class ReadsTheClock(First):
    def route(self, request: Any, view: Any) -> Placement:
        return Placement(view.replicas[int(time.time()) * 0].id)


class DrawsGlobally(First):
    def route(self, request: Any, view: Any) -> Placement:
        return Placement(random.choice(view.replicas).id)


class SeedsItself(First):
    def route(self, request: Any, view: Any) -> Placement:
        return Placement(Random().choice(view.replicas).id)


class ReadsTheEnvironment(First):
    def route(self, request: Any, view: Any) -> Placement:
        import os

        return Placement(view.replicas[len(os.environ.get("NOTHING", ""))].id)


class Prints(First):
    def route(self, request: Any, view: Any) -> Placement:
        print("routing")  # noqa: T201 - the mistake that the check is for
        return Placement(view.replicas[0].id)


@pytest.mark.parametrize(
    ("router", "says"),
    [
        (ChoosesNobody, "chose replica 99; it was offered"),
        (PairsUnasked, "only a router with `pairs = True` says where"),
        (PairsAcrossCombos, "of the combo it was offered"),
        (SaysAnId, "a router returns a Placement"),
        (SharesState, "decided differently"),
        (HoldsALambda, "cannot be pickled"),
        (ForgetsInPickle, "some of its state was lost"),
        (SortsInPlace, "changed view.replicas"),
        (WritesToAView, "set replica.num_in_flight"),
        (KeepsTheView, "kept a view|may not keep a view"),
        (ReadsOldViews, "after the call"),
        (KnowsTheFuture, "replica.output_tokens_left, which only"),
        (KnowsLengths, "request.output_tokens, which only"),
        (ReadsTheClock, "used time.time"),
        (DrawsGlobally, "the global random|decided differently"),
        (SeedsItself, "without a seed|decided differently"),
        (ReadsTheEnvironment, "used os"),
        (Prints, "used print"),
    ],
)
def test_broken_router_is_caught(router: Any, says: str) -> None:
    with pytest.raises(BrokenPolicyError, match=says):
        check_router(router)


def test_crashing_router_is_caught() -> None:
    with pytest.raises(IndexError):
        check_router(RemembersIndex)
    with pytest.raises(AttributeError, match="queue_length is not in"):
        check_router(ReadsWhatIsNotThere)


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


def test_sound_router_passes() -> None:
    check_router(First)
