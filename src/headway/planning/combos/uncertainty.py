"""Demand of a service as quantiles."""

from __future__ import annotations

from math import inf

import numpy as np
from msgspec import Struct

from headway.core.errors import HeadwayError


class UncertainDemand(Struct, frozen=True, forbid_unknown_fields=True):
    """A service's demand as forecast quantiles, with linear interpolation between them."""

    service: str
    quantiles: tuple[float, ...]
    """Increasing quantiles within 0 to 1."""
    rps: tuple[float, ...]
    """Rate at each quantile, nondecreasing."""
    tokens_per_request: float | None = None

    def __post_init__(self) -> None:
        if not self.quantiles or len(self.quantiles) != len(self.rps):
            raise ValueError(f"{self.service}: {len(self.quantiles)} quantiles, {len(self.rps)} rps; expected as many")
        rising = all(low < high for low, high in zip(self.quantiles, self.quantiles[1:], strict=False))
        if not rising or not 0 <= self.quantiles[0] <= self.quantiles[-1] <= 1:
            raise ValueError(f"{self.service}: quantiles: expected them rising, from 0 to 1")
        if not self.rps[0] >= 0 or list(self.rps) != sorted(self.rps) or self.rps[-1] == inf:
            raise ValueError(f"{self.service}: rps: expected 0 or more, never falling")

    def at(self, quantile: float) -> float:
        """The rate that demand exceeds with probability 1 - quantile. Raises HeadwayError outside of the known
        quantiles."""
        first, last = self.quantiles[0], self.quantiles[-1]
        if not first <= quantile <= last:
            raise HeadwayError(f"{self.service}: quantile {quantile:g} is not known; expected {first:g} to {last:g}")
        return float(np.interp(quantile, self.quantiles, self.rps))

    def chance(self, rps: float) -> float:
        """Lower bound of the probability that demand does not exceed this rate: 0 for rates below the first quantile;
        the last quantile for rates above all quantiles."""
        if rps < self.rps[0]:
            return 0.0
        at = max(i for i, each in enumerate(self.rps) if each <= rps)
        if at == len(self.rps) - 1:
            return self.quantiles[-1]
        share = (rps - self.rps[at]) / (self.rps[at + 1] - self.rps[at])
        return self.quantiles[at] + share * (self.quantiles[at + 1] - self.quantiles[at])
