"""Bytes of LoRA adapters (Hu et al., 2021): two matrices of the adapter's rank beside each linear layer. Pure."""

from __future__ import annotations

from headway.core.fleet import LoraAdapter, Model, Pool

_BYTES_PER_WEIGHT = 2.0


def adapter_bytes(model: Model, adapter: LoraAdapter) -> float:
    """Bytes of one adapter: its own `num_bytes`, else those of its rank beside all linear layers but experts.

    A layer of `m` inputs and `n` outputs has `rank * (m + n)` weights more. The sizes of latent attention are taken as
    those of ordinary attention.
    """
    if adapter.num_bytes is not None:
        return adapter.num_bytes
    hidden, heads, kv = model.hidden_size, model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    attention = 2 * (hidden + heads) + 2 * (hidden + kv)
    dense = (3 if model.gated_mlp else 2) * (hidden + model.intermediate_size)
    num_dense = model.num_layers if model.moe is None else model.moe.num_dense_layers
    return _BYTES_PER_WEIGHT * adapter.rank * (model.num_layers * attention + num_dense * dense)


def slots_bytes(pool: Pool) -> float:
    """Bytes that a GPU of the pool reserves for adapters: each slot holds the largest one, split over the GPUs."""
    if pool.lora is None:
        return 0.0
    largest = max((adapter_bytes(pool.model, each) for each in pool.lora.adapters), default=0.0)
    return pool.lora.max_loras * largest / (pool.parallel.tp * pool.parallel.pp)
