"""Runs a grid: capacities first, then every policy in every cell with every seed."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from headway import __version__
from headway.config.strict_yaml import Places, convert
from headway.metrics.seeds import Estimate, estimate_of
from headway.workload.generate import generate
from headway.workload.spec import WorkloadSpec
from headway_papers.arena.capacity import FIRST_REQUESTS, capacity
from headway_papers.arena.contestants import Contestant
from headway_papers.arena.grid import Cell, Document, Grid, at_load
from headway_papers.arena.keys import key_of
from headway_papers.arena.metrics import METRICS, Measurement, begin_s, measure
from headway_papers.arena.ranking import Regret, Standing, best_of, regrets, standings
from headway_papers.reproduce.runner import Runner
from headway_papers.reproduce.tasks import Call

Key = tuple[Cell, str, int]
"""Cell, policy and seed."""


class Capacity(Struct, frozen=True):
    """The rate that the reference router sustains on a fleet."""

    fleet: str
    workload: str
    requests_per_s: float
    load: float
    """Factor on the workload's own rate."""


class CellResult(Struct, frozen=True):
    """The results of the policies in a cell."""

    fleet: str
    workload: str
    load: float
    requests_per_s: float
    best: str | None
    """The policy with the best mean of the grid's metric, without oracles."""
    regret: dict[str, Regret]
    """Regret by policy."""
    metrics: dict[str, dict[str, Estimate]]
    """Maps each policy to the means over seeds with 95% intervals."""

    @property
    def name(self) -> str:
        return str(Cell(self.fleet, self.workload, self.load))


class Arena(Struct, frozen=True):
    """The ranking, with the cells and capacities behind it: the output of `headway arena --json`."""

    version: str
    grid: str
    metric: str
    seeds: int
    num_requests: int
    reference: str
    wall_s: float
    num_measured: int
    num_found: int
    """Number of measurements found in the cache."""
    capacities: list[Capacity]
    ranking: list[Standing]
    cells: list[CellResult]
    notes: list[str]


def play(grid: Grid, wanted: frozenset[str], runner: Runner) -> Arena:
    """Measure the wanted policies. Other policies of the grid count if the cache has all of their results.

    Raises HeadwayError if a scenario cannot be run at all.
    """
    began = time.perf_counter()
    runner.key_of = key_of
    capacities = found_capacities(grid, runner)
    loads = {pair: each.load for pair, each in capacities.items()}
    everything = tasks(grid, grid.cells, grid.contestants, grid.seeds, loads)
    results = runner.run({key: task for key, task in everything.items() if key[1] in wanted})
    results |= _known_before(everything, wanted, runner)
    cells = [_cell_result(grid, cell, capacities[cell.fleet, cell.workload], results) for cell in grid.cells]
    oracles = {each.name for each in grid.contestants if each.is_oracle}
    measured = {name for _, name, _ in results}
    names = [each.name for each in grid.contestants if each.name in measured]
    ranking = standings({cell.name: cell.regret for cell in cells}, names, oracles)
    return Arena(
        __version__,
        grid.name,
        grid.spec.metric,
        seeds=len(grid.seeds),
        num_requests=grid.spec.num_requests,
        reference=str(grid.spec.capacity),
        wall_s=time.perf_counter() - began,
        num_measured=runner.num_measured,
        num_found=runner.num_found,
        capacities=list(capacities.values()),
        ranking=ranking,
        cells=cells,
        notes=[*grid.notes, *_failures(results)],
    )


def found_capacities(grid: Grid, runner: Runner) -> dict[tuple[str, str], Capacity]:
    """The capacity of each fleet with each workload under the reference router, common to all policies."""
    reference = Contestant("capacity", {"routing": grid.spec.capacity, "ordering": "fcfs"}, False, True)
    found = runner.run(
        {
            pair: Call(capacity, {"document": _bare(grid, pair, reference), "base_dir": str(grid.base_dir.absolute())})
            for pair in grid.pairs
        }
    )
    return {pair: Capacity(*pair, each["requests_per_s"], each["load"]) for pair, each in found.items()}


def _bare(grid: Grid, pair: tuple[str, str], reference: Contestant) -> Document:
    """The reference scenario: only its router, which sees the fleet without delay.

    It does not depend on the number of requests of a grid's runs, so --quick finds the same capacity.
    """
    document = at_load(grid.document(*pair, reference), grid.base_dir, 1.0, FIRST_REQUESTS)
    document.pop("observe", None)
    return {**document, "name": "capacity", "policies": dict(reference.policies), "seed": 0}


def tasks(
    grid: Grid,
    cells: Sequence[Cell],
    contestants: Sequence[Contestant],
    seeds: Sequence[int],
    loads: Mapping[tuple[str, str], float],
) -> dict[Key, Call]:
    """All runs; runs on the same requests are adjacent."""
    found: dict[Key, Call] = {}
    for cell in cells:
        load = cell.load * loads[cell.fleet, cell.workload]
        documents = {
            each.name: at_load(grid.document(cell.fleet, cell.workload, each), grid.base_dir, load)
            for each in contestants
        }
        warmup_s = _warmup_s(grid, next(iter(documents.values())))
        for seed in seeds:
            for name, document in documents.items():
                arguments = {
                    "document": {**document, "seed": seed},
                    "base_dir": str(grid.base_dir.absolute()),
                    "warmup_s": warmup_s,
                }
                found[cell, name, seed] = Call(measure, arguments)
    return found


def _warmup_s(grid: Grid, document: Document) -> float:
    """Warm-up for all policies and seeds: a share of the time in which the requests of seed 0 begin."""
    rows = generate(convert(document["workload"], WorkloadSpec, Places()), 0, grid.base_dir)
    return grid.spec.warmup_share * float(begin_s(rows.columns).max(initial=0.0))


def _known_before(everything: Mapping[Key, Call], wanted: frozenset[str], runner: Runner) -> dict[Key, Measurement]:
    """The cached results of policies that are not wanted."""
    found: dict[Key, Measurement] = {}
    if runner.cache is None or runner.cache.fresh:
        return found
    for key, task in everything.items():
        if key[1] not in wanted:
            known = runner.cache.find(key_of(task, Path()), dict)
            if known is not None:
                found[key] = known
    return found


def values(
    cell: Cell, name: str, seeds: Sequence[int], metric: str, results: Mapping[Key, Measurement]
) -> list[float] | None:
    """A metric by seed; None if a seed has no value."""
    found = [results.get((cell, name, seed), {}).get(metric) for seed in seeds]
    known = [float(each) for each in found if each is not None]
    return known if len(known) == len(found) else None


def _cell_result(grid: Grid, cell: Cell, own: Capacity, results: Mapping[Key, Measurement]) -> CellResult:
    names = [each.name for each in grid.contestants]
    oracles = {each.name for each in grid.contestants if each.is_oracle}
    better = METRICS[grid.spec.metric].better
    known = {
        name: found
        for name in names
        if (found := values(cell, name, grid.seeds, grid.spec.metric, results)) is not None
    }
    metrics = {
        name: {
            metric: _estimate(found)
            for metric in METRICS
            if (found := values(cell, name, grid.seeds, metric, results)) is not None
        }
        for name in known
    }
    return CellResult(
        cell.fleet,
        cell.workload,
        cell.load,
        cell.load * own.requests_per_s,
        best_of(known, better, oracles),
        regrets(known, better, oracles),
        metrics,
    )


def _estimate(found: Sequence[float]) -> Estimate:
    return estimate_of(found) or Estimate(found[0], found[0], found[0])


def _failures(results: Mapping[Key, Measurement]) -> list[str]:
    """The distinct reasons for which policies could not run in some or all cells."""
    cells: dict[tuple[str, str], set[Cell]] = {}
    for (cell, name, _), each in results.items():
        if "error" in each:
            cells.setdefault((name, str(each["error"])), set()).add(cell)
    return [f"{name}: not in {len(where)} cells: {reason}" for (name, reason), where in cells.items()]
