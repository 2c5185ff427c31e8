"""Parameter counts against published ones, cache sizes against hand values, capacity against runs."""

from __future__ import annotations

import csv
import gzip
import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from headway import catalog
from headway.core.errors import HeadwayError
from headway.core.fleet import Engine, Gpu, Model, Parallel
from headway.perf.memory import GIB, check_shape, kv_bytes_per_token, plan
from headway.perf.params import active_params, num_params, weights_bytes
from headway.perf.speculation import step_model

PUBLISHED = {
    "llama-2-7b": 6.738, "llama-2-13b": 13.016, "llama-2-70b": 68.977, "codellama-34b": 33.744,
    "llama-3-8b": 8.030, "llama-3-70b": 70.554, "llama-3.1-8b": 8.030, "llama-3.1-70b": 70.554,
    "llama-3.1-405b": 405.854, "llama-3.2-3b": 3.213, "llama-3.3-70b": 70.554, "llama-4-scout": 108.642,
    "qwen1.5-14b": 14.167, "qwen2.5-7b": 7.616, "qwen2.5-14b": 14.770, "qwen2.5-32b": 32.764,
    "qwen2.5-72b": 72.706, "qwen3-8b": 8.191, "qwen3-14b": 14.768,
    "qwen3-32b": 32.762, "qwen3-30b-a3b": 30.532, "deepseek-v3": 671.026, "deepseek-r1": 671.026,
    "deepseek-r1-awq": 671.026,
    "deepseek-r1-distill-qwen-7b": 7.616, "deepseek-r1-distill-qwen-32b": 32.764,
    "deepseek-r1-distill-llama-70b": 70.554, "mistral-7b": 7.248, "mistral-nemo-12b": 12.248,
    "mixtral-8x7b": 46.703, "mixtral-8x22b": 140.621, "yi-34b": 34.389, "bloom-176b": 176.247,
    "gpt-oss-20b": 20.915, "gpt-oss-120b": 116.829,
    "llama-3.2-1b": 1.236, "llama-4-scout-17b-16e-instruct-fp8-dynamic": 108.642, "ernie-4.5-0.3b-pt": 0.361,
}  # fmt: skip
"""Billions, as the checkpoints' indices count them (DeepSeek without its multi-token-prediction layer)."""
ACTIVE = {
    "mixtral-8x7b": 12.9,
    "mixtral-8x22b": 39.1,
    "deepseek-v3": 37.0,
    "gpt-oss-20b": 3.61,
    "gpt-oss-120b": 5.13,
}


NAMED = {
    "deepseek-v3": 671, "glm-5": 744, "kimi-k2": 1026, "minimax-m2": 229, "minimax-m3": 428, "mimo-v2-flash": 309,
    "step-3.7-flash": 196, "deepseek-r1": 671, "deepseek-v2-lite": 15.7, "glm-4.5-air": 106, "glm-4.5": 355,
    "glm-4.6": 355, "glm-4.7-flash": 30, "glm-4.7": 355, "granite-4.0-h-small": 32.2, "granite-4.0-h-tiny": 6.9,
    "kimi-k3": 2780, "magistral-small": 23.6, "phi-3.5-moe": 41.9, "phi-4-mini": 3.8, "phi-4": 14.7,
    "qwen3-coder-next": 80,
}  # fmt: skip
"""Billions of models whose names do not say them, by the beginning of the name, longer beginnings first."""


@pytest.mark.parametrize("model", catalog.models(), ids=lambda m: m.name)
def test_parameter_counts_are_the_published_ones(model: Model) -> None:
    """To 2% where a checkpoint's count is at hand, else to the rounding of the names (`30b` has 31.6)."""
    billions = num_params(model) / 1e9
    if model.name in PUBLISHED:
        assert billions == pytest.approx(PUBLISHED[model.name], rel=0.02)
        return
    stated = re.search(r"(?<![a-z\d])(\d+(?:\.\d+)?)b\b", model.name)
    named = next((each for name, each in NAMED.items() if model.name.startswith(name)), 0)
    if "llama-4" in model.name:  # its name counts the active parameters
        named, stated = 401, None
    expected = float(stated[1]) if stated else named
    # small models round up: Qwen3-1.7B has 1.72 billion, VL models count their vision, too
    assert billions == pytest.approx(expected, rel=0.15 if expected < 10 else 0.06)


@pytest.mark.parametrize("name", ACTIVE)
def test_active_parameters_of_mixtures(name: str) -> None:
    assert active_params(catalog.model(name)) / 1e9 == pytest.approx(ACTIVE[name], rel=0.02)


@pytest.mark.parametrize(
    ("name", "num_bytes"),
    [
        ("llama-2-70b", 80 * 2 * 8 * 128 * 2),
        ("llama-3.1-8b", 131_072),
        ("llama-2-7b", 524_288),
        ("deepseek-v3", 576 * 61 * 2),
        ("gpt-oss-20b", 24 * 2 * 8 * 64 * 2),
    ],
)
def test_kv_bytes_of_a_token(name: str, num_bytes: int) -> None:
    assert kv_bytes_per_token(catalog.model(name)) == num_bytes


def test_weights_by_dtype() -> None:
    llama = catalog.model("llama-3.3-70b")
    assert weights_bytes(llama) == pytest.approx(2 * num_params(llama))
    assert weights_bytes(replace(llama, dtype="fp8")) / GIB == pytest.approx(2 * 33.88, rel=0.005)
    assert weights_bytes(catalog.model("gpt-oss-120b")) / 1e9 == pytest.approx(65.3, rel=0.02)
    assert weights_bytes(catalog.model("deepseek-v3")) / 1e9 == pytest.approx(673, rel=0.01)
    with pytest.raises(HeadwayError, match=r"model llama-3\.3-70b: unknown weight dtype 'int3'"):
        weights_bytes(replace(llama, dtype="int3"))


def test_mixed_types_have_their_mean_bits() -> None:
    """A mean of a type's own bits is that type, in memory and in the time of a step; embeddings have a type of their
    own."""
    dense, gpu, engine = catalog.model("llama-3.1-8b"), catalog.gpu("h100"), catalog.engine("llama.cpp")
    for bits in ("q16", "q8.5", "q4.5"):
        mixed = replace(dense, dtype=bits, embedding_dtype=bits)
        assert weights_bytes(mixed) == pytest.approx(weights_bytes(dense) * float(bits[1:]) / 16, rel=1e-3)
    same = replace(dense, dtype="q16", embedding_dtype="q16")
    assert line(same, gpu, engine) == line(dense, gpu, engine)
    head = replace(dense, embedding_dtype="q4.5")
    saved = (2 - 4.5 / 8) * dense.vocab_size * dense.hidden_size
    assert weights_bytes(dense) - weights_bytes(head) == pytest.approx(2 * saved)
    planned = [plan(each, gpu, engine, Parallel()).weights_bytes for each in (dense, head)]
    assert planned[0] - planned[1] == pytest.approx(2 * saved)
    before, after = (plan(each, gpu, engine, Parallel(pp=4)) for each in (dense, head))
    gained = (after.kv_capacity_tokens - before.kv_capacity_tokens) * before.kv_bytes_per_token_gpu
    assert gained == pytest.approx(saved, rel=0.01)  # a stage has one of the two
    bare = line(dense, gpu, engine)[0] - line(head, gpu, engine)[0]
    assert 0 < bare < 1.3 * saved / gpu.bandwidth_bytes_per_s
    sparse = catalog.model("qwen3-30b-a3b")
    for bits in (("q3", "q4.25", "q6.4"), ("q6.6", "q8.5", "q16")):  # those of int4's kernels, and of bf16's
        times = [line(replace(sparse, dtype=each), gpu, engine)[0] for each in bits]
        assert times == sorted(times)
    for wrong in ("q", "q4.", "q-4", "q4.5-g32"):
        with pytest.raises(HeadwayError, match="weight dtype"):
            weights_bytes(replace(dense, dtype=wrong))


def line(model: Model, gpu: Gpu, engine: Engine) -> tuple[float, float]:
    return step_model(model, gpu, engine, Parallel()).line(1, 64)


def test_kv_heads_are_replicated_beyond_their_number() -> None:
    model, gpu, engine = catalog.model("llama-3.1-70b"), catalog.gpu("h200"), catalog.engine("simulated")
    four, eight, sixteen = (plan(model, gpu, engine, Parallel(tp=tp)) for tp in (4, 8, 16))
    whole = four.kv_bytes_per_token
    assert four.kv_bytes_per_token_gpu == whole / 4
    assert eight.kv_bytes_per_token_gpu == sixteen.kv_bytes_per_token_gpu == whole / 8
    assert eight.kv_bytes_per_token_replica == whole
    assert sixteen.kv_bytes_per_token_replica == 2 * whole


def test_mla_holds_the_latent_on_every_gpu() -> None:
    found = plan(catalog.model("deepseek-v3"), catalog.gpu("h200"), catalog.engine("simulated"), Parallel(tp=8))
    assert found.kv_bytes_per_token_gpu == found.kv_bytes_per_token == 70_272
    assert found.kv_bytes_per_token_replica == 8 * 70_272


def test_a_pipeline_splits_layers() -> None:
    model, gpu, engine = catalog.model("llama-2-70b"), catalog.gpu("a100-80gb"), catalog.engine("simulated")
    tensor, both = plan(model, gpu, engine, Parallel(tp=4)), plan(model, gpu, engine, Parallel(tp=4, pp=2))
    assert both.kv_bytes_per_token_gpu == tensor.kv_bytes_per_token_gpu / 2
    assert both.weights_bytes == pytest.approx(tensor.weights_bytes / 2, rel=0.01)
    assert both.kv_capacity_tokens > 2 * tensor.kv_capacity_tokens


def test_memory_error_suggests_a_shape_that_fits() -> None:
    engine, a100 = catalog.engine("simulated"), catalog.gpu("a100-80gb")
    expected = r"needs 13\d\.\d GiB a GPU, 72\.8 of 79\.\d available on a100-80gb; smallest tp that fits: 2"
    with pytest.raises(HeadwayError, match=expected):
        plan(catalog.model("llama-2-70b"), a100, engine, Parallel())
    with pytest.raises(HeadwayError, match="no tp up to 8 fits"):
        plan(catalog.model("deepseek-v3"), a100, engine, Parallel(tp=8))


def test_impossible_shapes_are_refused() -> None:
    llama = catalog.model("llama-2-70b")
    with pytest.raises(HeadwayError, match=r"tp 3 does not divide the 64 heads .8 KV heads.*possible: 1, 2, 4, 8"):
        check_shape(llama, Parallel(tp=3))
    with pytest.raises(HeadwayError, match="pp 81 is more than the 80 layers"):
        check_shape(llama, Parallel(pp=81))
    with pytest.raises(HeadwayError, match="at least 1"):
        check_shape(llama, Parallel(tp=0))
    check_shape(llama, Parallel(tp=16))


@given(
    st.sampled_from(["llama-3.1-8b", "mixtral-8x7b", "qwen3-32b"]),
    st.sampled_from([2, 4]),
    st.floats(0.5, 0.98),
    st.sampled_from([1, 16, 128]),
)
def test_planned_blocks_are_the_most_that_fit(name: str, tp: int, utilization: float, block: int) -> None:
    engine = replace(catalog.engine("simulated"), gpu_memory_utilization=utilization, block_size_tokens=block)
    gpu = catalog.gpu("h200")
    found = plan(catalog.model(name), gpu, engine, Parallel(tp=tp))
    used = found.weights_bytes + found.activation_bytes + found.kv_capacity_tokens * found.kv_bytes_per_token_gpu
    left = gpu.memory_bytes * utilization - used
    assert 0 <= left < block * found.kv_bytes_per_token_gpu
    assert found.kv_capacity_tokens == found.kv_blocks * block
    wider = plan(catalog.model(name), gpu, engine, Parallel(tp=2 * tp))
    assert wider.kv_capacity_tokens > found.kv_capacity_tokens


PROFILED = {
    "Llama-3.3-70B-FP8": "llama-3.3-70b",
    "Llama-3.1-8B": "llama-3.1-8b",
    "Qwen3-32B": "qwen3-32b",
    "gpt-oss-20b": "gpt-oss-20b",
}


@pytest.mark.skipif("HEADWAY_DATA" not in os.environ, reason="HEADWAY_DATA is unset")
def test_capacity_is_near_what_vllm_profiled() -> None:
    path = Path(os.environ["HEADWAY_DATA"]) / "measured" / "vllm_memory_profile_h100.csv.gz"
    with gzip.open(path, "rt") as file:
        rows = [row for row in csv.DictReader(file) if row["model"] in PROFILED]
    engine = replace(catalog.engine("vllm-0.15"), max_num_seqs=1024)
    for row in rows:
        model = catalog.model(PROFILED[row["model"]])
        model = replace(model, dtype="fp8") if row["model"].endswith("FP8") else model
        found = plan(model, catalog.gpu("h100"), engine, Parallel(tp=int(row["tp"])))
        cache_gib = found.kv_capacity_tokens * found.kv_bytes_per_token_gpu / GIB
        assert cache_gib == pytest.approx(float(row["kv_cache_gib"]), rel=0.02), row["model"]


@pytest.mark.parametrize(
    ("name", "dtype", "kv_tokens"),
    [("llama-3.1-8b", "bf16", 462_944), ("llama-3.1-8b", "fp8", 515_856), ("qwen3-30b-a3b", "bf16", 135_488)],
)
def test_capacity_is_near_what_vllm_0_25_told(name: str, dtype: str, kv_tokens: int) -> None:
    model = catalog.model(name)
    model = replace(model, dtype=dtype) if model.dtype != dtype else model
    found = plan(model, catalog.gpu("h100"), catalog.engine("vllm-0.25"), Parallel())
    assert found.kv_capacity_tokens == pytest.approx(kv_tokens, rel=0.003)


def test_reserved_graphs_are_those_of_a_stage() -> None:
    """Experts alone have them, and a pipeline's stage those of its own layers."""
    engine, model = catalog.engine("vllm-0.25"), catalog.model("qwen3-30b-a3b")
    without = replace(engine, graph_bytes_per_expert_layer=0.0)
    for pp in (1, 2, 4):
        least, most = (plan(model, catalog.gpu("h100"), each, Parallel(pp=pp)) for each in (without, engine))
        reserved = most.activation_bytes - least.activation_bytes
        assert reserved == pytest.approx(engine.graph_bytes_per_expert_layer * 48 / pp)
    dense = catalog.model("llama-3.1-8b")
    assert plan(dense, catalog.gpu("h100"), engine, Parallel()) == plan(dense, catalog.gpu("h100"), without, Parallel())


def test_kv_bytes_by_dtype() -> None:
    assert 1000 * kv_bytes_per_token(catalog.model("llama-2-70b")) == 327_680_000
    assert 1000 * kv_bytes_per_token(catalog.model("llama-2-70b"), kv_dtype_bytes=1.0) == 163_840_000
