"""Ratio of observed to predicted engine time, for three terms: decoding, prompts, and the time outside the batch.

Each observation is a time and its predicted parts. The factors are the most probable ones (maximum a posteriori).
Logarithms of observed over predicted have a common spread, large logarithms count linearly (Huber), and a factor stays
near 1 unless the observations determine it. Gauss-Newton steps on the factors' logarithms.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt
from msgspec import Struct

Floats = npt.NDArray[np.float64]
Term = Literal["decode", "prefill", "request"]
TERMS: tuple[Term, ...] = ("decode", "prefill", "request")
"""Terms in the order of the parts of `perf.expected_latency.Seconds`."""
PRIOR = np.array([0.5, 0.5, 0.1])
"""Standard deviations of the factors' logarithms without observations."""
LEAST_NOISE = 0.01
"""Smallest spread of an observation's logarithm."""
HUBER = 1.5
"""Residuals count linearly from this number of spreads."""
ROUNDS = 8
SHOWS = 0.3
"""An observed time is used for a term only if at least this share of the time is due to the term."""


class Factor(Struct, frozen=True):
    """Observed over predicted seconds of one term."""

    value: float
    error: float
    """Standard error of the factor's logarithm."""


def fit(observed_s: Floats, parts_s: Floats, kind: npt.NDArray[np.int64]) -> dict[Term, Factor]:
    """The factors of the terms. `parts_s` has one row per observation and one column per term. Observations of one
    `kind` share a spread."""
    x = np.zeros(len(TERMS))
    information = np.diag(PRIOR**-2)
    for _ in range(ROUNDS):
        scaled = parts_s * np.exp(x)
        predicted = scaled.sum(axis=1)
        left, slope = np.log(observed_s / predicted), scaled / predicted[:, None]
        noise = _noise(left, kind)
        weight = np.minimum(1.0, HUBER * noise / np.maximum(np.abs(left), 1e-12)) / noise**2
        information = slope.T @ (slope * weight[:, None]) + np.diag(PRIOR**-2)
        step = np.linalg.solve(information, slope.T @ (weight * left) - x / PRIOR**2)
        x = np.clip(x + np.clip(step, -1.0, 1.0), -4.0, 4.0)
    error = np.sqrt(np.diag(np.linalg.inv(information)))
    return {term: Factor(float(np.exp(x[i])), float(error[i])) for i, term in enumerate(TERMS)}


def _noise(left: Floats, kind: npt.NDArray[np.int64]) -> Floats:
    """Returns, for each observation, the spread of its kind, from the median of its residuals."""
    spread = np.empty(len(left))
    for each in np.unique(kind):
        own = kind == each
        spread[own] = max(1.4826 * float(np.median(np.abs(left[own]))), LEAST_NOISE)
    return spread


def change_at(observed_s: Floats, parts_s: Floats, factors: dict[Term, Factor], term: Term) -> int:
    """The index of the observation from which on the term has its factor; 0: all observations have it.

    At this index, two means fit the observations best: one of the observations before it, and one of the others. If the
    first mean is nearer to the factor than to the prediction, or few observations show the term, the answer is 0.
    """
    column = TERMS.index(term)
    scaled = parts_s * np.array([factors[each].value if each != term else 1.0 for each in TERMS])
    predicted = scaled.sum(axis=1)
    share = scaled[:, column] / predicted
    rows = np.flatnonzero(share >= SHOWS)
    if len(rows) < 4:
        return 0
    shown = np.log(observed_s[rows] / predicted[rows]) / share[rows]
    size = np.log(factors[term].value)
    shown = np.clip(shown, min(0.0, 2 * size), max(0.0, 2 * size))
    num = np.arange(1, len(rows))
    before, total = np.cumsum(shown)[:-1], float(shown.sum())
    gain = before**2 / num + (total - before) ** 2 / (len(rows) - num)
    split = int(np.argmax(gain)) + 1
    is_new = abs(float(before[split - 1]) / split) < 0.5 * abs(size)
    return int(rows[split]) if is_new else 0
