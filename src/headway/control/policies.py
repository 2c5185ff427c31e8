"""Which policies a run uses, and where they act."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from msgspec import Struct

from headway.core.policy import Admission, Cascade, Migration, Ordering, Router, Scaler

OrderingAt = Literal["replica", "gateway", "both"]


class CascadeOf(Struct, frozen=True):
    """Models that answer one after the other until an answer is good enough."""

    name: str
    """What requests ask for; those that ask for no model get it, too."""
    models: tuple[str, ...]
    """The smallest first."""
    policy: Callable[[], Cascade]
    judge_s: float = 0.27
    """Seconds that judging an answer takes; Cascadia's (section 4.1) unless given."""
    judge_usd: float = 0.0
    """What judging an answer costs."""
    judge_bias: float = 0.0
    """Of the judge's scores, 0 to 100."""
    judge_noise: float = 0.0
    """Standard deviation of the judge's scores."""


class Policies(Struct, frozen=True):
    """Makers of policies: every model's pools get a router, every queue an ordering, all fresh for each run."""

    router: Callable[[], Router]
    ordering: Callable[[], Ordering]
    ordering_at: OrderingAt = "replica"
    """Where the ordering acts; elsewhere the line is first come, first served."""
    window: int | None = None
    """A replica is given at most this many requests in flight, the others are held back; None = no holding."""
    migration: Callable[[], Migration] | None = None
    """Who goes to another replica; every model's replicas get one. None = nobody."""
    admission: Callable[[], Admission] | None = None
    """Who is kept for later; every model's replicas get one. None = nobody."""
    cascade: CascadeOf | None = None
    """Which model answers. None = the one that a request asks for."""
    scaler: Callable[[], Scaler] | None = None
    """How many replicas each pool has; one for the whole fleet. None = as many as at the start."""
