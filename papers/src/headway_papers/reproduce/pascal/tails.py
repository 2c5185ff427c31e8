"""Tail TTFT of one system relative to another's, by bin and seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from headway_papers.reproduce.pascal.runs import BIN_TOKENS
from headway_papers.reproduce.tasks import Measurement


@dataclass(frozen=True)
class Bin:
    """One bin of one seed."""

    num: int
    before_s: float
    after_s: float

    @property
    def cut(self) -> float:
        """The relative reduction of the tail."""
        return 1 - self.after_s / self.before_s

    @property
    def cut_s(self) -> float:
        return self.before_s - self.after_s


Number = Callable[[Bin], float]
Pick = Callable[..., Any]
"""`min` or `max`."""


class Tails:
    """Changes from a baseline to another system on the same requests."""

    def __init__(self, before: Sequence[Measurement], after: Sequence[Measurement]) -> None:
        self.seeds = [_bins(a, b) for a, b in zip(before, after, strict=True)]

    def most(self) -> list[float | None]:
        """Maps each seed to the cut in the bin in which the other seeds have the largest mean cut.

        The largest cut of a seed's own bins would be large by chance, because a bin may have five requests. For equal
        systems, a bin chosen by the other seeds has a mean cut of 0. None with one seed, or if the seed lacks the bin.
        """
        return self._chosen(max, lambda each: each.cut, lambda each: each.cut)

    def most_s(self) -> list[float | None]:
        """`most` by seed, in seconds."""
        return self._chosen(max, lambda each: each.cut_s, lambda each: each.cut_s)

    def most_of_own(self) -> list[float]:
        """Maps each seed to the largest cut of the seed's own bins, which is positive even for equal systems."""
        return [max(each.cut for each in bins.values()) for bins in self.seeds if bins]

    def worst(self) -> list[float | None]:
        """Maps each seed to the increase of the tail in the bin in which the other seeds increase most."""
        return self._chosen(min, lambda each: each.cut, lambda each: -each.cut)

    def worst_at(self) -> list[int]:
        """Maps each seed to the start of that bin."""
        found = [self._bin(k, min, lambda each: each.cut) for k in range(len(self.seeds))]
        return [first for first in found if first is not None]

    def at_largest_cut_of(self, baseline: Tails) -> list[float | None]:
        """Maps each seed to the cut in the bin in which the other seeds of `baseline` have the largest cut."""
        found = [baseline._bin(k, max, lambda each: each.cut) for k in range(len(self.seeds))]
        return [
            bins[at].cut if at is not None and at in bins else None for bins, at in zip(self.seeds, found, strict=True)
        ]

    def _chosen(self, pick: Pick, by: Number, value: Number) -> list[float | None]:
        chosen: list[float | None] = []
        for k, bins in enumerate(self.seeds):
            at = self._bin(k, pick, by)
            chosen.append(None if at is None else value(bins[at]))
        return chosen

    def _bin(self, k: int, pick: Pick, by: Number) -> int | None:
        """Among the bins of seed k that most other seeds have: the first or last by their mean; None if there is
        none."""
        others = [bins for i, bins in enumerate(self.seeds) if i != k]
        means = {}
        for first in self.seeds[k]:
            numbers = [by(bins[first]) for bins in others if first in bins]
            if 2 * len(numbers) > len(others):
                means[first] = fmean(numbers)
        return pick(means, key=means.__getitem__) if means else None

    def means(self) -> dict[int, Bin]:
        """Maps each bin to the means over the seeds, for bins that most seeds have."""
        mean_bins = {}
        for first in sorted(set().union(*self.seeds)):
            bins_of_seeds = [bins[first] for bins in self.seeds if first in bins]
            if 2 * len(bins_of_seeds) > len(self.seeds):
                parts = (
                    [each.num for each in bins_of_seeds],
                    [each.before_s for each in bins_of_seeds],
                    [each.after_s for each in bins_of_seeds],
                )
                mean_bins[first] = Bin(round(fmean(parts[0])), fmean(parts[1]), fmean(parts[2]))
        return mean_bins

    def summary(self, baseline: str) -> str:
        """The bins with the largest decrease and increase, in words."""
        means = self.means()
        if not means:
            return ""
        best, worst = (pick(means, key=lambda first: means[first].cut) for pick in (max, min))
        fallen = sum(each.cut > 0 for each in means.values())
        most, least = _bin_text(best, means[best], baseline), _bin_text(worst, means[worst], baseline)
        return f"Means of the seeds: tails fall in {fallen} of {len(means)} bins, most in {most}; least in {least}."


def _bin_text(first: int, each: Bin, baseline: str) -> str:
    size = f"{first:,} to {first + BIN_TOKENS - 1:,} reasoning tokens, {each.num} requests"
    return f"the one of {size}: {each.before_s:.1f} s with {baseline}, {each.after_s:.1f} s with PASCAL"


def _bins(before: Measurement, after: Measurement) -> dict[int, Bin]:
    afters = {first: tail_s for first, _, tail_s in after["tails"]}
    return {
        first: Bin(num, tail_s, afters[first]) for first, num, tail_s in before["tails"] if first in afters and tail_s
    }
