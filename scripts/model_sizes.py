# ruff: noqa: T201 (a script prints)
"""Record the sizes of decoder families as `transformers` builds them, for the test of the config reader.

Each family is built on the meta device, which computes nothing, from its default config or with the changes below. Run
in an environment of its own, which Headway does not need otherwise:

    python -m venv sizes && sizes/bin/pip install torch==2.13.0 transformers==5.17.0
    sizes/bin/python scripts/model_sizes.py tests/catalog/model_sizes.json

Families in the file are left out, so that a second run goes on. With `--families PATH` the script writes the names and
defaults of keys instead: src/headway/catalog/data/families.json.
"""

from __future__ import annotations

import json
import logging
import re
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

SECONDS_OF_A_FAMILY = 240
SHORT, LONG = 4, 8
"""Tokens of the two runs whose caches are compared."""
ENCODERS = re.compile(
    r"bert|bart|electra|ernie$|marian|whisper|pegasus|blenderbot|trocr|plbart|mvp|xlm|data2vec|roformer|big_?bird|xmod"
    r"|prophetnet|reformer|xlnet|git$|megatron|musicgen|moshi|speech|ctrl|cpmant|openai|emu3|got_ocr|fuyu|assistant"
    r"|mllama|phi4_multimodal|gpt-sw3|gpt_neox_japanese"
)
WRAPPERS = re.compile(r"^(gemma3|gemma3n|gemma4|gemma4_unified|llama4|qwen3_5|qwen3_5_moe|qwen4_exp)$")
CHANGES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6, "n_routed_experts": 64, "first_k_dense_replace": 1},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1},
    "glm4_moe": {"head_dim": 128, "num_attention_heads": 96, "num_key_value_heads": 8},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 64, "moe_topk": 8, "num_hidden_layers": 32},
    "jamba": {"num_experts": 16},
    "lfm2_moe": {"layer_types": (["conv", "conv", "full_attention", "conv"] * 8)},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8, "head_dim": 128},
    "granitemoehybrid": {"layer_types": (["mamba"] * 5 + ["attention"]) * 5 + ["mamba"] * 2},
    "bamba": {"attn_layer_indices": [9, 18, 27]},
}
"""Keys of configs whose defaults build no model, or none of the kind that the family is known for."""
IRRELEVANT = re.compile(
    r"norm|drop|_id$|_ids$|label|^_|return_|output_|init|rope|chunk_size|problem_type|use_cache|architectures|transformers"
    r"|dtype|loss|aux|theta|(?<!per_)token|task|scal|multiplier|softcap|jitter|limit|alpha|beta|kernels|generation|prefix"
)
SIZES = (
    "hidden_size num_hidden_layers num_attention_heads vocab_size intermediate_size n_embd n_layer n_head d_model"
    " n_layers n_heads moe_intermediate_size num_layers num_heads attention_heads layers embed_dim ffn_dim emb_dim"
).split()
"""Keys that a config must have itself: a default would make it another model."""
PUBLISHED_WITHOUT = {
    "gemma3_text": {"num_attention_heads": 8, "vocab_size": 262208},
    "mimo_v2_flash": {"swa_num_key_value_heads": 8},
}
"""Sizes that published configs of a family leave out all the same."""


def families() -> list[str]:
    """The decoders of `transformers` that generate text."""
    names = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
    return [name for name in names if not ENCODERS.search(name) and not WRAPPERS.match(name)]


def sizes(family: str) -> dict[str, Any]:
    """The config of a family, and what a model of it has: parameters, cache bytes a token, bytes of a state."""
    config = CONFIG_MAPPING[family](**CHANGES.get(family, {}))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="eager").eval()
    written = json.loads(model.config.to_json_string(use_diff=False))
    kept = {key: value for key, value in written.items() if value is not None and not IRRELEVANT.search(key)}
    found: dict[str, Any] = {"params": sum(each.numel() for each in model.parameters())}
    found["experts"] = sum(each.numel() for name, each in model.named_parameters() if ".experts." in name)
    try:
        short, long = caches(model, SHORT), caches(model, LONG)
        pairs = list(zip(short, long, strict=True))
        grown = [(after - before) / (LONG - SHORT) for (before, _), (after, _) in pairs]
        found["kv_bytes"] = sum(grown)
        found["window_kv_bytes"] = sum(each for each, (_, is_windowed) in zip(grown, long, strict=True) if is_windowed)
        found["state_bytes"] = sum(before - SHORT * each for (before, _), each in zip(short, grown, strict=True))
    except TimeoutError:
        raise
    except Exception as error:
        found["cache_error"] = f"{type(error).__name__}: {str(error)[:80]}"
    return {"family": family, **found, "config": {"model_type": family, **kept}}


def caches(model: torch.nn.Module, num_tokens: int) -> list[tuple[int, bool]]:
    """(bytes, whether it has a window) of each layer's cache after so many tokens."""
    with torch.no_grad(), torch.device("meta"):
        tokens = torch.zeros((1, num_tokens), dtype=torch.long)
        output = model(input_ids=tokens, use_cache=True)
    cache = getattr(output, "past_key_values", None)
    cache = getattr(output, "cache_params", None) if cache is None else cache
    return [
        (sum(each.numel() * each.element_size() for each in tensors(layer)), bool(getattr(layer, "is_sliding", False)))
        for layer in cache.layers
    ]


def tensors(value: object) -> list[torch.Tensor]:
    """The tensors in an object, each once."""
    found: dict[int, torch.Tensor] = {}

    def visit(each: object, depth: int) -> None:
        if isinstance(each, torch.Tensor):
            if each.dim() > 1:
                found[id(each)] = each
        elif isinstance(each, list | tuple):
            for part in each:
                visit(part, depth)
        elif isinstance(each, dict):
            visit(list(each.values()), depth)
        elif hasattr(each, "__dict__") and depth < 4 and not isinstance(each, type):
            visit([part for name, part in vars(each).items() if name != "config"], depth + 1)

    visit(value, 0)
    return list(found.values())


def defaults(family: str, matters: re.Pattern[str]) -> dict[str, Any]:
    """A family's own names of common keys, and the values of keys that configs may leave out."""
    own = CONFIG_MAPPING[family]
    config = own()
    values: dict[str, Any] = {}
    for key in json.loads(config.to_json_string(use_diff=False)):
        value = getattr(own, key, None)
        if isinstance(value, bool | int | float | str) and matters.search(key) and key not in SIZES:
            values[key] = value
    text = getattr(getattr(config, "text_config", None), "model_type", None)
    values |= PUBLISHED_WITHOUT.get(family, {})
    found = {"aliases": dict(getattr(own, "attribute_map", None) or {}), "defaults": values, "text": text}
    return {name: value for name, value in found.items() if value}


def write_families(path: Path) -> None:
    matters = re.compile(
        r"expert|moe|layer(?!_?norm)|(^|_)kv|key_value|window|mamba|ssm|intermediate|ffn|head_dim|latent|lora_rank|swa_|sliding"
        r"|index|shared|state_size|d_state|conv|block_type|tie_word|multi_query|new_decoder|k_eq_v|expand|n_groups"
        r"|max_position|hidden_act|activation|output_gate|lru|attention_chunk|attn_|positions|seq_len|block_|expansion"
        r"|linear_|per_layer|sparse_step|n_mamba|double_wide"
    )
    names = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) | set(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES))
    lines = []
    for name in names:
        try:
            lines.append(f" {json.dumps(name)}: {json.dumps(defaults(name, matters))}")
        except Exception as error:
            print(f"{name}: {error}", file=sys.stderr)
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def write_sizes(path: Path, only: list[str]) -> None:
    rows = json.loads(path.read_text()) if path.exists() else []
    known = {row["family"] for row in rows}
    for family in only or families():
        if family in known:
            continue
        signal.alarm(SECONDS_OF_A_FAMILY)
        try:
            rows.append(sizes(family))
        except Exception as error:
            rows.append({"family": family, "error": f"{type(error).__name__}: {str(error)[:120]}"})
        signal.alarm(0)
        print(family, {key: value for key, value in rows[-1].items() if key != "config"}, flush=True)
        rows.sort(key=lambda row: str(row["family"]))
        path.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


def _late(*_: object) -> None:
    raise TimeoutError("took too long")


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGALRM, _late)
    if sys.argv[1] == "--families":
        write_families(Path(sys.argv[2]))
    else:
        write_sizes(Path(sys.argv[1]), sys.argv[2:])
