"""How long a replica takes from nothing to its first request. Pure. Coefficients: catalog/data/costs.json."""

from __future__ import annotations

from headway.catalog.costs import ColdStart
from headway.core.errors import unknown

LOCAL, HUB = "local", "hub"


def load_s(weights_bytes: float, num_gpus: int, storage: str, cost: ColdStart) -> float:
    """Seconds until the weights of a replica of so many GPUs are in GPU memory.

    `local`: they are in the node's memory; `hub`: downloaded to disk first; else a storage of
    `cost.stream_bytes_per_s`, from which they are streamed. HeadwayError for another name.
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
    """Seconds of the engine's own start. `compiled`: torch.compile's results are cached from before."""
    return cost.init_s + (cost.graphs_s if graphs else 0.0) + (0.0 if compiled else cost.compile_s)


def cold_start_s(weights_bytes: float, num_gpus: int, storage: str, cost: ColdStart, *, compiled: bool = True) -> float:
    """Seconds from the start of the process to serving."""
    return load_s(weights_bytes, num_gpus, storage, cost) + start_s(cost, compiled=compiled)
