"""Watts of a GPU from how busy its memory and its arithmetic are, and joules per token. Pure.

Coefficients: catalog/data/costs.json. The compute term grows with the square root: the first matrix products
wake the tensor cores, and later ones share the board's limit.
"""

from __future__ import annotations

from math import sqrt

from headway.catalog.costs import Power
from headway.core.fleet import Gpu, Model
from headway.perf.params import (
    active_params,
    kv_bytes_per_token_layer,
    moe_layer_bytes,
    num_moe_layers,
    weights_bytes,
)

_H100_SHARES = (0.395, 0.290, 1.059)
"""Of the board's watts, where nobody measured a GPU: an H100's coefficients over its 700 W."""


def watts(memory_share: float, compute_share: float, cost: Power) -> float:
    """Of one GPU that moves this share of its peak bytes and computes this share of its 16-bit peak FLOPs."""
    busy_w = cost.base_w + cost.memory_w * memory_share + cost.compute_w * sqrt(compute_share)
    return min(busy_w, cost.limit_w)


def guessed(gpu: Gpu) -> Power:
    """For a GPU that nobody measured: an H100's shape, scaled to the board's watts."""
    base, memory, compute = (share * gpu.watts for share in _H100_SHARES)
    return Power((gpu.name,), base, memory, compute, gpu.watts, "nothing", {}, "scaled from H100 by the board's watts")


def decode_shares(
    model: Model, gpu: Gpu, num_gpus: int, batch: float, context_tokens: float, tokens_per_s: float
) -> tuple[float, float]:
    """(memory share, compute share) of a replica that decodes `batch` sequences of `context_tokens` each.

    `tokens_per_s` is of the whole replica. The share of experts that a batch touches is the expected one.
    """
    steps_per_s = tokens_per_s / batch
    kv = batch * context_tokens * model.num_layers * kv_bytes_per_token_layer(model)
    memory = (_touched_bytes(model, batch) + kv) * steps_per_s / (num_gpus * gpu.bandwidth_bytes_per_s)
    compute = 2 * active_params(model) * tokens_per_s / (num_gpus * gpu.peak_flops["bf16"])
    return memory, compute


def joules_per_token(replica_watts: float, tokens_per_s: float) -> float:
    """Energy of one output token."""
    return replica_watts / tokens_per_s


def _touched_bytes(model: Model, batch: float) -> float:
    """Weights that one step reads."""
    whole = weights_bytes(model)
    if model.moe is None:
        return whole
    experts = num_moe_layers(model) * moe_layer_bytes(model)
    untouched: float = (1 - model.moe.experts_per_token / model.moe.num_experts) ** batch
    return whole - experts * untouched
