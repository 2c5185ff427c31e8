"""How long bytes take over a link. Pure."""

from __future__ import annotations

from headway.core.fleet import Gpu, Model
from headway.perf.memory import kv_bytes_per_token

HOST_LINK_EFFICIENCY = 0.8
"""Of the PCIe link's raw rate, for large pinned copies."""
HOST_COPY_LATENCY_S = 20e-6


def host_copy_s(num_bytes: float, gpu: Gpu, tp: int = 1) -> float:
    """Seconds to copy `num_bytes` between host memory and `tp` GPUs, each over its own link."""
    return HOST_COPY_LATENCY_S + num_bytes / (tp * gpu.host_link_bytes_per_s * HOST_LINK_EFFICIENCY)


def network_s(num_bytes: float, bytes_per_s: float, latency_s: float = 0.0) -> float:
    """Seconds for `num_bytes` over a link that is otherwise idle."""
    return latency_s + num_bytes / bytes_per_s


def kv_bytes(model: Model, num_tokens: int, kv_dtype_bytes: float = 2.0) -> float:
    """Bytes of KV cache of `num_tokens`, unreplicated: what a transfer moves."""
    return num_tokens * kv_bytes_per_token(model, kv_dtype_bytes)
