"""SLO scales with each case at the load of its own stand-alone model.

The paper gives no rates. With one rate for each trace, at 95% of what the largest model sustains, the 70B model that
stands alone at qualities below 85 has about two fifths of its load, and hardly queues. Beside it, CascadeServe has as
many GPUs for every model and one parallelism, because section 2 says that it adapts neither.
"""

from __future__ import annotations

from functools import partial

from headway.planning.cascade import planners
from headway.planning.cascade.deployment import StageLatencies
from headway.planning.cascade.latency import bounds_of, evaluator_of
from headway.planning.cascade.planners import EFFORT
from headway.planning.cascade.rehearsal import Trials, best_or_nearest, simulated, tighten_until_met
from headway_papers.reproduce.cascadia.runs import LOAD, baselines, run, stand_alone_model, sustained_rps
from headway_papers.reproduce.cascadia.setup import planning_case
from headway_papers.reproduce.tasks import Measurement

UNIFORM = "cascade-serve-uniform"


def measure_at_own_load(cascade: str, trace: int, q_min: float, seeds: list[int]) -> Measurement:
    """Every system's plan for a case at `LOAD` times the sustained rate of its stand-alone model on all GPUs."""
    rate_rps = own_rate_rps(cascade, trace, q_min)
    case = planning_case(cascade, trace, q_min, rate_rps)
    latencies = StageLatencies(evaluator_of(case))
    uniform = planners.single(partial(planners.cascade_serve, equal=True, uniform=True))
    others = dict(baselines(case, latencies, cascade, q_min, further=False))
    others[UNIFORM] = Trials(case, latencies, uniform)
    plans = {name: best_or_nearest(case.problem.target, trials.run()).plan for name, trials in others.items()}
    plans["cascadia"] = tighten_until_met(case, latencies).plan
    runs = {name: [run(case, chosen, seed) for seed in seeds] for name, chosen in plans.items()}
    return {"runs": runs, "rate_rps": rate_rps}


def own_rate_rps(cascade: str, trace: int, q_min: float) -> float:
    rate_rps = 20.0
    for _ in range(2):  # to use the shapes that are best near the final rate
        case = planning_case(cascade, trace, q_min, rate_rps)
        model = stand_alone_model(case, cascade, q_min)
        alone = planners.stand_alone(case.problem, model, StageLatencies(evaluator_of(case)), bounds_of(case), EFFORT)
        rate_rps = LOAD * sustained_rps(case, simulated(case, alone)[1], alone)
    return rate_rps
