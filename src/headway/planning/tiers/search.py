"""How many tiers, and how steeply their headroom falls: the best setting for a workload, and how sure that is.

Sets and parameters
    c in C      settings (number of tiers, decay)
    s in S      seeds: arrivals and lengths are the same for every setting (common random numbers)
    v_cs        what the evaluator says of setting c with seed s; higher is better, as SLO attainment is
    tau         tolerance: a loss that does not matter
The best setting b has the highest mean of v. What another setting loses is v_bs - v_cs, seed by seed; its interval
says how sure that is.
    tied        the interval of the loss reaches down to 0: these seeds do not tell c from b
    enough      all of the interval lies at or below tau
The answer is the simplest of the settings that are enough: the fewest tiers, of these the one that loses least.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean

import numpy as np
import numpy.typing as npt

from headway.core.errors import HeadwayError

Ints = npt.NDArray[np.integer]
Evaluator = Callable[[int, float, int], float]
"""(number of tiers, decay, seed) -> a value; higher is better."""
Interval = Callable[[Sequence[float]], "tuple[float, float] | None"]
"""A confidence interval of the mean; None where there are too few values."""


@dataclass(frozen=True)
class Setting:
    """One that was tried."""

    num_tiers: int
    decay: float
    values: tuple[float, ...]
    """One a seed."""
    loss: tuple[float, float]
    """Interval of what it loses against the best; (0, 0) for the best itself."""
    is_tied: bool
    """These seeds do not tell it from the best."""
    is_enough: bool
    """It loses no more than the tolerance, for sure."""

    @property
    def mean(self) -> float:
        """Over seeds."""
        return fmean(self.values)


@dataclass(frozen=True)
class TierPlan:
    """The answer."""

    best: Setting
    """With the highest mean."""
    chosen: Setting
    """The simplest that is enough."""
    settings: tuple[Setting, ...]
    """All, in the order in which they were tried."""

    @property
    def tied(self) -> tuple[Setting, ...]:
        """All that these seeds do not tell from the best, which is one of them."""
        return tuple(setting for setting in self.settings if setting.is_tied)


def plan(
    evaluate: Evaluator,
    num_tiers: Sequence[int],
    decays: Sequence[float],
    seeds: Sequence[int],
    interval: Interval,
    tolerance: float = 0.01,
) -> TierPlan:
    """The best of all pairs. HeadwayError where there are none, or too few seeds for an interval."""
    if not num_tiers or not decays:
        raise HeadwayError("tiers: nothing to choose from; expected one number of tiers and one decay at least")
    if len(seeds) < 2:
        raise HeadwayError(f"tiers: {len(seeds)} seeds; expected 2 or more, as the answer comes with its uncertainty")
    # A single tier has nobody to keep away, so no headroom, whatever its decay.
    pairs = list(dict.fromkeys((k, decays[0] if k == 1 else decay) for k, decay in product(num_tiers, decays)))
    values = {(k, decay): tuple(evaluate(k, decay, seed) for seed in seeds) for k, decay in pairs}
    top = max(pairs, key=lambda pair: fmean(values[pair]))
    settings = tuple(_setting(pair, values[pair], values[top], interval, tolerance) for pair in pairs)
    chosen = min((each for each in settings if each.is_enough), key=lambda each: (each.num_tiers, -each.mean))
    return TierPlan(settings[pairs.index(top)], chosen, settings)


def merged(tier: Ints, num_classes: int, num_tiers: int) -> Ints:
    """Classes 0 to `num_classes` - 1 as tiers: neighbours together, as evenly as can be."""
    return (tier.astype(np.int64) * num_tiers // num_classes).astype(tier.dtype)


def _setting(
    pair: tuple[int, float], values: tuple[float, ...], best: tuple[float, ...], interval: Interval, tolerance: float
) -> Setting:
    losses = [high - low for high, low in zip(best, values, strict=True)]
    loss = interval(losses) or (losses[0], losses[0])
    return Setting(*pair, values, loss, is_tied=loss[0] <= 0.0, is_enough=loss[1] <= tolerance)
