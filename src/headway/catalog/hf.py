"""Read the shape of a model from a Hugging Face config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from headway.core.errors import HeadwayError
from headway.core.fleet import Mla, Model, Moe, Sampling

SAMPLING = ("temperature", "top_p", "top_k", "repetition_penalty")


def model_from_config(path: str | Path, name: str | None = None) -> Model:
    """Return the model that a Hugging Face config.json describes.

    Supports dense transformers of the Llama kind (Llama, Mistral, Qwen, Yi, ...), Bloom, and the mixtures of experts of
    Mixtral, Qwen, DeepSeek-V2/V3 (with latent attention), Llama 4 and GPT-OSS, with layers of sliding windows (Gemma)
    or of linear attention (Qwen3-Next). Of a multimodal model only the text part counts. The sampling parameters come
    from a `generation_config.json` in the same folder. `name` defaults to the config's `_name_or_path`, else to the
    folder. HeadwayError names the file and the key that is missing or invalid, and refuses encoders and state-space
    layers.
    """
    file = Path(path)
    config = _read(file)
    sampling = _sampling(file.with_name("generation_config.json"))
    text = config.get("text_config")
    if isinstance(text, dict):
        inherited = {k: v for k, v in config.items() if k not in text and k != "text_config"}
        config = ConfigKeys(file, {**inherited, **text})
    _check_decoder(config)
    config = ConfigKeys(file, {**_DEFAULTS.get(str(config.get("model_type")), {}), **config})
    shown = name or str(config.get("_name_or_path") or "") or file.resolve().parent.name
    model = _bloom(config, shown) if config.get("model_type") == "bloom" else _transformer(config, shown)
    return replace(model, sampling=sampling)


def _sampling(file: Path) -> Sampling | None:
    """The sampling parameters that engines take from a `generation_config.json`; None: there is no such file."""
    if not file.exists():
        return None
    keys = _read(file)
    given: dict[str, Any] = {name: keys[name] for name in SAMPLING if keys.get(name) is not None}
    try:
        return msgspec.convert({**given, "source": str(file)}, Sampling)
    except msgspec.ValidationError as error:
        raise HeadwayError(f"{file}: {error}") from None


_GEMMA_3: dict[str, Any] = {
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262_208,
    "max_position_embeddings": 131_072, "sliding_window": 4096, "sliding_window_pattern": 6,
    "tie_word_embeddings": True,
}  # fmt: skip
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma": {"tie_word_embeddings": True},
    "gemma2": {"tie_word_embeddings": True, "sliding_window": 4096, "sliding_window_pattern": 2},
    "gemma3": _GEMMA_3, "gemma3_text": _GEMMA_3,
    "gpt_oss": {"sliding_window_pattern": 2},
    "cohere2": {"sliding_window_pattern": 4, "tie_word_embeddings": True},
    "qwen3_next": {"full_attention_interval": 4},
}  # fmt: skip
"""Keys that published configs of a family leave out, with the values of `transformers`."""
_ENCODERS = (
    "bert", "roberta", "xlm-roberta", "camembert", "albert", "electra", "deberta", "deberta-v2", "distilbert", "mpnet",
    "modernbert", "nomic_bert", "eurobert", "ernie", "clip", "siglip", "vit", "wav2vec2", "hubert",
)  # fmt: skip
_STATE_SPACE_KEYS = (
    "mamba_d_state", "mamba_expand", "ssm_state_size", "ssm_cfg", "state_size", "hybrid_override_pattern",
    "layers_block_type", "attn_layer_period", "attn_type_list", "linear_attn_config",
)  # fmt: skip


def _check_decoder(config: ConfigKeys) -> None:
    """HeadwayError for a model that generates no tokens, or whose layers have no keys and values."""
    kind, architectures = str(config.get("model_type") or ""), config.get("architectures") or []
    what = ""
    if kind.lower() in _ENCODERS or any("MaskedLM" in str(name) for name in architectures):
        what = "an encoder, which generates no tokens"
    elif config.get("is_encoder_decoder"):
        what = "an encoder with a decoder"
    elif state_space := [key for key in _STATE_SPACE_KEYS if config.get(key) is not None]:
        what = f"with layers that Headway does not model ({state_space[0]})"
    if what:
        shown = kind or ", ".join(map(str, architectures))
        raise HeadwayError(f"{config.file}: model_type is {shown!r}, {what}; expected a decoder of the Llama kind")


class ConfigKeys(dict[str, Any]):
    """The keys of a config, with the file's name for error messages."""

    def __init__(self, file: Path, keys: dict[str, Any]) -> None:
        super().__init__(keys)
        self.file = file

    def count(self, *keys: str, default: int | None = None) -> int:
        """The positive whole number under the first of `keys` that is present."""
        for key in keys:
            value = self.get(key)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise HeadwayError(f"{self.file}: {key} is {value!r}; expected a positive whole number")
            return value
        if default is None:
            named = " or ".join(map(repr, keys))
            raise HeadwayError(
                f"{self.file}: key {named} is missing; expected a positive whole number, as in a "
                "Hugging Face config.json of a transformer"
            )
        return default


def _read(file: Path) -> ConfigKeys:
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise HeadwayError(f"{file}: {error.strerror or error}") from error
    try:
        keys = msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        raise HeadwayError(f"{file}: not JSON: {error}") from error
    if not isinstance(keys, dict):
        raise HeadwayError(f"{file}: expected an object of keys, as in a Hugging Face config.json")
    return ConfigKeys(file, keys)


def _bloom(config: ConfigKeys, name: str) -> Model:
    hidden = config.count("hidden_size", "n_embed")
    heads = config.count("n_head", "num_attention_heads")
    return Model(
        name=name,
        hf_id=str(config.get("_name_or_path") or ""),
        num_layers=config.count("n_layer", "num_hidden_layers"),
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=_head_dim(config, hidden, heads),
        vocab_size=config.count("vocab_size"),
        max_context_tokens=config.count("seq_length", default=2048),
        gated_mlp=False,
        tie_embeddings=True,
        dtype=_dtype(config),
        source=str(config.file),
    )


def _transformer(config: ConfigKeys, name: str) -> Model:
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
    mla = _mla(config)
    window, every = _window(config)
    is_state = False
    if window is None and (state_every := _linear_layers(config)):
        window, every, is_state = _state_tokens(config), state_every, True
    return Model(
        name=name,
        hf_id=str(config.get("_name_or_path") or ""),
        num_layers=config.count("num_hidden_layers"),
        hidden_size=hidden,
        intermediate_size=config.count("intermediate_size_mlp", "intermediate_size"),
        num_heads=heads,
        num_kv_heads=config.count("num_key_value_heads", default=heads),
        head_dim=mla.v_head_dim if mla else _head_dim(config, hidden, heads),
        vocab_size=config.count("vocab_size"),
        max_context_tokens=config.count("max_position_embeddings"),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        dtype=_dtype(config),
        moe=_moe(config),
        mla=mla,
        sliding_window_tokens=window,
        sliding_window_every=every,
        window_is_state=is_state,
        source=str(config.file),
    )


def _head_dim(config: ConfigKeys, hidden: int, heads: int) -> int:
    if config.get("head_dim") is None and hidden % heads:
        raise HeadwayError(
            f"{config.file}: hidden_size {hidden} is not a multiple of {heads} heads, and head_dim is missing"
        )
    return config.count("head_dim", default=hidden // heads)


def _mla(config: ConfigKeys) -> Mla | None:
    if config.get("kv_lora_rank") is None:
        return None
    return Mla(
        kv_lora_rank=config.count("kv_lora_rank"),
        q_lora_rank=config.count("q_lora_rank", default=0),
        qk_nope_head_dim=config.count("qk_nope_head_dim"),
        qk_rope_head_dim=config.count("qk_rope_head_dim"),
        v_head_dim=config.count("v_head_dim"),
    )


def _moe(config: ConfigKeys) -> Moe | None:
    experts = config.count("n_routed_experts", "num_local_experts", "num_experts", default=1)
    if experts == 1:
        return None
    width = config.count("moe_intermediate_size", "intermediate_size")
    shared = config.count("shared_expert_intermediate_size", default=0)
    shared += width * config.count("n_shared_experts", default=0)
    if config.get("model_type") in ("llama4", "llama4_text"):
        shared = width
    return Moe(
        num_experts=experts,
        experts_per_token=config.count("num_experts_per_tok", "experts_per_token"),
        intermediate_size=width,
        shared_intermediate_size=shared,
        num_dense_layers=_zero_or(config, "first_k_dense_replace"),
        moe_layer_every=config.count("interleave_moe_layer_step", "decoder_sparse_step", "moe_layer_freq", default=1),
    )


def _zero_or(config: ConfigKeys, key: str) -> int:
    return 0 if config.get(key) == 0 else config.count(key, default=0)


def _window(config: ConfigKeys) -> tuple[int | None, int]:
    """(window in tokens, n), where every n-th layer has full attention; n = 1: none has."""
    if config.get("use_sliding_window") is False:
        return None, 1
    if config.get("sliding_window") is None and config.get("attention_chunk_size") is None:
        return None, 1
    window = config.count("sliding_window", "attention_chunk_size")
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        full = kinds.count("full_attention")
        return (None, 1) if full == len(kinds) else (window, round(len(kinds) / full) if full else 1)
    if config.get("attention_chunk_size") is not None:
        return window, config.count("no_rope_layer_interval", default=4)
    return window, config.count("sliding_window_pattern", "_sliding_window_pattern", default=1)


def _linear_layers(config: ConfigKeys) -> int:
    """n, where every n-th layer has full attention and the others linear attention; 0: none is linear."""
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        full = kinds.count("full_attention")
        return round(len(kinds) / full) if full and "linear_attention" in kinds else 0
    return config.count("full_attention_interval") if config.get("full_attention_interval") is not None else 0


def _state_tokens(config: ConfigKeys) -> int:
    """The state of a layer of gated linear attention (Qwen3-Next), as tokens whose KV cache is as large.

    The state is a matrix of key by value dimension for each value head, with 32 bits, and the last inputs of the
    convolution.
    """
    heads, keys = config.count("linear_num_value_heads"), config.count("linear_key_head_dim")
    values, key_heads = config.count("linear_value_head_dim"), config.count("linear_num_key_heads")
    inputs = config.count("linear_conv_kernel_dim", default=4) - 1
    state_bytes = 4 * heads * keys * values + 2 * inputs * (2 * key_heads * keys + heads * values)
    hidden, query_heads = config.count("hidden_size"), config.count("num_attention_heads")
    kv_heads = config.count("num_key_value_heads", default=query_heads)
    return -(-state_bytes // (4 * kv_heads * _head_dim(config, hidden, query_heads)))


def _dtype(config: ConfigKeys) -> str:
    quantization = config.get("quantization_config")
    if isinstance(quantization, dict):
        return _quantized(config, quantization)
    written = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16")
    known = {"bfloat16": "bf16", "float16": "fp16", "float32": "bf16", "float8_e4m3fn": "fp8"}
    if written not in known:
        raise HeadwayError(f"{config.file}: torch_dtype is {written!r}; expected one of {', '.join(known)}")
    return known[written]


def _quantized(config: ConfigKeys, quantization: dict[str, Any]) -> str:
    method = str(quantization.get("quant_method", ""))
    if method == "fp8":
        return "fp8"
    if method in ("mxfp4", "awq", "gptq"):
        if quantization.get("bits", 4) == 4:
            return "int4"
    elif method == "compressed-tensors":
        groups = quantization.get("config_groups")
        weights = [g.get("weights") or {} for g in groups.values()] if isinstance(groups, dict) else []
        bits = {(w.get("num_bits"), w.get("type")) for w in weights}
        if bits == {(8, "float")}:
            return "fp8"
        if bits and all(b == 4 for b, _ in bits):
            return "int4"
    raise HeadwayError(
        f"{config.file}: quantization_config of method {method!r} is not supported; expected fp8, mxfp4, "
        "4-bit awq or gptq, or compressed-tensors of 8-bit floats or 4 bits"
    )
