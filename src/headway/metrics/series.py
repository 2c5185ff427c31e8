"""Curves of bounded size for charts: load and KV use over time, arrivals and completions, distributions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headway.core.record import Columns, Outcome, Records
from headway.metrics.columns import Floats, Ints, Rows, floats, rows_by_code
from headway.metrics.gaps import Gaps
from headway.metrics.tokens import inter_token_gaps
from headway.metrics.usage import integrals

CDF_POINTS = 400


@dataclass(frozen=True, slots=True)
class FleetLoad:
    """Requests in the system over time, in equal bins."""

    edges_s: Floats
    waiting: Floats
    """Mean over each bin of the requests in the system that are in no batch: held, queued, or swapped out."""
    running: Floats
    """Mean over each bin of the requests in a batch."""
    arrived: Ints
    """Number of arrivals until each edge of the bins."""
    completed: Ints
    """Number of completions until each edge of the bins."""


@dataclass(frozen=True, slots=True)
class ReplicaTimelines:
    """Replicas over time: means over equal bins, one row per replica in the order of `Records.replicas`.

    NaN if a replica was down or absent for the whole bin.
    """

    edges_s: Floats
    kv_use: Floats
    """KV tokens of decoding requests as a share of capacity."""
    batch_size: Floats
    """Decoding requests; idle time counts as 0."""
    num_waiting: Floats


def bin_middles_s(edges_s: Floats) -> Floats:
    return (edges_s[1:] + edges_s[:-1]) / 2


def fleet_load(records: Records, *, bins: int) -> FleetLoad:
    """Waiting and running requests in `bins` equal parts of the run."""
    edges_s = np.linspace(0.0, max(records.end_s, 1e-9), bins + 1)
    table, segments = records.requests, records.segments
    arrival_s, end_s = floats(records.workload, "arrival_s")[table["request"]], floats(table, "end_s")
    begun_s = floats(segments, "admitted_s")
    stayed = ~np.isnan(begun_s)
    ran = _sojourn_s(edges_s, begun_s[stayed], floats(segments, "end_s", stayed))
    inside = _sojourn_s(edges_s, arrival_s, end_s)
    width_s = np.diff(edges_s)
    return FleetLoad(
        edges_s=edges_s,
        waiting=np.maximum(inside - ran, 0.0) / width_s,
        running=np.maximum(ran, 0.0) / width_s,
        arrived=_cumulative(edges_s, arrival_s),
        completed=_cumulative(edges_s, end_s[table["outcome"] == Outcome.FINISHED]),
    )


def _cumulative(edges_s: Floats, events_s: Floats, weights: Floats | None = None) -> Ints:
    """The number, or the sum of weights, of the events up to each edge."""
    first = np.searchsorted(edges_s, events_s)
    return np.asarray(np.cumsum(np.bincount(first, weights, minlength=len(edges_s) + 1)[: len(edges_s)]))


def _sojourn_s(edges_s: Floats, from_s: Floats, to_s: Floats) -> Floats:
    """Total time in each bin of all intervals from `from_s` to `to_s`."""
    return np.diff(_since_s(edges_s, from_s) - _since_s(edges_s, to_s))


def _since_s(edges_s: Floats, events_s: Floats) -> Floats:
    """The sum of (edge - event) over the events up to each edge."""
    return np.asarray(_cumulative(edges_s, events_s) * edges_s - _cumulative(edges_s, events_s, events_s))


def replica_timelines(records: Records, *, bins: int) -> ReplicaTimelines:
    """KV use, batch size and waiting requests of each replica in `bins` equal parts of the run."""
    edges_s = np.linspace(0.0, max(records.end_s, 1e-9), bins + 1)
    rows = rows_by_code(records.stretches["replica"])
    kv, batch, waiting = (np.zeros((len(records.replicas), bins)) for _ in range(3))
    for position, replica in enumerate(records.replicas):
        stretch = _in_order(records.stretches, rows.get(replica.id, np.empty(0, dtype=np.intp)))
        duration_s, token_s, _ = integrals(stretch)
        start_s = floats(stretch, "start_s")
        capacity = max(replica.kv_capacity_tokens, 1)
        kv[position] = _means(edges_s, start_s, duration_s, token_s) / capacity
        batch[position] = _means(edges_s, start_s, duration_s, duration_s * floats(stretch, "num_decode"))
        waiting[position] = _means(edges_s, start_s, duration_s, duration_s * floats(stretch, "num_waiting"))
        absent = ~_present(edges_s, replica.up, replica.down)
        for table in (kv, batch, waiting):
            table[position, absent] = np.nan
    return ReplicaTimelines(edges_s, kv, batch, waiting)


def _in_order(stretches: Columns, rows: Rows) -> Columns:
    start_s = floats(stretches, "start_s", rows)
    rows = rows[np.argsort(start_s, kind="stable")]
    return {name: column[rows] for name, column in stretches.items()}


def _means(edges_s: Floats, start_s: Floats, duration_s: Floats, integral: Floats) -> Floats:
    """Means over bins of a quantity whose integral over each stretch is given, spread evenly within the stretch."""
    if not len(start_s):
        return np.zeros(len(edges_s) - 1)
    total = np.cumsum(integral)
    time_s = np.column_stack([start_s, start_s + duration_s]).ravel()
    reached = np.column_stack([total - integral, total]).ravel()
    return np.asarray(np.diff(np.interp(edges_s, time_s, reached)) / np.diff(edges_s))


def _present(
    edges_s: Floats, up: tuple[tuple[float, float], ...], down: tuple[tuple[float, float], ...]
) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Bins in which the replica was up for some of the time."""
    low, high = edges_s[:-1], edges_s[1:]
    up_s = sum((_overlap_s(low, high, *interval) for interval in up), np.zeros(len(low)))
    down_s = sum((_overlap_s(low, high, *interval) for interval in down), np.zeros(len(low)))
    return np.asarray(up_s - down_s > 1e-9 * (high - low))


def _overlap_s(low: Floats, high: Floats, since_s: float, to_s: float) -> Floats:
    return np.asarray(np.maximum(np.minimum(high, to_s) - np.maximum(low, since_s), 0.0))


@dataclass(frozen=True, slots=True)
class Cdf:
    """Percentage of values at or below `value_s`."""

    value_s: Floats
    percent: Floats


def cdf(values: Floats | Gaps) -> Cdf | None:
    """The cumulative distribution, denser in the tail; None if there are no values. NaN are ignored."""
    even, tail = np.linspace(0.0, 1.0, CDF_POINTS // 2), 1 - np.geomspace(1, 1e-4, CDF_POINTS // 2)
    fractions = np.unique(np.concatenate([even, tail]))
    if isinstance(values, Gaps):
        return Cdf(values.curve_s(fractions), 100 * fractions) if values.total else None
    values = values[~np.isnan(values)]
    return Cdf(np.quantile(values, fractions), 100 * fractions) if len(values) else None


def itl_gaps(records: Records, warmup_s: float = 0.0) -> Gaps:
    """Inter-token latencies of the requests that arrived at `warmup_s` or later."""
    counted = floats(records.workload, "arrival_s") >= warmup_s
    group = np.where(counted, 0, -1)
    return inter_token_gaps(records, group).get(0) or Gaps([])
