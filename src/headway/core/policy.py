"""The Protocols of policies: one verb each. A policy's constructor is its config; its state lives on its instance.

Every policy may also have `learn(record)`, called with each `Ended` request, and `oracle = True` if it reads a
request's future. A driver that does not know the future rejects such a policy.
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

    If replicas have roles, a router with `pairs = True` is offered all of them and also chooses the decode replica
    (`Placement.decode`). Other routers are offered the prefill replicas; control chooses the combo's least loaded
    decode replica.
    """

    def route(self, request: RequestView, view: FleetView) -> Placement:
        """Choose a replica from `view.replicas`, which all have room for the request."""


MakeRouter = Callable[[], Router]
"""Creates a router. A router that wraps another router takes such a function as an argument."""


class Ordering(Protocol):
    """Ranks the requests of a queue."""

    quantum: int | None
    """Tokens after which a running request goes to the end of the queue if other requests wait; None = no quantum."""
    preemptive: bool
    """Whether a waiting request preempts running requests that rank behind it."""

    def rank(self, request: RequestView, now: float) -> Any:
        """The request's sort key at `now` (seconds), computed from its own state only. All keys are comparable.

        The lowest key runs first, and the highest is preempted first. On ties, the lower request id comes first.
        """


@runtime_checkable
class MovingOrdering(Protocol):
    """An ordering whose ranks change over time by themselves."""

    def next_change(self, request: RequestView, now: float) -> float | None:
        """The next time (seconds) after `now` at which this request's rank changes; None = never."""


@runtime_checkable
class SteppedOrdering(Protocol):
    """An ordering that lowers a request's priority after a number of tokens.

    An ordering whose ranks only improve with each token need not implement this. With each such change a request begins
    a new turn (`RequestView.turn`).
    """

    def next_change_tokens(self, request: RequestView) -> int | None:
        """Further output tokens after which the rank gets worse; None = never."""


@runtime_checkable
class QueuedOrdering(Protocol):
    """An ordering with several queues; queue 0 goes first.

    `rank` begins with the queue. A request that changes queues begins a new quantum and turn. As a request gains tokens
    it may only move to a later queue, at the time given by `next_change_tokens`; a change of phase may move it to any
    queue.
    """

    num_queues: int

    def queue(self, request: RequestView) -> int:
        """The request's queue, 0 to `num_queues - 1`."""


@runtime_checkable
class PhasedOrdering(QueuedOrdering, Protocol):
    """An ordering with separate queues for reasoning requests."""

    reasoning_queues: Collection[int]
    """Queues of reasoning requests. A reasoning request in any other queue stands behind answers."""


@runtime_checkable
class SharingOrdering(Protocol):
    """An ordering of the hold queue that shares service, for example between tenants.

    Within one share, ranks differ only by arrival. They change when the share receives service, which `started` and
    `ended` report.
    """

    headroom: float
    """Part of a replica's window and KV cache reserved for shares below their fair part of the requests in flight."""
    prompt_window: int | None
    """Maximum prompt tokens, at one replica, of requests without a first token; beyond it, only shares below their fair
    part may send there. None = as many as one engine iteration computes."""

    def share(self, request: RequestView) -> Hashable:
        """The share to which the request belongs."""

    def started(self, request: RequestView, now: float) -> None:
        """A request starts at a replica, from the hold queue or directly."""

    def ended(self, request: RequestView, /) -> None:
        """A request or its cascade stage has ended. It may never have started, and may be reported twice."""

    def is_below_share(self, request: RequestView) -> bool:
        """Whether the request's share has fewer requests in flight than its fair part."""


@runtime_checkable
class WeightedOrdering(Protocol):
    """A sharing ordering with weights per tenant, which may change while it is used."""

    def set_weights(self, weights: Mapping[str, float], /) -> None:
        """Use these weights from the next request on. Tenants without a new weight keep the old one."""


@runtime_checkable
class PeerOrdering(Protocol):
    """A sharing ordering that also counts the service given by the fleet's other schedulers."""

    def given(self) -> Mapping[tuple[int, str], float]:
        """Total service in tokens of each share (tier and tenant) that has changed since the last call."""

    def given_elsewhere(self, share: tuple[int, str], service: float, /) -> None:
        """Another scheduler has given a share this much more service; negative if it corrects an overcharge."""


class Migration(Protocol):
    """Chooses requests to move to other replicas."""

    interval_s: float | None
    """Seconds between two calls of `moves`; None = never."""

    def moves(self, view: MigrationView) -> Sequence[Move]:
        """Moves to begin now. Moves that are no longer possible are ignored."""

    def at_phase(self, request: RequestView, view: MigrationView) -> Move | None:
        """The move of a request that has just finished its reasoning; None = it stays.

        `view.replicas` contains the request's own replica and the replicas that can take the request.
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
        """Whether a stage's answer with this score (0 to 100) is good enough; otherwise the next stage answers.

        Not called for the last stage, unless the policy is an `Auditor`.
        """


@runtime_checkable
class Auditor(Protocol):
    """A cascade policy that also has last-stage answers judged."""

    def judges_last(self, request: RequestView) -> bool:
        """Whether this request's last-stage answer is judged. It is accepted with any score."""


class Scaler(Protocol):
    """Chooses the number of replicas."""

    interval_s: float
    """Seconds between two calls of `scale`."""

    def scale(self, view: PoolsView) -> Mapping[str, int]:
        """Wanted replicas (up and not draining) by pool; missing pools keep their number."""


@runtime_checkable
class RemembersDemand(Protocol):
    """A scaler that forecasts from past demand, which can include demand before the run."""

    def remember(self, past: PastDemand, /) -> None:
        """Add demand from before the run. Called once, before the first `scale`."""


@runtime_checkable
class ChangesSettings(Protocol):
    """A scaler whose settings a gateway can change while it runs."""

    live_settings: ClassVar[frozenset[str]]
    """The arguments that may change."""

    def go_on(self, before: Any, /) -> None:
        """Take over the state of `before`, the scaler that this scaler replaces. Both have the same class, and perhaps
        different `live_settings`. Called once, before the first `scale`."""


# Services passed to a policy's constructor.


class Forecaster(Protocol):
    """Forecasts a regular series. Equal histories give equal forecasts, regardless of earlier calls."""

    cheats: bool
    """Whether the forecaster knows the future, so that its results are not real forecasts."""

    def forecast(self, history: Floats, steps: int, quantiles: Sequence[float]) -> Floats:
        """Quantiles (rows, in the given order) of the next `steps` values (columns), all at least 0.

        `history` has one value per step, oldest first, and at least one value. Rows do not cross: a higher quantile is
        never lower.
        """


MakeForecaster = Callable[[str, str], Forecaster]
"""Creates a forecaster of the demand for a model in a region."""


class ComboPlanner(Protocol):
    """Plans the best set of combos for a demand."""

    def best(self, demand_rps: float, most: Mapping[str, int], gpus: Mapping[str, int]) -> Mapping[str, int]:
        """Number of combos by name, at most `most`.

        They use at most `gpus` GPUs by type; missing types are unlimited. If the limits are too low for the whole
        demand (requests per second), the combos serve as much of it as possible.
        """


class InstancePlanner(Protocol):
    """Plans how many instances of each model each region has."""

    def instances(
        self, demand_tps: Mapping[tuple[str, str], Sequence[float]], pools: Sequence[PoolCounts]
    ) -> Mapping[str, int]:
        """Replicas by pool, within the pool's limits; missing pools keep their number.

        `demand_tps` is input tokens per second by (model, region), in each window of the planning period.
        """


class CascadeReplanner(Protocol):
    """Observes a cascade and replans it. A cascade policy and a scaler share one instance."""

    def arrived(self, request: RequestView, now: float) -> None:
        """Record a request's arrival."""

    def audits(self, request: int) -> bool:
        """Whether all models answer this request, to learn all of their scores."""

    def scored(self, request: int, stage: int, score: float) -> None:
        """Record the score of a stage's answer."""

    def ended(self, record: Ended) -> None:
        """Record that a request's stage has ended."""

    def thresholds(self) -> Sequence[float]:
        """The thresholds of the active plan: one per stage except the last."""

    def replicas(self, now: float) -> Mapping[str, int]:
        """The wanted replicas of the newest plan, by pool; pools outside the cascade are missing."""

    def adopt(self) -> None:
        """Activate the newest plan, once replicas of each of its models serve."""


@runtime_checkable
class Learner(Protocol):
    """A policy that learns from ended requests."""

    def learn(self, record: Ended) -> None: ...
