"""Times of copies into GPU memory: over the host link or network, and of a starting replica's weights.

Coefficients and their sources: catalog/data/costs.json.
"""

from __future__ import annotations

from headway.catalog.costs import ColdStart, costs
from headway.core.errors import unknown
from headway.core.fleet import Gpu, Pool
from headway.perf.memory import kv_bytes_per_token

LOCAL, HUB = "local", "hub"
NETWORK = "mooncake-h800"
"""The measured network whose latency is used for transfers between replicas. The rate comes from the replicas'
pools."""


def host_copy_s(num_bytes: float, gpu: Gpu, tp: int = 1) -> float:
    """Seconds to copy `num_bytes` between host memory and `tp` GPUs, each over its own link."""
    link = costs().host_link
    return link.latency_s + num_bytes / (tp * gpu.host_link_bytes_per_s * link.efficiency)


def kv_transfer_s(pool: Pool, num_tokens: int) -> float:
    """Seconds until a replica of the pool has received the KV of `num_tokens` tokens from another one, over an idle
    network."""
    num_bytes = num_tokens * kv_bytes_per_token(pool.model, pool.engine.kv_dtype_bytes)
    return costs().kv_transfer[NETWORK].latency_s + num_bytes / pool.network_bytes_per_s


def load_s(weights_bytes: float, num_gpus: int, storage: str, cost: ColdStart) -> float:
    """Seconds to bring the weights of a replica with `num_gpus` GPUs into GPU memory.

    `storage` is `local` (in the node's memory), `hub` (downloaded to disk first) or a key of `cost.stream_bytes_per_s`,
    from which weights are streamed. Raises HeadwayError for another name.
    """
    local_s = weights_bytes / num_gpus / cost.local_bytes_per_s_gpu
    if storage == LOCAL:
        return local_s
    if storage == HUB:
        return weights_bytes / cost.download_bytes_per_s + local_s
    if storage not in cost.stream_bytes_per_s:
        raise unknown("storage", storage, (LOCAL, HUB, *cost.stream_bytes_per_s))
    return max(weights_bytes / cost.stream_bytes_per_s[storage], local_s)


def start_s(cost: ColdStart, *, graphs: bool = True, compiled: bool = True) -> float:
    """Seconds of the engine's own start. `compiled`: results of torch.compile are cached from an earlier start."""
    return cost.init_s + (cost.graphs_s if graphs else 0.0) + (0.0 if compiled else cost.compile_s)


def cold_start_s(weights_bytes: float, num_gpus: int, storage: str, cost: ColdStart, *, compiled: bool = True) -> float:
    """Seconds from the start of the process to the first request."""
    return load_s(weights_bytes, num_gpus, storage, cost) + start_s(cost, compiled=compiled)
