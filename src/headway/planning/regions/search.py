"""Solves SageServe's program, with the sets, parameters, variables and letters of `problem`."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from msgspec import Struct, structs

from headway.planning.regions.problem import (
    HOUR_S,
    TOLERANCE,
    InstanceChange,
    RegionBinding,
    RegionPlan,
    RegionProblem,
    Requirement,
    check,
    places,
    requirements,
)
from headway.planning.solver import Expression, Floats, Status, dot, integers, minimise, new_model, reals

PROVED = 1e-9
"""Largest gap that counts as zero."""
PlanStatus = Literal["optimal", "feasible", "short"]


def plan(problem: RegionProblem, time_limit_s: float = 10.0, gap: float = 0.01, explain: bool = False) -> RegionPlan:
    """The cheapest change of instances. `explain` solves again without each binding constraint.

    The search ends at this `gap`, because proving the last percent can take a hundred times as long. Raises
    HeadwayError if parts of the problem contradict each other.
    """
    check(problem)
    program = _RegionProgram(problem, time_limit_s, gap)
    solution = program.solve(tuple(requirements(problem)))
    if solution.status in ("infeasible", "unknown"):
        return _short_plan(program)
    best = program.plan(solution, "feasible")
    if best.gap is not None and best.gap <= PROVED:
        best = structs.replace(best, status="optimal")
    return structs.replace(best, binding=tuple(map(program.without, best.binding))) if explain else best


def _short_plan(program: _RegionProgram) -> RegionPlan:
    every = tuple(requirements(program.problem))
    first = program.solve(every, max_shortfall=inf)
    least = program.shortfalls(first, every)
    second = program.solve(every, max_shortfall=sum(least) * (1 + TOLERANCE) + TOLERANCE)
    solution = first if second.x is None else second
    missing = [
        (each, short)
        for each, short in zip(every, program.shortfalls(solution, every), strict=True)
        if short > TOLERANCE * each.at_least
    ]
    reasons = [
        f"{each.name} lacks {short:,.4g} of {each.at_least:,.4g} {'instances' if each.kind == 'least' else 'tokens/s'}"
        f" in period {each.period}"
        for each, short in missing
    ]
    units = {"gpus": "GPUs", "most": "instances"}
    of_use = np.any([program.gains(each) > 0 for each, _ in missing], axis=0)
    full = [each for each in program.binding(solution, ()) if (of_use & program.places_of(each)).any()]
    limits = ", ".join(dict.fromkeys(f"{each.name} ({each.limit:,.0f} {units[each.kind]})" for each in full))
    why = "; ".join(reasons) + (f"; no room is left in {limits}" if limits else "")
    return structs.replace(program.plan(solution, "short"), why=why or "the time was over before a plan was found")


class _RegionSolution(Struct, frozen=True):
    status: Status
    x: Floats | None = None
    """Instances by period and place; None without a solution."""
    bound: float | None = None


class _RegionProgram:
    """The program over places, which are pairs of an instance kind (i, k) and a region j.

    Bounds of places are bounds of the variables themselves, so no plan needs to be clipped. In the first period x is n
    + a - b, with b instances stopped; further periods have variables x and a. This substitution halves the time for a
    single period, but multiplies it for further periods. A variable fixed to 1 has the cost of the current instances,
    so that the solver's gap is relative to the whole price.
    """

    def __init__(self, problem: RegionProblem, time_limit_s: float, gap: float) -> None:
        self.problem, self.time_limit_s, self.gap = problem, time_limit_s, gap
        self.places = places(problem)
        self.num_periods, self.num = len(problem.demand), len(self.places)
        counts = {(each.model, each.gpu, each.region): each.count for each in problem.have}
        self.n = np.array([counts.get((k.model, k.gpu, region), 0) for k, region in self.places], dtype=float)
        bounds = {(each.model, each.gpu, each.region): each for each in problem.bounds}
        own = [bounds.get((k.model, k.gpu, region)) for k, region in self.places]
        self.l = np.array([0 if each is None else each.least for each in own], dtype=float)
        self.u = np.array([inf if each is None or each.most is None else each.most for each in own])
        self.names = [f"{kind.model} on {kind.gpu} in {region}" for kind, region in self.places]
        self.models = np.array([kind.model for kind, _ in self.places])
        self.gpus = np.array([kind.gpu for kind, _ in self.places])
        self.regions = np.array([region for _, region in self.places])
        self.theta = np.array([kind.tps for kind, _ in self.places])
        self.r = np.array([float(kind.gpus) for kind, _ in self.places])
        hours = problem.period_s / HOUR_S
        self.alpha = np.array([kind.usd_per_hour * hours for kind, _ in self.places])
        self.sigma = np.array([kind.usd_per_hour * kind.startup_s / HOUR_S for kind, _ in self.places])
        self.limits = [
            (region, gpu, limit)
            for region, by_gpu in sorted(problem.limits.items())
            for gpu, limit in sorted(by_gpu.items())
        ]

    def gains(self, each: Requirement) -> Floats:
        value = np.ones(self.num) if each.kind == "least" else self.theta
        here = (self.models == each.model) & np.isin(self.regions, each.regions)
        return np.asarray(np.where(here, value, 0.0))

    def places_of(self, each: RegionBinding) -> npt.NDArray[np.bool_]:
        """The places that a limit of GPUs, or the bound of one place, applies to."""
        if each.kind == "most":
            return np.array([name == each.name for name in self.names])
        gpu, _, region = each.name.partition(" in ")
        return np.asarray(self.used(region, gpu) > 0)

    def upper(self, period: int, skip: RegionBinding | None) -> Floats:
        """u, without the omitted bound."""
        if skip is None or skip.kind != "most" or skip.period != period:
            return self.u
        return np.array([inf if name == skip.name else most for name, most in zip(self.names, self.u, strict=True)])

    def used(self, region: str, gpu: str) -> Floats:
        """GPUs of a region's type that one instance in each place uses."""
        return np.asarray(np.where((self.gpus == gpu) & (self.regions == region), self.r, 0.0))

    def solve(
        self,
        every: Sequence[Requirement],
        max_shortfall: float | None = None,
        skip: RegionBinding | None = None,
    ) -> _RegionSolution:
        """The optimum. `skip` omits a limit of GPUs, or the upper bound of a place, in its period.

        `max_shortfall`: the allowed total shortfall of the requirements, as shares of each; infinite: minimise the
        shortfall in place of the cost. Raises HeadwayError without highspy.
        """
        model = new_model()
        u = [self.upper(t, skip) for t in range(self.num_periods)]
        x: list[Any] = [None]
        a = [integers(model, np.maximum(u[0] - self.n, 0.0), np.maximum(self.l - self.n, 0.0))]
        b = integers(model, np.maximum(self.n - self.l, 0.0), np.maximum(self.n - u[0], 0.0))
        for t in range(1, self.num_periods):
            x.append(integers(model, u[t], self.l))
            a.append(reals(model, np.full(self.num, inf)))
        (one,) = reals(model, np.full(1, inf))
        short = reals(model, np.full(0 if max_shortfall is None else len(every), inf))

        def total(values: Floats, period: int) -> Expression:
            """`values @ x` in a period, as in the class's first lines."""
            if period:
                return dot(values, x[period])
            first: Expression = dot(values, a[0]) - dot(values, b) + float(values @ self.n)
            return first

        for i, each in enumerate(every):  # as shares of the requirement, because the solver's tolerance is absolute
            met = total(self.gains(each) / each.at_least, each.period)
            model.addConstr((met if max_shortfall is None else met + short[i] / each.at_least) >= 1.0)
        for t in range(self.num_periods):
            for region, gpu, limit in self.limits:
                if skip is None or (skip.kind, skip.name, skip.period) != ("gpus", f"{gpu} in {region}", t):
                    model.addConstr(total(self.used(region, gpu), t) <= limit)
        for t in range(1, self.num_periods):
            for p, here in enumerate(np.eye(self.num)):
                model.addConstr(a[t][p] - total(here, t) + total(here, t - 1) >= 0.0)
        model.addConstr(one == 1.0)
        if max_shortfall is not None and max_shortfall < inf:
            model.addConstr(dot(np.ones(len(every)), short) <= max_shortfall)
        if max_shortfall == inf:
            cost = dot(np.ones(len(every)), short)
        else:
            cost = dot(self.alpha + self.sigma, a[0]) - dot(self.alpha, b) + float(self.alpha @ self.n) * one
            for t in range(1, self.num_periods):
                cost = cost + dot(self.alpha, x[t]) + dot(self.sigma, a[t])
        solution = minimise(model, cost, self.time_limit_s, self.gap)
        if not solution.values:
            return _RegionSolution(solution.status)
        after = [self.n + solution.of(a[0]) - solution.of(b), *(solution.of(each) for each in x[1:])]
        return _RegionSolution(solution.status, np.vstack(after), solution.bound)

    def shortfalls(self, solution: _RegionSolution, every: Sequence[Requirement]) -> list[float]:
        assert solution.x is not None
        return [max(0.0, each.at_least - float(self.gains(each) @ solution.x[each.period])) for each in every]

    def plan(self, solution: _RegionSolution, status: PlanStatus) -> RegionPlan:
        x = solution.x
        assert x is not None
        before = np.vstack([self.n, x[:-1]])
        gamma = float((self.alpha * (x - self.n)).sum())
        mu = float((self.sigma * np.maximum(x - before, 0)).sum())
        objective = gamma + mu
        present_usd = float(self.alpha @ self.n) * self.num_periods
        is_bounded = solution.bound is not None and status != "short"
        bound = min(objective, (solution.bound or 0.0) - present_usd) if is_bounded else None
        price = objective + present_usd
        gap = None if bound is None else (objective - bound) / price if price else 0.0
        changes = tuple(
            InstanceChange(t, kind.model, region, kind.gpu, round(before[t, p]), round(x[t, p]))
            for t in range(self.num_periods)
            for p, (kind, region) in enumerate(self.places)
            if before[t, p] or x[t, p]
        )
        binding = () if status == "short" else self.binding(solution, tuple(requirements(self.problem)))
        return RegionPlan(status, objective, gamma, mu, bound, gap, changes, binding)

    def binding(self, solution: _RegionSolution, every: Sequence[Requirement]) -> tuple[RegionBinding, ...]:
        """Requirements that fail with one instance less of any kind, and limits and bounds without room for one
        more."""
        x, tight = solution.x, []
        assert x is not None
        for each in every:
            gains = self.gains(each)
            here = gains[(x[each.period] > 0) & (gains > 0)]
            met = float(gains @ x[each.period])
            if len(here) and met - here.min() < each.at_least * (1 - TOLERANCE):
                tight.append(RegionBinding(each.kind, each.name, each.period, met, each.at_least))
        for t in range(self.num_periods):
            for region, gpu, limit in self.limits:
                sizes = self.used(region, gpu)
                used = float(sizes @ x[t])
                if sizes.any() and used + sizes[sizes > 0].min() > limit:
                    tight.append(RegionBinding("gpus", f"{gpu} in {region}", t, used, limit))
            tight += [
                RegionBinding("most", name, t, float(num), float(most))
                for name, num, most in zip(self.names, x[t], self.u, strict=True)
                if num == most > 0
            ]
        return tuple(tight)

    def without(self, constraint: RegionBinding) -> RegionBinding:
        """A binding constraint, with the objective of the program without it."""
        left_out = (constraint.kind, constraint.name, constraint.period)
        every = [each for each in requirements(self.problem) if (each.kind, each.name, each.period) != left_out]
        solution = self.solve(every, skip=constraint)
        if solution.x is None:
            return constraint
        return structs.replace(constraint, objective_without=self.plan(solution, "feasible").objective_usd)
