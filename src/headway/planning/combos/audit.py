"""Looks a deployment over without the program that found it: sums over what was chosen, nothing else."""

from __future__ import annotations

from math import isclose

from headway.planning.combos.problem import EFFICIENCIES, TOLERANCE, Plan, Problem


def faults(problem: Problem, found: Plan) -> tuple[str, ...]:
    """What is wrong with a plan for this problem; empty: limits, demands, prices and objective are as it says."""
    return (*_chosen(problem, found), *_limits(problem, found), *_served(problem, found), *_sums(problem, found))


def _chosen(problem: Problem, found: Plan) -> list[str]:
    known = {(each.service, each.combo, each.goodput_rps) for each in problem.candidates}
    wrong = [f"{c.combo.label} is no candidate of {c.service}" for c in found.combos
             if (c.service, c.combo, c.goodput_rps) not in known]  # fmt: skip
    return wrong + [f"{c.combo.label}: {c.count} of it" for c in found.combos if c.count < 1]


def _limits(problem: Problem, found: Plan) -> list[str]:
    used: dict[str, int] = {}
    for chosen in found.combos:
        for group in chosen.combo.groups:
            used[group.gpu] = used.get(group.gpu, 0) + chosen.count * group.tp * group.instances
    wrong = [f"{gpu}: {num} in use of {problem.limits[gpu]}" for gpu, num in used.items()
             if gpu in problem.limits and num > problem.limits[gpu]]  # fmt: skip
    return wrong if used == found.gpus else [*wrong, f"gpus: {found.gpus}, but {used} are in use"]


def _served(problem: Problem, found: Plan) -> list[str]:
    wrong = []
    for demand, got in zip(problem.demands, found.services, strict=True):
        goodput = sum(c.count * c.goodput_rps for c in found.combos if c.service == demand.service)
        if got.service != demand.service or not isclose(goodput, got.goodput_rps, abs_tol=1e-12):
            wrong.append(f"{demand.service}: {got.goodput_rps} req/s are stated, {goodput} is the sum")
        missing = demand.rps - goodput > 2 * TOLERANCE * demand.rps
        if missing and (found.status != "short" or not got.shortfall_rps):
            wrong.append(f"{demand.service}: {goodput} of {demand.rps} req/s")
    return wrong


def _sums(problem: Problem, found: Plan) -> list[str]:
    usd = sum(c.count * c.usd_per_hour for c in found.combos)
    wrong = [] if isclose(usd, found.usd_per_hour, abs_tol=1e-12) else [f"{found.usd_per_hour} $/h, the sum is {usd}"]
    if found.status == "short" or found.objective is None:
        return wrong
    value = 0.0
    for chosen in found.combos:
        key = (chosen.service, chosen.combo, chosen.goodput_rps)
        each = next((c for c in problem.candidates if (c.service, c.combo, c.goodput_rps) == key), None)
        if each is None:
            return wrong
        efficiency = getattr(each, EFFICIENCIES[problem.efficiency])
        price = chosen.combo.usd_per_hour
        if problem.objective == "mc":
            value += chosen.count * price
        elif problem.objective == "mce":
            value += chosen.count * efficiency
        elif price:
            value += chosen.count * price / efficiency
    if not isclose(value, found.objective, rel_tol=1e-9, abs_tol=1e-15):
        wrong.append(f"objective {found.objective}, the sum is {value}")
    return wrong
