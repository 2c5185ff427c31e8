"""Rehearsals: the simulator interface of planners, and a cache of results under digests of their inputs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
from msgspec import structs

from headway import __version__
from headway.catalog import is_repository
from headway.catalog.errors import ErrorClass
from headway.config import strict_yaml
from headway.config.scenario import Changes, Scenario, StepTimes, listed, variants
from headway.config.spec import PolicySpecs
from headway.config.strict_yaml import Places
from headway.control.policies import Policies
from headway.core.errors import HeadwayError
from headway.core.record import Records
from headway.metrics.latency import DefaultSlo, Sample, nothing_measured, sample
from headway.metrics.usage import ReplicaUsage, fullest
from headway.report.model_error import error_class
from headway.workload.atomic_file import write_text
from headway.workload.sources import RequestSource

T = TypeVar("T")
Watch = Callable[[RequestSource], RequestSource]
Progress = Callable[[int, int], None]
"""Called with the number of rehearsals done, and the number expected in all."""
NOT_SIMULATING = ("cli", "report")
"""Parts of Headway that no simulation depends on."""


OF_HARDWARE = frozenset((
    "name", "gpu", "replicas", "tp", "region", "usd_per_gpu_hour", "kv_capacity_tokens", "coefficients", "endpoints",
    "api_key", "api", "processes", "kubernetes", "min_replicas", "max_replicas", "slots",
    "scheduled_min_replicas",
))  # fmt: skip
"""Keys of a pool that a plan sets, or that belong to the pool's own GPUs. The other keys describe model and engine."""
OF_SHAPE = frozenset(("pp", "ep", "dp"))


def model_keys(pool: Mapping[str, Any], without: frozenset[str] = frozenset()) -> dict[str, Any]:
    """The keys of a pool that are valid on any GPU."""
    return {key: value for key, value in pool.items() if key not in OF_HARDWARE and key not in without}


class Simulator(Protocol):
    """Simulates scenarios with a single variant. Can be pickled for worker processes.

    Every method raises HeadwayError if the scenario cannot be run.
    """

    def records(self, scenario: Scenario, watch: Watch | None = None) -> Records:
        """Simulate. A planner reads the few metrics that it needs, because a whole summary takes several times as long.

        `watch` may wrap the source of requests, and may end the run with its own exception.
        """

    def policies(self, scenario: Scenario) -> Policies:
        """The policies with which a scenario is rehearsed."""


class Source(NamedTuple):
    """A scenario to plan for: its keys, their places in the file, and the folder where relative paths start."""

    document: dict[str, Any]
    places: Places
    base_dir: Path

    def changed(self, changes: Changes) -> Source:
        return Source(*strict_yaml.change(self.document, self.places, changes), self.base_dir)

    def with_slo(self, slo: Mapping[str, float], option: str = "slo") -> Source:
        """With SLOs of requests without their own. `option`: what gave them, for errors."""
        if not slo:
            return self
        document = {**self.document, "slo": self.document.get("slo") or {}}
        named: Changes = {("slo", key): (option, value) for key, value in slo.items()}
        return self._replace(document=document).changed(named)


@dataclass(frozen=True)
class Resources:
    """What a plan rehearses with."""

    simulator: Simulator
    cache_dir: Path | None = None
    """None: no rehearsal is found or kept."""
    progress: Progress | None = None
    pool: Executor | None = None
    """Worker processes; None: none."""

    @contextmanager
    def requests(self) -> Iterator[Path]:
        """A folder for files of requests: in the cache, or for as long as the plan is made."""
        if self.cache_dir is not None:
            yield self.cache_dir / "requests"
        else:
            with TemporaryDirectory() as folder:
                yield Path(folder)


def first_policies(scenario: Scenario) -> str:
    """A note that only the first of several sets of policies is planned; empty if there is one.

    Sets that differ only in their scalers count as one.
    """
    sets = [structs.replace(each.spec.policies, scaling=None) for each in variants(scenario)]
    if all(each == sets[0] for each in sets):
        return ""
    first = scenario.spec.variants[0].name if scenario.spec.variants else _named(sets[0])
    return f"the scenario has {len(sets)} sets of policies: this plan is for the first, {first}"


def _named(policies: PolicySpecs) -> str:
    chosen = [policies.routing, policies.ordering]
    return " and ".join(each if isinstance(each, str) else str(listed(each)[0]) for each in chosen)


def counted(records: Records, warmup_s: float, slo: DefaultSlo | None, until_s: float = inf) -> Sample:
    """The requests on which a verdict is based. HeadwayError with the cause if there are none."""
    found = sample(records, warmup_s, slo, until_s=until_s)
    if not len(found):
        raise HeadwayError(nothing_measured(records.workload["arrival_s"], warmup_s))
    return found


def error_class_of(scenario: Scenario, records: Records, used: ReplicaUsage, measured: Sample) -> ErrorClass:
    """The class of measured runs with similar errors: by a rehearsal's pools, its fullest replica and the requests'
    waits."""
    step_times = StepTimes(scenario).coefficients
    pools = [(pool.model, step_times[pool.name]) for pool in scenario.fleet.all_pools]
    waited_s, e2e_s = (each[measured.finished].sum() for each in (measured.queueing_s, measured.e2e_s))
    return error_class(pools, fullest(used, records.replicas), float(waited_s / e2e_s) if e2e_s > 0 else 0.0)


class _Entry(msgspec.Struct, frozen=True):
    key: str
    result: msgspec.Raw


@dataclass
class RehearsalCache:
    """A folder with one JSON file per result. Files that cannot be decoded are ignored."""

    folder: Path | None
    """None: no result is read or stored."""
    fresh: bool = False
    """Ignore stored results, so that everything is simulated again."""
    num_found: int = 0
    notes: list[str] = field(default_factory=list)

    def find(self, key: str, kind: Any) -> Any:
        """The result under a key, decoded as `kind`; None if there is none."""
        if self.folder is None or self.fresh:
            return None
        file = self.folder / f"{key}.json"
        if not file.exists():
            return None
        try:
            entry = msgspec.json.decode(file.read_bytes(), type=_Entry)
            result = msgspec.json.decode(entry.result, type=kind) if entry.key == key else None
        except (OSError, msgspec.DecodeError):
            result = None
        if result is None:
            self.notes.append(f"{file}: not a result that Headway wrote; ignored, and simulated anew")
        else:
            self.num_found += 1
        return result

    def keep(self, key: str, result: Any) -> None:
        """Write a result. HeadwayError if the folder cannot be written."""
        if self.folder is not None:
            entry = _Entry(key, msgspec.Raw(msgspec.json.encode(result)))
            write_text(self.folder / f"{key}.json", msgspec.json.encode(entry).decode())

    def get(self, key: str, kind: type[T], simulate: Callable[[], T]) -> T:
        result: T | None = self.find(key, kind)
        if result is None:
            result = simulate()
            self.keep(key, result)
        return result


class RehearsalRunner:
    """Runs rehearsals one by one or in worker processes. The cache stores each when it ends, so that a plan can
    resume."""

    def __init__(
        self, cache: RehearsalCache, pool: Executor | None, progress: Callable[[int, int], None] | None, total: int
    ) -> None:
        self._cache, self._pool, self._progress = cache, pool, progress
        self.total = total
        """Total number of expected rehearsals."""
        self.num_done = 0

    @property
    def num_simulated(self) -> int:
        return self.num_done - self._cache.num_found

    def run(self, tasks: Sequence[tuple[str, Callable[[], T]]], kind: type[T]) -> list[T]:
        """The results of (key, rehearsal) pairs, in order. Rehearsals for workers must be picklable."""
        found: dict[int, T] = {}
        for i, (key, _) in enumerate(tasks):
            known: T | None = self._cache.find(key, kind)
            if known is not None:
                found[i] = known
                self._count()
        left = [i for i in range(len(tasks)) if i not in found]
        if self._pool is None:
            for i in left:
                found[i] = self._keep(tasks[i][0], tasks[i][1]())
        else:
            futures = {self._pool.submit(tasks[i][1]): i for i in left}
            for future in as_completed(futures):
                i = futures[future]
                found[i] = self._keep(tasks[i][0], future.result())
        return [found[i] for i in range(len(tasks))]

    def _keep(self, key: str, result: T) -> T:
        self._cache.keep(key, result)
        self._count()
        return result

    def _count(self) -> None:
        self.num_done += 1
        if self._progress is not None:
            self._progress(self.num_done, max(self.total, self.num_done))


def content_key(
    facts: Any, paths: Iterable[Path] = (), digests: Iterable[bytes] = (), without: tuple[str, ...] = ()
) -> str:
    """A digest of facts (fit for JSON), of files, of further digests, and of the simulating code.

    `without` names parts of the code to leave out, such as `policies/routing`.
    """
    digest = hashlib.sha256(msgspec.json.encode([__version__, _code(without), facts]))
    for each in digests:
        digest.update(each)
    for path in paths:
        digest.update(_folder_digest(path) if path.is_dir() else _file_digest(path, path.stat().st_mtime_ns))
    return digest.hexdigest()[:32]


def scenario_key(chosen: Scenario, *facts: Any) -> str:
    """A digest of a scenario without its name, its coefficients, the named files, and further facts."""
    spec, coefficients = structs.replace(chosen.spec, name=""), StepTimes(chosen).coefficients
    paths = _paths(msgspec.to_builtins([spec.workload, spec.fleet, spec.combos]))
    described = [spec, chosen.fleet, list(coefficients.values()), *facts]
    return content_key(
        described, (chosen.base_dir / path for path in paths if not is_repository(path, chosen.base_dir))
    )


def _paths(section: Any) -> list[str]:
    """The files that a section names, in the order of their keys."""
    found, left = list[str](), [section]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            names = {name: each for name, each in value.items() if isinstance(each, str)}
            found += [each for name, each in names.items() if name in ("path", "trace", "config", "coefficients")]
            value = [each for name, each in value.items() if name not in names]
        if isinstance(value, list | tuple):
            left += reversed(value)
    return found


def _folder_digest(path: Path) -> bytes:
    """A digest of the names, sizes and times of a folder's files. Contents are not read, because a model's weights have
    gigabytes."""
    found = sorted(each for each in path.rglob("*") if each.is_file())
    return repr([(str(each.relative_to(path)), (s := each.stat()).st_size, s.st_mtime_ns) for each in found]).encode()


@cache
def _file_digest(path: Path, _changed_ns: int) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


@cache
def _code(without: tuple[str, ...] = ()) -> str:
    digest = hashlib.sha256()
    package = Path(__file__).parents[1]
    for path in sorted(package.rglob("*")):
        within = path.relative_to(package)
        is_left_out = within.parts[0] in NOT_SIMULATING or any(map(within.is_relative_to, without))
        if not is_left_out and path.suffix in (".py", ".json", ".yaml", ".csv"):
            digest.update(path.read_bytes())
    return digest.hexdigest()
