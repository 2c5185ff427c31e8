"""How many instances of which model, where and on what: SageServe's program (section 5), and several hours ahead.

Sets and parameters
    i, j, k     models, regions, GPU types; t the periods planned for, w the windows within one
    n_ijk       instances there are
    theta_ik    input tokens per second that an instance serves
    rho_ijt(w)  input tokens per second expected
    alpha_ik    price of an instance's VM for a period; sigma_ik = alpha_ik * its start-up time: the deployment cost
    epsilon     share of its own peak that a region must be able to serve; the rest may go to other regions
    least       instances of a model in a region (7.1: two of each); L_jk GPUs of a region; r_ik GPUs of an instance
Variables       x_ijkt >= 0 instances, whole numbers, with x_ijk0 = n_ijk; the paper's delta is x_ijkt - x_ijk,t-1
                a_ijkt >= 0 instances started
Minimise        gamma + mu = sum of alpha_ik (x_ijkt - n_ijk) + sum of sigma_ik a_ijkt
Subject to      sum over k of theta_ik x_ijkt >= epsilon max over w of rho_ijt(w)               for every i, j, t
                sum over j, k of theta_ik x_ijkt >= max over w of sum over j of rho_ijt(w)      for every i, t
                sum over k of x_ijkt >= least;  sum over i of r_ik x_ijkt <= L_jk;  a_ijkt >= x_ijkt - x_ijk,t-1

With one period this is the paper's program, and GPU limits and least, which its text states, are added to its
equations. Further periods are ours: gamma counts every period's instances, so that one is kept for an hour of low
demand where starting it again would cost more. Demand may be any quantile of a forecast; `worthwhile_quantile` says
which. Where limits leave too little, the plan serves the most tokens that can be served, at the least cost.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import inf
from typing import Literal

from msgspec import Struct

from headway.core.errors import HeadwayError, unknown

HOUR_S = 3600.0
TOLERANCE = 1e-6
"""Of a demand, by which a plan may miss it: the solver's."""
NOTHING_TPS = 1e-6
"""Demand that is no demand: what rounding leaves of a forecast of none."""


class Kind(Struct, frozen=True, forbid_unknown_fields=True):
    """An instance of a model on a type of GPU."""

    model: str
    gpu: str
    tps: float
    """theta: input tokens per second that it serves within the SLO."""
    usd_per_hour: float
    """Of all its GPUs."""
    startup_s: float
    gpus: int = 1

    def __post_init__(self) -> None:
        if not (0 < self.tps < inf and 0 <= self.usd_per_hour < inf and 0 <= self.startup_s < inf and self.gpus > 0):
            raise ValueError(f"{self.model} on {self.gpu}: expected tps and gpus above 0, price and start-up from 0")


class Have(Struct, frozen=True, forbid_unknown_fields=True):
    """Instances that are there."""

    model: str
    region: str
    gpu: str
    count: int


Demand = dict[str, dict[str, tuple[float, ...]]]
"""Input tokens per second by model, region and window of one period; what is absent is 0."""


class Problem(Struct, frozen=True, forbid_unknown_fields=True):
    """What is asked."""

    kinds: tuple[Kind, ...]
    regions: tuple[str, ...]
    demand: tuple[Demand, ...]
    """Period by period; the paper plans for one."""
    have: tuple[Have, ...] = ()
    limits: dict[str, dict[str, int]] = {}
    """GPUs by region and type; what is absent has no limit."""
    epsilon: float = 1.0
    least: int = 0
    """Instances of every model in every region."""
    period_s: float = HOUR_S
    least_at: dict[str, dict[str, int]] = {}
    """`least` by model and region, where it is another number."""

    def __post_init__(self) -> None:
        if not 0 < self.epsilon <= 1:
            raise ValueError(f"epsilon: {self.epsilon}; expected more than 0, 1 at most")
        if any(each < 0 for by_region in self.least_at.values() for each in by_region.values()):
            raise ValueError("least_at: expected numbers from 0")
        if self.least < 0 or not self.demand or not self.kinds or not self.regions or not self.period_s > 0:
            raise ValueError("expected kinds, regions and a period's demand or more, and least from 0")

    @property
    def models(self) -> tuple[str, ...]:
        """In the order of `kinds`."""
        return tuple(dict.fromkeys(kind.model for kind in self.kinds))


class Change(Struct, frozen=True, forbid_unknown_fields=True):
    """Instances of one kind in one region in one period; delta is `after - before`."""

    period: int
    model: str
    region: str
    gpu: str
    before: int
    after: int


class Binding(Struct, frozen=True, forbid_unknown_fields=True):
    """A constraint with no instance to spare."""

    kind: Literal["region demand", "global demand", "gpus", "least"]
    name: str
    period: int
    used: float
    limit: float
    objective_without: float | None = None
    """Of the same problem without it, where that was asked."""


class Plan(Struct, frozen=True, forbid_unknown_fields=True):
    """The answer."""

    status: Literal["optimal", "feasible", "short"]
    """`feasible`: the gap or the time asked for was reached first. `short`: demand cannot be met; `why` says where."""
    objective_usd: float
    """gamma + mu."""
    vm_usd: float
    """gamma: VMs, compared with keeping those there are."""
    deployment_usd: float
    """mu: paid for VMs while instances start on them."""
    bound_usd: float | None
    gap: float | None
    """Between the two, relative to the price of all instances and their starts: gamma + mu may well be 0."""
    changes: tuple[Change, ...]
    """Of every kind, region and period in which there is any instance before or after."""
    binding: tuple[Binding, ...]
    why: str = ""

    def after(self, period: int = 0) -> dict[tuple[str, str, str], int]:
        """Instances by model, region and GPU type."""
        return {(c.model, c.region, c.gpu): c.after for c in self.changes if c.period == period}


def worthwhile_quantile(miss_usd: float, idle_usd: float) -> float:
    """The quantile of demand to be ready for: a unit missed costs `miss_usd`, one too many `idle_usd` (newsvendor)."""
    if not (0 <= miss_usd < inf and 0 <= idle_usd < inf and miss_usd + idle_usd > 0):
        raise HeadwayError(f"costs {miss_usd} and {idle_usd}: expected numbers from 0, not both 0")
    return miss_usd / (miss_usd + idle_usd)


class Need(Struct, frozen=True):
    """A row of the program that demands something: `sum of value * x >= at_least` over places."""

    kind: Literal["region demand", "global demand", "least"]
    name: str
    period: int
    model: str
    regions: tuple[str, ...]
    at_least: float


def needs(problem: Problem) -> Iterator[Need]:
    """Of every period: what each region, each model and each endpoint needs, where that is more than nothing."""
    for t, demand in enumerate(problem.demand):
        for model in problem.models:
            by_region = demand.get(model, {})
            for region in problem.regions:
                peak = problem.epsilon * max(by_region.get(region, ()), default=0.0)
                if peak > NOTHING_TPS:
                    yield Need("region demand", f"{model} in {region}", t, model, (region,), peak)
                if least := problem.least_at.get(model, {}).get(region, problem.least):
                    yield Need("least", f"{model} in {region}", t, model, (region,), least)
            together = max(map(sum, zip(*by_region.values(), strict=True)), default=0.0)
            if together > NOTHING_TPS:
                yield Need("global demand", model, t, model, problem.regions, together)


def check(problem: Problem) -> None:
    """HeadwayError where the problem does not hold together."""
    kinds = {(kind.model, kind.gpu) for kind in problem.kinds}
    if len(kinds) < len(problem.kinds) or len(set(problem.regions)) < len(problem.regions):
        raise HeadwayError("a kind (model and GPU type), or a region, stands there twice")
    for each in problem.have:
        if (each.model, each.gpu) not in kinds or each.region not in problem.regions or each.count < 0:
            raise HeadwayError(f"have: {each.count} of {each.model} on {each.gpu} in {each.region}: unknown")
    said = [("limits", region) for region in problem.limits]
    for model, by_region in problem.least_at.items():
        if model not in problem.models:
            raise unknown("model", model, problem.models, "least_at")
        said += [(f"least_at: {model}", region) for region in by_region]
    for key, region in said:
        if region not in problem.regions:
            raise unknown("region", region, problem.regions, key)
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


def places(problem: Problem) -> tuple[tuple[Kind, str], ...]:
    """Every kind in every region."""
    return tuple(product(problem.kinds, problem.regions))
