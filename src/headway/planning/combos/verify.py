"""Checks a deployment without the program that found it, from sums over the planned combos only."""

from __future__ import annotations

from math import isclose

from headway.core.errors import HeadwayError
from headway.planning.combos.problem import EFFICIENCIES, TOLERANCE, ComboPlan, ComboProblem


def verify(problem: ComboProblem, plan: ComboPlan) -> None:
    """Raise HeadwayError if a plan violates a limit, or if one of its numbers does not follow from its combos."""
    if wrong := faults(problem, plan):
        raise HeadwayError(f"the {plan.planner} plan does not hold: {'; '.join(wrong)}")


def faults(problem: ComboProblem, plan: ComboPlan) -> tuple[str, ...]:
    return (*_combos(problem, plan), *_limits(problem, plan), *_served(problem, plan), *_sums(problem, plan))


def _combos(problem: ComboProblem, plan: ComboPlan) -> list[str]:
    known = {(each.service, each.combo, each.goodput_rps) for each in problem.candidates}
    wrong = [
        f"{c.combo.label} is not a candidate of {c.service}"
        for c in plan.combos
        if (c.service, c.combo, c.goodput_rps) not in known
    ]
    return wrong + [f"{c.combo.label}: count {c.count}" for c in plan.combos if c.count < 1]


def _limits(problem: ComboProblem, plan: ComboPlan) -> list[str]:
    used: dict[str, int] = {}
    for planned in plan.combos:
        for group in planned.combo.groups:
            used[group.gpu] = used.get(group.gpu, 0) + planned.count * group.tp * group.instances
    wrong = [
        f"{gpu}: {num} in use of {problem.limits[gpu]}"
        for gpu, num in used.items()
        if gpu in problem.limits and num > problem.limits[gpu]
    ]
    return wrong if used == plan.gpus else [*wrong, f"gpus: {plan.gpus}, but {used} are in use"]


def _served(problem: ComboProblem, plan: ComboPlan) -> list[str]:
    wrong = []
    for demand, stated in zip(problem.demands, plan.services, strict=True):
        goodput = sum(c.count * c.goodput_rps for c in plan.combos if c.service == demand.service)
        if stated.service != demand.service or not isclose(goodput, stated.goodput_rps, abs_tol=1e-12):
            wrong.append(f"{demand.service}: {stated.goodput_rps} req/s are stated, {goodput} is the sum")
        missing = demand.rps - goodput > 2 * TOLERANCE * demand.rps
        if missing and (plan.status != "short" or not stated.shortfall_rps):
            wrong.append(f"{demand.service}: {goodput} of {demand.rps} req/s")
    return wrong


def _sums(problem: ComboProblem, plan: ComboPlan) -> list[str]:
    usd = sum(c.count * c.usd_per_hour for c in plan.combos)
    wrong = [] if isclose(usd, plan.usd_per_hour, abs_tol=1e-12) else [f"{plan.usd_per_hour} $/h, the sum is {usd}"]
    if plan.status == "short" or plan.objective is None:
        return wrong
    value = spent = 0.0
    for planned in plan.combos:
        key = (planned.service, planned.combo, planned.goodput_rps)
        each = next((c for c in problem.candidates if (c.service, c.combo, c.goodput_rps) == key), None)
        if each is None:
            return wrong
        efficiency = getattr(each, EFFICIENCIES[problem.efficiency])
        price = planned.combo.usd_per_hour
        if problem.objective == "mc":
            value += planned.count * price
        elif problem.objective == "mce":
            value += planned.count * price * efficiency
            spent += planned.count * price
        elif price:
            value += planned.count * price / efficiency
    value = value / spent if spent else value
    if not isclose(value, plan.objective, rel_tol=1e-9, abs_tol=1e-15):
        wrong.append(f"objective {plan.objective}, the sum is {value}")
    return wrong
