"""Changing workloads (4.4, Figure 11, appendix G): the traces one after the other, with and without replanning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from msgspec import structs

from headway.config.spec import Replan
from headway.control.policies import CascadeConfig, Policies
from headway.core.fleet import Fleet, Pool
from headway.core.record import Outcome, Records
from headway.core.task import InlineTask
from headway.metrics.summary import summarize
from headway.perf.params import weights_bytes
from headway.perf.speculation import step_model
from headway.planning.cascade import planners
from headway.planning.cascade.deployment import StageLatencies
from headway.planning.cascade.latency import bounds_of, evaluator_of
from headway.planning.cascade.planners import EFFORT
from headway.planning.cascade.problem import CascadePlan, QualityFloor
from headway.planning.cascade.rehearsal import simulated, tighten_until_met
from headway.planning.cascade.replan import UnrehearsedPlanner, following
from headway.planning.cascade.replanning import ModelUnit, NewPlan, Period, Replanner, planning_target, setup_of, unit
from headway.planning.cascade.replica_sets import feasible_shapes
from headway.planning.cascade.request import PlanningRequest
from headway.policies.cascade.thresholds import ThresholdsCascade
from headway.policies.resolve import PolicyChoice
from headway.sim.cluster import simulate
from headway.sim.replica_resources import Line
from headway.workload.quality import with_scores
from headway.workload.quality_traces import DEEPSEEK, generate_scores
from headway.workload.random_streams import stream
from headway.workload.sources import TraceSource
from headway.workload.table import Workload, concat
from headway_papers.reproduce.cascadia.runs import sustained_rps
from headway_papers.reproduce.cascadia.setup import JUDGED_TABLES, ROWS, planning_case, with_fresh_requests
from headway_papers.reproduce.tasks import Measurement

MINUTES = (8, 16, 10)
"""Length of each segment: traces 1, 2 and 3."""
PERIOD_S = 300.0
"""Interval between two observations of the workload."""
LOADED_BYTES_PER_S = 2.1e9
"""Rate of one GPU; a reconfiguration takes 2 to 20 s (appendix G)."""


def drift(q_min: float, rate_rps: float, seeds: list[int]) -> Measurement:
    """p95 and quality of every system and seed, in total and by trace, and each system's sustained rate for each
    trace."""
    first = planning_case("deepseek", 1, q_min, rate_rps)
    latencies = StageLatencies(evaluator_of(first))
    plans = {
        "static": tighten_until_met(first, latencies).plan,
        "cascade-serve": tighten_until_met(first, latencies, planners.single(planners.cascade_serve)).plan,
        "stand-alone": planners.stand_alone(first.problem, DEEPSEEK[-1], latencies, bounds_of(first), EFFORT),
    }
    runs: Measurement = {name: [] for name in (*plans, "cascadia")}
    followed_plans = list[list[str]]()
    for seed in seeds:
        rows, ends_s = _workload(rate_rps, seed)
        for name, plan in plans.items():
            records = _simulated(first, rows, plan, _fixed(first, plan), seed)
            own = _measured(records, ends_s)
            own["sustained_rps"] = [_sustained_rps(trace, q_min, rate_rps, plan, seed) for trace in (1, 2, 3)]
            runs[name].append(own)
        planner = _replanner(first, plans["static"], rate_rps, seed)
        records = _simulated(first, rows, plans["static"], _following(first, planner), seed)
        own = _measured(records, ends_s)
        followed = [_plan_at(end_s, plans["static"], planner.new_plans) for end_s in ends_s]
        own["sustained_rps"] = [
            _sustained_rps(trace, q_min, rate_rps, plan, seed) for trace, plan in enumerate(followed, 1)
        ]
        runs["cascadia"].append(own)
        followed_plans.append([f"at {each.at_s:.0f} s ({each.why})" for each in planner.new_plans])
    return {"runs": runs, "plans": followed_plans}


def _plan_at(time_s: float, first: CascadePlan, new_plans: Sequence[NewPlan]) -> CascadePlan:
    """The newest plan before a time."""
    return next((each.plan for each in reversed(new_plans) if each.at_s < time_s), first)


def _sustained_rps(trace: int, q_min: float, rate_rps: float, plan: CascadePlan, seed: int) -> float:
    """The rate that a plan sustains on a trace, with requests on which no plan was made."""
    case = with_fresh_requests(planning_case("deepseek", trace, q_min, rate_rps), seed)
    return sustained_rps(case, simulated(case, plan, seed)[1], plan)


def _workload(rate_rps: float, seed: int) -> tuple[Workload, list[float]]:
    """The concatenated segments, and the end time of each."""
    parts, ends_s = list[Workload](), list[float]()
    for trace, minutes in zip((1, 2, 3), MINUTES, strict=True):
        start_s, span_s = (ends_s[-1] if ends_s else 0.0), 60.0 * minutes
        num = round(span_s * rate_rps)
        arrival_s = start_s + span_s * np.sort(stream(seed, f"arrivals of trace {trace}").random(num))
        ones = np.ones(num, "i8")
        rows = Workload({"arrival_s": arrival_s, "prompt_tokens": ones, "output_tokens": ones})
        parts.append(with_scores(rows, generate_scores(trace, ROWS, JUDGED_TABLES + seed), seed))
        ends_s.append(start_s + span_s)
    return concat(parts), ends_s


def _replanner(case: PlanningRequest, first: CascadePlan, rate_rps: float, seed: int) -> Replanner:
    """A planner for the observed workload. It has no time for rehearsals, and plans with a margin instead."""
    problem, prompts = case.problem, case.problem.scores.prompt_tokens.astype("f8")
    assert isinstance(problem.target, QualityFloor)
    config = Replan(quality=problem.target.q_min, every_s=PERIOD_S)
    make_problem = partial(replace, problem, target=planning_target(config), use_all=False, span_s=config.every_s)
    work = UnrehearsedPlanner(make_problem, case.policies, case.coefficients, case.seed)
    expected = Period(rate_rps, tuple(prompts.tolist()), problem.scores)
    pools = {shape: pool.name for shape, pool in _pools(case, {}).items()}
    return Replanner(
        problem.names, pools, setup_of(first, pools), expected, InlineTask(work), config, seed, config.planning_s
    )


def _fixed(case: PlanningRequest, plan: CascadePlan) -> Policies:
    """The policies of a fixed plan."""
    models = tuple(stage.model for stage in plan.stages if stage.replicas)
    if len(models) < 2:
        return case.policies
    choice = PolicyChoice("thresholds", ThresholdsCascade, {"thresholds": list(plan.thresholds)[: len(models) - 1]})
    return structs.replace(case.policies, cascade=CascadeConfig("cascade", models, choice, case.problem.judge_s))


def _following(case: PlanningRequest, planner: Replanner) -> Policies:
    """The policies of a plan that is recomputed."""
    cascade = CascadeConfig(
        "cascade", DEEPSEEK, PolicyChoice("thresholds", ThresholdsCascade, {}), case.problem.judge_s
    )
    return following(case.policies, cascade, planner, {case.problem.gpu.name: case.problem.num_gpus})


def _simulated(case: PlanningRequest, rows: Workload, plan: CascadePlan, policies: Policies, seed: int) -> Records:
    """Simulate the plan's replicas; with a scaler, also empty pools for all other shapes."""
    counts = {(stage.model, unit(part.tp, part.pp)): part.count for stage in plan.stages for part in stage.replicas}
    pools = list(_pools(case, counts).values())
    if policies.scaler is None:
        pools = [pool for pool in pools if pool.replicas]

    def line(pool: Pool) -> Line:
        return step_model(pool.model, pool.gpu, pool.engine, pool.parallel, case.coefficients[pool.model.name]).line

    return simulate(Fleet(tuple(pools)), TraceSource(rows), policies, seed=seed, line=line)


def _pools(case: PlanningRequest, counts: Mapping[ModelUnit, int]) -> dict[ModelUnit, Pool]:
    """A pool for every shape, with the given numbers of initial replicas."""
    problem, pools = case.problem, dict[ModelUnit, Pool]()
    for model in problem.models:
        shapes, _ = feasible_shapes(
            model, problem.gpu, problem.engine, problem.num_gpus, problem.server, problem.max_pp
        )
        for shape in shapes:
            at, name = (model.name, unit(shape.tp, shape.pp)), f"{model.name} tp {shape.tp} pp {shape.pp}"
            loading_s = weights_bytes(model) / shape.num_gpus / LOADED_BYTES_PER_S
            pools[at] = Pool(
                name,
                model,
                problem.gpu,
                problem.engine,
                shape,
                counts.get(at, 0),
                min_replicas=0,
                start_s=min(max(loading_s, 2.0), 20.0),
            )
    return pools


def _measured(records: Records, ends_s: list[float]) -> Measurement:
    """Measurements of the whole run, and p95 by trace."""
    summary = summarize(records)
    arrival_s = records.workload["arrival_s"][records.requests["request"]]
    latency_s = records.requests["end_s"] - arrival_s
    finished = records.requests["outcome"] == Outcome.FINISHED
    segment = np.searchsorted(ends_s, arrival_s, side="right")
    parts = [finished & (segment == i) for i in range(len(ends_s))]
    return {
        "p95_s": None if summary.e2e_s is None else summary.e2e_s.p95,
        "quality": summary.quality,
        "completed": summary.num_completed,
        "by_trace_s": [float(np.quantile(latency_s[part], 0.95)) if part.any() else None for part in parts],
    }
