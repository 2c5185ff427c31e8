"""The policies that a run uses, and where they act."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Literal, Protocol

from msgspec import Meta, Struct, field

from headway.core.policy import Admission, Cascade, Migration, Ordering, Router, Scaler


class Least(Protocol):
    """The minimum number of replicas over time."""

    def at(self, wall_s: float, /) -> tuple[int, float]:
        """The minimum at a time, and until when it holds, both in seconds since the epoch."""


OrderingAt = Literal["replica", "gateway", "both"]
FallbackReason = Literal["down", "rejects", "slow"]
_Positive = Annotated[float, Meta(gt=0)]


class CascadeConfig(Struct, frozen=True):
    """The models of a cascade: they answer one after the other until an answer is good enough."""

    name: str
    """Model name that selects the cascade. Requests without a model name use the cascade, too."""
    models: tuple[str, ...]
    """Names of the models, the smallest first."""
    policy: Callable[[], Cascade]
    judge_s: float = 0.27
    """Seconds to judge one answer; the default is from Cascadia, section 4.1."""
    judge_usd: float = 0.0
    """Cost of judging one answer."""
    judge_bias: float = 0.0
    """Bias of the judge's scores, which are 0 to 100."""
    judge_noise: float = 0.0
    """Standard deviation of the judge's scores."""


class FallbackConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The conditions under which a model's fallbacks answer."""

    when: tuple[FallbackReason, ...] = ("down", "rejects")
    """`down`: no replica of the model is up. `rejects`: the model's queues are full, the request is too long for the
    model, or every attempt at the request has failed. `slow`: too many recent requests of the model missed their TTFT
    SLO."""
    ttft_s: _Positive | None = None
    """TTFT SLO that `slow` uses for requests without their own. Unset: such requests do not count."""
    miss_share: Annotated[float, Meta(gt=0, le=1)] = 0.1
    """The model is slow from this share of requests that miss their SLO, until the share falls to half."""
    window_s: _Positive = 30.0
    """Time window of `miss_share`, and the shortest time for which the model is slow."""
    min_requests: Annotated[int, Meta(ge=1)] = 10
    """Requests needed in the window to judge the model."""
    return_s: Annotated[float, Meta(ge=0)] = 60.0
    """Time over which a recovered model gets its requests back. A slow model keeps a tenth of its requests, so that its
    TTFT stays known; after the recovery, this share grows to all requests."""


class Policies(Struct, frozen=True):
    """Factories of policies. Every run creates its own: one router per model, one ordering per queue."""

    router: Callable[[], Router]
    ordering: Callable[[], Ordering]
    ordering_at: OrderingAt = "replica"
    """Queues that use the ordering. Other queues are first come, first served."""
    window: int | None = None
    """Maximum requests in flight at one replica; further requests are held. None = no limit."""
    preempt_every_s: float | None = None
    """Seconds between preemption checks: a running request that ranks behind a held request is paused for it. None =
    running requests are never paused."""
    max_hold_s: float | None = None
    """Longest hold of a request that has never been placed; then it is rejected. None = no limit."""
    shed_ttft_share: float | None = None
    """A request is rejected when its expected TTFT exceeds this share of its TTFT SLO. None = no request is shed."""
    prompt_window: int | None = None
    """Maximum prompt tokens, at one replica, of requests without a first token. Beyond it, requests of shares that have
    their fair part wait. Applies if the hold queue shares service. None = no limit. The ordering may set another
    value."""
    migration: Callable[[], Migration] | None = None
    """One policy per model; None = no migration."""
    admission: Callable[[], Admission] | None = None
    """One policy per model; None = every request is released at once."""
    cascade: CascadeConfig | None = None
    """The cascade; None = the model that the request names answers."""
    scaler: Callable[[], Scaler] | None = None
    """One policy for the whole fleet; None = the number of replicas is fixed."""
    least: Mapping[str, Least] = field(default_factory=dict)
    """Maps each pool or combo to the minimum number of replicas, if it changes with the time of day."""
    began_s: float | None = None
    """Epoch time of the run's time 0, for `least`; None: the driver knows it."""
    fallback: FallbackConfig = FallbackConfig()
    """The conditions under which the fallbacks of the fleet's models answer."""
    slo_ttft_s: float | None = None
    slo_tpot_s: float | None = None
    slo_e2e_s: float | None = None
    """E2E SLO of requests without their own; None = no SLO."""
