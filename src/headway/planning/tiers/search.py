"""The best number of tiers and decay of headroom for a workload, with the uncertainty of the choice.

Sets and parameters
    c in C      settings (number of tiers, decay)
    s in S      seeds: arrivals and lengths are the same for every setting (common random numbers)
    v_cs        value of setting c with seed s, as SLO attainment; higher is better
    tau         tolerance: a loss that is acceptable
The best setting b has the highest mean of v. The loss of another setting is v_bs - v_cs by seed, with a confidence
interval of its mean.
    tied        the interval of the loss includes 0 or less: these seeds do not distinguish c from b
    enough      all of the interval lies at or below tau
The choice is the simplest setting that is enough: the fewest tiers, and of these the smallest loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from headway.catalog.coefficients import PoolCalibration
from headway.core.errors import HeadwayError

K = TypeVar("K")
Ints = npt.NDArray[np.integer]
TierEvaluator = Callable[[int, float, int], float]
"""Maps (number of tiers, decay, seed) to a value; higher is better."""
Interval = Callable[[Sequence[float]], "tuple[float, float] | None"]
"""A confidence interval of the mean; None for too few values."""


@dataclass(frozen=True)
class TierSetting:
    num_tiers: int
    decay: float
    values: tuple[float, ...]
    loss: tuple[float, float]
    """Interval of the loss against the best setting; (0, 0) for the best setting."""
    is_tied: bool
    is_enough: bool

    @property
    def mean(self) -> float:
        return fmean(self.values)


@dataclass(frozen=True)
class TierPlan:
    best: TierSetting
    chosen: TierSetting
    settings: tuple[TierSetting, ...]
    pools: tuple[PoolCalibration, ...] = ()
    """Whether step times of each pool were measured on its GPU and engine."""

    @property
    def tied(self) -> tuple[TierSetting, ...]:
        """Settings that these seeds do not distinguish from the best, including the best."""
        return tuple(setting for setting in self.settings if setting.is_tied)


def plan(
    evaluate: TierEvaluator,
    num_tiers: Sequence[int],
    decays: Sequence[float],
    seeds: Sequence[int],
    interval: Interval,
    tolerance: float = 0.01,
) -> TierPlan:
    """Evaluate all pairs with all seeds. Raises HeadwayError without a pair, or with too few seeds for an interval."""
    if not num_tiers or not decays:
        raise HeadwayError("tiers: nothing to choose from; expected one number of tiers and one decay at least")
    if len(seeds) < 2:
        raise HeadwayError(f"tiers: {len(seeds)} seeds; expected 2 or more, as the answer comes with its uncertainty")
    # a single tier has no headroom, so its decay has no effect
    pairs = list(dict.fromkeys((k, decays[0] if k == 1 else decay) for k, decay in product(num_tiers, decays)))
    values = {(k, decay): tuple(evaluate(k, decay, seed) for seed in seeds) for k, decay in pairs}
    top = max(pairs, key=lambda pair: fmean(values[pair]))
    settings = tuple(_setting(pair, values[pair], values[top], interval, tolerance) for pair in pairs)
    chosen = min((each for each in settings if each.is_enough), key=lambda each: (each.num_tiers, -each.mean))
    return TierPlan(settings[pairs.index(top)], chosen, settings)


def highest_mean(
    bounds: Mapping[K, Sequence[float]], exact: Callable[[K], Sequence[float]]
) -> tuple[K, tuple[float, ...]]:
    """The key with the highest mean of `exact` values, the first of equal ones, and its values.

    `bounds` are upper bounds of the values: only keys that may be the best are looked at.
    """
    values, known = dict(bounds), set[K]()
    while True:
        best = max(values, key=lambda each: fmean(values[each]))
        if best in known:
            return best, tuple(values[best])
        values[best] = exact(best)
        known.add(best)


def merged(tier: Ints, num_classes: int, num_tiers: int) -> Ints:
    """Merge classes 0 to `num_classes` - 1 into tiers of neighbours, as evenly as possible."""
    return (tier.astype(np.int64) * num_tiers // num_classes).astype(tier.dtype)


def _setting(
    pair: tuple[int, float], values: tuple[float, ...], best: tuple[float, ...], interval: Interval, tolerance: float
) -> TierSetting:
    losses = [high - low for high, low in zip(best, values, strict=True)]
    loss = interval(losses) or (losses[0], losses[0])
    return TierSetting(*pair, values, loss, is_tied=loss[0] <= 0.0, is_enough=loss[1] <= tolerance)
