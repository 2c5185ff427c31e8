"""Measurements by key and seed, and seed-by-seed comparisons of two systems."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from math import nan
from operator import getitem
from statistics import fmean
from typing import Any

from headway_papers.reproduce.tasks import Measurement

Key = tuple[Any, ...]
Results = Mapping[Key, Measurement]
"""Measurements by key; the last part of a key is the seed."""


class SeedResults:
    """The measurements of runs that were repeated with every seed."""

    def __init__(self, results: Results, seeds: Sequence[int]) -> None:
        self.results, self.seeds = results, seeds

    def values(self, key: Key, *path: Any) -> list[Any]:
        """The measurements with this key by seed, or the values at `path` in them."""
        return [reduce(getitem, path, self.results[*key, seed]) for seed in self.seeds]


def of_runs(runs: Sequence[Measurement], key: str) -> list[float]:
    """A number of runs, by seed."""
    return [run[key] for run in runs]


def ratios(a: Sequence[float], b: Sequence[float]) -> list[float]:
    """a divided by b, by seed."""
    return [x / y for x, y in zip(a, b, strict=True)]


def reductions(a: Sequence[float], b: Sequence[float]) -> list[float | None]:
    """The relative reduction from b to a, by seed; None if b is 0."""
    return [1 - x / y if y else None for x, y in zip(a, b, strict=True)]


def increases(a: Sequence[float], b: Sequence[float]) -> list[float | None]:
    """The relative increase from b to a, by seed; None if b is 0."""
    return [x / y - 1 if y else None for x, y in zip(a, b, strict=True)]


def differences(a: Sequence[float], b: Sequence[float]) -> list[float]:
    """a minus b, by seed."""
    return [x - y for x, y in zip(a, b, strict=True)]


def means_by_seed(cases: Iterable[Sequence[float | None]]) -> list[float | None]:
    """The mean over cases by seed, where each case has one value per seed; None if a case has no value."""
    means: list[float | None] = []
    for values in zip(*cases, strict=True):
        numbers = [value for value in values if value is not None]
        means.append(fmean(numbers) if len(numbers) == len(values) else None)
    return means


def mean(values: Iterable[float | None]) -> float:
    """The mean of the known values; nan without any."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else nan


def listed_means(values: Mapping[str, Sequence[float]], unit: str = "") -> str:
    """Text such as "12.3 s (reactive), 10.1 s (lt-u)"."""
    return ", ".join(f"{fmean(each):.3g}{unit} ({name})" for name, each in values.items())
