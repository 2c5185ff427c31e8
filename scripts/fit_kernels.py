# ruff: noqa: T201 (a script prints)
"""Fits the kernels' coefficients on measured operator tables and writes catalog/data/coefficients/<gpu>.json.

    HEADWAY_DATA=... python scripts/fit_kernels.py [gpu ...]
    HEADWAY_DATA=... python scripts/fit_kernels.py --held-out [gpu ...]

Reads measured/aic_*.csv.gz (AIConfigurator's operator tables, Apache-2.0). Engines' overheads that the
files already hold are kept. With --held-out, every fit leaves out a fifth of its rows and is scored on
those, and nothing is written. Needs SciPy.
"""

from __future__ import annotations

import csv
import gzip
import json
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from headway import catalog

DATA = Path(os.environ["HEADWAY_DATA"]) / "measured"
OUT = Path(__file__).parent.parent / "src/headway/catalog/data/coefficients"
SYSTEMS = {
    "a100-80gb": ("a100_sxm", ["a100-40gb", "a800-80gb-sxm", "a800-80gb-pcie"]),
    "h100-80gb-sxm": ("h100_sxm", ["h100-96gb-sxm", "h800-80gb-sxm", "h20-96gb", "b200-180gb-sxm"]),
    "h200-141gb-sxm": ("h200_sxm", []),
    "l40s": ("l40s", ["l4", "rtx-4090", "a10"]),
}
SOURCE = "fitted on AIConfigurator's operator tables (ai-dynamo/aiconfigurator, Apache-2.0), vLLM {vllm} kernels"
HELD_OUT = "--held-out" in sys.argv
L2_RESIDENT_BYTES = 96e6
MOST_FLOORS = 2.0
"""Starting and ending a long decoding kernel takes no more than this many of the shortest kernels."""
Row = dict[str, str]
Fit = tuple[dict[str, float], float]


@cache
def table(name: str) -> list[Row]:
    with gzip.open(DATA / f"{name}.csv.gz", "rt") as file:
        return list(csv.DictReader(file))


def column(rows: list[Row], name: str) -> np.ndarray:
    return np.array([float(row[name]) for row in rows])


def fit(model: Callable[[np.ndarray], np.ndarray], start: list[float], low: list[float], high: list[float],
        seconds: np.ndarray) -> tuple[np.ndarray, float]:  # fmt: skip
    """Robust least squares on relative error; the parameters, and the median absolute relative error."""
    used = scored = np.ones(len(seconds), dtype=bool)
    if HELD_OUT:
        used = np.random.default_rng(0).random(len(seconds)) >= 0.2
        scored = ~used
    found = least_squares(lambda p: np.log(model(p) / seconds)[used], start, bounds=(low, high), loss="soft_l1",
                          f_scale=0.05, x_scale=np.maximum(np.abs(start), 1e-9))  # fmt: skip
    return found.x, float(np.median(np.abs(model(found.x) / seconds - 1)[scored]))


def roofline(p: np.ndarray, memory_s: np.ndarray, compute_s: np.ndarray) -> np.ndarray:
    return p[0] * 1e-6 + ((memory_s / p[1]) ** p[3] + (compute_s / p[2]) ** p[3]) ** (1 / p[3])


def fit_gemm(gpu: Any, system: str, dtype: str) -> Fit | None:
    name = {"bf16": "bfloat16"}.get(dtype, dtype)
    rows = [r for r in table("aic_gemm_vllm") if r["system"] == system and r["gemm_dtype"] == name
            and int(r["n"]) >= 512 and int(r["k"]) >= 512 and int(r["n"]) * int(r["k"]) >= 4e6]  # fmt: skip
    if not rows or dtype not in gpu.peak_flops:
        return None
    m, n, k, seconds = (column(rows, c) for c in ("m", "n", "k", "latency_ms"))
    width = 1.0 if dtype == "fp8" else 2.0
    memory_s = (n * k * width + m * k * width + m * n * 2) / gpu.bandwidth_bytes_per_s
    compute_s = 2 * m * n * k / gpu.peak_flops[dtype]
    if dtype == "fp8":
        cast_s = 3 * m * k / gpu.bandwidth_bytes_per_s
        start, low, high = [5, 0.8, 0.6, 3, 0.3], [0, 0.2, 0.2, 1, 0.03], [40, 1, 1, 12, 1]
        p, error = fit(lambda p: cast_s / p[4] + roofline(p, memory_s, compute_s), start, low, high, seconds / 1e3)
    else:
        start, low, high = [4, 0.8, 0.75, 4], [0, 0.2, 0.2, 1], [40, 1, 1, 12]
        p, error = fit(lambda p: roofline(p, memory_s, compute_s), start, low, high, seconds / 1e3)
    found = dict(latency_s=p[0] * 1e-6, memory_efficiency=p[1], compute_efficiency=p[2], sharpness=p[3])
    return found | (dict(cast_efficiency=p[4]) if dtype == "fp8" else {}), error


MOE_DTYPES = {
    "bf16": ("bfloat16", "bf16", 2.0),
    "fp8": ("fp8_block", "fp8", 1.0),
    "int4": ("w4a16_mxfp4", "bf16", 4.25 / 8),
}


def fit_moe(gpu: Any, system: str, dtype: str) -> Fit | None:
    name, compute, width = MOE_DTYPES[dtype]
    rows = [r for r in table("aic_moe_vllm") if r["system"] == system and r["moe_dtype"] == name
            and r["moe_ep_size"] == "1"]  # fmt: skip
    balanced = [r for r in rows if r["distribution"] == "balanced"]
    rows = balanced or [r for r in rows if r["distribution"] == "power_law_1.01"]
    if not rows or compute not in gpu.peak_flops:
        return None
    names = ("num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "latency_ms")
    t, h, i, k, e, tp, seconds = (column(rows, c) for c in names)
    touched = np.minimum(e, t * k) if balanced else e * (1 - (1 - k / e) ** t)
    weights = 3 * h * i / tp
    memory_s = touched * weights * width / gpu.bandwidth_bytes_per_s

    def model(p: np.ndarray) -> np.ndarray:
        compute_s = 2 * (t * k + touched * p[4]) * weights / gpu.peak_flops[compute]
        return roofline(p, memory_s, compute_s)

    p, error = fit(model, [20, 0.7, 0.5, 3, 16], [0, 0.1, 0.05, 1, 0], [200, 1, 1, 12, 128], seconds / 1e3)
    return dict(latency_s=p[0] * 1e-6, memory_efficiency=p[1], compute_efficiency=p[2], sharpness=p[3],
                tile_tokens=p[4]), error  # fmt: skip


def fit_prefill(gpu: Any, system: str) -> Fit:
    rows = [r for r in table("aic_attn_context_vllm_hd128_bf16") if r["system"] == system]
    b, n, heads, seconds = (column(rows, c) for c in ("batch_size", "isl", "num_heads", "latency_ms"))
    flops = 4 * b * heads * 128 * n
    large = flops * n / 2 / gpu.peak_flops["bf16"] > 50e-6
    seconds, flops, n = seconds[large] / 1e3, flops[large], n[large]
    p, error = fit(lambda p: flops * (n + p[1]) / 2 / (gpu.peak_flops["bf16"] * p[0]), [0.5, 256], [0.05, 0],
                   [1, 2048], seconds)  # fmt: skip
    return dict(compute_efficiency=p[0], tile_tokens=p[1]), error


def fit_decode(gpu: Any, system: str) -> Fit:
    rows = [r for r in table("aic_attn_generation_vllm_hd128_bf16") if r["system"] == system]
    b, step, heads, kv, seconds = (
        column(rows, c) for c in ("batch_size", "step", "num_heads", "num_key_value_heads", "latency_ms")
    )
    num_bytes = 4.0 * 128 * kv * b * (step + 1)
    seconds = seconds / 1e3
    floor = float(np.median(seconds[(b <= 64) & (step <= 63)]))
    usual = (num_bytes > L2_RESIDENT_BYTES) & (heads / kv <= 8)
    read_s = num_bytes[usual] / gpu.bandwidth_bytes_per_s
    p, error = fit(lambda p: floor * p[1] + read_s / p[0], [0.8, 1.2], [0.1, 1], [1, MOST_FLOORS], seconds[usual])
    return dict(latency_s=floor * p[1], memory_efficiency=float(p[0]), compute_efficiency=0.4), error


def fit_all_reduce(gpu: Any, system: str, num_gpus: int) -> Fit:
    best: dict[float, float] = {}
    for r in table("aic_comm"):
        if r["system"] != system or r["op_name"] != "all_reduce" or int(r["num_gpus"]) != num_gpus:
            continue
        if r["kernel_source"] == "vLLM_custom_graph" or (r["kernel_source"] == "NCCL" and r["nccl_dtype"] == "half"):
            size = float(r["message_size"])
            best[size] = min(best.get(size, 1e9), float(r["latency_ms"]) / 1e3)
    size, seconds = np.array(list(best)), np.array(list(best.values()))
    wire_s = 2 * (num_gpus - 1) / num_gpus * size / gpu.link_bytes_per_s

    def model(p: np.ndarray) -> np.ndarray:
        return p[0] * 1e-6 + p[1] * 1e-9 * np.sqrt(size) + wire_s / p[2]

    p, error = fit(model, [5, 5, 0.7], [0, 0, 0.01], [100, 1000, 1], seconds)
    return dict(latency_s=p[0] * 1e-6, ramp_s_per_sqrt_byte=p[1] * 1e-9, link_efficiency=p[2]), error


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    return (float(f"{value:.4g}") if value > 1e-15 else 0.0) if isinstance(value, float) else value


def kernels(name: str, system: str) -> dict[str, Any]:
    gpu = catalog.gpu(name)
    fits: dict[str, Fit | None] = {f"gemm.{d}": fit_gemm(gpu, system, d) for d in ("bf16", "fp8")}
    fits |= {f"moe.{d}": fit_moe(gpu, system, d) for d in MOE_DTYPES}
    fits |= {f"all_reduce.{n}": fit_all_reduce(gpu, system, n) for n in (2, 4, 8)}
    fits |= {"prefill_attention": fit_prefill(gpu, system), "decode_attention": fit_decode(gpu, system)}
    found: dict[str, Any] = {"gemm": {}, "moe": {}, "all_reduce": {}}
    for key, one in fits.items():
        if one is not None:
            group, _, entry = key.partition(".")
            if entry:
                found[group][entry] = one[0]
            else:
                found[group] = one[0]
    found["elementwise_efficiency"] = 0.7
    found["residuals"] = {key: one[1] for key, one in fits.items() if one is not None}
    vllm = sorted({r["vllm"] for r in table("aic_gemm_vllm") if r["system"] == system})
    found["source"] = SOURCE.format(vllm=", ".join(vllm)) + "; elementwise efficiency taken, not fitted"
    return dict(rounded(found))


def main() -> None:
    for name in [given for given in sys.argv[1:] if given != "--held-out"] or SYSTEMS:
        system, like = SYSTEMS[name]
        found = kernels(name, system)
        print(name, json.dumps(found["residuals"]))
        if not HELD_OUT:
            path = OUT / f"{name}.json"
            old = json.loads(path.read_text()) if path.exists() else {}
            new = {"gpus": [name], "like": like, "kernels": found, "engines": old.get("engines", {})}
            path.write_text(json.dumps(new, indent=1) + "\n")


if __name__ == "__main__":
    main()
