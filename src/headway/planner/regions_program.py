"""SageServe's program in matrices, and its answer; sets, parameters and variables as in `regions`."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np
from msgspec import structs

from headway.planner.milp import Floats, Solution, matrix, minimise
from headway.planner.regions import HOUR_S, TOLERANCE, Binding, Change, Need, Plan, Problem, check, needs, places

PROVED = 1e-9
"""A gap that is rounding."""


def plan(problem: Problem, time_limit_s: float = 10.0, gap: float = 0.01, explain: bool = False) -> Plan:
    """The cheapest change of instances. `explain` solves again without each constraint that binds, one by one.

    The search ends at a `gap` relative to gamma + mu; to prove the last per cent can take a hundred times as long.
    HeadwayError where the problem does not hold together.
    """
    check(problem)
    program = _Program(problem, time_limit_s, gap)
    found = program.solve(tuple(needs(problem)))
    if found.status in ("infeasible", "unknown"):
        return _short(program)
    made = program.plan(found, "feasible")
    if made.gap is not None and made.gap <= PROVED:
        made = structs.replace(made, status="optimal")
    return structs.replace(made, binding=tuple(map(program.without, made.binding))) if explain else made


def _short(program: _Program) -> Plan:
    """The most that can be served; then the least cost of that."""
    every = tuple(needs(program.problem))
    first = program.solve(every, short=inf)
    least = program.missing(first, every)
    found = program.solve(every, short=sum(least) * (1 + TOLERANCE) + TOLERANCE)
    found = first if not found.values else found
    missing = program.missing(found, every)
    full = [each for each in program.binding(found, ()) if each.kind == "gpus"]
    gone = [
        f"{need.name} lacks {short:,.4g} of {need.at_least:,.4g} {'instances' if need.kind == 'least' else 'tokens/s'}"
        f" in period {need.period}"
        for need, short in zip(every, missing, strict=True)
        if short > TOLERANCE * need.at_least
    ]
    limits = ", ".join(dict.fromkeys(f"{each.name} ({each.limit:,.0f} GPUs)" for each in full))
    why = "; ".join(gone) + (f"; no room is left in {limits}" if limits else "")
    return structs.replace(program.plan(found, "short"), why=why or "the time was over before a plan was found")


class _Program:
    """Variables: a, then b, by period and place; then, where that is allowed, how much of each need is missing."""

    def __init__(self, problem: Problem, time_limit_s: float, gap: float) -> None:
        self.problem, self.time_limit_s, self.gap = problem, time_limit_s, gap
        self.places = places(problem)
        self.num_periods, self.num = len(problem.demand), len(self.places)
        counts = {(each.model, each.gpu, each.region): each.count for each in problem.have}
        self.have = np.array([counts.get((k.model, k.gpu, region), 0) for k, region in self.places], dtype=float)
        self.models = np.array([kind.model for kind, _ in self.places])
        self.gpus = np.array([kind.gpu for kind, _ in self.places])
        self.regions = np.array([region for _, region in self.places])
        self.theta = np.array([kind.tps for kind, _ in self.places])
        self.size = np.array([float(kind.gpus) for kind, _ in self.places])
        hours = problem.period_s / HOUR_S
        self.alpha = np.array([kind.usd_per_hour * hours for kind, _ in self.places])
        self.sigma = np.array([kind.usd_per_hour * kind.startup_s / HOUR_S for kind, _ in self.places])
        self.limits = [
            (region, gpu, limit)
            for region, by_gpu in sorted(problem.limits.items())
            for gpu, limit in sorted(by_gpu.items())
        ]

    def _x(self, row: int, values: Floats, period: int) -> list[tuple[int, int, float]]:
        """Entries of `values @ (x_t - n)`: all that was started up to then, less what was stopped."""
        stopped = self.num * self.num_periods
        return [
            entry
            for t in range(period + 1)
            for p in np.flatnonzero(values).tolist()
            for entry in ((row, t * self.num + p, values[p]), (row, stopped + t * self.num + p, -values[p]))
        ]

    def values(self, need: Need) -> Floats:
        """What an instance in each place adds to a need."""
        adds = np.ones(self.num) if need.kind == "least" else self.theta
        here = (self.models == need.model) & np.isin(self.regions, need.regions)
        return np.asarray(np.where(here, adds, 0.0))

    def used(self, region: str, gpu: str) -> Floats:
        """GPUs of a region's type that an instance in each place takes."""
        return np.asarray(np.where((self.gpus == gpu) & (self.regions == region), self.size, 0.0))

    def solve(
        self, every: Sequence[Need], short: float | None = None, skip: tuple[str, str, int] | None = None
    ) -> Solution:
        """The optimum. `short`: so much may be missing of the needs in all; infinite: it is what is minimised.

        `skip` leaves out the limit of a region's GPUs in a period.
        """
        num_x = 2 * self.num * self.num_periods
        slack = num_x if short is not None else None
        entries: list[tuple[int, int, float]] = []
        low: list[float] = []
        high: list[float] = []
        for r, need in enumerate(every):
            values = self.values(need)
            scale = need.at_least  # rows in shares of what is needed, as the solver's tolerance is absolute
            entries += self._x(r, values / scale, need.period)
            entries += [] if slack is None else [(r, slack + r, 1 / scale)]
            low.append(1.0 - float(values @ self.have) / scale)
            high.append(inf)
        for t in range(self.num_periods):
            for region, gpu, limit in self.limits:
                if (region, gpu, t) != skip:
                    used = self.used(region, gpu)
                    entries += self._x(len(low), used, t)
                    low.append(-inf)
                    high.append(limit - float(used @ self.have))
            for p in range(self.num if t else 0):  # of the first period, b <= n says it
                entries += self._x(len(low), np.eye(1, self.num, p)[0], t)
                low.append(-float(self.have[p]))
                high.append(inf)
        num_columns = num_x + (len(every) if slack is not None else 0)
        if slack is not None and short is not None and short < inf:
            entries += [(len(low), slack + r, 1.0) for r in range(len(every))]
            low.append(-inf)
            high.append(short)
        rows = matrix(entries, len(low), num_columns)
        cost = self._cost(num_columns - num_x, short == inf)
        upper = np.full(num_columns, inf)
        stops = slice(self.num * self.num_periods, self.num * self.num_periods + self.num)
        upper[stops] = self.have
        integer = [True] * num_x + [False] * (num_columns - num_x)
        return minimise(cost, rows, np.array(low), np.array(high), upper, integer, self.time_limit_s, self.gap)

    def _cost(self, num_slack: int, only_missing: bool) -> Floats:
        """An instance started in period t is paid for from then on."""
        left = [self.num_periods - t for t in range(self.num_periods)]
        started = np.concatenate([self.alpha * periods + self.sigma for periods in left])
        stopped = np.concatenate([-self.alpha * periods for periods in left])
        if only_missing:
            return np.concatenate([np.zeros(len(started) + len(stopped)), np.ones(num_slack)])
        return np.concatenate([started, stopped, np.zeros(num_slack)])

    def after(self, found: Solution) -> Floats:
        """x: periods by places."""
        size = self.num * self.num_periods
        moved = np.array(found.values[:size]) - np.array(found.values[size : 2 * size])
        return np.asarray(self.have + np.cumsum(moved.reshape(self.num_periods, self.num), axis=0))

    def missing(self, found: Solution, every: Sequence[Need]) -> list[float]:
        """How much of each need."""
        x = self.after(found)
        return [max(0.0, need.at_least - float(self.values(need) @ x[need.period])) for need in every]

    def plan(self, found: Solution, status: str) -> Plan:
        """The values, from whole numbers."""
        x = self.after(found)
        before = np.vstack([self.have, x[:-1]])
        gamma = float((self.alpha * (x - self.have)).sum())
        mu = float((self.sigma * np.maximum(x - before, 0)).sum())
        objective = gamma + mu
        bound = None if found.bound is None or status == "short" else min(objective, found.bound)
        gap = None if bound is None else (objective - bound) / abs(objective) if objective else 0.0
        changes = tuple(
            Change(t, kind.model, region, kind.gpu, round(before[t, p]), round(x[t, p]))
            for t in range(self.num_periods)
            for p, (kind, region) in enumerate(self.places)
            if before[t, p] or x[t, p]
        )
        binding = () if status == "short" else self.binding(found, tuple(needs(self.problem)))
        return Plan(status, objective, gamma, mu, bound, gap, changes, binding)  # type: ignore[arg-type]

    def binding(self, found: Solution, every: Sequence[Need]) -> tuple[Binding, ...]:
        """Needs that fail with any one of their instances less; limits that leave no room for one more."""
        x, tight = self.after(found), []
        for need in every:
            values = self.values(need)
            here = values[(x[need.period] > 0) & (values > 0)]
            got = float(values @ x[need.period])
            if len(here) and got - here.min() < need.at_least * (1 - TOLERANCE):
                tight.append(Binding(need.kind, need.name, need.period, got, need.at_least))
        for t in range(self.num_periods):
            for region, gpu, limit in self.limits:
                values = self.used(region, gpu)
                got = float(values @ x[t])
                if values.any() and got + values[values > 0].min() > limit:
                    tight.append(Binding("gpus", f"{gpu} in {region}", t, got, limit))
        return tuple(tight)

    def without(self, each: Binding) -> Binding:
        """With the objective that leaving the constraint out would give."""
        every = [n for n in needs(self.problem) if (n.kind, n.name, n.period) != (each.kind, each.name, each.period)]
        gpu, _, region = each.name.partition(" in ")
        found = self.solve(every, skip=(region, gpu, each.period) if each.kind == "gpus" else None)
        if not found.values:
            return each
        return structs.replace(each, objective_without=self.plan(found, "feasible").objective_usd)
