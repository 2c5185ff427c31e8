"""Rehearsals: the simulator interface of planners, and a cache of results under digests of their inputs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import msgspec
from msgspec import structs

from headway import __version__
from headway.catalog import is_repository
from headway.catalog.errors import ErrorClass
from headway.config import strict_yaml
from headway.config.scenario import Changes, Scenario, StepTimes, listed, variants
from headway.config.spec import PolicySpecs, Spec
from headway.config.strict_yaml import Places
from headway.config.user_modules import own_modules
from headway.control.policies import Policies
from headway.core.errors import HeadwayError
from headway.core.record import Records
from headway.metrics.latency import DefaultSlo, Sample, nothing_measured, sample
from headway.metrics.usage import ReplicaUsage, fullest
from headway.planning.source_digests import source_digest
from headway.report.model_error import error_class
from headway.workload.atomic_file import write_text
from headway.workload.sources import RequestSource

T = TypeVar("T")
R = TypeVar("R")
Watch = Callable[[RequestSource], RequestSource]
Progress = Callable[[int, int], None]
"""Called with the number of completed and the number of expected rehearsals."""
NOT_SIMULATING = ("cli",)
"""Parts of Headway on which no result depends."""
SIMULATING = "headway.scenario.run"
"""The module that simulates, with what it imports."""


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

    def couples(self, scenario: Scenario) -> bool:
        """Whether the models of a scenario may affect each other, or a replica's number matters. If not, its records
        are those of its models, each simulated with its own replicas and its own requests."""


class Source(NamedTuple):
    """A scenario to plan for: its keys, their places in the file, and the folder where relative paths start."""

    document: dict[str, Any]
    places: Places
    base_dir: Path

    def changed(self, changes: Changes) -> Source:
        return Source(*strict_yaml.change(self.document, self.places, changes), self.base_dir)

    def with_slo(self, slo: Mapping[str, float], option: str = "slo") -> Source:
        """The scenario with SLOs for requests without their own. `option` names their origin in errors."""
        if not slo:
            return self
        document = {**self.document, "slo": self.document.get("slo") or {}}
        named: Changes = {("slo", key): (option, value) for key, value in slo.items()}
        return self._replace(document=document).changed(named)


@dataclass(frozen=True)
class Resources:
    """The cache and the worker processes of a plan's rehearsals."""

    simulator: Simulator
    cache_dir: Path | None = None
    """The cache folder; None: results are neither read nor stored."""
    progress: Progress | None = None
    pool: Executor | None = None
    """Worker processes; None: rehearsals run in this process."""

    @contextmanager
    def requests(self) -> Iterator[Path]:
        """A folder for request files: in the cache, or temporary during the plan."""
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
    """The requests on which a verdict is based. Raises HeadwayError with the cause if there are none."""
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
    """The folder; None: results are neither read nor stored."""
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
        """Write a result. Raises HeadwayError if the folder cannot be written."""
        if self.folder is not None:
            entry = _Entry(key, msgspec.Raw(msgspec.json.encode(result)))
            write_text(self.folder / f"{key}.json", msgspec.json.encode(entry).decode())


@dataclass(frozen=True)
class Rehearsal(Generic[T]):
    """A scenario to simulate, in any process, and the metrics to compute from its records."""

    scenario: Scenario
    measure: Callable[[Scenario, Records], T]
    """The metrics; picklable: a module's function, or a partial of one."""
    kind: Any
    """The type of the metrics, for the cache; None: they are not kept."""
    facts: tuple[Any, ...] = ()
    """Further inputs of the metrics besides the scenario, as JSON values."""
    failed: Callable[[HeadwayError], T] | None = None
    """The result of a scenario that cannot be simulated or measured; None: the error is raised."""
    failures: type[HeadwayError] = HeadwayError
    """The class of errors that give the result of `failed`."""
    watch: Watch | None = None
    """May wrap the source of requests, and may end the run with an error; picklable."""

    def simulated(self, simulator: Simulator) -> T:
        try:
            return self.measure(self.scenario, simulator.records(self.scenario, self.watch))
        except HeadwayError as error:
            if self.failed is None or not isinstance(error, self.failures):
                raise
            return self.failed(error)


class Rehearsals:
    """Runs the rehearsals of a plan: from the cache, in this process, or in worker processes.

    The cache stores each result at once, so that an interrupted plan can resume. Several threads may use it.
    """

    def __init__(self, resources: Resources, expected: int = 0, remembers: bool = False) -> None:
        """`expected`: total number of rehearsals, for the progress. `remembers`: whether to keep results if the plan
        has no cache."""
        self.resources, self.expected = resources, expected
        self.num_done = self.num_simulated = 0
        self._cache = RehearsalCache(resources.cache_dir)
        self._remembered: dict[str, Any] | None = {} if remembers else None
        self.keeps = remembers or resources.cache_dir is not None
        """Whether results are kept at all. If not, nothing needs a key."""
        self.stores = resources.cache_dir is not None
        """Whether results outlive this process, so that their keys cover the code."""
        self._lock = Lock()
        """Held while the cache or a counter is used."""

    @property
    def num_found(self) -> int:
        return self._cache.num_found

    @property
    def counted(self) -> str:
        return f"{self.num_simulated} simulated, {self.num_found} found in the cache"

    def known(self, key: str, kind: Any) -> Any:
        """The result under a key; None if there is none."""
        with self._lock:
            if self._remembered is not None and key in self._remembered:
                return self._remembered[key]
            return self._cache.find(key, kind)

    def keep(self, key: str, result: Any) -> None:
        with self._lock:
            self._cache.keep(key, result)
            if self._remembered is not None:
                self._remembered[key] = result

    def find(self, wanted: Rehearsal[T]) -> T | None:
        """A rehearsal's kept result; None if there is none."""
        key = self._key(wanted)
        found: T | None = None if key is None else self.known(key, wanted.kind)
        if found is not None:
            self._count()
        return found

    def keep_result(self, wanted: Rehearsal[T], result: T) -> None:
        """Keep the result of a rehearsal that was found in another way than by its simulation."""
        if (key := self._key(wanted)) is not None:
            self.keep(key, result)

    def each(self, wanted: Sequence[Rehearsal[T]]) -> Iterator[tuple[int, T]]:
        """Simulate without the cache. The results by position, as soon as they are known."""
        self.expected = max(self.expected, self.num_done + len(wanted))
        return self._simulated(dict(enumerate(wanted)))

    def simulate(self, wanted: Rehearsal[T]) -> T:
        """Simulate without the cache."""
        with self._lock:
            self.num_simulated += 1
            future = self._submitted(wanted)
        result = wanted.simulated(self.resources.simulator) if future is None else future.result()
        self._count()
        return result

    def one(self, wanted: Rehearsal[T]) -> T:
        key = self._key(wanted)
        found: T | None = None if key is None else self.known(key, wanted.kind)
        if found is not None:
            self._count()
            return found
        result = self.simulate(wanted)
        if key is not None:
            self.keep(key, result)
        return result

    def all(self, wanted: Sequence[Rehearsal[T]]) -> list[T]:
        """The results, in order."""
        self.expected = max(self.expected, self.num_done + len(wanted))
        keys = [self._key(each) for each in wanted]
        found: dict[int, T] = {}
        for i, (key, each) in enumerate(zip(keys, wanted, strict=True)):
            known: T | None = None if key is None else self.known(key, each.kind)
            if known is not None:
                found[i] = known
                self._count()
        left = {i: wanted[i] for i in range(len(wanted)) if i not in found}
        for i, result in self._simulated(left):
            found[i] = result
            if (key := keys[i]) is not None:
                self.keep(key, result)
        return [found[i] for i in range(len(wanted))]

    def _simulated(self, left: Mapping[int, Rehearsal[T]]) -> Iterator[tuple[int, T]]:
        """The results, as soon as they are known."""
        pool, simulator = self.resources.pool, self.resources.simulator
        if pool is None:
            yield from ((i, self.simulate(each)) for i, each in left.items())
            return
        futures = {pool.submit(each.simulated, simulator): i for i, each in left.items()}
        for future in as_completed(futures):
            with self._lock:
                self.num_simulated += 1
            self._count()
            yield futures[future], future.result()

    def map(self, work: Callable[[T], R], tasks: Sequence[T]) -> list[R]:
        """The results of other work in the same processes, in order. Each task counts as one rehearsal in the
        progress."""
        self.expected = max(self.expected, self.num_done + len(tasks))
        results: list[R] = []
        for result in map(work, tasks) if self.resources.pool is None else self.resources.pool.map(work, tasks):
            results.append(result)
            self._count()
        return results

    def _key(self, wanted: Rehearsal[Any]) -> str | None:
        """The key of a rehearsal in the cache; None: it is not cached.

        Of the code, the key covers what simulates and what computes the metrics, and not the plan itself: a planner
        may change without new rehearsals.
        """
        if not self.keeps:
            return None
        measure: Any = wanted.measure.func if isinstance(wanted.measure, partial) else wanted.measure
        modules = (SIMULATING, measure.__module__)
        return scenario_key(wanted.scenario, *wanted.facts, modules=modules, of_code=self.stores)

    def _submitted(self, wanted: Rehearsal[T]) -> Future[T] | None:
        pool = self.resources.pool
        return None if pool is None else pool.submit(wanted.simulated, self.resources.simulator)

    def _count(self) -> None:
        with self._lock:
            self.num_done += 1
            if self.resources.progress is not None:
                self.resources.progress(self.num_done, max(self.expected, self.num_done))


def content_key(
    facts: Any,
    paths: Iterable[Path] = (),
    digests: Iterable[bytes] = (),
    without: tuple[str, ...] = (),
    modules: tuple[str, ...] = (),
    of_code: bool = True,
) -> str:
    """A digest of facts (fit for JSON), of files, of further digests, and of the code.

    The code is all of Headway, but `without` names parts to leave out, such as `policies/routing`; or `modules` with
    what they import of Headway, directly or indirectly, and Headway's data files. Without `of_code`, the names of
    `modules` stand for it: keys that only one process compares.
    """
    code = "" if not of_code else _code(without, _DATA if modules else (".py", *_DATA))
    digest = hashlib.sha256(msgspec.json.encode([__version__, code, facts]))
    for module in modules:
        digest.update(source_digest(module, _PACKAGE) if of_code else module.encode())
    for each in digests:
        digest.update(each)
    for path in paths:
        digest.update(_digest(path))
    return digest.hexdigest()[:32]


def scenario_key(chosen: Scenario, *facts: Any, modules: tuple[str, ...] = (), of_code: bool = True) -> str:
    """A digest of a scenario (without its name), its step-time coefficients, the files and users' modules that it
    names, further facts, and the code, as in `content_key`."""
    spec, coefficients = structs.replace(chosen.spec, name=""), StepTimes(chosen).coefficients
    paths = _paths(msgspec.to_builtins([spec.workload, spec.fleet, spec.combos]))
    described = [spec, chosen.fleet, list(coefficients.values()), *facts]
    own = [source_digest(name, folder) for name, folder in own_modules(_policies(spec), chosen.base_dir)]
    files = (chosen.base_dir / path for path in paths if not is_repository(path, chosen.base_dir))
    return content_key(described, files, own, modules=modules, of_code=of_code)


def _policies(spec: Spec) -> Any:
    return msgspec.to_builtins([spec.policies, spec.variants, spec.cascade])


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


def _digest(path: Path) -> bytes:
    """A digest of a file's content. Of a folder and of a file of weights, which have gigabytes, the names, sizes and
    times count."""
    if not path.is_dir() and path.suffix != ".gguf":
        return _file_digest(path, path.stat().st_mtime_ns)
    found = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
    return repr([(str(each.relative_to(path)), (s := each.stat()).st_size, s.st_mtime_ns) for each in found]).encode()


@cache
def _file_digest(path: Path, _changed_ns: int) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


_PACKAGE = Path(__file__).parents[1]
_DATA = (".json", ".yaml", ".csv")


@cache
def _code(without: tuple[str, ...], suffixes: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*")):
        within = path.relative_to(_PACKAGE)
        is_left_out = within.parts[0] in NOT_SIMULATING or any(map(within.is_relative_to, without))
        if not is_left_out and path.suffix in suffixes:
            digest.update(path.read_bytes())
    return digest.hexdigest()
