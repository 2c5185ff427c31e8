"""Numbers of parameters and bytes, computed from a model's shape."""

from __future__ import annotations

from headway.core.errors import unknown
from headway.core.fleet import Model

WEIGHT_BYTES = {"bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int4": 4.25 / 8, "w4a16": 4.15625 / 8}
"""Bytes per quantised parameter. int4 has an 8-bit scale for each group of 32, as in MXFP4; w4a16 a 16-bit scale and a
zero of 4 bits for each group of 128, as in AWQ and GPTQ."""
KERNELS = {"fp16": "bf16", "w4a16": "int4"}
"""Types of weights whose kernels are listed under another one."""


def num_params(model: Model) -> float:
    """All parameters except biases."""
    return _layer_params(model, _num_experts(model)) + _embeddings(model) + model.hidden_size


def active_params(model: Model) -> float:
    """Parameters used for one token: only chosen experts, and no embedding look-up."""
    num_experts = model.moe.experts_per_token if model.moe else 0
    return _layer_params(model, num_experts) + model.vocab_size * model.hidden_size


def _layer_params(model: Model, num_experts: int) -> float:
    """Parameters of all layers with `num_experts` routed experts in each mixture."""
    per_layers = model.num_layers * (attention_params(model) + 2 * model.hidden_size)
    dense = num_dense_layers(model) * dense_mlp_params(model)
    moe = num_moe_layers(model) * (num_experts * expert_params(model) + moe_shared_params(model))
    return per_layers + dense + moe


def weights_bytes(model: Model) -> float:
    """Bytes of all weights in an engine. See `linear_bytes` for the quantised ones."""
    layers = model.num_layers * attention_params(model) * linear_bytes(model)
    layers += num_dense_layers(model) * dense_mlp_params(model) * linear_bytes(model)
    layers += num_moe_layers(model) * moe_layer_bytes(model)
    return layers + 2.0 * (_embeddings(model) + (2 * model.num_layers + 1) * model.hidden_size)


def linear_bytes(model: Model) -> float:
    """Bytes per parameter of attention and dense feed-forward layers.

    Embeddings and norms are always 16 bit. In an int4 mixture of experts only the experts are quantised, as in GPT-OSS.
    """
    return 2.0 if model.moe and model.dtype == "int4" else weight_dtype_bytes(model)


def weight_dtype_bytes(model: Model) -> float:
    """Bytes per quantised parameter. HeadwayError for an unknown dtype."""
    if model.dtype not in WEIGHT_BYTES:
        raise unknown("weight dtype", model.dtype, WEIGHT_BYTES, f"model {model.name}")
    return WEIGHT_BYTES[model.dtype]


def moe_layer_bytes(model: Model) -> float:
    experts = _num_experts(model) * expert_params(model) * weight_dtype_bytes(model)
    return experts + moe_shared_params(model) * linear_bytes(model)


def routed_bytes(model: Model) -> float:
    """Bytes of all routed experts; 0 without experts."""
    return num_moe_layers(model) * _num_experts(model) * expert_params(model) * weight_dtype_bytes(model)


def attention_params(model: Model) -> float:
    """Parameters of one layer's query, key, value and output projections."""
    h, heads = model.hidden_size, model.num_heads
    if model.mla is None:
        return h * model.head_dim * (2.0 * heads + 2 * model.num_kv_heads)
    mla = model.mla
    q_dim = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    query = mla.q_lora_rank * (h + q_dim) if mla.q_lora_rank else h * q_dim
    latent = h * (mla.kv_lora_rank + mla.qk_rope_head_dim)
    up = mla.kv_lora_rank * heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    return float(query + latent + up + heads * mla.v_head_dim * h)


def dense_mlp_params(model: Model) -> float:
    return num_mlp_matrices(model) * float(model.hidden_size) * model.intermediate_size


def expert_params(model: Model) -> float:
    """Parameters of one routed expert; 0 without experts."""
    return num_mlp_matrices(model) * float(model.hidden_size) * model.moe.intermediate_size if model.moe else 0.0


def moe_shared_params(model: Model) -> float:
    """Parameters that every token of a mixture-of-experts layer uses: shared experts and the router."""
    if model.moe is None:
        return 0.0
    shared = num_mlp_matrices(model) * float(model.hidden_size) * model.moe.shared_intermediate_size
    return shared + float(model.hidden_size) * model.moe.num_experts


def num_mlp_matrices(model: Model) -> int:
    """3 (gate, up, down) or 2 (up, down)."""
    return 3 if model.gated_mlp else 2


def num_moe_layers(model: Model) -> int:
    if model.moe is None:
        return 0
    return (model.num_layers - model.moe.num_dense_layers) // model.moe.moe_layer_every


def num_dense_layers(model: Model) -> int:
    return model.num_layers - num_moe_layers(model)


def num_windowed_layers(model: Model) -> int:
    if model.sliding_window_tokens is None:
        return 0
    every = model.sliding_window_every
    return model.num_layers if every == 1 else model.num_layers - model.num_layers // every


def kv_bytes_per_token_layer(model: Model, kv_dtype_bytes: float = 2.0) -> float:
    """Bytes of KV cache of one token in one layer, unreplicated: keys and values, or one latent vector with MLA."""
    if model.mla is not None:
        return (model.mla.kv_lora_rank + model.mla.qk_rope_head_dim) * kv_dtype_bytes
    return 2.0 * model.num_kv_heads * model.head_dim * kv_dtype_bytes


def _num_experts(model: Model) -> int:
    return model.moe.num_experts if model.moe else 0


def _embeddings(model: Model) -> float:
    return model.vocab_size * float(model.hidden_size) * (1 if model.tie_embeddings else 2)
