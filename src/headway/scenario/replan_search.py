"""Cascades that are planned anew while they serve: the search as a piece of work, and the policies that follow it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from msgspec import structs

from headway.catalog.coefficients import Coefficients
from headway.control.policies import CascadeConfig, Policies
from headway.core.fleet import Parallel
from headway.planning.cascade.bilevel import Looked, Search, SetsOf, all_sets
from headway.planning.cascade.bounds import StepBounds
from headway.planning.cascade.candidates import along_s, candidates
from headway.planning.cascade.latencies import Latencies
from headway.planning.cascade.plan import CascadePlan
from headway.planning.cascade.planners import EFFORT, MOST
from headway.planning.cascade.problem import Problem, QualityFloor
from headway.planning.cascade.replanning import Replanner
from headway.planning.cascade.shapes import Sets, among
from headway.planning.cascade.stage_simulator import Simulated, rounds
from headway.policies.cascade.replanned import Replanned as Following
from headway.policies.resolve import Choice
from headway.policies.scaling.replanned import Replanned as Rollout
from headway.workload.quality import Scores


@dataclass(frozen=True)
class Work:
    """A plan for what was observed. There is no time to rehearse it."""

    problem: Callable[..., Problem]
    """For `scores` and `rate_rps`."""
    policies: Policies
    """Of a stage alone, in simulations."""
    coefficients: Mapping[str, Coefficients]
    """Of the step-time model, by model."""
    seed: int = 0
    shapes: Mapping[str, tuple[Parallel, ...]] | None = None
    """That replicas may have, by model; None: any."""

    def __call__(self, scores: Scores, rate_rps: float) -> CascadePlan:
        problem = self.problem(scores=scores, rate_rps=rate_rps)
        num = rounds(problem)
        stage = Simulated(problem.gpu, problem.engine, self.policies, self.seed, num, self.coefficients)
        bounds = StepBounds(problem.gpu, problem.engine, num, self.coefficients)
        search = Search(problem, Latencies(stage), bounds, EFFORT, sets_of=self._sets(problem))
        return _unrehearsed(search, search.look(problem.target))

    def _sets(self, problem: Problem) -> SetsOf | None:
        """Of the shapes that are allowed."""
        if self.shapes is None:
            return None
        every, allowed = all_sets(problem), self.shapes

        def some(stage: int, used: tuple[bool, ...]) -> Sets:
            return among(every(stage, used), allowed[problem.names[stage]])

        return some


def _unrehearsed(search: Search, looked: Looked) -> CascadePlan:
    """Of a search's candidates with the quality, the one whose stages take least along the way, as far as many go it.

    The least maximum alone gives every stage as little as the slowest one's latency allows, and their times add up.
    """
    found = candidates(search, looked, "cascadia", MOST)
    met = [each for each in found if each.status != "infeasible"]
    if not met or not isinstance(looked.objective.target, QualityFloor):
        return found[0]
    return min(met, key=along_s)


def following(policies: Policies, cascade: CascadeConfig, planner: Replanner, num_gpus: int) -> Policies:
    """Policies under which a cascade and its fleet follow a planner."""
    chosen = Choice("replanned", Following, {"planner": planner})
    rollout = Choice(
        "replanned",
        Rollout,
        {"planner": planner, "num_gpus": num_gpus, "interval_s": planner.config.interval_s},
    )
    return structs.replace(policies, cascade=structs.replace(cascade, policy=chosen), scaler=rollout)


def replanner_of(policies: Policies) -> Replanner | None:
    """Whom these policies follow."""
    chosen = None if policies.cascade is None else policies.cascade.policy
    found = chosen.arguments.get("planner") if isinstance(chosen, Choice) else None
    return found if isinstance(found, Replanner) else None
