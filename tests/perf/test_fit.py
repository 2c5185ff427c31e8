"""The shipped coefficients against the measurements they were fitted on. Needs HEADWAY_DATA."""

from __future__ import annotations

import csv
import gzip
import json
import os
import runpy
from collections.abc import Iterator
from math import sqrt
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from msgspec.structs import replace

from headway import catalog
from headway.core.fleet import Parallel
from headway.perf.operators import tiled_rows
from headway.perf.roofline import peak_flops, roofline_s
from headway.perf.step import StepModel

pytestmark = pytest.mark.skipif("HEADWAY_DATA" not in os.environ, reason="HEADWAY_DATA is unset")
ROOT = Path(__file__).parents[2]
SYSTEMS = {"a100-80gb": "a100_sxm", "h100-80gb-sxm": "h100_sxm", "h200-141gb-sxm": "h200_sxm", "l40s": "l40s"}
Row = dict[str, str]


def rows(name: str, system: str) -> Iterator[Row]:
    path = Path(os.environ["HEADWAY_DATA"]) / "measured" / f"{name}.csv.gz"
    with gzip.open(path, "rt") as file:
        yield from (row for row in csv.DictReader(file) if row["system"] == system)


def median_error(pairs: Iterator[tuple[float, float]]) -> float:
    return median(abs(found / measured - 1) for found, measured in pairs)


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
@pytest.mark.parametrize("name", SYSTEMS)
def test_matrix_products(name: str, dtype: str) -> None:
    """Of matrices that come from memory: the tables multiply with six in turn, which the L2 cache holds if small."""
    gpu, width = catalog.gpu(name), 1 if dtype == "fp8" else 2
    if width == 1 and "fp8" not in gpu.peak_flops:
        pytest.skip(f"no FP8 on {name}")
    c = catalog.coefficients(name, "vllm-0.15").kernels.gemm["fp8" if width == 1 else "bf16"]
    assert gpu.l2_bytes and gpu.num_sms

    def pairs() -> Iterator[tuple[float, float]]:
        for row in rows("aic_gemm_vllm", SYSTEMS[name]):
            m, n, k = int(row["m"]), int(row["n"]), int(row["k"])
            large = min(n, k) >= 512 and n * k >= 4e6 and 6 * n * k * width >= gpu.l2_bytes
            if row["gemm_dtype"] == dtype and large:
                memory_s = (width * (n * k + m * k) + 2 * m * n) / gpu.bandwidth_bytes_per_s
                computed = tiled_rows(m, n, gpu.num_sms, c.wave_share) if c.wave_share else m
                cast_s = 3 * m * k / (gpu.bandwidth_bytes_per_s * c.cast_efficiency) if width == 1 else 0.0
                compute_s = 2 * computed * n * k / peak_flops(gpu, "fp8" if width == 1 else "bf16")
                yield cast_s + roofline_s(c, memory_s, compute_s), float(row["latency_ms"]) / 1e3

    assert median_error(pairs()) < 0.08


@pytest.mark.parametrize("name", SYSTEMS)
def test_the_script_fits_what_is_shipped(name: str) -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "fit_kernels.py"))
    written = json.loads((script["OUT"] / f"{name}.json").read_text())
    found = numbers(script["kernels"](name))
    assert found.keys() == numbers(written["kernels"]).keys()
    assert found == pytest.approx(numbers(written["kernels"]), rel=0.02)


def numbers(tree: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """The leaves that are numbers, by their path."""
    found = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            found |= numbers(value, f"{prefix}{key}.")
        elif not isinstance(value, str):
            found[prefix + key] = value
    return found


@pytest.mark.parametrize("name", SYSTEMS)
@pytest.mark.parametrize("num_gpus", [2, 4, 8])
def test_all_reduces(name: str, num_gpus: int) -> None:
    gpu = catalog.gpu(name)
    c = catalog.coefficients(name, "vllm-0.15").kernels.all_reduce[str(num_gpus)]

    fastest: dict[float, float] = {}
    for row in rows("aic_comm", SYSTEMS[name]):
        nccl = row["kernel_source"] == "NCCL" and row["nccl_dtype"] == "half"
        ours = row["op_name"] == "all_reduce" and int(row["num_gpus"]) == num_gpus
        if ours and (nccl or row["kernel_source"] == "vLLM_custom_graph"):
            size = float(row["message_size"])
            fastest[size] = min(fastest.get(size, 1e9), float(row["latency_ms"]) / 1e3)

    def pairs() -> Iterator[tuple[float, float]]:
        for size, measured_s in fastest.items():
            wire_s = 2 * (num_gpus - 1) / num_gpus * size / (gpu.link_bytes_per_s * c.link_efficiency)
            yield c.latency_s + c.ramp_s_per_sqrt_byte * sqrt(size) + wire_s, measured_s

    assert median_error(pairs()) < 0.08


@pytest.mark.parametrize("name", SYSTEMS)
def test_decode_attention(name: str) -> None:
    gpu, c = catalog.gpu(name), catalog.coefficients(name, "vllm-0.15").kernels.decode_attention

    def pairs() -> Iterator[tuple[float, float]]:
        for row in rows("aic_attn_generation_vllm_hd128_bf16", SYSTEMS[name]):
            kv, heads = int(row["num_key_value_heads"]), int(row["num_heads"])
            num_bytes = 4.0 * 128 * kv * int(row["batch_size"]) * (int(row["step"]) + 1)
            if num_bytes > 96e6 and heads <= 8 * kv:
                read_s = num_bytes / (gpu.bandwidth_bytes_per_s * c.memory_efficiency)
                yield c.latency_s + read_s, float(row["latency_ms"]) / 1e3

    assert median_error(pairs()) < 0.08


@pytest.mark.parametrize("name", SYSTEMS)
def test_prefill_attention(name: str) -> None:
    gpu, c = catalog.gpu(name), catalog.coefficients(name, "vllm-0.15").kernels.prefill_attention

    def pairs() -> Iterator[tuple[float, float]]:
        for row in rows("aic_attn_context_vllm_hd128_bf16", SYSTEMS[name]):
            n = int(row["isl"])
            flops = 4 * int(row["batch_size"]) * int(row["num_heads"]) * 128 * n
            if flops * n / 2 / gpu.peak_flops["bf16"] > 50e-6:
                found_s = flops * (n + c.tile_tokens) / 2 / (gpu.peak_flops["bf16"] * c.compute_efficiency)
                yield found_s, float(row["latency_ms"]) / 1e3

    assert median_error(pairs()) < 0.08


def test_time_per_output_token_of_served_models() -> None:
    """vLLM 0.15.1 on H100 at its mean concurrency, decoding alone: within 12% everywhere, 6% in the mean."""
    path = Path(os.environ["HEADWAY_DATA"]) / "measured" / "vllm015_serving_train.csv"
    errors = []
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            if row["stage"] == "summary" or row["exp_id"] == "67":
                continue
            scout = row["model"].startswith("RedHatAI/Llama-4-Scout")
            model = replace(catalog.model("llama-4-scout"), dtype="fp8") if scout else catalog.model(row["model"])
            step = StepModel(model, catalog.gpu("h100"), catalog.engine("vllm-0.15"), Parallel(tp=int(row["tp"])))
            num = round(float(row["mean_concurrency_est"]))
            prompt = int(row["sys_prompt_len"]) + int(row["question_len"])
            context = num * (prompt + int(row["output_len"]) // 2)
            found_s = step.line(num, context, window_tokens=context)[0]
            errors.append(abs(found_s / (float(row["tpot_from_e2e_ms"]) / 1e3) - 1))
    assert max(errors) < 0.14
    assert sum(errors) / len(errors) < 0.06
