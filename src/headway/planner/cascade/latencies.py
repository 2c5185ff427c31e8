"""l_i(f): the latency of a stage by its number of GPUs, known only as far as somebody needed to know."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf, isnan

import numpy as np

from headway.core.errors import HeadwayError
from headway.core.fleet import Model
from headway.planner.cascade.problem import Evaluator, Floats, Lengths, ReplicaSet
from headway.planner.cascade.shapes import Sets

Tell = Callable[[int], None]
"""Told how many evaluations there were so far."""


@dataclass
class Latencies:
    """Asks the evaluator, and never twice. `known` may come from an earlier plan, and may be kept for a later one."""

    evaluator: Evaluator
    known: dict[str, float] = field(default_factory=dict)
    tell: Tell | None = None
    num_asked: int = 0
    num_found: int = 0

    @property
    def num_looked(self) -> int:
        """Answers used so far, remembered or not."""
        return self.num_asked + self.num_found

    def p95_s(self, model: Model, replicas: ReplicaSet, rate_rps: float, lengths: Lengths) -> float:
        """As `Evaluator.p95_latency_s`. HeadwayError for what is no latency."""
        key = f"{model.name} | {replicas.label} | {rate_rps!r} | {lengths.key}"
        if key in self.known:
            self.num_found += 1
            return self.known[key]
        self.num_asked += 1
        found = float(self.evaluator.p95_latency_s(model, replicas, rate_rps, lengths))
        if isnan(found) or found < 0:
            raise HeadwayError(f"evaluator: {found} s for {model.name} on {replicas.label}; expected 0 or more")
        self.known[key] = found
        if self.tell is not None:
            self.tell(self.num_asked)
        return found


@dataclass
class Trend:
    """How latencies compare with their guesses, on average so far: so that guesses get better."""

    total: float = 0.0
    num: int = 0

    def learn(self, ratio: float) -> None:
        """One evaluation's."""
        self.total, self.num = self.total + ratio, self.num + 1

    @property
    def ratio(self) -> float:
        """1 until something is known."""
        return self.total / self.num if self.num else 1.0


class Table:
    """One stage under one load. Arrays over f = 0..N: no latency is below `lower`, and `best` was evaluated.

    With several types of GPU, f is the number of a cell (`room`), and N that of the last.

    Where `lower[f] == best[f]`, l(f) is known. `guess` is what l(f) is expected to be.
    """

    def __init__(
        self,
        sets: Sets,
        lower: Floats,
        guess: Floats,
        num_gpus: int,
        ask: Callable[[ReplicaSet], float],
        trend: Trend,
        added_s: float = 0.0,
    ) -> None:
        self.sets, self._ask, self._trend, self._added_s = sets, ask, trend, added_s
        self._lower, self._guess = lower + added_s, guess
        order = np.lexsort((guess, lower, sets.cells))
        splits = np.searchsorted(sets.cells[order], np.arange(1, num_gpus + 2))
        self._queue = [order[:0], *(order[a:b] for a, b in pairwise(splits.tolist()))]
        self._next = [0] * (num_gpus + 1)
        self.best = np.full(num_gpus + 1, inf)
        self.lower = np.full(num_gpus + 1, inf)
        self._open_guess = np.full(num_gpus + 1, inf)
        self.chosen: list[ReplicaSet | None] = [None] * (num_gpus + 1)
        self.num_sets, self.num_asked = len(sets), 0
        for f in np.unique(sets.cells).tolist():
            self._look(f)

    @property
    def guess(self) -> Floats:
        """The best seen, or what is expected of the next."""
        guess: Floats = np.minimum(
            self.best, np.maximum(self._open_guess * self._trend.ratio + self._added_s, self.lower)
        )
        return guess

    def open(self, f: int) -> bool:
        """Whether another set of f GPUs could be better than the best seen."""
        return bool(self.lower[f] < self.best[f])

    def ask(self, f: int) -> None:
        """Evaluate the most promising set of f GPUs."""
        i = int(self._queue[f][self._next[f]])
        self._next[f] += 1
        self.num_asked += 1
        replicas = self.sets[i]
        found = self._ask(replicas)
        if np.isfinite(found) and self._guess[i] > 0:
            self._trend.learn(found / self._guess[i])
        if found + self._added_s < self.best[f] or self.chosen[f] is None:
            self.best[f], self.chosen[f] = found + self._added_s, replicas
        self._look(f)

    def _look(self, f: int) -> None:
        """What is known of f GPUs, after the latest evaluation."""
        queue, at = self._queue[f], self._next[f]
        following = self._lower[queue[at]] if at < len(queue) else inf
        self.lower[f] = min(self.best[f], following)
        self._open_guess[f] = self._guess[queue[at]] if following < self.best[f] else inf


class Idle(Table):
    """A stage that no request reaches: no GPUs, no time."""

    def __init__(self, num_gpus: int) -> None:
        self.best = np.full(num_gpus + 1, inf)
        self.best[0] = 0.0
        self.lower, self._fixed = self.best, self.best
        self.chosen = [None] * (num_gpus + 1)
        self.num_sets = self.num_asked = 0

    @property
    def guess(self) -> Floats:
        return self._fixed
