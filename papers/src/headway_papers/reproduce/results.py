"""Measurements by key and seed, and comparisons of two systems seed by seed."""

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
"""By key; the last part of a key is the seed."""


class SeedResults:
    """The measurements of runs that were repeated with every seed."""

    def __init__(self, results: Results, seeds: Sequence[int]) -> None:
        self.results, self.seeds = results, seeds

    def values(self, key: Key, *path: Any) -> list[Any]:
        """By seed: the measurement with this key, or what is at `path` in it."""
        return [reduce(getitem, path, self.results[*key, seed]) for seed in self.seeds]


def ratios(a: Sequence[float], b: Sequence[float]) -> list[float]:
    """By seed: a over b."""
    return [x / y for x, y in zip(a, b, strict=True)]


def reductions(a: Sequence[float], b: Sequence[float]) -> list[float | None]:
    """By seed: the share by which a is less than b; None where b is 0."""
    return [1 - x / y if y else None for x, y in zip(a, b, strict=True)]


def increases(a: Sequence[float], b: Sequence[float]) -> list[float | None]:
    """By seed: the share by which a is more than b; None where b is 0."""
    return [x / y - 1 if y else None for x, y in zip(a, b, strict=True)]


def differences(a: Sequence[float], b: Sequence[float]) -> list[float]:
    """By seed: a less b."""
    return [x - y for x, y in zip(a, b, strict=True)]


def means_by_seed(cases: Iterable[Sequence[float | None]]) -> list[float | None]:
    """By seed: the mean over cases, each with one value for every seed; None where a case has none."""
    means: list[float | None] = []
    for values in zip(*cases, strict=True):
        numbers = [value for value in values if value is not None]
        means.append(fmean(numbers) if len(numbers) == len(values) else None)
    return means


def mean(values: Iterable[float | None]) -> float:
    """The mean of those that are known; nan without any."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else nan


def listed_means(values: Mapping[str, Sequence[float]], unit: str = "") -> str:
    """Such as "12.3 s (reactive), 10.1 s (lt-u)"."""
    return ", ".join(f"{fmean(each):.3g}{unit} ({name})" for name, each in values.items())
