"""The catalog: every name resolves, every entry has a source, nothing is read before it is asked for."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from headway import catalog
from headway.catalog.coefficients import CoefficientFile, scaled
from headway.catalog.load import coefficients_in
from headway.core.errors import HeadwayError

GPUS = (
    "a100-40gb", "a100-80gb", "h100-80gb-sxm", "h100-96gb-sxm", "h200-141gb-sxm", "h800-80gb-sxm", "h20-96gb",
    "a800-80gb-sxm", "a800-80gb-pcie", "a10", "l4", "l40s", "rtx-4090", "mi210", "mi300x", "b200-180gb-sxm",
)  # fmt: skip
MODELS = (
    "llama-2-7b", "llama-2-13b", "llama-2-70b", "llama-3-8b", "llama-3-70b", "llama-3.1-8b", "llama-3.1-70b",
    "llama-3.1-405b", "llama-3.2-3b", "codellama-34b", "qwen1.5-14b", "qwen2.5-7b", "qwen2.5-32b",
    "qwen3-14b",
    "deepseek-r1-distill-qwen-7b", "deepseek-r1-distill-qwen-32b", "deepseek-r1-distill-llama-70b",
    "deepseek-v3",
    "deepseek-r1", "mixtral-8x7b", "mixtral-8x22b", "llama-4-scout", "mistral-nemo-12b", "yi-34b",
    "bloom-176b",
    "gpt-oss-20b", "gpt-oss-120b",
)  # fmt: skip
ENGINES = (
    "vllm-0.15",
    "vllm-0.25",
    "vllm-v0",
    "sglang",
    "orca",
    "sarathi",
    "fastertransformer",
    "llama.cpp",
    "simulated",
)


@pytest.mark.parametrize("name", GPUS)
def test_every_gpu_is_there(name: str) -> None:
    assert catalog.gpu(name).name == name


@pytest.mark.parametrize("name", MODELS)
def test_every_model_is_there(name: str) -> None:
    model = catalog.model(name)
    assert model.name == name
    assert catalog.model(model.hf_id) is model


@pytest.mark.parametrize("name", ENGINES)
def test_every_engine_is_there(name: str) -> None:
    assert catalog.engine(name).name == name


def test_names_and_aliases_in_any_case() -> None:
    assert catalog.gpu("A100").name == "a100-80gb"
    assert catalog.gpu("NVIDIA H100 80GB HBM3").name == "h100-80gb-sxm"
    assert catalog.gpu(" h100 ").name == "h100-80gb-sxm"
    assert catalog.model("Meta-Llama/llama-3.1-8b-instruct").name == "llama-3.1-8b"
    assert catalog.model("llama_2_70b").name == "llama-2-70b"
    assert catalog.engine("VLLM").name == catalog.engine("vllm-v1").name == "vllm-0.25"
    assert catalog.engine("default").name == "simulated"


def test_names_are_unique() -> None:
    for entries in (catalog.gpus(), catalog.models()):
        names = [
            name.lower()
            for entry in entries
            for name in {entry.name, getattr(entry, "hf_id", entry.name), *entry.aliases}
        ]
        assert [name for name, count in Counter(names).items() if count > 1] == []


def test_every_entry_has_a_source() -> None:
    named = [(e.name, e.source) for e in catalog.gpus()]
    named += [(e.name, e.source) for e in catalog.models()]
    named += [(e.name, e.source) for e in catalog.engines()]
    assert [name for name, source in named if len(source) < 10] == []


@pytest.mark.parametrize(
    ("name", "version", "lag"),
    [
        ("vllm", "", 1),
        ("vllm", "0.14.0", 1),
        ("vllm", "0.13.1", 0),
        ("vllm-0.10", "", 0),
        ("vllm-0.15", "0.12", 0),
        ("simulated", "v0.11", 0),
        ("vllm", "nightly", 1),
        ("sglang", "0.5.6", 1),
    ],
)
def test_vllm_schedules_ahead_from_its_version_0_14_on(name: str, version: str, lag: int) -> None:
    assert catalog.engine(name, version).schedule_lag == lag


def test_unknown_names_suggest_the_nearest() -> None:
    with pytest.raises(HeadwayError, match=r"unknown GPU 'a100-80g'; did you mean 'a100-80gb'\?"):
        catalog.gpu("a100-80g")
    with pytest.raises(HeadwayError, match=r"unknown model 'lama-2-70b'; did you mean 'llama-2-70b'\?"):
        catalog.model("lama-2-70b")
    with pytest.raises(HeadwayError, match="unknown engine 'vlm-v1'; did you mean 'vllm-v1'"):
        catalog.engine("vlm-v1")
    for find in (catalog.gpu, catalog.model, catalog.engine):
        with pytest.raises(HeadwayError):
            find("")


def test_engine_profiles_name_their_priority_support() -> None:
    assert catalog.engine("vllm-0.15").orderings == ("fcfs", "priority")
    assert catalog.engine("llama.cpp").orderings == ("fcfs",)
    assert catalog.engine("simulated").orderings is None
    assert all(e.orderings for e in catalog.engines() if not e.name.startswith("simulated"))


def test_gpu_facts_are_consistent() -> None:
    for gpu in catalog.gpus():
        assert gpu.peak_flops["bf16"] / gpu.bandwidth_bytes_per_s > 30, gpu.name
        assert gpu.link_bytes_per_s >= gpu.host_link_bytes_per_s, gpu.name
        assert 20e9 < gpu.memory_bytes < 300e9, gpu.name


def test_coefficients_are_fractions_and_measured_ones_say_so() -> None:
    for gpu in catalog.gpus():
        for engine in catalog.engines():
            found = catalog.coefficients(gpu.name, engine.name)
            kernels = found.kernels
            for roofline in (*kernels.gemm.values(), *kernels.moe.values()):
                assert 0 < roofline.memory_efficiency <= 1
                assert 0 < roofline.compute_efficiency <= 1
            assert {"bf16", "fp8", "int4"} <= set(kernels.moe)
            assert {"bf16"} | ({"fp8"} & set(gpu.peak_flops)) <= set(kernels.gemm)
            assert kernels.source
            assert found.overhead.source
    assert catalog.coefficients("h100-80gb-sxm", "vllm-0.15").calibrated
    assert catalog.coefficients("h100-80gb-sxm", "simulated").calibrated
    assert not catalog.coefficients("h800-80gb-sxm", "vllm-0.15").calibrated
    assert not catalog.coefficients("a GPU of one's own", "vllm-0.15").calibrated


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("NVIDIA H100 NVL", "h100-94gb-nvl"),
        ("h100-pcie", "h100-80gb-pcie"),
        ("a100-pcie", "a100-80gb-pcie"),
        ("A10G", "a10g"),
        ("rtx-pro-6000", "rtx-pro-6000-96gb"),
        ("B200", "b200-180gb-sxm"),
        ("GB200", "gb200-186gb"),
    ],
)
def test_gpus_without_measurements_have_peaks_and_say_so(alias: str, name: str) -> None:
    gpu = catalog.gpu(alias)
    assert gpu.name == name
    found = catalog.coefficients(gpu.name, "vllm-0.15")
    assert not found.calibrated
    assert found.estimated[0].startswith("kernels of ")


def test_tensorrt_llm_is_marked_as_not_measured() -> None:
    engine = catalog.engine("trtllm")
    assert engine.name == "tensorrt-llm" and "not measured" in engine.source
    assert "generic overhead of tensorrt-llm" in catalog.coefficients("h100-80gb-sxm", engine.name).estimated


def test_import_reads_no_data_files() -> None:
    code = (
        "import sys, headway.catalog as c; from headway.catalog import load;"
        "assert load.gpus.cache_info().currsize == 0;"
        "assert not {'numpy', 'yaml', 'pyarrow'} & set(sys.modules);"
        "c.gpu('h100'); assert load.models.cache_info().currsize == 0"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("asked", "name", "version"),
    [
        ("vllm-0.25", "vllm-0.25", "0.25.1"),
        ("vllm-0.27", "vllm-0.25", "0.27"),
        ("vLLM-v0.33.1", "vllm-0.25", "0.33.1"),
        ("vllm-0.24", "vllm-0.15", "0.24"),
        ("vllm-0.9", "vllm-0.15", "0.9"),
        ("vllm-1.0", "vllm-0.25", "1.0"),
    ],
)
def test_a_version_has_the_profile_of_the_measured_one_that_is_nearest_below(
    asked: str, name: str, version: str
) -> None:
    found = catalog.engine(asked)
    assert (found.name, found.version) == (name, version)
    assert catalog.coefficients("h100-80gb-sxm", name, version).calibrated == (version == "0.25.1")


@pytest.mark.parametrize("name", ["vllm", "vllm-v1", "VLLM"])
@pytest.mark.parametrize(
    ("version", "profile"),
    [
        ("", "vllm-0.25"),
        ("0.25.3", "vllm-0.25"),
        ("v0.33.0", "vllm-0.25"),
        ("0.24", "vllm-0.15"),
        ("0.9.1", "vllm-0.15"),
        ("nightly", "vllm-0.25"),
        ("0.25.1rc2+cu130", "vllm-0.25"),
    ],
)
def test_an_engine_without_a_version_is_the_newest_and_with_one_the_nearest(
    name: str, version: str, profile: str
) -> None:
    found = catalog.engine(name, version)
    assert (found.name, found.version) == (profile, version or "0.25.1")
    used = catalog.coefficients("h100-80gb-sxm", found.name, found.version)
    assert used.overhead.version == {"vllm-0.25": "0.25.1", "vllm-0.15": "0.15.1"}[profile]


def test_a_simulated_engine_takes_as_long_as_the_newest_one_or_as_the_one_of_its_version() -> None:
    for name, like in (("simulated", "vllm"), ("simulated-0.15", "vllm-0.15")):
        one, other = catalog.engine(name), catalog.engine(like)
        for gpu in ("h100-80gb-sxm", "l40s"):
            used = [catalog.coefficients(gpu, each.name, each.version) for each in (one, other)]
            assert used[0].kernels == used[1].kernels and used[0].overhead == used[1].overhead
        assert one.version == other.version


def test_a_file_of_coefficients_from_before_serves_every_version(tmp_path: Path) -> None:
    known = catalog.coefficients("h100-80gb-sxm", "vllm-0.15")
    slow = msgspec.structs.replace(known.overhead, step_s=0.1)
    path = tmp_path / "own.json"
    path.write_bytes(msgspec.json.encode(CoefficientFile(("h100-80gb-sxm",), known.kernels, {"vllm-v1": slow})))
    for name in ("vllm-0.25", "vllm-0.15", "simulated", "simulated-0.15", "vllm-v1"):
        assert coefficients_in(path, "h100-80gb-sxm", name).overhead.step_s == 0.1
    assert coefficients_in(path, "h100-80gb-sxm", "sglang").overhead.step_s < 0.1


@pytest.mark.parametrize(
    ("gpu", "limits"),
    [
        ("h100", (1024, 8192)),
        ("h200", (1024, 8192)),
        ("a100", (256, 2048)),
        ("l40s", (256, 2048)),
        (None, (256, 2048)),
    ],
)
def test_limits_are_those_of_the_engine_on_the_gpu(gpu: str | None, limits: tuple[int, int]) -> None:
    found = catalog.engine_on(catalog.engine("vllm"), None if gpu is None else catalog.gpu(gpu))
    assert (found.max_num_seqs, found.max_num_batched_tokens) == limits
    for name in ("vllm-0.15", "simulated", "sglang"):
        assert catalog.engine_on(catalog.engine(name), catalog.gpu("l40s")) == catalog.engine(name)


def test_factors_of_an_engines_kernels_are_applied_once() -> None:
    old, new = (catalog.coefficients("h100-80gb-sxm", name) for name in ("vllm-0.15", "vllm-0.25"))
    factor = new.kernels.decode_attention.memory_efficiency / old.kernels.decode_attention.memory_efficiency
    assert factor == pytest.approx(0.907)
    assert not new.overhead.kernel_factors  # a file that is made from these has them in its kernels


@pytest.mark.parametrize(("share", "latency_s"), [(1.0, 6e-6), (0.5, 5e-6), (0.0, 4e-6)])
def test_a_cast_within_the_kernel_before_has_no_latency_of_its_own(share: float, latency_s: float) -> None:
    kernels = catalog.coefficients("h100-80gb-sxm", "vllm-0.15").kernels
    plain, cast = (replace(kernels.gemm[dtype], latency_s=s) for dtype, s in (("bf16", 4e-6), ("fp8", 6e-6)))
    found = scaled(replace(kernels, gemm={"bf16": plain, "fp8": cast}), {"cast_share": share}).products()
    assert found["fp8"].latency_s == pytest.approx(latency_s)
    assert found["bf16"].latency_s == 4e-6


def test_a_factor_of_eight_bit_products_leaves_others_as_they_are() -> None:
    kernels = catalog.coefficients("h100-80gb-sxm", "vllm-0.15").kernels
    plain, found = (scaled(kernels, {"compute": 0.9} | own).gemm for own in ({}, {"fp8_compute": 1.1}))
    assert found["bf16"] == plain["bf16"]
    assert found["fp8"] == replace(plain["fp8"], compute_efficiency=plain["fp8"].compute_efficiency * 1.1)


@pytest.mark.parametrize("gpu", ["h100-80gb-sxm", "h200-141gb-sxm", "l40s"])
def test_vllm_0_25_casts_within_the_kernel_before(gpu: str) -> None:
    kept = {name: catalog.coefficients(gpu, name).kernels.gemm["fp8"].cast_share for name in ("vllm-0.15", "vllm-0.25")}
    assert kept == {"vllm-0.15": 1.0, "vllm-0.25": 0.0}
