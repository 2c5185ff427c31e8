"""A candidate's policies, which decide beside those of a service on the same views, without effect.

Nothing of the service is shared but what policies may read: the candidate has instances and a random stream of its own.
Whatever it raises is counted and reported, and never reaches the request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Literal

from msgspec import Struct

from headway.control.hold_queue import HoldQueue
from headway.control.live import Live
from headway.control.observe import MutableFleetView
from headway.control.policies import Policies
from headway.core.policy import Admission, Learner, Ordering, Router
from headway.core.record import Ended
from headway.core.view import ReplicaView

Kind = Literal["routing", "ordering", "admission"]
MOST_COMPARED = 64
"""Held requests that a candidate's ordering ranks for one comparison, at most; with more, nothing is compared."""


PACED = 200
"""Placements after which the pace is set anew."""


class ShadowPlan(Struct, frozen=True):
    """A candidate's policies that decide beside the fleet's."""

    name: str
    """Of the candidate's file."""
    policies: Policies
    kinds: tuple[Kind, ...]
    """The kinds that decide."""


class ShadowCounts(Struct):
    """How many decisions of a candidate agreed with the real ones."""

    agreed: int = 0
    """The same as the real ones."""
    differed: int = 0
    failed: int = 0
    """The candidate raised an error, or chose what it was not offered."""

    @property
    def agreement(self) -> float | None:
        """Share of the decisions that are the same as the real ones; None: there are none."""
        num = self.agreed + self.differed + self.failed
        return self.agreed / num if num else None


class Shadow:
    """The candidate's policies of one service. Satisfies `core.policy.Learner`."""

    def __init__(
        self,
        router: Router | None,
        ordering: Ordering | None,
        admission: Admission | None,
        compares_admission: bool,
        random: Random,
        on_error: Callable[[Kind, str, Exception | None], None],
        timer: Callable[[], float] = lambda: 0.0,
        pace: Callable[[Shadow], None] = lambda shadow: None,
    ) -> None:
        """A policy that is None is not compared; `compares_admission` without a policy: it would hold no request.

        `on_error(kind, what, error)` is called for each decision that fails; `error` is None if the choice was not
        among those offered. `timer` returns seconds; by them `pace` may set `every` after `PACED` placements.
        """
        self._router, self._ordering, self._admission = router, ordering, admission
        self._on_error, self._timer, self._pace = on_error, timer, pace
        self.every = 1
        """The router decides about one of so many placements."""
        self.spent_s = 0.0
        """Time of the router's decisions."""
        self._num = 0
        self._view = MutableFleetView(random, wants_scores=False)
        kinds: dict[Kind, bool] = {
            "routing": router is not None,
            "ordering": ordering is not None,
            "admission": compares_admission,
        }
        self.counts: dict[Kind, ShadowCounts] = {kind: ShadowCounts() for kind, is_on in kinds.items() if is_on}
        self.compares_admission = compares_admission
        self.placed: dict[int, int] = {}
        """Requests that were placed since the candidate decides beside, by replica."""
        self.chosen: dict[int, int] = {}
        """Requests that the candidate would have placed, by replica."""
        policies: dict[Kind, object] = {"routing": router, "ordering": ordering, "admission": admission}
        self.learners: dict[Kind, Learner] = {
            kind: each for kind, each in policies.items() if isinstance(each, Learner)
        }

    def route(self, live: Live, replicas: Sequence[ReplicaView], real: int, now: float) -> int | None:
        """The replica that the candidate's router chooses where `real` was chosen; None: it chose none."""
        if self._router is None:
            return None
        self._num += 1
        if not self._num % PACED:
            self._pace(self)
        if self._num % self.every:
            return None
        began_s = self._timer()
        chosen = self._chosen(self._router, live, replicas, real, now)
        self.spent_s += self._timer() - began_s
        return chosen

    def _chosen(self, router: Router, live: Live, replicas: Sequence[ReplicaView], real: int, now: float) -> int | None:
        view, counts = self._view, self.counts["routing"]
        view.now, view.replicas = now, tuple(replicas)
        self.placed[real] = self.placed.get(real, 0) + 1
        try:
            chosen = router.route(live, view).replica
        except Exception as error:
            self._failed("routing", "", error)
            return None
        if chosen == real:
            counts.agreed += 1
        elif any(replica.id == chosen for replica in view.replicas):
            counts.differed += 1
        else:
            self._failed("routing", f"chose replica {chosen!r}, which it was not offered", None)
            return None
        self.chosen[chosen] = self.chosen.get(chosen, 0) + 1
        return chosen

    def first(self, real: Live, queue: HoldQueue, now: float) -> Live | None:
        """The held request that the candidate's ordering ranks first where `real` is placed from this queue."""
        rank = None if self._ordering is None else self._ordering.rank
        if rank is None or not 1 < queue.num <= MOST_COMPARED:
            return None
        try:
            first = min(queue.requests(), key=lambda live: (rank(live, now), live.id))
        except Exception as error:
            self._failed("ordering", "", error)
            return None
        self._count("ordering", first is real)
        return first

    def holds(self, live: Live, real: bool) -> bool | None:
        """Whether the candidate's admission policy holds an arriving request that the real one holds, or not."""
        try:
            held = self._admission is not None and self._admission.holds(live)
        except Exception as error:
            self._failed("admission", "", error)
            return None
        self._count("admission", held == real)
        return held

    def learn(self, record: Ended) -> None:
        """Let the candidate's policies learn from a request that has ended, as the real ones placed it."""
        for kind, learner in self.learners.items():
            try:
                learner.learn(record)
            except Exception as error:
                self._on_error(kind, "cannot learn", error)

    def _count(self, kind: Kind, is_same: bool) -> None:
        counts = self.counts[kind]
        if is_same:
            counts.agreed += 1
        else:
            counts.differed += 1

    def _failed(self, kind: Kind, what: str, error: Exception | None) -> None:
        self.counts[kind].failed += 1
        self._on_error(kind, what, error)
