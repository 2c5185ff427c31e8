"""What replicas did with their time, and what they cost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from msgspec import Struct

from headway.core.record import Columns, Records
from headway.metrics.columns import Floats, Ints, floats

CHUNK_ROWS = 1 << 21
"""Stretches worked on at a time, to bound the memory of intermediate columns."""


class Level(Struct, frozen=True):
    """A quantity over time."""

    mean: float
    peak: float


@dataclass(frozen=True, slots=True)
class Usage:
    """Per replica, by position in `Records.replicas`, within the window."""

    gpu_hours: Floats
    usd: Floats
    up_s: Floats
    """Paid for and not crashed."""
    busy_s: Floats
    kv_token_s: Floats
    kv_capacity_token_s: Floats
    kv_peak: Floats
    batch_s: Floats
    batch_peak: Floats

    def kv_use(self, rows: list[int]) -> Level | None:
        """KV in use by decoding requests as a share of capacity; None if never up."""
        capacity = self.kv_capacity_token_s[rows].sum()
        if not capacity > 0:
            return None
        return Level(float(self.kv_token_s[rows].sum() / capacity), float(self.kv_peak[rows].max()))

    def batch_size(self, rows: list[int]) -> Level | None:
        """Decoding requests in the batch, over the time that a batch ran; None if none did."""
        busy_s = self.busy_s[rows].sum()
        if not busy_s > 0:
            return None
        return Level(float(self.batch_s[rows].sum() / busy_s), float(self.batch_peak[rows].max()))

    def busy_share(self, rows: list[int]) -> float | None:
        """Share of the time up in which a batch ran; None if never up."""
        up_s = self.up_s[rows].sum()
        return float(self.busy_s[rows].sum() / up_s) if up_s > 0 else None


def usage(records: Records, warmup_s: float) -> Usage:
    """Usage from `warmup_s` to the end of the run. A stretch counts whole if it starts in that window."""
    replicas = records.replicas
    window = (warmup_s, records.end_s)
    paid_s = np.array([_overlap_s(r.up, window) for r in replicas])
    up_s = paid_s - np.array([_overlap_s(r.down, window) for r in replicas])
    capacity = np.array([r.kv_capacity_tokens for r in replicas], dtype=np.float64)
    size = len(replicas)
    sums = {name: np.zeros(size) for name in ("busy_s", "kv_token_s", "batch_s")}
    peaks = {name: np.zeros(size) for name in ("kv", "batch")}
    for position, stretch in _chunks(records, warmup_s):
        duration_s, token_s, last_tokens = integrals(stretch)
        decode = floats(stretch, "num_decode")
        sums["busy_s"] += np.bincount(position, duration_s, size)
        sums["kv_token_s"] += np.bincount(position, token_s, size)
        sums["batch_s"] += np.bincount(position, decode * duration_s, size)
        np.maximum.at(peaks["kv"], position, last_tokens)
        np.maximum.at(peaks["batch"], position, decode)
    return Usage(
        gpu_hours=paid_s / 3600 * np.array([r.num_gpus for r in replicas]),
        usd=paid_s / 3600 * np.array([r.usd_per_hour for r in replicas]),
        up_s=up_s,
        kv_capacity_token_s=capacity * up_s,
        kv_peak=np.divide(peaks["kv"], capacity, out=np.zeros(size), where=capacity > 0),
        batch_peak=peaks["batch"],
        **sums,
    )


def integrals(stretch: Columns) -> tuple[Floats, Floats, Floats]:
    """Of each stretch: its seconds, its KV token-seconds, and the KV tokens after its last iteration."""
    n = floats(stretch, "iterations")
    a_s, b_s = floats(stretch, "a_s"), floats(stretch, "b_s")
    context = floats(stretch, "context_tokens")
    growth = floats(stretch, "num_decode") * (stretch["advances"] != 0)
    pairs = n * (n - 1) / 2
    duration_s = n * a_s + b_s * pairs
    # The sum over iterations k = 0..n-1 of (context + growth*k) * (a + b*k).
    squares = (n - 1) * n * (2 * n - 1) / 6
    token_s = context * duration_s + growth * (a_s * pairs + b_s * squares)
    return duration_s, token_s, context + growth * n


def _chunks(records: Records, warmup_s: float) -> Iterator[tuple[Ints, Columns]]:
    """Stretches that start in the window, some at a time, with the positions of their replicas."""
    ids = [replica.id for replica in records.replicas]
    position_of = np.full(max(ids, default=0) + 1, -1, dtype=np.int64)
    position_of[ids] = np.arange(len(ids))
    stretches = records.stretches
    for low in range(0, len(stretches["replica"]), CHUNK_ROWS):
        rows = slice(low, low + CHUNK_ROWS)
        chunk = {name: column[rows] for name, column in stretches.items()}
        if warmup_s > 0:
            late = floats(chunk, "start_s") >= warmup_s
            chunk = {name: column[late] for name, column in chunk.items()}
        yield position_of[chunk["replica"]], chunk


def _overlap_s(intervals: Iterable[tuple[float, float]], window: tuple[float, float]) -> float:
    low, high = window
    return sum(max(0.0, min(to, high) - max(since, low)) for since, to in intervals)
