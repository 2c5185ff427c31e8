"""Which policies a run uses, and where they act."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from msgspec import Struct

from headway.core.policy import Migration, Ordering, Router, Scaler

OrderingAt = Literal["replica", "gateway", "both"]


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
    scaler: Callable[[], Scaler] | None = None
    """How many replicas each pool has; one for the whole fleet. None = as many as at the start."""
