"""Made-up measurements that follow known coefficients, for the tests of calibration."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from headway import catalog
from headway.calibration.replay import replay
from headway.calibration.runs.experiment import experiment
from headway.calibration.runs.run import MeasuredRun, latencies_s
from headway.calibration.serving import ServingExperiment
from headway.core.fleet import Pool
from headway.perf.roofline import roofline_s

GPU = catalog.gpu("h100")
KNOWN = catalog.coefficients("h100-80gb-sxm", "vllm-0.15")
KERNELS = KNOWN.kernels
TRUE = replace(KNOWN, overhead=replace(KNOWN.overhead, step_s=0.002, layer_s=2e-5, sequence_s=4e-5))
Row = dict[str, object]


def write(path: Path, rows: Sequence[Row]) -> Path:
    """As CSV, columns as in the first row."""
    lines = [",".join(rows[0]), *(",".join(str(value) for value in row.values()) for row in rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


def noise(num: int, share: float = 0.01) -> Iterable[float]:
    """Factors around 1."""
    return iter(np.exp(np.random.default_rng(7).normal(0.0, share, num)))


def gemm(system: str = "h100_sxm", dtype: str = "bfloat16") -> list[Row]:
    """A GEMM table with the catalog's coefficients of H100."""
    shapes = [(m, n, k) for m in (1, 16, 64, 256, 1024, 4096, 8192) for n in (2048, 4096, 14336) for k in (4096, 8192)]
    factor, rows = noise(len(shapes)), []
    for m, n, k in shapes:
        memory_s = 2 * (n * k + m * k + m * n) / GPU.bandwidth_bytes_per_s
        seconds = roofline_s(KERNELS.gemm["bf16"], memory_s, 2 * m * n * k / GPU.peak_flops["bf16"]) * next(factor)
        rows.append(
            {"gemm_dtype": dtype, "m": m, "n": n, "k": k, "latency_ms": seconds * 1e3, "system": system, "vllm": "1.0"}
        )
    return rows


def attention(system: str = "h100_sxm") -> list[Row]:
    """Prefill and decode attention with the catalog's coefficients of H100."""
    rows = []
    prefill = [(b, n, h) for b in (1, 2, 4) for n in (2048, 4096, 8192) for h in (32, 64)]
    decode = [(b, c, h) for b in (1, 8, 32, 64, 128) for c in (2, 64, 2048, 8192, 16384) for h in (32, 64)]
    factor = noise(len(prefill) + len(decode))
    c = KERNELS.prefill_attention
    for batch, new, heads in prefill:
        pairs = batch * heads * 128 * new * (new + c.tile_tokens) / 2
        seconds = 4 * pairs / (GPU.peak_flops["bf16"] * c.compute_efficiency)
        rows.append(_attention(batch, new, 0, heads, seconds * next(factor), system))
    d = KERNELS.decode_attention
    for batch, context, heads in decode:
        num_bytes = 4 * 128 * 8 * batch * context
        seconds = d.latency_s + num_bytes / (GPU.bandwidth_bytes_per_s * d.memory_efficiency)
        rows.append(_attention(batch, 1, context - 1, heads, seconds * next(factor), system))
    return rows


def _attention(batch: int, new: int, step: int, heads: int, seconds: float, system: str) -> Row:
    return {
        "kernel_source": "made_up",
        "batch_size": batch,
        "isl": new,
        "step": step,
        "num_heads": heads,
        "num_key_value_heads": 8,
        "latency_ms": seconds * 1e3,
        "system": system,
        "vllm": "1.0",
    }


def all_reduce(num_gpus: int = 4, system: str = "h100_sxm") -> list[Row]:
    """A table of all-reduces with the catalog's coefficients of H100."""
    c = KERNELS.all_reduce[str(num_gpus)]
    rows, sizes = [], [2**i for i in range(7, 30)]
    factor = noise(len(sizes))
    for size in sizes:
        wire_s = 2 * (num_gpus - 1) / num_gpus * size / (GPU.link_bytes_per_s * c.link_efficiency)
        seconds = (c.latency_s + c.ramp_s_per_sqrt_byte * size**0.5 + wire_s) * next(factor)
        rows.append(
            {
                "system": system,
                "src": "made up",
                "op_name": "all_reduce",
                "kernel_source": "NCCL",
                "backend": "",
                "allreduce_dtype": "",
                "nccl_dtype": "half",
                "num_gpus": num_gpus,
                "message_size": size,
                "latency_ms": seconds * 1e3,
            }
        )
    return rows


def runs(models: tuple[str, ...] = ("llama-3.1-8b", "qwen2.5-7b"), num: int = 6) -> list[MeasuredRun]:
    """Runs of `vllm bench serve` at rising rates, whose latencies follow `TRUE`; greedy, as it asks for."""
    return list(_runs(models, num))


@cache  # many tests ask for the same ones, which are simulated
def _runs(models: tuple[str, ...], num: int) -> tuple[MeasuredRun, ...]:
    found = []
    for name in models:
        model = catalog.model(name)
        for i in range(num):
            rate = 0.5 * 2**i
            latencies = latencies_s({"ttft_mean": 0.05, "tpot_mean": 0.01}, 256)
            run = MeasuredRun(
                f"{name} {i}", model.hf_id, 200, rate, 512, 256, latencies, requested_rps=rate, is_greedy=True
            )
            pool = Pool("measured", model, GPU, catalog.engine("vllm-0.15"))
            simulated = replay(experiment(run, pool), (0,), coefficients=TRUE).overall
            given = {"ttft_mean": simulated.ttft_ms.mean() / 1e3, "tpot_mean": simulated.tpot_ms.mean() / 1e3}
            found.append(replace(run, latencies_s=latencies_s({k: float(v) for k, v in given.items()}, 256)))
    return tuple(found)


def experiments(models: tuple[str, ...] = ("llama-3.1-8b", "qwen2.5-7b"), num: int = 6) -> list[ServingExperiment]:
    """The same as experiments on one H100."""
    pools = {name: Pool("measured", catalog.model(name), GPU, catalog.engine("vllm-0.15")) for name in models}
    return [experiment(run, pools[run.where.split()[0]]) for run in runs(models, num)]
