"""The plans of the paper's Tables 2 and 3, simulated unchanged."""

from __future__ import annotations

from headway.planning.cascade.problem import CascadePlan, Replicas, StagePlan
from headway.planning.cascade.request import PlanningRequest
from headway.workload.quality_traces import DEEPSEEK, TABLE_2
from headway_papers.reproduce.cascadia.claims import CASES
from headway_papers.reproduce.cascadia.regimes import plan_of_stages
from headway_papers.reproduce.cascadia.runs import run
from headway_papers.reproduce.cascadia.setup import planning_case
from headway_papers.reproduce.tasks import Measurement

Shapes = tuple[Replicas, ...]
TABLE_3: tuple[tuple[Shapes, Shapes, Shapes], ...] = (
    ((Replicas(1, 1, 4),), (Replicas(4, 1, 2),), (Replicas(4, 3, 1), Replicas(8, 1, 1))),
    ((Replicas(2, 1, 2),), (Replicas(2, 1, 6),), (Replicas(8, 1, 2),)),
    ((Replicas(1, 1, 6),), (Replicas(2, 1, 5), Replicas(4, 1, 1)), (Replicas(4, 3, 1),)),
    ((Replicas(1, 1, 6), Replicas(2, 1, 1)), (Replicas(2, 1, 8),), (Replicas(8, 1, 1),)),
    ((Replicas(1, 1, 10), Replicas(2, 1, 4)), (Replicas(4, 1, 2), Replicas(2, 1, 3)), ()),
    ((Replicas(1, 1, 16), Replicas(2, 1, 4)), (Replicas(2, 1, 4),), ()),
)
"""Maps each case of Table 2 and stage to (tensor parallelism, pipeline stages, replicas)."""


def paper_plan(trace: int, q_min: float, rate_rps: float, seeds: list[int]) -> Measurement:
    """Table 2's thresholds on Table 3's replicas, with every seed. The case is one of `CASES`."""
    case = planning_case("deepseek", trace, q_min, rate_rps)
    plan = plan_of_tables(case, CASES.index(("deepseek", trace, q_min)))
    return {"runs": {"cascadia": [run(case, plan, seed) for seed in seeds]}}


def plan_of_tables(case: PlanningRequest, row: int) -> CascadePlan:
    """A plan with the values of the tables."""
    cell, problem = TABLE_2[row], case.problem
    stages = tuple(
        StagePlan(name, gpus, shapes, threshold if num_left else None, ratio, ratio * problem.rate_rps, None)
        for name, gpus, shapes, threshold, ratio, num_left in zip(
            DEEPSEEK, cell.gpus, TABLE_3[row], (*cell.thresholds, None), cell.ratios, (*cell.gpus[1:], 0), strict=True
        )
    )
    return plan_of_stages(problem, stages, cell.q_min, "the paper's Tables 2 and 3")
