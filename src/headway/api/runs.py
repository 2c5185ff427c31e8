"""Simulates one run, several sets of policies, or grids of values."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from headway.api.arguments import check_counts, checked
from headway.api.results import Comparison, Result, Sweep
from headway.api.scenarios import ScenarioLike, load
from headway.config.scenario import Scenario, variants, with_seed
from headway.core.errors import HeadwayError
from headway.metrics.seeds import SeededMetrics
from headway.scenario import compare as compare_variants
from headway.scenario import replicate, run
from headway.scenario.policies import labels, policies_of
from headway.scenario.processes import processes
from headway.scenario.run import metrics_of


@checked
def simulate(scenario: ScenarioLike, changes: Mapping[str, Any] | None = None, **policies: Any) -> Result:
    """Simulate a scenario with one set of policies.

    `changes` are as in `load`. `policies` replace those of the scenario: `routing=`, `ordering=`, `migration=`,
    `admission=`, `scaling=`, each a name, a dictionary of `name` and arguments, a class, or an instance.
    """
    chosen = _with_policies(scenario, changes, policies)
    return Result(chosen, run(chosen))


@checked
def compare(
    scenario: ScenarioLike, changes: Mapping[str, Any] | None = None, *, seeds: int = 5, jobs: int = 1, **policies: Any
) -> Comparison:
    """Simulate every set of policies on the same requests, with several seeds.

    `routing` and `ordering` may be lists. Intervals are Student's at 95%; differences are taken seed by seed. `jobs`:
    processes. Policies defined in a notebook run in this process, whatever `jobs` is.
    """
    check_counts(seeds=seeds, jobs=jobs)
    chosen = _with_policies(scenario, changes, policies)
    jobs = _possible_jobs(chosen, jobs)
    runs = compare_variants(chosen, jobs)
    return Comparison(chosen, tuple(runs), replicate(chosen, runs, seeds, jobs))


@checked
def sweep(
    scenario: ScenarioLike, grid: Mapping[str, Sequence[Any]], *, seeds: int = 1, jobs: int = 1, **policies: Any
) -> Sweep:
    """Simulate all combinations of values, such as `{"workload.arrivals": [10, 20], "fleet.0.replicas": [2, 4]}`.

    Every combination runs under each set of policies with every seed. Raises HeadwayError for a key that a scenario
    does not have.
    """
    check_counts(seeds=seeds, jobs=jobs)
    if not grid or not all(grid.values()):
        raise HeadwayError("grid: expected keys with one value or more, as in {'workload.arrivals': [10, 20]}")
    points = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
    chosen = [_with_policies(scenario, point, policies) for point in points]
    first = chosen[0].spec.seed
    numbers = tuple(range(first, first + seeds))
    tasks = [with_seed(each, seed) for one in chosen for each in variants(one) for seed in numbers]
    with processes(_possible_jobs(chosen[0], jobs), len(tasks)) as pool:
        found = iter(list((map if pool is None else pool.map)(metrics_of, tasks)))
    seeded = [
        SeededMetrics(numbers, tuple(tuple(next(found) for _ in numbers) for _ in variants(one))) for one in chosen
    ]
    return Sweep({key: tuple(values) for key, values in grid.items()}, tuple(points), _names(chosen[0]), tuple(seeded))


def _with_policies(scenario: ScenarioLike, changes: Mapping[str, Any] | None, policies: Mapping[str, Any]) -> Scenario:
    return load(scenario, {**(changes or {}), **{f"policies.{kind}": value for kind, value in policies.items()}})


def _names(scenario: Scenario) -> tuple[str, ...]:
    """The names of the sets of policies, from their differences."""
    shown = [labels(each, policies_of(each)) for each in variants(scenario)]
    differing = [kind for kind in shown[0] if len({each.get(kind) for each in shown}) > 1] or list(shown[0])[:1]
    return tuple(" + ".join(each.get(kind, "none") for kind in differing) for each in shown)


def _possible_jobs(scenario: Scenario, jobs: int) -> int:
    """`jobs`, or 1 if other processes cannot import a policy's class."""
    if jobs == 1:
        return 1
    for each in variants(scenario):
        policies = policies_of(each)
        for choice in (policies.router, policies.ordering, policies.migration, policies.admission, policies.scaler):
            made_by = getattr(choice, "made_by", None)
            if made_by is not None and (made_by.__module__ == "__main__" or "<locals>" in made_by.__qualname__):
                warnings.warn(f"{made_by.__name__} is not in a module, so one process runs it", stacklevel=3)
                return 1
    return jobs
