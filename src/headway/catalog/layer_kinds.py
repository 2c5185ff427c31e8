"""Determines the kind of attention or state, and of feed-forward, of each layer of a config."""

from __future__ import annotations

from typing import Any, Literal

from headway.catalog.config_keys import ConfigKeys

Kind = Literal["full", "window", "state", "none"]
"""Attention to all tokens or to a window, a state of constant size, or only a feed-forward."""
Mlp = Literal["dense", "experts", "none"]

_KINDS: dict[str, Kind] = {
    "full_attention": "full", "attention": "full", "global_attention": "full", "global": "full", "full": "full",
    "hybrid": "full", "self_attention": "full", "latent_attention": "full", "mla": "full", "*": "full",
    "deepseek_sparse_attention": "full", "sparse": "full", "sparse_attention": "full", "minimax_m3_sparse": "full",
    "sliding_attention": "window", "sliding_window_attention": "window", "chunked_attention": "window",
    "local_attention": "window", "local": "window", "sliding": "window", "hybrid_sliding": "window",
    "sliding_window": "window", "swa": "window", "nope_attention": "full",
    "linear_attention": "state", "mamba": "state", "mamba2": "state", "conv": "state", "recurrent": "state",
    "kda": "state", "lightning": "state", "m": "state", "ssm": "state", "gated_deltanet": "state",
    "kimi_delta_attention": "state",
    "mlp": "none", "moe": "none", "-": "none", "e": "none", "ffn": "none",
}  # fmt: skip
_PATTERNS = ("sliding_window_pattern", "_sliding_window_pattern", "global_attn_every_n_layers")


def kinds_of(keys: ConfigKeys, num_layers: int) -> list[Kind]:
    """The kind of each layer."""
    keys.read |= {"max_window_layers", "use_sliding_window"}
    named = _named(keys, num_layers)
    if named is not None:
        return named
    for read in (_by_index, _by_period, _windowed):
        found = read(keys, num_layers)
        if found is not None:
            return found
    return ["full"] * num_layers


def names_of(keys: ConfigKeys, num_layers: int) -> list[str] | None:
    """The kinds of the layers in the config's own words; None if it has no such list."""
    for key in ("layer_types", "layers_block_type", "block_types", "layer_block_types", "hybrid_override_pattern"):
        value = keys.get(key)
        if value is None:
            continue
        keys.read.add(key)
        names = list(value) if isinstance(value, str | list) else []
        if key == "block_types" and names:
            names = [names[i % len(names)] for i in range(num_layers)]
        if len(names) < num_layers:
            raise keys.error(key, value, f"a kind for each of {num_layers} layers")
        return [str(name) for name in names[:num_layers]]
    return None


def _named(keys: ConfigKeys, num_layers: int) -> list[Kind] | None:
    names = names_of(keys, num_layers)
    if names is None:
        return None
    for name in names:
        if name.lower() not in _KINDS:
            known = ", ".join(sorted(each for each in _KINDS if len(each) > 2))
            raise keys.error("layer_types", name, f"a kind of layer that is known ({known})")
    keys.read |= {*_PATTERNS, "full_attention_interval", "sliding_window"}
    kinds = [_KINDS[name.lower()] for name in names]
    if "window" in kinds and window_tokens(keys) is None:
        kinds = ["full" if kind == "window" else kind for kind in kinds]
    return kinds


def _by_index(keys: ConfigKeys, num_layers: int) -> list[Kind] | None:
    """Kinds from lists of layers, or from numbers that stand for kinds."""
    every = range(num_layers)
    if (types := keys.per_layer("attn_type_list", num_layers)) is not None:  # MiniMax: 0 means lightning attention
        return ["full" if each else "state" for each in types]
    if (types := keys.per_layer("hybrid_layer_pattern", num_layers)) is not None:  # MiMo-V2: 1 means a window
        return ["window" if each else "full" for each in types]
    linear = keys.value("linear_attn_config")
    if isinstance(linear, dict):  # Kimi-Linear counts from 1
        full = _indices(keys, linear.get("full_attn_layers"), "linear_attn_config.full_attn_layers")
        return ["full" if i + 1 in full else "state" for i in every]
    for key in ("full_attn_idxs", "attn_layer_indices", "full_attention_layers", "attention_layer_indices"):
        if keys.given(key):
            full = _indices(keys, keys[key], key)
            return ["full" if i in full else "state" for i in every]
    if keys.given("local_layer_ids"):
        local = _indices(keys, keys["local_layer_ids"], "local_layer_ids")
        return ["window" if i in local else "full" for i in every]
    if keys.family == "bamba":
        return ["state"] * num_layers
    keys.read.add("attention_layers")
    if keys.given("attention_types"):  # GPT-Neo: [[["global", "local"], 12]]
        names = [name for group, times in keys["attention_types"] for _ in range(times) for name in group]
        return [_KINDS[str(name)] for name in names[:num_layers]]
    if keys.given("attention_chunk_size") or keys.value("attention_chunk_size"):  # Llama 4
        rotary = keys.per_layer("no_rope_layers", num_layers) if keys.value("no_rope_layers") else None
        every_nth = keys.count("no_rope_layer_interval", "nope_layer_interval", default=4)
        return ["window" if (rotary[i] if rotary is not None else (i + 1) % every_nth) else "full" for i in every]
    return None


def _indices(keys: ConfigKeys, value: Any, name: str) -> set[int]:
    if not isinstance(value, list) or not all(isinstance(each, int) for each in value):
        raise keys.error(name, value, "a list of layers' numbers")
    return set(value)


def _by_period(keys: ConfigKeys, num_layers: int) -> list[Kind] | None:
    """Kinds from the distance between full-attention layers among layers with a state."""
    if keys.value("attn_layer_period") is not None:  # Jamba, Zamba
        period, offset = keys.count("attn_layer_period"), keys.count("attn_layer_offset", default=0, least=0)
        return ["full" if i % period == offset else "state" for i in range(num_layers)]
    is_linear = any(keys.value(name) for name in ("linear_num_value_heads", "linear_key_head_dim", "linear_num_heads"))
    interval = keys.value("full_attention_interval") or (4 if is_linear else None)
    if interval is None:
        return None
    interval = keys.count("full_attention_interval", default=4)
    return ["state" if (i + 1) % interval else "full" for i in range(num_layers)]


def _windowed(keys: ConfigKeys, num_layers: int) -> list[Kind] | None:
    """Kinds from the pattern of windowed layers. Without a pattern, the family's arrangement; if unknown, all layers
    have the window."""
    if window_tokens(keys) is None:
        return None
    pattern = keys.value(*_PATTERNS)
    if isinstance(pattern, str) and pattern:  # EXAONE: "LLLG"
        letters = [pattern[i % len(pattern)].upper() for i in range(num_layers)]
        last_full = keys.family.startswith("exaone")
        return [
            "window" if letter == "L" and not (last_full and i == num_layers - 1) else "full"
            for i, letter in enumerate(letters)
        ]
    every = pattern if isinstance(pattern, int) and pattern > 0 else _PATTERN_OF.get(keys.family, 0)
    if every == 1:
        return ["window"] * num_layers
    if every > 1:
        return ["window" if (i + 1) % every else "full" for i in range(num_layers)]
    return _windowed_by_family(keys, num_layers)


def _windowed_by_family(keys: ConfigKeys, num_layers: int) -> list[Kind]:
    """The family's arrangement without a pattern. Families disagree on the meaning of `max_window_layers`."""
    every, family = range(num_layers), keys.family
    first = 0
    if family.startswith(("qwen", "dots1", "deepseek_ocr2")) and keys.value("max_window_layers") is not None:
        first = keys.count("max_window_layers", least=0)
    # every second layer of the first layers has a window; in other families none of them has one
    if family == "qwen2_moe":
        return ["window" if i < first and i % 2 == 0 else "full" for i in every]
    # layers without rotary embedding have the window; in other families they have full attention
    if family == "smollm3":
        rotary = keys.per_layer("no_rope_layers", num_layers)
        interval = keys.count("no_rope_layer_interval", default=4)
        return ["full" if (rotary[i] if rotary is not None else (i + 1) % interval) else "window" for i in every]
    if family in _FULL_FIRST:
        return ["window" if i % 4 else "full" for i in every]
    if family in _FULL_UNLESS_LISTED:
        return ["full"] * num_layers
    return ["window" if i >= first or family == "qwen3_moe" else "full" for i in every]


_PATTERN_OF = {
    "gemma2": 2, "gemma3": 6, "gemma3_text": 6, "gpt_oss": 2, "cohere2": 4, "cohere2_moe": 4, "olmo3": 4,
    "gemma3n": 5, "gemma3n_text": 5, "gemma4": 6, "gemma4_text": 6, "gemma4_unified_text": 6, "exaone4": 4,
    "exaone_moe": 4, "afmoe": 4, "vaultgemma": 2,
}  # fmt: skip
"""Families with a window and no list of layers, in which every n-th layer has full attention."""
_FULL_FIRST = frozenset({"cwm", "granite_swa", "granitemoe_swa"})
"""Families in which the first of each four layers has full attention."""
_FULL_UNLESS_LISTED = frozenset({"laguna", "mellum", "cohere_compass_text"})
"""Families in which layers have a window only if a list of layers says so."""


def window_tokens(keys: ConfigKeys) -> int | None:
    """The window of windowed layers; None if the model has none. Raises HeadwayError for several windows."""
    if keys.value("use_sliding_window") is False:
        keys.read |= {"sliding_window", "max_window_layers"}
        return None
    names = ("sliding_window", "sliding_window_size", "attention_chunk_size", "attention_window_size", "window_size")
    value = keys.value(*names)
    if isinstance(value, list):
        widths = {each for each in value if isinstance(each, int) and each > 0}
        if len(widths) > 1:
            raise keys.error("sliding_window", value, "one window for all layers that have one")
        return widths.pop() if widths else None
    if value is None or (isinstance(value, int) and value <= 0):
        return None
    return keys.count(*names)


def mlps_of(keys: ConfigKeys, num_layers: int, kinds: list[Kind]) -> list[Mlp]:
    """The feed-forward of each layer of a model with experts."""
    keys.read |= {"moe_layer_freq", "first_k_dense_replace", "decoder_sparse_step", "mlp_only_layers"}
    names = names_of(keys, num_layers)
    if names is not None and "none" in kinds:  # Nemotron-H: a layer is either a mixer or a feed-forward
        experts = {"moe", "e", "E"}
        return [
            "none" if kind != "none" else "experts" if name in experts else "dense"
            for kind, name in zip(kinds, names, strict=True)
        ]
    for key in ("mlp_layer_types", "mlp_types", "ffn_types"):
        types = keys.per_layer(key, num_layers)
        if types is not None:
            return ["experts" if str(each) in ("sparse", "moe", "experts") else "dense" for each in types]
    every = range(num_layers)
    freq = keys.value("moe_layer_freq")
    if isinstance(freq, list):
        flags = keys.per_layer("moe_layer_freq", num_layers) or []
        return ["experts" if each else "dense" for each in flags]
    if keys.given("moe_layers"):
        sparse = _indices(keys, keys["moe_layers"], "moe_layers")
        return ["experts" if i in sparse else "dense" for i in every]
    if keys.given("moe_layers_enum"):  # Step-3: "4,5,6"
        listed = {int(each) for each in str(keys["moe_layers_enum"]).split(",") if each.strip()}
        return ["experts" if i in listed else "dense" for i in every]
    if keys.value("expert_layer_period") is not None:
        period, offset = keys.count("expert_layer_period"), keys.count("expert_layer_offset", default=1, least=0)
        return ["experts" if i % period == offset else "dense" for i in every]
    if keys.value("moe_layer_start_index") is not None:  # ERNIE 4.5
        start, interval = keys.value("moe_layer_start_index"), keys.count("moe_layer_interval", default=1)
        end = keys.value("moe_layer_end_index", default=-1)
        start = min(start) if isinstance(start, list) else start
        end = max(end) if isinstance(end, list) else end
        end = num_layers - 1 if not isinstance(end, int) or end < 0 else end
        if not isinstance(start, int):
            raise keys.error("moe_layer_start_index", start, "a layer's number")
        return ["experts" if start <= i <= end and (i + 1) % interval == 0 else "dense" for i in every]
    dense = _indices(keys, keys.value("mlp_only_layers", default=[]), "mlp_only_layers")
    leading = keys.count("first_k_dense_replace", "num_dense_layers", "dense_layers", default=0, least=0)
    if freq is not None:
        step = keys.count("moe_layer_freq")
        return ["experts" if i >= leading and i % step == 0 and i not in dense else "dense" for i in every]
    step = keys.count("interleave_moe_layer_step", "decoder_sparse_step", default=1, least=0)
    return ["experts" if i >= leading and step and (i + 1) % step == 0 and i not in dense else "dense" for i in every]
