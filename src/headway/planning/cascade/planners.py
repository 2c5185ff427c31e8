"""Planners as whoever rehearses asks them: from a problem to a few plans, the one they hold best first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from headway.core.errors import HeadwayError
from headway.planning.cascade import baselines
from headway.planning.cascade.bounds import Bounds
from headway.planning.cascade.cascadia import candidates as of_search
from headway.planning.cascade.deployment import Latencies
from headway.planning.cascade.plan import CascadePlan
from headway.planning.cascade.problem import Cheapest, Problem, QualityFloor
from headway.planning.cascade.search import Effort, Search

EFFORT = Effort(stable_rounds=4, gap=0.05, asks=25)
"""Of every search."""
MOST = 6
"""Plans of one search that are rehearsed."""
Make = Callable[[Problem, Latencies, Bounds], Sequence[CascadePlan]]
"""Plans of one planner for a problem, the one that it holds best first."""


@dataclass
class Searched:
    """The candidates of a search that goes on from target to target."""

    begin: Callable[[Problem, Latencies, Bounds], Search]
    planner: str
    search: Search | None = None

    def __call__(self, problem: Problem, latencies: Latencies, bounds: Bounds) -> Sequence[CascadePlan]:
        """With all GPUs in use, where the problem says so and it can be; what is in no time, as fast as it can be."""
        target = problem.target
        if isinstance(target, Cheapest):
            problem = replace(problem, use_all=False)
        search = self.search = self.search or self.begin(problem, latencies, bounds)
        try:
            return of_search(search, search.look(target), self.planner, MOST)
        except HeadwayError:
            if not search.problem.use_all and not isinstance(target, Cheapest):
                raise
        if isinstance(target, Cheapest):
            target = QualityFloor(target.q_min)
        else:
            search = self.search = self.begin(replace(problem, use_all=False), latencies, bounds)
        return of_search(search, search.look(target), self.planner, MOST)


def cascadia() -> Make:
    """The paper's. That all GPUs are used leaves the search the fewest allocations."""
    return Searched(_begin, "cascadia")


def _begin(problem: Problem, latencies: Latencies, bounds: Bounds) -> Search:
    return Search(problem, latencies, bounds, EFFORT)


def stand_alone(name: str) -> Make:
    """One model's."""
    return lambda problem, latencies, bounds: [baselines.stand_alone(problem, name, latencies, bounds, EFFORT)]


def cascade_serve(problem: Problem, latencies: Latencies, bounds: Bounds) -> Sequence[CascadePlan]:
    """CascadeServe's."""
    return [baselines.cascade_serve(problem, latencies, bounds, EFFORT)]


def uniform_parallelism() -> Make:
    """Of every model the same shape."""
    return Searched(
        lambda problem, latencies, bounds: baselines.uniform_parallelism_search(
            replace(problem, use_all=False), latencies, bounds, EFFORT
        ),
        "uniform parallelism",
    )


def uniform_allocation() -> Make:
    """For every model as many GPUs."""
    return Searched(
        lambda problem, latencies, bounds: baselines.uniform_allocation_search(
            replace(problem, use_all=False), latencies, bounds, EFFORT
        ),
        "uniform allocation",
    )


def of_models(names: Sequence[str]) -> Make:
    """Cascadia's for these models only, which need not begin with the smallest."""

    def begin(problem: Problem, latencies: Latencies, bounds: Bounds) -> Search:
        models = tuple(model for model in problem.models if model.name in names)
        return Search(replace(problem, models=models), latencies, bounds, EFFORT)

    return Searched(begin, f"cascade of {', '.join(names)}")


def shorter(problem: Problem) -> Iterator[tuple[str, ...]]:
    """Cascades of some of the models, but for those that only leave out the largest ones: they are routings."""
    names = problem.names
    for num in range(2, len(names)):
        for some in combinations(names, num):
            if some != names[:num]:
                yield some


def alternatives(problem: Problem) -> list[Make]:
    """Each model alone, cascades of some, and the cascade with one part of its planning left out.

    What has no combos anyway is not looked at once more where they are offered.
    """
    made: list[Make] = [stand_alone(name) for name in problem.names]
    made += [of_models(names) for names in shorter(problem)]
    if problem.splits:
        return made
    made += [uniform_parallelism(), uniform_allocation()]
    return [*made, cascade_serve] if isinstance(problem.target, QualityFloor) else made
