"""What a gateway serves: pools, policies and settings, as a fleet file gives them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct

from headway.control.policies import Policies
from headway.core.fleet import RoleChange
from headway.core.pacer import Pacer
from headway.gateway.fleet.specs import ServedPool
from headway.gateway.settings import Judge, Settings


class ServingPlan(Struct, frozen=True):
    """The parts of a fleet file that a gateway needs."""

    pools: tuple[ServedPool, ...]
    names: dict[str, tuple[str, ...]]
    """The names that requests may use, by model."""
    policies: Policies
    pacer: Pacer
    seed: int
    settings: Settings
    sends_priority: bool
    """Requests to engines carry their tier as `priority`."""
    judge: Judge | None = None
    """Scores the cascade's answers; None without a cascade."""
    gpu_limits: tuple[tuple[str, str, int], ...] = ()
    """(region, GPU, number of GPUs) where scaling is limited."""
    roles: tuple[RoleChange, ...] = ()
    """Scheduled changes of replicas' roles, in seconds from the start."""
    planned_gpus: int | None = None
    """GPUs of this machine that the cascade's replicas share, if a planner chooses the replicas."""
    planner_news: Callable[[], Sequence[str]] = tuple
    """Returns all messages of the planner so far, for the log."""
    stop_planners: Callable[[], None] = lambda: None
    """Ends the processes that compute plans."""
