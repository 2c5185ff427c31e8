# ruff: noqa: T201 (a script prints)
"""Fit the costs of KV transfers and cold starts, and write src/headway/catalog/data/costs.json.

    HEADWAY_DATA=... python scripts/fit_costs.py

Needs SciPy. Reads measured/kv_transfer_mooncake_h800 and cold_start_model_load. Prints every residual and
writes it to the file.
"""

from __future__ import annotations

import csv
import gzip
import os
from pathlib import Path
from statistics import median

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace
from scipy.optimize import nnls

from headway.catalog.costs import ColdStart, Costs, HostLink, KvTransferCost
from headway.perf.copies import start_s

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


def kv_transfer() -> KvTransferCost:
    """A line by relative least squares, over transfers that are not mere latency."""
    table = rows("kv_transfer_mooncake_h800")
    size = np.array([float(r["kv_bytes_calc"]) for r in table])
    seconds = np.array([float(r["transfer_ms"]) for r in table]) / 1e3
    design = np.c_[np.ones(len(size)), size] / seconds[:, None]
    (latency, slope), _ = nnls(design * [1, 1e9], np.ones(len(size)))
    slope *= 1e9
    errors = abs((latency + slope * size) / seconds - 1)
    return KvTransferCost(
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


def main() -> None:
    costs = Costs(
        kv_transfer={"mooncake-h800": kv_transfer()},
        host_link=HostLink(20e-6, 0.8, "nominal: what large pinned copies usually reach of PCIe; not fitted"),
        cold_start=cold_start(),
    )  # fmt: skip
    text = msgspec.json.format(msgspec.json.encode(costs), indent=1).decode()
    OUT.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
