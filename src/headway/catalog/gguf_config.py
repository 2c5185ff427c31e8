"""Translates the header of a GGUF file into the keys of a Hugging Face config.json.

Feed-forward widths, layers with experts and the vocabulary come from the tensors, all else from the metadata. The key
`_gguf` has the number of weights and the mean bits of each part, which `hf` compares with the layers that it reads.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from headway.catalog.gguf_header import GgufHeader, Tensor, read_header
from headway.core.errors import HeadwayError

FAMILIES = {
    "llama": "llama", "llama4": "llama4_text", "mistral3": "mistral", "qwen": "qwen", "qwen2": "qwen2",
    "qwen2vl": "qwen2", "qwen2moe": "qwen2_moe", "qwen3": "qwen3", "qwen3vl": "qwen3", "qwen3moe": "qwen3_moe",
    "qwen3vlmoe": "qwen3_moe", "qwen3next": "qwen3_next", "qwen35": "qwen3_5_text", "qwen35moe": "qwen3_5_moe_text",
    "gemma": "gemma", "gemma2": "gemma2", "gemma3": "gemma3_text", "gemma3n": "gemma3n_text", "phi2": "phi",
    "phi3": "phi3", "phimoe": "phimoe", "deepseek": "deepseek_v2", "deepseek2": "deepseek_v3", "dots1": "dots1",
    "gpt-oss": "gpt_oss", "glm4": "glm4", "glm4moe": "glm4_moe", "chatglm": "chatglm", "command-r": "cohere",
    "cohere2": "cohere2", "olmo": "olmo", "olmo2": "olmo2", "olmoe": "olmoe", "exaone": "exaone", "exaone4": "exaone4",
    "granite": "granite", "granitemoe": "granitemoe", "granitehybrid": "granitemoehybrid", "ernie4_5": "ernie4_5",
    "ernie4_5-moe": "ernie4_5_moe", "hunyuan-dense": "hunyuan_v1_dense", "hunyuan-moe": "hunyuan_v1_moe",
    "smollm3": "smollm3", "seed_oss": "seed_oss", "minimax-m2": "minimax_m2", "bailingmoe": "bailing_moe",
    "bailingmoe2": "bailing_moe_v2", "arcee": "arcee", "apertus": "apertus", "internlm2": "internlm2",
    "stablelm": "stablelm", "starcoder": "gpt_bigcode", "starcoder2": "starcoder2", "gpt2": "gpt2",
    "gptneox": "gpt_neox", "falcon": "falcon", "bloom": "bloom", "mpt": "mpt", "baichuan": "baichuan",
    "minicpm": "minicpm", "nemotron": "nemotron", "orion": "orion", "xverse": "xverse", "codeshell": "codeshell",
    "dbrx": "dbrx", "grok": "grok-1", "lfm2": "lfm2", "lfm2moe": "lfm2_moe", "jamba": "jamba", "mamba": "mamba",
    "mamba2": "mamba2", "falcon-h1": "falcon_h1",
}  # fmt: skip
"""Families of `transformers` by llama.cpp's architecture."""
_WINDOWED = {"gemma2", "gemma3", "gemma3n", "cohere2", "exaone4", "gpt-oss"}
"""Architectures whose windows llama.cpp applies without a list of layers. It computes full attention in others."""
_KEYS = {
    "context_length": "max_position_embeddings",
    "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.shared_kv_layers": "num_kv_shared_layers",
    "full_attention_interval": "full_attention_interval",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
    "altup.num_inputs": "altup_num_inputs",
    "moe_latent_size": "moe_latent_size",
    "shortconv.l_cache": "conv_L_cache",
}
"""Keys with the same meaning, without the architecture before them."""
_KNOWN = {
    "block_count", "embedding_length", "vocab_size", "feed_forward_length", "leading_dense_block_count",
    "expert_feed_forward_length", "expert_shared_feed_forward_length", "expert_shared_count", "expert_count",
    "expert_used_count", "interleave_moe_layer_step", "moe_every_n_layers", "nextn_predict_layers",
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "attention.key_length_mla", "attention.value_length_mla", "attention.key_length_swa",
    "attention.value_length_swa", "attention.sliding_window", "attention.sliding_window_pattern",
    "attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon", "tensor_data_layout",
}  # fmt: skip
"""Keys that are read in another way, or whose meaning the tensors have."""
_PARTS = (
    ("embeddings", re.compile(r"(token_embd|output|position_embd|per_layer_token_embd)\.weight")),
    ("experts", re.compile(r"blk\.\d+\.ffn_\w+_exps\.weight")),
    ("mlp", re.compile(r"blk\.\d+\.ffn_\w+\.weight")),
    ("mixers", re.compile(r".*", re.DOTALL)),
)
"""Parts of a model by the first pattern that a tensor's name matches."""
_LAYER = re.compile(r"blk\.(\d+)\.")


def config_of_gguf(file: Path) -> dict[str, Any]:
    """The keys of a config.json for a GGUF file. Raises HeadwayError if it is no model of a known architecture."""
    return _Translation(file, read_header(file)).config()


class _Translation:
    """One header, with its keys as `key` without the architecture."""

    def __init__(self, file: Path, header: GgufHeader) -> None:
        self._file = file
        arch = str(header.metadata.get("general.architecture", ""))
        if arch not in FAMILIES or header.metadata.get("general.type", "model") != "model":
            kind = header.metadata.get("general.type", "model")
            raise HeadwayError(
                f"{file}: architecture {arch!r} ({kind}) is not understood; expected a model of {', '.join(FAMILIES)}"
            )
        self._arch = arch
        self._keys = {
            key.removeprefix(f"{arch}."): each for key, each in header.metadata.items() if key.startswith(f"{arch}.")
        }
        blocks = self._count("block_count")
        self._num_layers = blocks - self._count("nextn_predict_layers", 0)
        shared = self._count("attention.shared_kv_layers", 0)
        self._tensors = [
            each
            for each in header.tensors
            if len(each.shape) > 1 and not self._is_unused(each, self._num_layers, self._num_layers - shared)
        ]
        self._by_name = {each.name: each for each in self._tensors}

    @staticmethod
    def _is_unused(tensor: Tensor, num_layers: int, num_own: int) -> bool:
        """Whether a tensor drafts tokens, or would project keys and values that an earlier layer has."""
        layer = _LAYER.match(tensor.name)
        if layer is None:
            return False
        return int(layer[1]) >= num_layers or (
            int(layer[1]) >= num_own and ".attn_k." in tensor.name.replace("attn_v", "attn_k")
        )

    def config(self) -> dict[str, Any]:
        """The keys, with those of the header that have no known meaning under their own names."""
        if "token_embd.weight" not in self._by_name:
            raise HeadwayError(f"{self._file}: has no tensor token_embd.weight; expected all tensors of a model")
        if not 0 < self._num_layers <= len(self._tensors):
            raise HeadwayError(
                f"{self._file}: has {len(self._tensors)} tensors for {self._num_layers} layers; is the file damaged?"
            )
        hidden, vocabulary = self._by_name["token_embd.weight"].shape[:2]
        read = {*_KEYS, *_KNOWN}
        found = {
            "model_type": FAMILIES[self._arch],
            "_name_or_path": self._file.name.removesuffix(".gguf"),
            "num_hidden_layers": self._num_layers,
            "hidden_size": hidden,
            "vocab_size": vocabulary,
            "tie_word_embeddings": "output.weight" not in self._by_name,
            **{name: self._keys[key] for key, name in _KEYS.items() if key in self._keys},
            **self._attention(hidden),
            **self._windows(),
            **self._feed_forward(hidden),
            **self._states(hidden, read),
            "_gguf": self._facts(),
        }
        return found | {key: value for key, value in self._keys.items() if key not in read}

    def _count(self, key: str, default: int | None = None) -> int:
        value = self._keys.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            named = "is missing" if value is None else f"is {value!r}"
            raise HeadwayError(f"{self._file}: {self._arch}.{key} {named}; expected a whole number")
        return value

    def _per_layer(self, key: str) -> list[int]:
        """A number for each layer, from a number or a list."""
        value = self._keys.get(key)
        if not isinstance(value, list):
            return [self._count(key)] * self._num_layers
        if len(value) < self._num_layers:
            raise HeadwayError(
                f"{self._file}: {self._arch}.{key} has {len(value)} values for {self._num_layers} layers"
            )
        return [int(each) for each in value[: self._num_layers]]

    # Attention.

    def _attention(self, hidden: int) -> dict[str, Any]:
        if self._arch in ("mamba", "mamba2"):
            return {"num_attention_heads": 0}
        heads = self._per_layer("attention.head_count")
        most = max(heads, default=0)
        if not most:
            raise HeadwayError(f"{self._file}: {self._arch}.attention.head_count is 0; expected heads")
        if "attention.kv_lora_rank" in self._keys:
            return {"num_attention_heads": most, **self._latent()}
        kv_heads = self._kv_heads(heads)
        width = self._count("attention.key_length", hidden // most)
        values = self._count("attention.value_length", width)
        windowed = self._count("attention.key_length_swa", width), self._count("attention.value_length_swa", values)
        found: dict[str, Any] = {"num_attention_heads": most, "head_dim": width}
        if len({*heads, *kv_heads}) > 2 or 0 in (*heads, *kv_heads) or len(set(heads)) > 1:
            own = enumerate(zip(heads, kv_heads, strict=True))
            found["per_layer_config"] = {
                str(i): {"num_attention_heads": num, "num_key_value_heads": kv} for i, (num, kv) in own if num and kv
            }
        else:
            found["num_key_value_heads"] = kv_heads[0]
        others = (
            ("v_head_dim", values, width),
            ("swa_head_dim", windowed[0], width),
            ("swa_v_head_dim", windowed[1], values),
        )
        return found | {key: value for key, value, usual in others if value != usual}

    def _kv_heads(self, heads: Sequence[int]) -> list[int]:
        if "attention.head_count_kv" in self._keys:
            return self._per_layer("attention.head_count_kv")
        return list(heads)

    def _latent(self) -> dict[str, Any]:
        """Latent attention: files of before and after its cache was that of one head."""
        rotary = self._count("rope.dimension_count")
        key = self._count("attention.key_length_mla", self._count("attention.key_length"))
        value = self._count("attention.value_length_mla", self._count("attention.value_length"))
        return {"qk_rope_head_dim": rotary, "qk_nope_head_dim": key - rotary, "v_head_dim": value}

    def _windows(self) -> dict[str, Any]:
        window, pattern = self._keys.get("attention.sliding_window"), self._keys.get("attention.sliding_window_pattern")
        if isinstance(pattern, list):
            kinds = ["sliding_attention" if each else "full_attention" for each in pattern[: self._num_layers]]
            return {"sliding_window": window, "layer_types": kinds}
        if self._arch == "llama4":  # llama.cpp has the length of the chunks in its code
            return {"attention_chunk_size": 8192}
        if window and (self._arch in _WINDOWED or pattern):
            return {"sliding_window": window} | ({"sliding_window_pattern": pattern} if pattern else {})
        return {}

    # Feed-forward and states.

    def _feed_forward(self, hidden: int) -> dict[str, Any]:
        """Widths and matrices from the tensors."""
        layers = range(self._num_layers)
        down = [self._by_name.get(f"blk.{i}.ffn_down.weight") for i in layers]
        routed = [self._by_name.get(f"blk.{i}.ffn_down_exps.weight") for i in layers]
        shared = [self._by_name.get(f"blk.{i}.ffn_down_shexp.weight") for i in layers]
        width = [0 if each is None else each.shape[0] for each in down]
        weights = sum(
            each.num_weights
            for each in self._tensors
            if re.fullmatch(r"blk\.\d+\.ffn_(gate|up|down|gate_up)(_exps|_shexp)?\.weight", each.name)
        )
        outputs = sum(each.num_weights for each in (*down, *routed, *shared) if each is not None)
        found: dict[str, Any] = {"hidden_act": "silu" if weights > 2.5 * outputs else "relu"}
        dense = next((each for each in width if each), 0)
        if dense:
            found["intermediate_size"] = dense if set(width) <= {0, dense} else width
        expert = next((each for each in routed if each is not None), None)
        if expert is None:
            return found
        beside = next((each.shape[0] for each in shared if each is not None), 0)
        return found | {
            "num_experts": self._count("expert_count"),
            "num_experts_per_tok": self._count("expert_used_count"),
            "moe_intermediate_size": expert.shape[0],
            "shared_expert_intermediate_size": beside,
            "mlp_layer_types": ["dense" if each is None else "sparse" for each in routed],
        }

    def _states(self, hidden: int, read: set[str]) -> dict[str, Any]:
        """Layers with a state: their kinds, and the shape of the state."""
        found: dict[str, Any] = {}
        if (bypass := self._by_name.get("blk.0.laurel_l.weight")) is not None:
            found["laurel_rank"] = bypass.shape[1]
        kv_heads = self._keys.get("attention.head_count_kv")
        if isinstance(kv_heads, list) and 0 in kv_heads:
            kind = "conv" if "shortconv.l_cache" in self._keys else "mamba"
            if kind == "mamba" and "ssm.state_size" not in self._keys:
                raise HeadwayError(f"{self._file}: {self._arch}.attention.head_count_kv is 0 in some layers")
            found["layer_types"] = ["full_attention" if each else kind for each in kv_heads[: self._num_layers]]
        if "ssm.state_size" not in self._keys:
            return found
        names = ("ssm.state_size", "ssm.conv_kernel", "ssm.inner_size", "ssm.time_step_rank")
        read |= {*names, "ssm.group_count"}
        state, kernel, inner, rank = (self._count(name) for name in names)
        groups = self._count("ssm.group_count", 1)
        if self._arch in ("qwen3next", "qwen35", "qwen35moe"):
            return found | {
                "linear_conv_kernel_dim": kernel,
                "linear_num_key_heads": groups,
                "linear_key_head_dim": state,
                "linear_num_value_heads": rank,
                "linear_value_head_dim": inner // max(rank, 1),
            }
        found |= {"mamba_d_state": state, "mamba_d_conv": kernel}
        if self._arch in ("mamba", "jamba"):
            own = {"intermediate_size": inner} if self._arch == "mamba" else {}
            return found | own | {"mamba_dt_rank": rank, "mamba_expand": inner / hidden}
        return found | {"mamba_d_ssm": inner, "mamba_n_heads": rank, "mamba_n_groups": groups}

    def _facts(self) -> dict[str, Any]:
        """The number of weights and the mean bits of each part, and the type if all its weights have one."""
        found: dict[str, Any] = {}
        for name, tensors in _by_part(self._tensors):
            num = sum(each.num_weights for each in tensors)
            kinds = {each.kind for each in tensors}
            bits = 8 * sum(each.num_bytes for each in tensors) / num
            found[name] = {"weights": num, "bits": bits, "kind": kinds.pop() if len(kinds) == 1 else ""}
        return found


def _by_part(tensors: Iterable[Tensor]) -> list[tuple[str, list[Tensor]]]:
    found: dict[str, list[Tensor]] = {}
    for each in tensors:
        part = next(name for name, pattern in _PARTS if pattern.fullmatch(each.name))
        found.setdefault(part, []).append(each)
    return list(found.items())
