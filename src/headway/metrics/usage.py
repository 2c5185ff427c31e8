"""Usage and cost of replicas, and the GPU hours that scaling spends on starting replicas and returns as spot
capacity."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from msgspec import Struct

from headway.core.record import Columns, Records, ReplicaRecord
from headway.metrics.columns import Floats, Ints, floats
from headway.metrics.energy import FleetPower

INITIAL = "initial"
JOULES_PER_KWH = 3.6e6
DAY_S = 86400.0
CHUNK_ROWS = 1 << 18
"""Stretches processed at a time; bounds the memory of intermediate columns."""


class MeanPeak(Struct, frozen=True):
    mean: float
    peak: float


@dataclass(frozen=True, slots=True)
class ReplicaUsage:
    """Usage of each replica within the window, by position in `Records.replicas`."""

    gpu_hours: Floats
    usd: Floats
    up_s: Floats
    """Paid time, without crashes."""
    busy_s: Floats
    kv_token_s: Floats
    kv_capacity_token_s: Floats
    kv_peak: Floats
    batch_s: Floats
    batch_peak: Floats
    joules: Floats
    """Energy: idle power while paid for, and additional power in iterations. NaN: the power of the replica's GPUs is
    unknown."""

    def kv_use(self, rows: list[int] | slice) -> MeanPeak | None:
        """KV tokens of decoding requests as a share of capacity; None if never up."""
        capacity = self.kv_capacity_token_s[rows].sum()
        if not capacity > 0:
            return None
        return MeanPeak(float(self.kv_token_s[rows].sum() / capacity), float(self.kv_peak[rows].max()))

    def batch_size(self, rows: list[int] | slice) -> MeanPeak | None:
        """Decoding requests in the batch while a batch ran; None if none ran."""
        busy_s = self.busy_s[rows].sum()
        if not busy_s > 0:
            return None
        return MeanPeak(float(self.batch_s[rows].sum() / busy_s), float(self.batch_peak[rows].max()))

    def energy_kwh(self, rows: list[int] | slice) -> float | None:
        """Energy of the replicas with known power; None if there are none."""
        joules = self.joules[rows]
        return None if np.isnan(joules).all() else float(np.nansum(joules)) / JOULES_PER_KWH

    def kwh_per_day(self, window_s: float) -> float | None:
        """Energy per day of all replicas at the window's mean power; None if no power is known."""
        energy = self.energy_kwh(list(range(len(self.joules))))
        return None if energy is None or window_s <= 0 else energy * DAY_S / window_s

    def busy_share(self, rows: list[int] | slice) -> float | None:
        """Share of the up time in which a batch ran; None if never up."""
        up_s = self.up_s[rows].sum()
        return float(self.busy_s[rows].sum() / up_s) if up_s > 0 else None


def fullest(used: ReplicaUsage, replicas: Sequence[ReplicaRecord]) -> float:
    """Mean fullness of the fullest replica while a batch runs: the used share of its sequences or of its KV cache."""
    busy_s = np.maximum(used.busy_s, 1e-9)
    seqs = used.batch_s / busy_s / np.array([max(each.max_num_seqs, 1) for each in replicas])
    capacity = np.array([each.kv_capacity_tokens for each in replicas], dtype=np.float64)
    kv = np.divide(used.kv_token_s, capacity * busy_s, out=np.zeros(len(replicas)), where=capacity > 0)
    return float(np.maximum(seqs, kv).max(initial=0.0))


def usage(records: Records, warmup_s: float) -> ReplicaUsage:
    """Usage from `warmup_s` to the end of the run. A stretch that starts in the window counts completely."""
    replicas = records.replicas
    window = (warmup_s, records.end_s)
    paid_s = np.array([_overlap_s(r.up, window) for r in replicas])
    up_s = paid_s - np.array([_overlap_s(r.down, window) for r in replicas])
    capacity = np.array([r.kv_capacity_tokens for r in replicas], dtype=np.float64)
    size = len(replicas)
    sums = {name: np.zeros(size) for name in ("busy_s", "kv_token_s", "batch_s", "joules")}
    peaks = {name: np.zeros(size) for name in ("kv", "batch")}
    power = FleetPower([r.power for r in replicas])
    for position, stretch in _chunks(records, warmup_s):
        duration_s, token_s, last_tokens = integrals(stretch)
        sums["joules"] += np.bincount(position, power.busy_joules(position, stretch, duration_s), size)
        decode = floats(stretch, "num_decode")
        sums["busy_s"] += np.bincount(position, duration_s, size)
        sums["kv_token_s"] += np.bincount(position, token_s, size)
        sums["batch_s"] += np.bincount(position, decode * duration_s, size)
        np.maximum.at(peaks["kv"], position, last_tokens)
        np.maximum.at(peaks["batch"], position, decode)
    sums["joules"] += power.idle_w * paid_s
    sums["kv_token_s"][capacity == 0] = 0.0  # unknown for a hosted replica
    return ReplicaUsage(
        gpu_hours=paid_s / 3600 * np.array([r.num_gpus for r in replicas]),
        usd=paid_s / 3600 * np.array([r.usd_per_hour for r in replicas]) + _tokens_usd(records, warmup_s),
        up_s=up_s,
        kv_capacity_token_s=capacity * up_s,
        kv_peak=np.divide(peaks["kv"], capacity, out=np.zeros(size), where=capacity > 0),
        batch_peak=peaks["batch"],
        **sums,
    )


def _tokens_usd(records: Records, warmup_s: float) -> Floats:
    """Charges of hosted replicas for the requests that they answered last, among those that arrived in the window. A
    request without a token is free."""
    replicas, size = records.replicas, len(records.replicas)
    usd = np.zeros(size)
    if not any(r.usd_per_million_input_tokens or r.usd_per_million_output_tokens for r in replicas):
        return usd
    ids, replica = records.requests["request"].astype(np.int64), records.requests["replica"].astype(np.int64)
    begun = (replica >= 0) & (floats(records.requests, "generated_tokens") > 0)  # also if it was not streamed
    begun &= floats(records.workload, "arrival_s")[ids] >= warmup_s
    position = _positions(records)[np.where(begun, replica, 0)]
    prompt = floats(records.workload, "prompt_tokens")[ids]
    # For a request that was placed several times, the cached tokens of its first replica count.
    cached = np.minimum(floats(records.requests, "cached_prompt_tokens"), prompt)
    prices = (
        (prompt - cached, [r.usd_per_million_input_tokens for r in replicas]),
        (cached, [_cached_price(r) for r in replicas]),
        (floats(records.requests, "generated_tokens"), [r.usd_per_million_output_tokens for r in replicas]),
    )
    for tokens, price in prices:
        usd += np.bincount(position, np.where(begun, tokens, 0.0), size) * np.array(price) / 1e6
    return usd


def _cached_price(replica: ReplicaRecord) -> float:
    price = replica.usd_per_million_cached_tokens
    return replica.usd_per_million_input_tokens if price is None else price


def _positions(records: Records) -> Ints:
    """Position of each replica in `Records.replicas`, by its id; -1 if there is none."""
    ids = [replica.id for replica in records.replicas]
    position_of = np.full(max(ids, default=0) + 1, -1, dtype=np.int64)
    position_of[ids] = np.arange(len(ids))
    return position_of


def integrals(stretch: Columns) -> tuple[Floats, Floats, Floats]:
    """Returns, for each stretch, seconds, KV token-seconds, and KV tokens after the last iteration."""
    n = floats(stretch, "iterations")
    a_s, b_s = floats(stretch, "a_s"), floats(stretch, "b_s")
    context = floats(stretch, "context_tokens")
    growth = floats(stretch, "num_decode") * (stretch["advances"] != 0)
    pairs = n * (n - 1) / 2
    duration_s = n * a_s + b_s * pairs
    # the sum over iterations k = 0..n-1 of (context + growth*k) * (a + b*k)
    squares = (n - 1) * n * (2 * n - 1) / 6
    token_s = context * duration_s + growth * (a_s * pairs + b_s * squares)
    return duration_s, token_s, context + growth * n


def _chunks(records: Records, warmup_s: float) -> Iterator[tuple[Ints, Columns]]:
    """Yield (positions of the replicas, stretches) for chunks of the stretches that start in the window."""
    position_of = _positions(records)
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


class StartingGpuHours(Struct, frozen=True):
    """GPU hours paid while replicas started, by origin of the GPUs (SageServe, sections 2.3 and 7.2.4)."""

    new: float
    reclaimed: float
    redeployed: float


class ProvisioningMetrics(Struct, frozen=True):
    """Metrics of a run in which replicas were started or released."""

    starts: int
    starting_gpu_hours: StartingGpuHours
    spot_gpu_hours: float
    """Time from releasing a replica to reusing it, or to the end of the run."""


def provisioning_metrics(records: Records, warmup_s: float) -> ProvisioningMetrics | None:
    """Metrics from `warmup_s` to the end of the run; None if the fleet did not change."""
    replicas = records.replicas
    if all(each.origin == INITIAL and _released_s(each, records.end_s) is None for each in replicas):
        return None
    window = (warmup_s, records.end_s)
    hours = dict.fromkeys(StartingGpuHours.__struct_fields__, 0.0)
    for each in replicas:
        if each.origin != INITIAL:
            hours[each.origin] += each.num_gpus * _starting_hours(each, window)
    taken_s = {each.replaces: each.up[0][0] for each in replicas if each.replaces >= 0}
    spot = 0.0
    for each in replicas:
        released_s = _released_s(each, records.end_s)
        if released_s is not None:
            spot += each.num_gpus * (_overlap_s([(released_s, taken_s.get(each.id, records.end_s))], window) / 3600)
    starts = sum(each.origin != INITIAL and each.up[0][0] >= warmup_s for each in replicas)
    return ProvisioningMetrics(starts, StartingGpuHours(**hours), spot)


def held_gpu_hours(records: Records, warmup_s: float) -> float:
    """GPU hours from `warmup_s` to the end of the run, including starting replicas. Equals the sum of `usage`, computed
    faster."""
    window = (warmup_s, records.end_s)
    return sum(each.num_gpus * _overlap_s(each.up, window) for each in records.replicas) / 3600


def _released_s(replica: ReplicaRecord, end_s: float) -> float | None:
    return replica.up[-1][1] if replica.up[-1][1] < end_s else None


def _starting_hours(replica: ReplicaRecord, window: tuple[float, float]) -> float:
    """Hours of the first down interval if it begins with the replica. Later down intervals are crashes."""
    began_s = replica.up[0][0]
    return _overlap_s((down for down in replica.down[:1] if down[0] == began_s), window) / 3600
