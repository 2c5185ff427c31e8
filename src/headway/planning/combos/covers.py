"""Solves Cauchy's deployment program service by service: enumerates covers of each demand, and chooses covers that fit
together.

A *cover* of a service is a number of each of its candidates that together meet its demand, without a superfluous combo.
With prices on GPUs of limited types, the sum of the cheapest covers is a lower bound for the whole plan, and much
higher than the bound with fractions of combos. Once this bound and the cost of a plan are close, a better plan can only
consist of covers that exceed the cheapest cover by at most the difference. There are few such covers, and a program
chooses one for each service. The result is exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np

from headway.planning.solver import CENT, Expression, Floats, Model, dot, integers, minimise, new_model, reals

MOST_NODES = 60_000
"""Maximum number of nodes of one search for covers; beyond it the solver gets the whole program."""
MOST_COVERS = 1_200
"""Maximum number of covers of all services together to choose plans from."""
ROUNDS = 24
FIRST = 0.001
"""Share of the bound by which the first covers may exceed the cheapest; doubled in each round."""
WIDENINGS = 12
SMALLEST = 1 / 300
"""Smallest share of a demand that any candidate may serve. Smaller candidates would give too many covers."""
ENOUGH = 1e-9
"""Share of a demand by which rounding may miss the demand."""

Cover = tuple[tuple[int, int], ...]
"""(candidate of a service, how many), in order."""


@dataclass
class _Demand:
    """One demand: its candidates by price per served share."""

    columns: list[int]
    shares: Floats
    cost: Floats
    use: Floats

    def cheapest(self, prices: Floats) -> tuple[float, dict[int, int]] | None:
        covers = self._search(self.cost + prices @ self.use, None)
        return None if covers is None else covers[-1]

    def within(self, prices: Floats, budget: float) -> list[tuple[float, dict[int, int]]] | None:
        return self._search(self.cost + prices @ self.use, budget)

    def _search(self, cost: Floats, budget: float | None) -> list[tuple[float, dict[int, int]]] | None:
        """Depth-first search, lowest price per share first. Without a budget, each cover is cheaper than the one
        before.

        None: more than MOST_NODES.
        """
        shares = self.shares
        order = np.argsort(cost / shares, kind="stable")
        costs, sizes = cost[order].tolist(), shares[order].tolist()
        rates = (cost / shares)[order].tolist()
        covers: list[tuple[float, tuple[int, ...]]] = []
        most = inf if budget is None else budget
        stack: list[tuple[int, float, float, tuple[int, ...]]] = [(0, 1.0, 0.0, ())]
        for _ in range(MOST_NODES):
            if not stack:
                return [(spent, _counts(order, chosen)) for spent, chosen in covers]
            first, left, spent, chosen = stack.pop()
            if left <= ENOUGH:
                if budget is None and spent < most:
                    most = spent
                    covers.append((spent, chosen))
                elif budget is not None and spent <= most:
                    covers.append((spent, chosen))
                continue
            next_ones = []
            for i in range(first, len(costs)):
                if spent + left * rates[i] > most:
                    break
                if spent + costs[i] <= most:
                    next_ones.append((i, left - sizes[i], spent + costs[i], (*chosen, i)))
            stack.extend(reversed(next_ones))
        return None


def _counts(order: np.ndarray, chosen: tuple[int, ...]) -> dict[int, int]:
    counts: dict[int, int] = {}
    for i in chosen:
        counts[int(order[i])] = counts.get(int(order[i]), 0) + 1
    return counts


class Covers:
    """Minimise `cost @ x` (costs are not negative), subject to `shares @ x >= 1` and `use @ x <= limits`, with x in
    whole numbers."""

    def __init__(self, cost: Floats, shares: Floats, use: Floats, limits: Floats) -> None:
        limited = np.isfinite(limits)
        in_cents = bool((np.abs(cost / CENT - np.round(cost / CENT)) < 1e-9).all())
        self.cost = np.round(cost / CENT) if in_cents else cost / max(float(cost.max(initial=0.0)), 1e-300)
        self.step = 0.99 if in_cents else 0.0
        """The smallest possible difference between the costs of two plans."""
        self.use, self.limits = use[limited], limits[limited]
        self.shares = shares
        self.demands = []
        for row in shares:
            columns = np.flatnonzero(row > 0)
            self.demands.append(_Demand(columns.tolist(), row[columns], self.cost[columns], self.use[:, columns]))
        self.known: list[dict[Cover, tuple[float, Floats]]] = [{} for _ in self.demands]
        """Known covers of each demand, with cost and GPUs."""

    def solve(self, time_limit_s: float) -> Floats | None:
        """The best x; None if there is none, or the search grows too large."""
        if not self.demands:
            return np.zeros(len(self.cost))
        if any(each.shares.min(initial=1.0) < SMALLEST or not len(each.shares) for each in self.demands):
            return None
        first = self._first_prices()
        bound, prices = (None, None) if first is None else self._improve(first)
        if bound is None or prices is None:
            return None
        plan, budget = self._choose(time_limit_s), FIRST * abs(bound) + self.step
        for _ in range(WIDENINGS):
            if plan is not None and self._is_closed(plan[0], bound):
                return plan[1]
            budget = budget if plan is None else min(budget, plan[0] - self.step - bound)
            if not self._enumerate(prices, budget):
                return None
            plan = self._choose(time_limit_s)
            if plan is not None and self._is_closed(plan[0], bound + budget):
                return plan[1]
            budget *= 2
        return None

    def _is_closed(self, cost: float, bound: float) -> bool:
        return cost - bound <= self.step + 1e-9 * abs(cost)

    def _first_prices(self) -> Floats | None:
        """Prices of GPUs in the program with fractions of combos; None if even that is infeasible."""
        model = new_model()
        x = reals(model, np.full(len(self.cost), inf))
        for share in self.shares:
            model.addConstr(dot(share, x) >= 1.0)
        gpus = [model.addConstr(dot(use, x) <= limit) for use, limit in zip(self.use, self.limits, strict=True)]
        return _dual_prices(model, dot(self.cost, x), gpus)

    def _improve(self, prices: Floats) -> tuple[float | None, Floats]:
        """The best lower bound and its prices, by alternating between covers for prices and prices at which covers
        share GPUs."""
        best: float | None = None
        best_prices = prices
        for _ in range(ROUNDS):
            values = []
            for i, demand in enumerate(self.demands):
                cover = demand.cheapest(prices)
                if cover is None:
                    return None, best_prices
                values.append(cover[0])
                self._remember(i, cover[1])
            bound = sum(values) - float(prices @ self.limits)
            if best is None or bound > best:
                best, best_prices = bound, prices
            value, prices = self._mix()
            if value is not None and value - best <= max(1e-7 * abs(value), 0.2 * self.step):
                break
        return best, best_prices

    def _remember(self, i: int, counts: dict[int, int]) -> None:
        demand = self.demands[i]
        num = np.zeros(len(demand.columns))
        for column, count in counts.items():
            num[column] = count
        self.known[i][tuple(sorted(counts.items()))] = (float(demand.cost @ num), demand.use @ num)

    def _cover_model(self, is_integer: bool) -> tuple[Model, list[Any], Expression, list[Expression]]:
        """A model with a variable for each known cover: the variables by demand, the cost, and the use of each GPU."""
        model, num = new_model(), sum(map(len, self.known))
        flat = integers(model, np.ones(num)) if is_integer else reals(model, np.full(num, inf))
        known = [each for covers in self.known for each in covers.values()]
        ends = np.cumsum([len(covers) for covers in self.known])
        chosen = [flat[end - len(covers) : end] for end, covers in zip(ends, self.known, strict=True)]
        use = [dot([gpus[t] for _, gpus in known], flat) for t in range(len(self.limits))]
        return model, chosen, dot([cost for cost, _ in known], flat), use

    def _mix(self) -> tuple[float | None, Floats]:
        """Fractions of known covers within the limits; GPUs beyond the limits have a prohibitive price.

        Returns the cost (None if GPUs beyond the limits are bought) and the prices of GPUs.
        """
        model, chosen, cost, use = self._cover_model(is_integer=False)
        bought = reals(model, np.full(len(use), inf))
        for covers in chosen:
            model.addConstr(dot(np.ones(len(covers)), covers) >= 1.0)
        gpus = [
            model.addConstr(used - more <= limit) for used, more, limit in zip(use, bought, self.limits, strict=True)
        ]
        prohibitive = 10 * float(self.cost.max(initial=1.0))
        prices = _dual_prices(model, cost + dot(np.full(len(use), prohibitive), bought), gpus)
        if prices is None:
            return None, np.zeros(0)
        return (model.getObjectiveValue() if sum(model.vals(bought)) < 1e-7 else None), prices

    def _enumerate(self, prices: Floats, budget: float) -> bool:
        """Store all covers that exceed the cheapest by at most the budget. Returns False if there are too many."""
        for i, demand in enumerate(self.demands):
            first = demand.cheapest(prices)
            covers = None if first is None else demand.within(prices, first[0] + budget + 1e-9 * (1 + first[0]))
            if covers is None:
                return False
            for _, counts in covers:
                self._remember(i, counts)
            self.known[i] = _undominated(self.known[i])
        return sum(map(len, self.known)) <= MOST_COVERS

    def _choose(self, time_limit_s: float) -> tuple[float, Floats] | None:
        """One known cover for each demand: cost and x."""
        model, chosen, cost, use = self._cover_model(is_integer=True)
        for covers in chosen:
            model.addConstr(dot(np.ones(len(covers)), covers) == 1.0)
        for used, limit in zip(use, self.limits, strict=True):
            model.addConstr(used <= limit)
        solution = minimise(model, cost, time_limit_s)
        if solution.status != "optimal":
            return None
        x = np.zeros(len(self.cost))
        for demand, known, covers in zip(self.demands, self.known, chosen, strict=True):
            for counts, is_chosen in zip(known, solution.of(covers), strict=True):
                for column, count in counts if is_chosen > 0.5 else ():
                    x[demand.columns[column]] += count
        return float(self.cost @ x), x


def _dual_prices(model: Model, cost: Expression, limits: list[Any]) -> Floats | None:
    """Minimise `cost` over real variables. Returns how much one more unit of each limit saves; None if infeasible."""
    from highspy import HighsModelStatus

    model.minimize(cost)
    if model.getModelStatus() != HighsModelStatus.kOptimal:
        return None
    duals = np.array([model.constrDual(each) for each in limits])
    return np.asarray(np.maximum(-duals, 0.0))


def _undominated(known: dict[Cover, tuple[float, Floats]]) -> dict[Cover, tuple[float, Floats]]:
    """The covers without those that cost at least as much as another and use at least as many GPUs of each type; one of
    equal covers stays."""
    best: dict[bytes, tuple[float, Cover]] = {}
    for counts, (cost, use) in known.items():
        key = use.tobytes()
        if key not in best or (cost, counts) < best[key]:
            best[key] = (cost, counts)
    ordered = sorted(counts for _, counts in best.values())
    ordered.sort(key=lambda counts: known[counts][0])
    kept: list[Cover] = []
    uses = np.empty((len(ordered), len(known[ordered[0]][1])))
    for counts in ordered:
        use = known[counts][1]
        if not (uses[: len(kept)] <= use).all(axis=1).any():
            uses[len(kept)] = use
            kept.append(counts)
    return {counts: known[counts] for counts in kept}
