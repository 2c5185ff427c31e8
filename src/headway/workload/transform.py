"""Transforms workloads. Each function returns a new table that shares unchanged columns."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from headway.core.errors import HeadwayError
from headway.workload.random_streams import column_of, drawing
from headway.workload.table import DTYPES, Floats, Workload, constant


def arriving_at(workload: Workload, arrival_s: Floats) -> Workload:
    """Set new arrival times. Deadlines keep their distance to the arrival."""
    deadline_s = workload.columns.get("deadline_s")
    moved = workload.with_columns({"arrival_s": arrival_s})
    if deadline_s is None:
        return moved
    return moved.with_columns({"deadline_s": deadline_s + (arrival_s - workload.arrival_s)})


def scale_rate(workload: Workload, factor: float) -> Workload:
    """Multiply the arrival rate by `factor`: 2 = twice the rate, in half the time."""
    if not 0 < factor < float("inf"):
        raise HeadwayError(f"rate scale: {factor}; expected a number above 0")
    return arriving_at(workload, workload.arrival_s / factor)


def window(workload: Workload, from_s: float = 0.0, to_s: float | None = None) -> Workload:
    """Keep the requests that arrive in [from_s, to_s), and make `from_s` the new 0."""
    end_s = float("inf") if to_s is None else to_s
    if not 0 <= from_s < end_s:
        raise HeadwayError(f"window: from_s {from_s} to to_s {to_s}; expected 0 <= from_s < to_s")
    start, stop = np.searchsorted(workload.arrival_s, [from_s, end_s]).tolist()
    part = workload.slice(start, stop)
    return arriving_at(part, part.arrival_s - from_s)


def retier(workload: Workload, mix: Mapping[int, float], seed: int) -> Workload:
    """Draw new tiers: tier t with a probability proportional to `mix[t]`."""
    tiers = drawing(list(mix), list(mix.values()), seed, "tiers")
    return workload.with_columns({"tier": column_of(len(workload), DTYPES["tier"], tiers)})


def with_slo(
    workload: Workload,
    *,
    tier: int | None = None,
    ttft_s: float | None = None,
    tpot_s: float | None = None,
    e2e_s: float | None = None,
    deadline_after_s: float | None = None,
    timeout_s: float | None = None,
) -> Workload:
    """Set SLOs, a deadline relative to arrival, and the client timeout, for all requests or for one tier.

    None leaves a column unchanged. Raises HeadwayError for a value that is not positive.
    """
    limits = {"slo_ttft_s": ttft_s, "slo_tpot_s": tpot_s, "slo_e2e_s": e2e_s, "timeout_s": timeout_s}
    new = {name: constant(len(workload), value) for name, value in limits.items() if value is not None}
    if deadline_after_s is not None:
        new["deadline_s"] = workload.arrival_s + deadline_after_s
    if tier is not None:
        chosen = workload.column("tier") == tier
        new = {name: np.where(chosen, values, workload.column(name)) for name, values in new.items()}
    for name, value in {**limits, "deadline_s": deadline_after_s}.items():
        if value is not None and not 0 < value < float("inf"):
            raise HeadwayError(f"{name}: {value}; expected seconds above 0")
    return workload.with_columns(new)
