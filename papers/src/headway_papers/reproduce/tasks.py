"""The units of work of a reproduction. They run in other processes, so their contents must be picklable."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from headway import scenario
from headway.config.strict_yaml import Places
from headway.core.record import Records
from headway.planning.rehearsals import content_key
from headway.planning.source_digests import source_digest
from headway.report.run import Run

Measurement = dict[str, Any]
"""Numbers, texts, or lists and dicts of them, by name, as in JSON. Non-finite numbers become None."""


@dataclass(frozen=True)
class SimulationTask:
    """A scenario to simulate with a seed. The run is reduced to a few numbers in its process."""

    document: Mapping[str, Any]
    """The content of a scenario file. Relative paths start at the folder of --data."""
    seed: int
    function: Callable[[Run], Measurement]
    """A function at the top level of a module."""

    @property
    def content(self) -> Any:
        return {**self.document, "seed": self.seed}

    def measure(self, base_dir: Path) -> Measurement:
        chosen = scenario.assemble(copy.deepcopy(self.content), Places(), base_dir)
        return self.function(scenario.run(chosen))


@dataclass(frozen=True)
class RecordsTask:
    """Like `SimulationTask`, without a summary, whose times between tokens can take several times as long as the
    run."""

    document: Mapping[str, Any]
    seed: int
    function: Callable[[Records, float], Measurement]
    """A function of the records and the end of the warm-up, at the top level of a module."""

    @property
    def content(self) -> Any:
        return {**self.document, "seed": self.seed}

    def measure(self, base_dir: Path) -> Measurement:
        chosen = scenario.assemble(copy.deepcopy(self.content), Places(), base_dir)
        return self.function(scenario.Simulator().records(chosen), chosen.spec.simulation.warmup_s)


@dataclass(frozen=True)
class Call:
    """A function of plain arguments, for work that is not one scenario: a planner, a search, a control loop."""

    function: Callable[..., Measurement]
    """A deterministic function at the top level of a module."""
    arguments: Mapping[str, Any]
    """Arguments by name, as in JSON."""

    @property
    def content(self) -> Any:
        return self.arguments

    def measure(self, base_dir: Path) -> Measurement:
        return self.function(**self.arguments)


Task = SimulationTask | RecordsTask | Call


def perform(task: Task, base_dir: Path) -> bytes:
    """The measurement as JSON, so that computed and cached measurements are equal."""
    return msgspec.json.encode(task.measure(base_dir), enc_hook=_plain)


def _plain(value: Any) -> Any:
    """NumPy arrays and numbers as plain values."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise NotImplementedError(f"a measurement holds a {type(value).__name__}; expected numbers, texts, lists, dicts")


def cache_key(task: Task, base_dir: Path) -> str:
    """A digest of all inputs of a result: arguments, named files, and the code.

    Of the code in `reproduce`, only the module of the task's function counts, and the modules there that it imports. A
    system whose claims and captions are in another module may change them without new simulations.
    """
    module = task.function.__module__
    paths = (base_dir / text for text in _texts(task.content))
    facts = [f"{module}.{task.function.__qualname__}", type(task).__name__, task.content]
    return content_key(facts, [path for path in paths if os.path.isfile(path)], [source_digest(module, _OWN)])


_OWN = Path(__file__).parent


def _texts(value: Any) -> Iterator[str]:
    """All strings in the arguments; each may be a file name."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _texts(each)
