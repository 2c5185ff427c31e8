"""Bytes of LoRA adapters (Hu et al., 2021): two matrices of the adapter's rank beside each linear layer. Pure."""

from __future__ import annotations

from headway.core.fleet import LoraAdapter, Model, Pool
from headway.perf.params import num_mlp_matrices

_BYTES_PER_WEIGHT = 2.0


def adapter_bytes(model: Model, adapter: LoraAdapter) -> float:
    """Bytes of one adapter: its own `num_bytes`, otherwise computed for its rank at all linear layers except experts.

    A layer with `m` inputs and `n` outputs has `rank * (m + n)` additional weights. Latent attention is treated like
    ordinary attention.
    """
    if adapter.num_bytes is not None:
        return adapter.num_bytes
    hidden, matrices = model.hidden_size, num_mlp_matrices(model)
    total = 0
    for each in model.all_layers:
        sizes = (
            each.num_heads * each.head_dim,
            each.num_heads * each.v_head_dim,
            each.num_kv_heads * each.head_dim,
            each.num_kv_heads * each.v_head_dim,
        )
        attention = sum(hidden + size for size in sizes) if each.num_heads else 0
        dense = matrices * (hidden + each.mlp_width) if each.mlp_width else 0
        total += each.num * (attention + dense)
    return _BYTES_PER_WEIGHT * adapter.rank * total


def slots_bytes(pool: Pool) -> float:
    """Bytes that a GPU of the pool reserves for adapters: each slot holds the largest one, split over the GPUs."""
    if pool.lora is None:
        return 0.0
    largest = max((adapter_bytes(pool.model, each) for each in pool.lora.adapters), default=0.0)
    return pool.lora.max_loras * largest / (pool.parallel.tp * pool.parallel.pp)
