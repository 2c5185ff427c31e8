"""The deployment solver: GPUs and replica sets for one routing, with as few evaluations as the proof needs (3.2).

Every stage has a table of l_i(f), with lower bounds for values that are not evaluated. The solver first evaluates the
allocation with the best expected latencies until it is completely known; then the allocation with the best lower
bounds, until none can be better than the best known one. The result equals that of the paper, which evaluates every set
of replicas for every number of GPUs and then solves the program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf, isnan

import numpy as np
from msgspec import Struct, structs

from headway.core.errors import HeadwayError
from headway.core.fleet import Model
from headway.planning.cascade.allocation import Allocation, Gpus, least_cost, least_max
from headway.planning.cascade.problem import Floats, Lengths, ReplicaSet, StageEvaluator
from headway.planning.cascade.replica_sets import ReplicaSets

EPS = 1e-12


@dataclass
class StageLatencies:
    """An evaluator with memory: each latency is evaluated once. `known` may come from an earlier plan."""

    evaluator: StageEvaluator
    known: dict[str, float] = field(default_factory=dict)
    progress: Callable[[int], None] | None = None
    """Called with the number of evaluations so far."""
    num_evaluated: int = 0
    num_cached: int = 0

    @property
    def num_used(self) -> int:
        """Latencies used so far, evaluated or cached."""
        return self.num_evaluated + self.num_cached

    def p95_s(self, model: Model, replicas: ReplicaSet, rate_rps: float, lengths: Lengths) -> float:
        """`StageEvaluator.p95_latency_s`. Raises HeadwayError if the latency is negative or not a number."""
        key = f"{model.name} | {replicas.label} | {rate_rps!r} | {lengths.key}"
        if key in self.known:
            self.num_cached += 1
            return self.known[key]
        self.num_evaluated += 1
        latency_s = float(self.evaluator.p95_latency_s(model, replicas, rate_rps, lengths))
        if isnan(latency_s) or latency_s < 0:
            raise HeadwayError(f"evaluator: {latency_s} s for {model.name} on {replicas.label}; expected 0 or more")
        self.known[key] = latency_s
        if self.progress is not None:
            self.progress(self.num_evaluated)
        return latency_s


@dataclass
class EstimateCorrection:
    """The mean ratio of evaluated to estimated latencies so far."""

    total: float = 0.0
    num: int = 0

    def add(self, ratio: float) -> None:
        self.total, self.num = self.total + ratio, self.num + 1

    @property
    def ratio(self) -> float:
        """The ratio; 1 before the first evaluation."""
        return self.total / self.num if self.num else 1.0


class LatencyTable:
    """l(f) of one stage under one load. Arrays over f = 0..N: `lower` is a lower bound, `best` the least evaluated.

    With several types of GPU, f is a cell of the `GpuBudget`. `lower[f] == best[f]` where l(f) is known. `estimate` is
    the expected l(f). If there are two corrections, sets with combos use a separate queue and the second correction:
    estimates ignore that prompts delay decoding, which matters less in combos.
    """

    def __init__(
        self,
        sets: ReplicaSets,
        lower: Floats,
        estimate: Floats,
        num_gpus: int,
        p95_s: Callable[[ReplicaSet], float],
        corrections: Sequence[EstimateCorrection],
        added_s: float = 0.0,
    ) -> None:
        self.sets, self._p95_s, self._corrections, self._added_s = sets, p95_s, corrections, added_s
        self._lower, self._estimate = lower + added_s, estimate
        num_queues = len(corrections)
        queue_of_set = sets.cells * num_queues + (sets.are_split.astype("i8") if num_queues > 1 else 0)
        order = np.lexsort((estimate, lower, queue_of_set))
        ends = np.searchsorted(queue_of_set[order], np.arange(num_queues, num_queues * (num_gpus + 1) + 1))
        self._queue = [*[order[:0]] * num_queues, *(order[a:b] for a, b in pairwise(ends.tolist()))]
        self._next = [0] * len(self._queue)
        self.best = np.full(num_gpus + 1, inf)
        self.lower = np.full(num_gpus + 1, inf)
        self._open_estimate = np.full((num_queues, num_gpus + 1), inf)
        self._open_lower = np.full((num_queues, num_gpus + 1), inf)
        self.best_sets: list[ReplicaSet | None] = [None] * (num_gpus + 1)
        self.num_sets, self.num_evaluated = len(sets), 0
        for f in np.unique(sets.cells).tolist():
            self._update(f)

    @property
    def estimate(self) -> Floats:
        """The best evaluated latency or the expected latency of the next set, whichever is lower."""
        return np.asarray(np.minimum(self.best, self._expected(slice(None)).min(axis=0)))

    def _expected(self, f: slice) -> Floats:
        """[queue, f]: expected latency of the next set; infinite if it cannot be better than the best evaluated one."""
        ratios = np.array([[correction.ratio] for correction in self._corrections])
        return np.asarray(np.maximum(self._open_estimate[:, f] * ratios + self._added_s, self._open_lower[:, f]))

    def can_improve(self, f: int) -> bool:
        """Whether another set of f GPUs could be better than the best evaluated one."""
        return bool(self.lower[f] < self.best[f])

    def evaluate(self, f: int) -> None:
        """Evaluate the most promising set of f GPUs."""
        q = int(self._expected(slice(f, f + 1)).argmin())
        queue = f * len(self._corrections) + q
        i = int(self._queue[queue][self._next[queue]])
        self._next[queue] += 1
        self.num_evaluated += 1
        replicas = self.sets[i]
        p95_s = self._p95_s(replicas)
        if np.isfinite(p95_s) and self._estimate[i] > 0:
            self._corrections[q].add(p95_s / self._estimate[i])
        if p95_s + self._added_s < self.best[f] or self.best_sets[f] is None:
            self.best[f], self.best_sets[f] = p95_s + self._added_s, replicas
        self._update(f)

    def _update(self, f: int) -> None:
        """Update the bounds of f GPUs after the latest evaluation."""
        self.lower[f] = self.best[f]
        for q in range(len(self._corrections)):
            queue = f * len(self._corrections) + q
            sets, at = self._queue[queue], self._next[queue]
            next_lower = self._lower[sets[at]] if at < len(sets) else inf
            self.lower[f] = min(self.lower[f], next_lower)
            is_open = next_lower < self.best[f]
            self._open_estimate[q, f] = self._estimate[sets[at]] if is_open else inf
            self._open_lower[q, f] = next_lower if is_open else inf


class Deployment(Struct, frozen=True):
    """GPUs and replica sets of every stage for one routing."""

    gpus: tuple[int, ...]
    """Number of GPUs, or cell of the `GpuBudget`."""
    sets: tuple[ReplicaSet | None, ...]
    """The replica sets; None for a stage without GPUs."""
    latencies_s: tuple[float, ...]
    latency_s: float
    """The largest latency of the stages."""
    bound_s: float | None
    """Lower bound of the latency of all deployments; None: unknown."""
    usd_per_hour: float | None = None
    """The cost of the deployment; None if the search does not compare costs."""

    @property
    def minimised(self) -> float:
        """The minimised value: the cost per hour if it was minimised, otherwise the latency."""
        return self.latency_s if self.usd_per_hour is None else self.usd_per_hour


def deployment_of(tables: Sequence[LatencyTable], gpus: tuple[int, ...], bound_s: float | None) -> Deployment:
    """The best evaluated sets of an allocation."""
    pairs = list(zip(tables, gpus, strict=True))
    times = tuple(float(table.best[f]) for table, f in pairs)
    return Deployment(gpus, tuple(table.best_sets[f] for table, f in pairs), times, max(times), bound_s)


def deploy(
    tables: Sequence[LatencyTable],
    gpus: Gpus,
    use_all: bool = False,
    limit: float = inf,
    gap: float = 0.0,
    max_evaluations: int | None = None,
    within_s: float | None = None,
) -> tuple[Deployment | None, float]:
    """The fastest deployment, and a lower bound on the latency of all deployments.

    None if there is none, or none below `limit`; the bound is then at least `limit`. `gap`: share by which the bound
    may stay below the latency. `max_evaluations`: after this many, the best known deployment is taken. `within_s`, with
    a `GpuBudget`: find the cheapest deployment with every stage within this latency; limit and bound are then costs,
    $/h.
    """

    def best_of(columns: Sequence[Floats]) -> tuple[Allocation, float] | tuple[None, float]:
        """An allocation, and its minimised value."""
        if within_s is None or isinstance(gpus, int):
            allocation = least_max(columns, gpus, use_all)
            return (None, inf) if allocation is None else (allocation, allocation.latency_s)
        allocation = least_cost(columns, gpus, within_s)
        return (None, inf) if allocation is None else (allocation, allocation.usd_per_hour)

    started = sum(table.num_evaluated for table in tables)
    while True:
        lowest, bound = best_of([table.lower for table in tables])
        known, value = best_of([table.best for table in tables])
        if lowest is None or bound >= limit:
            return None, bound
        num_evaluated = sum(table.num_evaluated for table in tables) - started
        is_spent = max_evaluations is not None and num_evaluated >= max_evaluations
        if known is not None and (is_spent or bound >= value * (1 - gap) - EPS):
            if within_s is None:
                return deployment_of(tables, known.gpus, min(bound, value)), bound
            return structs.replace(deployment_of(tables, known.gpus, None), usd_per_hour=value), bound
        if is_spent and within_s is not None:
            return None, bound
        estimate, _ = best_of([table.estimate for table in tables])
        # Evaluate the allocation with the best expected latencies. Once its latencies are known, evaluate the
        # allocation with the best lower bounds.
        for allocation in (estimate, lowest):
            if allocation is None:
                continue
            needed_s = allocation.latency_s if within_s is None else within_s
            pairs = zip(tables, allocation.gpus, strict=True)
            open_ = [(table, f) for table, f in pairs if table.best[f] > needed_s + EPS and table.can_improve(f)]
            for table, f in open_:
                table.evaluate(f)
            if open_:
                break


def with_spare_gpus(
    tables: Sequence[LatencyTable],
    num_gpus: Gpus,
    deployment: Deployment,
    use_all: bool = False,
    gap: float = 0.0,
    max_evaluations: int | None = None,
) -> Deployment:
    """The deployment with spare GPUs given to the stages that gain most; its largest latency stays.

    The slowest stage keeps its GPUs, the other stages are deployed again, and so on. `gap` and `max_evaluations` are as
    in `deploy`.
    """
    gpus, sets, latencies = list(deployment.gpus), list(deployment.sets), list(deployment.latencies_s)
    open_ = list(range(len(tables)))
    left = num_gpus
    while len(open_) > 1:
        slowest = max(open_, key=lambda i: (latencies[i], i))
        open_.remove(slowest)
        taken = gpus[slowest]
        left = left - taken if isinstance(left, int) else left.without(taken)
        better, _ = deploy([tables[i] for i in open_], left, use_all, gap=gap, max_evaluations=max_evaluations)
        if better is None or better.latency_s > max(latencies[i] for i in open_):
            continue
        for at, i in enumerate(open_):
            gpus[i], sets[i], latencies[i] = better.gpus[at], better.sets[at], better.latencies_s[at]
    return Deployment(tuple(gpus), tuple(sets), tuple(latencies), max(latencies), deployment.bound_s)
