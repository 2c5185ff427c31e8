"""Runs the tasks of a reproduction on a pool of processes, with a cache of their measurements."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from headway.core.errors import HeadwayError
from headway.planning.rehearsals import RehearsalCache
from headway_papers.reproduce.claims import Claim
from headway_papers.reproduce.tasks import Call, Measurement, Task, cache_key, perform

K = TypeVar("K", bound=Hashable)
ReportProgress = Callable[[int, int], None]
"""A function of (completed tasks, known tasks)."""


@dataclass
class Runner:
    """The seeds of a reproduction, and `run` to measure tasks."""

    seeds: tuple[int, ...]
    quick: bool = False
    """Use fewer requests and smaller fleets, so that a reproduction takes a minute or two."""
    data: Path | None = None
    """A folder with public traces, or None."""
    claims: frozenset[str] | None = None
    """The ids of the requested claims; None: all."""
    cache: RehearsalCache | None = None
    report: ReportProgress | None = None
    pool: Executor | None = None
    key_of: Callable[[Task, Path], str] = cache_key
    """The key of a task's measurement in the cache, with the folder of its files."""
    num_measured: int = 0
    num_found: int = 0
    num_known: int = 0

    def wants(self, *claims: Claim | str) -> bool:
        """Whether one of these claims or ids was requested. Work for other claims can be skipped."""
        ids = {claim if isinstance(claim, str) else claim.id for claim in claims}
        return self.claims is None or bool(self.claims & ids)

    def file(self, name: str) -> Path | None:
        """A file of the data folder or of one of its subfolders; None if it is missing."""
        folders = [] if self.data is None else [self.data, *sorted(self.data.glob("*/"))]
        found = next((folder / name for folder in folders if (folder / name).is_file()), None)
        return found and found.absolute()

    def run(self, tasks: Mapping[K, Task]) -> dict[K, Measurement]:
        """Measure all tasks. Returns the same keys in the same order, for any number of processes.

        Raises HeadwayError with the key of the task if a scenario cannot be run; earlier measurements stay in the
        cache.
        """
        base_dir = self.data or Path()
        self.num_known += len(tasks)
        keys = {name: self.key_of(task, base_dir) if self.cache else "" for name, task in tasks.items()}
        results = {name: cached for name in tasks if (cached := self._cached(keys[name])) is not None}
        self._report_progress()
        uncached = {name: task for name, task in tasks.items() if name not in results}
        for name, text in self._measure(uncached, base_dir):
            results[name] = msgspec.json.decode(text)
            self.num_measured += 1
            if self.cache:
                self.cache.keep(keys[name], results[name])
            self._report_progress()
        return {name: results[name] for name in tasks}

    def repeat(
        self,
        name: str,
        function: Callable[..., Measurement],
        arguments: Measurement,
        seeds: Sequence[int] | None = None,
    ) -> list[Measurement]:
        """The measurements of a function with a `seed` argument, by seed."""
        tasks = {(name, seed): Call(function, arguments | {"seed": seed}) for seed in seeds or self.seeds}
        return list(self.run(tasks).values())

    def _cached(self, key: str) -> Measurement | None:
        cached = self.cache.find(key, dict) if self.cache else None
        self.num_found += cached is not None
        return cached

    def _report_progress(self) -> None:
        if self.report:
            self.report(self.num_found + self.num_measured, self.num_known)

    def _measure(self, tasks: Mapping[K, Task], base_dir: Path) -> Iterator[tuple[K, bytes]]:
        if self.pool is None:
            for name, task in tasks.items():
                with _named_errors(name):
                    text = perform(task, base_dir)
                yield name, text
            return
        futures = {self.pool.submit(perform, task, base_dir): name for name, task in tasks.items()}
        try:
            for future in as_completed(futures):
                with _named_errors(futures[future]):
                    text = future.result()
                yield futures[future], text
        finally:
            for future in futures:
                future.cancel()


@contextmanager
def _named_errors(name: Hashable) -> Iterator[None]:
    """Prefix errors with the key of the task."""
    label = ", ".join(map(str, name)) if isinstance(name, tuple) else str(name)
    try:
        yield
    except HeadwayError as error:
        raise HeadwayError(f"{label}: {error}") from error
    except BrokenProcessPool:
        reason = "a process died, perhaps out of memory; run again with fewer --jobs: the cache has what was measured"
        raise HeadwayError(f"{label}: {reason}") from None
