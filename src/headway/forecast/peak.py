"""What SageServe asks a forecast for (6.3): the most that the next hour will bring, and a buffer for batch work."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headway.core.errors import HeadwayError
from headway.core.forecast import Floats, Forecaster

HOUR_S = 3600.0
BUFFER = 0.1
"""Of the non-interactive load of the hour before: the paper's beta."""


def peaks_ahead(
    forecaster: Forecaster,
    interactive_tps: Floats,
    batch_tps: Floats,
    step_s: float,
    quantiles: Sequence[float] = (0.5,),
    periods: int = 1,
    period_s: float = HOUR_S,
    buffer: float = BUFFER,
) -> Floats:
    """Input tokens per second to be ready for: quantiles (rows) in each of the next periods (columns).

    Of each period the largest step of the forecast of `interactive_tps`, plus beta: `buffer` times the mean of
    `batch_tps` over the last period. Several periods and quantiles go beyond the paper, which takes the next hour's
    expected maximum; the quantile is of each step, so that of a period's maximum is somewhat higher.
    """
    steps = round(period_s / step_s)
    if steps < 1 or abs(steps * step_s - period_s) > 1e-6 * period_s:
        raise HeadwayError(f"steps of {step_s:g} s do not fill a period of {period_s:g} s")
    said = forecaster.forecast(interactive_tps, steps * periods, quantiles)
    beta = buffer * float(np.mean(batch_tps[-steps:])) if len(batch_tps) else 0.0
    return np.asarray(said.reshape(len(quantiles), periods, steps).max(axis=2) + beta, "f8")
