"""Measurements of replica shapes (Figure 2, Table 1) and of planning time (Figure 10)."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
from msgspec import structs

from headway import catalog
from headway.core.errors import HeadwayError
from headway.core.fleet import Fleet, Parallel, Pool
from headway.metrics.summary import summarize
from headway.planning.cascade.candidates import plan
from headway.planning.cascade.deployment import StageLatencies
from headway.planning.cascade.latency import bounds_of, evaluator_of
from headway.planning.cascade.planners import EFFORT
from headway.planning.cascade.problem import Replicas, ReplicaSet
from headway.planning.cascade.request import PlanningRequest
from headway.sim.cluster import simulate
from headway.workload.random_streams import stream
from headway.workload.sources import TraceSource
from headway.workload.table import Workload
from headway_papers.reproduce.cascadia.setup import NUM_GPUS, planning_case
from headway_papers.reproduce.tasks import Measurement

PROMPT_TOKENS = 512
OUTPUTS = {"short": 512, "long": 1024}
"""Mean tokens of Figure 2's workloads."""
GPUS = 8
TABLE_1 = {
    (1, 4, 1): 0.21,
    (1, 2, 2): 0.26,
    (1, 1, 4): 0.27,
    (2, 1, 2): 0.33,
    (2, 2, 1): 0.40,
    (2, 4, 1): 0.41,
    (2, 2, 2): 0.55,
}
"""Requests/s measured in the paper, by (DP, TP, PP)."""
MEMORY = (1.0, 1.5)
"""Multiples of a GPU's memory."""
SIZES = (16, 32, 48, 64, 80)
"""GPUs of Figure 10."""


def strategies(seed: int, memory: float = 1.0) -> Measurement:
    """Throughput by model and lengths, and by (DP, TP, PP), on 8 GPUs (Figure 2), with a multiple of their memory."""
    case, by_workload = _with_memory(planning_case("deepseek", 1, 80.0), memory), Measurement()
    for model in case.problem.models[:2]:
        for name, mean in OUTPUTS.items():
            rows = _rows(PROMPT_TOKENS, mean, 600, seed)
            by_shape = by_workload[f"{model.name}, {name}"] = Measurement()
            for tp, pp in ((1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (2, 2), (4, 2), (1, 4), (2, 4), (1, 8)):
                dp = GPUS // (tp * pp)
                rps = _throughput(case, model.name, dp, tp, pp, rows)
                if rps is not None:
                    by_shape[f"({dp}, {tp}, {pp})"] = {"rps": rps}
    return by_workload


def table_1(seed: int, memory: float = 1.0) -> Measurement:
    """Throughput of Llama 3 70B with prompts of 1600 and answers of 16 tokens, by (DP, TP, PP) (Table 1).

    `memory`: multiple of the GPU's memory.
    """
    case = _with_memory(planning_case("llama", 1, 80.0), memory)
    rows = _rows(1600, 16, 300, seed)
    model = case.problem.names[1]
    return {
        "shapes": {f"{dp} {tp} {pp}": {"rps": _throughput(case, model, dp, tp, pp, rows)} for dp, tp, pp in TABLE_1}
    }


def half_parallelism(rate_rps: float) -> Measurement:
    """p95 of 70B on 12 GPUs, with three replicas of four and with six of two GPUs, by the GPU's memory (4.3).

    The weights take 140 of the 160 GB of two GPUs.
    """
    case = planning_case("deepseek", 1, 90.0, rate_rps)
    model, lengths = case.problem.models[1], case.problem.lengths(1, np.ones(len(case.problem.scores), bool))
    by_memory = {f"{times:g}": evaluator_of(_with_memory(case, times)) for times in MEMORY}
    sets = {name: ReplicaSet((Replicas(tp, 1, 12 // tp),)) for name, tp in (("own", 4), ("half", 2))}
    return {
        times: {
            name: {"p95_s": evaluator.p95_latency_s(model, replicas, rate_rps, lengths)}
            for name, replicas in sets.items()
        }
        for times, evaluator in by_memory.items()
    }


def _with_memory(case: PlanningRequest, times: float) -> PlanningRequest:
    gpu = structs.replace(case.problem.gpu, memory_bytes=times * case.problem.gpu.memory_bytes)
    return replace(case, problem=replace(case.problem, gpu=gpu))


def _rows(prompt: int, output: int, num: int, seed: int) -> Workload:
    random = stream(seed, "lengths")
    lengths = [np.maximum(1, np.round(mean * random.gamma(4.0, 0.25, num))).astype("i8") for mean in (prompt, output)]
    return Workload({"arrival_s": np.zeros(num), "prompt_tokens": lengths[0], "output_tokens": lengths[1]})


def _throughput(case: PlanningRequest, model: str, dp: int, tp: int, pp: int, rows: Workload) -> float | None:
    """Requests per second when all arrive at once; None if the model does not fit."""
    problem = case.problem
    pool = Pool("all", catalog.model(model), problem.gpu, problem.engine, Parallel(tp, pp), dp)
    try:
        summary = summarize(simulate(Fleet((pool,)), TraceSource(rows), case.policies, seed=0))
    except HeadwayError:
        return None
    return None if summary.e2e_s is None else 0.95 * summary.num_completed / summary.e2e_s.p95


def scheduling(num_gpus: int, rate_rps: float) -> Measurement:
    """CPU seconds of a cold single-threaded search for quality 85 on trace 1, with a rate proportional to the GPUs."""
    case = planning_case("deepseek", 1, 85.0, rate_rps * num_gpus / NUM_GPUS)
    problem = replace(case.problem, num_gpus=num_gpus)
    began = time.process_time()
    chosen = plan(problem, StageLatencies(evaluator_of(case)), bounds_of(case), EFFORT)
    return {"plan_s": time.process_time() - began, "evaluations": chosen.num_evaluations}
