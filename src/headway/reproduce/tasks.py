"""The units of work of a reproduction. They go to other processes, so that all they hold can be pickled."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from headway import scenario
from headway.config.strict_yaml import Places
from headway.report.run import Run

Measurement = dict[str, Any]
"""Names -> numbers, texts, or lists and dicts of them, as JSON has them. What is not finite becomes None."""


@dataclass(frozen=True)
class SimulationTask:
    """A scenario, simulated with a seed and reduced to a few numbers where it ran."""

    document: Mapping[str, Any]
    """What a scenario file would hold. Relative paths start at the folder given with --data."""
    seed: int
    function: Callable[[Run], Measurement]
    """Of a module's top level."""

    @property
    def content(self) -> Any:
        return {**self.document, "seed": self.seed}

    def measure(self, base_dir: Path) -> Measurement:
        chosen = scenario.assemble(copy.deepcopy(self.content), Places(), base_dir)
        return self.function(scenario.run(chosen))


@dataclass(frozen=True)
class Call:
    """A function of plain arguments, for what is more than one scenario: a planner, a search, a control loop."""

    function: Callable[..., Measurement]
    """Of a module's top level; deterministic."""
    arguments: Mapping[str, Any]
    """By name, as JSON has them."""

    @property
    def content(self) -> Any:
        return self.arguments

    def measure(self, base_dir: Path) -> Measurement:
        return self.function(**self.arguments)


Task = SimulationTask | Call


def perform(task: Task, base_dir: Path) -> bytes:
    """The measurement as JSON: what was computed looks like what was read from the cache."""
    return msgspec.json.encode(task.measure(base_dir), enc_hook=_plain)


def _plain(value: Any) -> Any:
    """NumPy's arrays and numbers as plain ones."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise NotImplementedError(f"a measurement holds a {type(value).__name__}; expected numbers, texts, lists, dicts")
