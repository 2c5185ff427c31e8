"""The latency of one stage of a cascade alone, simulated: what its planner is handed as an evaluator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil, inf
from pathlib import Path

import numpy as np

from headway.catalog.coefficients import Coefficients
from headway.control.policies import Policies
from headway.core.fleet import Combo, Engine, Fleet, Gpu, Model, Parallel, Pool
from headway.metrics.latency import distribution, sample
from headway.perf.step import StepModel
from headway.planning.cascade.bounds import StepBounds
from headway.planning.cascade.deployment import Latencies
from headway.planning.cascade.planning_request import PlanningRequest
from headway.planning.cascade.problem import Handing, Lengths, Problem, ReplicaSet, of_type
from headway.planning.rehearsals import RehearsalCache, content_key
from headway.sim.cluster import simulate
from headway.sim.timeline import Line
from headway.workload.random_streams import stream
from headway.workload.sources import TraceSource
from headway.workload.table import Workload

MOST_REQUESTS = 3000
"""Of the cascade, in the simulation of a stage: a longer span is cut short."""


@dataclass
class Simulated:
    """The evaluator: a stage alone, its requests once each, at the same random times whatever the replicas are."""

    gpu: Gpu
    engine: Engine
    policies: Policies
    seed: int = 0
    rounds: int = 1
    """How many times the lengths are played, one after the other."""
    coefficients: Mapping[str, Coefficients] = field(default_factory=dict)
    """By model, and by `of_type`; the catalog's for all others."""
    others: Mapping[str, Gpu] = field(default_factory=dict)
    """Further types of GPU, by name."""
    handing: Handing = field(default_factory=Handing)
    """Of combos."""
    _lines: dict[tuple[str, str, Parallel], Line] = field(default_factory=dict)

    def p95_latency_s(self, model: Model, replicas: ReplicaSet, rate_rps: float, lengths: Lengths) -> float:
        """As `Evaluator` says. What prefix caches are taken to hold is no part of the prompts."""
        fleet = self._fleet(model, replicas)
        num = len(lengths) * self.rounds
        arrival_s = np.sort(stream(self.seed, "arrivals at a stage").random(num)) * num / rate_rps
        rows = Workload(
            {
                "arrival_s": arrival_s,
                "prompt_tokens": np.tile(lengths.computed_tokens, self.rounds).astype("i8"),
                "output_tokens": np.tile(lengths.output_tokens, self.rounds).astype("i8"),
            }
        )
        records = simulate(fleet, TraceSource(rows), self.policies, seed=self.seed, line=self._line)
        done = sample(records, 0.0, None)  # a summary has token times, too, which take as long as the simulation
        e2e_s = distribution(done.e2e_s)
        return inf if e2e_s is None or not done.finished.all() else e2e_s.p95

    def _fleet(self, model: Model, replicas: ReplicaSet) -> Fleet:
        """A pool of each part; those that have a role are a combo."""
        pools = [
            Pool(
                f"{model.name}-{i}", model, self.others.get(part.gpu, self.gpu), self.engine, part.parallel, part.count,
                network_bytes_per_s=self.handing.network_bytes_per_s, role=part.role, handover=self.handing.handover,
            )
            for i, part in enumerate(replicas.parts)
        ]  # fmt: skip
        parts = tuple(pool for pool in pools if pool.role != "mixed")
        mixed = tuple(pool for pool in pools if pool.role == "mixed")
        return Fleet(mixed, (Combo(model.name, parts),) if parts else ())

    def _line(self, pool: Pool) -> Line:
        """One for each shape, as it remembers what it has worked out."""
        key = (pool.model.name, pool.gpu.name, pool.parallel)
        if key not in self._lines:
            own = self.coefficients.get(of_type(pool.model, pool.gpu.name if pool.gpu.name in self.others else ""))
            self._lines[key] = StepModel(pool.model, pool.gpu, pool.engine, pool.parallel, own).line
        return self._lines[key]


def rounds(problem: Problem) -> int:
    """How many times the sample is played: for as long as requests come."""
    num = len(problem.scores)
    return max(1, min(ceil(problem.span_s * problem.rate_rps / num), MOST_REQUESTS // num))


def bounds(asked: PlanningRequest) -> StepBounds:
    """Those that hold for `evaluator`."""
    problem = asked.problem
    in_place = bool(getattr(asked.policies.router(), "pairs", False))
    return StepBounds(
        problem.gpu, problem.engine, rounds(problem), asked.coefficients, _others(problem), in_place=in_place
    )


def evaluator(asked: PlanningRequest) -> Simulated:
    """What a stage's latency is asked of."""
    problem = asked.problem
    return Simulated(
        problem.gpu, problem.engine, asked.policies, asked.seed, rounds(problem), asked.coefficients, _others(problem),
        asked.handing,
    )  # fmt: skip


def _others(problem: Problem) -> dict[str, Gpu]:
    return {offer.gpu.name: offer.gpu for offer in problem.others}


@dataclass
class Known:
    """Latencies in a file, under a digest of all that they depend on."""

    asked: PlanningRequest
    folder: Path | None
    latencies: Latencies = field(init=False)

    def __post_init__(self) -> None:
        self._cache = RehearsalCache(self.folder)
        known = self._cache.find(self._key, dict[str, float | None]) or {}  # JSON has no infinity
        latencies = {key: inf if value is None else value for key, value in known.items()}
        self.latencies = Latencies(evaluator(self.asked), latencies)

    @cached_property
    def _key(self) -> str:
        problem, policies = self.asked.problem, self.asked.document.get("policies")
        facts = [problem.models, problem.gpu, problem.engine, policies, self.asked.seed, rounds(problem)]
        facts += [self.asked.handing, sorted(self.asked.coefficients.items())]
        return content_key(facts + [offer.gpu for offer in problem.others])

    def write(self) -> None:
        """Keep what is known by now."""
        self._cache.keep(self._key, self.latencies.known)
