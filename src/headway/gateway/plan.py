"""What a gateway is to do: pools, where their replicas listen or how they are started, policies, limits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import Struct

from headway.control.policies import Policies
from headway.core.fleet import Combo, Pool, RoleChange
from headway.core.pacer import Pacer
from headway.gateway.fleet.starting import Kubernetes, Processes
from headway.gateway.settings import Api, Judge, Settings
from headway.gateway.workers.planner_process import PlannerProcesses


class Served(Struct, frozen=True):
    """One pool, and where its replicas listen."""

    pool: Pool
    endpoints: tuple[str, ...]
    api: Api
    kv_blocks: int
    """Of one replica."""
    start: Processes | Kubernetes | None = None
    """How replicas are started; None: they are where they are."""
    slots: Path | None = None
    """The folder through which they hand over KV caches."""
    combo: Combo | None = None
    """Of which the pool is a part."""

    @property
    def deployment(self) -> Pool | Combo:
        """What comes and goes as one."""
        return self.pool if self.combo is None else self.combo

    @property
    def num_initial(self) -> int:
        """Replicas that there are at first; a part of a combo has so many in each."""
        return self.pool.replicas * (1 if self.combo is None else self.combo.replicas)


class Plan(Struct, frozen=True):
    """What a gateway is to do."""

    pools: tuple[Served, ...]
    names: dict[str, tuple[str, ...]]
    """What requests may call each model."""
    policies: Policies
    pacer: Pacer
    seed: int
    settings: Settings
    tell_priority: bool
    """Engines are told tiers, and go by them."""
    judge: Judge | None = None
    """Of the cascade's answers, where there is a cascade."""
    gpu_limits: tuple[tuple[str, str, int], ...] = ()
    """(region, GPU, how many there are), where scaling has a limit."""
    roles: tuple[RoleChange, ...] = ()
    """What replicas of combos are for from a time on, in seconds from the start."""
    clerks: PlannerProcesses | None = None
    """Who makes plans while it serves."""
    planned_gpus: int | None = None
    """How many GPUs of this machine the cascade's replicas share, where plans say what they are."""
    news: Callable[[], Sequence[str]] = tuple
    """What a planner has had to say until now, for the log."""
