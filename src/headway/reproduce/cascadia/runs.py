"""What the Cascadia claims measure: a plan for every system, and each plan simulated as a whole with every seed."""

from __future__ import annotations

import copy
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from headway import cascadeplan, userfile
from headway.cascadeplan import EFFORT, Asked, ask, at_rate, bounds, document_of, evaluator, rehearse
from headway.planner.cascade import baselines
from headway.planner.cascade.cascadia import plan
from headway.planner.cascade.exhaustive import exhaustive
from headway.planner.cascade.latencies import Latencies
from headway.planner.cascade.plan import CascadePlan
from headway.planner.cascade.problem import QualityFloor
from headway.presets import builtin
from headway.reproduce.tasks import Measurement
from headway.userfile import Places
from headway.workload.quality_traces import CASCADES

SCALE = 12.0
"""The SLO scale that the largest model alone needs at the rate of a trace: 11.88 in the paper's example (4.2)."""
HALVINGS = 4
AT_ONCE_RPS = 1e4
"""All requests within a second: who is done how soon is a matter of throughput."""
MAX_KINDS = 1
"""Shapes of one model's replicas. Table 3 has two at times; the search then takes ten times as long."""
CHUNKS = (256, 512, 1024, 2048)
"""Of Sarathi-Serve, the best of which counts (appendix F)."""
ROWS, QUICK_ROWS = 400, 160
"""Of a score table, half of which plans are made on."""
ARRIVALS_S = 60.0
AT_ONCE = 1600
"""Requests for a throughput."""


def asked(cascade: str, trace: int, q_min: float, quick: bool, rate_rps: float = 20.0, seed: int = 0) -> Asked:
    """A case of the paper on its 32 GPUs."""
    document, _ = userfile.read(builtin("cascadia"))
    rows = QUICK_ROWS if quick else ROWS
    quality = {"trace": trace, "cascade": cascade, "num_requests": rows}
    span_s = ARRIVALS_S / 2 if quick else ARRIVALS_S
    num_requests = rows * max(1, round(span_s * rate_rps / rows))
    document["workload"] = {"arrivals": rate_rps, "num_requests": num_requests, "quality": quality}
    document["cascade"]["models"] = list(CASCADES[cascade])
    if cascade == "llama":
        document["fleet"] = [
            {**document["fleet"][0], "name": name, "model": name, "tp": 4} for name in CASCADES["llama"]
        ]
        document["cascade"]["policy"] = {"name": "thresholds", "thresholds": [80]}
    found = ask(document | {"seed": seed}, Places(), Path(), QualityFloor(q_min), num_gpus=32)
    return replace(found, problem=replace(found.problem, max_kinds=MAX_KINDS))


def rate(cascade: str, trace: int, quick: bool) -> Measurement:
    """The rate of a trace, and the latency of a lone request that SLO scales are multiples of."""
    case = asked(cascade, trace, 80.0, quick)
    largest = case.problem.names[-1]
    found = baselines.stand_alone(case.problem, largest, _latencies(case), bounds(case.problem), EFFORT)
    lone_s = rehearse(at_rate(case, 0.02), found).mean_s or 1.0

    def in_time(rps: float) -> bool:
        done = rehearse(asked(cascade, trace, 80.0, quick, rps), found)
        return done.p95_s is not None and done.p95_s <= SCALE * lone_s

    low, high = 8.0, 16.0
    while high < 512 and in_time(high):
        low, high = high, 2 * high
    for _ in range(HALVINGS):
        middle = (low * high) ** 0.5
        within = in_time(middle)
        low, high = (middle, high) if within else (low, middle)
    return {"rate_rps": low, "lone_s": lone_s}


def measure(cascade: str, trace: int, q_min: float, rate_rps: float, seeds: list[int], quick: bool) -> Measurement:
    """Every system's plan for a case, planned once and simulated with every seed."""
    case = asked(cascade, trace, q_min, quick, rate_rps)
    latencies, limits, began = _latencies(case), bounds(case.problem), time.perf_counter()
    ours = cascadeplan.kept(case, latencies).plan
    plan_s = time.perf_counter() - began
    alone = case.problem.names[-1 if q_min >= 85 or cascade == "llama" else -2]
    systems = {
        "cascadia": ours,
        "stand-alone": baselines.stand_alone(case.problem, alone, latencies, limits, EFFORT),
        "cascade-serve": baselines.cascade_serve(case.problem, latencies, limits, EFFORT),
        "uniform parallelism": baselines.uniform_parallelism(
            replace(case.problem, use_all=False), latencies, limits, EFFORT
        ),
        "uniform allocation": baselines.uniform_allocation(
            replace(case.problem, use_all=False), latencies, limits, EFFORT
        ),
    }
    runs = {name: [_run(case, found, seed) for seed in seeds] for name, found in systems.items()}
    found: Measurement = {"runs": runs, "plans": {name: _said(each) for name, each in systems.items()}}
    found |= {"plan_s": plan_s, "evaluations": latencies.num_asked}
    found["no judge"] = [_run(_changed(case, judge_s=0.0), ours, seed)["p95_s"] for seed in seeds]
    return found


def _run(case: Asked, found: CascadePlan, seed: int) -> Measurement:
    done, rush = rehearse(case, found, seed), rehearse(_at_once(case), found, seed)
    return {
        "p95_s": done.p95_s,
        "mean_s": done.mean_s,
        "quality": done.quality,
        "throughput_rps": None if not rush.p95_s else 0.95 * rush.num_completed / rush.p95_s,
    }


def _at_once(case: Asked) -> Asked:
    rush = at_rate(case, AT_ONCE_RPS)
    rush.document["workload"]["num_requests"] = AT_ONCE
    return rush


def _said(found: CascadePlan) -> Measurement:
    return {
        "thresholds": list(found.thresholds),
        "ratios": [stage.processing_ratio for stage in found.stages],
        "gpus": [stage.num_gpus for stage in found.stages],
        "labels": [stage.label for stage in found.stages],
        "p95_s": [stage.p95_latency_s for stage in found.stages],
    }


def _changed(case: Asked, **cascade: Any) -> Asked:
    document = copy.deepcopy(case.document)
    document["cascade"] |= cascade
    return replace(case, document=document)


def _latencies(case: Asked) -> Latencies:
    return Latencies(evaluator(case))


def sarathi(trace: int, rate_rps: float, seeds: list[int], quick: bool) -> Measurement:
    """The largest model alone on Sarathi-Serve's batching: throughput of each chunk size."""
    case = asked("deepseek", trace, 90.0, quick, rate_rps)
    found = baselines.stand_alone(case.problem, case.problem.names[-1], _latencies(case), bounds(case.problem), EFFORT)
    by_chunk = {}
    for chunk in CHUNKS:
        document = copy.deepcopy(case.document)
        engine = {"name": "sarathi", "max_num_batched_tokens": chunk, "max_num_seqs": min(256, chunk)}
        document["fleet"] = [{**pool, "engine": engine} for pool in document_of(case, found)["fleet"]]
        chunked = replace(case, document=document)
        by_chunk[str(chunk)] = [_run(chunked, found, seed)["throughput_rps"] for seed in seeds]
    return {"throughput_rps": by_chunk}


def optimality(seed: int, num_rows: int) -> Measurement:
    """The bi-level loop against exhaustive search on a Llama cascade small enough for it (appendix J)."""
    case = asked("llama", 1, 80.0, True, 4.0)
    scores = replace(case.problem, scores=case.held_out.split(num_rows / len(case.held_out), seed)[0])
    problem = replace(scores, num_gpus=6, rate_rps=4.0, use_all=False, max_pp=2)
    ours, all_ = _latencies(case), _latencies(case)
    began = time.perf_counter()
    found = plan(problem, ours, effort=EFFORT)
    middle = time.perf_counter()
    oracle = exhaustive(problem, all_)
    return {
        "gap": found.latency_s / oracle.latency_s - 1,
        "evaluations": ours.num_asked,
        "all_evaluations": all_.num_asked,
        "plan_s": middle - began,
        "exhaustive_s": time.perf_counter() - middle,
    }
