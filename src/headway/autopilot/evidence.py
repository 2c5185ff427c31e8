"""Decides whether a change gains, from pairs of periods with and without it. The test is repeated after every pair.

The order within a pair is drawn at random, so without an effect the differences +d and -d of a pair are equally likely,
whatever the load does meanwhile. For a bet b, the product over pairs of 2 / (1 + exp(-2 b d)) is then a nonnegative
martingale that begins at 1, and so is the mean over several bets. The chance that it ever reaches 1 / alpha is at most
alpha (Ville's inequality), however often one looks and whenever one stops. Sources: de la Pena, "A general class of
exponential inequalities for martingales and ratios" (Annals of Probability, 1999), for symmetric differences; Ramdas,
Ruf, Larsson and Koolen, "Admissible anytime-valid sequential inference must rely on nonnegative martingales" (arXiv
2009.03167). Periods are compared rather than requests, because simultaneous requests share replicas: Bojinov,
Simchi-Levi and Zhao, "Design and analysis of switchback experiments" (Management Science, 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log, log1p, sqrt
from statistics import NormalDist, fmean

from msgspec import Struct

BETS: tuple[float, ...] = tuple(float(1 << i) for i in range(10))
"""Bets in units of 1 over a difference. The best bet for a mean m and a variance v is about m / v."""
_STEPS = 30
_QUANTILES = tuple(NormalDist().inv_cdf((i + 0.5) / 32) for i in range(32))


class Bounds(Struct, frozen=True):
    """Bounds of a gain. Each bound holds at all times together with probability 1 - alpha."""

    low: float
    high: float


def log_evidence(gains: Sequence[float], least: float = 0.0) -> float:
    """The logarithm of the evidence that the gain is above `least`. `gains`: the gain of each pair, in [-1, 1]."""
    bets = [sum(_log_factor(bet, gain - least) for gain in gains) for bet in BETS]
    most = max(bets)
    return most + log(sum(exp(each - most) for each in bets) / len(bets))


def is_above(gains: Sequence[float], least: float, alpha: float) -> bool:
    """Whether the gain is above `least`, at confidence 1 - alpha."""
    return log_evidence(gains, least) >= log(1 / alpha)


def is_below(gains: Sequence[float], most: float, alpha: float) -> bool:
    """Whether the gain is below `most`, at confidence 1 - alpha."""
    return is_above([-gain for gain in gains], -most, alpha)


def bounds(gains: Sequence[float], alpha: float) -> Bounds:
    """The gains that are not refuted, if the change adds the same amount to every period."""
    return Bounds(_low(gains, alpha), -_low([-gain for gain in gains], alpha))


def _low(gains: Sequence[float], alpha: float) -> float:
    """The largest bound above which the gain certainly lies, by bisection: the evidence falls as the bound grows."""
    low, high = -1.0, 1.0
    if not is_above(gains, low, alpha):
        return low
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if is_above(gains, middle, alpha) else (low, middle)
    return low


def pairs_needed(gain: float, deviation: float, alpha: float) -> float:
    """Pairs until a gain is certain in most runs, if the gains of single pairs have this standard deviation."""
    growth = max(fmean(_log_factor(bet, gain + deviation * z) for z in _QUANTILES) for bet in BETS)
    if growth <= 0:
        return float("inf")
    mean = (log(1 / alpha) + log(len(BETS))) / growth
    return mean + 2 * sqrt(mean)  # the evidence of single runs varies


def _log_factor(bet: float, gain: float) -> float:
    """log(2 / (1 + exp(-2 bet gain))), without overflow."""
    x = 2 * bet * gain
    return log(2) - (log1p(exp(-x)) if x > 0 else log1p(exp(x)) - x)
