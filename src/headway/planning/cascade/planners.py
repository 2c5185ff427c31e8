"""Planners for rehearsals: each makes a few plans for a problem, the best by its own measure first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from headway.core.errors import HeadwayError
from headway.planning.cascade import baselines
from headway.planning.cascade.bounds import Bounds
from headway.planning.cascade.cascadia import candidates
from headway.planning.cascade.deployment import StageLatencies
from headway.planning.cascade.plan import CascadePlan
from headway.planning.cascade.problem import CascadeProblem, Cheapest, QualityFloor
from headway.planning.cascade.search import Effort, Search

EFFORT = Effort(stable_rounds=4, gap=0.05, max_evaluations=25)
"""Of every search."""
MAX_CANDIDATES = 6
"""Plans of one search that are rehearsed."""
CascadePlanner = Callable[[CascadeProblem, StageLatencies, Bounds], Sequence[CascadePlan]]
"""Makes the plans of one planner for a problem, the best by its own measure first."""


@dataclass
class SearchPlanner:
    """The candidates of a search, which is kept from one target to the next."""

    new_search: Callable[[CascadeProblem, StageLatencies, Bounds], Search]
    name: str
    search: Search | None = None

    def __call__(
        self, problem: CascadeProblem, latencies: StageLatencies, bounds: Bounds
    ) -> Sequence[CascadePlan]:  # fmt: skip
        """Use all GPUs if the problem says so and an allocation of all exists; else as many as help.

        Where no plan is in the time of a `Cheapest` target, the fastest plans with its quality.
        """
        target = problem.target
        if isinstance(target, Cheapest):
            problem = replace(problem, use_all=False)
        search = self.search = self.search or self.new_search(problem, latencies, bounds)
        try:
            return candidates(search, search.run(target), self.name, MAX_CANDIDATES)
        except HeadwayError:
            if not search.problem.use_all and not isinstance(target, Cheapest):
                raise
        if isinstance(target, Cheapest):
            target = QualityFloor(target.q_min)
        else:
            search = self.search = self.new_search(replace(problem, use_all=False), latencies, bounds)
        return candidates(search, search.run(target), self.name, MAX_CANDIDATES)


def cascadia() -> CascadePlanner:
    """The paper's planner."""
    return SearchPlanner(lambda problem, latencies, bounds: Search(problem, latencies, bounds, EFFORT), "cascadia")


def stand_alone(name: str) -> CascadePlanner:
    return lambda problem, latencies, bounds: [baselines.stand_alone(problem, name, latencies, bounds, EFFORT)]


def cascade_serve(problem: CascadeProblem, latencies: StageLatencies, bounds: Bounds) -> Sequence[CascadePlan]:
    return [baselines.cascade_serve(problem, latencies, bounds, EFFORT)]


def uniform_parallelism() -> CascadePlanner:
    """The same shape for every model."""
    return SearchPlanner(
        lambda problem, latencies, bounds: baselines.uniform_parallelism_search(
            replace(problem, use_all=False), latencies, bounds, EFFORT
        ),
        "uniform parallelism",
    )


def uniform_allocation() -> CascadePlanner:
    """The same number of GPUs for every model."""
    return SearchPlanner(
        lambda problem, latencies, bounds: baselines.uniform_allocation_search(
            replace(problem, use_all=False), latencies, bounds, EFFORT
        ),
        "uniform allocation",
    )


def cascade_of(names: Sequence[str]) -> CascadePlanner:
    """Cascadia's planner for some of the models, which need not include the smallest."""

    def new_search(problem: CascadeProblem, latencies: StageLatencies, bounds: Bounds) -> Search:
        models = tuple(model for model in problem.models if model.name in names)
        return Search(replace(problem, models=models), latencies, bounds, EFFORT)

    return SearchPlanner(new_search, f"cascade of {', '.join(names)}")


def model_subsets(problem: CascadeProblem) -> Iterator[tuple[str, ...]]:
    """Shorter cascades, except those without the largest models: routings of the whole cascade include these."""
    names = problem.names
    for num in range(2, len(names)):
        for subset in combinations(names, num):
            if subset != names[:num]:
                yield subset


def alternatives(problem: CascadeProblem) -> list[CascadePlanner]:
    """Each model alone, shorter cascades, and the cascade with one part of its planning left out.

    The last group has no combos, so it is left out where the problem offers combos.
    """
    planners: list[CascadePlanner] = [stand_alone(name) for name in problem.names]
    planners += [cascade_of(names) for names in model_subsets(problem)]
    if problem.combo_kinds:
        return planners
    planners += [uniform_parallelism(), uniform_allocation()]
    return [*planners, cascade_serve] if isinstance(problem.target, QualityFloor) else planners
