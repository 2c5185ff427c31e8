"""The checks of routers pass a sound router and catch broken ones."""

from __future__ import annotations

import random
import time
from random import Random
from typing import Any

import pytest

from headway.core.decision import Placement
from headway.testing import BrokenPolicyError, check_router


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
        (PairsUnasked, "only a router with `pairs = True` may say where"),
        (PairsAcrossCombos, "the chosen combo has the replicas"),
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


@pytest.mark.ci
def test_sound_router_passes() -> None:
    check_router(First)
