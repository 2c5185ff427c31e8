"""How long bytes take over a link. Pure. Coefficients with their sources: catalog/data/costs.json."""

from __future__ import annotations

from headway.catalog.costs import Transfer, costs
from headway.core.fleet import Gpu, Model
from headway.perf.memory import kv_bytes_per_token


def host_copy_s(num_bytes: float, gpu: Gpu, tp: int = 1) -> float:
    """Seconds to copy `num_bytes` between host memory and `tp` GPUs, each over its own link."""
    link = costs().host_link
    return link.latency_s + num_bytes / (tp * gpu.host_link_bytes_per_s * link.efficiency)


def network_s(num_bytes: float, bytes_per_s: float, latency_s: float = 0.0) -> float:
    """Seconds for `num_bytes` over a link that is otherwise idle."""
    return latency_s + num_bytes / bytes_per_s


def kv_transfer_s(num_bytes: float, cost: Transfer) -> float:
    """Seconds to move so much KV cache from one replica to another, whose link is otherwise idle."""
    return cost.latency_s + num_bytes * cost.s_per_byte


def kv_bytes(model: Model, num_tokens: int, kv_dtype_bytes: float = 2.0) -> float:
    """Bytes of KV cache of `num_tokens`, unreplicated: what a transfer moves."""
    return num_tokens * kv_bytes_per_token(model, kv_dtype_bytes)
