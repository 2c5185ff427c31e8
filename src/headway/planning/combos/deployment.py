"""How many of which combo: Cauchy's deployment program (3.3.2, Eq. 16), its variants (4.3) and its fallback.

Sets and parameters
    m in M      services, with demand D_m > 0 in requests per second
    n in N_m    candidates of service m: goodput g_n, price P_n in $/h, cost-efficiency C_n in tokens per dollar
    t in G      GPU types with a limit G_t; r_nt GPUs of type t in combo n
Variables       x_n, whole numbers of 0 or more
Subject to      sum over n in N_m of g_n x_n >= D_m     for every m
                sum over n of r_nt x_n <= G_t           for every t
Objective       co    minimise sum of (P_n / C_n) x_n
                mc    minimise sum of P_n x_n
                mce   maximise sum of C_n x_n

What P / C trades off. Where C is measured, C = 3600 g L / P with L tokens a request, so P / C = P^2 / (3600 L g):
for each request per second that a combo can serve, the square of what it costs, (P / g)^2, where `mc` counts P / g.
Splitting a combo in equal parts changes neither. But a combo that is dear for what it serves weighs more in `co`: to
fill a small remainder, `mc` takes the combo with the lowest price, however little it serves for it, and `co` may pay
more for one that serves much more. So `mc` is never dearer, and `co` leaves more room for what is yet to come. Where C
is the closed form, which knows no goodput, P / C weighs the price by how well phases and GPUs match. `mce` adds combos
for as long as there are GPUs: it needs limits, and serves more than what is asked. A combo that costs nothing has
P / C = 0, and no C that `mce` could weigh.

Fallback, where the demands cannot all be met: the objective is dropped, and the plan serves the largest sum of
the services' shares of demand, min(1, sum of g_n x_n / D_m), at the least price at which that can be had.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import Literal

import numpy as np
from msgspec import structs

from headway.planning.combos.candidates import Candidate
from headway.planning.combos.problem import TOLERANCE, Binding, Plan, Problem, check
from headway.planning.combos.program import Program
from headway.planning.solver import Solution, minimise


def plan(problem: Problem, time_limit_s: float = 10.0, explain: bool = True) -> Plan:
    """The best deployment. `time_limit_s` is for each solve; `explain` finds what binds, with a solve for each limit.

    HeadwayError where the problem does not hold together, or `mce` is asked of what it cannot weigh.
    """
    check(problem)
    program = Program(problem, time_limit_s)
    found = program.solve()
    if found.status in ("infeasible", "unknown"):
        return _short(problem, found.status, time_limit_s, explain)
    counts = program.counts(found)
    status: Literal["optimal", "feasible"] = "optimal" if found.status == "optimal" else "feasible"
    objective = program.objective(counts)
    bound = None if found.bound is None else program.sign * min(program.sign * objective, found.bound)
    gap = None if bound is None else abs(objective - bound) / abs(objective) if objective else 0.0
    binding = _binding(program, counts, objective) if explain and status == "optimal" else ()
    return program.plan(status, counts, objective, bound, gap, binding)


def _binding(program: Program, counts: dict[Candidate, int], objective: float) -> tuple[Binding, ...]:
    """Every limit and every demand, each left out in turn."""
    mce = program.problem.objective == "mce"
    found = list(_used_up(program, counts) if mce else _limits(program, counts, objective))
    for got in program.served(counts):
        if got.demand_rps > 0:
            better = _better(program, program.solve(without_service=got.service), objective)
            if better is not None:
                found.append(Binding("demand", got.service, got.goodput_rps, got.demand_rps, better))
    return tuple(found)


def _limits(program: Program, counts: dict[Candidate, int], objective: float) -> Iterator[Binding]:
    """None where all of them together do not bind."""
    if _better(program, program.solve(without_gpus=program.limited), objective) is None:
        return
    used = program.gpus(counts)
    for gpu in program.limited:
        better = _better(program, program.solve(without_gpus=(gpu,)), objective)
        if better is not None:
            yield Binding("gpus", gpu, used.get(gpu, 0), program.problem.limits[gpu], better)


def _used_up(program: Program, counts: dict[Candidate, int]) -> Iterator[Binding]:
    """What binds under `mce`, which has no end without limits."""
    limits = program.problem.limits
    for gpu, num in program.gpus(counts).items():
        if num == limits.get(gpu):
            yield Binding("gpus", gpu, num, limits[gpu], None)


def _better(program: Program, found: Solution, objective: float) -> float | None:
    """The objective, where it is better."""
    if not found.values and found.status != "optimal":
        return None
    other = program.objective(program.counts(found))
    return other if program.sign * (objective - other) > TOLERANCE * abs(objective) else None


def _short(problem: Problem, status: str, time_limit_s: float, explain: bool) -> Plan:
    """The fallback: the program with prices as weights."""
    program = Program(structs.replace(problem, objective="mc"), time_limit_s)
    found = program.serve_most()
    counts = {} if found.status == "unknown" else program.counts(found)
    served = program.served(counts)
    total = sum(min(1.0, got.goodput_rps / got.demand_rps) for got in served if got.demand_rps > 0)
    if not any(got.shortfall_rps for got in served):
        note = "found with the objective dropped: there was no time to weigh cost-efficiency"
        made = program.plan("feasible", counts, None, None, None, ())
        return structs.replace(made, planner=problem.objective, notes=(note,))
    bound = total if found.status == "optimal" else float(len(program.demands))
    binding = _binding_short(program, counts, total) if explain and found.status == "optimal" else ()
    why = _why(program, counts) if status == "infeasible" else "the time was over before a plan was found"
    made = program.plan("short", counts, total, bound, (bound - total) / total if total else None, binding, why)
    return structs.replace(made, planner=problem.objective)


def _binding_short(program: Program, counts: dict[Candidate, int], total: float) -> tuple[Binding, ...]:
    """Limits without which more would be served."""
    used, found = program.gpus(counts), []
    for gpu in program.limited:
        other = program.serve_most(program.most_without((gpu,)))
        shares = sum(other.values[len(program.cost) :])
        if shares > total + TOLERANCE:
            found.append(Binding("gpus", gpu, used.get(gpu, 0), program.problem.limits[gpu], shares))
    return tuple(found)


def _why(program: Program, counts: dict[Candidate, int]) -> str:
    """What each service could reach with all GPUs to itself; else that they are too few for all together."""
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
            f"{got.service} {got.shortfall_rps:.4g} req/s" for got in program.served(counts) if got.shortfall_rps
        ]
        reasons = [f"each service can be served alone, but not all together; missing: {', '.join(missing)}"]
    return "; ".join(reasons)


def most_alone(problem: Problem, service: str) -> float:
    """Requests per second that a service can reach with every GPU to itself; infinite without limits."""
    some = [each for each in problem.candidates if each.service == service and each.goodput_rps > 0]
    limited = sorted(problem.limits)
    if any(not any(gpu in problem.limits for gpu in each.combo.gpus) for each in some):
        return inf
    if not some:
        return 0.0
    use = np.array([[each.combo.gpus.get(gpu, 0) for each in some] for gpu in limited], dtype=float)
    most = np.array([float(problem.limits[gpu]) for gpu in limited])
    goodput = np.array([each.goodput_rps for each in some])
    found = minimise(-goodput, use, np.full(len(most), -inf), most, np.full(len(some), inf))
    return float(goodput @ np.array(found.values)) if found.values else inf
