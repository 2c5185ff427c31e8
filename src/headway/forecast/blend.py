"""Several forecasts as one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headway.core.forecast import Floats, Forecaster


class Blend:
    """The mean of what several forecasters say, quantile by quantile.

    Where one is far off, the others hold it back: to scale by it takes fewer GPUs than most of them do alone, or about
    as few as the best, which is not the same one everywhere.
    """

    def __init__(self, parts: Sequence[Forecaster]) -> None:
        self.parts = tuple(parts)
        self.cheats = any(part.cheats for part in self.parts)

    def forecast(self, history: Floats, steps: int, quantiles: Sequence[float]) -> Floats:
        """As the Protocol says."""
        said = [part.forecast(history, steps, quantiles) for part in self.parts]
        return np.asarray(np.mean(said, axis=0), "f8")
