"""The policies that a run uses, and where they act."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Literal, Protocol

from msgspec import Meta, Struct, field

from headway.core.policy import Admission, Cascade, Migration, Ordering, Router, Scaler


class Least(Protocol):
    """The least number of replicas at any time."""

    def at(self, wall_s: float, /) -> tuple[int, float]:
        """The number at a time since the epoch, and until when it holds, in the same seconds."""


OrderingAt = Literal["replica", "gateway", "both"]
FallbackReason = Literal["down", "rejects", "slow"]
_Positive = Annotated[float, Meta(gt=0)]


class CascadeConfig(Struct, frozen=True):
    """Models that answer one after the other until an answer is good enough."""

    name: str
    """Model name that selects the cascade. Requests without a model name use the cascade, too."""
    models: tuple[str, ...]
    """Names of the models, the smallest first."""
    policy: Callable[[], Cascade]
    judge_s: float = 0.27
    """Seconds to judge one answer. The default is from Cascadia, section 4.1."""
    judge_usd: float = 0.0
    """Price of judging one answer."""
    judge_bias: float = 0.0
    """Bias of the judge's scores, which are 0 to 100."""
    judge_noise: float = 0.0
    """Standard deviation of the judge's scores."""


class FallbackConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """When a model's fallbacks answer."""

    when: tuple[FallbackReason, ...] = ("down", "rejects")
    """`down`: no replica of the model is up. `rejects`: its queues are full, the request is too long for it, or every
    attempt at it has failed. `slow`: too many of its latest requests have missed their TTFT SLO."""
    ttft_s: _Positive | None = None
    """The TTFT SLO of requests without their own, for `slow`. Without it, they do not count."""
    miss_share: Annotated[float, Meta(gt=0, le=1)] = 0.1
    """Share of requests that miss their SLO from which on the model is slow. It is slow until the share is half of
    this."""
    window_s: _Positive = 30.0
    """Time over which they are counted, and the shortest time for which the model is slow."""
    min_requests: Annotated[int, Meta(ge=1)] = 10
    """Requests in that time that the judgement needs."""
    return_s: Annotated[float, Meta(ge=0)] = 60.0
    """A slow model keeps a tenth of its requests, by which its times stay known. After it, its share of them grows to
    all in this time."""


class Policies(Struct, frozen=True):
    """Factories of policies. Every run creates its own: a router per model, an ordering per queue."""

    router: Callable[[], Router]
    ordering: Callable[[], Ordering]
    ordering_at: OrderingAt = "replica"
    """Queues that use the ordering. The others are first come, first served."""
    window: int | None = None
    """Most requests in flight at one replica; the others are held. None = no limit."""
    preempt_every_s: float | None = None
    """Time between two looks at whether requests that run rank behind held ones, and are paused for them. None = what
    was sent stays."""
    max_hold_s: float | None = None
    """Longest time for which a request that has not been placed yet is held; it is rejected then. None = any time."""
    shed_ttft_share: float | None = None
    """Of its TTFT SLO, the share from which on a request's expected TTFT has it rejected. None = no request is shed."""
    prompt_window: int | None = None
    """Where the hold queue shares service: most prompt tokens at a replica of requests without a first token, beyond
    which shares that have their part wait. None = no limit. The ordering may set another."""
    migration: Callable[[], Migration] | None = None
    """One policy per model; None = no migration."""
    admission: Callable[[], Admission] | None = None
    """One policy per model; None = every request is released at once."""
    cascade: CascadeConfig | None = None
    """None = the model that the request names answers."""
    scaler: Callable[[], Scaler] | None = None
    """One policy for the whole fleet; None = the number of replicas is fixed."""
    least: Mapping[str, Least] = field(default_factory=dict)
    """By pool or combo, the least number of replicas by the time of day, where it changes."""
    began_s: float | None = None
    """Seconds from the epoch to the run's time 0, for `least`; None: the driver knows."""
    fallback: FallbackConfig = FallbackConfig()
    """When the fallbacks of the fleet's models answer."""
    slo_ttft_s: float | None = None
    slo_tpot_s: float | None = None
    slo_e2e_s: float | None = None
    """SLOs of requests without their own. None = they have none."""
