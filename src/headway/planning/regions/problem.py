"""Instances of each model by region and GPU type: SageServe's program (section 5), for one or several hours.

Sets and parameters
    i, j, k     models, regions, GPU types; t the periods planned for, w the windows within one
    n_ijk       present instances
    theta_ik    input tokens per second that an instance serves
    rho_ijt(w)  input tokens per second expected
    alpha_ik    price of an instance's VM for a period; sigma_ik = alpha_ik * its start-up time: the deployment cost
    epsilon     share of its own peak that a region must be able to serve; other regions may serve the rest
    least       instances of a model in a region (7.1: two of each); L_jk GPUs of a region; r_ik GPUs of an instance
    l_ijk, u_ijk  fewest and most instances of an endpoint (2.1)
Variables       l_ijk <= x_ijkt <= u_ijk instances, whole numbers, with x_ijk0 = n_ijk; the paper's delta is
                x_ijkt - x_ijk,t-1
                a_ijkt >= 0 instances started
Minimise        gamma + mu = sum of alpha_ik (x_ijkt - n_ijk) + sum of sigma_ik a_ijkt
Subject to      sum over k of theta_ik x_ijkt >= epsilon max over w of rho_ijt(w)               for every i, j, t
                sum over j, k of theta_ik x_ijkt >= max over w of sum over j of rho_ijt(w)      for every i, t
                sum over k of x_ijkt >= least;  sum over i of r_ik x_ijkt <= L_jk;  a_ijkt >= x_ijkt - x_ijk,t-1

With one period this is the paper's program, with the GPU limits and the bounds on instances that its text states added
to its equations. A plan keeps to limits and bounds, so nothing has to be cut off it afterwards. Further periods are
ours: gamma counts every period's instances, so that an instance stays for an hour of low demand if starting it again
would cost more. Demand may be any quantile of a forecast; `worthwhile_quantile` chooses one. If limits or bounds leave
too few instances, the plan serves the most tokens that can be served, at the least cost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import product
from math import inf
from typing import Literal

from msgspec import Struct

from headway.core.errors import HeadwayError, unknown

HOUR_S = 3600.0
TOLERANCE = 1e-6
"""Share of a demand by which a plan may miss the demand: the solver's tolerance."""
NOTHING_TPS = 1e-6
"""Largest demand that counts as zero, because a forecast of 0 may have rounding errors."""


class InstanceKind(Struct, frozen=True, forbid_unknown_fields=True):
    model: str
    gpu: str
    tps: float
    """theta: input tokens per second served within the SLO."""
    usd_per_hour: float
    """Price of all its GPUs."""
    startup_s: float
    gpus: int = 1

    def __post_init__(self) -> None:
        if not (0 < self.tps < inf and 0 <= self.usd_per_hour < inf and 0 <= self.startup_s < inf and self.gpus > 0):
            raise ValueError(f"{self.model} on {self.gpu}: expected tps and gpus above 0, price and start-up from 0")


class PresentInstances(Struct, frozen=True, forbid_unknown_fields=True):
    model: str
    region: str
    gpu: str
    count: int


class InstanceBounds(Struct, frozen=True, forbid_unknown_fields=True):
    """The fewest and the most instances of a kind in a region."""

    model: str
    region: str
    gpu: str
    least: int = 0
    most: int | None = None
    """Maximum number of instances; None: unlimited."""

    def __post_init__(self) -> None:
        if self.least < 0 or (self.most is not None and self.most < self.least):
            where = f"{self.model} on {self.gpu} in {self.region}"
            raise ValueError(f"{where}: {self.least} to {self.most} instances; expected 0 or more, in this order")


RegionDemand = dict[str, dict[str, tuple[float, ...]]]
"""Input tokens per second by model, region and window of one period; a missing key means 0."""


class RegionProblem(Struct, frozen=True, forbid_unknown_fields=True):
    kinds: tuple[InstanceKind, ...]
    regions: tuple[str, ...]
    demand: tuple[RegionDemand, ...]
    """Demand by period; the paper plans for one period."""
    have: tuple[PresentInstances, ...] = ()
    limits: dict[str, dict[str, int]] = {}
    """GPUs by region and type; a missing type has no limit."""
    epsilon: float = 1.0
    least: int = 0
    """Minimum number of instances of every model in every region."""
    period_s: float = HOUR_S
    bounds: tuple[InstanceBounds, ...] = ()
    """Bounds of single kinds in single regions. Every plan obeys them, also short plans."""

    def __post_init__(self) -> None:
        if not 0 < self.epsilon <= 1:
            raise ValueError(f"epsilon: {self.epsilon}; expected more than 0, 1 at most")
        if self.least < 0 or not self.demand or not self.kinds or not self.regions or not self.period_s > 0:
            raise ValueError("expected kinds, regions and a period's demand or more, and least from 0")

    @property
    def models(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(kind.model for kind in self.kinds))


class InstanceChange(Struct, frozen=True, forbid_unknown_fields=True):
    """Instances of one kind in one region and period; delta is `after - before`."""

    period: int
    model: str
    region: str
    gpu: str
    before: int
    after: int


class RegionBinding(Struct, frozen=True, forbid_unknown_fields=True):
    """A constraint that one more, or one less, instance would violate."""

    kind: Literal["region demand", "global demand", "gpus", "least", "most"]
    name: str
    period: int
    used: float
    limit: float
    objective_without: float | None = None
    """Objective of the same problem without the constraint; None: not computed."""


class RegionPlan(Struct, frozen=True, forbid_unknown_fields=True):
    status: Literal["optimal", "feasible", "short"]
    """`feasible`: the gap or the time limit ended the proof. `short`: demand cannot be met; `why` names the place."""
    objective_usd: float
    """gamma + mu."""
    vm_usd: float
    """gamma: cost of VMs minus the cost of keeping the current ones."""
    deployment_usd: float
    """mu: the price of VMs while instances start on them."""
    bound_usd: float | None
    gap: float | None
    """Relative gap of the search: a share of the price of all instances and their starts, because gamma + mu may
    be 0."""
    changes: tuple[InstanceChange, ...]
    """Changes for every kind, region and period that has instances before or after the change."""
    binding: tuple[RegionBinding, ...]
    why: str = ""

    def after(self, period: int = 0) -> dict[tuple[str, str, str], int]:
        return {(c.model, c.region, c.gpu): c.after for c in self.changes if c.period == period}


def worthwhile_quantile(miss_usd: float, idle_usd: float) -> float:
    """The quantile of demand to plan for (newsvendor): a missed unit costs `miss_usd`, a surplus unit `idle_usd`."""
    if not (0 <= miss_usd < inf and 0 <= idle_usd < inf and miss_usd + idle_usd > 0):
        raise HeadwayError(f"costs {miss_usd} and {idle_usd}: expected numbers from 0, not both 0")
    return miss_usd / (miss_usd + idle_usd)


class Requirement(Struct, frozen=True):
    """A row of the program: `sum of value * x >= at_least` over places."""

    kind: Literal["region demand", "global demand", "least"]
    name: str
    period: int
    model: str
    regions: tuple[str, ...]
    at_least: float


def requirements(problem: RegionProblem) -> Iterator[Requirement]:
    """All positive requirements of every period: for each region, each model, and each model in each region."""
    for t, demand in enumerate(problem.demand):
        for model in problem.models:
            by_region = demand.get(model, {})
            for region in problem.regions:
                peak = problem.epsilon * max(by_region.get(region, ()), default=0.0)
                if peak > NOTHING_TPS:
                    yield Requirement("region demand", f"{model} in {region}", t, model, (region,), peak)
                if problem.least:
                    yield Requirement("least", f"{model} in {region}", t, model, (region,), problem.least)
            together = max(map(sum, zip(*by_region.values(), strict=True)), default=0.0)
            if together > NOTHING_TPS:
                yield Requirement("global demand", model, t, model, problem.regions, together)


def check(problem: RegionProblem) -> None:
    """Raise HeadwayError if parts of the problem contradict each other."""
    kinds = {(kind.model, kind.gpu) for kind in problem.kinds}
    if len(kinds) < len(problem.kinds) or len(set(problem.regions)) < len(problem.regions):
        raise HeadwayError("a kind (model and GPU type), or a region, is listed twice")
    for each in problem.have:
        if (each.model, each.gpu) not in kinds or each.region not in problem.regions or each.count < 0:
            raise HeadwayError(f"have: {each.count} of {each.model} on {each.gpu} in {each.region}: unknown")
    for region in problem.limits:
        if region not in problem.regions:
            raise unknown("region", region, problem.regions, "limits")
    _check_bounds(problem)
    for t, demand in enumerate(problem.demand):
        windows = set()
        for model, region in ((m, r) for m, by_region in demand.items() for r in by_region):
            where, values = f"demand: period {t}", demand[model][region]
            if model not in problem.models:
                raise unknown("model", model, problem.models, where)
            if region not in problem.regions:
                raise unknown("region", region, problem.regions, where)
            if not all(0 <= value < inf for value in values):
                raise HeadwayError(f"{where}: {model} in {region}: {values}; expected numbers from 0")
            windows.add(len(values))
        if len(windows) > 1:
            raise HeadwayError(
                f"demand: period {t}: {sorted(windows)} windows; expected as many for every model and region"
            )


def _check_bounds(problem: RegionProblem) -> None:
    gpus = {(kind.model, kind.gpu): kind.gpus for kind in problem.kinds}
    least: Counter[tuple[str, str]] = Counter()
    for each in problem.bounds:
        if (each.model, each.gpu) not in gpus or each.region not in problem.regions:
            raise HeadwayError(f"bounds: {each.model} on {each.gpu} in {each.region}: unknown")
        least[each.region, each.gpu] += each.least * gpus[each.model, each.gpu]
    if len({(each.model, each.region, each.gpu) for each in problem.bounds}) < len(problem.bounds):
        raise HeadwayError("bounds: a kind is listed twice for a region")
    for region, by_gpu in problem.limits.items():
        for gpu, limit in by_gpu.items():
            if (num := least[region, gpu]) > limit:
                raise HeadwayError(
                    f"bounds: {gpu} in {region}: the fewest instances have {num} GPUs; the limit is {limit}"
                )


def places(problem: RegionProblem) -> tuple[tuple[InstanceKind, str], ...]:
    return tuple(product(problem.kinds, problem.regions))
