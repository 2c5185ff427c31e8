"""Models of the catalog, and configs as publishers write them, against published numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headway import catalog
from headway.core.errors import HeadwayError
from headway.perf.params import active_params, kv_bytes, num_params, state_bytes, weights_bytes

PARAMETERS = {
    "Qwen/Qwen3-0.6B": 0.6, "Qwen/Qwen3-4B": 4.0, "Qwen/Qwen3-8B": 8.2, "Qwen/Qwen3-14B": 14.8, "Qwen/Qwen3-32B": 32.8,
    "Qwen/Qwen3-30B-A3B-Instruct-2507": 30.5, "Qwen/Qwen3-235B-A22B-Instruct-2507": 235.0,
    "Qwen/Qwen3-Coder-480B-A35B-Instruct": 480.0, "Qwen/Qwen3-Next-80B-A3B-Instruct": 80.0, "Qwen/Qwen3.5-9B": 9.0,
    "Qwen/Qwen3.5-27B": 27.0, "Qwen/Qwen3.5-35B-A3B": 35.0, "Qwen/Qwen3.5-122B-A10B": 122.0,
    "Qwen/Qwen3.5-397B-A17B": 397.0, "zai-org/GLM-4.5": 355.0, "zai-org/GLM-4.5-Air": 106.0, "zai-org/GLM-4.6": 355.0,
    "zai-org/GLM-4.7": 355.0, "zai-org/GLM-4.7-Flash": 30.0, "zai-org/GLM-5": 744.0, "google/gemma-3-1b-it": 1.0,
    "google/gemma-3-4b-it": 3.9, "google/gemma-3-12b-it": 11.8, "google/gemma-3-27b-it": 27.0,
    "openai/gpt-oss-20b": 20.9, "openai/gpt-oss-120b": 116.8, "meta-llama/Llama-4-Scout-17B-16E-Instruct": 108.0,
    "meta-llama/Llama-4-Maverick-17B-128E-Instruct": 400.0, "deepseek-ai/DeepSeek-V3": 671.0,
    "deepseek-ai/DeepSeek-R1-0528": 671.0, "deepseek-ai/DeepSeek-V3.2": 671.0, "moonshotai/Kimi-K2-Instruct": 1026.0,
    "moonshotai/Kimi-K2-Thinking": 1026.0, "moonshotai/Kimi-Linear-48B-A3B-Instruct": 49.1,
    "moonshotai/Kimi-K3": 2780.0, "MiniMaxAI/MiniMax-M2": 229.0, "mistralai/Mistral-Small-3.2-24B-Instruct-2506": 23.6,
    "mistralai/Mistral-Large-3-675B-Instruct-2512": 675.0, "mistralai/Devstral-2-123B-Instruct-2512": 125.0,
    "mistralai/Ministral-3-8B-Instruct-2512": 8.5, "nvidia/NVIDIA-Nemotron-Nano-9B-v2": 8.9,
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": 31.6, "nvidia/Llama-3_3-Nemotron-Super-49B-v1_5": 49.9,
    "ibm-granite/granite-4.0-h-small": 32.2, "ibm-granite/granite-4.0-h-tiny": 6.9, "microsoft/phi-4": 14.7,
    "microsoft/Phi-4-mini-instruct": 3.8, "allenai/Olmo-3-7B-Instruct": 7.3, "allenai/Olmo-3.1-32B-Instruct": 32.2,
    "ByteDance-Seed/Seed-OSS-36B-Instruct": 36.2, "baidu/ERNIE-4.5-21B-A3B-PT": 21.8,
    "baidu/ERNIE-4.5-300B-A47B-PT": 300.0, "XiaomiMiMo/MiMo-V2-Flash": 309.0,
}  # fmt: skip
"""Billions, of the text part, as model cards and the headers of weights state them."""
NAMES = {each.name for each in catalog.models()}
QUANTISED = {
    each.name: base
    for each in catalog.models()
    if each.name.endswith(("-fp8", "-awq", "-nvfp4"))
    for base in (each.name.rpartition("-")[0], f"{each.name.rpartition('-')[0]}-bf16")
    if base in NAMES
}
"""Quantised models with those from which they were made."""


@pytest.mark.parametrize(("name", "billions"), PARAMETERS.items())
def test_models_have_the_parameters_that_are_published(name: str, billions: float) -> None:
    model = catalog.model(name)
    assert num_params(model) == pytest.approx(billions * 1e9, rel=0.015 if billions < 700 else 0.005, abs=5e7)
    assert active_params(model) <= num_params(model) + model.vocab_size * model.hidden_size
    assert model.hf_id and model.source


@pytest.mark.parametrize(("name", "of"), QUANTISED.items())
def test_quantised_variants_differ_from_their_base_in_bytes_alone(name: str, of: str) -> None:
    quantised, base = catalog.model(name), catalog.model(of)
    assert num_params(quantised) == pytest.approx(num_params(base))
    assert kv_bytes(quantised) == kv_bytes(base) and state_bytes(quantised) == state_bytes(base)
    assert weights_bytes(quantised) <= weights_bytes(base)
    if base.dtype == "bf16":
        assert weights_bytes(quantised) < 0.75 * weights_bytes(base)


def test_an_unknown_name_says_how_to_give_a_config() -> None:
    for name in ("zzz", "qwen3-nxt", "someone/else"):
        with pytest.raises(HeadwayError, match=r"unknown model .*--model-config") as raised:
            catalog.find_model(name)
        assert len(str(raised.value)) < 500


# Configs as publishers write them. The truth is the count of `transformers` or of the published weights.


def sizes(folder: Path, **config: Any) -> tuple[float, float, float]:
    """(billions of parameters, bytes of KV cache a token, those of layers with a window)."""
    (folder / "config.json").write_text(json.dumps(config))
    model = catalog.model_from_config(folder)
    return num_params(model) / 1e9, kv_bytes(model), kv_bytes(model, windowed=True)


def test_multimodal_gemma_3_leaves_out_what_its_family_has(tmp_path: Path) -> None:
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    }
    params, kv, windowed = sizes(tmp_path, model_type="gemma3", text_config=text)
    assert params == pytest.approx(3.88, rel=0.01) and kv == 34 * 4 * 256 * 4 and windowed == 29 * 4 * 256 * 4


def test_qwen_1_states_the_width_of_gate_and_up_together(tmp_path: Path) -> None:
    params, _, _ = sizes(
        tmp_path,
        model_type="qwen",
        architectures=["QWenLMHeadModel"],
        hidden_size=4096,
        intermediate_size=22016,
        kv_channels=128,
        max_position_embeddings=32768,
        num_attention_heads=32,
        num_hidden_layers=32,
        seq_length=8192,
        tie_word_embeddings=False,
        vocab_size=151936,
    )
    assert params == pytest.approx(7.72, rel=0.01)


def test_chatglm_s_keys_are_read(tmp_path: Path) -> None:
    params, kv, _ = sizes(
        tmp_path, model_type="chatglm", architectures=["ChatGLMModel"], ffn_hidden_size=13696, hidden_size=4096,
        kv_channels=128, multi_query_attention=True, multi_query_group_num=2, num_attention_heads=32, num_layers=40,
        original_rope=True, padded_vocab_size=151552, rmsnorm=True, seq_length=8192, tie_word_embeddings=False,
    )  # fmt: skip
    assert params == pytest.approx(9.40, rel=0.01) and kv == 40 * 2 * 2 * 128 * 2


def test_minicpm_3_has_values_of_a_head_s_share(tmp_path: Path) -> None:
    params, kv, _ = sizes(
        tmp_path, model_type="minicpm3", architectures=["MiniCPM3ForCausalLM"], hidden_act="silu", hidden_size=2560,
        num_hidden_layers=62, intermediate_size=6400, max_position_embeddings=32768, num_attention_heads=40,
        num_key_value_heads=40, qk_nope_head_dim=64, qk_rope_head_dim=32, q_lora_rank=768, kv_lora_rank=256,
        vocab_size=73448,
    )  # fmt: skip
    assert params == pytest.approx(4.07, rel=0.01) and kv == 62 * (256 + 32) * 2


def test_latent_attention_that_is_switched_off_is_plain_attention(tmp_path: Path) -> None:
    text = {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "first_k_dense_replace": 1,
        "hidden_size": 1280, "intermediate_size": 6848, "kv_lora_rank": None, "max_position_embeddings": 4096,
        "moe_intermediate_size": 896, "n_routed_experts": 64, "n_shared_experts": 2, "num_attention_heads": 10,
        "num_experts_per_tok": 6, "num_hidden_layers": 12, "num_key_value_heads": 10, "q_lora_rank": None,
        "qk_nope_head_dim": 0, "qk_rope_head_dim": 0, "use_mla": False, "v_head_dim": 0, "vocab_size": 129280,
    }  # fmt: skip
    _, kv, _ = sizes(tmp_path, model_type="deepseek_vl_v2", language_config=text)
    assert kv == 12 * 2 * 10 * 128 * 2


@pytest.mark.parametrize("key", ["no_rope_layer_interval", "nope_layer_interval"])
def test_llama_4_s_interval_has_two_names(key: str, tmp_path: Path) -> None:
    text = {
        "model_type": "llama4_text", "attention_chunk_size": 8192, "head_dim": 128, "hidden_size": 5120,
        "interleave_moe_layer_step": 2, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
        "num_attention_heads": 40, "num_experts_per_tok": 1, "num_hidden_layers": 48, "num_key_value_heads": 8,
        "num_local_experts": 128, "vocab_size": 202048, key: 4,
    }  # fmt: skip
    params, kv, windowed = sizes(tmp_path, model_type="llama4", text_config=text)
    assert params == pytest.approx(400.7, rel=0.01) and windowed == 0.75 * kv


def test_a_list_of_layers_goes_before_a_pattern(tmp_path: Path) -> None:
    text = {
        "model_type": "exaone4_5_text",
        "hidden_size": 5120,
        "intermediate_size": 27392,
        "num_attention_heads": 40,
        "num_hidden_layers": 64,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "sliding_window_pattern": "LLLG",
        "hidden_act": "silu",
        "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 16,
        "vocab_size": 153600,
    }
    _, kv, windowed = sizes(tmp_path, model_type="exaone4_5", text_config=text)
    assert windowed == 0.75 * kv


def test_a_family_is_known_by_its_architecture(tmp_path: Path) -> None:
    """Of repositories whose `model_type` is their own."""
    own = {"architectures": ["DeepseekV4ForCausalLM"], "model_type": "own", "hidden_size": 4096, "num_hidden_layers": 4}
    with pytest.raises(HeadwayError, match="'deepseek_v4', whose layers Headway does not model"):
        sizes(tmp_path, **own)
    falcon = {
        "model_type": "own",
        "hidden_size": 4544,
        "num_hidden_layers": 32,
        "num_attention_heads": 71,
        "vocab_size": 65024,
        "multi_query": True,
        "new_decoder_architecture": False,
    }
    params, kv, _ = sizes(tmp_path, architectures=["FalconForCausalLM"], **falcon)
    assert params == pytest.approx(6.92, rel=0.01) and kv == 32 * 2 * 64 * 2
