"""Measurements of the end-to-end claims: a plan for every system, each simulated as a whole with every seed.

Every system keeps the quality in the same way: plan, rehearse, and plan for a higher quality if it falls short.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from headway.core.errors import HeadwayError
from headway.planning.cascade import planners
from headway.planning.cascade.cascadia import plan
from headway.planning.cascade.deployment import StageLatencies
from headway.planning.cascade.plan import CascadePlan
from headway.planning.cascade.planners import EFFORT, CascadePlanner, SearchPlanner
from headway.planning.cascade.planning_request import PlanningRequest, with_rate
from headway.planning.cascade.problem import ReplicaSet
from headway.planning.cascade.rehearsal import RehearsedPlan, planned_document, rehearse, tighten_until_met
from headway.planning.cascade.search import Search
from headway.planning.cascade.stage_simulator import bounds_of, evaluator_of
from headway.reproduce.cascadia.exhaustive import exhaustive
from headway.reproduce.cascadia.setup import AWQ_SLOWER, at_once, changed, planning_case
from headway.reproduce.tasks import Measurement

SCALE = 12.0
"""The SLO scale that the largest model alone needs at the rate of a trace: 11.88 in the paper's example (4.2)."""
HALVINGS = 4
CHUNKS = (256, 512, 1024, 2048)
"""Chunk sizes of Sarathi-Serve; the best one counts (appendix F)."""


def rate(cascade: str, trace: int, quick: bool, slower: float = AWQ_SLOWER) -> Measurement:
    """The rate of a trace, the latency of a lone request that SLO scales are multiples of, and that of each model."""
    case = planning_case(cascade, trace, 80.0, quick, slower=slower)
    latencies, limits = _latencies(case), bounds_of(case)
    alone = [planners.stand_alone(case.problem, name, latencies, limits, EFFORT) for name in case.problem.names]
    lone = [rehearse(with_rate(case, 0.02), each) for each in alone]

    def in_time(rps: float) -> bool:
        rehearsed = rehearse(planning_case(cascade, trace, 80.0, quick, rps, slower=slower), alone[-1])
        return rehearsed.p95_s is not None and rehearsed.p95_s <= SCALE * (lone[-1].mean_s or 1.0)

    low, high = 8.0, 16.0
    while high < 512 and in_time(high):
        low, high = high, 2 * high
    for _ in range(HALVINGS):
        middle = (low * high) ** 0.5
        within = in_time(middle)
        low, high = (middle, high) if within else (low, middle)
    each = {
        name: [rehearsed.mean_s, rehearsed.quality] for name, rehearsed in zip(case.problem.names, lone, strict=True)
    }
    return {"rate_rps": low, "lone_s": lone[-1].mean_s or 1.0, "lone": each}


def measure(
    cascade: str, trace: int, q_min: float, rate_rps: float, seeds: list[int], quick: bool,
    slower: float = AWQ_SLOWER, ablations: bool = True,
) -> Measurement:  # fmt: skip
    """Every system's plan for a case, planned once and simulated with every seed."""
    case = planning_case(cascade, trace, q_min, quick, rate_rps, slower=slower)
    latencies, began = _latencies(case), time.process_time()
    first = SearchPlanner(Search, "cascadia")
    first(case.problem, latencies, bounds_of(case))
    search_s = time.process_time() - began
    ours = tighten_until_met(case, latencies, first)
    plan_s = time.process_time() - began
    systems = {
        name: tighten_until_met(case, latencies, make) for name, make in _systems(case, cascade, q_min, ablations)
    }
    systems["cascadia"] = ours
    runs = {name: [_run(case, results.plan, seed) for seed in seeds] for name, results in systems.items()}
    results: Measurement = {"runs": runs, "plans": {name: _plan_numbers(each) for name, each in systems.items()}}
    results |= {"plan_s": plan_s, "search_s": search_s, "evaluations": latencies.num_evaluated}
    results["no judge"] = [_run(changed(case, judge_s=0.0), ours.plan, seed)["p95_s"] for seed in seeds]
    results["other shape"] = _other_shape(case, ours.plan, latencies)
    return results


def _systems(
    case: PlanningRequest, cascade: str, q_min: float, ablations: bool
) -> Iterator[tuple[str, CascadePlanner]]:
    alone = case.problem.names[-1 if q_min >= 85 or cascade == "llama" else -2]
    yield "stand-alone", planners.single(partial(planners.stand_alone, model=alone))
    yield "cascade-serve", planners.single(planners.cascade_serve)
    if ablations:
        yield "uniform parallelism", SearchPlanner(planners.uniform_parallelism, "uniform parallelism")
        yield "uniform allocation", SearchPlanner(planners.uniform_allocation, "uniform allocation")


def some_models(trace: int, q_min: float, rate_rps: float, seeds: list[int], quick: bool) -> Measurement:
    """The best cascade that leaves out a smaller model, as Headway plans it."""
    case = planning_case("deepseek", trace, q_min, quick, rate_rps)
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
    runs = [_run(case, best.plan, seed) for seed in seeds]
    return {"runs": runs, "models": [stage.model for stage in best.plan.stages], "plan": _plan_numbers(best)}


def _run(case: PlanningRequest, cascade_plan: CascadePlan, seed: int) -> Measurement:
    rehearsed = rehearse(case, cascade_plan, seed)
    return {
        "p95_s": rehearsed.p95_s,
        "mean_s": rehearsed.mean_s,
        "quality": rehearsed.quality,
        "throughput_rps": throughput_rps(case, cascade_plan, seed),
    }


def throughput_rps(case: PlanningRequest, cascade_plan: CascadePlan, seed: int) -> float | None:
    """Requests per second until 95% are complete, if all arrive at once."""
    rush = rehearse(at_once(case), cascade_plan, seed)
    return None if not rush.p95_s else 0.95 * rush.num_completed / rush.p95_s


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


def _other_shape(case: PlanningRequest, chosen: CascadePlan, latencies: StageLatencies) -> list[float | None]:
    """The middle model's p95 as planned, and with half the tensor parallelism and twice the replicas (4.3)."""
    stage, model = chosen.stages[1], case.problem.models[1]
    part = stage.replicas[0] if stage.replicas else None
    if part is None or part.tp < 2:
        return [None, None]
    half = ReplicaSet((type(part)(part.tp // 2, part.pp, 2 * part.count),))
    reached = case.problem.scores.final_stage(chosen.thresholds) >= 1
    lengths = case.problem.lengths(1, reached)
    try:
        other_s = latencies.p95_s(model, half, stage.rate_rps, lengths)
    except HeadwayError:  # it does not fit
        return [None, None]
    return [latencies.p95_s(model, ReplicaSet(stage.replicas), stage.rate_rps, lengths), other_s]


def _latencies(case: PlanningRequest) -> StageLatencies:
    return StageLatencies(evaluator_of(case))


def sarathi(trace: int, rate_rps: float, seeds: list[int], quick: bool) -> Measurement:
    """The largest model alone on Sarathi-Serve's batching: throughput of each chunk size."""
    case = planning_case("deepseek", trace, 90.0, quick, rate_rps)
    chosen = planners.stand_alone(case.problem, case.problem.names[-1], _latencies(case), bounds_of(case), EFFORT)
    by_chunk = {}
    for chunk in CHUNKS:
        document = copy.deepcopy(planned_document(case, chosen))
        engine = {"name": "sarathi", "max_num_batched_tokens": chunk, "max_num_seqs": min(256, chunk)}
        document["fleet"] = [{**pool, "engine": engine} for pool in document["fleet"]]
        chunked = replace(case, document=document, template_pools=dict.fromkeys(case.template_pools, 0))
        by_chunk[str(chunk)] = [_run(chunked, chosen, seed)["throughput_rps"] for seed in seeds]
    return {"throughput_rps": by_chunk}


def optimality(seed: int, num_rows: int) -> Measurement:
    """The bi-level loop against exhaustive search on a Llama cascade small enough for it (appendix J)."""
    case = planning_case("llama", 1, 80.0, True, 4.0)
    scores = replace(case.problem, scores=case.held_out.split(num_rows / len(case.held_out), seed)[0])
    problem = replace(scores, num_gpus=6, rate_rps=4.0, use_all=False, max_pp=2)
    case = replace(case, problem=problem)
    ours, all_ = _latencies(case), _latencies(case)
    began = time.perf_counter()
    chosen = plan(problem, ours, bounds_of(case), EFFORT)
    middle = time.perf_counter()
    oracle = exhaustive(problem, all_)
    return {
        "gap": chosen.latency_s / oracle.latency_s - 1,
        "evaluations": ours.num_evaluated,
        "all_evaluations": all_.num_evaluated,
        "plan_s": middle - began,
        "exhaustive_s": time.perf_counter() - middle,
    }
