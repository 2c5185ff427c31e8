"""A candidate's policies in shadow: they decide on the same views as a service's policies, without effect.

The candidate shares nothing with the service except the views: it has its own instances and random stream. Its errors
are counted and reported, and never reach the request.
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
"""Maximum length of the hold queue for which a candidate's ordering is compared."""


PACED = 200
"""Number of placements after which `pace` is applied again."""


class ShadowPlan(Struct, frozen=True):
    """A candidate whose policies run in shadow."""

    name: str
    """Name in the candidate's file."""
    policies: Policies
    kinds: tuple[Kind, ...]
    """The kinds of policy to compare."""


class ShadowCounts(Struct):
    """Counts of a candidate's decisions, by agreement with the actual decisions."""

    agreed: int = 0
    """Number of decisions equal to the actual decisions."""
    differed: int = 0
    failed: int = 0
    """Number of decisions that raised an error, or chose something that was not offered."""

    @property
    def agreement(self) -> float | None:
        """Share of the candidate's decisions that were equal to the actual decisions; None: no decisions yet."""
        num = self.agreed + self.differed + self.failed
        return self.agreed / num if num else None


class Shadow:
    """The candidate's policies for one service. Implements `core.policy.Learner`."""

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
        """A policy of None is not compared; with `compares_admission` and no admission policy, the candidate holds no
        request.

        `on_error(kind, what, error)` is called for each failed decision; `error` is None if the choice was not offered.
        `timer` returns seconds, from which `pace` may set `every` after `PACED` placements.
        """
        self._router, self._ordering, self._admission = router, ordering, admission
        self._on_error, self._timer, self._pace = on_error, timer, pace
        self.every = 1
        """The router decides about one in `every` placements."""
        self.spent_s = 0.0
        """Seconds spent in the router's decisions."""
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
        """Maps each replica to the number of requests placed since the shadow began."""
        self.chosen: dict[int, int] = {}
        """Maps each replica to the number of requests that the candidate would have placed there."""
        policies: dict[Kind, object] = {"routing": router, "ordering": ordering, "admission": admission}
        self.learners: dict[Kind, Learner] = {
            kind: each for kind, each in policies.items() if isinstance(each, Learner)
        }

    def route(self, live: Live, replicas: Sequence[ReplicaView], real: int, now: float) -> int | None:
        """The candidate router's choice for a request placed at `real`; None: it made none."""
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
        """The held request that the candidate's ordering ranks first; the service places `real` from this queue."""
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
        """Whether the candidate's admission policy would hold an arriving request; `real`: whether it is held."""
        try:
            held = self._admission is not None and self._admission.holds(live)
        except Exception as error:
            self._failed("admission", "", error)
            return None
        self._count("admission", held == real)
        return held

    def learn(self, record: Ended) -> None:
        """Let the candidate's policies learn from an ended request, as it was actually placed."""
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
