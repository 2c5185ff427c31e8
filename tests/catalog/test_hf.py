"""A Hugging Face config.json becomes the model that the catalog has, or an error that names file and key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import asdict, replace

from headway import catalog
from headway.catalog.hf import whole_config
from headway.core.errors import HeadwayError
from headway.core.fleet import Parallel
from headway.core.model import Model
from headway.perf.memory import kv_bytes_per_token, plan
from headway.perf.params import (
    num_dense_layers,
    num_moe_layers,
    num_params,
    state_bytes,
    weights_bytes,
)

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "rope_theta": 500000.0,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": LLAMA,
    "llama-2-7b": {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "vocab_size": 32000, "max_position_embeddings": 4096, "torch_dtype":
        "bfloat16",
    },
    "qwen2.5-32b": {
        "model_type": "qwen2", "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64,
        "num_attention_heads": 40, "num_key_value_heads": 8, "vocab_size": 152064,
        "max_position_embeddings": 131072, "sliding_window": 131072, "use_sliding_window": False,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
        "max_position_embeddings": 40960, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "decoder_sparse_step": 1, "sliding_window": None,
    },
    "mistral-nemo-12b": {
        "model_type": "mistral", "hidden_size": 5120, "intermediate_size": 14336, "num_hidden_layers": 40,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 131072,
        "max_position_embeddings": 131072, "sliding_window": None,
    },
    "mixtral-8x7b": {
        "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "num_local_experts": 8,
        "max_position_embeddings": 32768, "num_experts_per_tok": 2, "sliding_window": None,
    },
    "bloom-176b": {
        "model_type": "bloom", "n_embed": 14336, "n_layer": 70, "num_attention_heads": 112, "vocab_size":
        250880,
        "seq_length": 2048,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
        "num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 129280,
        "max_position_embeddings": 163840, "n_routed_experts": 256, "n_shared_experts": 1,
        "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "first_k_dense_replace": 3,
        "moe_layer_freq": 1,
        "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "v_head_dim": 128, "quantization_config": {"quant_method": "fp8"},
    },
    "llama-4-scout": {
        "model_type": "llama4", "torch_dtype": "bfloat16",
        "text_config": {
            "model_type": "llama4_text", "hidden_size": 5120, "intermediate_size": 8192,
            "intermediate_size_mlp": 16384, "num_hidden_layers": 48, "num_attention_heads": 40,
            "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 202048, "num_local_experts": 16,
            "num_experts_per_tok": 1, "interleave_moe_layer_step": 1, "attention_chunk_size": 8192,
            "max_position_embeddings": 10485760,
        },
        "vision_config": {"hidden_size": 1408},
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088,
        "max_position_embeddings": 131072, "num_local_experts": 32, "experts_per_token": 4,
        "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 12,
        "quantization_config": {"quant_method": "mxfp4"},
    },
}  # fmt: skip


def num_windowed_layers(model: Model) -> int:
    return sum(each.num for each in model.all_layers if each.is_windowed)


def written(folder: Path, config: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("name", CONFIGS)
def test_config_gives_the_catalogs_model(name: str, tmp_path: Path) -> None:
    model = catalog.model_from_config(written(tmp_path, CONFIGS[name]), name)
    own, expected = asdict(model), asdict(catalog.model(name))
    for key in ("source", "aliases", "hf_id", "sampling"):
        del own[key], expected[key]
    assert own == expected


def test_name_defaults_to_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    assert catalog.model_from_config(written(folder, LLAMA)).name == "my-model"
    named = written(folder, LLAMA | {"_name_or_path": "me/mine"})
    assert catalog.model_from_config(named).name == "me/mine"


@pytest.mark.parametrize(
    "key", ["hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"]
)
def test_missing_key_is_named_with_its_file(key: str, tmp_path: Path) -> None:
    path = written(tmp_path, {k: v for k, v in LLAMA.items() if k != key})
    with pytest.raises(HeadwayError, match=f"config.json: key .*'{key}' is missing"):
        catalog.model_from_config(path)


@pytest.mark.parametrize("value", [-1, 0, 1.5, "4096", True, [1]])
def test_non_integer_counts_are_errors(value: object, tmp_path: Path) -> None:
    with pytest.raises(HeadwayError, match=r"hidden_size is .*; expected a positive whole number"):
        catalog.model_from_config(written(tmp_path, LLAMA | {"hidden_size": value}))


def test_invalid_configs_are_errors(tmp_path: Path) -> None:
    with pytest.raises(HeadwayError, match="nowhere"):
        catalog.model_from_config(tmp_path / "nowhere.json")
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    with pytest.raises(HeadwayError, match=r"broken.json: not JSON"):
        catalog.model_from_config(broken)
    with pytest.raises(HeadwayError, match="expected an object"):
        catalog.model_from_config(written(tmp_path, [1]))
    with pytest.raises(HeadwayError, match="torch_dtype is 'complex64'"):
        catalog.model_from_config(written(tmp_path, LLAMA | {"torch_dtype": "complex64"}))
    with pytest.raises(HeadwayError, match="quantization_config of method 'bitnet'"):
        catalog.model_from_config(written(tmp_path, LLAMA | {"quantization_config": {"quant_method": "bitnet"}}))
    with pytest.raises(HeadwayError, match="not a multiple of 30 heads"):
        catalog.model_from_config(written(tmp_path, LLAMA | {"num_attention_heads": 30}))


@pytest.mark.parametrize(
    ("quantization", "dtype"),
    [
        ({"quant_method": "awq", "bits": 4}, "w4a16"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32}, "w4a16-g32"),
        ({"quant_method": "gptq", "bits": 8, "group_size": 128}, "w8a16"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True}, "nf4"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "int8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        ({"quant_algo": "FP8"}, "fp8"),
        ({"quant_method": "compressed-tensors",
          "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "int"}, "targets": ["Linear"]}}}, "int8"),
        ({"quant_method": "compressed-tensors",
          "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}}}}, "nvfp4"),
        ({"quant_method": "compressed-tensors",
          "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}}}, "fp8"),
        ({"quant_method": "compressed-tensors",
          "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 128}}}}, "w4a16"),
    ],
)  # fmt: skip
def test_quantised_weights_are_recognised(quantization: object, dtype: str, tmp_path: Path) -> None:
    path = written(tmp_path, LLAMA | {"quantization_config": quantization})
    assert catalog.model_from_config(path).dtype == dtype


GEMMA_3_27B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "text_config": {
        "head_dim": 128,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "model_type": "gemma3_text",
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}
GEMMA_3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    },
}
QWEN_3_NEXT = {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "decoder_sparse_step": 1,
    "full_attention_interval": 4, "head_dim": 256, "hidden_size": 2048, "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_value_head_dim": 128, "max_position_embeddings": 262144, "moe_intermediate_size": 512,
    "num_attention_heads": 16, "num_experts": 512, "num_experts_per_tok": 10, "num_hidden_layers": 48,
    "num_key_value_heads": 2, "shared_expert_intermediate_size": 512, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "vocab_size": 151936,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "window", "full", "heads", "billions"),
    [(GEMMA_3_27B, 1024, 10, (32, 16, 128), 27.0), (GEMMA_3_4B, 1024, 5, (8, 4, 256), 3.9)],
)
def test_gemma_3_has_five_windowed_layers_of_six(
    config: Any, window: int, full: int, heads: tuple[int, int, int], billions: float, tmp_path: Path
) -> None:
    """The published configs leave out the pattern, and the smaller one the heads."""
    model = catalog.model_from_config(written(tmp_path, config))
    assert (model.sliding_window_tokens, model.num_layers - num_windowed_layers(model)) == (window, full)
    assert (model.num_heads, model.num_kv_heads, model.head_dim) == heads and model.tie_embeddings
    assert weights_bytes(model) / 2e9 == pytest.approx(billions, rel=0.03)


def test_layer_types_and_patterns_say_the_same(tmp_path: Path) -> None:
    text = GEMMA_3_27B["text_config"]
    kinds = ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(62)]
    listed = catalog.model_from_config(written(tmp_path, {**text, "layer_types": kinds}))  # type: ignore[dict-item]
    assert listed == catalog.model_from_config(written(tmp_path, {**text, "_sliding_window_pattern": 6}))  # type: ignore[dict-item]


WINDOWS = {  # with use_sliding_window: true, and without the key, as transformers 5.23.0 arranges them
    "qwen2": ("fffwwwww", "ffffffff"),
    "qwen3": ("fffwwwww", "ffffffff"),
    "qwen2_moe": ("wfwfffff", "ffffffff"),
    "qwen3_moe": ("wwwwwwww", "ffffffff"),
    "dots1": ("fffwwwww", "fffwwwww"),
    "smollm3": ("fffwfffw", "ffffffff"),
    "cohere2": ("wwwfwwwf", "wwwfwwwf"),
    "mistral": ("wwwwwwww", "wwwwwwww"),
    "cwm": ("fwwwfwww", "fwwwfwww"),
    "granite_swa": ("fwwwfwww", "fwwwfwww"),
    "laguna": ("ffffffff", "ffffffff"),
}


@pytest.mark.parametrize("family", WINDOWS)
def test_the_same_flags_give_other_layers_a_window_in_each_family(family: str, tmp_path: Path) -> None:
    """Without a list or a pattern of layers; a list that says the same gives the same model."""
    shape = {
        "model_type": family,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 1000,
        "sliding_window": 512,
        "max_window_layers": 3,
    }
    for kinds, flags in zip(WINDOWS[family], ({"use_sliding_window": True}, {}), strict=True):
        model = catalog.model_from_config(written(tmp_path, {**shape, **flags}))
        assert num_windowed_layers(model) == kinds.count("w")
        names = {"w": "sliding_attention", "f": "full_attention"}
        listed = {**shape, "use_sliding_window": True, "layer_types": [names[kind] for kind in kinds]}
        assert replace(model, name="") == replace(catalog.model_from_config(written(tmp_path, listed)), name="")


def test_gemma_3_keeps_windows(tmp_path: Path) -> None:
    """62 layers of full KV were a quarter of what an H100 holds of long sequences."""
    model = catalog.model_from_config(written(tmp_path, GEMMA_3_27B))
    h100, vllm = catalog.gpu("h100"), catalog.engine("vllm-0.15")
    full = plan(model, h100, vllm, Parallel()).kv_capacity_tokens
    long = plan(model, h100, vllm, Parallel(), mean_sequence_tokens=16_384).kv_capacity_tokens
    assert long / full == pytest.approx(62 / (10 + 52 * 1024 / 16_384), rel=0.01)
    assert plan(model, h100, vllm, Parallel(), mean_sequence_tokens=600).kv_capacity_tokens == full


def test_linear_attention_keeps_a_state(tmp_path: Path) -> None:
    """One layer of four has a KV cache, and the others 2 MiB of state for each sequence."""
    model = catalog.model_from_config(written(tmp_path, QWEN_3_NEXT))
    assert [(each.num, each.num_heads > 0) for each in model.layers] == [(36, False), (12, True)]
    assert state_bytes(model) == 36 * (4 * 32 * 128 * 128 + 2 * 4 * (2 * 16 * 128 + 32 * 128))
    assert kv_bytes_per_token(model) == 12 * 2 * 2 * 256 * 2
    assert weights_bytes(model) / 2e9 == pytest.approx(80, rel=0.03)
    h200, vllm = catalog.gpu("h200"), catalog.engine("vllm-0.15")
    for tokens in (1000.0, 100_000.0):
        planned = plan(model, h200, vllm, Parallel(tp=2), mean_sequence_tokens=tokens)
        own = 12 * 2 * 256 * 2 + state_bytes(model) / 2 / tokens
        assert planned.kv_bytes_per_token_gpu == pytest.approx(own)


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (
            {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
            "model_type is 'bert', an encoder, which generates",
        ),
        (
            {"architectures": ["BertModel"], "model_type": "bert"},
            "an encoder, which generates no tokens; expected a dec",
        ),
        ({"architectures": ["XLMRobertaForMaskedLM"], "model_type": ""}, "an encoder"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "an encoder with a decoder"),
        ({"model_type": "rwkv"}, "layers Headway does not model: time mixing without attention"),
        ({"model_type": "blt"}, "layers Headway does not model: bytes in patches"),
    ],
)
def test_what_is_no_decoder_is_refused(config: dict[str, Any], what: str, tmp_path: Path) -> None:
    with pytest.raises(HeadwayError, match=f"config.json: model_type is .*{what}|{what}"):
        catalog.model_from_config(written(tmp_path, {**LLAMA, **config}))


def test_sampling_parameters_come_from_the_file_beside(tmp_path: Path) -> None:
    config = written(tmp_path, CONFIGS["qwen2.5-32b"])
    assert catalog.model_from_config(config).sampling is None
    beside = config.with_name("generation_config.json")
    beside.write_text('{"do_sample": true, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "eos_token_id": 1}')
    sampling = catalog.model_from_config(config).sampling
    assert sampling is not None
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.repetition_penalty) == (0.7, 0.8, 20, 1.0)
    beside.write_text('{"top_p": 2}')
    with pytest.raises(HeadwayError, match=r"generation_config\.json: top_p: 2"):
        catalog.model_from_config(config)


MIXTURE = {
    "model_type": "of_my_own",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 512,
}


@pytest.mark.parametrize("experts", ["n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts"])
@pytest.mark.parametrize("chosen", ["num_experts_per_tok", "experts_per_token", "moe_k", "moe_topk"])
def test_every_name_of_experts_means_the_same(experts: str, chosen: str, tmp_path: Path) -> None:
    plain = catalog.model_from_config(written(tmp_path, MIXTURE), "m")
    named = {k: v for k, v in MIXTURE.items() if k not in ("num_experts", "num_experts_per_tok")}
    assert catalog.model_from_config(written(tmp_path, {**named, experts: 32, chosen: 4}), "m") == plain


@pytest.mark.parametrize(
    "keys",
    [
        {"first_k_dense_replace": 2},
        {"moe_layer_freq": [0, 0, 1, 1, 1, 1, 1, 1]},
        {"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 6},
        {"mlp_only_layers": [0, 1]},
        {"num_dense_layers": 2},
        {"moe_layer_start_index": 2, "moe_layer_interval": 1, "moe_layer_end_index": -1},
        {"moe_layers": [2, 3, 4, 5, 6, 7]},
        {"moe_layers_enum": "2,3,4,5,6,7"},
    ],
    ids=str,
)
def test_every_way_to_name_dense_layers_means_the_same(keys: dict[str, Any], tmp_path: Path) -> None:
    model = catalog.model_from_config(written(tmp_path, {**MIXTURE, **keys}))
    assert num_moe_layers(model) == 6 and num_dense_layers(model) == 2
    assert not model.layers and model.moe is not None and model.moe.num_dense_layers == 2


def test_a_mixture_needs_no_dense_width(tmp_path: Path) -> None:
    without = {k: v for k, v in MIXTURE.items() if k != "intermediate_size"}
    model = catalog.model_from_config(written(tmp_path, without))
    assert num_params(model) == num_params(catalog.model_from_config(written(tmp_path, MIXTURE)))
    with pytest.raises(HeadwayError, match=r"intermediate_size.* is missing"):
        catalog.model_from_config(written(tmp_path, {**without, "first_k_dense_replace": 1}))


def test_no_shared_expert_may_be_written_as_0(tmp_path: Path) -> None:
    none = written(tmp_path, MIXTURE | {"shared_expert_intermediate_size": 0, "n_shared_experts": 0})
    assert num_params(catalog.model_from_config(none)) == num_params(
        catalog.model_from_config(written(tmp_path, MIXTURE))
    )


@pytest.mark.parametrize(
    "key",
    [
        "num_meta_experts",
        "kv_compression",
        "layer_repeat",
        "window_stride",
        "quantized_dim",
        "n_ssm_heads",
        "expert_width_ratio",
    ],
)
def test_a_key_that_may_matter_is_an_error_that_names_it(key: str, tmp_path: Path) -> None:
    config = written(tmp_path, LLAMA | {key: 3})
    with pytest.raises(HeadwayError, match=rf"config.json: not understood: {key} \(3\).*--assume"):
        catalog.model_from_config(config)
    model = catalog.model_from_config(config, assume=True)
    assert model.unmodelled == (f"{key} of the config passed over",)
    for value in (None, False, 0, []):
        assert not catalog.model_from_config(written(tmp_path, LLAMA | {key: value})).unmodelled


def test_kinds_of_layers_must_be_known(tmp_path: Path) -> None:
    kinds = ["full_attention", "telepathy"] * 16
    with pytest.raises(HeadwayError, match="layer_types is 'telepathy'; expected a kind of layer"):
        catalog.model_from_config(written(tmp_path, LLAMA | {"layer_types": kinds}))
    with pytest.raises(HeadwayError, match="a kind for each of 32 layers"):
        catalog.model_from_config(written(tmp_path, LLAMA | {"layer_types": ["full_attention"] * 3}))


def test_an_unknown_activation_does_not_say_how_many_matrices(tmp_path: Path) -> None:
    own = LLAMA | {"model_type": "of_my_own"}
    gated, two = (
        num_params(catalog.model_from_config(written(tmp_path, own | {"hidden_act": act}))) for act in ("silu", "relu2")
    )
    assert gated - two == 32 * 4096 * 14336
    with pytest.raises(HeadwayError, match="hidden_act is 'gelu'"):
        catalog.model_from_config(written(tmp_path, own | {"hidden_act": "gelu"}))


@pytest.mark.parametrize("text", ["text_config", "llm_config", "language_config"])
def test_the_text_part_of_a_multimodal_config_counts(text: str, tmp_path: Path) -> None:
    wrapped = {"model_type": "of_my_own", "vision_config": {"num_hidden_layers": 3}, text: LLAMA}
    assert catalog.model_from_config(written(tmp_path, wrapped), "m") == replace(
        catalog.model_from_config(written(tmp_path, LLAMA), "m")
    )


def test_json_is_read_as_python_writes_it(tmp_path: Path) -> None:
    plain = catalog.model_from_config(written(tmp_path, LLAMA), "m")
    assert catalog.model_from_config(written(tmp_path, LLAMA | {"time_step_limit": [0.0, float("inf")]}), "m") == plain
    path = tmp_path / "config.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(LLAMA).encode())
    assert catalog.model_from_config(path, "m") == plain
    assert catalog.model_from_config(tmp_path, "m") == plain


@pytest.mark.parametrize(
    ("keys", "tokens"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}, 131072),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 81920),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 81920),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}, 131072),
        ({"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}}}, 327680),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}}, 40960),
        ({"rope_scaling": {"type": "longrope", "factor": 32.0}}, 40960),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}, 40960),
        ({"rope_scaling": None}, 40960),
    ],
    ids=str,
)
def test_context_is_what_vllm_derives(keys: dict[str, Any], tokens: int, tmp_path: Path) -> None:
    config = LLAMA | {"max_position_embeddings": 40960, **keys}
    assert catalog.model_from_config(written(tmp_path, config)).max_context_tokens == tokens


def test_quantisation_may_lie_beside_the_config(tmp_path: Path) -> None:
    path = written(tmp_path, LLAMA)
    in_16_bits = weights_bytes(catalog.model_from_config(path))
    beside = tmp_path / "hf_quant_config.json"
    beside.write_text(json.dumps({"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}))
    assert weights_bytes(catalog.model_from_config(path)) == pytest.approx(
        in_16_bits - 32 * 4096 * (128 * 80 + 3 * 14336)
    )
    assert catalog.model_from_config(path).dtype == "fp8"
    (tmp_path / "moved").mkdir()
    alone = tmp_path / "moved" / "config.json"
    alone.write_text(whole_config(path))
    assert catalog.model_from_config(alone, "m") == replace(
        catalog.model_from_config(path, "m"), source=str(alone), sampling=None
    )
    beside.unlink()
    (tmp_path / "quantize_config.json").write_text('{"bits": 4, "group_size": 128, "desc_act": false}')
    assert catalog.model_from_config(path).dtype == "w4a16"


def test_modules_that_a_quantiser_leaves_out_have_16_bits(tmp_path: Path) -> None:
    """However the quantiser names them."""

    def num_bytes(keys: dict[str, Any]) -> float:
        return weights_bytes(catalog.model_from_config(written(tmp_path, LLAMA | {"quantization_config": keys})))

    modelopt: dict[str, Any] = {"quant_method": "modelopt", "quant_algo": "FP8"}
    attention = 32 * 4096 * 128 * (2 * 32 + 2 * 8)
    wanted = num_bytes(modelopt) + attention
    assert num_bytes({**modelopt, "ignore": ["*self_attn*"]}) == wanted
    assert num_bytes({**modelopt, "exclude_modules": [f"model.layers.{i}.self_attn*" for i in range(32)]}) == wanted
    every = [f"model.layers.{i}.self_attn.{name}_proj" for i in range(32) for name in "qkvo"]
    assert num_bytes({"quant_method": "fp8", "modules_to_not_convert": every}) == wanted
    groups = {"g": {"weights": {"num_bits": 8, "type": "float"}, "targets": ["Linear"]}}
    tensors = {"quant_method": "compressed-tensors", "config_groups": groups}
    assert num_bytes({**tensors, "ignore": ["re:.*self_attn.*", "lm_head"]}) == wanted
    mixed = {f"model.layers.{i}.mlp": {"quant_algo": "FP8"} for i in range(32)}
    assert num_bytes({"quant_algo": "MIXED_PRECISION", "quantized_layers": mixed}) == wanted


def test_a_model_is_found_by_folder_and_in_the_hubs_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "mine").mkdir()
    written(tmp_path / "mine", LLAMA)
    assert catalog.find_model("mine", tmp_path).num_layers == 32
    with pytest.raises(HeadwayError, match=r"unknown model 'me/mine'.*hf download me/mine .*--model-config DIR"):
        catalog.find_model("me/mine", tmp_path)
    snapshot = tmp_path / "hub" / "models--me--mine" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    written(snapshot, LLAMA)
    assert catalog.find_model("me/mine", tmp_path).name == "me/mine"
