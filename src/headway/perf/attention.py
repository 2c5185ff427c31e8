"""Attention time per KV token and per query-key pair on one GPU, summed over the layers."""

from __future__ import annotations

from msgspec import Struct

from headway.catalog.coefficients import Kernels
from headway.core.fleet import Engine, Gpu, Layers, Model, Parallel
from headway.perf.params import layer_kv_bytes
from headway.perf.roofline import peak_flops


class AttentionCosts(Struct, frozen=True):
    """Constants of the attention operators of one replica, separately for layers with a sliding window."""

    decode_s: float
    """Seconds per KV token that a decoding sequence reads, over layers without a window."""
    decode_window_s: float
    pair_s: float
    """Seconds per pair of a query of a chunk and a key."""
    pair_window_s: float
    read_s: float
    """Minimum seconds per KV token that a chunk reads."""
    up_s: float
    """Seconds per cached token that a chunk expands from its latent vector (MLA only)."""
    half_tile: float
    """Keys per query row that are computed in vain: half a tile."""


def attention_costs(
    model: Model, gpu: Gpu, engine: Engine, parallel: Parallel, kernels: Kernels, queries: int = 1
) -> AttentionCosts:
    """The attention costs of one replica. `queries`: tokens of each decoding sequence in an iteration; they share its
    reads of the KV cache."""
    tp, decode = parallel.tp, kernels.decode(model)
    flops = peak_flops(gpu, "bf16")
    query_flops, prompt_flops = flops * decode.compute_efficiency, flops * kernels.prefill_attention.compute_efficiency
    bandwidth = gpu.bandwidth_bytes_per_s * decode.memory_efficiency
    decodes, pairs, reads, ups = [0.0, 0.0], [0.0, 0.0], 0.0, 0.0
    for each in model.all_layers:
        read_s = layer_kv_bytes(model, each, engine.kv_dtype_bytes, tp) / bandwidth
        decode_s = max(read_s, queries * (_decode_flops(model, each) / tp / query_flops))
        decodes[each.is_windowed] += each.num * decode_s
        pairs[each.is_windowed] += each.num * (pair_flops(model, each) / tp / prompt_flops)
        if not each.is_windowed and each.num_heads:
            reads += each.num * read_s
            ups += each.num * (_expansion_flops(model) / tp / (flops * kernels.gemm["bf16"].compute_efficiency))
    return AttentionCosts(
        decode_s=decodes[0],
        decode_window_s=decodes[1],
        pair_s=pairs[0],
        pair_window_s=pairs[1],
        read_s=reads,
        up_s=ups,
        half_tile=kernels.prefill_attention.tile_tokens / 2,
    )


def windowed_pairs(new: int, before: int, window: int) -> float:
    """Query-key pairs of a chunk in which each query sees at most `window` keys."""
    rising = min(max(window - before, 0), new)
    return rising * (before + rising / 2) + (new - rising) * window


def pair_flops(model: Model, layer: Layers) -> float:
    """FLOPs of one query-key pair in one layer of a prompt, all heads."""
    if model.mla is None or not layer.num_heads:
        return 2.0 * layer.num_heads * (layer.head_dim + layer.v_head_dim)
    mla = model.mla
    return 2.0 * layer.num_heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim + mla.v_head_dim)


def _decode_flops(model: Model, layer: Layers) -> float:
    """FLOPs of one token's query with one cached token. MLA decodes in the latent space."""
    if model.mla is None or not layer.num_heads:
        return 2.0 * layer.num_heads * (layer.head_dim + layer.v_head_dim)
    return 2.0 * layer.num_heads * (2 * model.mla.kv_lora_rank + model.mla.qk_rope_head_dim)


def _expansion_flops(model: Model) -> float:
    if model.mla is None:
        return 0.0
    return 2.0 * model.mla.kv_lora_rank * model.num_heads * (model.mla.qk_nope_head_dim + model.mla.v_head_dim)
