"""The Protocols of policies: one verb each. A policy's constructor is its config; its state lives on its instance.

Every policy may also have `learn(record)`, called with each `Ended` request, and `oracle = True` if it reads what only
an oracle knows. Drivers that cannot know it refuse such a policy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias, runtime_checkable

from headway.core.decision import Move, Placement, Release
from headway.core.past_demand import PastDemand
from headway.core.record import Ended
from headway.core.view import (
    AdmissionView,
    CascadeView,
    FleetView,
    MigrationView,
    PoolCounts,
    PoolsView,
    RequestView,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Floats: TypeAlias = "npt.NDArray[np.float64]"


class Router(Protocol):
    """Chooses the replica for a request.

    If replicas have roles, a router with `pairs = True` is offered all of them and chooses the decode replica, too
    (`Placement.decode`). Other routers are offered those that prefill; the least loaded replica of the combo decodes.
    """

    def route(self, request: RequestView, view: FleetView) -> Placement:
        """Choose the replica of a request among `view.replicas`, which all have room for it."""


MakeRouter = Callable[[], Router]
"""Creates a router: the argument of a router that narrows the choice of another one."""


class Ordering(Protocol):
    """Ranks the requests of a queue."""

    quantum: int | None
    """Tokens after which a running request goes to the end of the queue while others wait; None = no quantum."""
    preemptive: bool
    """Whether a waiting request takes the place of running requests that rank behind it."""

    def rank(self, request: RequestView, now: float) -> Any:
        """The request's sort key at `now` (seconds), from its own state only. Keys of all requests are comparable.

        The lowest key runs first, and the highest is preempted first. Ties go to the lower request id.
        """


@runtime_checkable
class MovingOrdering(Protocol):
    """An ordering whose ranks change with time alone."""

    def next_change(self, request: RequestView, now: float) -> float | None:
        """Time (seconds) after `now` at which this request's rank changes next; None = never."""


@runtime_checkable
class SteppedOrdering(Protocol):
    """An ordering that ranks a request worse once it has gained a number of tokens.

    An ordering whose ranks only improve with each token need not implement this. A request begins a new turn
    (`RequestView.turn`) with each such change.
    """

    def next_change_tokens(self, request: RequestView) -> int | None:
        """Further output tokens after which the rank gets worse; None = never."""


@runtime_checkable
class QueuedOrdering(Protocol):
    """An ordering with several queues, of which queue 0 goes first.

    `rank` begins with the queue. A request that changes queues begins a new quantum and turn. While a request gains
    tokens it may only go to a later queue, and `next_change_tokens` says when; a change of phase may do either.
    """

    num_queues: int

    def queue(self, request: RequestView) -> int:
        """The request's queue, 0 to `num_queues - 1`."""


@runtime_checkable
class PhasedOrdering(QueuedOrdering, Protocol):
    """An ordering that keeps reasoning requests in queues of their own."""

    reasoning_queues: Collection[int]
    """Queues of requests that reason. A reasoning request in another one stands behind answers."""


@runtime_checkable
class SharingOrdering(Protocol):
    """An ordering of the gateway's queue that shares service, for example between tenants.

    Ranks of one share's requests differ by their arrival only. They change when the share is given service:
    `started` and `ended` are called for that.
    """

    headroom: float
    """Part of a replica's window and KV cache that only shares with less than their part of the requests in flight may
    use."""
    prompt_window: int | None
    """Most prompt tokens at a replica of requests without a first token, beyond which only such shares are sent there.
    None = as many as an iteration of the engine computes."""

    def share(self, request: RequestView) -> Hashable:
        """The share that the request belongs to."""

    def started(self, request: RequestView, now: float) -> None:
        """A request starts at a replica, from the queue or without having waited."""

    def ended(self, request: RequestView, /) -> None:
        """A request has ended, or its stay in one cascade stage. It may not have started, or have ended before."""

    def is_below_share(self, request: RequestView) -> bool:
        """Whether the request's share has fewer requests in flight than its part."""


@runtime_checkable
class WeightedOrdering(Protocol):
    """A sharing ordering whose tenants have weights, which may change while it is used."""

    def set_weights(self, weights: Mapping[str, float], /) -> None:
        """Use these weights for the tenants that have one here, from the next request on."""


@runtime_checkable
class PeerOrdering(Protocol):
    """A sharing ordering that also counts the service that other schedulers of the fleet give."""

    def given(self) -> Mapping[tuple[int, str], float]:
        """The service so far, in tokens, of the shares (tier and tenant) whose service has changed since the last
        call."""

    def given_elsewhere(self, share: tuple[int, str], service: float, /) -> None:
        """Another scheduler has given a share so much more service; below 0: it had charged too much."""


class Migration(Protocol):
    """Chooses requests to move to other replicas."""

    interval_s: float | None
    """Seconds between two calls of `moves`; None = never."""

    def moves(self, view: MigrationView) -> Sequence[Move]:
        """Moves to begin now. Moves that are not possible (any more) are ignored."""

    def at_phase(self, request: RequestView, view: MigrationView) -> Move | None:
        """The move of a request that has ended its reasoning; None = it stays.

        `view.replicas` are the replicas that can take it, and its own.
        """


class Admission(Protocol):
    """Holds requests back, and releases them later."""

    interval_s: float
    """Seconds between two calls of `release`."""

    def holds(self, request: RequestView) -> bool:
        """Whether an arriving request is held."""

    def release(self, view: AdmissionView) -> Sequence[Release]:
        """The held requests to release now."""


class Cascade(Protocol):
    """Chooses which of several models answers a request."""

    def enter(self, request: RequestView, view: CascadeView) -> int:
        """The stage at which the request starts."""

    def accept(self, request: RequestView, score: float, view: CascadeView) -> bool:
        """Whether a stage's answer with this score (0 to 100) is good enough; else the next stage answers.

        Not called for the last stage, unless the policy is an `Auditor`.
        """


@runtime_checkable
class Auditor(Protocol):
    """A cascade policy that also has answers of the last stage judged."""

    def judges_last(self, request: RequestView) -> bool:
        """Whether this request's last answer is judged. It is accepted with any score."""


class Scaler(Protocol):
    """Chooses the number of replicas."""

    interval_s: float
    """Seconds between two calls of `scale`."""

    def scale(self, view: PoolsView) -> Mapping[str, int]:
        """Wanted replicas (up and not draining) by pool; pools left out keep their number."""


@runtime_checkable
class RemembersDemand(Protocol):
    """A scaler that forecasts from past demand, and can be given that from before the run."""

    def remember(self, past: PastDemand, /) -> None:
        """Forecast as if this demand had been seen. Called once, before the first `scale`."""


@runtime_checkable
class ChangesSettings(Protocol):
    """A scaler that a gateway can give other settings while it runs."""

    live_settings: ClassVar[frozenset[str]]
    """The arguments that may change."""

    def go_on(self, before: Any, /) -> None:
        """Know what the scaler of the same class knew that it replaces, which may have had other `live_settings`.
        Called once, before the first `scale`."""


# Services that a policy receives at construction.


class Forecaster(Protocol):
    """Forecasts a regular series. The same history gives the same forecast, whatever was forecast before."""

    cheats: bool
    """Whether the forecaster knows more than the history, so that its results are not forecasts."""

    def forecast(self, history: Floats, steps: int, quantiles: Sequence[float]) -> Floats:
        """Quantiles (rows, in the given order) of the next `steps` values (columns), none below 0.

        `history` has one value per step, oldest first, at least one. Rows do not cross: a higher quantile is no lower.
        """


MakeForecaster = Callable[[str, str], Forecaster]
"""Creates a forecaster of the demand for a model in a region."""


class ComboPlanner(Protocol):
    """Plans which combos serve a demand best."""

    def best(self, demand_rps: float, most: Mapping[str, int], gpus: Mapping[str, int]) -> Mapping[str, int]:
        """Number of combos by name, at most `most`.

        They take no more GPUs than `gpus`, by type; types not in it are not limited. If the limits do not allow combos
        for all of the demand (requests per second), they serve as much of it as possible.
        """


class InstancePlanner(Protocol):
    """Plans how many instances of each model each region has."""

    def instances(
        self, demand_tps: Mapping[tuple[str, str], Sequence[float]], pools: Sequence[PoolCounts]
    ) -> Mapping[str, int]:
        """Replicas by pool, within the pool's limits; pools left out keep their number.

        `demand_tps` is input tokens per second by (model, region), in each window of the period to plan for.
        """


class CascadeReplanner(Protocol):
    """Observes a cascade and plans it again. One instance is shared by a cascade policy and a scaler."""

    def arrived(self, request: RequestView, now: float) -> None:
        """Note the arrival of a request."""

    def audits(self, request: int) -> bool:
        """Whether all models answer this request, so that all of their scores are known."""

    def scored(self, request: int, stage: int, score: float) -> None:
        """Note the score of a stage's answer."""

    def ended(self, record: Ended) -> None:
        """Note the end of a request's stay in one stage."""

    def thresholds(self) -> Sequence[float]:
        """The thresholds of the plan in force: one per stage but the last."""

    def replicas(self, now: float) -> Mapping[str, int]:
        """The wanted replicas of the newest plan, by pool; other pools do not belong to the cascade."""

    def adopt(self) -> None:
        """Put the newest plan in force: every model of it serves."""


@runtime_checkable
class Learner(Protocol):
    """A policy that learns from ended requests."""

    def learn(self, record: Ended) -> None: ...
