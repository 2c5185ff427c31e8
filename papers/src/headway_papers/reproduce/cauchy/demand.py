"""Varying demand: the public Azure hour, and a curve of our own.

The paper replays the Azure LLM inference trace, scaled to its rates (4.1, 4.2). Here its requests per minute give the
rate, and arrivals are Poisson within a minute. Scaled to 30 or 40 times its rate, the trace's own gaps would be noise
of 19,366 requests, equal for all seeds. The curve of our own swings from 0.6 to 1.45 of its mean.

Time runs faster than in the paper if answers are short: the hour, a start (90 s), the windows (2 and 30 min) and the
grace period (30 s) shrink by one factor, which section 3.5 permits for warm instances.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct

from headway.workload.read import read

TRACE = "AzureLLMInferenceTrace_conv.csv.gz"
"""A file of --data: conversations of one hour, 2023."""
CURVE = (0.6, 0.7, 0.85, 1.0, 1.2, 1.35, 1.45, 1.35, 1.15, 1.0, 0.85, 0.75, 0.7, 0.8, 1.0, 1.25)
"""Rates over their mean, by step."""
CURVE_STEP_S = 225.0
MINUTE_S = 60.0
PACE = {"cnn-dailymail": 0.04, "sharegpt": 0.05, "longwriter": 0.25}
"""Seconds of a run per second in the paper: less for shorter answers."""


class Demand(Struct, frozen=True):
    """Rates over an hour, as shares of their mean."""

    key: str
    """The suffix of its rows' names."""
    label: str
    shares: tuple[float, ...]
    step_s: float
    """How long each rate holds, in the paper's seconds."""

    def arrivals(self, mean_rps: float, pace: float) -> dict[str, Any]:
        rates = [round(share * mean_rps, 3) for share in self.shares]
        return {"kind": "curve", "rates": rates, "step_s": self.step_s * pace}

    def duration_s(self, pace: float) -> float:
        return self.step_s * len(self.shares) * pace


OWN = Demand("-curve", "our own curve", CURVE, CURVE_STEP_S)


def azure(file: Path | None) -> Demand | None:
    """The trace's requests in each full minute; None without a file."""
    if file is None:
        return None
    arrival_s = read(file).arrival_s
    num_minutes = int(arrival_s[-1] // MINUTE_S)
    counts = np.bincount((arrival_s // MINUTE_S).astype(int), minlength=num_minutes)[:num_minutes]
    return Demand("", "the Azure hour", tuple((counts / counts.mean()).round(4).tolist()), MINUTE_S)
