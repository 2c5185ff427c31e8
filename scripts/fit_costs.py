# ruff: noqa: T201 (a script prints)
"""Fits what copies, cold starts and watts cost, and writes src/headway/catalog/data/costs.json.

    HEADWAY_DATA=... python scripts/fit_costs.py

Needs SciPy. Reads measured/kv_transfer_mooncake_h800, cold_start_model_load, mlenergy_llm and
aic_h200_gemm_power_vllm022. Prints every residual; they are in the file, too.
"""

from __future__ import annotations

import csv
import gzip
import os
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace
from scipy.optimize import nnls

from headway import catalog
from headway.catalog.costs import ColdStart, Costs, HostLink, Power, Transfer
from headway.core.errors import HeadwayError
from headway.core.fleet import Model
from headway.perf.coldstart import start_s
from headway.perf.power import decode_shares

DATA = Path(os.environ["HEADWAY_DATA"]) / "measured"
OUT = Path(__file__).parent.parent / "src/headway/catalog/data/costs.json"
GIB = 2**30
DTYPES = {"bfloat16": "bf16", "fp8": "fp8", "mxfp4": "int4"}
TEXT = ("lm-arena-chat", "gpqa", "sourcegraph-fim")
LONG_KERNEL_S = 1e-4
START_SOURCE = (
    "download, load, graphs: surajssd/llm-k8s with vLLM 0.8.3 on A100-40GB; streams: run-ai/runai-model-streamer on one"
    " A10G; compile, other start: one run of Qwen3-14B, told at second hand. A handful of runs: orders of magnitude"
)
Floats = npt.NDArray[np.float64]
Row = dict[str, str]


def rows(name: str) -> list[Row]:
    with gzip.open(DATA / f"{name}.csv.gz", "rt") as file:
        return list(csv.DictReader(file))


def digits(value: float) -> float:
    return float(f"{value:.4g}")


def kv_transfer() -> Transfer:
    """A line by relative least squares, over transfers that are not mere latency."""
    table = rows("kv_transfer_mooncake_h800")
    size = np.array([float(r["kv_bytes_calc"]) for r in table])
    seconds = np.array([float(r["transfer_ms"]) for r in table]) / 1e3
    design = np.c_[np.ones(len(size)), size] / seconds[:, None]
    (latency, slope), _ = nnls(design * [1, 1e9], np.ones(len(size)))
    slope *= 1e9
    errors = abs((latency + slope * size) / seconds - 1)
    return Transfer(
        digits(latency), digits(slope),
        {"median": digits(np.median(errors)), "mean": digits(errors.mean()), "max": digits(errors.max())},
        "kvcache-ai/Mooncake (Apache-2.0): between instances on H800, 144 KiB of KV a token, 19 MB to 4.8 GB",
    )  # fmt: skip


def cold_start() -> ColdStart:
    """Medians of the parts that were measured; the totals that were measured too say how far off that is."""
    table = rows("cold_start_model_load")

    def found(model: str, *words: str) -> list[float]:
        return [float(r["seconds"]) for r in table if model in r["model"] and all(w in r["phase"] for w in words)]

    llama_bytes, deepseek_bytes = 8 * 16.46 * GIB, 16 * 28.0 * GIB
    loads, downloads = found("Llama-3.3", "load only"), found("Llama-3.3", "download+load")
    deepseek_load, deepseek_download = found("DeepSeek", "load only")[0], found("DeepSeek", "download+load")[0]
    rates = [llama_bytes / (both - load) for both, load in zip(downloads, loads, strict=True)]
    rates.append(deepseek_bytes / (deepseek_download - deepseek_load))
    total = found("Llama-3.3", "total")[0] - downloads[0]
    init = [total - found("Llama-3.3", "graph capture")[0], found("Qwen3-14B", "other init")[0]]
    graphs = [*found("Llama-3.3", "graph capture"), *found("Qwen3-14B", "graph capture")]
    streams = {r["storage_path"]: 15 * GIB / float(r["seconds"]) for r in table if r["phase"] == "weights -> GPU"}
    cost = ColdStart(
        download_bytes_per_s=digits(median(rates)),
        local_bytes_per_s_gpu=digits(median(llama_bytes / 8 / s for s in loads)),
        stream_bytes_per_s={name.removeprefix("AWS ").lower(): digits(rate) for name, rate in streams.items()},
        init_s=digits(median(init)), graphs_s=digits(median(graphs)), compile_s=found("Qwen3-14B", "compile")[0],
        residuals={},
        source=START_SOURCE,
    )  # fmt: skip
    qwen = sum(found("Qwen3-14B", word)[0] for word in ("compile", "graph capture", "other init"))
    residuals = {
        "start of Llama-3.3-70B, graphs": digits(start_s(cost) / total - 1),
        "start of Qwen3-14B, graphs and compile": digits(start_s(cost, compiled=False) / qwen - 1),
        "slowest rank's load of DeepSeek-V2.5": digits(28 * GIB / cost.local_bytes_per_s_gpu / deepseek_load - 1),
        "spread of the download rates": digits(max(rates) / min(rates) - 1),
    }
    return replace(cost, residuals=residuals)


def serving(gpu_name: str) -> Iterator[tuple[str, float, float, float]]:
    """(model, memory share, compute share, watts of a GPU) of text tasks of models that the catalog knows."""
    for r in rows("mlenergy_llm"):
        if r["gpu_model"].lower() != gpu_name or r["task"] not in TEXT:
            continue
        try:
            model: Model = replace(catalog.model(r["model_id"]), dtype=DTYPES[r["weight_precision"]])
        except HeadwayError:
            continue
        num_gpus, batch = int(r["num_gpus"]), float(r["avg_batch_size"])
        context = float(r["avg_output_len"]) / 2
        rate = float(r["output_throughput_tokens_per_sec"])
        memory, compute = decode_shares(model, catalog.gpu(gpu_name), num_gpus, batch, context, rate)
        yield model.name, memory, compute, float(r["avg_power_watts"]) / num_gpus


def kernels() -> Iterator[tuple[str, float, float, float]]:
    """The same of bf16 matrix products on H200, of those that last long enough for the meter."""
    gpu = catalog.gpu("h200")
    for r in rows("aic_h200_gemm_power_vllm022"):
        m, n, k = int(r["m"]), int(r["n"]), int(r["k"])
        seconds = float(r["latency_ms"]) / 1e3
        if seconds > LONG_KERNEL_S:
            memory = 2 * (m * n + n * k + m * k) / seconds / gpu.bandwidth_bytes_per_s
            yield str(n), memory, 2 * m * n * k / seconds / gpu.peak_flops["bf16"], float(r["power_w"])


def power(gpu_name: str, points: list[tuple[str, float, float, float]], on: str, source: str) -> Power:
    """Least squares without negative terms, and what it says of groups (models) that were left out."""
    gpu = catalog.gpu(gpu_name)
    group = np.array([p[0] for p in points])
    memory, compute, watts = (np.array([p[i] for p in points]) for i in (1, 2, 3))
    design = np.c_[np.ones(len(watts)), memory, np.sqrt(compute)]

    def errors(fit_on: npt.NDArray[np.bool_], test_on: npt.NDArray[np.bool_]) -> Floats:
        found, _ = nnls(design[fit_on], watts[fit_on])
        return abs(np.minimum(design[test_on] @ found, gpu.watts) / watts[test_on] - 1)

    everything = np.ones(len(watts), dtype=np.bool_)
    own = errors(everything, everything)
    left_out = np.concatenate([errors(group != name, group == name) for name in sorted(set(group))])
    (base, per_memory, per_compute), _ = nnls(design, watts)
    residuals = {
        "median": np.median(own),
        "mean": own.mean(),
        "p90": np.quantile(own, 0.9),
        "left_out": left_out.mean(),
    }
    residuals = {name: digits(float(value)) for name, value in residuals.items()} | {"points": len(points)}
    return Power(
        (gpu.name,), digits(base), digits(per_memory), digits(per_compute), gpu.watts, on, residuals, source
    )  # fmt: skip


def main() -> None:
    energy = "ml-energy/leaderboard, text tasks of models in the catalog; prompts are not known and count as empty"
    gemms = (
        "ai-dynamo/aiconfigurator (Apache-2.0): bf16 matrix products of 0.1 ms and more with vLLM 0.22;"
        " left_out = by output width"
    )
    costs = Costs(
        kv_transfer={"mooncake-h800": kv_transfer()},
        host_link=HostLink(20e-6, 0.8, "nominal: what large pinned copies usually reach of PCIe; not fitted"),
        cold_start=cold_start(),
        power=(
            power("h100-80gb-sxm", list(serving("h100")), "serving", energy),
            power("b200-180gb-sxm", list(serving("b200")), "serving", energy),
            power("h200-141gb-sxm", list(kernels()), "kernels", gemms),
        ),
    )  # fmt: skip
    text = msgspec.json.format(msgspec.json.encode(costs), indent=1).decode()
    OUT.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
