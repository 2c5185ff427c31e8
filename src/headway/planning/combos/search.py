"""Numbers of combos: Cauchy's deployment program (3.3.2, Eq. 16), its variants (4.3) and its fallback.

Sets and parameters
    m in M      services, with demand D_m > 0 in requests per second
    n in N_m    candidates of service m: goodput g_n, price P_n in $/h, cost-efficiency C_n in tokens per dollar
    t in G      GPU types with a limit G_t; r_nt GPUs of type t in combo n
Variables       x_n, whole numbers of 0 or more
Subject to      sum over n in N_m of g_n x_n >= D_m     for every m
                sum over n of r_nt x_n <= G_t           for every t
Objective       co    minimise sum of (P_n / C_n) x_n
                mc    minimise sum of P_n x_n
                mce   maximise sum of C_n P_n x_n / sum of P_n x_n

The code divides the rows of demand by D_m, because the solver's tolerance is absolute: s_mn = min(g_n / D_m, 1).

Meaning of P / C. Where C is measured, C = 3600 g L / P with L tokens a request, so P / C = P^2 / (3600 L g): for each
request per second that a combo can serve, `co` counts the square of its cost, (P / g)^2, and `mc` counts P / g.
Splitting a combo in equal parts changes neither. A combo that is dear for what it serves weighs more in `co`: to fill a
small remainder, `mc` takes the combo with the lowest price, however little it serves, and `co` may pay more for one
that serves much more. So `mc` is never dearer, and `co` leaves more room for demand to come. Where C is the closed
form, which has no goodput, P / C weighs the price by how well phases and GPUs match. A combo that costs nothing has
P / C = 0, and no C for `mce`.

`mce` maximises the cost-efficiency of the plan (4.3: "overall cost-efficiency"): the mean of C over its dollars, which
is its tokens per dollar if it is full. Of plans that are equally efficient it takes the cheapest. The sum of C_n x_n
would be another reading, which rents all GPUs whatever they serve. `mce` may serve far more than the demand, up to the
limits, which it needs. A ratio is not linear: Dinkelbach's iteration maximises the sum of (C_n - r) P_n x_n for the
ratio r of the plan before, until no plan is above 0.

Fallback, if the demands cannot all be met. The objective is dropped, and a variable y_m is added:
                maximise sum of y_m, subject to y_m <= 1 and y_m <= sum over n in N_m of s_mn x_n
and then minimise sum of P_n x_n, subject to that sum of y_m.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import inf
from typing import Any, Literal

import numpy as np
from msgspec import structs

from headway.core.errors import HeadwayError
from headway.planning.combos.covers import Covers
from headway.planning.combos.problem import (
    EFFICIENCIES,
    TOLERANCE,
    ComboBinding,
    ComboCandidate,
    ComboPlan,
    ComboProblem,
    PlannedCombo,
    ServiceGoodput,
    add_gpus,
    check,
    tokens_per_usd,
)
from headway.planning.solver import NEGLIGIBLE, Floats, Model, Solution, dot, integers, minimise, new_model, reals

ROUNDING = 1e-9
"""Relative rounding, far below the tolerance of a demand."""
Numbers = dict[ComboCandidate, int]


def deploy(problem: ComboProblem, time_limit_s: float = 10.0, explain: bool = True) -> ComboPlan:
    """The best deployment. `time_limit_s` applies to each solve; `explain` solves again without each limit and demand.

    Raises HeadwayError if parts of the problem contradict each other, or `mce` has a candidate that it cannot weigh.
    """
    check(problem)
    program = DeploymentProgram(problem, time_limit_s)
    solution = program.solve()
    if solution.status in ("infeasible", "unknown"):
        return _short_plan(problem, solution.status, time_limit_s, explain)
    numbers = program.numbers(solution)
    status: Literal["optimal", "feasible"] = "optimal" if solution.status == "optimal" else "feasible"
    objective = program.objective(numbers)
    bound = None if solution.bound is None else program.sign * min(program.sign * objective, solution.bound)
    gap = None if bound is None else abs(objective - bound) / abs(objective) if objective else 0.0
    binding = tuple(_binding(program, numbers, objective)) if explain and status == "optimal" else ()
    return program.plan(status, numbers, objective, bound, gap, binding)


def _binding(program: DeploymentProgram, numbers: Numbers, objective: float) -> Iterator[ComboBinding]:
    """Limits and demands that bind, found by leaving each one out."""
    used, limits = program.gpus(numbers), program.problem.limits
    if program.problem.objective == "mce":  # unbounded without limits
        for gpu, num in used.items():
            if num == limits.get(gpu):
                yield ComboBinding("gpus", gpu, num, limits[gpu], None)
    elif _if_better(program, program.solve(without_gpus=program.limited), objective) is not None:
        for gpu in program.limited:
            better = _if_better(program, program.solve(without_gpus=(gpu,)), objective)
            if better is not None:
                yield ComboBinding("gpus", gpu, used.get(gpu, 0), limits[gpu], better)
    for each in program.goodputs(numbers):
        if each.demand_rps > 0:
            better = _if_better(program, program.solve(without_service=each.service), objective)
            if better is not None:
                yield ComboBinding("demand", each.service, each.goodput_rps, each.demand_rps, better)


def _if_better(program: DeploymentProgram, solution: Solution, objective: float) -> float | None:
    """The objective of a solution if it is better than `objective`."""
    if not solution.values and solution.status != "optimal":
        return None
    other = program.objective(program.numbers(solution))
    return other if program.sign * (objective - other) > TOLERANCE * abs(objective) else None


def _short_plan(problem: ComboProblem, status: str, time_limit_s: float, explain: bool) -> ComboPlan:
    program = DeploymentProgram(structs.replace(problem, objective="mc"), time_limit_s)
    solution, _ = program.serve_most(program.limits)
    numbers = {} if solution.status == "unknown" else program.numbers(solution)
    goodputs = program.goodputs(numbers)
    total = sum(min(1.0, each.goodput_rps / each.demand_rps) for each in goodputs if each.demand_rps > 0)
    if not any(each.shortfall_rps for each in goodputs):
        note = "found with the objective dropped: there was no time to weigh cost-efficiency"
        plan = program.plan("feasible", numbers, None, None, None, ())
        return structs.replace(plan, planner=problem.objective, notes=(note,))
    is_optimal = solution.status == "optimal"
    bound = total if is_optimal else float(len(program.demands))
    binding = tuple(_binding_short(program, numbers, total)) if explain and is_optimal else ()
    why = _why_short(program, numbers) if status == "infeasible" else "the time was over before a plan was found"
    plan = program.plan("short", numbers, total, bound, (bound - total) / total if total else None, binding, why)
    return structs.replace(plan, planner=problem.objective)


def _binding_short(program: DeploymentProgram, numbers: Numbers, total: float) -> Iterator[ComboBinding]:
    """Limits without which the plan would serve more."""
    used = program.gpus(numbers)
    for gpu in program.limited:
        _, shares = program.serve_most(program.limits_without((gpu,)))
        if shares > total + TOLERANCE:
            yield ComboBinding("gpus", gpu, used.get(gpu, 0), program.problem.limits[gpu], shares)


def _why_short(program: DeploymentProgram, numbers: Numbers) -> str:
    """Services that fall short even with all GPUs to themselves; otherwise the shortfalls."""
    reasons = []
    for demand in program.demands:
        if not any(each.service == demand.service for each in program.candidates):
            reasons.append(f"{demand.service}: no combo serves it within its SLO; needs {demand.rps:g} req/s")
            continue
        most = most_alone(program.problem, demand.service)
        if most < demand.rps * (1 - TOLERANCE):
            reasons.append(
                f"{demand.service}: at most {most:.4g} req/s with all the GPUs there are; needs {demand.rps:g}"
            )
    if not reasons:
        missing = [
            f"{each.service} {each.shortfall_rps:.4g} req/s" for each in program.goodputs(numbers) if each.shortfall_rps
        ]
        reasons = [f"each service can be served alone, but not all together; missing: {', '.join(missing)}"]
    return "; ".join(reasons)


def most_alone(problem: ComboProblem, service: str) -> float:
    """Requests per second that a service can reach with every GPU to itself; infinite without limits."""
    some = [each for each in problem.candidates if each.service == service and each.goodput_rps > 0]
    if any(not any(gpu in problem.limits for gpu in each.combo.gpus) for each in some):
        return inf
    if not some:
        return 0.0
    model = new_model()
    x = integers(model, np.full(len(some), inf))
    for gpu, limit in sorted(problem.limits.items()):
        model.addConstr(dot([each.combo.gpus.get(gpu, 0) for each in some], x) <= limit)
    goodput = np.array([each.goodput_rps for each in some])
    solution = minimise(model, dot(-goodput, x))
    return float(goodput @ solution.of(x)) if solution.values else inf


class DeploymentProgram:
    """Eq. 16 over the undominated candidates. A Solution of it has the values of x, without those of y."""

    def __init__(self, problem: ComboProblem, time_limit_s: float) -> None:
        self.problem, self.time_limit_s = problem, time_limit_s
        self.sign = -1.0 if problem.objective == "mce" else 1.0
        self.limited = sorted(problem.limits)
        self.demands = [demand for demand in problem.demands if demand.rps > 0]
        rps = {demand.service: demand.rps for demand in self.demands}
        useful = [each for each in problem.candidates if each.goodput_rps > 0 and each.service in rps]
        self.weights = {each: self.sign * self._weight(each) for each in useful}
        self.candidates = _undominated(useful, self.weights, self.limited, rps, keep=problem.objective == "mce")
        self.cost = np.array([self.weights[each] for each in self.candidates])
        self.shares = np.array(
            [
                [min(each.goodput_rps / demand.rps, 1.0) * (each.service == demand.service) for each in self.candidates]
                for demand in self.demands
            ]
        ).reshape(len(self.demands), len(self.candidates))
        self.use = np.array(
            [[each.combo.gpus.get(gpu, 0) for each in self.candidates] for gpu in self.limited], dtype=float
        ).reshape(len(self.limited), len(self.candidates))
        self.limits = np.array([float(problem.limits[gpu]) for gpu in self.limited])

    def _weight(self, each: ComboCandidate) -> float:
        """The weight of a candidate: P / C, P, or C."""
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
        """The optimum, without the limits of some GPU types or without one demand if given."""
        limits = self.limits_without(without_gpus)
        least = np.array([float(demand.service != without_service) for demand in self.demands])
        if not len(self.cost):
            return Solution("infeasible") if least.any() else Solution("optimal", (), 0.0)
        if self.sign > 0:
            x = Covers(self.cost, self.shares[least > 0], self.use, limits).solve(self.time_limit_s)
            if x is not None:
                return Solution("optimal", tuple(map(float, x)), float(self.cost @ x))
            return self._minimised(self.cost, limits, least)
        return self._most_efficient(limits, least)

    def _minimised(self, cost: Floats, limits: Floats, least: Floats, no_less: Floats | None = None) -> Solution:
        """The numbers of combos with the lowest cost for which the sum with `no_less` is not negative, within a
        tolerance."""
        model = new_model()
        variables = integers(model, self._upper(limits))
        for share, at_least in zip(self.shares, least, strict=True):
            model.addConstr(dot(share, variables) >= at_least)
        self._limit_gpus(model, variables, limits)
        if no_less is not None:
            model.addConstr(dot(no_less, variables) >= -TOLERANCE)
        return minimise(model, dot(cost, variables), self.time_limit_s)

    def _most_efficient(self, limits: Floats, least: Floats) -> Solution:
        """Dinkelbach's iteration for `mce`, starting from the cheapest plan. Returns the cheapest of the most efficient
        plans."""
        price = np.array([each.combo.usd_per_hour for each in self.candidates])
        efficiency = self.cost / self.cost.min()
        best = self._minimised(price, limits, least)
        while best.values:
            x = np.round(best.values)
            if not x.any():
                return Solution("optimal", tuple(x), 0.0)
            ratio = float(efficiency * price @ x / (price @ x))
            gains = (efficiency - ratio) * price
            gains[abs(gains) <= NEGLIGIBLE * price.max()] = 0.0  # removes rounding errors
            better = self._minimised(-gains, limits, least)
            if better.status != "optimal":
                return Solution("feasible", best.values)
            if gains @ np.round(better.values) <= TOLERANCE:
                cheapest = self._minimised(price, limits, least, no_less=gains)
                return Solution("optimal", cheapest.values or best.values, ratio * float(self.cost.min()))
            best = better
        return best

    def serve_most(self, limits: Floats) -> tuple[Solution, float]:
        """The cheapest solution with the largest sum of served shares, and this sum."""
        num_services = len(self.demands)
        if not len(self.cost):
            return Solution("optimal", (), 0.0), 0.0
        model, x, y = self._served_shares(limits)
        first = minimise(model, dot(-np.ones(num_services), y), self.time_limit_s)
        if first.status == "unknown":
            return first, 0.0
        reached = float(first.of(y).sum())
        prices = [each.combo.usd_per_hour for each in self.candidates]
        again, x, y = self._served_shares(limits)
        again.addConstr(dot(np.ones(num_services), y) >= reached * (1 - TOLERANCE))
        second = minimise(again, dot(prices, x), self.time_limit_s)
        solution = first if second.status in ("unknown", "infeasible") else second
        return Solution(first.status, tuple(solution.of(x)), first.bound), float(solution.of(y).sum())

    def _served_shares(self, limits: Floats) -> tuple[Model, Any, Any]:
        model = new_model()
        x, y = integers(model, self._upper(limits)), reals(model, np.ones(len(self.demands)))
        for share, served in zip(self.shares, y, strict=True):
            model.addConstr(dot(share, x) - served >= 0)
        self._limit_gpus(model, x, limits)
        return model, x, y

    def _limit_gpus(self, model: Model, x: Any, limits: Floats) -> None:
        for use, limit in zip(self.use, limits, strict=True):
            if limit < inf:
                model.addConstr(dot(use, x) <= limit)

    def _upper(self, limits: Floats) -> Floats:
        """Upper bound for each combo: from the GPU limits, and from its service's need if more combos would cost
        more."""
        with np.errstate(divide="ignore", invalid="ignore"):
            allowed = np.where(self.use > 0, np.floor(limits[:, None] / self.use), inf).min(axis=0, initial=inf)
            needed = np.ceil(1.0 / self.shares.sum(axis=0))
        return np.asarray(allowed if self.sign < 0 else np.minimum(allowed, needed))

    def limits_without(self, gpus: Sequence[str]) -> Floats:
        """The limits, with infinity for `gpus`."""
        lifted = np.array([gpu in gpus for gpu in self.limited], dtype=bool)
        return np.asarray(np.where(lifted, inf, self.limits))

    def numbers(self, solution: Solution) -> Numbers:
        pairs = zip(self.candidates, solution.values, strict=False)
        return {each: round(value) for each, value in pairs if round(value) > 0}

    def objective(self, numbers: Numbers) -> float:
        """The objective in the planner's units and sign, from whole numbers."""
        if self.problem.objective == "mce":
            usd = sum(number * each.combo.usd_per_hour for each, number in numbers.items())
            spent = sum(number * each.combo.usd_per_hour * -self.weights[each] for each, number in numbers.items())
            return spent / usd if usd else 0.0
        return sum(number * self.sign * self.weights[each] for each, number in numbers.items())

    def gpus(self, numbers: Numbers) -> dict[str, int]:
        used = ((gpu, num * number) for each, number in numbers.items() for gpu, num in each.combo.gpus.items())
        return dict(sorted(add_gpus(used).items()))

    def goodputs(self, numbers: Numbers) -> tuple[ServiceGoodput, ...]:
        services = []
        for demand in self.problem.demands:
            goodput = sum(n * each.goodput_rps for each, n in numbers.items() if each.service == demand.service)
            missing = max(0.0, demand.rps - goodput)
            missing = missing if missing > TOLERANCE * demand.rps else 0.0
            services.append(ServiceGoodput(demand.service, demand.rps, goodput, missing))
        return tuple(services)

    def plan(
        self,
        status: Literal["optimal", "feasible", "short"],
        numbers: Numbers,
        objective: float | None,
        bound: float | None,
        gap: float | None,
        binding: tuple[ComboBinding, ...],
        why: str = "",
    ) -> ComboPlan:
        usd = sum(number * each.combo.usd_per_hour for each, number in numbers.items())
        services = self.goodputs(numbers)
        ordered = sorted(numbers, key=lambda each: (each.service, -numbers[each], each.combo.label))
        return ComboPlan(
            status=status,
            planner=self.problem.objective,
            objective=objective,
            bound=bound,
            gap=gap,
            combos=tuple(
                PlannedCombo(
                    each.service,
                    each.combo,
                    numbers[each],
                    each.goodput_rps,
                    each.combo.usd_per_hour,
                    each.tokens_per_usd,
                    each.calibrated,
                    each.uncalibrated,
                )
                for each in ordered
            ),
            gpus=self.gpus(numbers),
            usd_per_hour=usd,
            tokens_per_usd=tokens_per_usd(self.problem.demands, services, usd),
            services=services,
            binding=binding,
            why=why,
        )


def _undominated(
    candidates: Sequence[ComboCandidate],
    weights: Mapping[ComboCandidate, float],
    limited: Sequence[str],
    demand_rps: Mapping[str, float],
    keep: bool = False,
) -> list[ComboCandidate]:
    """Candidates without those that others can replace in any plan. The order of the input does not affect the result's
    order.

    A candidate is left out if k combos of another candidate of its service serve at least as much, weigh no more (in a
    minimised objective) and take no more GPUs of any limited type. Goodput beyond the whole demand does not count. A
    combo that equals two smaller ones but costs more is therefore dropped; of equal combos one stays. `keep`: keep all,
    if the objective is not a sum.
    """
    ordered = sorted(candidates, key=lambda each: (each.service, weights[each], each.combo.label, each.goodput_rps))
    if keep:
        return ordered
    kept: list[ComboCandidate] = []
    for service in sorted(demand_rps):
        some = [each for each in ordered if each.service == service]
        if some:
            weight = np.array([weights[each] for each in some])
            goodput = np.array([min(each.goodput_rps, demand_rps[service]) for each in some])
            gpus = np.array([[float(each.combo.gpus.get(gpu, 0)) for gpu in limited] for each in some])
            replaces = _replaces(weight, goodput, gpus)
            np.fill_diagonal(replaces, False)
            stays = np.ones(len(some), dtype=bool)
            # in reverse order, so that a remaining candidate replaces each dropped one
            for b in reversed(range(len(some))):
                stays[b] = not (replaces[:, b] & stays).any()
            kept += [each for each, stay in zip(some, stays, strict=True) if stay]
    return kept


def _replaces(weight: Floats, goodput: Floats, gpus: Floats) -> np.ndarray:
    """Array [a, b]: whether some number of units of a replaces b."""
    copies = np.ceil(goodput[None, :] / goodput[:, None] - ROUNDING)
    slack = ROUNDING * np.abs(weight)[None, :]
    replaces = copies * weight[:, None] <= weight[None, :] + slack
    for column in gpus.T:
        replaces &= copies * column[:, None] <= column[None, :]
    return np.asarray(replaces)
