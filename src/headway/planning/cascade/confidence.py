"""How sure a plan's thresholds are: the same plan on other draws of as many requests (bootstrap)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from headway.planning.cascade.problem import Floats
from headway.workload.quality import Scores
from headway.workload.random_streams import stream

DRAWS = 400
LEVELS = 101
"""Thresholds that are looked at for each stage, evenly from 0 to 100."""
ENDS = (0.025, 0.975)
Interval = tuple[float, float]
"""95%: from, to."""


class Confidence(Struct, frozen=True, forbid_unknown_fields=True):
    """95% intervals over draws of the requests that a plan was made on."""

    quality: Interval
    """At the plan's thresholds."""
    processing_ratios: tuple[Interval, ...]
    """The share of the requests that reaches each stage, at the plan's thresholds."""
    thresholds: tuple[Interval | None, ...]
    """Of each stage but the last: the lowest that reaches the plan's quality, the others as they are; None: in some
    draws none does."""


def confidence(scores: Scores, thresholds: Sequence[float], seed: int = 0) -> Confidence:
    """Of a cascade's thresholds on the requests that they were chosen on."""
    final = scores.final_stage(thresholds)
    num, stages = len(scores), len(scores.models)
    drawn = stream(seed, "draws of requests").integers(0, num, (DRAWS, num))
    given = _given(scores, final)
    quality = np.nanmean(given[drawn], axis=1)
    ratios = [(final >= stage)[drawn].mean(axis=1) for stage in range(stages)]
    wanted = float(np.nanmean(given))
    return Confidence(
        _interval(quality),
        tuple(_interval(each) for each in ratios),
        tuple(_of_threshold(scores, thresholds, stage, drawn, wanted) for stage in range(stages - 1)),
    )


def _of_threshold(
    scores: Scores, thresholds: Sequence[float], stage: int, drawn: np.ndarray, wanted: float
) -> Interval | None:
    """Where the lowest threshold of a stage lies that keeps the quality."""
    levels = np.unique(np.append(np.linspace(0.0, 100.0, LEVELS), thresholds[stage]))
    lowest = np.full(len(drawn), np.nan)
    for level in levels[::-1].tolist():
        own = [*thresholds[:stage], level, *thresholds[stage + 1 :]]
        found = np.nanmean(_given(scores, scores.final_stage(own))[drawn], axis=1)
        lowest = np.where(found >= wanted - 1e-9, level, lowest)
    return None if np.isnan(lowest).any() else _interval(lowest)


def _given(scores: Scores, final: np.ndarray) -> Floats:
    found: Floats = scores.scores[np.arange(len(scores)), final]
    return found


def _interval(values: Floats) -> Interval:
    low, high = np.quantile(values, ENDS).tolist()
    return low, high
