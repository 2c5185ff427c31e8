"""The Protocols, one verb each. A policy's constructor is its config; its state lives on its instance.

Optional on every kind: `learn(record)`, called with each `Ended` request, and `oracle = True` for a policy that
reads what only an oracle knows (drivers that cannot know it refuse such a policy).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from headway.core.decision import Move, Placement, Release
from headway.core.forecast import Forecaster
from headway.core.record import Ended
from headway.core.view import AdmissionView, CascadeView, FleetView, PoolCounts, PoolsView, RequestView


class Router(Protocol):
    """Which replica gets a request.

    Where replicas have roles, a router with `pairs = True` is offered all of them, and says the whole way
    (`Placement.decode`). Any other is offered those that prefill; who decodes is then the least loaded of the combo.
    """

    def route(self, request: RequestView, view: FleetView) -> Placement:
        """One of `view.replicas`."""


class Ordering(Protocol):
    """Who goes first.

    `rank` sees one request's own state and says a sortable key, of one shape for all requests: lower runs first,
    and who ranks last is preempted first. Ties go to the lower request id.
    """

    quantum: int | None
    """Tokens after which a running request goes to the end of the line while others wait; None = never."""
    preemptive: bool
    """True: a waiting request takes the place of running ones that rank behind it."""

    def rank(self, request: RequestView, now: float) -> Any: ...


@runtime_checkable
class MovingOrdering(Protocol):
    """An ordering whose ranks move with time, while nothing else happens."""

    def next_change(self, request: RequestView, now: float) -> float | None:
        """When this request's rank changes next, after `now`; None = never."""


@runtime_checkable
class SteppedOrdering(Protocol):
    """An ordering whose rank of a request gets worse as the request gains tokens.

    A rank that only gets better with each token need not say so.
    """

    def next_change_tokens(self, request: RequestView) -> int | None:
        """After how many further output tokens the rank gets worse; None = never."""


@runtime_checkable
class QueuedOrdering(Protocol):
    """An ordering that keeps its requests in several queues, those of queue 0 first.

    `rank` begins with the queue. A request that changes queues starts a quantum, and a place in line, anew. With
    tokens, it may only go to a later queue, and `next_change_tokens` says when; a change of phase may do either.
    """

    num_queues: int

    def queue(self, request: RequestView) -> int:
        """Which queue the request stands in, 0 to `num_queues - 1`."""


class Migration(Protocol):
    """Who goes to another replica."""

    interval_s: float | None
    """`moves` is asked this often; None = never."""

    def moves(self, view: FleetView) -> Sequence[Move]:
        """Moves to begin now. One that cannot be made (any more) is left out."""

    def at_phase(self, request: RequestView, view: FleetView) -> Move | None:
        """The request's reasoning is over: where to answer; None = where it is.

        `view.replicas` are those that may take it, and its own.
        """


class Admission(Protocol):
    """Which requests are kept for later, and when they go."""

    interval_s: float
    """`release` is asked this often."""

    def holds(self, request: RequestView) -> bool:
        """Whether a request that comes in is kept back."""

    def release(self, view: AdmissionView) -> Sequence[Release]:
        """Which of those that are kept go now."""


class Cascade(Protocol):
    """Which of several models' answers a request gets."""

    def enter(self, request: RequestView, view: CascadeView) -> int:
        """The stage at which the request starts."""

    def accept(self, request: RequestView, score: float, view: CascadeView) -> bool:
        """A stage's answer has been judged, 0 to 100: is it good enough? Else the next stage answers anew.

        The last stage's answer is not judged.
        """


@runtime_checkable
class Auditor(Protocol):
    """A cascade policy that wants the last model's answers judged, too."""

    def judges_last(self, request: RequestView) -> bool:
        """Whether this request's is; whatever it scores, it is given."""


class Scaler(Protocol):
    """How many replicas there are."""

    interval_s: float
    """`scale` is asked this often."""

    def scale(self, view: PoolsView) -> Mapping[str, int]:
        """Replicas wanted (up, and not draining) by pool; pools left out stay as they are."""


class ComboPlanner(Protocol):
    """Which combos serve a demand best. A scaler is handed one when it is made."""

    def best(self, demand_rps: float, most: Mapping[str, int], gpus: Mapping[str, int]) -> Mapping[str, int]:
        """How many of each of the combos that `most` names, no more than it says.

        They take no more GPUs than `gpus` has, by type; types that it does not name are not limited. Where they
        cannot serve all of the demand, they serve as much of it as can be.
        """


class InstancePlanner(Protocol):
    """How many instances of each model each region should have. A scaler is handed one when it is made."""

    def instances(
        self, demand_tps: Mapping[tuple[str, str], Sequence[float]], pools: Sequence[PoolCounts]
    ) -> Mapping[str, int]:
        """Replicas to have by pool, within its bounds; pools left out stay as they are.

        `demand_tps` are input tokens per second, by model and region, in each window of the period to plan for.
        """


class CascadeReplanner(Protocol):
    """Watches a cascade and plans it anew. A cascade policy and a scaler are handed the same one when they are made."""

    def arrived(self, request: RequestView, now: float) -> None:
        """A request came in."""

    def audits(self, request: int) -> bool:
        """Whether all models answer this request, so that all of their scores are known."""

    def scored(self, request: int, stage: int, score: float) -> None:
        """A stage's answer was judged."""

    def ended(self, record: Ended) -> None:
        """A stage is done with a request."""

    def thresholds(self) -> Sequence[float]:
        """Of the plan that is followed: one for each stage but the last."""

    def replicas(self, now: float) -> Mapping[str, int]:
        """Of the newest plan: replicas to have by pool; other pools are not the cascade's."""

    def adopt(self) -> None:
        """Every model of the newest plan serves: its thresholds hold from now on."""


MakeForecaster = Callable[[str, str], Forecaster]
"""A forecaster of the demand for a model in a region. A scaler is handed one when it is made."""


@runtime_checkable
class Learner(Protocol):
    """A policy that learns from what ended."""

    def learn(self, record: Ended) -> None: ...
