"""Cauchy's deployment program service by service: the ways to meet each demand, and which of them fit together.

A *cover* of a service is a number of each of its candidates that meets its demand, none to spare. With a price on
GPUs of limited types, the cheapest covers, each found for itself, are a lower bound for the whole plan that is far
above that of fractions of combos. Once that bound and a plan are near each other, only covers that are dearer than the
cheapest by no more than what lies between the two can be part of a better plan, and of those there are few: one is
chosen for each service. Exact: what is returned as optimal is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headway.planning.solver import CENT, Floats, minimise, relaxed

MOST_NODES = 60_000
"""Of a search for covers; beyond it the program is left to the solver as it stands."""
MOST_COVERS = 1_200
"""Of all services, among which plans are chosen."""
ROUNDS = 24
"""Of prices for GPUs."""
FIRST = 0.001
"""Of the bound, by which the first covers looked at are dearer than the cheapest; then twice as much, and so on."""
WIDENINGS = 12
"""Of what is looked at."""
SMALLEST = 1 / 300
"""Share of a demand that a candidate may serve; with smaller ones there are too many covers."""
ENOUGH = 1e-9
"""Of a demand, by which rounding may miss it."""


Counts = tuple[tuple[int, int], ...]
"""(candidate of a service, how many), in order."""


@dataclass
class _Service:
    """One demand: candidates by their price for the share that they serve."""

    columns: list[int]
    shares: Floats
    cost: Floats
    use: Floats

    def cheapest(self, prices: Floats) -> tuple[float, dict[int, int]] | None:
        """The cheapest cover where GPUs cost so much on top."""
        found = self._search(self.cost + prices @ self.use, None)
        return None if found is None else found[-1]

    def within(self, prices: Floats, budget: float) -> list[tuple[float, dict[int, int]]] | None:
        """All covers that cost no more than this."""
        return self._search(self.cost + prices @ self.use, budget)

    def _search(self, cost: Floats, budget: float | None) -> list[tuple[float, dict[int, int]]] | None:
        """Depth first, those with the lowest price for a share first; None: too many. Without budget, ever cheaper."""
        shares = self.shares
        order = np.argsort(cost / shares, kind="stable")
        costs, sizes = cost[order].tolist(), shares[order].tolist()
        rates = (cost / shares)[order].tolist()
        found: list[tuple[float, tuple[int, ...]]] = []
        most = float("inf") if budget is None else budget
        stack: list[tuple[int, float, float, tuple[int, ...]]] = [(0, 1.0, 0.0, ())]
        for _ in range(MOST_NODES):
            if not stack:
                return [(spent, _counts(order, taken)) for spent, taken in found]
            first, left, spent, taken = stack.pop()
            if left <= ENOUGH:
                if budget is None and spent < most:
                    most = spent
                    found.append((spent, taken))
                elif budget is not None and spent <= most:
                    found.append((spent, taken))
                continue
            next_ones = []
            for at in range(first, len(costs)):
                if spent + left * rates[at] > most:
                    break
                if spent + costs[at] <= most:
                    next_ones.append((at, left - sizes[at], spent + costs[at], (*taken, at)))
            stack.extend(reversed(next_ones))
        return None


def _counts(order: np.ndarray, taken: tuple[int, ...]) -> dict[int, int]:
    found: dict[int, int] = {}
    for at in taken:
        found[int(order[at])] = found.get(int(order[at]), 0) + 1
    return found


class Covers:
    """Demands of 1 in `shares @ x`, limits `use @ x <= most`, `cost` of 0 or more to be least; x in whole numbers."""

    def __init__(self, cost: Floats, shares: Floats, use: Floats, most: Floats) -> None:
        limited = np.isfinite(most)
        in_cents = bool((np.abs(cost / CENT - np.round(cost / CENT)) < 1e-9).all())
        self.cost = np.round(cost / CENT) if in_cents else cost / max(float(cost.max(initial=0.0)), 1e-300)
        self.step = 0.99 if in_cents else 0.0
        """Between the costs of two plans, at least."""
        self.use, self.most = use[limited], most[limited]
        self.shares = shares
        self.services = []
        for row in shares:
            at = np.flatnonzero(row > 0)
            self.services.append(_Service(at.tolist(), row[at], self.cost[at], self.use[:, at]))
        self.known: list[dict[Counts, tuple[float, Floats]]] = [{} for _ in self.services]

    def solve(self, time_limit_s: float) -> Floats | None:
        """The best x; None: there is none, or this way does not lead to it in reasonable time."""
        if not self.services:
            return np.zeros(len(self.cost))
        if any(each.shares.min(initial=1.0) < SMALLEST or not len(each.shares) for each in self.services):
            return None
        first = self._first_prices()
        bound, prices = (None, None) if first is None else self._priced(first)
        if bound is None or prices is None:
            return None
        plan, budget = self._choose(time_limit_s), FIRST * abs(bound) + self.step
        for _ in range(WIDENINGS):
            if plan is not None and self._closed(plan[0], bound):
                return plan[1]
            budget = budget if plan is None else min(budget, plan[0] - self.step - bound)
            if not self._enumerate(prices, budget):
                return None
            plan = self._choose(time_limit_s)
            if plan is not None and self._closed(plan[0], bound + budget):
                return plan[1]
            budget *= 2
        return None

    def _first_prices(self) -> Floats | None:
        """What GPUs are worth where combos may be split; None: even then there are too few."""
        num = len(self.shares)
        low = np.concatenate([np.ones(num), np.full(len(self.most), -np.inf)])
        high = np.concatenate([np.full(num, np.inf), self.most])
        _, duals, _ = relaxed(self.cost, np.vstack([self.shares, self.use]), low, high)
        return np.maximum(-duals[num:], 0.0) if len(duals) else None

    def _closed(self, cost: float, bound: float) -> bool:
        """No plan lies between."""
        return cost - bound <= self.step + 1e-9 * abs(cost)

    def _priced(self, prices: Floats) -> tuple[float | None, Floats]:
        """The best lower bound and its prices: in turn, covers for prices, and prices for which covers share GPUs."""
        best: float | None = None
        kept = prices
        for _ in range(ROUNDS):
            values = []
            for at, service in enumerate(self.services):
                found = service.cheapest(prices)
                if found is None:
                    return None, kept
                values.append(found[0])
                self._keep(at, found[1])
            bound = sum(values) - float(prices @ self.most)
            if best is None or bound > best:
                best, kept = bound, prices
            value, prices = self._master()
            if value is not None and value - best <= max(1e-7 * abs(value), 0.2 * self.step):
                break
        return best, kept

    def _keep(self, at: int, counts: dict[int, int]) -> None:
        service = self.services[at]
        num = np.zeros(len(service.columns))
        for column, count in counts.items():
            num[column] = count
        self.known[at][tuple(sorted(counts.items()))] = (float(service.cost @ num), service.use @ num)

    def _columns(self) -> tuple[Floats, Floats, Floats]:
        """Of all known covers: costs, whose they are, GPUs."""
        some = [(at, *each) for at, known in enumerate(self.known) for each in known.values()]
        cost = np.array([each[1] for each in some])
        whose = np.array([[float(each[0] == at) for each in some] for at in range(len(self.services))])
        return cost, whose, np.array([each[2] for each in some]).T.reshape(len(self.most), len(some))

    def _master(self) -> tuple[float | None, Floats]:
        """Known covers mixed so that GPUs suffice, which may be bought at a price that is too high; what GPUs cost."""
        cost, whose, use = self._columns()
        num, types = len(cost), len(self.most)
        dear = 10 * float(self.cost.max(initial=1.0))
        rows = np.vstack([np.hstack([whose, np.zeros((len(whose), types))]), np.hstack([use, -np.eye(types)])])
        low = np.concatenate([np.ones(len(whose)), np.full(types, -np.inf)])
        high = np.concatenate([np.full(len(whose), np.inf), self.most])
        value, duals, values = relaxed(np.append(cost, np.full(types, dear)), rows, low, high)
        prices = np.maximum(-duals[len(whose) :], 0.0)
        return (value if values[num:].sum() < 1e-7 else None), prices

    def _enumerate(self, prices: Floats, budget: float) -> bool:
        """All covers that cost no more than the cheapest and the budget; False: too many."""
        for at, service in enumerate(self.services):
            first = service.cheapest(prices)
            found = None if first is None else service.within(prices, first[0] + budget + 1e-9 * (1 + first[0]))
            if found is None:
                return False
            for _, counts in found:
                self._keep(at, counts)
            self.known[at] = _undominated(self.known[at])
        return sum(map(len, self.known)) <= MOST_COVERS

    def _choose(self, time_limit_s: float) -> tuple[float, Floats] | None:
        """One known cover for each service: cost, and x."""
        cost, whose, use = self._columns()
        rows = np.vstack([whose, use])
        low = np.concatenate([np.ones(len(whose)), np.full(len(self.most), -np.inf)])
        high = np.concatenate([np.ones(len(whose)), self.most])
        found = minimise(cost, rows, low, high, np.ones(len(cost)), time_limit_s=time_limit_s)
        if found.status != "optimal":
            return None
        x, total, at = np.zeros(len(self.cost)), 0.0, 0
        for service, known in zip(self.services, self.known, strict=True):
            for counts in known:
                if found.values[at] > 0.5:
                    for column, count in counts:
                        x[service.columns[column]] += count
                at += 1
        total = float(self.cost @ x)
        return total, x


def _undominated(
    known: dict[Counts, tuple[float, Floats]],
) -> dict[Counts, tuple[float, Floats]]:
    """Without covers that cost no less than another one and take no fewer GPUs of any type; of equals one stays."""
    best: dict[bytes, tuple[float, Counts]] = {}
    for counts, (cost, use) in known.items():
        key = use.tobytes()
        if key not in best or (cost, counts) < best[key]:
            best[key] = (cost, counts)
    ordered = sorted(counts for _, counts in best.values())
    ordered.sort(key=lambda counts: known[counts][0])
    kept: list[Counts] = []
    uses = np.empty((len(ordered), len(known[ordered[0]][1])))
    for counts in ordered:
        use = known[counts][1]
        if not (uses[: len(kept)] <= use).all(axis=1).any():
            uses[len(kept)] = use
            kept.append(counts)
    return {counts: known[counts] for counts in kept}
