"""The file of a grid: fleets, workloads, loads, seeds and policies. Each cell becomes a scenario."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from headway.config import strict_yaml
from headway.config.scenario import with_absolute_paths
from headway.config.spec import PolicySpec
from headway.config.strict_yaml import Places
from headway.core.errors import HeadwayError, unknown
from headway.planning.capacity.rehearsal import with_load
from headway.scenario import assemble
from headway.workload.spec import WorkloadSpec, resolved
from headway_papers.arena.contestants import Contestant, contestants
from headway_papers.arena.metrics import METRICS

Document = dict[str, Any]
QUICK_REQUESTS, QUICK_SEEDS = 5, 3
"""--quick divides the requests of a run by the first number, and runs the second number of seeds."""


class PolicyList(Struct, frozen=True, forbid_unknown_fields=True):
    """The ranked policies, each alone or in a set of several kinds."""

    routing: Literal["all"] | tuple[PolicySpec, ...] = ()
    """Routers; `all`: every registered one."""
    ordering: Literal["all"] | tuple[PolicySpec, ...] = ()
    """Orderings, with the routing of `scenario`."""
    scaling: Literal["all"] | tuple[PolicySpec, ...] = ()
    """Scalers, with the routing of `scenario`."""
    sets: dict[str, dict[str, Any]] = {}
    """Maps each name to the keys of a scenario's `policies`. Further keys: `observe` in place of the cell's, and
    `oracle: true` for a set with knowledge that no real one has; it is shown but cannot be the best."""


class GridSpec(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The keys of a grid file."""

    fleets: Annotated[dict[str, dict[str, Any]], Meta(min_length=1)]
    """Maps each name to the keys of a scenario, such as `fleet` or `combos`."""
    workloads: Annotated[dict[str, dict[str, Any]], Meta(min_length=1)]
    """Maps each name to the section `workload` of a scenario."""
    if_present: tuple[str, ...] = ()
    """Workloads that are left out, with a note, if the file of their trace is missing."""
    policies: PolicyList
    """The ranked policies."""
    loads: Annotated[tuple[Annotated[float, Meta(gt=0)], ...], Meta(min_length=1)] = (0.3, 0.7, 0.95, 1.3)
    """Arrival rates as shares of the capacity of the fleet with the workload."""
    seeds: Annotated[int, Meta(ge=1)] = 5
    """Number of seeds. With one seed, all policies get the same requests."""
    num_requests: Annotated[int, Meta(ge=1)] = 2000
    """Requests of a run, unless the workload sets `num_requests` or `duration_s`."""
    warmup_share: Annotated[float, Meta(ge=0, lt=1)] = 0.1
    """The first share of the arrivals' time, in which requests do not count."""
    metric: str = "goodput_rps"
    """The metric from which regret is computed."""
    capacity: PolicySpec = "lmetric"
    """The router whose stable rate defines the capacity."""
    scenario: dict[str, Any] = {}
    """Keys of a scenario for all cells, such as `observe`. A fleet's keys take precedence."""


@dataclass(frozen=True, order=True)
class Cell:
    """One fleet with one workload under one load."""

    fleet: str
    workload: str
    load: float

    def __str__(self) -> str:
        return f"{self.fleet} / {self.workload} / {100 * self.load:g}%"


@dataclass(frozen=True)
class Grid:
    """A validated grid: its names are known, and its scenarios can be assembled."""

    name: str
    spec: GridSpec
    contestants: tuple[Contestant, ...]
    base_dir: Path
    places: Places
    data: Path | None
    """A folder of traces, searched for files that are not in the grid's own folder."""
    notes: tuple[str, ...] = ()

    @property
    def seeds(self) -> range:
        return range(self.spec.seeds)

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Each fleet with each workload."""
        return [(fleet, workload) for fleet in self.spec.fleets for workload in self.spec.workloads]

    @property
    def cells(self) -> list[Cell]:
        return [Cell(*pair, load) for pair in self.pairs for load in self.spec.loads]

    def document(self, fleet: str, workload: str, contestant: Contestant) -> Document:
        """The scenario of a pair at its workload's own rate."""
        common, own = self.spec.scenario, self.spec.fleets[fleet]
        policies = {**common.get("policies", {}), **own.get("policies", {}), **contestant.policies}
        observe = {} if contestant.observe is None else {"observe": contestant.observe}
        return {
            **common,
            **own,
            **observe,
            "name": f"{fleet}-{workload}",
            "workload": self.workload(workload),
            "policies": policies,
        }

    def workload(self, name: str) -> Document:
        """The workload's section, with the number of requests and the rate."""
        with self.places.at("workloads", name):
            section = dict(self.spec.workloads[name])
            trace = section.get("trace")
            if trace is not None:
                trace = {"path": trace} if isinstance(trace, str) else dict(trace)
                file = _find_file(trace["path"], self.base_dir, self.data)
                if file is None:
                    raise HeadwayError(f"{trace['path']}: no such file beside the grid, or in the folder of --data")
                trace["path"] = str(file)
                if "arrivals" not in section:
                    return {**section, "trace": {"limit": self.spec.num_requests, **trace}}
                section["trace"] = trace
            if not {"num_requests", "duration_s"} & set(section):
                section["num_requests"] = self.spec.num_requests
            if "builtin" in section and not {"arrivals", "concurrency"} & set(section):
                known = resolved(strict_yaml.convert(section, WorkloadSpec, Places()))
                section["arrivals"] = strict_yaml.plain(known.arrivals)
            return section

    def check(self) -> None:
        """Raises HeadwayError if a fleet, a workload or a policy of the grid is invalid."""
        reference = Contestant("capacity", {"routing": self.spec.capacity}, False, True)
        for fleet, workload in self.pairs:
            self._assemble(fleet, workload, reference, ("capacity",))
        for each in self.contestants:
            if each.is_named:
                self._assemble(*self.pairs[0], each, ("policies",))

    def _assemble(self, fleet: str, workload: str, contestant: Contestant, key: tuple[str, ...]) -> None:
        document = self.document(fleet, workload, contestant)
        lines: dict[strict_yaml.Key, int] = {}
        for at, line in self.places.lines.items():
            if at[:1] == ("scenario",):
                lines[at[1:]] = line
            elif at[:2] == ("fleets", fleet):
                lines[at[2:]] = line
            elif at[:2] == ("workloads", workload):
                lines["workload", *at[2:]] = line
        own = self.places.lines.get((*key, "sets", contestant.name), self.places.lines.get(key))
        if own is not None:
            lines |= {("policies", *each): own for each in ((), *((name,) for name in contestant.policies))}
        assemble(document, Places(self.places.file, lines), self.base_dir)


def read(
    path: Path, *, quick: bool = False, seeds: int | None = None, data: Path | None = None, metric: str | None = None
) -> Grid:
    """Read the grid in a file. Raises HeadwayError if it cannot be run."""
    document, places = strict_yaml.read(path)
    spec = strict_yaml.convert(document, GridSpec, places)
    if spec.metric not in METRICS:
        raise unknown("metric", spec.metric, METRICS, places.where(("metric",)))
    if metric is not None:
        if metric not in METRICS:
            raise unknown("metric", metric, METRICS, "--metric")
        spec = _changed(spec, metric=metric)
    found, notes = contestants(spec.policies, spec.scenario, path.parent, places)
    spec, left_out = _without_missing(spec, path.parent, data, places)
    if quick:
        num = max(spec.num_requests // QUICK_REQUESTS, 1)
        workloads = {name: _quick(section) for name, section in spec.workloads.items()}
        spec = _changed(spec, num_requests=num, workloads=workloads, seeds=min(spec.seeds, QUICK_SEEDS))
    if seeds is not None:
        spec = _changed(spec, seeds=seeds)
    return Grid(path.stem, spec, found, path.parent, places, data, (*notes, *left_out))


def chosen(grid: Grid, only: Collection[str]) -> tuple[Grid, frozenset[str]]:
    """The grid restricted to the named fleets and workloads, and the named policies.

    If no name of a kind is given, all of that kind are kept.
    """
    spec = grid.spec
    policies = {each.name for each in grid.contestants}
    for name in only:
        if name not in {*spec.fleets, *spec.workloads, *policies}:
            raise unknown("fleet, workload or policy", name, {*spec.fleets, *spec.workloads, *policies}, "--only")
    fleets, workloads = _selected(spec.fleets, only), _selected(spec.workloads, only)
    kept = replace(grid, spec=_changed(spec, fleets=fleets, workloads=workloads))
    kept.check()
    return kept, frozenset(policies & set(only) or policies)


def at_load(document: Document, base_dir: Path, load: float, num_requests: int | None = None) -> Document:
    """The scenario with `load` times its workload's rate, and the same or the given number of requests."""
    own = document["workload"]
    workload = with_load(own, load)
    if "num_requests" in own:
        workload["num_requests"] = own["num_requests"] if num_requests is None else num_requests
    return with_absolute_paths({**document, "workload": workload}, base_dir)


def _without_missing(spec: GridSpec, base_dir: Path, data: Path | None, places: Places) -> tuple[GridSpec, list[str]]:
    """The grid without the workloads of `if_present` whose traces are missing, and notes on them."""
    kept, notes = dict(spec.workloads), []
    for i, name in enumerate(spec.if_present):
        if name not in spec.workloads:
            raise unknown("workload", name, spec.workloads, places.where(("if_present", i)))
        trace = spec.workloads[name].get("trace", "")
        file = trace.get("path", "") if isinstance(trace, Mapping) else trace
        if _find_file(str(file), base_dir, data) is None:
            notes.append(f"{name}: left out, as {file} is not in the folder of --data")
            del kept[name]
    if not kept:
        raise places.error(("if_present",), "; ".join(notes))
    return _changed(spec, workloads=kept), notes


def _find_file(path: str, base_dir: Path, data: Path | None) -> Path | None:
    """A file in the grid's folder, in the data folder, or in one of its subfolders."""
    folders = [base_dir, *([] if data is None else [data, *sorted(data.glob("*/"))])]
    return next(((folder / path).absolute() for folder in folders if (folder / path).is_file()), None)


def _quick(section: Mapping[str, Any]) -> Document:
    shorter = {name: section[name] / QUICK_REQUESTS for name in ("num_requests", "duration_s") if name in section}
    if "num_requests" in shorter:
        shorter["num_requests"] = max(int(shorter["num_requests"]), 1)
    trace = section.get("trace")
    if isinstance(trace, Mapping) and "limit" in trace:
        shorter["trace"] = {**trace, "limit": max(trace["limit"] // QUICK_REQUESTS, 1)}
    return {**section, **shorter}


def _selected(named: Mapping[str, Document], only: Collection[str]) -> dict[str, Document]:
    return {name: each for name, each in named.items() if name in only} or dict(named)


def _changed(spec: GridSpec, **values: Any) -> GridSpec:
    return GridSpec(**{name: values.get(name, getattr(spec, name)) for name in spec.__struct_fields__})
