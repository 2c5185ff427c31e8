"""The routings of a cascade's thresholds, and the Chebyshev-guided objective (3.3, appendices C and D)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf

import numpy as np
import numpy.typing as npt

from headway.core.errors import HeadwayError
from headway.planning.cascade.problem import Floats, LatencyBudget, Target
from headway.workload.quality import Scores

MOST_CELLS = 6_000_000
"""Maximum number of routings times requests held at a time."""
MOST_ROUTINGS = 12_000
Number = float | Floats


def penalised_latency(
    latency_s: Number, quality: Number, q_min: float, utopia: float, nadir: float, mu: float
) -> Number:
    """J of 3.3: latency plus a penalty for the shortfall in quality, relative to the range from nadir to utopia."""
    return latency_s + mu * np.maximum(0.0, q_min - quality) / (abs(utopia - nadir) or 1.0)


def penalised_quality(
    quality: Number, latency_s: Number, budget_s: float, best_s: float, worst_s: float, nu: float
) -> Number:
    """The objective of appendix C, to be minimised: quality counts as negative."""
    return -quality + nu * np.maximum(0.0, latency_s - budget_s) / (abs(worst_s - best_s) or 1.0)


@dataclass(frozen=True)
class Objective:
    """J of a routing by its latency and quality; J never falls as latency rises.

    For a `Cheapest` target, "latency" is the price per hour of deployments that are in time.
    """

    target: Target
    utopia: float
    """Quality if all requests go to the last stage."""
    nadir: float
    """Quality if all requests stay with the first stage."""
    best_s: float = 0.0
    worst_s: float = 1.0

    def __call__(self, latency_s: float, quality: float) -> float:
        return float(self.of(latency_s, quality))

    def of(self, latency_s: Number, quality: Number) -> Number:
        target = self.target
        if not isinstance(target, LatencyBudget):
            return penalised_latency(latency_s, quality, target.q_min, self.utopia, self.nadir, target.mu)
        return penalised_quality(quality, latency_s, target.latency_s, self.best_s, self.worst_s, target.nu)

    def limit_s(self, score: float, quality: float) -> float:
        """The latency from which a routing of this quality is no better than `score`."""
        if score == inf:
            return inf
        if not isinstance(self.target, LatencyBudget):
            return max(0.0, score - self(0.0, quality))
        if self(0.0, quality) >= score:
            return 0.0
        range_s = abs(self.worst_s - self.best_s) or 1.0
        return self.target.latency_s + (score + quality) * range_s / self.target.nu

    def met(self, latency_s: float, quality: float) -> bool:
        if isinstance(self.target, LatencyBudget):
            return latency_s <= self.target.latency_s
        return quality >= self.target.q_min - 1e-9


@dataclass(frozen=True, eq=False)
class Routings:
    """All different routings of some thresholds, one row each."""

    thresholds: Floats
    """Array [routing, stage except the last]."""
    reached: npt.NDArray[np.bool_]
    """Array [routing, stage, request]."""
    quality: Floats
    ratios: Floats
    """Array [routing, stage]."""
    work: Floats
    """Work of all stages in an arbitrary unit; orders the routings."""

    def __len__(self) -> int:
        return len(self.quality)


def cascades(scores: Scores, weights: Sequence[float]) -> Routings:
    """The routings of a cascade (Figure 4). Thresholds are the occurring scores, 0 and 100.

    If there are too many thresholds, they are thinned evenly by rank. `weights`: the work of one token of each model.
    Do not write to the arrays: the searches of several planners share them.
    """
    return _cascades(scores, tuple(weights))


@lru_cache(maxsize=4)
def _cascades(scores: Scores, weights: tuple[float, ...]) -> Routings:
    stages = len(scores.models)
    most = int(min(MOST_ROUTINGS, max(MOST_CELLS // len(scores), 64)) ** (1 / max(stages - 1, 1)))
    levels = [_levels(scores.scores[:, i], most) for i in range(stages - 1)]
    grids = np.meshgrid(*levels, indexing="ij") if levels else []
    thresholds = np.stack([grid.ravel() for grid in grids], axis=1) if levels else np.zeros((1, 0))
    final = np.full((len(thresholds), len(scores)), stages - 1, "i1")
    for i in reversed(range(stages - 1)):
        with np.errstate(invalid="ignore"):
            accepted = scores.scores[:, i] >= levels[i][:, None]
        at = np.searchsorted(levels[i], thresholds[:, i])
        final[accepted[at]] = i
    first = _first_of_each(final)
    final = final[first]
    reached = final[:, None, :] >= np.arange(stages, dtype="i1")[:, None]
    return of_routes(scores, thresholds[first], reached, final, weights)


def _first_of_each(final: npt.NDArray[np.int8]) -> npt.NDArray[np.int64]:
    """The first of equal rows, in order. `np.unique` sorts rows, at ten times the time."""
    data, width = final.tobytes(), final.shape[1]
    first = {data[i * width : (i + 1) * width]: i for i in reversed(range(len(final)))}
    return np.sort(np.fromiter(first.values(), "i8", len(first)))


def of_routes(
    scores: Scores,
    thresholds: Floats,
    reached: npt.NDArray[np.bool_],
    final: npt.NDArray[np.int8],
    weights: Sequence[float],
) -> Routings:
    """Routings of any kind. `final[routing, request]` is the stage whose answer the client gets."""
    given = scores.scores[np.arange(len(scores)), final]
    num_judged = (~np.isnan(given)).sum(axis=1)
    if not num_judged.all():
        rows = num_judged > 0
        if not rows.any():
            raise HeadwayError("scores: no answer that would be given has one")
        return of_routes(scores, thresholds[rows], reached[rows], final[rows], weights)
    quality = np.nansum(given, axis=1) / num_judged
    tokens = (scores.output_tokens + 0.1 * scores.prompt_tokens[:, None]).T * np.asarray(weights)[:, None]
    work = np.einsum("rsn,sn->r", reached, tokens)  # through BLAS it would convert `reached` whole: 8 times the time
    return Routings(thresholds, reached, quality, reached.mean(axis=2), work)


def _levels(scores: Floats, most: int) -> Floats:
    levels = np.unique(np.concatenate([[0.0, 100.0], scores[~np.isnan(scores)]]))
    if len(levels) <= most:
        return levels
    return np.asarray(levels[np.unique(np.round(np.linspace(0, len(levels) - 1, most)).astype("i8"))])


def proportional(routings: Routings) -> int:
    """The routing nearest to giving the i-th model 1/i of the requests (theta_0 of 3.3)."""
    wanted = 1.0 / np.arange(1, routings.ratios.shape[1] + 1)
    return int(np.abs(routings.ratios - wanted).max(axis=1).argmin())
