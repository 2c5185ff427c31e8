"""SageServe's program in matrices, and its answer; sets, parameters and variables as in `regions`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import inf

import numpy as np
from msgspec import structs

from headway.planning.regions.problem import (
    HOUR_S,
    TOLERANCE,
    Binding,
    Change,
    Need,
    Plan,
    Problem,
    check,
    needs,
    places,
)
from headway.planning.solver import Floats, Solution, matrix, minimise

PROVED = 1e-9
"""A gap that is rounding."""


def plan(problem: Problem, time_limit_s: float = 10.0, gap: float = 0.01, explain: bool = False) -> Plan:
    """The cheapest change of instances. `explain` solves again without each constraint that binds, one by one.

    The search ends at this `gap`: to prove the last per cent can take a hundred times as long.
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


class _Rows:
    """Of a sparse matrix, with what they are held between."""

    def __init__(self) -> None:
        self.entries: list[tuple[int, int, float]] = []
        self.low: list[float] = []
        self.high: list[float] = []

    def add(self, entries: Iterable[tuple[int, float]], low: float, high: float) -> None:
        """One more: `low <= sum of value * variable <= high`."""
        self.entries += [(len(self.low), column, value) for column, value in entries]
        self.low.append(low)
        self.high.append(high)


class _Program:
    """Variables, by place: a and b of the first period, where x = n + a - b; x and a of each further one. Then 1, which
    costs what there is, so that the solver's gap is relative to a price; then how much of each need is missing.

    The first period without x halves the time where it is the only one; the others so would take many times theirs.
    """

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
        self.integer = [True] * 2 * self.num + ([True] * self.num + [False] * self.num) * (self.num_periods - 1)
        hours = problem.period_s / HOUR_S
        self.alpha = np.array([kind.usd_per_hour * hours for kind, _ in self.places])
        self.sigma = np.array([kind.usd_per_hour * kind.startup_s / HOUR_S for kind, _ in self.places])
        self.limits = [
            (region, gpu, limit)
            for region, by_gpu in sorted(problem.limits.items())
            for gpu, limit in sorted(by_gpu.items())
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
        rows, price = _Rows(), 2 * self.num * self.num_periods
        missing = price + 1
        for r, need in enumerate(every):
            values = self.values(need) / need.at_least  # rows in shares of the need: the solver's tolerance is absolute
            more = [] if short is None else [(missing + r, 1 / need.at_least)]
            rows.add([*self.row(values, need.period), *more], 1.0 - self.known(values, need.period), inf)
        for t in range(self.num_periods):
            for region, gpu, limit in self.limits:
                if (region, gpu, t) != skip:
                    used = self.used(region, gpu)
                    rows.add(self.row(used, t), -inf, limit - self.known(used, t))
        for t in range(1, self.num_periods):  # a_t >= x_t - x_t-1
            for p, only in enumerate(np.eye(self.num)):
                started = (2 * self.num * t + self.num + p, 1.0)
                rows.add([started, *self.row(-only, t), *self.row(only, t - 1)], -self.known(only, t - 1), inf)
        rows.add([(price, 1.0)], 1.0, 1.0)
        num_slack = 0 if short is None else len(every)
        if short is not None and short < inf:
            rows.add([(missing + r, 1.0) for r in range(num_slack)], -inf, short)
        made = matrix(rows.entries, len(rows.low), missing + num_slack)
        upper = np.concatenate([np.full(self.num, inf), self.have, np.full(price - 2 * self.num, inf)])
        upper = np.concatenate([upper, np.full(1 + num_slack, inf)])
        integer = [*self.integer, *[False] * (1 + num_slack)]
        cost, low, high = self._cost(num_slack, short == inf), np.array(rows.low), np.array(rows.high)
        return minimise(cost, made, low, high, upper, integer, self.time_limit_s, self.gap)

    def row(self, values: Floats, period: int) -> Iterator[tuple[int, float]]:
        """Entries of `values @ x_t`, but for what is `known`."""
        start = 2 * self.num * period
        for p in np.flatnonzero(values).tolist():
            yield start + p, values[p]
            if period == 0:
                yield start + self.num + p, -values[p]

    def known(self, values: Floats, period: int) -> float:
        """In the first period x is what there is, and a - b."""
        return 0.0 if period else float(values @ self.have)

    def _cost(self, num_slack: int, only_missing: bool) -> Floats:
        """What all instances and their starts cost, those there are included; or what is missing."""
        first = np.concatenate([self.alpha + self.sigma, -self.alpha])
        later = np.tile(np.concatenate([self.alpha, self.sigma]), self.num_periods - 1)
        paid = np.concatenate([first, later, [self.alpha @ self.have]])
        return np.concatenate([np.zeros(len(paid)) if only_missing else paid, np.full(num_slack, float(only_missing))])

    def after(self, found: Solution) -> Floats:
        """x: periods by places."""
        num_x = 2 * self.num * self.num_periods
        blocks = np.array(found.values[:num_x]).reshape(self.num_periods, 2, self.num)
        return np.vstack([self.have + blocks[:1, 0] - blocks[:1, 1], blocks[1:, 0]])

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
        kept = float(self.alpha @ self.have) * self.num_periods
        bound = None if found.bound is None or status == "short" else min(objective, found.bound - kept)
        price = objective + kept
        gap = None if bound is None else (objective - bound) / price if price else 0.0
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
