"""Demand before a run, for forecasting scalers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

DemandKey = tuple[str, str, int]
"""(model, region, tier), as in `PoolsView.arrived`."""


class PastDemand(Struct, frozen=True):
    """Prompt tokens per second in equal steps; the last step ends when the run begins."""

    step_s: float
    tps: Mapping[DemandKey, npt.NDArray[np.float64]]
    """Rates per step, oldest first; all keys have the same number of steps."""

    @property
    def num_steps(self) -> int:
        return max(map(len, self.tps.values()), default=0)

    @property
    def length_s(self) -> float:
        return self.num_steps * self.step_s
