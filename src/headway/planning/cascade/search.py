"""The bi-level loop: a routing, its deployment, the next routing, until nothing gets better (Algorithm 1).

A round solves the deployment of one routing; its latency and quality make the objective J. The routing solver's next
proposal is the one with the best J to be expected: quality is known of all routings, latency is taken to grow with the
work that a routing makes. First rounds keep apart from each other, so that the whole range is looked at; then routings
near the best one have their turn. A routing whose J is no better even at a lower bound of its latency is left out.

The loop ends when the best J stood for so many rounds, or when every routing has been solved or left out: then it is
the optimum. The best plan ever evaluated is the answer, across all targets that one search is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf

import numpy as np
from msgspec import Struct

from headway.perf.params import weights_bytes
from headway.planning.cascade.allocation import as_room, gpus_of
from headway.planning.cascade.bounds import Bounds
from headway.planning.cascade.deployment import (
    Deployment,
    Idle,
    Latencies,
    Table,
    Trend,
    deploy,
    deploy_cheapest,
    spread,
)
from headway.planning.cascade.plan import Round
from headway.planning.cascade.problem import Cheapest, LatencyBudget, Problem, ReplicaSet, Target
from headway.planning.cascade.replica_sets import SetsOf, all_sets
from headway.planning.cascade.routing import Objective, Routings, cascades, proportional

EPS = 1e-9
"""By this share a plan must be better to count as better."""
UNMET = 10
"""So many times as many stable rounds, as long as the target is not reached."""


class Effort(Struct, frozen=True, forbid_unknown_fields=True):
    """How long to look."""

    stable_rounds: int | None = 12
    """Rounds in a row without a better plan, after which the first look, and then the closer one, ends; None: look
    at every routing."""
    gap: float = 0.01
    """The share by which a deployment's bound may stay below its latency, and by which a routing that is left out could
    have been faster than the best."""
    asks: int | None = None
    """Evaluations for one routing's deployment, after which the best known will do; None: as many as the gap takes."""
    apart: float = 0.03
    """By how much, in the share of requests that some stage processes, first rounds differ."""

    def __post_init__(self) -> None:
        counts = [each for each in (self.stable_rounds, self.asks) if each is not None]
        if not 0 <= self.gap < 1 or not 0 < self.apart <= 1 or min(counts, default=1) < 1:
            raise ValueError(f"{self}; expected a gap from 0 and apart up to 1, and 1 or more rounds and asks")


@dataclass
class Solved:
    """What is known of a routing: its deployment, if it was worth knowing, and a bound."""

    deployment: Deployment | None
    bound_s: float


@dataclass(frozen=True)
class Looked:
    """What the rounds for one target came to."""

    objective: Objective
    rounds: tuple[Round, ...]
    complete: bool
    """Whether every routing was solved or left out."""
    num_asked: int
    num_found: int


@dataclass
class Search:
    """One problem, but for its target. What is found stays for the next target."""

    problem: Problem
    latencies: Latencies
    bounds: Bounds
    effort: Effort = field(default_factory=Effort)
    routings: Routings | None = None
    """None: the thresholds of cascades."""
    sets_of: SetsOf | None = None
    """None: all feasible ones."""

    def __post_init__(self) -> None:
        problem = self.problem
        self.known = self.routings or cascades(problem.scores, [weights_bytes(model) for model in problem.models])
        self.of_stage = self.sets_of or all_sets(problem)
        self._tables: dict[tuple[int, bytes, tuple[bool, ...]], Table] = {}
        self._trends = [Trend() for _ in problem.models]
        self._of_combos = [Trend() if problem.splits.get(model.name) else None for model in problem.models]
        self.gpus = gpus_of(problem)
        self.cheapest: Cheapest | None = None
        self.solved: dict[int, Solved] = {}
        self._solved_within = {inf: self.solved}
        ratios = self.known.ratios
        self.least, self.most = int(ratios.sum(axis=1).argmin()), int(ratios.sum(axis=1).argmax())

    def look(self, target: Target) -> Looked:
        """The rounds for a target."""
        asked, found = self.latencies.num_asked, self.latencies.num_found
        self.ask_for(target)
        objective = self.objective(target)
        loop = _Loop(self, objective)
        complete = loop.run()
        counted = (self.latencies.num_asked - asked, self.latencies.num_found - found)
        return Looked(objective, tuple(loop.rounds), complete, *counted)

    def ask_for(self, target: Target) -> None:
        """What is solved for the least latency says nothing of the least cost, nor that within one time of others."""
        self.cheapest = target if isinstance(target, Cheapest) else None
        self.solved = self._solved_within.setdefault(inf if self.cheapest is None else self.cheapest.latency_s, {})

    def best(self, objective: Objective) -> int | None:
        """Of all routings solved so far, the one with the least J; None: none could be deployed."""
        quality = self.known.quality
        found = {i: each.deployment for i, each in self.solved.items() if each.deployment is not None}
        scores = {i: objective(deployment.minimised, float(quality[i])) for i, deployment in found.items()}
        return min(scores, key=lambda i: scores[i], default=None)

    def solve(self, routing: int, limit_s: float = inf) -> Solved:
        """The deployment of a routing, unless its latency is bound to be `limit_s` or more."""
        known = self.solved.get(routing)
        if known is None or (known.deployment is None and known.bound_s < limit_s):
            effort, tables = self.effort, self.tables(routing)
            if self.cheapest is not None:
                room = as_room(self.problem)
                found = deploy_cheapest(tables, room, self.cheapest.latency_s, limit_s, effort.gap, effort.asks)
            else:
                found = deploy(tables, self.gpus, self.problem.use_all, limit_s, effort.gap, effort.asks)
            known = Solved(*found)
            self.solved[routing] = known
        return known

    def spread(self, routing: int) -> Deployment:
        """The deployment of a solved routing, with GPUs that are left where they help most."""
        found = self.solved[routing].deployment
        assert found is not None
        if found.usd_per_hour is not None:
            return found
        return spread(self.tables(routing), self.gpus, found, self.problem.use_all, self.effort.gap, self.effort.asks)

    def latency_s(self, routing: int, stage: int, replicas: ReplicaSet) -> float:
        """p95 of a stage of any routing on any replicas, judging included."""
        problem, reached = self.problem, self.known.reached[routing, stage]
        lengths, rate_rps = problem.lengths(stage, reached), problem.rate_rps * float(reached.mean())
        return self._judge_s(stage) + self.latencies.p95_s(problem.models[stage], replicas, rate_rps, lengths)

    def _judge_s(self, stage: int) -> float:
        return self.problem.judge_s if stage < len(self.problem.models) - 1 else 0.0

    def tables(self, routing: int) -> list[Table]:
        """l_i(f) of every stage."""
        reached = self.known.reached[routing]
        used = tuple(reached.any(axis=1).tolist())
        return [self._table(i, reached[i], used) for i in range(len(used))]

    def _table(self, stage: int, reached: np.ndarray, used: tuple[bool, ...]) -> Table:
        key = (stage, np.packbits(reached).tobytes(), used if self.sets_of is not None else ())
        if key not in self._tables:
            self._tables[key] = self._made(stage, reached, used)
        return self._tables[key]

    def _made(self, stage: int, reached: np.ndarray, used: tuple[bool, ...]) -> Table:
        problem = self.problem
        if not used[stage]:
            return Idle(self._most)
        model, lengths = problem.models[stage], problem.lengths(stage, reached)
        rate_rps = problem.rate_rps * len(lengths) / len(reached)
        sets = self.of_stage(stage, used)
        lower, guess = self.bounds.of(model, sets, rate_rps, lengths)
        return Table(
            sets,
            lower,
            guess,
            self._most,
            lambda replicas: self.latencies.p95_s(model, replicas, rate_rps, lengths),
            self._trends[stage],
            self._judge_s(stage),
            self._of_combos[stage],
        )

    @property
    def _most(self) -> int:
        """The last index of a table."""
        return self.gpus if isinstance(self.gpus, int) else self.gpus.num_cells - 1

    @property
    def num_sets(self) -> int:
        """Looked at so far."""
        return sum(table.num_sets for table in self._tables.values())

    def objective(self, target: Target) -> Objective:
        utopia, nadir = self._end(-1), self._end(0)
        if not isinstance(target, LatencyBudget):
            return Objective(target, utopia, nadir)
        ends = [self.solve(i).deployment for i in (self.least, self.most)]
        times = [end.latency_s for end in ends if end is not None and end.latency_s < inf]
        return Objective(target, utopia, nadir, min(times, default=0.0), max(times, default=1.0))

    def _end(self, stage: int) -> float:
        """Quality where all requests get the answer of one stage."""
        scores = self.problem.scores.scores[:, stage]
        known = scores[~np.isnan(scores)]
        return float(known.mean()) if len(known) else 0.0


class _Loop:
    """The rounds for one target."""

    def __init__(self, search: Search, objective: Objective) -> None:
        self.search, self.objective = search, objective
        self.routings = search.known
        self.best: int | None = None
        self.score = inf
        self.rounds: list[Round] = []
        self.done = np.zeros(len(self.routings), np.bool_)
        self.hopeless = np.zeros(len(self.routings), np.bool_)
        """Those that send on no fewer requests, at every stage, than one that no deployment can serve."""

    def run(self) -> bool:
        """Whether every routing was solved or left out."""
        for i in list(self.search.solved):
            self._take(i)
        self._round(proportional(self.routings))
        for candidates in (self._apart(), self._near()):
            without = 0
            for i in candidates:
                looked = self.search.latencies.num_looked
                if self._round(i):
                    without = 0
                elif self.search.latencies.num_looked > looked or self.search.solved[i].deployment is not None:
                    without += 1
                if self._enough(without):
                    break
        return not self._open().any()

    def _enough(self, without: int) -> bool:
        """Whether so many rounds without a better plan will do: more, as long as the target is not reached."""
        stable = self.search.effort.stable_rounds
        if stable is None:
            return False
        if not (self._open() & ~self.hopeless).any():
            return True
        return without >= stable * (1 if self._met() else UNMET)

    def _met(self) -> bool:
        found = None if self.best is None else self.search.solved[self.best].deployment
        quality = 0.0 if self.best is None else float(self.routings.quality[self.best])
        return found is not None and self.objective.met(found.minimised, quality)

    def _reaching(self) -> np.ndarray:
        """Routings with the quality; what an earlier target had solved without it says nothing of its neighbours."""
        target = self.objective.target
        if isinstance(target, LatencyBudget):
            return np.ones(len(self.routings), np.bool_)
        return np.asarray(self.routings.quality >= target.q_min - EPS)

    def _open(self) -> np.ndarray:
        """Routings that could be better than the best."""
        open_ = ~self.done
        if self.score < inf:
            open_ &= np.asarray(self.objective.of(0.0, self.routings.quality)) < self.score
        return open_

    def _expected(self) -> np.ndarray:
        """J of every routing, were latency proportional to work."""
        solved = [(i, each.deployment.minimised) for i, each in self.search.solved.items() if each.deployment]
        ratios = [latency / self.routings.work[i] for i, latency in solved if self.routings.work[i] > 0]
        scale = float(np.median(ratios)) if ratios else 1e-15
        return np.asarray(self.objective.of(self.routings.work * scale, self.routings.quality))

    def _apart(self) -> Iterator[int]:
        """The routing with the best expectation that is not near one which had its turn; all where all are wanted."""
        effort, ratios = self.search.effort, self.routings.ratios
        apart = 0.0 if effort.stable_rounds is None else effort.apart
        free = np.ones(len(ratios), np.bool_)
        for done in np.flatnonzero(self.done & self._reaching()).tolist():
            free &= np.abs(ratios - ratios[done]).max(axis=1) >= apart
        while (open_ := self._open() & free).any():
            i = self._first(open_)
            yield i
            free &= np.abs(ratios - ratios[i]).max(axis=1) >= apart

    def _near(self) -> Iterator[int]:
        """Those near the best one, wherever that moves."""
        ratios, apart = self.routings.ratios, self.search.effort.apart
        while self.best is not None:
            open_ = self._open() & (np.abs(ratios - ratios[self.best]).max(axis=1) <= apart)
            if not open_.any():
                return
            yield self._first(open_)

    def _first(self, open_: np.ndarray) -> int:
        """Of these, the one with the best expectation."""
        candidates = np.flatnonzero(open_)
        expected = np.where(self.hopeless, inf, self._expected())[candidates]
        return int(candidates[expected.argmin()])

    def _round(self, i: int) -> bool:
        """Solve the routing as far as it can be better; whether it is."""
        self.done[i] = True
        quality = float(self.routings.quality[i])
        limit_s = self.objective.limit_s(self.score, quality)
        if not isinstance(self.objective.target, LatencyBudget):
            limit_s *= 1 - self.search.effort.gap
        solved = self.search.solve(i, limit_s)
        better = self._take(i)
        if solved.bound_s == inf:
            self.hopeless |= (self.routings.ratios >= self.routings.ratios[i]).all(axis=1)
        latency_s = solved.deployment.latency_s if solved.deployment else None
        self.rounds.append(
            Round(
                tuple(self.routings.thresholds[i].tolist()),
                tuple(self.routings.ratios[i].tolist()),
                quality,
                latency_s,
                solved.bound_s if solved.bound_s < inf else None,
                None if solved.deployment is None else self.objective(solved.deployment.minimised, quality),
                better,
            )
        )
        return better

    def _take(self, i: int) -> bool:
        """Make a solved routing the best one, if it is."""
        deployment = self.search.solved[i].deployment
        if deployment is None:
            return False
        self.done[i] = True
        score = self.objective(deployment.minimised, float(self.routings.quality[i]))
        margin = EPS * max(abs(self.score), 1.0) if self.score < inf else 0.0
        if score < self.score - margin:
            self.best, self.score = i, score
            return True
        return False
