"""Summarises a workload: counts, rate, burstiness and token percentiles."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from headway.workload.table import Floats, Workload


class Spread(Struct, frozen=True):
    """The distribution of one column."""

    min: float
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class Description(Struct, frozen=True):
    """Summary of a workload. None = undefined, as for an empty table or arrivals at a single instant."""

    num_requests: int
    duration_s: float
    """Time from 0 to the last arrival."""
    rate: float | None
    """Requests per second between the first and the last arrival."""
    interarrival_cv: float | None
    """Standard deviation of the gaps divided by their mean: 1 for a Poisson process, more for bursty arrivals."""
    peak_rate: float | None
    """Requests per second in the busiest minute; None if undefined."""
    prompt_tokens: Spread | None
    output_tokens: Spread | None
    reasoning_tokens: Spread | None
    """Reasoning tokens; None if no request reasons."""
    prefix_share: float
    """Share of all prompt tokens that an unbounded prefix cache would already hold."""
    num_sessions: int
    tiers: dict[int, int]
    """Requests by tier."""
    models: dict[str, int]
    """Requests by model; empty if the workload names no models."""
    regions: dict[str, int]
    notes: tuple[str, ...]


def describe(workload: Workload) -> Description:
    rate, cv, peak = _arrivals(workload.arrival_s)
    sessions = workload.columns.get("session_id")
    return Description(
        num_requests=len(workload),
        duration_s=float(workload.arrival_s[-1]) if len(workload) else 0.0,
        rate=rate,
        interarrival_cv=cv,
        peak_rate=peak,
        prompt_tokens=_spread(workload.prompt_tokens),
        output_tokens=_spread(workload.output_tokens),
        reasoning_tokens=_spread(workload.columns.get("reasoning_tokens")),
        prefix_share=_prefix_share(workload),
        num_sessions=0 if sessions is None else len(np.unique(sessions[sessions >= 0])),
        tiers=_counts(workload.column("tier")),
        models=_named(workload, "model", workload.models),
        regions=_named(workload, "region", workload.regions),
        notes=workload.notes,
    )


def _arrivals(arrival_s: Floats) -> tuple[float | None, float | None, float | None]:
    if len(arrival_s) < 2 or arrival_s[-1] <= arrival_s[0]:
        return None, None, None
    gaps = np.diff(arrival_s)
    minutes, counts = np.unique((arrival_s // 60).astype("i8"), return_counts=True)
    last = min(60.0, float(arrival_s[-1]) - float(minutes[0]) * 60) if len(minutes) == 1 else 60.0
    return float(1 / gaps.mean()), float(gaps.std() / gaps.mean()), float(counts.max() / last)


def _spread(column: npt.NDArray[Any] | None) -> Spread | None:
    if column is None or len(column) == 0 or not column.any():
        return None
    p50, p90, p99 = np.percentile(column.astype("f8"), [50, 90, 99]).tolist()
    low, mean, high = float(column.min()), float(column.mean()), float(column.max())
    return Spread(low, mean, p50, p90, p99, high)


def _counts(column: npt.NDArray[Any]) -> dict[int, int]:
    values, counts = np.unique(column, return_counts=True)
    return dict(zip(values.tolist(), counts.tolist(), strict=True))


NO_NAME = "none"
"""Text for an empty name, such as the region of a client that gave none."""


def _named(workload: Workload, column: str, names: tuple[str, ...]) -> dict[str, int]:
    if column not in workload.columns:
        return {}
    return {names[code] or NO_NAME: count for code, count in _counts(workload.columns[column]).items()}


def _prefix_share(workload: Workload) -> float:
    if workload.prefix is None or len(workload) == 0:
        return 0.0
    ids, first = np.unique(workload.prefix.ids, return_index=True)
    tokens = workload.prefix.tokens
    seen_tokens = int(tokens.sum(dtype="i8")) - int(tokens[first].sum(dtype="i8"))
    total = int(workload.prompt_tokens.sum(dtype="i8"))
    outputs = workload.columns.get("output_id")
    if outputs is not None:
        # The tokens of an output are already cached when a later prompt contains them for the first time.
        known = np.isin(ids, outputs[outputs >= 0])
        seen_tokens += int(tokens[first[known]].sum(dtype="i8"))
    return seen_tokens / total
