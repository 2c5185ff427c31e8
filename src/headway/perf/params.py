"""Numbers of parameters and bytes, computed from a model's shape."""

from __future__ import annotations

import re

from headway.core.errors import unknown
from headway.core.model import Layers, Model

WEIGHT_BYTES = {
    "bf16": 2.0,
    "fp16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "w8a16": 8.15625 / 8,
    "int4": 4.25 / 8,
    "w4a16": 4.15625 / 8,
    "nvfp4": 4.5 / 8,
    "nf4": 4.127 / 8,
}
"""Bytes per quantised parameter, including scales. int4 has an 8-bit scale per group of 32, as in MXFP4. nvfp4 has an
8-bit scale per group of 16. w4a16 and w8a16 have a 16-bit scale and a zero of the weights' bits per group of 128, as in
AWQ and GPTQ. nf4 has the doubly quantised scales of bitsandbytes per group of 64."""
_MEAN_BITS = re.compile(r"q(\d+(?:\.\d+)?)")
"""A mixture of GGUF's types, by its mean bits."""
_MOST_LIKE_INT4 = 6.5
"""Bits below which experts of a mixture have the kernels of int4, the measured type with the nearest number of
bytes."""
_GROUPED_BITS = {"w4a16": 4, "w8a16": 8}
KERNELS = {
    "fp16": "bf16",
    "w4a16": "int4",
    "nvfp4": "int4",
    "nf4": "int4",
    "int8": "fp8",
    "w8a16": "bf16",
}
"""Types of weights whose kernels are listed under another type: the measured type with the nearest number of bytes."""


def base_dtype(dtype: str) -> str:
    """A weight type without its group size: `w4a16` for `w4a16-g32`."""
    return dtype.partition("-g")[0]


def dtype_bytes(dtype: str, model_name: str = "") -> float:
    """Bytes per parameter of a weight type, with the scales. Raises HeadwayError for an unknown type."""
    base, _, group = dtype.partition("-g")
    if base in _GROUPED_BITS and group.isdecimal() and int(group):
        return (_GROUPED_BITS[base] * (1 + 1 / int(group)) + 16 / int(group)) / 8
    if base in WEIGHT_BYTES and not group:
        return WEIGHT_BYTES[base]
    if bits := _MEAN_BITS.fullmatch(dtype):
        return float(bits[1]) / 8
    raise unknown("weight dtype", dtype, WEIGHT_BYTES, f"model {model_name}")


def kernel_dtype(dtype: str) -> str:
    """The type under which kernels of these weights are listed."""
    base = base_dtype(dtype)
    if bits := _MEAN_BITS.fullmatch(base):
        return "int4" if float(bits[1]) < _MOST_LIKE_INT4 else "bf16"
    return KERNELS.get(base, base)


def num_params(model: Model) -> float:
    """Number of all parameters except biases, whether a token uses them or not."""
    return _layer_params(model, _num_experts(model)) + _embeddings(model) + model.other_params + model.hidden_size


def active_params(model: Model) -> float:
    """Parameters used for one token: only chosen experts, and no embedding look-up."""
    num_experts = model.moe.experts_per_token if model.moe else 0
    return _layer_params(model, num_experts) + model.vocab_size * model.hidden_size


def _layer_params(model: Model, num_experts: int) -> float:
    """Parameters of all layers with `num_experts` routed experts in each mixture."""
    experts = num_experts * expert_params(model) + moe_shared_params(model)
    total = 2.0 * model.num_layers * model.hidden_size
    for each in model.all_layers:
        total += each.num * (each.mixer_params + mlp_params(model, each) + (experts if each.has_experts else 0.0))
    return total


def weights_bytes(model: Model) -> float:
    """Bytes of all weights in an engine. See `linear_bytes` for the quantised ones."""
    layers = sum(each.num * layer_bytes(model, each) for each in model.all_layers)
    norms = (2 * model.num_layers + 1) * model.hidden_size
    return layers + embedding_bytes(model) * (_embeddings(model) + model.other_params) + 2.0 * norms


def embedding_bytes(model: Model) -> float:
    """Bytes per parameter of the embeddings and the output matrix."""
    return dtype_bytes(model.embedding_dtype, model.name)


def layer_bytes(model: Model, layer: Layers) -> float:
    """Bytes of the matrices of one layer, with all experts."""
    total = layer.mixer_params * mixer_bytes(model, layer) + mlp_params(model, layer) * mlp_bytes(model, layer)
    if layer.has_experts:
        total += moe_shared_params(model) * mlp_bytes(model, layer)
        total += _num_experts(model) * expert_params(model) * expert_bytes(model, layer)
    return total


def mixer_bytes(model: Model, layer: Layers) -> float:
    """Bytes per parameter of a layer's attention or state."""
    return dtype_bytes(layer.mixer_dtype, model.name) if layer.mixer_dtype else linear_bytes(model)


def mlp_bytes(model: Model, layer: Layers) -> float:
    """Bytes per parameter of a layer's dense feed-forward and shared experts."""
    return dtype_bytes(layer.mlp_dtype, model.name) if layer.mlp_dtype else linear_bytes(model)


def expert_bytes(model: Model, layer: Layers) -> float:
    """Bytes per parameter of a layer's routed experts."""
    return dtype_bytes(layer.expert_dtype or model.dtype, model.name)


def expert_dtype(model: Model) -> str:
    """Type of the routed experts' weights in most layers that have experts."""
    found = [each for each in model.all_layers if each.has_experts]
    return (max(found, key=lambda each: each.num).expert_dtype if found else "") or model.dtype


def linear_bytes(model: Model) -> float:
    """Bytes per parameter of attention and dense feed-forward layers without a type of their own.

    In an int4 mixture of experts only the experts are quantised, as in
    GPT-OSS.
    """
    return dtype_bytes(linear_dtype(model), model.name)


def linear_dtype(model: Model) -> str:
    """Weight type of layers without a type of their own: see `linear_bytes`."""
    return "bf16" if model.moe and model.dtype == "int4" else model.dtype


def is_mixture(dtype: str) -> bool:
    """Whether these are types of GGUF by their mean bits, which no kernel table has."""
    return _MEAN_BITS.fullmatch(dtype) is not None


def weight_dtype_bytes(model: Model) -> float:
    """Bytes per quantised parameter. Raises HeadwayError for an unknown dtype."""
    return dtype_bytes(model.dtype, model.name)


def routed_bytes(model: Model) -> float:
    """Bytes of all routed experts; 0 without experts."""
    experts = _num_experts(model) * expert_params(model)
    return sum(each.num * experts * expert_bytes(model, each) for each in model.all_layers if each.has_experts)


def mlp_params(model: Model, layer: Layers) -> float:
    """Parameters of one layer's dense feed-forward."""
    return num_mlp_matrices(model) * float(model.hidden_size) * layer.mlp_width


def expert_params(model: Model) -> float:
    """Parameters of one routed expert; 0 without experts."""
    if model.moe is None:
        return 0.0
    return num_mlp_matrices(model) * float(model.moe.hidden_size or model.hidden_size) * model.moe.intermediate_size


def moe_shared_params(model: Model) -> float:
    """Parameters that every token of a mixture-of-experts layer uses: shared experts and the router."""
    if model.moe is None:
        return 0.0
    shared = num_mlp_matrices(model) * float(model.hidden_size) * model.moe.shared_intermediate_size
    return shared + float(model.hidden_size) * model.moe.num_experts


def num_mlp_matrices(model: Model) -> int:
    """Number of feed-forward matrices: 3 (gate, up, down) or 2 (up, down)."""
    return 3 if model.gated_mlp else 2


def num_moe_layers(model: Model) -> int:
    return sum(each.num for each in model.all_layers if each.has_experts)


def num_dense_layers(model: Model) -> int:
    """Number of layers that have only a dense feed-forward."""
    return sum(each.num for each in model.all_layers if each.mlp_width and not each.has_experts)


def state_bytes(model: Model) -> float:
    """Bytes of one sequence's states in all layers, unsharded; 0 for models whose layers all have a KV cache."""
    return sum([each.num * each.state_bytes for each in model.all_layers])


def layer_kv_bytes(model: Model, layer: Layers, kv_dtype_bytes: float, tp: int = 1) -> float:
    """Bytes per token that one of `tp` GPUs reads in the cache of one layer: its heads, or the whole latent vector."""
    if not layer.num_heads:
        return 0.0
    if model.mla is not None:
        return (model.mla.kv_lora_rank + model.mla.qk_rope_head_dim) * kv_dtype_bytes + layer.index_bytes
    heads = layer.num_kv_heads / min(tp, layer.num_kv_heads)
    return heads * (layer.head_dim + layer.v_head_dim) * kv_dtype_bytes + layer.index_bytes


def kv_bytes(model: Model, kv_dtype_bytes: float = 2.0, tp: int = 1, windowed: bool | None = None) -> float:
    """Bytes of KV cache of one token over all layers, on one GPU of `tp`. `windowed`: True counts only layers with a
    sliding window, False only layers without, None all layers."""
    layers = [each for each in model.all_layers if each.has_cache]
    if windowed is not None:
        layers = [each for each in layers if each.is_windowed == windowed]
    return sum([each.num * layer_kv_bytes(model, each, kv_dtype_bytes, tp) for each in layers])


def _num_experts(model: Model) -> int:
    return model.moe.num_experts if model.moe else 0


def _embeddings(model: Model) -> float:
    return model.vocab_size * float(model.hidden_size) * (1 if model.tie_embeddings else 2)
