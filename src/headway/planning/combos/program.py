"""Cauchy's deployment program (Eq. 16) in matrices; sets, parameters and variables as in `deployment`."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Literal

import numpy as np

from headway.core.errors import HeadwayError
from headway.planning.combos.candidates import Candidate
from headway.planning.combos.covers import Covers
from headway.planning.combos.presolve import undominated
from headway.planning.combos.problem import (
    EFFICIENCIES,
    TOLERANCE,
    Binding,
    Chosen,
    Plan,
    Problem,
    Served,
    tokens_per_usd,
)
from headway.planning.solver import Floats, Solution, minimise


class Program:
    """Eq. 16 in matrices, over candidates that no other one is better than."""

    def __init__(self, problem: Problem, time_limit_s: float) -> None:
        self.problem, self.time_limit_s = problem, time_limit_s
        self.sign = -1.0 if problem.objective == "mce" else 1.0
        self.limited = sorted(problem.limits)
        self.demands = [demand for demand in problem.demands if demand.rps > 0]
        rps = {demand.service: demand.rps for demand in self.demands}
        useful = [each for each in problem.candidates if each.goodput_rps > 0 and each.service in rps]
        self.weights = {each: self.sign * self._weight(each) for each in useful}
        self.candidates = undominated(useful, self.weights, self.limited, rps)
        self.cost = np.array([self.weights[each] for each in self.candidates])
        self.shares = np.array([
            [min(each.goodput_rps / demand.rps, 1.0) * (each.service == demand.service) for each in self.candidates]
            for demand in self.demands
        ]).reshape(len(self.demands), len(self.candidates))  # fmt: skip
        self.use = np.array([
            [each.combo.gpus.get(gpu, 0) for each in self.candidates] for gpu in self.limited
        ], dtype=float).reshape(len(self.limited), len(self.candidates))  # fmt: skip
        self.most = np.array([float(problem.limits[gpu]) for gpu in self.limited])

    def _weight(self, each: Candidate) -> float:
        """P / C, P, or C."""
        price = each.combo.usd_per_hour
        if self.problem.objective == "mc":
            return price
        if price == 0:
            return 0.0
        value: float | None = getattr(each, EFFICIENCIES[self.problem.efficiency])
        if value is None or not 0 < value < inf:
            name = f"{each.combo.label}: its {self.problem.efficiency} cost-efficiency"
            raise HeadwayError(f"{name} is not known" if value is None else f"{name} is {value}; expected more than 0")
        return value if self.problem.objective == "mce" else price / value

    def solve(self, without_gpus: Sequence[str] = (), without_service: str | None = None) -> Solution:
        """The optimum; as it would be without some limits, or without a demand."""
        most = self.most_without(without_gpus)
        least = np.array([float(demand.service != without_service) for demand in self.demands])
        rows = np.vstack([self.shares, self.use])
        low = np.concatenate([least, np.full(len(most), -inf)])
        high = np.concatenate([np.full(len(least), inf), most])
        if not len(self.cost):
            return _nothing(least)
        if self.sign > 0:
            found = Covers(self.cost, self.shares[least > 0], self.use, most).solve(self.time_limit_s)
            if found is not None:
                return Solution("optimal", tuple(map(float, found)), float(self.cost @ found))
        return minimise(self.cost, rows, low, high, self._upper(most), time_limit_s=self.time_limit_s)

    def most_without(self, gpus: Sequence[str]) -> Floats:
        """The limits, but for those of these types."""
        lifted = np.array([gpu in gpus for gpu in self.limited], dtype=bool)
        return np.asarray(np.where(lifted, inf, self.most))

    def serve_most(self, most: Floats | None = None) -> Solution:
        """The largest sum of served shares, at its least price. Variables: x, then each service's share."""
        num, num_services = len(self.cost), len(self.demands)
        if not num:
            return Solution("optimal", (0.0,) * num_services, 0.0)
        most = self.most if most is None else most
        rows = np.block([[self.shares, -np.eye(num_services)], [self.use, np.zeros((len(most), num_services))]])
        low = np.concatenate([np.zeros(num_services), np.full(len(most), -inf)])
        high = np.concatenate([np.full(num_services, inf), most])
        upper = np.concatenate([self._upper(most), np.ones(num_services)])
        kinds = [True] * num + [False] * num_services
        shares = np.concatenate([np.zeros(num), -np.ones(num_services)])
        first = minimise(shares, rows, low, high, upper, kinds, self.time_limit_s)
        if first.status == "unknown":
            return first
        reached = -float(shares @ np.array(first.values))
        rows = np.vstack([rows, -shares])
        low, high = np.append(low, reached * (1 - TOLERANCE)), np.append(high, inf)
        prices = [each.combo.usd_per_hour for each in self.candidates] + [0.0] * num_services
        second = minimise(np.array(prices), rows, low, high, upper, kinds, self.time_limit_s)
        values = first.values if second.status in ("unknown", "infeasible") else second.values
        return Solution(first.status, values, first.bound)

    def _upper(self, most: Floats) -> Floats:
        """No more of a combo than its GPUs allow, nor than its service needs, if more cost something."""
        with np.errstate(divide="ignore", invalid="ignore"):
            allowed = np.where(self.use > 0, np.floor(most[:, None] / self.use), inf).min(axis=0, initial=inf)
            needed = np.ceil(1.0 / self.shares.sum(axis=0))
        return np.asarray(allowed if self.sign < 0 else np.minimum(allowed, needed))

    def counts(self, found: Solution) -> dict[Candidate, int]:
        """How many of which; `found` may have further variables."""
        pairs = zip(self.candidates, found.values, strict=False)
        return {each: round(value) for each, value in pairs if round(value) > 0}

    def objective(self, counts: dict[Candidate, int]) -> float:
        """As the planner states it, from whole numbers."""
        return sum(count * self.sign * self.weights[each] for each, count in counts.items())

    def gpus(self, counts: dict[Candidate, int]) -> dict[str, int]:
        """In use, by type."""
        used: dict[str, int] = {}
        for each, count in counts.items():
            for gpu, num in each.combo.gpus.items():
                used[gpu] = used.get(gpu, 0) + num * count
        return dict(sorted(used.items()))

    def served(self, counts: dict[Candidate, int]) -> tuple[Served, ...]:
        """By service."""
        found = []
        for demand in self.problem.demands:
            goodput = sum(n * each.goodput_rps for each, n in counts.items() if each.service == demand.service)
            missing = max(0.0, demand.rps - goodput)
            missing = missing if missing > TOLERANCE * demand.rps else 0.0
            found.append(Served(demand.service, demand.rps, goodput, missing))
        return tuple(found)

    def plan(
        self,
        status: Literal["optimal", "feasible", "short"],
        counts: dict[Candidate, int],
        objective: float | None,
        bound: float | None,
        gap: float | None,
        binding: tuple[Binding, ...],
        why: str = "",
    ) -> Plan:
        """The values."""
        usd = sum(count * each.combo.usd_per_hour for each, count in counts.items())
        served = self.served(counts)
        ordered = sorted(counts, key=lambda each: (each.service, -counts[each], each.combo.label))
        chosen = tuple(_chosen(each, counts[each]) for each in ordered)
        return Plan(
            status=status,
            planner=self.problem.objective,
            objective=objective,
            bound=bound,
            gap=gap,
            combos=chosen,
            gpus=self.gpus(counts),
            usd_per_hour=usd,
            tokens_per_usd=tokens_per_usd(self.problem.demands, served, usd),
            services=served,
            binding=binding,
            why=why,
        )


def _chosen(each: Candidate, count: int) -> Chosen:
    return Chosen(each.service, each.combo, count, each.goodput_rps, each.combo.usd_per_hour, each.tokens_per_usd)


def _nothing(least: Floats) -> Solution:
    """Without candidates."""
    return Solution("infeasible") if least.any() else Solution("optimal", (), 0.0)
