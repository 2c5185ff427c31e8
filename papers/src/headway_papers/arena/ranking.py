"""Regret, and the ranking by it.

With one seed all policies get the same requests, so a policy is compared with the best one of a cell seed by seed. The
interval is over these differences, relative to the mean of the best one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from statistics import fmean
from typing import Literal

from msgspec import Struct

from headway.metrics.interval import interval
from headway.metrics.seeds import Estimate, estimate_of

Values = Mapping[str, Sequence[float]]
"""A metric in one cell, by policy and then by seed."""


class Regret(Struct, frozen=True):
    """The loss of a policy in a cell against the best one, as a share of the best one's mean."""

    mean: float
    low: float | None
    """The 95% interval; None with one seed."""
    high: float | None
    is_tied: bool
    """Whether the policy is the best one, or the interval contains 0."""
    by_seed: tuple[float, ...]


class Standing(Struct, frozen=True):
    """A policy's result over all cells in which it could run."""

    name: str
    is_oracle: bool
    num_cells: int
    regret: Estimate | None
    """Mean over its cells, with an interval over seeds. With one seed, `low` and `high` equal the mean. None without
    cells."""
    worst: float | None
    worst_cell: str | None
    tied_share: float | None
    """Share of its cells in which it is best or tied with the best."""


def best_of(values: Values, better: Literal["high", "low"], oracles: Collection[str] = ()) -> str | None:
    """The policy with the best mean; an oracle only if there is no other."""
    real = [name for name in values if name not in oracles] or list(values)
    sign = -1 if better == "high" else 1
    return min(real, key=lambda name: sign * fmean(values[name]), default=None)


def regrets(values: Values, better: Literal["high", "low"], oracles: Collection[str] = ()) -> dict[str, Regret]:
    """Regret by policy. An oracle's may be negative: the gap that its knowledge closes."""
    best = best_of(values, better, oracles)
    if best is None:
        return {}
    sign = 1 if better == "high" else -1
    scale = abs(fmean(values[best]))
    found = {}
    for name, own in values.items():
        losses = [sign * (a - b) for a, b in zip(values[best], own, strict=True)]
        shares = tuple(_share(loss, scale) for loss in losses)
        bounds = interval(shares)
        low, high = bounds or (None, None)
        mean = fmean(shares)
        is_tied = name == best or mean == 0 or (low is not None and low <= 0)
        found[name] = Regret(mean, low, high, is_tied, shares)
    return found


def _share(loss: float, scale: float) -> float:
    """The loss relative to the scale. Any loss against a best value of 0 counts as 1."""
    if scale:
        return loss / scale
    return 0.0 if loss == 0 else (1.0 if loss > 0 else -1.0)


def standings(
    cells: Mapping[str, Mapping[str, Regret]], names: Sequence[str], oracles: Collection[str] = ()
) -> list[Standing]:
    """The policies by mean regret; policies without a cell come last."""
    found = [_standing(name, cells, name in oracles) for name in names]
    return sorted(found, key=lambda each: (each.regret is None, 0.0 if each.regret is None else each.regret.mean))


def _standing(name: str, cells: Mapping[str, Mapping[str, Regret]], is_oracle: bool) -> Standing:
    own = {cell: by_name[name] for cell, by_name in cells.items() if name in by_name}
    if not own:
        return Standing(name, is_oracle, 0, None, None, None, None)
    by_seed = [fmean(seeds) for seeds in zip(*(each.by_seed for each in own.values()), strict=True)]
    worst_cell = max(own, key=lambda cell: own[cell].mean)
    return Standing(
        name,
        is_oracle,
        len(own),
        estimate_of(by_seed) or Estimate(by_seed[0], by_seed[0], by_seed[0]),
        own[worst_cell].mean,
        worst_cell,
        fmean(each.is_tied for each in own.values()),
    )
