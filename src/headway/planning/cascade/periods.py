"""What was observed of the requests in some time, and whether it differs from what was planned for (4.4).

The judge scores every answer of the first model, so that the scores of all requests can be compared there. How the
other models do is known of the audited requests only, which all models answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, sqrt

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from headway.workload.quality import Scores

SURE = 1.95
"""Of the two-sample Kolmogorov-Smirnov test: 0.1% of equal samples differ by more."""
LEAST = 0.05
"""Of the requests, that have to be elsewhere in a distribution: less is no shift, however sure it is."""


class Period(Struct, frozen=True):
    """What was observed in one period."""

    rate_rps: float | None
    """None: not known."""
    prompt_tokens: tuple[float, ...]
    """Of the sampled requests."""
    scores: Scores
    """Of the audited requests."""
    firsts: tuple[float, ...] = ()
    """The first model's scores, of all requests; empty: not known."""

    @property
    def weighted(self) -> Scores:
        """As many rows as were audited, the first model's scores spread as those of all requests are.

        In place of each request stands the one whose first score is nearest to what its rank has among all.
        """
        own, firsts = self.scores.scores[:, 0], np.asarray(self.firsts)
        firsts = firsts[~np.isnan(firsts)]
        if not len(firsts) or np.isnan(own).any():
            return self.scores
        rank = np.argsort(np.argsort(own, kind="stable"), kind="stable")
        wanted = np.quantile(firsts, (rank + 0.5) / len(own))
        return self.scores.take(np.abs(own - wanted[:, None]).argmin(axis=1))


def shift(before: Period, now: Period, rate_change: float = 0.2) -> str | None:
    """What has changed between two periods, if anything has: rate, lengths or how hard the requests are."""
    if before.rate_rps is not None and now.rate_rps is not None:
        change = now.rate_rps / before.rate_rps - 1
        if abs(change) > rate_change:
            return f"rate: {change:+.0%}"
    if differ(before.prompt_tokens, now.prompt_tokens):
        return "prompt lengths"
    for i, name in enumerate(now.scores.models):
        if differ(before.scores.scores[:, i], now.scores.scores[:, i]):
            return f"scores of {name}"
        if differ(before.scores.output_tokens[:, i], now.scores.output_tokens[:, i]):
            return f"answer lengths of {name}"
    first = now.scores.models[0]
    return f"scores of {first}" if differ(before.firsts, now.firsts) else None


def differ(one: Sequence[float] | npt.NDArray[np.generic], other: Sequence[float] | npt.NDArray[np.generic]) -> bool:
    """Whether two samples are of different distributions."""
    first, second = (np.sort(np.asarray(each, "f8")) for each in (one, other))
    first, second = first[~np.isnan(first)], second[~np.isnan(second)]
    if not len(first) or not len(second):
        return False
    at = np.concatenate([first, second])
    below = [np.searchsorted(each, at, side="right") / len(each) for each in (first, second)]
    furthest = float(np.abs(below[0] - below[1]).max())
    return furthest > max(LEAST, SURE * sqrt((len(first) + len(second)) / (len(first) * len(second))))


class Kept:
    """Numbers as they come, with times that do not fall: of more than `most`, every second one, and so on."""

    def __init__(self, most: int) -> None:
        self._most, self._every, self.num = most, 1, 0
        self._items: list[tuple[float, float]] = []

    def __len__(self) -> int:
        return len(self._items)

    def add(self, at_s: float, value: float) -> None:
        """One more."""
        if self.num % self._every == 0:
            self._items.append((at_s, float(value)))
        self.num += 1
        if len(self._items) == self._most:
            del self._items[1::2]
            self._every *= 2

    def between(self, from_s: float, to_s: float = inf) -> list[float]:
        """Of those that are kept, from one time to before another."""
        return [value for at_s, value in self._items if from_s <= at_s < to_s]

    def num_since(self, from_s: float) -> int:
        """How many came, whether they are kept or not: exact where that is all of them."""
        kept = len(self.between(from_s))
        return self.num if kept == len(self._items) else kept * self._every


@dataclass
class Audited:
    """What is known of one request."""

    prompt_tokens: int
    since_s: float
    scores: dict[str, float] = field(default_factory=dict)
    output_tokens: dict[str, int] = field(default_factory=dict)


def table(models: Sequence[str], audited: Sequence[Audited], before: Scores | None) -> Scores:
    """The score table of audited requests that every model with replicas has answered.

    The others' rows are those of the table from before, in order of the first model's score; without one, all models
    have answered.
    """
    prompts = np.array([each.prompt_tokens for each in audited], "i8")
    shape = (len(audited), len(models))
    scores, lengths = np.full(shape, np.nan), np.ones(shape, "i8")
    if before is not None:
        first = np.array([each.scores[models[0]] for each in audited])
        rank = np.argsort(np.argsort(first, kind="stable"), kind="stable")
        known = np.argsort(before.scores[:, 0], kind="stable")[(rank * len(before)) // len(audited)]
        scores, lengths = before.scores[known], before.output_tokens[known]
    for i, name in enumerate(models):
        if all(name in each.scores and name in each.output_tokens for each in audited):
            scores[:, i] = [each.scores[name] for each in audited]
            lengths[:, i] = [each.output_tokens[name] for each in audited]
    return Scores(tuple(models), scores, lengths, prompts)
