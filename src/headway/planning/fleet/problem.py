"""A fleet plan for several models: options, rehearsed fleets, the choice. Values only, fit for JSON."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from headway.metrics.seeds import Estimate
from headway.planning.combos.problem import GpuCombo, Group

PointKind = Literal["plan", "router", "one less", "one more", "disaggregated", "not disaggregated", "one type", "tiers"]


class SizedOption(Struct, frozen=True, forbid_unknown_fields=True):
    """A unit of GPUs for a model, and the number of units that serves all of its requests within the SLOs."""

    model: str
    unit: GpuCombo
    """One replica, or one set of prefill and decode replicas."""
    least: int | None
    """The fewest units with which enough requests are in time; None: no tried number suffices."""
    attainment: float | None
    """Attainment with this many units, or the highest with the most units tried if none suffices; None: unknown."""
    reason: str = ""
    """Why no number suffices."""
    uncalibrated: tuple[str, ...] = ()
    """Step times that were not measured on its GPUs and engine."""
    at_least: int | None = None
    """A lower bound of the unknown `least`: fewer units miss the SLOs. No compared fleet would have units of this kind
    even if so many sufficed. None: `least` is known."""

    @property
    def fewest(self) -> int | None:
        """`least`, or its lower bound; None: no number suffices."""
        return self.least if self.at_least is None else self.at_least

    @property
    def is_split(self) -> bool:
        return self.unit.aggregated is None

    @property
    def usd_per_hour(self) -> float | None:
        """Price of the fewest sufficient units, or its lower bound; None if no number suffices."""
        return None if self.fewest is None else self.fewest * self.unit.usd_per_hour


class FleetPart(Struct, frozen=True, forbid_unknown_fields=True):
    """Units of one kind in a fleet for a model."""

    model: str
    unit: GpuCombo
    count: int
    calibrated: bool = True
    uncalibrated: tuple[str, ...] = ()
    """Step times that were not measured on its GPUs and engine."""

    @property
    def usd_per_hour(self) -> float:
        return self.count * self.unit.usd_per_hour

    @property
    def gpus(self) -> dict[str, int]:
        return {gpu: self.count * num for gpu, num in self.unit.gpus.items()}

    @property
    def label(self) -> str:
        """A label such as "2 H100 (tp 2)" or "1 x (1 h100-80gb-sxm prefill, 2 l40s decode)"."""
        if self.unit.aggregated is not None:
            group = self.unit.aggregated
            return _group(Group(group.gpu, group.tp, self.count * group.instances))
        prefill, decode = self.unit.groups
        return f"{self.count} x ({_group(prefill)} prefill, {_group(decode)} decode)"


def _group(group: Group) -> str:
    return f"{group.num_gpus} {group.gpu}" + (f" (tp {group.tp})" if group.tp > 1 else "")


class FleetRun(Struct, frozen=True, forbid_unknown_fields=True):
    """A rehearsal of a whole fleet. A latency is None if no request finished."""

    attainment: float
    """Share of all requests that met their SLOs."""
    by_model: dict[str, float]
    """`attainment` for each model."""
    ttft_p99_s: float | None
    tpot_p99_s: float | None
    e2e_p99_s: float | None
    num_requests: int
    is_growing: bool
    """Whether waits grew during the run."""
    kwh_per_day: float | None = None
    """Energy of the GPUs at their mean power in the run; None: unknown."""
    longest: dict[str, float] = {}
    """Maps each kind of SLO to the factor on predicted latencies that 90% of measured runs stay below; empty:
    unknown."""
    by_model_if_longest: dict[str, float] = {}
    """`by_model` if all latencies were longer by the factors in `longest`."""

    @property
    def worst(self) -> float:
        """The lowest attainment of any model."""
        return min(self.by_model.values())


class FleetPoint(Struct, frozen=True, forbid_unknown_fields=True):
    """A considered fleet, rehearsed with every seed."""

    kind: PointKind
    label: str
    policies: dict[str, Any]
    """Policies in a scenario's notation."""
    parts: tuple[FleetPart, ...]
    usd_per_hour: float
    runs: tuple[FleetRun, ...]
    """Runs by seed; the first has the original requests."""
    attainment: float
    """Mean over seeds of the lowest model's attainment."""
    interval: Estimate | None
    """95% interval of this mean; None for one seed."""
    is_met: bool
    """Whether every model's attainment meets the target with the original requests."""

    @property
    def router(self) -> str:
        """The name of the router in the fleet's scenario."""
        return router_of(self.policies)


def router_of(policies: dict[str, Any]) -> str:
    routing = policies.get("routing", "")
    return str(routing["name"] if isinstance(routing, dict) else routing)


WORTH = 0.01
"""Share of the cost that separate prefill and decode replicas must save."""


class SplitVerdict(Struct, frozen=True, forbid_unknown_fields=True):
    """Whether separate prefill and decode replicas are worthwhile."""

    status: Literal["worth it", "not worth it", "impossible", "not tried"]
    """`impossible`: no such fleet meets the SLOs with the available GPUs."""
    usd_per_hour_split: float | None = None
    """Price of the cheapest fleet with separate phases for at least one model."""
    usd_per_hour_together: float | None = None
    """Price of the cheapest fleet without separate phases; None if there is none."""
    is_met: bool = True
    """Whether the whole fleet with separate phases keeps enough requests in time."""


class TierVerdict(Struct, frozen=True, forbid_unknown_fields=True):
    """Whether service tiers of requests should be served differently."""

    status: Literal["worth it", "not worth it", "one class"]
    num_classes: int = 1
    """Number of service tiers of the requests."""
    num_tiers: int = 1
    """Number of tiers with which the most requests are in time."""
    gain: Estimate | None = None
    """Attainment with this many tiers minus the attainment of the plan's router without tiers."""


class FleetPlan(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    status: Literal["met", "short"]
    """`short`: the available GPUs do not serve all models within the SLOs; `why` names the shortage."""
    sentences: tuple[str, ...]
    """The answer: fleet and router; disaggregation; tiers."""
    target: float
    """Required share of each model's requests that meet their SLOs."""
    slo: dict[str, float]
    """SLOs of requests without their own: ttft_s, tpot_s, e2e_s."""
    models: dict[str, int]
    """Number of requests of each model."""
    limits: dict[str, int | None]
    """Available GPUs by type; None: unlimited."""
    policies: dict[str, Any] = {}
    """Policies of the plan, in a scenario's notation."""
    parts: tuple[FleetPart, ...] = ()
    gpus: dict[str, int] = {}
    usd_per_hour: float | None = None
    points: tuple[FleetPoint, ...] = ()
    """Completely rehearsed fleets, the plan first."""
    options: tuple[SizedOption, ...] = ()
    split: SplitVerdict = SplitVerdict("not tried")
    tiers: TierVerdict = TierVerdict("one class")
    seeds: tuple[int, ...] = ()
    why: str = ""
    unservable: dict[str, str] = {}
    """Maps each model to why no fleet can keep enough of its requests in time; empty if no such model is known."""
    notes: tuple[str, ...] = ()
    num_simulated: int = 0
    num_found: int = 0
    """Rehearsals found in the cache."""
