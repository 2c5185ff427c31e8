"""A fleet plan for several models: options, rehearsed fleets, the choice. Values only, fit for JSON."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from headway.metrics.seeds import Estimate
from headway.planning.combos.problem import GpuCombo, Group

PointKind = Literal["plan", "router", "one less", "one more", "disaggregated", "not disaggregated", "one type", "tiers"]


class SizedOption(Struct, frozen=True, forbid_unknown_fields=True):
    """A unit of GPUs for a model, and how many of them serve all of its requests within the SLOs."""

    model: str
    unit: GpuCombo
    """One replica, or one set of prefill and decode replicas."""
    least: int | None
    """The fewest units with which enough requests are in time; None: no number that was tried."""
    attainment: float | None
    """With so many units; None: not known."""
    reason: str = ""
    """Why no number is enough."""
    uncalibrated: tuple[str, ...] = ()
    """What of its step times was not measured on its GPUs and engine."""

    @property
    def is_split(self) -> bool:
        return self.unit.aggregated is None

    @property
    def usd_per_hour(self) -> float | None:
        """Price of the fewest units that are enough; None: no number is."""
        return None if self.least is None else self.least * self.unit.usd_per_hour


class FleetPart(Struct, frozen=True, forbid_unknown_fields=True):
    """Units of one kind that a fleet has for a model."""

    model: str
    unit: GpuCombo
    count: int
    calibrated: bool = True
    uncalibrated: tuple[str, ...] = ()
    """What of its step times was not measured on its GPUs and engine."""

    @property
    def usd_per_hour(self) -> float:
        return self.count * self.unit.usd_per_hour

    @property
    def gpus(self) -> dict[str, int]:
        return {gpu: self.count * num for gpu, num in self.unit.gpus.items()}

    @property
    def label(self) -> str:
        """As in "2 H100 (tp 2)" or "1 x (1 h100-80gb-sxm prefill, 2 l40s decode)"."""
        if self.unit.aggregated is not None:
            group = self.unit.aggregated
            return _group(Group(group.gpu, group.tp, self.count * group.instances))
        prefill, decode = self.unit.groups
        return f"{self.count} x ({_group(prefill)} prefill, {_group(decode)} decode)"


def _group(group: Group) -> str:
    return f"{group.num_gpus} {group.gpu}" + (f" (tp {group.tp})" if group.tp > 1 else "")


class FleetRun(Struct, frozen=True, forbid_unknown_fields=True):
    """A rehearsal of a whole fleet. A latency of None: no request finished."""

    attainment: float
    """Share of all requests that met their SLOs."""
    by_model: dict[str, float]
    """The same for each model."""
    ttft_p99_s: float | None
    tpot_p99_s: float | None
    e2e_p99_s: float | None
    num_requests: int
    is_growing: bool
    """Whether waits grew over the run."""
    kwh_per_day: float | None = None
    """Of the GPUs, at their mean power in the run; None: not known."""
    longest: dict[str, float] = {}
    """By kind of SLO, the factor on predicted latencies that 9 of 10 measured runs stay below; empty: not known."""
    by_model_if_longest: dict[str, float] = {}
    """As `by_model`, if all latencies were longer by these factors."""

    @property
    def worst(self) -> float:
        """The attainment of the model with the lowest one."""
        return min(self.by_model.values())


class FleetPoint(Struct, frozen=True, forbid_unknown_fields=True):
    """A fleet that was considered, rehearsed with every seed."""

    kind: PointKind
    label: str
    policies: dict[str, Any]
    """As in a scenario."""
    parts: tuple[FleetPart, ...]
    usd_per_hour: float
    runs: tuple[FleetRun, ...]
    """By seed, the requests as they are first."""
    attainment: float
    """Mean over seeds, of the model with the lowest."""
    interval: Estimate | None
    """Of that mean, at 95%; None for one seed."""
    is_met: bool
    """Whether every model's attainment meets the target, with the requests as they are."""

    @property
    def router(self) -> str:
        """The name of the router that the fleet's scenario has."""
        return router_of(self.policies)


def router_of(policies: dict[str, Any]) -> str:
    routing = policies.get("routing", "")
    return str(routing["name"] if isinstance(routing, dict) else routing)


WORTH = 0.01
"""Share of the cost that separate prefill and decode replicas must save."""


class SplitVerdict(Struct, frozen=True, forbid_unknown_fields=True):
    """Whether separate prefill and decode replicas are worth it."""

    status: Literal["worth it", "not worth it", "impossible", "not tried"]
    """`impossible`: no such fleet meets the SLOs with the GPUs at hand."""
    usd_per_hour_split: float | None = None
    """Of the cheapest fleet that separates them for one model at least."""
    usd_per_hour_together: float | None = None
    """Of the cheapest fleet that does not; None: there is none."""
    is_met: bool = True
    """Whether the whole fleet that separates them keeps enough requests in time."""


class TierVerdict(Struct, frozen=True, forbid_unknown_fields=True):
    """Whether classes of requests should be served differently."""

    status: Literal["worth it", "not worth it", "one class"]
    num_classes: int = 1
    """Of the requests."""
    num_tiers: int = 1
    """With which the most requests are in time."""
    gain: Estimate | None = None
    """Attainment with so many tiers less that of the plan's router without."""


class FleetPlan(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    status: Literal["met", "short"]
    """`short`: the GPUs at hand do not serve all models within the SLOs; `why` says what is missing."""
    sentences: tuple[str, ...]
    """The answer: fleet and router; disaggregation; tiers."""
    target: float
    """Share of each model's requests that must meet their SLOs."""
    slo: dict[str, float]
    """Of requests without their own: ttft_s, tpot_s, e2e_s."""
    models: dict[str, int]
    """Requests of each model."""
    limits: dict[str, int | None]
    """GPUs at hand by type; None: as many as wanted."""
    policies: dict[str, Any] = {}
    """Of the plan, as in a scenario."""
    parts: tuple[FleetPart, ...] = ()
    gpus: dict[str, int] = {}
    usd_per_hour: float | None = None
    points: tuple[FleetPoint, ...] = ()
    """Fleets that were rehearsed whole, the plan first."""
    options: tuple[SizedOption, ...] = ()
    split: SplitVerdict = SplitVerdict("not tried")
    tiers: TierVerdict = TierVerdict("one class")
    seeds: tuple[int, ...] = ()
    why: str = ""
    unservable: dict[str, str] = {}
    """By model: why no fleet of any GPUs keeps enough of its requests in time. Empty: none that is known."""
    notes: tuple[str, ...] = ()
    num_simulated: int = 0
    num_found: int = 0
    """Rehearsals that the cache had."""
