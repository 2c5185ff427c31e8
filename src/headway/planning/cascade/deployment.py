"""The deployment solver: GPUs and replica sets for a given routing, evaluating no more than the proof needs (3.2).

Every stage has a table of l_i(f) with lower bounds where nothing is evaluated. The allocation that is best by what is
expected is evaluated first, until all of it is known; then the one that is best by the lower bounds, until no
allocation can be better than the best known one. What the paper computes in full (every set of replicas for every
number of GPUs, then the program) has the same answer.
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
from headway.planning.cascade.allocation import Allocation, Gpus, Room, least_cost, least_max, less
from headway.planning.cascade.problem import Evaluator, Floats, Lengths, ReplicaSet
from headway.planning.cascade.replica_sets import Sets

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

    Where `lower[f] == best[f]`, l(f) is known. `guess` is what l(f) is expected to be. Sets with combos have a queue of
    their own, and a trend (`of_combos`): how prompts hold up answers is no part of a guess, and they do so less there.
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
        of_combos: Trend | None = None,
    ) -> None:
        self.sets, self._ask, self._added_s = sets, ask, added_s
        self._trends = (trend,) if of_combos is None else (trend, of_combos)
        self._lower, self._guess = lower + added_s, guess
        kinds = len(self._trends)
        lines = sets.cells * kinds + (0 if of_combos is None else sets.are_split.astype("i8"))
        order = np.lexsort((guess, lower, lines))
        splits = np.searchsorted(lines[order], np.arange(kinds, kinds * (num_gpus + 1) + 1))
        self._queue = [*[order[:0]] * kinds, *(order[a:b] for a, b in pairwise(splits.tolist()))]
        self._next = [0] * len(self._queue)
        self.best = np.full(num_gpus + 1, inf)
        self.lower = np.full(num_gpus + 1, inf)
        self._open_guess = np.full((kinds, num_gpus + 1), inf)
        self._open_lower = np.full((kinds, num_gpus + 1), inf)
        self.chosen: list[ReplicaSet | None] = [None] * (num_gpus + 1)
        self.num_sets, self.num_asked = len(sets), 0
        for f in np.unique(sets.cells).tolist():
            self._look(f)

    @property
    def guess(self) -> Floats:
        """The best seen, or what is expected of the next."""
        guess: Floats = np.minimum(self.best, self._expected(slice(None)).min(axis=0))
        return guess

    def _expected(self, f: slice) -> Floats:
        """[queue, f]: of the next; infinite where it cannot be better than the best seen."""
        ratios = np.array([[trend.ratio] for trend in self._trends])
        found: Floats = np.maximum(self._open_guess[:, f] * ratios + self._added_s, self._open_lower[:, f])
        return found

    def open(self, f: int) -> bool:
        """Whether another set of f GPUs could be better than the best seen."""
        return bool(self.lower[f] < self.best[f])

    def ask(self, f: int) -> None:
        """Evaluate the most promising set of f GPUs."""
        kind = int(self._expected(slice(f, f + 1)).argmin())
        line = f * len(self._trends) + kind
        i = int(self._queue[line][self._next[line]])
        self._next[line] += 1
        self.num_asked += 1
        replicas = self.sets[i]
        found = self._ask(replicas)
        if np.isfinite(found) and self._guess[i] > 0:
            self._trends[kind].learn(found / self._guess[i])
        if found + self._added_s < self.best[f] or self.chosen[f] is None:
            self.best[f], self.chosen[f] = found + self._added_s, replicas
        self._look(f)

    def _look(self, f: int) -> None:
        """What is known of f GPUs, after the latest evaluation."""
        self.lower[f] = self.best[f]
        for kind in range(len(self._trends)):
            line = f * len(self._trends) + kind
            queue, at = self._queue[line], self._next[line]
            following = self._lower[queue[at]] if at < len(queue) else inf
            self.lower[f] = min(self.lower[f], following)
            is_open = following < self.best[f]
            self._open_guess[kind, f] = self._guess[queue[at]] if is_open else inf
            self._open_lower[kind, f] = following if is_open else inf


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


EPS = 1e-12


class Deployment(Struct, frozen=True):
    """The answer for one routing."""

    gpus: tuple[int, ...]
    sets: tuple[ReplicaSet | None, ...]
    """None: a stage without GPUs."""
    latencies_s: tuple[float, ...]
    latency_s: float
    """The largest of them."""
    bound_s: float | None
    """No deployment is faster; None: not known."""
    usd_per_hour: float | None = None
    """Where that is what was minimised."""

    @property
    def minimised(self) -> float:
        """The price of an hour, where that was to be least; else the latency."""
        return self.latency_s if self.usd_per_hour is None else self.usd_per_hour


def deploy(
    tables: Sequence[Table],
    num_gpus: Gpus,
    use_all: bool = False,
    limit_s: float = inf,
    gap: float = 0.0,
    asks: int | None = None,
) -> tuple[Deployment | None, float]:
    """The fastest deployment, and what none can be faster than.

    None where there is none, or none below `limit_s`: then the bound is at least that. `gap`: how far, as a share,
    the bound may stay below. `asks`: evaluations, after which the best known will do.
    """
    started = sum(table.num_asked for table in tables)
    while True:
        low = least_max([table.lower for table in tables], num_gpus, use_all)
        known = least_max([table.best for table in tables], num_gpus, use_all)
        if low is None or low.latency_s >= limit_s:
            return None, inf if low is None else low.latency_s
        spent = asks is not None and sum(table.num_asked for table in tables) - started >= asks
        if known is not None and (spent or low.latency_s >= known.latency_s * (1 - gap) - EPS):
            return _deployment(tables, known, min(low.latency_s, known.latency_s)), low.latency_s
        _narrow(tables, low, least_max([table.guess for table in tables], num_gpus, use_all))


def deploy_cheapest(
    tables: Sequence[Table], room: Room, latency_s: float, limit_usd: float = inf, gap: float = 0.0,
    asks: int | None = None,
) -> tuple[Deployment | None, float]:  # fmt: skip
    """The deployment that costs least with every stage within a latency, and what none costs less than, $/h.

    None where there is none, or none below `limit_usd`. `gap` and `asks` as of `deploy`.
    """
    started = sum(table.num_asked for table in tables)
    while True:
        low = least_cost([table.lower for table in tables], room, latency_s)
        known = least_cost([table.best for table in tables], room, latency_s)
        if low is None or low.usd_per_hour >= limit_usd:
            return None, inf if low is None else low.usd_per_hour
        spent = asks is not None and sum(table.num_asked for table in tables) - started >= asks
        if spent and known is None:
            return None, low.usd_per_hour
        if known is not None and (spent or low.usd_per_hour >= known.usd_per_hour * (1 - gap) - EPS):
            return _priced(tables, known), low.usd_per_hour
        guess = least_cost([table.guess for table in tables], room, latency_s)
        within = [None if each is None else structs.replace(each, latency_s=latency_s) for each in (low, guess)]
        _narrow(tables, *within)


def _priced(tables: Sequence[Table], found: Allocation) -> Deployment:
    made = _deployment(tables, found, 0.0)
    return structs.replace(made, bound_s=None, usd_per_hour=found.usd_per_hour)


def _narrow(tables: Sequence[Table], low: Allocation | None, guess: Allocation | None) -> None:
    """Evaluate what is expected to be best; where that is known, what the lower bounds still allow."""
    for wanted in (guess, low):
        if wanted is None:
            continue
        asked = False
        for table, f in zip(tables, wanted.gpus, strict=True):
            if table.best[f] > wanted.latency_s + EPS and table.open(f):
                table.ask(f)
                asked = True
        if asked:
            return


def _deployment(tables: Sequence[Table], found: Allocation, bound_s: float) -> Deployment:
    pairs = list(zip(tables, found.gpus, strict=True))
    return Deployment(
        found.gpus,
        tuple(table.chosen[f] for table, f in pairs),
        tuple(float(table.best[f]) for table, f in pairs),
        found.latency_s,
        bound_s,
    )


def spread(
    tables: Sequence[Table], num_gpus: Gpus, found: Deployment, use_all: bool = False, gap: float = 0.0,
    asks: int | None = None,
) -> Deployment:  # fmt: skip
    """The same largest latency, and the GPUs that it leaves over where they help the other stages most.

    The slowest stage keeps what it has; the rest is deployed anew, and so on. `gap` and `asks` as of `deploy`.
    """
    gpus, sets, latencies = list(found.gpus), list(found.sets), list(found.latencies_s)
    open_ = list(range(len(tables)))
    left = num_gpus
    while len(open_) > 1:
        slowest = max(open_, key=lambda i: (latencies[i], i))
        open_.remove(slowest)
        left = less(left, gpus[slowest])
        better, _ = deploy([tables[i] for i in open_], left, use_all, gap=gap, asks=asks)
        if better is None or better.latency_s > max(latencies[i] for i in open_):
            continue
        for at, i in enumerate(open_):
            gpus[i], sets[i], latencies[i] = better.gpus[at], better.sets[at], better.latencies_s[at]
    return Deployment(tuple(gpus), tuple(sets), tuple(latencies), max(latencies), found.bound_s)
