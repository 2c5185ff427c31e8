"""Evaluators and small cascades for tests of the planner: latencies made up, no simulator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Any

import numpy as np

from headway.core.fleet import Engine, Gpu, Model
from headway.perf.params import weights_bytes
from headway.planning.cascade.candidates import best_plan_of
from headway.planning.cascade.problem import (
    CascadePlan,
    CascadeProblem,
    Floats,
    Lengths,
    QualityFloor,
    ReplicaSet,
    Target,
)
from headway.planning.cascade.replica_sets import ReplicaSets
from headway.planning.cascade.search import Search
from headway.workload.quality import Scores

GPU = Gpu("gpu", 80e9, 2e12, {"bf16": 3e14}, 3e11, 2e10, 2.0, 400.0, 4)
ENGINE = Engine("engine")


def model(name: str, layers: int, hidden: int) -> Model:
    return Model(name, "", layers, hidden, 4 * hidden, 32, 8, hidden // 32, 32_000, 100_000)


SMALL, MIDDLE, LARGE = model("small", 16, 2048), model("middle", 32, 4096), model("large", 80, 8192)
"""2, 14 and 150 GB of weights: 1, 1 and at least 3 GPUs."""


@dataclass
class Queue:
    """Like M/M/c: alone at the speed of the slowest replica, and more the nearer the load is to what all can do.

    In a combo nobody who decodes is held up by prompts, so they do more; no more than those that prefill let through.
    Counts its questions.
    """

    asked: list[tuple[str, ReplicaSet, float]] = field(default_factory=list)
    speed: dict[str, float] = field(default_factory=dict)
    """Of types of GPU that are not as fast as the others."""

    def p95_latency_s(self, model: Model, replicas: ReplicaSet, rate_rps: float, lengths: Lengths) -> float:
        self.asked.append((model.name, replicas, rate_rps))
        tokens = float(np.quantile(lengths.output_tokens, 0.95)) + 0.01 * float(lengths.computed_tokens.mean())
        slowest, by_role = 0.0, {"mixed": 0.0, "prefill": 0.0, "decode": 0.0}
        for part in replicas.parts:
            step_s = 0.002 + weights_bytes(model) / 2e12 / (part.tp**0.8 * part.pp**0.1) / self.speed.get(part.gpu, 1.0)
            if part.role == "prefill":
                by_role["prefill"] += part.count * 60 / (step_s * float(lengths.computed_tokens.mean()))
                continue
            slowest = max(slowest, step_s * tokens)
            gain = 1.0 if part.role == "mixed" else 2.5
            by_role[part.role] += gain * part.count * 6 * part.pp**0.8 / (step_s * float(lengths.output_tokens.mean()))
        rps = by_role["mixed"] + min(by_role["prefill"], by_role["decode"])
        load = rate_rps / rps
        return inf if load >= 1 else slowest * (1 + load / (1 - load))


@dataclass
class HonestBounds:
    """A share of the truth, different for every set, as a step-time model's bounds are; never above it."""

    queue: Queue
    seed: int
    least: float = 0.5

    def estimate(self, model: Model, sets: ReplicaSets, rate_rps: float, lengths: Lengths) -> tuple[Floats, Floats]:
        truth = [self.queue.p95_latency_s(model, sets[i], rate_rps, lengths) for i in range(len(sets))]
        random = np.random.default_rng([self.seed, len(sets), len(lengths)])
        share = random.uniform(self.least, 1.0, len(sets))
        lower = np.minimum(np.array(truth) * share, 1e6)
        return lower, np.minimum(np.array(truth) * random.uniform(0.5, 2.0, len(sets)), 1e6)


def scores(num: int, stages: int, seed: int, levels: int = 4) -> Scores:
    """Scores of few different values; later models do better on the whole."""
    random = np.random.default_rng(seed)
    steps = random.integers(0, levels, (num, stages)) + np.arange(stages)
    values = np.round(100 * np.clip(steps / (levels + stages - 2), 0, 1))
    names = ("small", "middle", "large")[:stages]
    return Scores(names, values, random.integers(20, 400, (num, stages)), random.integers(10, 500, num))


def problem(
    stages: int = 2,
    num_gpus: int = 6,
    rate_rps: float = 3.0,
    target: Target | None = None,
    seed: int = 0,
    num_requests: int = 12,
    **given: object,
) -> CascadeProblem:
    return CascadeProblem(
        (SMALL, MIDDLE, LARGE)[:stages],
        GPU,
        ENGINE,
        num_gpus,
        rate_rps,
        scores(num_requests, stages, seed),
        target or QualityFloor(60.0),
        judge_s=0.1,
        **given,  # type: ignore[arg-type]
    )


def searched(new_search: Callable[..., Search]) -> Callable[..., CascadePlan]:
    """A planner that makes the best plan of a search."""

    def planner(problem: CascadeProblem, *arguments: Any) -> CascadePlan:
        search = new_search(problem, *arguments)
        return best_plan_of(search, search.run(problem.target), new_search.__name__)

    return planner
