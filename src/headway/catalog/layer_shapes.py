"""The shape of each layer of a config: heads, projections, states and feed-forward widths.

Parameter counts agree with `transformers` within 1% without biases and norms; scripts/model_sizes.py records them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from msgspec.structs import replace

from headway.catalog.config_keys import ConfigKeys
from headway.catalog.layer_kinds import Kind, Mlp, kinds_of, mlps_of, names_of
from headway.core.errors import HeadwayError
from headway.core.model import Layers, Mla, Moe

UNGATED = {
    "apertus", "arcee", "bart", "biogpt", "bloom", "codegen", "falcon", "gpt-sw3", "gpt2", "gpt_bigcode",
    "gpt_neo", "gpt_neox", "gpt_neox_japanese", "gptj", "jais2", "mpt", "nanochat", "nemotron", "nemotron_h", "opt",
    "persimmon", "phi", "starcoder2", "xglm", "fuyu",
}  # fmt: skip
"""Families whose feed-forward has two matrices, up and down, not three."""
GATED_ATTENTION = {
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "afmoe",
    "hy_v4",
    "axk2",
}
"""Families whose attention has a gate as large as the queries."""
LEARNED_POSITIONS = {"opt", "gpt2", "gpt-sw3", "gpt_bigcode", "gpt_neo", "biogpt"}
"""Families with an embedding for each position."""
_UNGATED_ACTIVATIONS = {"relu", "relu2", "xielu", "gelu_new", "gelu_fast", "squared_relu"}
_GATED_ACTIVATIONS = {"silu", "swish", "swiglu", "geglu", "gegelu", "swigluoai", "situ"}
EXPERTS = (
    "n_routed_experts",
    "num_local_experts",
    "num_experts",
    "moe_num_experts",
    "num_routed_experts",
    "moe_num_primary_experts",
)
PER_TOKEN = (
    "num_experts_per_tok",
    "experts_per_token",
    "num_experts_per_token",
    "moe_k",
    "moe_topk",
    "moe_top_k",
    "top_k_experts",
    "num_selected_experts",
    "experts_top_k",
)
EXPERT_WIDTH = ("moe_intermediate_size", "expert_ffn_hidden_size", "expert_intermediate_size", "moe_ffn_hidden_size")
SHARED_WIDTH = (
    "shared_expert_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "share_expert_dim",
    "shared_intermediate_size",
    "moe_shared_intermediate_size",
)
NUM_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert")
DENSE_WIDTH = (
    "intermediate_size_mlp",
    "dense_intermediate_size",
    "prefix_dense_intermediate_size",
    "intermediate_size",
    "ffn_hidden_size",
    "ffn_dim",
    "n_inner",
    "ff_intermediate_size",
)
_FOUR_TIMES = {"gpt2", "gpt-sw3", "gpt_bigcode", "gptj", "codegen", "gpt_neo", "bloom", "falcon", "mpt", "opt"}
"""Families whose feed-forward is four times as wide as the hidden state if the config gives no width."""


class Shapes(NamedTuple):
    """The shapes of a config's layers."""

    layers: list[Layers]
    """One entry per layer, each with `num` 1."""
    kinds: list[Kind]
    moe: Moe | None
    mla: Mla | None
    gated: bool
    width: int
    """Width of the dense feed-forward, or of an expert if there is none."""
    other_params: float
    unmodelled: tuple[str, ...]


def shapes_of(keys: ConfigKeys, assume: bool = False) -> Shapes:
    """The shapes of the config's layers. Raises HeadwayError for keys that are missing or have no known meaning."""
    num_layers, hidden = num_layers_of(keys), hidden_size_of(keys)
    heads = keys.count("num_attention_heads", "n_heads", default=0 if _is_attention_free(keys) else None, least=0)
    kinds = ["state" if not heads else kind for kind in kinds_of(keys, num_layers)]
    mla, gated = _mla(keys, hidden, heads), _is_gated(keys, assume)
    moe, other = _moe(keys)
    mlps: list[Mlp] = ["dense"] * num_layers if moe is None else mlps_of(keys, num_layers, kinds)
    if moe is None and "none" in kinds:
        mlps = ["dense" if kind == "none" else "none" for kind in kinds]
    both = keys.family.startswith("gemma4")  # a dense feed-forward in addition to the experts of each layer
    both = both and not keys.given("block_configs")
    width = (
        0
        if keys.given("block_configs")
        else _dense_width(keys, hidden, needed=both or "dense" in mlps) or (moe.intermediate_size if moe else 0)
    )
    if _has_no_mlp(keys):
        mlps = ["none"] * num_layers
    if isinstance(blocks := keys.value("block_configs"), list):
        return _of_blocks(keys, blocks, hidden, heads, gated)
    layers = []
    for i, (kind, mlp) in enumerate(zip(kinds, mlps, strict=True)):
        mixer = _mixer(keys, i, num_layers, kind, hidden, heads, mla)
        layers.append(
            replace(
                mixer,
                mlp_width=_width_of_layer(keys, i, num_layers, width) if mlp == "dense" or both else 0,
                has_experts=mlp == "experts",
            )
        )
    layers, more, unmodelled = _special(keys, layers, hidden, num_layers)
    if all(not each.has_experts for each in layers):
        moe = None
    return Shapes(layers, kinds, moe, mla, gated, width, other + more, unmodelled)


def hidden_size_of(keys: ConfigKeys) -> int:
    """The width of the residual stream."""
    return keys.count("hidden_size", "d_model", "n_embed", "n_embd")


def num_layers_of(keys: ConfigKeys) -> int:
    """The number of layers. Some configs give it only through a list of kinds."""
    kinds = keys.get("layers_block_type")
    default = len(kinds) if isinstance(kinds, list) and kinds else None
    return keys.count("num_hidden_layers", "n_layers", "num_layers", default=default)


def _is_attention_free(keys: ConfigKeys) -> bool:
    return keys.family in ("mamba", "mamba2", "falcon_mamba")


def _has_no_mlp(keys: ConfigKeys) -> bool:
    return _is_attention_free(keys) or keys.family in ("zamba", "zamba2")


def _is_gated(keys: ConfigKeys, assume: bool) -> bool:
    activation = str(
        keys.value("hidden_act", "hidden_activation", "activation_function", "activation", "mlp_hidden_act")
    )
    if keys.family in UNGATED:
        return False
    if keys.is_known or activation in _GATED_ACTIVATIONS or activation == "None":
        return True
    if activation in _UNGATED_ACTIVATIONS:
        return False
    if assume:
        return True
    raise keys.error(
        "hidden_act",
        activation,
        "silu, or a family that is known: it does not say how many matrices "
        "the feed-forward has (--assume takes three)",
    )


def _first(value: Any) -> Any:
    """The first item of a list with one value per kind of experts or per layer; other values unchanged."""
    return value[0] if isinstance(value, list) and value else value


def _moe(keys: ConfigKeys) -> tuple[Moe | None, float]:
    """(the mixture of experts, parameters of experts that process no text tokens)."""
    experts = keys.value(*EXPERTS, default=0)
    others = experts[1:] if isinstance(experts, list) else []
    if keys.value("enable_moe_block") is False and keys.family.startswith("gemma4"):
        return None, 0.0
    num = _count_of(keys, EXPERTS, _first(experts) or 0)
    if num <= 1:
        return None, 0.0
    keys.read |= {"num_sliding_attention_heads"}
    widths = keys.value(*EXPERT_WIDTH)
    if isinstance(widths, list) and not others:
        others = [num] * (len(widths) - 1)
    if widths is None:
        widths = keys.value("intermediate_size", "ffn_hidden_size")
    width = _count_of(keys, EXPERT_WIDTH, _first(widths))
    chosen = _count_of(keys, PER_TOKEN, _first(keys.value(*PER_TOKEN)))
    shared = _count_of(keys, SHARED_WIDTH, _first(keys.value(*SHARED_WIDTH, default=0)))
    num_shared = _count_of(keys, NUM_SHARED, _first(keys.value(*NUM_SHARED, default=0)))
    if keys.family == "hunyuan_v1_moe":
        num_shared = num_shared or 1
    shared = shared * num_shared if shared and num_shared else shared or width * num_shared
    if keys.family.startswith("llama4"):
        shared = width
    hidden = hidden_size_of(keys)
    latent = keys.value("moe_latent_size", "expert_hidden_size", "routed_expert_hidden_size", default=0)
    rest = 0.0
    if others and isinstance(widths, list):
        start, interval = keys.value("moe_layer_start_index", default=0), keys.count("moe_layer_interval", default=1)
        first = max(start) if isinstance(start, list) else start
        sparse = (keys.count("num_hidden_layers") - first) // interval
        rest = 3.0 * hidden * sum(n * w for n, w in zip(others, widths[1:], strict=False)) * sparse
    return Moe(num, chosen, width, shared, hidden_size=latent or 0), rest


def _count_of(keys: ConfigKeys, names: tuple[str, ...], value: Any) -> int:
    name = next((each for each in names if keys.get(each) is not None), names[0])
    if value is None:
        raise keys.error(name, value, "a positive whole number")
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise keys.error(name, value, "a positive whole number")
    return value


def _mla(keys: ConfigKeys, hidden: int, heads: int) -> Mla | None:
    if keys.value("kv_lora_rank") is None or keys.value("use_mla") is False:
        keys.read |= {"kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"}
        return None
    keys.read |= {"head_dim", "qk_head_dim"}
    per_head = hidden // heads if keys.family == "minicpm3" and heads else None
    return Mla(
        kv_lora_rank=keys.count("kv_lora_rank"),
        q_lora_rank=keys.count("q_lora_rank", default=0, least=0),
        qk_nope_head_dim=keys.count("qk_nope_head_dim", least=0),
        qk_rope_head_dim=keys.count("qk_rope_head_dim", least=0),
        v_head_dim=keys.count("v_head_dim", default=per_head),
    )


def _dense_width(keys: ConfigKeys, hidden: int, needed: bool) -> int:
    value = keys.value(*DENSE_WIDTH)
    if isinstance(value, list):
        return int(value[0])
    if value is None and (keys.family in _FOUR_TIMES or not needed or _has_no_mlp(keys)):
        expansion = keys.value("expansion_ratio", default=4)
        return int(expansion * hidden) if needed else 0
    width = keys.count(*DENSE_WIDTH) if needed else int(value)
    if keys.family in ("recurrent_gemma", "qwen"):  # the width of the fused projection is the sum of gate and up
        width //= 2
    if keys.value("block_auto_adjust_ff_dim"):  # LFM2
        width = int(2 * width / 3)
        if (factor := keys.value("block_ffn_dim_multiplier")) is not None:
            multiple = keys.count("block_multiple_of", default=256)
            width = multiple * -(-int(factor * width) // multiple)
    return width


def _width_of_layer(keys: ConfigKeys, i: int, num_layers: int, width: int) -> int:
    own = keys.value("intermediate_size")
    if isinstance(own, list):
        if len(own) < num_layers:
            raise keys.error("intermediate_size", own, f"a width for each of {num_layers} layers")
        return int(own[i])
    if keys.value("use_double_wide_mlp") and i >= num_layers - keys.value("num_kv_shared_layers", default=0):
        return 2 * width
    return width


# Attention and states.


def _mixer(keys: ConfigKeys, i: int, num_layers: int, kind: Kind, hidden: int, heads: int, mla: Mla | None) -> Layers:
    if kind == "none":
        return Layers(num=1)
    if kind == "state":
        return _state(keys, hidden, heads)
    if mla is not None:
        params = _latent_params(hidden, heads, mla)
        if keys.family in GATED_ATTENTION or keys.value("mla_use_output_gate"):
            params += float(hidden * heads * mla.v_head_dim)
        index_bytes, index_params = _indexer(keys, i, num_layers, hidden, mla)
        return Layers(
            num=1,
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=mla.v_head_dim,
            v_head_dim=mla.v_head_dim,
            is_windowed=kind == "window",
            mixer_params=params + index_params,
            index_bytes=index_bytes,
        )
    return _attention(keys, i, num_layers, kind, hidden, heads)


def _latent_params(hidden: int, heads: int, mla: Mla) -> float:
    q_dim = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    query = mla.q_lora_rank * (hidden + q_dim) if mla.q_lora_rank else hidden * q_dim
    latent = hidden * (mla.kv_lora_rank + mla.qk_rope_head_dim)
    up = mla.kv_lora_rank * heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    return float(query + latent + up + heads * mla.v_head_dim * hidden)


def _indexer(keys: ConfigKeys, i: int, num_layers: int, hidden: int, mla: Mla) -> tuple[int, float]:
    """(bytes per token, parameters) of a layer's indexer, which keeps 8-bit keys with a scale for each 128."""
    if keys.value("index_head_dim") is None:
        return 0, 0.0
    kinds = keys.per_layer("indexer_types", num_layers)
    if kinds is not None and str(kinds[i]) not in ("full", "own", "compute"):
        return 0, 0.0
    dim, num = keys.count("index_head_dim"), keys.count("index_n_heads")
    params = (mla.q_lora_rank or hidden) * num * dim + hidden * (dim + num)
    return dim + 4 * -(-dim // 128), float(params)


def _block_index(keys: ConfigKeys, i: int, num_layers: int, hidden: int) -> tuple[int, float]:
    """(bytes per token, parameters) of the 16-bit index by which a layer of MiniMax-M3 chooses blocks."""
    if keys.value("index_topk_blocks", "sparse_attention_config") is None:
        return 0, 0.0
    stated = keys.value("sparse_attention_config", default={})
    dim, num = stated.get("sparse_index_dim"), stated.get("sparse_num_index_heads")
    dim, num = dim or keys.count("index_head_dim"), num or keys.count("index_n_heads")
    names = names_of(keys, num_layers) or []
    sparse = stated.get("sparse_attention_freq") or ["sparse" in name for name in names]
    if i >= len(sparse) or not sparse[i]:
        return 0, 0.0
    return 2 * dim, float(hidden * dim * (num + 1))


def _attention(keys: ConfigKeys, i: int, num_layers: int, kind: Kind, hidden: int, all_heads: int) -> Layers:
    own = _own_of_layer(keys, i)
    windowed = kind == "window"
    heads = _pick(keys, own, "num_attention_heads", i, _heads_names(windowed), all_heads)
    kv_names = ("swa_num_key_value_heads", "num_swa_key_value_heads") if windowed else ("num_global_key_value_heads",)
    kv_heads = _pick(keys, own, "num_key_value_heads", i, kv_names, _kv_heads(keys, heads))
    head_dim = _pick(keys, own, "head_dim", i, ("swa_head_dim",) if windowed else ("global_head_dim",), 0)
    head_dim = head_dim or _head_dim(keys, hidden, all_heads)
    v_head_dim = _pick(keys, own, "v_head_dim", i, ("swa_v_head_dim",) if windowed else (), 0) or head_dim
    queries, values = hidden * heads * head_dim, hidden * heads * v_head_dim
    shares = i >= num_layers - keys.count("num_kv_shared_layers", default=0, least=0)
    projections = 0 if shares else hidden * kv_heads * head_dim
    if not shares and not (keys.value("attention_k_eq_v") and not windowed):
        projections += hidden * kv_heads * v_head_dim
    gate = values if keys.family in GATED_ATTENTION or keys.value("attn_output_gate", "use_attn_gate") is True else 0
    state = _beside_attention(keys, hidden, kv_heads * (head_dim + v_head_dim))
    index_bytes, index_params = _block_index(keys, i, num_layers, hidden)
    params = float(queries + projections + values + gate) + state.mixer_params + index_params
    return Layers(
        num=1,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        is_windowed=windowed,
        has_cache=not shares,
        mixer_params=params,
        index_bytes=index_bytes,
        state_bytes=state.state_bytes,
    )


def _heads_names(windowed: bool) -> tuple[str, ...]:
    return ("swa_num_attention_heads", "num_sliding_attention_heads") if windowed else ()


def _own_of_layer(keys: ConfigKeys, i: int) -> Mapping[str, Any]:
    """A layer's entry in `per_layer_config`, whose keys are numbers as text."""
    every = keys.value("per_layer_config")
    if not isinstance(every, dict):
        return {}
    return next((own for key, own in every.items() if str(key).isdecimal() and int(key) == i), {})


def _pick(keys: ConfigKeys, own: Mapping[str, Any], name: str, i: int, others: tuple[str, ...], default: int) -> int:
    """A number of one layer: its own, the value for its kind, or the model's, which may be a list."""
    value = own.get(name)
    if value is None:
        lists = keys.value(f"{name}_per_layer")
        value = lists[i] if isinstance(lists, list) and i < len(lists) else None
    if value is None and others:
        value = keys.value(*others)
    if value is None:
        value = keys.value(name, "attention_head_dim") if name == "head_dim" else keys.value(name)
    if isinstance(value, list):
        if i >= len(value):
            raise keys.error(name, value, "a value for each layer")
        value = value[i]
    if value is None or (value == 0 and keys.value("use_mla") is False):
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise keys.error(name, value, "a positive whole number")
    return value


def _kv_heads(keys: ConfigKeys, heads: int) -> int:
    """The number of key and value heads if the config does not give it under its usual name."""
    keys.read |= {"num_kv_heads", "multi_query"}
    if keys.family == "falcon" and not keys.value("new_decoder_architecture"):
        return 1 if keys.value("multi_query") else heads
    if keys.family == "gpt_bigcode":
        return 1 if keys.value("multi_query") else heads
    if keys.value("multi_query_attention"):  # ChatGLM
        return keys.count("multi_query_group_num")
    return keys.count("num_kv_heads", "num_attention_groups", "kv_n_heads", default=heads)


def _head_dim(keys: ConfigKeys, hidden: int, heads: int) -> int:
    keys.read |= {"attention_head_dim", "kv_channels"}
    given = keys.value("head_dim", "attention_head_dim", "kv_channels")
    if given is None and (not heads or hidden % heads):
        raise HeadwayError(
            f"{keys.file}: hidden_size {hidden} is not a multiple of {heads} heads, and head_dim is missing"
        )
    return keys.count("head_dim", "attention_head_dim", "kv_channels", default=hidden // heads)


def _beside_attention(keys: ConfigKeys, hidden: int, kv_width: int) -> Layers:
    """The state that attention layers have in addition to attention."""
    if keys.family == "falcon_h1":
        return _mamba_2(keys, hidden)
    if keys.family == "inkling_text":  # short convolutions of keys, values and both outputs of a layer
        size = keys.count("conv_kernel_size", "sconv_kernel_size", default=4)
        return Layers(num=1, state_bytes=4.0 * size * (2 * hidden + kv_width))
    return Layers(num=1)


def _state(keys: ConfigKeys, hidden: int, heads: int) -> Layers:
    """A layer of linear attention, of a state space or of a convolution, recognised by the keys of its shape."""
    if keys.value("linear_num_value_heads") is not None:
        return _gated_delta(keys, hidden)
    if keys.value("linear_num_heads") is not None or isinstance(keys.value("linear_attn_config"), dict):
        return _kimi_delta(keys, hidden)
    if keys.value("conv_L_cache") is not None:
        size = keys.count("conv_L_cache")
        return Layers(num=1, mixer_params=4.0 * hidden * hidden + hidden * size, state_bytes=2.0 * hidden * size)
    if keys.family == "recurrent_gemma" or keys.value("lru_width") is not None:
        return _linear_recurrent(keys, hidden, heads)
    if keys.family.startswith("minimax") or keys.given("attn_type_list"):
        dim = heads * _head_dim(keys, hidden, heads)
        return Layers(num=1, mixer_params=5.0 * hidden * dim, state_bytes=4.0 * dim * _head_dim(keys, hidden, heads))
    if any(keys.value(name) is not None for name in ("mamba_n_heads", "mamba_num_heads", "mamba_headdim")) or (
        keys.family == "mamba2"
    ):
        return _mamba_2(keys, hidden)
    if any(keys.value(name) is not None for name in ("mamba_d_state", "state_size")):
        return _mamba_1(keys, hidden)
    named = sorted(set(names_of(keys, num_layers_of(keys)) or []))
    raise keys.error(
        "model_type", keys.family, f"a model of which a key gives the shape of layers with a state ({named})"
    )


def _gated_delta(keys: ConfigKeys, hidden: int) -> Layers:
    """Gated delta net (Qwen3-Next, Qwen3.5, OLMo hybrid): a matrix of key by value dimension for each value head."""
    num, key_heads = keys.count("linear_num_value_heads"), keys.count("linear_num_key_heads")
    key_dim, value_dim = keys.count("linear_key_head_dim"), keys.count("linear_value_head_dim")
    inputs = keys.count("linear_conv_kernel_dim", default=4)
    all_keys, all_values = key_heads * key_dim, num * value_dim
    convolved = 2 * all_keys + all_values
    params = hidden * (2 * all_keys + 3 * all_values + 2 * num) + inputs * convolved
    state = 4.0 * num * key_dim * value_dim + 2.0 * inputs * convolved
    return Layers(num=1, mixer_params=float(params), state_bytes=state)


def _kimi_delta(keys: ConfigKeys, hidden: int) -> Layers:
    """Kimi delta attention: a decay for each channel, from a projection through one head's dimension."""
    own = keys.value("linear_attn_config", default={})
    num = own.get("num_heads") or keys.count("linear_num_heads")
    dim = own.get("head_dim") or keys.count("linear_head_dim")
    inputs = own.get("short_conv_kernel_size") or keys.count("linear_conv_kernel_dim", default=4)
    inner = num * dim
    low_rank = dim * (hidden + inner)
    gate = hidden * inner if own.get("use_full_rank_gate") else low_rank
    params = hidden * (4 * inner + num) + low_rank + gate + 3 * inputs * inner
    return Layers(num=1, mixer_params=float(params), state_bytes=4.0 * inner * dim + 2.0 * inputs * 3 * inner)


def _linear_recurrent(keys: ConfigKeys, hidden: int, heads: int) -> Layers:
    """RG-LRU (Griffin, De et al., 2024): a vector, with block-diagonal gates."""
    width, inputs = keys.count("lru_width", default=hidden), keys.count("conv1d_width", default=4)
    params = 3.0 * hidden * width + inputs * width + 2.0 * width * width / heads
    return Layers(num=1, mixer_params=params, state_bytes=4.0 * width + 2.0 * inputs * width)


def _mamba_2(keys: ConfigKeys, hidden: int) -> Layers:
    """Mamba 2 (Dao and Gu, 2024): a matrix of head by state dimension for each head."""
    states = keys.count("mamba_d_state", "ssm_state_size", "state_size", "mamba_state_dim")
    groups = keys.count("mamba_n_groups", "mamba_ngroups", "n_groups", default=1)
    inputs = keys.count("mamba_d_conv", "conv_kernel", default=4)
    num = keys.count("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads")
    expand = keys.value("mamba_expand", "expand", default=2)
    dim = keys.value("mamba_d_head", "mamba_head_dim", "mamba_headdim", "head_dim")
    keys.read |= {"mamba_d_head", "mamba_expand", "expand", "mamba_head_dim", "mamba_headdim"}
    inner = keys.value("mamba_d_ssm") or (num * dim if isinstance(dim, int) else int(expand * hidden))
    convolved = inner + 2 * groups * states
    params = hidden * (inner + convolved + num) + inputs * convolved + inner * hidden
    number = _state_number_bytes(keys)
    return Layers(num=1, mixer_params=float(params), state_bytes=number * inner * states + 2.0 * inputs * convolved)


def _state_number_bytes(keys: ConfigKeys) -> float:
    """Bytes per number of a state: by the config's type, otherwise 4, as in `transformers`."""
    written = str(keys.value("mamba_ssm_cache_dtype", "mamba_ssm_dtype", default="float32"))
    return 2.0 if written.removeprefix("torch.") in ("bfloat16", "float16") else 4.0


def _mamba_1(keys: ConfigKeys, hidden: int) -> Layers:
    """Mamba (Gu and Dao, 2023): a matrix of inner by state dimension."""
    states, inputs = keys.count("mamba_d_state", "state_size"), keys.count("mamba_d_conv", "conv_kernel", default=4)
    inner = keys.value("intermediate_size") if _is_attention_free(keys) else None
    inner = inner or int(keys.value("mamba_expand", "expand", default=2) * hidden)
    rank = keys.value("mamba_dt_rank", "time_step_rank")
    rank = rank if isinstance(rank, int) else -(-hidden // 16)
    num = keys.count("n_mamba_heads", default=1)
    params = hidden * 2 * inner + inputs * inner + inner * (rank + 2 * states) + rank * inner + inner * states
    params += inner * hidden
    return Layers(
        num=1,
        mixer_params=float(params) if num >= 1 else 0.0,
        state_bytes=_state_number_bytes(keys) * inner * states + 2.0 * inputs * inner,
    )


def _of_blocks(keys: ConfigKeys, blocks: list[Any], hidden: int, heads: int, gated: bool) -> Shapes:
    """Layers of a network pruned by a search (Llama-Nemotron). Each block gives its own heads and width."""
    layers, kinds = [], []
    dim = _head_dim(keys, hidden, heads)
    for block in blocks:
        attention, ffn = (block.get(part) or {} if isinstance(block, dict) else {} for part in ("attention", "ffn"))
        if attention.get("replace_with_linear") or ffn.get("replace_with_linear"):
            raise keys.error("block_configs", block, "blocks with attention and a feed-forward, or without")
        layer = Layers(num=1)
        if not attention.get("no_op"):
            kv_heads = heads // (attention.get("n_heads_in_group") or 1)
            layer = Layers(
                num=1,
                num_heads=heads,
                num_kv_heads=kv_heads,
                head_dim=dim,
                v_head_dim=dim,
                mixer_params=2.0 * hidden * dim * (heads + kv_heads),
            )
        width = 0
        if not ffn.get("no_op"):
            width = ffn.get("intermediate_size") or 256 * -(-int(2 * (ffn.get("ffn_mult") or 0) * hidden / 3) // 256)
        kind: Kind = "full" if layer.num_heads else "none"
        kinds.append(kind)
        layers.append(replace(layer, mlp_width=width))
    keys.read |= {"intermediate_size", "num_key_value_heads"}
    return Shapes(layers, kinds, None, None, gated, max(each.mlp_width for each in layers), 0.0, ())


# Additional parts of layers in single families.


def _special(
    keys: ConfigKeys, layers: list[Layers], hidden: int, num_layers: int
) -> tuple[list[Layers], float, tuple[str, ...]]:
    """(layers, parameters that no token passes through, parts that step times omit)."""
    unmodelled = []
    other = 0.0
    if keys.family in LEARNED_POSITIONS:
        other += float(keys.count("max_position_embeddings", "n_positions", default=1024) * hidden)
    if any(each.index_bytes for each in layers):
        unmodelled.append("sparse attention counted as full attention")
    if any(each.state_bytes for each in layers):
        unmodelled.append("states of layers without a KV cache by their bytes and FLOPs")
    if (streams := keys.value("hc_mult")) is not None:  # hyper-connections: several residual streams
        added = 2.0 * (2 * streams) * streams * hidden
        layers = [replace(each, mixer_params=each.mixer_params + added) for each in layers]
        unmodelled.append("hyper-connections by their parameters alone")
    if (rank := keys.value("laurel_rank")) is not None:  # Gemma 3n: a low-rank bypass, and projections of its streams
        keys.read |= {"altup_active_idx", "altup_coef_clip", "altup_num_inputs", "altup_correct_scale"}
        streams = keys.count("altup_num_inputs", default=4)
        added = 2.0 * rank * hidden + 2.0 * (streams - 1) * hidden * hidden / num_layers
        layers = [replace(each, mixer_params=each.mixer_params + added) for each in layers]
    per_layer = keys.value("hidden_size_per_layer_input", default=0)
    if isinstance(per_layer, int) and per_layer > 0:  # Gemma 3n and 4: an embedding for each layer
        other += float(keys.count("vocab_size_per_layer_input", "vocab_size") * num_layers * per_layer)
        added = 3.0 * hidden * per_layer
        layers = [replace(each, mixer_params=each.mixer_params + added) for each in layers]
    return layers, other, tuple(unmodelled)
