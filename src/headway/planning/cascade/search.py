"""The bi-level search: a routing, its deployment, the next routing, until nothing gets better (Algorithm 1).

A round solves the deployment of one routing; latency and quality make the objective J. The next routing is the one with
the best expected J: the quality of every routing is known, and latency is assumed to grow with a routing's work. The
first rounds keep a distance from each other, so that they cover all routings. The following rounds try routings near
the best one. A routing whose J is no better even at its latency's lower bound is excluded.

The search ends when the best J has not changed for some rounds, or when every routing has been solved or excluded; the
best routing is then the optimum. Deployments are kept from one target of a search to the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

import numpy as np
from msgspec import Struct

from headway.perf.params import weights_bytes
from headway.planning.cascade.allocation import Gpus, budget_of
from headway.planning.cascade.deployment import (
    Deployment,
    EstimateCorrection,
    LatencyTable,
    StageLatencies,
    deploy,
    with_spare_gpus,
)
from headway.planning.cascade.latency_bounds import Bounds, StepTimeBounds
from headway.planning.cascade.problem import CascadeProblem, Cheapest, Floats, LatencyBudget, ReplicaSet, Round, Target
from headway.planning.cascade.replica_sets import NO_SETS, StageSets, all_sets
from headway.planning.cascade.routing import Objective, Routings, cascades, proportional

EPS = 1e-9
"""A plan counts as better only if it is better by more than this share."""
UNMET = 10
"""Factor on the number of stable rounds while the target is not reached."""


class Effort(Struct, frozen=True, forbid_unknown_fields=True):
    """When a search ends: limits on rounds and evaluations, and on the gap to its bounds."""

    stable_rounds: int | None = 12
    """After this many consecutive rounds without a better plan, the search goes from distant routings to near ones, and
    after as many again it ends. None: solve every routing."""
    gap: float = 0.01
    """Share by which a deployment's bound may be below its latency, and by which an excluded routing could be faster
    than the best one."""
    max_evaluations: int | None = None
    """Evaluations for the deployment of one routing, after which the best known is taken; None: continue until within
    `gap`."""
    num_refined: int = 0
    """Number of best routings that are deployed again at the end of a search: with two shapes for a model's replicas,
    and the gap of `REFINED`."""
    min_distance: float = 0.03
    """Minimum difference between the first routings, in the share of requests that some stage processes."""

    def __post_init__(self) -> None:
        counts = [each for each in (self.stable_rounds, self.max_evaluations) if each is not None]
        if not 0 <= self.gap < 1 or not 0 < self.min_distance <= 1 or min(counts, default=1) < 1:
            raise ValueError(f"{self}; expected a gap from 0, a distance up to 1, and 1 or more rounds and evaluations")


REFINED = Effort(gap=0.01, max_evaluations=20)
"""Effort for the deployment of a refined routing."""
REFINED_KINDS = 2
"""Maximum number of shapes of one model's replicas, as in Table 3."""


@dataclass
class SolvedRouting:
    """The deployment of a routing and a bound: no deployment of the routing is better than `bound_s`."""

    deployment: Deployment | None
    """The deployment; None: none exists, or none below the solver's limit."""
    bound_s: float


@dataclass(frozen=True)
class SearchResult:
    """The rounds for one target."""

    objective: Objective
    rounds: tuple[Round, ...]
    complete: bool
    """Whether every routing was solved or excluded."""
    num_evaluated: int
    num_cached: int


class Search:
    """The search of one problem for successive targets. Deployments are kept for later targets.

    `bounds`: None = `StepTimeBounds` with one repeat. `routings`: None = those of a cascade's thresholds. `sets_of`:
    None = all feasible sets of replicas.
    """

    def __init__(
        self,
        problem: CascadeProblem,
        latencies: StageLatencies,
        bounds: Bounds | None = None,
        effort: Effort | None = None,
        routings: Routings | None = None,
        sets_of: StageSets | None = None,
    ) -> None:
        self.problem, self.latencies, self.effort = problem, latencies, effort or Effort()
        self.bounds: Bounds = bounds or StepTimeBounds(problem.gpu, problem.engine)
        self.routings = routings or cascades(problem.scores, [weights_bytes(model) for model in problem.models])
        self.sets_of = sets_of or all_sets(problem)
        self._sets_differ = sets_of is not None
        """Whether a stage's sets depend on which stages are used."""
        self._tables: dict[tuple[int, bytes, tuple[bool, ...]], LatencyTable] = {}
        self._corrections = [
            [EstimateCorrection() for _ in range(2 if problem.combo_kinds.get(name) else 1)] for name in problem.names
        ]
        self.gpus: Gpus = budget_of(problem) if problem.other_offers else problem.num_gpus
        self.cheapest: Cheapest | None = None
        self.solved: dict[int, SolvedRouting] = {}
        self._solved_within = {inf: self.solved}
        self._wide: Search | None = None
        """The search that refines deployments."""
        work = self.routings.ratios.sum(axis=1)
        self.least, self.most = int(work.argmin()), int(work.argmax())
        """The routings with the fewest and the most stages per request."""

    def run(self, target: Target) -> SearchResult:
        evaluated, cached = self.latencies.num_evaluated, self.latencies.num_cached
        self.set_target(target)
        rounds = _Rounds(self, self.objective(target))
        complete = rounds.run()
        self._refine(rounds.objective)
        counts = (self.latencies.num_evaluated - evaluated, self.latencies.num_cached - cached)
        return SearchResult(rounds.objective, tuple(rounds.made), complete, *counts)

    def _refine(self, objective: Objective) -> None:
        """Deploy the best routings, and the one with the least work, again with replicas of more shapes and a smaller
        gap.

        Only with one type of GPU and without combos: otherwise there are too many sets.
        """
        problem, target, num = self.problem, objective.target, self.effort.num_refined
        if not num or self._sets_differ or problem.other_offers or problem.combo_kinds or self.cheapest is not None:
            return
        quality = self.routings.quality
        deployed = {i: each.deployment for i, each in self.solved.items() if each.deployment is not None}
        chosen = sorted(deployed, key=lambda i: objective(deployed[i].minimised, float(quality[i])))[:num]
        if not isinstance(target, LatencyBudget) and (quality >= target.q_min - EPS).any():
            chosen.append(int(np.where(quality >= target.q_min - EPS, self.mean_work, inf).argmin()))
        if self._wide is None:
            wide = replace(problem, max_kinds=max(REFINED_KINDS, problem.max_kinds or REFINED_KINDS))
            self._wide = Search(wide, self.latencies, self.bounds, REFINED, self.routings)
        for i in dict.fromkeys(chosen):
            refined, known = self._wide.solve(i).deployment, deployed.get(i)
            if refined is not None and (known is None or refined.minimised < known.minimised):
                self.solved[i] = SolvedRouting(refined, min(self._wide.solved[i].bound_s, refined.minimised))

    def set_target(self, target: Target) -> None:
        """Select the solved routings that remain valid for the target. Deployments of least cost are valid for their
        own latency limit only."""
        self.cheapest = target if isinstance(target, Cheapest) else None
        self.solved = self._solved_within.setdefault(inf if self.cheapest is None else self.cheapest.latency_s, {})

    def best(self, objective: Objective) -> int | None:
        """The routing with the lowest J of all solved ones; None if none could be deployed."""
        quality = self.routings.quality
        deployed = {i: each.deployment for i, each in self.solved.items() if each.deployment is not None}
        scores = {i: objective(deployment.minimised, float(quality[i])) for i, deployment in deployed.items()}
        return min(scores, key=lambda i: scores[i], default=None)

    def solve(self, routing: int, limit_s: float = inf) -> SolvedRouting:
        """The deployment of a routing, unless its latency is known to be at least `limit_s`."""
        known = self.solved.get(routing)
        if known is None or (known.deployment is None and known.bound_s < limit_s):
            gap, most = self.effort.gap, self.effort.max_evaluations
            tables = self.tables(routing)
            if self.cheapest is not None:
                budget, within_s = budget_of(self.problem), self.cheapest.latency_s
                solution = deploy(tables, budget, limit=limit_s, gap=gap, max_evaluations=most, within_s=within_s)
            else:
                solution = deploy(tables, self.gpus, self.problem.use_all, limit_s, gap, most)
            known = self.solved[routing] = SolvedRouting(*solution)
        return known

    def with_spare_gpus(self, routing: int) -> Deployment:
        """The deployment of a solved routing, with spare GPUs given to the stages that gain most."""
        deployment = self.solved[routing].deployment
        assert deployment is not None
        if deployment.usd_per_hour is not None:
            return deployment
        gap, most = self.effort.gap, self.effort.max_evaluations
        return with_spare_gpus(self.tables(routing), self.gpus, deployment, self.problem.use_all, gap, most)

    def latency_s(self, routing: int, stage: int, replicas: ReplicaSet) -> float:
        """p95 of a stage of any routing on any replicas, including judging."""
        problem, reached = self.problem, self.routings.reached[routing, stage]
        lengths, rate_rps = problem.lengths(stage, reached), problem.rate_rps * float(reached.mean())
        return self._judge_s(stage) + self.latencies.p95_s(problem.models[stage], replicas, rate_rps, lengths)

    def redeployed(self, routing: int, deployment: Deployment) -> Deployment:
        """The deployment's replicas, with their latencies under a routing."""
        sets = enumerate(deployment.sets)
        times = [0.0 if replicas is None else self.latency_s(routing, i, replicas) for i, replicas in sets]
        return Deployment(deployment.gpus, deployment.sets, tuple(times), max(times, default=inf), None)

    def tables(self, routing: int) -> list[LatencyTable]:
        reached = self.routings.reached[routing]
        used = tuple(reached.any(axis=1).tolist())
        tables = []
        for i in range(len(used)):
            key = (i, np.packbits(reached[i]).tobytes(), used if self._sets_differ else ())
            if key not in self._tables:
                self._tables[key] = self._new_table(i, reached[i], used)
            tables.append(self._tables[key])
        return tables

    @property
    def num_sets(self) -> int:
        """Sets of replicas in all tables."""
        return sum(table.num_sets for table in self._tables.values())

    @cached_property
    def mean_work(self) -> Floats:
        """`Routings.work`, if all answers of a model had mean length."""
        scores, weights = self.problem.scores, [weights_bytes(model) for model in self.problem.models]
        tokens = scores.output_tokens.mean(axis=0) + 0.1 * scores.prompt_tokens.mean()
        return np.asarray(self.routings.ratios @ (tokens * np.asarray(weights)))

    def objective(self, target: Target) -> Objective:
        utopia, nadir = self._mean_score(-1), self._mean_score(0)
        if not isinstance(target, LatencyBudget):
            return Objective(target, utopia, nadir)
        ends = [self.solve(i).deployment for i in (self.least, self.most)]
        times = [end.latency_s for end in ends if end is not None and end.latency_s < inf]
        return Objective(target, utopia, nadir, min(times, default=0.0), max(times, default=1.0))

    def _judge_s(self, stage: int) -> float:
        return self.problem.judge_s if stage < len(self.problem.models) - 1 else 0.0

    def _new_table(self, stage: int, reached: np.ndarray, used: tuple[bool, ...]) -> LatencyTable:
        problem = self.problem
        last = self.gpus if isinstance(self.gpus, int) else self.gpus.num_cells - 1
        if not used[stage]:
            table = LatencyTable(
                NO_SETS, np.zeros(0), np.zeros(0), last, lambda replicas: inf, self._corrections[stage]
            )
            table.best[0] = table.lower[0] = 0.0
            return table
        model, lengths = problem.models[stage], problem.lengths(stage, reached)
        rate_rps = problem.rate_rps * len(lengths) / len(reached)
        sets = self.sets_of(stage, used)
        lower, estimate = self.bounds.estimate(model, sets, rate_rps, lengths)
        return LatencyTable(
            sets,
            lower,
            estimate,
            last,
            lambda replicas: self.latencies.p95_s(model, replicas, rate_rps, lengths),
            self._corrections[stage],
            self._judge_s(stage),
        )

    def _mean_score(self, stage: int) -> float:
        """The quality if all requests get the answer of one stage."""
        scores = self.problem.scores.scores[:, stage]
        return 0.0 if np.isnan(scores).all() else float(scores[~np.isnan(scores)].mean())


class _Rounds:
    """The rounds for one target."""

    def __init__(self, search: Search, objective: Objective) -> None:
        self.search, self.objective = search, objective
        self.routings = search.routings
        self.best: int | None = None
        self.score = inf
        self.made: list[Round] = []
        self.done = np.zeros(len(self.routings), np.bool_)
        self.unservable = np.zeros(len(self.routings), np.bool_)
        """Routings that no deployment can serve: at every stage they have at least as many requests as a routing that
        could not be deployed."""

    def run(self) -> bool:
        """Run the rounds. Returns whether every routing was solved or excluded."""
        for i in list(self.search.solved):
            self._update_best(i)
        self._solve(proportional(self.routings))
        for candidates in (self._distant(), self._neighbours()):
            num_stable = 0
            for i in candidates:
                used = self.search.latencies.num_used
                if self._solve(i):
                    num_stable = 0
                elif self.search.latencies.num_used > used or self.search.solved[i].deployment is not None:
                    num_stable += 1
                if self._is_stable(num_stable):
                    break
        return not self._open().any()

    def _is_stable(self, num_stable: int) -> bool:
        """Whether this many rounds without a better plan suffice. More are needed if the target is not reached."""
        stable_rounds = self.search.effort.stable_rounds
        if stable_rounds is None:
            return False
        if not (self._open() & ~self.unservable).any():
            return True
        deployment = None if self.best is None else self.search.solved[self.best].deployment
        quality = 0.0 if self.best is None else float(self.routings.quality[self.best])
        is_met = deployment is not None and self.objective.met(deployment.minimised, quality)
        return num_stable >= stable_rounds * (1 if is_met else UNMET)

    def _reaches_quality(self) -> np.ndarray:
        """Routings that reach the quality. Solved routings below it do not exclude the routings near them."""
        target = self.objective.target
        if isinstance(target, LatencyBudget):
            return np.ones(len(self.routings), np.bool_)
        return np.asarray(self.routings.quality >= target.q_min - EPS)

    def _open(self) -> np.ndarray:
        """Routings that could be better than the best one."""
        open_ = ~self.done
        if self.score < inf:
            open_ &= np.asarray(self.objective.of(0.0, self.routings.quality)) < self.score
        return open_

    def _expected(self) -> np.ndarray:
        """J of every routing if latency were proportional to work."""
        solved = [(i, each.deployment.minimised) for i, each in self.search.solved.items() if each.deployment]
        ratios = [latency / self.routings.work[i] for i, latency in solved if self.routings.work[i] > 0]
        scale = float(np.median(ratios)) if ratios else 1e-15
        return np.asarray(self.objective.of(self.routings.work * scale, self.routings.quality))

    def _distant(self) -> Iterator[int]:
        """The most promising routings that are not near a solved one; all routings if all must be solved."""
        effort, ratios = self.search.effort, self.routings.ratios
        distance = 0.0 if effort.stable_rounds is None else effort.min_distance
        free = np.ones(len(ratios), np.bool_)
        for done in np.flatnonzero(self.done & self._reaches_quality()).tolist():
            free &= np.abs(ratios - ratios[done]).max(axis=1) >= distance
        while (open_ := self._open() & free).any():
            i = self._most_promising(open_)
            yield i
            free &= np.abs(ratios - ratios[i]).max(axis=1) >= distance

    def _neighbours(self) -> Iterator[int]:
        """Routings near the best one, which may change during the iteration."""
        ratios, distance = self.routings.ratios, self.search.effort.min_distance
        while self.best is not None:
            open_ = self._open() & (np.abs(ratios - ratios[self.best]).max(axis=1) <= distance)
            if not open_.any():
                return
            yield self._most_promising(open_)

    def _most_promising(self, open_: np.ndarray) -> int:
        candidates = np.flatnonzero(open_)
        expected = np.where(self.unservable, inf, self._expected())[candidates]
        return int(candidates[expected.argmin()])

    def _solve(self, i: int) -> bool:
        """Solve a routing as far as it can be better than the best one. True if it is better."""
        self.done[i] = True
        quality = float(self.routings.quality[i])
        limit_s = self.objective.limit_s(self.score, quality)
        if not isinstance(self.objective.target, LatencyBudget):
            limit_s *= 1 - self.search.effort.gap
        solved = self.search.solve(i, limit_s)
        is_better = self._update_best(i)
        if solved.bound_s == inf:
            self.unservable |= (self.routings.ratios >= self.routings.ratios[i]).all(axis=1)
        latency_s = solved.deployment.latency_s if solved.deployment else None
        self.made.append(
            Round(
                tuple(self.routings.thresholds[i].tolist()),
                tuple(self.routings.ratios[i].tolist()),
                quality,
                latency_s,
                solved.bound_s if solved.bound_s < inf else None,
                None if solved.deployment is None else self.objective(solved.deployment.minimised, quality),
                is_better,
            )
        )
        return is_better

    def _update_best(self, i: int) -> bool:
        """Make a solved routing the best one if it is better. True if it is."""
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
