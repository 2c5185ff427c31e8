"""One long run in several processes: models whose requests never meet are simulated separately, with the same records.

Each model has its own service: router, hold queue, admission and replicas, in any number of regions and pools. Services
share nothing unless the scenario couples them (`what_couples`); then one process simulates all.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from headway.config.limits import limits_of
from headway.config.scenario import Scenario, StepTimes
from headway.control.hold_queue import is_sharing
from headway.control.observe import Scrape
from headway.control.policies import Policies
from headway.core.column import Column
from headway.core.record import Columns, Records, ReplicaRecord
from headway.policies.resolve import PolicyChoice
from headway.scenario.policies import policies_of
from headway.scenario.policy_errors import as_policy_errors
from headway.scenario.processes import available_cores, processes
from headway.sim.cluster import simulate
from headway.sim.row_order import RowOrder
from headway.sim.shards import TABLES, PlacedRows, ShardRecords, merged
from headway.workload.sources import RequestSource, TraceSource
from headway.workload.spill import BLOCK_ROWS, SpillFile
from headway.workload.table import NAMED, Prefix, Workload

if TYPE_CHECKING:
    from concurrent.futures import Executor

Longs = npt.NDArray[np.int64]
LONG_REQUESTS = 100_000
"""Number of requests from which a run uses several processes by default."""
_INDEX = "columns.json"


def simulate_apart(
    scenario: Scenario, policies: Policies, source: RequestSource, jobs: int | None, pool: Executor | None = None
) -> Records | str:
    """The records of a scenario with one variant, from up to `jobs` processes, or from a pool whose processes see the
    temporary folder of this one. A string says why one process simulates all.

    With `jobs` None: one process for each model in a pool, or one per core if the run is long.
    """
    if jobs is None and pool is None:
        jobs = available_cores() if (source.num_requests or 0) >= LONG_REQUESTS else 1
    if jobs == 1:
        return "one job was asked for"
    if not isinstance(source, TraceSource):
        return "its requests depend on answers"
    if (coupling := what_couples(scenario, policies)) is not None:
        return f"{coupling} may let models affect each other"
    shards = split(scenario, source.workload, jobs or len(scenario.fleet.pools))
    if shards is None:
        return "its requests are for one model, or name none"
    with tempfile.TemporaryDirectory(prefix="headway-") as name:
        folder = Path(name)
        tasks = [_Shard(scenario, folder / str(i), len(ids)) for i, ids in enumerate(shards)]
        for task, ids in zip(tasks, shards, strict=True):
            task.write(source.workload, ids)
        own = processes(jobs or 1, len(tasks)) if pool is None else nullcontext(pool)
        with own as workers:
            assert workers is not None
            parts = list(workers.map(_Shard.simulate, tasks))
        read = [task.read(part) for task, part in zip(tasks, parts, strict=True)]
        whole = merged(read, source.workload, scenario.spec.simulation.until_s is not None)
        return "requests moved, or were still there at the end" if whole is None else whole


NUMBERED = ("dualmap", "prefix-affinity")
"""Routers whose choices depend on the numbers of replicas, besides their order."""


def what_couples(scenario: Scenario, policies: Policies, only_metrics: bool = False) -> str | None:
    """The first part of a scenario through which its models may affect each other; None: there is none.

    `only_metrics`: rows of the records may be in another order, and each model is simulated without the replicas of the
    others, so that its own have other numbers.
    """
    spec, fleet = scenario.spec, scenario.fleet
    used = [policies.router, policies.ordering, policies.admission]
    is_own = [
        isinstance(each, PolicyChoice) and not each.made_by.__module__.startswith("headway.policies.")
        for each in used
        if each is not None
    ]
    reasons = {
        "policies.scaling": policies.scaler is not None,
        "policies.migration": policies.migration is not None,
        "cascade": policies.cascade is not None,
        "combos": bool(fleet.combos) and not only_metrics,
        "faults": bool(spec.faults),
        "roles": bool(spec.roles),
        "observe": spec.observe != Scrape(),
        "fallback": bool(fleet.fallbacks.models) or any(pool.hosted is not None for pool in fleet.pools),
        "simulation.limits": bool(limits_of(spec)),
        "a policy that shares among tenants": is_sharing(policies.ordering()),
        "a policy of one's own": any(is_own),
        "a shared KV store": fleet.kv_store is not None,
        "a router by numbers": only_metrics and getattr(policies.router, "name", "") in NUMBERED,
    }
    return next((name for name, couples in reasons.items() if couples), None)


def split(scenario: Scenario, rows: Workload, most: int) -> list[Longs] | None:
    """The request ids of each shard, at most `most` shards; None: there is one shard, or a request names no model.

    Models are assigned by decreasing tokens, each to the shard with the fewest tokens so far.
    """
    pools = [pool for pool in scenario.fleet.pools if pool.replicas]
    names = {pool.model.name: pool.names for pool in pools}
    models = list(names)
    service_of: dict[str, int] = {}
    for model, own in names.items():
        for name in own:
            service_of.setdefault(name, models.index(model))
    if len(models) < 2 or "model" not in rows.columns:
        return None
    of_code = np.array([service_of.get(name, -1) for name in rows.models], "i8")
    weights = np.zeros(len(models))
    for start in range(0, len(rows), BLOCK_ROWS):
        block = rows.slice(start, start + BLOCK_ROWS)
        services = of_code[block.columns["model"]]
        if (services < 0).any():
            return None
        weights += np.bincount(services, block.prompt_tokens + block.output_tokens, len(models))
    loads, shard_of = np.zeros(min(most, len(models))), np.zeros(len(models), "i8")
    for service in np.argsort(-weights, kind="stable").tolist():
        shard_of[service] = loads.argmin()
        loads[shard_of[service]] += weights[service]
    found = _ids_by_code(shard_of[of_code], rows.columns["model"], len(loads))
    return found if len(found) > 1 else None


def _ids_by_code(shard_of: Longs, codes: npt.NDArray[np.int16], num_shards: int) -> list[Longs]:
    """The ids of each shard that has any, by the shard of each model's code."""
    found = [Column(np.dtype(np.int64), SpillFile) for _ in range(num_shards)]
    for start in range(0, len(codes), BLOCK_ROWS):
        shards = shard_of[codes[start : start + BLOCK_ROWS]]
        for shard, ids in enumerate(found):
            ids.extend(start + np.flatnonzero(shards == shard))
    return [values for ids in found if len(values := ids.values())]


@dataclass(frozen=True)
class _Part:
    """The result of one process, besides its files."""

    moves: Columns
    replicas: tuple[ReplicaRecord, ...]
    num_issued: int
    end_s: float
    sizes: Mapping[str, int]


@dataclass(frozen=True)
class _Shard:
    """A subset of a scenario's requests, with input and records as files in a folder."""

    scenario: Scenario
    folder: Path
    num_rows: int

    def write(self, workload: Workload, ids: Longs) -> None:
        """Write the shard's requests, numbers and names to its folder."""
        rows = workload.take(ids)
        prefix: Columns = {}
        if rows.prefix is not None:
            prefix = {"offsets": rows.prefix.offsets, "ids": rows.prefix.ids, "tokens": rows.prefix.tokens}
        for name, columns in (("rows", rows.columns), ("prefix", prefix), ("shard", {"ids": ids})):
            _save(self.folder / name, columns)
        names = {kind: getattr(workload, kind) for kind in NAMED.values()}
        (self.folder / "names.json").write_bytes(msgspec.json.encode(names))

    def simulate(self) -> _Part:
        """Simulate the requests on the whole fleet, and write the records."""
        scenario = self.scenario
        spec, policies = scenario.spec, policies_of(scenario)
        source = TraceSource(self._rows(), _load(self.folder / "shard", self.num_rows)["ids"].data)
        order = RowOrder(source)
        with as_policy_errors(policies):
            records = simulate(
                scenario.fleet,
                source,
                policies,
                seed=spec.seed,
                step=spec.simulation.step,
                until_s=spec.simulation.until_s,
                line=StepTimes(scenario),
                pacer=spec.pacer,
                order=order,
            )
        sizes = {}
        for name in TABLES:
            columns, places = getattr(records, name), getattr(order, name)
            sizes[name] = places.num_rows
            _save(self.folder / name, columns)
            _save(self.folder / f"{name} places", places.columns())
        return _Part(records.moves, records.replicas, source.num_issued, records.end_s, sizes)

    def read(self, part: _Part) -> ShardRecords:
        tables = {}
        for name, num in part.sizes.items():
            places = _load(self.folder / f"{name} places", num)
            times_s, codes = np.asarray(places["times_s"], "f8"), np.asarray(places["codes"], "i8")
            tables[name] = PlacedRows(_load(self.folder / name, num), times_s, codes)
        return ShardRecords(tables, part.moves, part.replicas, part.num_issued, part.end_s)

    def _rows(self) -> Workload:
        names = msgspec.json.decode((self.folder / "names.json").read_bytes(), type=dict[str, tuple[str, ...]])
        prefix: dict[str, Any] = _load(self.folder / "prefix", 0)
        columns = _load(self.folder / "rows", self.num_rows)
        return Workload(columns, prefix=Prefix(**prefix) if prefix else None, **names)


def _save(folder: Path, columns: Mapping[str, npt.NDArray[Any]]) -> None:
    """Write one file per column, and a list of names; columns that share memory are written once."""
    folder.mkdir(parents=True)
    listed = [(name, column.strides == (0,) and len(column) > 0) for name, column in columns.items()]
    (folder / _INDEX).write_bytes(msgspec.json.encode(listed))
    for i, (name, is_constant) in enumerate(listed):
        np.save(folder / f"{i}.npy", columns[name][:1] if is_constant else columns[name])


def _load(folder: Path, num_rows: int) -> Columns:
    """The columns in a folder, mapped into memory."""
    columns: Columns = {}
    listed = msgspec.json.decode((folder / _INDEX).read_bytes(), type=list[tuple[str, bool]])
    for i, (name, is_constant) in enumerate(listed):
        values = np.load(folder / f"{i}.npy", mmap_mode="r")
        columns[name] = np.broadcast_to(values[0], num_rows) if is_constant else values
    return columns
