"""Several runs of each variant with different seeds: means, intervals, and significant differences.

Runs with the same seed have the same arrivals and lengths, so variants are compared by their differences for each seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from msgspec import Struct

from headway.core.errors import unknown
from headway.metrics.interval import interval
from headway.metrics.summary import BREAKDOWNS

Flat = Mapping[str, float | int | None]
"""Metrics by key, in the format of `metrics.summary.flatten`."""
Verdict = Literal["best", "indistinguishable", "worse"]


class Estimate(Struct, frozen=True):
    """The mean of a metric over seeds, and its 95% interval (Student's t)."""

    mean: float
    low: float
    high: float

    @property
    def half(self) -> float:
        return (self.high - self.low) / 2


def estimate_of(values: Sequence[float]) -> Estimate | None:
    """The mean of values and its interval; None for fewer than two."""
    bounds = interval(values)
    return None if bounds is None else Estimate(fmean(values), *bounds)


@dataclass(frozen=True)
class SeededMetrics:
    """The metrics of every variant with every seed."""

    seeds: tuple[int, ...]
    flat: tuple[tuple[Flat, ...], ...]
    """Metrics by variant, then by seed."""

    @property
    def varies(self) -> bool:
        """Whether the seed changes any metric of any variant."""
        return any(each != by_seed[0] for by_seed in self.flat for each in by_seed[1:])

    def check(self, *keys: str) -> None:
        """HeadwayError, with the nearest name, for a key that is not a metric of these runs."""
        known = {key for by_seed in self.flat for each in by_seed for key in each}
        prefixes = tuple(f"{part}." for part in BREAKDOWNS.values())
        for key in keys:
            if key not in known:
                near = known if key.startswith(prefixes) else {each for each in known if not each.startswith(prefixes)}
                raise unknown("metric", key, near)

    def values(self, variant: int, key: str) -> list[float | int | None]:
        """A metric of a variant, by seed."""
        return [each.get(key) for each in self.flat[variant]]

    def estimate(self, variant: int, key: str) -> Estimate | None:
        """The mean and interval; None if fewer than two seeds have the metric."""
        return estimate_of([float(value) for value in self.values(variant, key) if value is not None])

    def difference(self, variant: int, other: int, key: str) -> Estimate | None:
        """The variant's metric minus that of `other`, over the seeds in which both have the metric."""
        pairs = zip(self.values(variant, key), self.values(other, key), strict=True)
        return estimate_of([float(a - b) for a, b in pairs if a is not None and b is not None])

    def verdicts(self, key: str, better: str) -> list[Verdict | None]:
        """Each variant's comparison with the variant of the best mean; None if it has no mean, or no other variant
        exists.

        `better` is "low" or "high". A variant is worse if the interval of its difference from the best excludes 0. The
        best variant is best only if all others are worse.
        """
        means = [self.estimate(variant, key) for variant in range(len(self.flat))]
        known = [variant for variant, each in enumerate(means) if each is not None]
        if len(known) < 2:
            return [None] * len(means)
        sign = 1 if better == "low" else -1
        best = min(known, key=lambda variant: sign * _mean(means, variant))
        found: list[Verdict | None] = [None] * len(means)
        for variant in known:
            difference = self.difference(variant, best, key)
            differs = difference is not None and not difference.low <= 0 <= difference.high
            found[variant] = "worse" if differs else "indistinguishable"
        if found.count("indistinguishable") == 1:
            found[best] = "best"
        return found


def _mean(means: Sequence[Estimate | None], variant: int) -> float:
    each = means[variant]
    assert each is not None
    return each.mean
