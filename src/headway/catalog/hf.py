"""Reads the shape of a model from a Hugging Face config.json, or from a GGUF file translated into one."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from headway.catalog.config_keys import ConfigKeys, family_defaults, read_json
from headway.catalog.gguf_config import config_of_gguf
from headway.catalog.gguf_weights import with_weights_of
from headway.catalog.layer_kinds import window_tokens
from headway.catalog.layer_shapes import Shapes, hidden_size_of, shapes_of
from headway.catalog.quantization import BESIDE, Quantization, quantization_of
from headway.core.errors import HeadwayError
from headway.core.model import Layers, Model, Sampling

GGUF = ".gguf"
SAMPLING = ("temperature", "top_p", "top_k", "repetition_penalty")
_TEXT = ("text_config", "llm_config", "language_config", "text_model_config")
"""Keys under which configs of multimodal models keep the text part."""
_AROUND = ("thinker_config", "talker_free_config")


def model_from_config(path: str | Path, name: str | None = None, assume: bool = False) -> Model:
    """The model described by a Hugging Face config.json at `path` or in the folder `path`, or by a GGUF file.

    Reads all decoders of `transformers` with attention, sliding windows, latent attention, experts, linear attention,
    state-space layers and convolutions, except those that it refuses by name. Of a multimodal model only the text part
    counts. Types of weights come from `quantization_config`, or from a quantiser's file in the same folder, and the
    sampling parameters from a `generation_config.json` there. `name` defaults to the config's `_name_or_path`, else to
    the folder. Raises HeadwayError for a missing or invalid key, for encoders, and for keys of unknown meaning on which
    sizes may depend; `assume` ignores such keys. The message names the file and the key.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    outer = config_of_gguf(file) if file.suffix == GGUF else read_json(file)
    config = _text_part(file, outer)
    _check_decoder(config)
    shapes = shapes_of(config, assume)
    quantization = quantization_of(config, outer)
    dtype = quantization.dtype if quantization is not None else _dtype(config)
    layers = shapes.layers if quantization is None else _quantised(shapes.layers, shapes, quantization, config.family)
    model = _model(config, shapes, layers, dtype)
    if isinstance(facts := config.get("_gguf"), dict):
        model = with_weights_of(model, facts, file)
    unknown = config.not_understood()
    if unknown and not assume:
        named = ", ".join(f"{key} ({_shown(config[key])})" for key in unknown)
        raise HeadwayError(
            f"{file}: not understood: {named}. Sizes may depend on it; --assume (`assume: true` beside `config:`) goes "
            "on without it"
        )
    notes = (*shapes.unmodelled, *(f"{key} of the config passed over" for key in unknown))
    shown = name or str(outer.get("_name_or_path") or config.get("_name_or_path") or "") or file.resolve().parent.name
    hf_id = str(outer.get("_name_or_path") or config.get("_name_or_path") or "")
    sampling = _sampling(file.with_name("generation_config.json"))
    return replace(model, name=shown, hf_id=hf_id, unmodelled=notes, sampling=sampling)


def local_config(name: str, base_dir: Path = Path()) -> Path | None:
    """The config.json of a folder, or of a repository in the cache of Hugging Face's hub, or a GGUF file; None if there
    is none."""
    if (folder := base_dir / name).is_dir() and (folder / "config.json").is_file():
        return folder / "config.json"
    if folder.name.endswith((".json", GGUF)) and folder.is_file():
        return folder
    if name.count("/") != 1 or name.startswith((".", "/")):
        return None
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    repository = hub / f"models--{name.replace('/', '--')}"
    found = [each for each in repository.glob("snapshots/*/config.json") if each.is_file()]
    return max(found, key=lambda each: each.stat().st_mtime, default=None)


def _text_part(file: Path, outer: dict[str, Any]) -> ConfigKeys:
    """The keys of the text part, completed by the keys of the whole config."""
    keys: dict[str, Any] = outer
    for around in _AROUND:
        if isinstance(keys.get(around), dict):
            keys = {**{k: v for k, v in keys.items() if k != around and k != "model_type"}, **keys[around]}
    for part in _TEXT:
        text = keys.get(part)
        if isinstance(text, dict):
            inherited = {k: v for k, v in keys.items() if k not in text and k != part}
            family = text.get("model_type") or family_defaults(str(keys.get("model_type"))).get("text")
            keys = {**inherited, **text, "model_type": family or keys.get("model_type")}
            keys["_parts"] = {k: True for k in inherited}
            break
    keys = {**keys, **_flat(keys)}
    return ConfigKeys(file, keys, defaults="_gguf" not in keys)


def _flat(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of DBRX's and MPT's parts `attn_config` and `ffn_config`."""
    flat: dict[str, Any] = {}
    for part in ("attn_config", "ffn_config"):
        if isinstance(keys.get(part), dict):
            flat |= {k: v for k, v in keys[part].items() if k not in keys and k != "model_type"}
    return flat


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _sampling(file: Path) -> Sampling | None:
    """The sampling parameters that engines take from a `generation_config.json`; None without the file."""
    if not file.exists():
        return None
    keys = read_json(file)
    given: dict[str, Any] = {name: keys[name] for name in SAMPLING if keys.get(name) is not None}
    try:
        return msgspec.convert({**given, "source": str(file)}, Sampling)
    except msgspec.ValidationError as error:
        raise HeadwayError(f"{file}: {error}") from None


_ENCODERS = (
    "bert", "roberta", "xlm-roberta", "camembert", "albert", "electra", "deberta", "deberta-v2", "distilbert", "mpnet",
    "modernbert", "nomic_bert", "eurobert", "ernie", "clip", "clip_vision_model", "siglip",
    "siglip_vision_model", "vit", "wav2vec2", "hubert",
)  # fmt: skip
_REFUSED = {
    "blt": "bytes in patches of varying length", "rwkv": "time mixing without attention (rwkv)",
    "xlstm": "recurrent cells (xlstm)", "reformer": "hashed attention (reformer)", "xlnet": "two-stream attention",
    "xlm": "encoder layers", "cpmant": "segments of a prompt", "ctrl": "positions of another kind",
    "diffusion_gemma": "blocks that are denoised, not decoded", "doge": "experts retrieved by product keys",
    "hrm_text": "stacks that run several times a token", "prophetnet": "n-gram streams", "mllama": "cross attention",
    "mllama_text_model": "cross attention to images",
    "moshi": "two models a token",
    "zaya": "routers that are networks", "gemma4_assistant": "drafting for another model",
    "gemma4_unified_assistant": "drafting for another model", "jetmoe": "experts in attention",
    "zamba": "a block of attention that several layers share",
    "zamba2": "blocks of attention that several layers share",
    "longcat_flash": "experts without weights, so that the work of a token varies",
    "deepseek_v4": "a cache of tokens that are compressed into one",
    "qwen4_exp_text": "n-gram embeddings and compressed attention", "evolla": "cross attention to proteins",
}  # fmt: skip
"""Families of decoders with memory or steps that are not modelled, and the reason."""


def _check_decoder(config: ConfigKeys) -> None:
    """Raises HeadwayError for a model that generates no tokens, or has layers that are not modelled."""
    kind, architectures = config.family, config.get("architectures") or []
    what = ""
    if kind.lower() in _ENCODERS or any("MaskedLM" in str(name) for name in architectures):
        what = "an encoder, which generates no tokens"
    elif config.get("is_encoder_decoder"):
        what = "an encoder with a decoder"
    elif kind in _REFUSED:
        what = f"whose layers Headway does not model: {_REFUSED[kind]}"
    if what:
        shown = kind or ", ".join(map(str, architectures))
        raise HeadwayError(f"{config.file}: model_type is {shown!r}, {what}; expected a decoder of the Llama kind")


def _model(config: ConfigKeys, shapes: Shapes, layers: list[Layers], dtype: str) -> Model:
    first = next((each for each in layers if each.num_heads and not each.is_windowed), None)
    first = first or next((each for each in layers if each.num_heads), Layers(num=1))
    hidden = hidden_size_of(config)
    windowed = any(each.is_windowed for each in layers)
    model = Model(
        name="",
        hf_id="",
        num_layers=len(layers),
        hidden_size=hidden,
        intermediate_size=shapes.width or hidden,
        num_heads=first.num_heads or 1,
        num_kv_heads=first.num_kv_heads or 1,
        head_dim=first.head_dim or hidden,
        vocab_size=config.count("vocab_size", "padded_vocab_size"),
        max_context_tokens=_context_tokens(config),
        gated_mlp=shapes.gated,
        tie_embeddings=bool(config.value("tie_word_embeddings", default=False)),
        dtype=dtype,
        moe=shapes.moe,
        mla=shapes.mla,
        sliding_window_tokens=window_tokens(config) if windowed else None,
        other_params=shapes.other_params,
        source=str(config.file),
    )
    return _simplest(model, layers)


def _simplest(model: Model, layers: list[Layers]) -> Model:
    """The model without a list of layers if its other fields describe it completely; otherwise with the list."""
    num, moe = len(layers), model.moe
    windowed, sparse = sum(each.is_windowed for each in layers), sum(each.has_experts for each in layers)
    every = round(num / (num - windowed)) if windowed < num else 1
    simple = replace(model, sliding_window_every=every if windowed else 1)
    if moe is not None:
        leading = next((i for i, each in enumerate(layers) if each.has_experts), 0)
        step = max(round((num - leading) / sparse), 1) if sparse else 1
        if leading == step - 1:
            leading = 0
        simple = replace(simple, moe=replace(moe, num_dense_layers=leading, moe_layer_every=step))
    alike = simple.all_layers
    if _sums(alike) == _sums(layers) and {_shape(each) for each in alike} == {_shape(each) for each in layers}:
        return simple
    grouped: dict[Layers, int] = {}
    for each in layers:
        grouped[each] = grouped.get(each, 0) + each.num
    return replace(model, layers=tuple(replace(each, num=count) for each, count in grouped.items()))


def _sums(layers: tuple[Layers, ...] | list[Layers]) -> tuple[int, int]:
    """(windowed layers, layers with experts). Their combination does not affect the sums."""
    windowed = sum(each.num for each in layers if each.is_windowed)
    return windowed, sum(each.num for each in layers if each.has_experts)


def _shape(layer: Layers) -> Layers:
    """The layer without its count and window. Experts keep the width that they replace."""
    return replace(layer, num=1, is_windowed=False)


# Types of weights.

_MIXERS = {
    "attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "latent": ("q_b_proj", "kv_b_proj", "kv_a_proj_with_mqa", "o_proj"),
    "state": ("in_proj_qkv", "in_proj_qkvz", "in_proj_z", "in_proj", "out_proj"),
}
_STATES = {"mamba": "mamba", "conv": "conv"}
_FEED_FORWARD = {
    "mixtral": "block_sparse_moe",
    "minimax": "block_sparse_moe",
    "minimax_m2": "block_sparse_moe",
    "minimax_m3_vl_text": "block_sparse_moe",
    "nemotron_h": "mixer",
    "llama4_text": "feed_forward",
    "lfm2": "feed_forward",
    "lfm2_moe": "feed_forward",
    "jamba": "feed_forward",
    "step3p7": "moe",
}
"""Names of the module that holds the experts in checkpoints, if it is not `mlp`."""


def _quantised(layers: list[Layers], shapes: Shapes, quantization: Quantization, family: str) -> list[Layers]:
    """The layers, with the types of their weights if they differ from the model's."""
    linear = "bf16" if shapes.moe is not None and quantization.dtype == "int4" else quantization.dtype
    found = []
    for i, (layer, kind) in enumerate(zip(layers, shapes.kinds, strict=True)):
        own = quantization.of(_mixer_modules(i, kind, shapes.mla is not None, family))
        mlp, experts = _mlp_modules(i, layer.has_experts, family)
        shared, routed = quantization.of(mlp), quantization.of(experts)
        found.append(
            replace(
                layer,
                mixer_dtype="" if own == linear or not layer.mixer_params else own,
                mlp_dtype="" if shared == linear or not (layer.mlp_width or layer.has_experts) else shared,
                expert_dtype="" if routed == quantization.dtype or not layer.has_experts else routed,
            )
        )
    return found


def _mixer_modules(i: int, kind: str, is_latent: bool, family: str) -> list[str]:
    if family == "nemotron_h":
        around, names = "mixer", _MIXERS["state" if kind == "state" else "attention"]
    elif kind == "state":
        state = next((name for part, name in _STATES.items() if part in family), "linear_attn")
        around, names = ("conv" if family.startswith("lfm2") else state), _MIXERS["state"]
    else:
        around, names = "self_attn", _MIXERS["latent" if is_latent else "attention"]
    return [f"layers.{i}.{around}.{name}" for name in names]


def _mlp_modules(i: int, has_experts: bool, family: str) -> tuple[list[str], list[str]]:
    """(modules of the dense feed-forward or of shared experts, modules of a routed expert)."""
    around = f"layers.{i}.{_FEED_FORWARD.get(family, 'mlp') if has_experts or family == 'nemotron_h' else 'mlp'}"
    dense = [f"{around}.{name}" for name in ("gate_proj", "up_proj", "down_proj")]
    if family.startswith("gemma4"):
        around = f"layers.{i}"
    elif has_experts:
        dense = [
            f"{around}.{shared}.{name}"
            for shared in ("shared_experts", "shared_expert")
            for name in ("up_proj", "down_proj")
        ]
    return dense, [f"{around}.experts.0.{name}" for name in ("up_proj", "down_proj", "w1", "w2")]


def _dtype(config: ConfigKeys) -> str:
    written = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16")
    known = {"bfloat16": "bf16", "float16": "fp16", "float32": "bf16", "float8_e4m3fn": "fp8", "auto": "bf16"}
    written = written.removeprefix("torch.")
    if written not in known:
        raise HeadwayError(f"{config.file}: torch_dtype is {written!r}; expected one of {', '.join(known)}")
    return known[written]


# Context.

_POSITIONS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_seq_length",
    "max_sequence_length",
    "seq_length",
    "model_max_length",
    "n_ctx",
)
_UNSTATED_CONTEXT_TOKENS = 2048
"""The length that vLLM assumes if the config gives none."""
_INCLUDED = ("su", "longrope", "llama3", "default", "mrope", "proportional")
"""Kinds of rotary scaling for which `max_position_embeddings` already is the long context."""


def _context_tokens(config: ConfigKeys) -> int:
    """The longest sequence, derived like vLLM's `max_model_len` from the positions and the rotary scaling."""
    tokens = next((config.count(name) for name in _POSITIONS if config.value(name) is not None), None)
    if tokens is None:
        return _UNSTATED_CONTEXT_TOKENS
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(scaling, dict) or config.family.startswith("gemma3"):
        return tokens
    factor, own = 1.0, [each for each in scaling.values() if isinstance(each, dict)]
    for each in own or [scaling]:
        kind = str(each.get("rope_type") or each.get("type") or "default")
        if kind in _INCLUDED:
            continue
        stated = each.get("factor", 1.0)
        if isinstance(stated, bool) or not isinstance(stated, int | float) or not stated > 0:
            raise config.error("rope_scaling.factor", stated, "a number above 0")
        factor, original = float(stated), each.get("original_max_position_embeddings")
        if kind == "yarn" and isinstance(original, int) and original > 0:
            tokens = original
    return int(tokens * factor)


def whole_config(path: str | Path) -> str:
    """The text of a config.json, including the quantisation from a separate file, so that one file suffices.

    A GGUF file is translated.
    """
    file = Path(path)
    if file.suffix == GGUF:
        return json.dumps(config_of_gguf(file), indent=1)
    file = file / "config.json" if file.is_dir() else file
    keys = read_json(file)
    if any(keys.get(name) for name in ("quantization_config", "compression_config")):
        return file.read_text(encoding="utf-8-sig")
    for name in BESIDE:
        if file.name == "config.json" and (beside := file.with_name(name)).exists():
            stated = read_json(beside)
            method = "modelopt" if name == BESIDE[0] else "gptq"
            keys["quantization_config"] = {"quant_method": method, **(stated.get("quantization") or stated)}
            return json.dumps(keys, indent=1)
    return file.read_text(encoding="utf-8-sig")
