"""Measured costs of KV transfers, host copies and cold starts, with sources: the coefficients of `perf.copies`."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

import msgspec
from msgspec import Struct


class KvTransferCost(Struct, frozen=True, forbid_unknown_fields=True):
    """Time of a KV transfer between replicas over an idle link: `latency_s + bytes * s_per_byte`."""

    latency_s: float
    s_per_byte: float
    residuals: dict[str, float]
    """Absolute relative errors of the fit: median, mean, max."""
    source: str


class HostLink(Struct, frozen=True, forbid_unknown_fields=True):
    """A pinned copy between host and GPU: a latency, and a share of the link's raw rate."""

    latency_s: float
    efficiency: float
    source: str


class ColdStart(Struct, frozen=True, forbid_unknown_fields=True):
    """Costs of a cold start: loading weights into GPU memory, then the engine's own start."""

    download_bytes_per_s: float
    """Rate of a whole model from a hub to a node's disk."""
    local_bytes_per_s_gpu: float
    """Rate from the node's memory into one GPU; GPUs load in parallel."""
    stream_bytes_per_s: dict[str, float]
    """Rate of a whole model from a storage into GPU memory, by the storage's name."""
    init_s: float
    """Time for processes, memory profile and KV cache."""
    graphs_s: float
    """Seconds of CUDA graph capture."""
    compile_s: float
    """Seconds of torch.compile without its cache."""
    residuals: dict[str, float]
    """Signed relative errors of the measured totals, by setup."""
    source: str


class Costs(Struct, frozen=True, forbid_unknown_fields=True):
    kv_transfer: dict[str, KvTransferCost]
    """Costs of KV transfers, keyed by the measured network."""
    host_link: HostLink
    cold_start: ColdStart


@cache
def costs() -> Costs:
    """The coefficients that `scripts/fit_costs.py` fitted."""
    data = files("headway.catalog") / "data" / "costs.json"
    return msgspec.json.decode(data.read_bytes(), type=Costs)
