"""Measurements of every kind that the papers' reproductions use, recorded once, and runners that answer with them.

`python papers/tests/support/recorded.py [PAPER ...]` writes `recorded/PAPER.json.gz`: of a run of all claims, the first
task of each kind is measured, and every other task of that kind gets its measurement.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest

from headway_papers.reproduce.cascadia import runs as cascadia_runs
from headway_papers.reproduce.cascadia import setup as cascadia_setup
from headway_papers.reproduce.cauchy import demand, overall, setup, sizing
from headway_papers.reproduce.reproduction import load
from headway_papers.reproduce.runner import Runner
from headway_papers.reproduce.tasks import Call, Measurement, RecordsTask, Task, perform

FOLDER = Path(__file__).parents[1] / "reproduce" / "recorded"
SHAPING = ("builtin", "tiers", "mix", "num_tiers", "name", "wanted", "workload", "cascade")
"""Arguments that decide which parts a measurement has. Policies, rates and seeds do not."""
RECORDED_SEEDS = {"cascadia": (0, 1)}
"""Seeds of recordings and replays of a paper whose measurements are of several seeds each."""
SEEDS = tuple(range(6))
"""Seeds of other replays."""
ALIKE, NEAR, APART, NOISE = 0.0, 0.7, 10.0, 0.002
"""The largest logarithms of a label's factor, and the standard deviation of that of a measurement's."""
NUM_DRAWS = {ALIKE: 2, NEAR: 4, APART: 8}
MOST_TRIED = 3
"""Tasks of a kind, one after the other, until each number of its measurement is known."""
LATENCIES = ("prefill", "decode", "e2e")
"""Keys of one form that are no labels."""
OF_LIST = "of list"
FIRST_S = 4 * 3600.0
FEW = 300
INPUTS = ("profiled", "levels", "pair", "unpressed", "lengths", "rate", "theta", "overload", "step_times")
"""Functions whose measurements are given to all systems."""
OF_A_CASE = (
    "measure_case", "measure_at_own_load", "measure_throughput", "ablations", "planned_for_more", "fewer_models",
    "paper_plan", "sarathi",
)  # fmt: skip
"""Functions whose tasks are cases: a label in their measurements has one effect in all of them."""


def kind(task: Task) -> str:
    """The task's function, and what decides the form of its measurement."""
    function = f"{task.function.__module__.rpartition('.')[2]}.{task.function.__name__}"
    return f"{function} {json.dumps(list(_shape(task.content)), sort_keys=True)}"


def _shape(content: Mapping[str, Any]) -> Iterator[Any]:
    models = content.get("models")
    if isinstance(models, Mapping):
        yield "models", sorted(models)
        return
    for key in SHAPING:
        if key in content and not isinstance(content[key], Mapping):
            yield key, Path(content[key]).name if isinstance(content[key], str) else content[key]
    for key in ("workload", "tiers"):
        if isinstance(content.get(key), Mapping):
            yield from _shape(content[key])


@dataclass
class Recorder(Runner):
    """Measures the first task of each kind."""

    recorded: dict[str, Measurement] = field(default_factory=dict)
    tried: Counter[str] = field(default_factory=Counter)

    def run(self, tasks: Mapping[Any, Task]) -> dict[Any, Measurement]:
        for task in tasks.values():
            name = kind(task)
            if name not in self.recorded or (self.tried[name] < MOST_TRIED and _has_none(self.recorded[name])):
                found = json.loads(perform(_shortened(task), self.data or Path()))
                self.recorded[name] = _completed(_filled(self.recorded.get(name), found))
                self.tried[name] += 1
        return {name: self.recorded[kind(task)] for name, task in tasks.items()}


def _has_none(value: Any) -> bool:
    return value is None or (isinstance(value, dict) and any(map(_has_none, value.values())))


def _filled(known: Any, found: Any) -> Any:
    """What is known, with the numbers found for those that are not."""
    if isinstance(known, dict) and isinstance(found, dict):
        return {key: _filled(known.get(key), found.get(key)) for key in {**known, **found}}
    return found if known is None else known


def _completed(value: Any) -> Any:
    """Each label with the others' numbers where it has none, such as a latency of a model without requests."""
    if not isinstance(value, dict):
        return value
    parts = {key: _completed(each) for key, each in value.items()}
    return (
        {key: _filled(each, reduce(_filled, parts.values())) for key, each in parts.items()}
        if _is_by_label(parts)
        else parts
    )


def _shortened(task: Task) -> Task:
    """The first hours of a day of several models, and searches with few requests."""
    content = task.content
    if isinstance(task, Call) and "num_requests" in content:
        return replace(task, arguments=content | {"num_requests": FEW})
    if not isinstance(task, RecordsTask) or len(content["workload"].get("models", {})) < 2:
        return task
    hours_s = {"until_s": FIRST_S}, {"duration_s": FIRST_S}
    parts = {key: content.get(key, {}) | each for key, each in zip(("simulation", "workload"), hours_s, strict=True)}
    return replace(task, document=content | parts)


def record(paper: str, data: Path) -> None:
    """Write the measurements of a paper's runs of all claims with one seed or two."""
    with pytest.MonkeyPatch.context() as patch:  # plans and exhaustive searches of few requests and routings
        patch.setattr(cascadia_setup, "ARRIVALS_S", 10.0)
        patch.setattr(cascadia_runs, "NUM_ROUTINGS", 4)
        runner = _recorded(paper, data)
    FOLDER.mkdir(exist_ok=True)
    text = json.dumps(runner.recorded, sort_keys=True)
    (FOLDER / f"{paper}.json.gz").write_bytes(gzip.compress(text.encode(), mtime=0))


def _recorded(paper: str, data: Path) -> Recorder:
    runner = Recorder(RECORDED_SEEDS.get(paper, (0,)), data=data, claims=_ids(paper))
    load(paper).run(runner)
    return runner


def _ids(paper: str) -> frozenset[str]:
    """All claims, and nothing that belongs to none."""
    return frozenset(claim.id for claim in load(paper).CLAIMS)


@dataclass
class Replayed(Runner):
    """Answers with recorded measurements in which all labels are alike, or are apart by a factor of their own.

    `apart`: the largest logarithm of such a factor. Below 0, each factor is the inverse of that for -`apart`, so that
    two labels are as if each had the other's name.
    Labels are parts of a task's name, such as a policy, and keys of parts of one form in a measurement.
    """

    recorded: Mapping[str, Measurement] = field(default_factory=dict)
    apart: float = ALIKE
    draw: int = 0
    first: dict[tuple[str, ...], float] = field(default_factory=dict)
    """The first number of each name, which all measurements have."""

    @classmethod
    def of(cls, paper: str, apart: float, draw: int) -> Replayed:
        recorded = json.loads(gzip.decompress((FOLDER / f"{paper}.json.gz").read_bytes()))
        seeds, ids = RECORDED_SEEDS.get(paper, SEEDS), _ids(paper)
        return cls(seeds, data=FOLDER, claims=ids, recorded=recorded, apart=apart, draw=draw)

    def file(self, name: str) -> Path | None:
        """Whatever is asked for exists, though no file is read for a recorded measurement."""
        return FOLDER / name

    def run(self, tasks: Mapping[Any, Task]) -> dict[Any, Measurement]:
        return {name: self._answer(name, task) for name, task in tasks.items()}

    def _answer(self, name: Any, task: Task) -> Measurement:
        measurement = self.recorded[kind(task)]
        if task.function.__name__ in INPUTS:
            return measurement
        parts = name if isinstance(name, tuple) else (name,)
        has_seed = len(parts) > 1 and isinstance(parts[-1], int)
        is_case = task.function.__name__ in OF_A_CASE
        label = f"{self.draw} {'' if is_case else parts[:-1] if has_seed else parts}"
        noise = np.random.default_rng(crc32(f"{self.draw} {parts}".encode()))
        changed: Measurement = self._changed(measurement, (), label, noise)
        return changed

    def _changed(self, value: Any, path: tuple[str, ...], label: str, noise: np.random.Generator) -> Any:
        """`path`: the keys that are no labels."""
        if isinstance(value, dict):
            if _is_by_label(value):
                first = next(iter(value.values()))
                return {key: self._changed(first, path, f"{label} {key}", noise) for key in value}
            return {key: self._changed(each, (*path, key), label, noise) for key, each in value.items()}
        if isinstance(value, list):
            return [self._changed(each, (*path, OF_LIST), label, noise) for each in value]
        own = np.random.default_rng(crc32(label.encode()))
        if isinstance(value, bool):
            return bool(own.integers(2)) is (self.apart > 0) if self.apart else value
        if isinstance(value, float):
            keys = tuple(key for key in path if key != OF_LIST)[-2:]
            equal = value if path[-1] == OF_LIST else self.first.setdefault(keys, value)
            return equal * np.exp(self.apart * own.uniform(-1.0, 1.0)) * noise.lognormal(0.0, NOISE)
        return value


@contextmanager
def plans_kept() -> Iterator[None]:
    """Keeps Cauchy's plans between replays, whose profiles and demands are the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demand, "azure", lambda file: demand.Demand("", "two minutes", (0.9, 1.1), demand.MINUTE_S))
        for owner, name in ((setup, "planned"), (overall, "melange_plan"), (sizing, "melange_plan")):
            patch.setattr(owner, name, partial(_kept, getattr(owner, name)))
        yield


_PLANS: dict[str, Any] = {}


def _kept(function: Any, *arguments: Any, **named: Any) -> Any:
    markets = [getattr(each, "workload", each) for each in arguments]
    key = f"{function.__name__} {markets!r} {named!r}"
    if key not in _PLANS:
        _PLANS[key] = function(*arguments, **named)
    return _PLANS[key]


def _is_by_label(parts: Mapping[str, Any]) -> bool:
    """Whether keys are labels, such as models, systems or tiers: what they name has one form."""
    forms = {_form(each) for each in parts.values()}
    return len(forms) == 1 and forms != {""} and not parts.keys() & set(LATENCIES)


def _form(value: Any) -> str:
    """The keys of a measurement's part, without its numbers."""
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{_form(value[key])}' for key in sorted(value))}}}"
    return f"[{_form(value[0]) if value else ''}]" if isinstance(value, list) else ""


if __name__ == "__main__":
    for name in sys.argv[1:] or ("cascadia", "cauchy", "ktier", "pascal", "sageserve"):
        record(name, Path(os.environ["HEADWAY_DATA"]))
