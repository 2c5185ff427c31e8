"""Simulates the latency of one stage of a cascade, with a file of known latencies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import ceil, inf
from pathlib import Path

import numpy as np

from headway.catalog.coefficients import Coefficients
from headway.control.policies import Policies
from headway.core.fleet import Combo, Engine, Fleet, Gpu, Model, Parallel, Pool
from headway.metrics.latency import distribution, sample
from headway.perf.speculation import step_model
from headway.planning.cascade.deployment import StageLatencies
from headway.planning.cascade.latency_bounds import StepTimeBounds
from headway.planning.cascade.problem import CascadeProblem, HandoverSettings, Lengths, ReplicaSet, coefficients_key
from headway.planning.cascade.request import PlanningRequest
from headway.planning.rehearsals import RehearsalCache, content_key
from headway.sim.cluster import simulate
from headway.sim.replica_resources import Line
from headway.workload.random_streams import stream
from headway.workload.sources import TraceSource
from headway.workload.table import Workload

MOST_REQUESTS = 2000
"""Maximum number of requests of the cascade in the simulation of a stage; a longer span is truncated."""

BATCHES = 4
"""Full batches of a stage's replicas that wait at the start of a measurement of the sustained rate."""


@dataclass
class StageSimulator:
    """A stage alone: each of its requests occurs once per repeat, at the same random times for all replica sets."""

    gpu: Gpu
    engine: Engine
    policies: Policies
    seed: int = 0
    repeats: int = 1
    """How often the lengths are repeated."""
    coefficients: Mapping[str, Coefficients] = field(default_factory=dict)
    """Coefficients by model and by `coefficients_key`; otherwise the catalog's."""
    other_gpus: Mapping[str, Gpu] = field(default_factory=dict)
    """Further types of GPU, by name."""
    handover_settings: HandoverSettings = field(default_factory=HandoverSettings)
    """Settings of combos."""
    _lines: dict[tuple[str, str, Parallel], Line] = field(default_factory=dict)

    def p95_latency_s(self, model: Model, replicas: ReplicaSet, rate_rps: float, lengths: Lengths) -> float:
        """Implements `StageEvaluator.p95_latency_s`. Cached prompt tokens are left out of the prompts."""
        fleet = self._fleet(model, replicas)
        num = len(lengths) * self.repeats
        arrival_s = np.sort(stream(self.seed, "arrivals at a stage").random(num)) * num / rate_rps
        rows = Workload(
            {
                "arrival_s": arrival_s,
                "prompt_tokens": np.tile(lengths.computed_tokens, self.repeats).astype("i8"),
                "output_tokens": np.tile(lengths.output_tokens, self.repeats).astype("i8"),
            }
        )
        records = simulate(fleet, TraceSource(rows), self.policies, seed=self.seed, line=self._line)
        ended = sample(records, 0.0, None)  # a summary also computes token times: as long as the simulation
        e2e_s = distribution(ended.e2e_s)
        return inf if e2e_s is None or not ended.finished.all() else e2e_s.p95

    def sustained_rps(self, model: Model, replicas: ReplicaSet, lengths: Lengths) -> float:
        """Requests per second that the replicas complete while requests always wait.

        Measured between a quarter and three quarters of a backlog of `BATCHES` full batches, which excludes the time to
        fill and to drain batches.
        """
        fleet, random = self._fleet(model, replicas), stream(self.seed, "backlog of a stage")
        num = BATCHES * self.engine.max_num_seqs * sum(part.count for part in replicas.parts)
        drawn = random.integers(0, len(lengths), num)
        rows = Workload(
            {
                "arrival_s": np.zeros(num),
                "prompt_tokens": lengths.computed_tokens[drawn].astype("i8"),
                "output_tokens": lengths.output_tokens[drawn].astype("i8"),
            }
        )
        records = simulate(fleet, TraceSource(rows), self.policies, seed=self.seed, line=self._line)
        end_s = np.sort(records.requests["end_s"])
        first, last = num // 4, 3 * num // 4
        return float((last - first) / (end_s[last] - end_s[first]))

    def _fleet(self, model: Model, replicas: ReplicaSet) -> Fleet:
        """A pool for each part; parts with a role form a combo."""
        settings = self.handover_settings
        pools = [
            Pool(
                f"{model.name}-{i}",
                model,
                self.other_gpus.get(part.gpu, self.gpu),
                self.engine,
                part.parallel,
                part.count,
                network_bytes_per_s=settings.network_bytes_per_s,
                role=part.role,
                handover=settings.handover,
            )
            for i, part in enumerate(replicas.parts)
        ]
        parts = tuple(pool for pool in pools if pool.role != "mixed")
        mixed = tuple(pool for pool in pools if pool.role == "mixed")
        return Fleet(mixed, (Combo(model.name, parts),) if parts else ())

    def _line(self, pool: Pool) -> Line:
        """The step function of a pool's shape: one for each shape, because a step function caches its results."""
        key = (pool.model.name, pool.gpu.name, pool.parallel)
        if key not in self._lines:
            other_gpu = pool.gpu.name if pool.gpu.name in self.other_gpus else ""
            own = self.coefficients.get(coefficients_key(pool.model, other_gpu))
            self._lines[key] = step_model(pool.model, pool.gpu, pool.engine, pool.parallel, own).line
        return self._lines[key]


def num_repeats(problem: CascadeProblem) -> int:
    """How often the sample of requests is repeated to fill the problem's span."""
    num = len(problem.scores)
    return max(1, min(ceil(problem.span_s * problem.rate_rps / num), MOST_REQUESTS // num))


def bounds_of(request: PlanningRequest) -> StepTimeBounds:
    """Bounds that are valid for `evaluator_of`."""
    problem = request.problem
    in_place = bool(getattr(request.policies.router(), "pairs", False))
    return StepTimeBounds(
        problem.gpu,
        problem.engine,
        num_repeats(problem),
        request.coefficients,
        _other_gpus(problem),
        in_place=in_place,
    )


def evaluator_of(request: PlanningRequest) -> StageSimulator:
    problem = request.problem
    return StageSimulator(
        problem.gpu,
        problem.engine,
        request.policies,
        request.seed,
        num_repeats(problem),
        request.coefficients,
        _other_gpus(problem),
        request.handover_settings,
    )


def _other_gpus(problem: CascadeProblem) -> dict[str, Gpu]:
    return {offer.gpu.name: offer.gpu for offer in problem.other_offers}


@contextmanager
def cached_latencies(request: PlanningRequest, folder: Path | None) -> Iterator[StageLatencies]:
    """The latencies of a request's stages, cached under a digest of all their inputs."""
    problem = request.problem
    facts = [problem.models, problem.gpu, problem.engine, request.document.get("policies"), request.seed]
    facts += [num_repeats(problem), request.handover_settings, sorted(request.coefficients.items())]
    key, cache = content_key(facts + [offer.gpu for offer in problem.other_offers]), RehearsalCache(folder)
    known = cache.find(key, dict[str, float | None]) or {}  # JSON has no infinity
    latencies = {name: inf if value is None else value for name, value in known.items()}
    stage_latencies = StageLatencies(evaluator_of(request), latencies)
    try:
        yield stage_latencies
    finally:
        cache.keep(key, stage_latencies.known)
