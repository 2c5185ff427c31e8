"""Measurements of the end-to-end claims: a plan for every system, each simulated as a whole with every seed.

Every system reaches the quality in the same way: plan, rehearse, and plan for a higher quality if it falls short. Then
it is judged on requests on which no plan was made.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from msgspec import structs

from headway import catalog
from headway.core.errors import HeadwayError
from headway.core.fleet import Engine
from headway.core.record import Records
from headway.metrics.columns import floats
from headway.perf.params import weights_bytes
from headway.planning.cascade import planners
from headway.planning.cascade.deployment import StageLatencies
from headway.planning.cascade.latency import bounds_of, evaluator_of
from headway.planning.cascade.planners import EFFORT, CascadePlanner, SearchPlanner
from headway.planning.cascade.problem import CascadePlan, CascadeProblem, Lengths, ReplicaSet
from headway.planning.cascade.rehearsal import (
    RehearsalResult,
    RehearsedPlan,
    Trials,
    best_or_nearest,
    rehearse,
    result_of,
    simulated,
    tighten_until_met,
)
from headway.planning.cascade.request import PlanningRequest, with_rate
from headway.planning.cascade.routing import Routings, cascades
from headway.planning.cascade.search import Search
from headway.workload.quality_traces import AnswerLengths
from headway.workload.table import LENGTH
from headway_papers.reproduce.cascadia.exhaustive import exhaustive
from headway_papers.reproduce.cascadia.setup import NUM_GPUS, changed, planning_case, with_fresh_requests
from headway_papers.reproduce.tasks import Measurement

LOAD = 0.95
"""Rate of a trace over the largest model's sustained rate on all GPUs. At this load it needs an SLO scale of about 12;
the paper's example has 11.88 (4.2)."""
CHUNKS = (512, 1024, 2048)
"""Chunk sizes of Sarathi-Serve; the best one counts (appendix F)."""
LOADS = (1.0, 0.8, 0.6)
"""Shares of the rate for comparing other replicas of the middle model."""
MORE = 2.0
"""Multiple of the rate: plans for it show the throughput that plans for the lowest latency give up."""
OPTIMALITY_GPUS = (8, 12)
NO_JUDGE = "no judge"
"""The plan of Cascadia, where judging takes no time."""
NUM_ROUTINGS = 9
"""Routings in the comparison with exhaustive search, evenly spaced in quality."""


def rate(cascade: str, trace: int, lengths: AnswerLengths) -> Measurement:
    """The rate of a trace, the latency of a lone request, which is the unit of SLO scales, and each model's lone
    latency."""
    rate_rps, capacity_rps = 20.0, 0.0
    for _ in range(2):  # to use the shapes that are best near the final rate
        case = planning_case(cascade, trace, 80.0, rate_rps, lengths=lengths)
        latencies, limits = _latencies(case), bounds_of(case)
        large = planners.stand_alone(case.problem, case.problem.names[-1], latencies, limits, EFFORT)
        capacity_rps = sustained_rps(case, simulated(case, large)[1], large)
        rate_rps = LOAD * capacity_rps
    alone = [planners.stand_alone(case.problem, name, latencies, limits, EFFORT) for name in case.problem.names[:-1]]
    lone = [rehearse(_lone(case), each) for each in (*alone, large)]
    each = {
        name: [rehearsed.mean_s, rehearsed.quality] for name, rehearsed in zip(case.problem.names, lone, strict=True)
    }
    return {"rate_rps": rate_rps, "capacity_rps": capacity_rps, "lone_s": lone[-1].mean_s or 1.0, "lone": each}


def _lone(case: PlanningRequest) -> PlanningRequest:
    """Requests 200 s apart, so that they hardly overlap; all within the 30 days of `_check_makespan`."""
    return with_rate(case, 0.005)


def measure_case(
    cascade: str,
    trace: int,
    q_min: float,
    rate_rps: float,
    seeds: list[int],
    lengths: AnswerLengths = "alike",
    further: bool = True,
) -> Measurement:
    """Every system's plan for a case, planned once and simulated with every seed.

    `further`: include CascadeServe's other readings.
    """
    case = planning_case(cascade, trace, q_min, rate_rps, lengths=lengths)
    latencies, began = _latencies(case), time.process_time()
    ours = tighten_until_met(case, latencies)
    plan_s = time.process_time() - began
    systems = {
        name: best_or_nearest(case.problem.target, trials.run())
        for name, trials in baselines(case, latencies, cascade, q_min, further)
    }
    systems["cascadia"] = ours
    runs = {
        name: [
            run(case, each.plan, seed, load_policy(each.plan) if name == "cascade-serve-load" else None)
            for seed in seeds
        ]
        for name, each in systems.items()
    }
    results: Measurement = {"runs": runs, "plans": {name: _plan_numbers(each) for name, each in systems.items()}}
    results["rehearsed"] = {"p95_s": ours.rehearsed.p95_s, "quality": ours.rehearsed.quality}
    results["plan_s"] = plan_s
    unjudged = changed(case, judge_s=0.0)
    runs[NO_JUDGE] = [run(unjudged, ours.plan, seed) for seed in seeds]
    results["other shape"] = _other_shape(case, ours.plan, latencies)
    return results


def stand_alone_model(case: PlanningRequest, cascade: str, q_min: float) -> str:
    """The stand-alone model: the largest; for a quality below 85, DeepSeek's second (4.1)."""
    return case.problem.names[-1 if q_min >= 85 or cascade == "llama" else -2]


def baselines(
    case: PlanningRequest, latencies: StageLatencies, cascade: str, q_min: float, further: bool
) -> Iterator[tuple[str, Trials]]:
    """Other systems' names and trials. `further`: include CascadeServe's other readings."""
    alone = stand_alone_model(case, cascade, q_min)
    by_load = planners.single(planners.cascade_serve)

    def trials(planner: CascadePlanner) -> Trials:
        return Trials(case, latencies, planner)

    yield "stand-alone", trials(planners.single(partial(planners.stand_alone, model=alone)))
    yield "cascade-serve", trials(by_load)
    if further:
        yield "cascade-serve-load", Trials(case, latencies, by_load, _rehearse_by_load)
        yield "cascade-serve-equal", trials(planners.single(partial(planners.cascade_serve, equal=True)))


def ablations(cascade: str, trace: int, q_min: float, rate_rps: float, seeds: list[int]) -> Measurement:
    """The search with one part uniform (4.3), planned once and simulated with every seed."""
    case = planning_case(cascade, trace, q_min, rate_rps)
    latencies, runs = _latencies(case), Measurement()
    for name, make in (
        ("uniform parallelism", planners.uniform_parallelism),
        ("uniform allocation", planners.uniform_allocation),
    ):
        chosen = tighten_until_met(case, latencies, SearchPlanner(make, name)).plan
        runs[name] = [run(case, chosen, seed) for seed in seeds]
    return {"runs": runs}


def planned_for_more(cascade: str, trace: int, q_min: float, rate_rps: float, seeds: list[int]) -> Measurement:
    """Plans for `MORE` times the rate, simulated at the rate, where they are not the fastest."""
    case, more = (planning_case(cascade, trace, q_min, times * rate_rps) for times in (1.0, MORE))
    latencies = _latencies(more)
    by_load = Trials(more, latencies, planners.single(planners.cascade_serve)).run()
    plans = {
        "cascadia": tighten_until_met(more, latencies).plan,
        "cascade-serve": best_or_nearest(more.problem.target, by_load).plan,
    }
    return {"runs": {name: [run(case, plan, seed) for seed in seeds] for name, plan in plans.items()}}


def load_policy(cascade_plan: CascadePlan) -> dict[str, Any]:
    """CascadeServe's reaction to the load: the plan's thresholds fall as the next model's batch slots fill."""
    used = [stage for stage in cascade_plan.stages if stage.replicas]
    return {"name": "load-based", "threshold": [stage.threshold for stage in used[:-1]]}


def _rehearse_by_load(case: PlanningRequest, cascade_plan: CascadePlan) -> RehearsalResult:
    return rehearse(case, cascade_plan, policy=load_policy(cascade_plan))


def fewer_models(trace: int, q_min: float, rate_rps: float, seeds: list[int]) -> Measurement:
    """The best cascade without one of the smaller models, as planned by Headway."""
    case = planning_case("deepseek", trace, q_min, rate_rps)
    latencies, options = _latencies(case), list[RehearsedPlan]()
    for names in planners.model_subsets(case.problem):
        try:
            options.append(tighten_until_met(case, latencies, planners.cascade_of(names)))
        except HeadwayError:
            continue
    within = [each for each in options if each.is_met]
    best = min(within, key=lambda each: each.rehearsed.p95_s or 0.0, default=None)
    if best is None:
        return {"runs": None, "models": []}
    runs = {"fewer": [run(case, best.plan, seed) for seed in seeds]}
    return {"runs": runs, "models": [stage.model for stage in best.plan.stages], "plan": _plan_numbers(best)}


def run(
    case: PlanningRequest, cascade_plan: CascadePlan, seed: int, policy: Mapping[str, Any] | None = None
) -> Measurement:
    """A plan on unseen requests, and its sustained rate on them."""
    fresh = with_fresh_requests(case, seed)
    chosen, records = simulated(fresh, cascade_plan, seed, policy)
    rehearsed = result_of(chosen, records)
    return {
        "p95_s": rehearsed.p95_s,
        "mean_s": rehearsed.mean_s,
        "quality": rehearsed.quality,
        "throughput_rps": sustained_rps(fresh, records, cascade_plan),
    }


def sustained_rps(
    case: PlanningRequest, records: Records, cascade_plan: CascadePlan, engine: Engine | None = None
) -> float:
    """The highest rate at which no stage's queue grows: the minimum over stages of capacity over share of requests.

    Shares and lengths come from a run. `engine`: replaces the case's engine.
    """
    stage = evaluator_of(case)
    if engine is not None:
        stage = replace(stage, engine=engine)
    models = {model.name: model for model in case.problem.models}
    names = np.array([replica.model for replica in records.replicas])
    served_by, requests = names[records.segments["replica"].astype("i8")], records.segments["request"].astype("i8")
    num, rates = len(records.workload["arrival_s"]), list[float]()
    for each in cascade_plan.stages:
        rows = np.unique(requests[served_by == each.model])
        if not each.replicas or not len(rows):
            continue
        prompts = floats(records.workload, "prompt_tokens")[rows]
        lengths = Lengths(prompts, prompts, floats(records.workload, LENGTH + each.model)[rows])
        capacity_rps = stage.sustained_rps(models[each.model], ReplicaSet(each.replicas), lengths)
        rates.append(capacity_rps * num / len(rows))
    return min(rates)


def _plan_numbers(option: RehearsedPlan) -> Measurement:
    chosen = option.plan
    return {
        "thresholds": list(chosen.thresholds),
        "ratios": [stage.processing_ratio for stage in chosen.stages],
        "gpus": [stage.num_gpus for stage in chosen.stages],
        "labels": [", ".join(part.label for part in stage.replicas) or "-" for stage in chosen.stages],
        "p95_s": [stage.p95_latency_s for stage in chosen.stages],
        "kept": option.is_met,
    }


def _other_shape(case: PlanningRequest, chosen: CascadePlan, latencies: StageLatencies) -> list[Measurement]:
    """The middle model's p95 as planned, and with half the tensor parallelism and twice the replicas (4.3).

    One entry for each of `LOADS`; none if half does not fit.
    """
    stage, model = chosen.stages[1 if len(chosen.stages) > 1 else 0], case.problem.models[1]
    part = stage.replicas[0] if stage.replicas else None
    if part is None or part.tp < 2:
        return []
    half = ReplicaSet((type(part)(part.tp // 2, part.pp, 2 * part.count), *stage.replicas[1:]))
    reached = case.problem.scores.final_stage(chosen.thresholds) >= 1
    lengths = case.problem.lengths(1, reached)
    sets = {"own": ReplicaSet(stage.replicas), "half": half}
    try:
        return [
            {
                name: {"p95_s": latencies.p95_s(model, each, load * stage.rate_rps, lengths)}
                for name, each in sets.items()
            }
            for load in LOADS
        ]
    except HeadwayError:  # the model does not fit
        return []


def _latencies(case: PlanningRequest) -> StageLatencies:
    return StageLatencies(evaluator_of(case))


def sarathi(trace: int, rate_rps: float, seeds: list[int]) -> Measurement:
    """The largest model alone with Sarathi-Serve's batching: its sustained rate for each chunk size."""
    case = planning_case("deepseek", trace, 90.0, rate_rps)
    chosen = planners.stand_alone(case.problem, case.problem.names[-1], _latencies(case), bounds_of(case), EFFORT)
    by_chunk = Measurement()
    for chunk in CHUNKS:
        engine = structs.replace(catalog.engine("sarathi"), max_num_batched_tokens=chunk, max_num_seqs=min(256, chunk))
        fresh = [with_fresh_requests(case, seed) for seed in seeds]
        by_chunk[str(chunk)] = [
            {"throughput_rps": sustained_rps(each, simulated(each, chosen, seed)[1], chosen, engine)}
            for each, seed in zip(fresh, seeds, strict=True)
        ]
    return {"runs": by_chunk}


def optimality(seed: int, num_gpus: int, rate_rps: float) -> Measurement:
    """The bi-level loop against exhaustive search on a Llama cascade (appendix J), at the load of 32 GPUs.

    Both choose among `NUM_ROUTINGS` routings and among sets of replicas of one shape.
    """
    case = planning_case("llama", 1, 80.0, rate_rps * num_gpus / NUM_GPUS, seed, num_gpus=num_gpus)
    problem = replace(case.problem, use_all=False, max_pp=2)
    routings = _evenly_by_quality(problem, NUM_ROUTINGS)
    all_ = _latencies(case)
    began = time.process_time()
    oracle = exhaustive(problem, all_, routings)
    middle = time.process_time()
    ours = StageLatencies(all_.evaluator)
    search = Search(problem, ours, bounds_of(case), structs.replace(EFFORT, num_refined=0), routings)
    result = search.run(problem.target)
    best = search.best(result.objective)
    deployment = None if best is None else search.solved[best].deployment
    return {
        "searches": {
            "ours": {
                "latency_s": None if deployment is None else deployment.latency_s,
                "evaluations": float(ours.num_evaluated),
                "cpu_s": time.process_time() - middle,
            },
            "exhaustive": {
                "latency_s": oracle.latency_s,
                "evaluations": float(all_.num_evaluated),
                "cpu_s": middle - began,
            },
        },
        "num_requests": len(problem.scores) * evaluator_of(case).repeats,
    }


def _evenly_by_quality(problem: CascadeProblem, num: int) -> Routings:
    every = cascades(problem.scores, [weights_bytes(model) for model in problem.models])
    order = np.argsort(every.quality, kind="stable")
    rows = np.unique(order[np.round(np.linspace(0, len(order) - 1, num)).astype("i8")])
    return Routings(
        every.thresholds[rows], every.reached[rows], every.quality[rows], every.ratios[rows], every.work[rows]
    )
