"""Tail TTFT of one system compared with another's, by bin and seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from headway.reproduce.pascal.runs import BIN_TOKENS
from headway.reproduce.tasks import Measurement


@dataclass(frozen=True)
class Bin:
    """One bin of one seed."""

    num: int
    before_s: float
    after_s: float

    @property
    def cut(self) -> float:
        """By which share the tail falls."""
        return 1 - self.after_s / self.before_s

    @property
    def cut_s(self) -> float:
        return self.before_s - self.after_s


class Tails:
    """From a baseline to another system, on the same requests."""

    def __init__(self, before: Sequence[Measurement], after: Sequence[Measurement]) -> None:
        self.seeds = [_bins(a, b) for a, b in zip(before, after, strict=True)]

    def most(self) -> list[float | None]:
        """By seed: the bin with the largest cut."""
        return [max((each.cut for each in bins.values()), default=None) for bins in self.seeds]

    def most_s(self) -> list[float | None]:
        """By seed: the largest cut in seconds."""
        return [max((each.cut_s for each in bins.values()), default=None) for bins in self.seeds]

    def worst(self) -> list[float | None]:
        """By seed: by which share the tail of the worst bin rises; below 0 if all fall."""
        return [max((-each.cut for each in bins.values()), default=None) for bins in self.seeds]

    def worst_at(self) -> list[int]:
        """By seed: where that bin begins."""
        return [min(bins, key=lambda first: bins[first].cut) for bins in self.seeds if bins]

    def at_largest_cut_of(self, baseline: Tails) -> list[float | None]:
        """By seed: the cut in the bin in which `baseline` has its largest."""
        cuts = []
        for mine, baseline_bins in zip(self.seeds, baseline.seeds, strict=True):
            at = max(baseline_bins, key=lambda first: baseline_bins[first].cut, default=None)
            cuts.append(mine[at].cut if at in mine else None)
        return cuts

    def means(self) -> dict[int, Bin]:
        """By bin: means over the seeds, of bins that most seeds have."""
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
        """The bins with the largest fall and rise, in words."""
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
