"""What a forecaster is: a regular series up to now in, quantiles of what comes next out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


class Forecaster(Protocol):
    """Says what comes next. The same history gives the same answer, whatever was asked before."""

    cheats: bool
    """True: it knows more than the history it is given, so its results are no forecasts."""

    def forecast(self, history: Floats, steps: int, quantiles: Sequence[float]) -> Floats:
        """Quantiles (rows, as asked) of the next `steps` values (columns), none below 0.

        `history` holds one value per step, oldest first, one or more. Rows do not cross: more asked, no less said.
        """
