"""The roofline of a kernel: the larger of its memory and compute times, with efficiencies, and a GPU's peaks."""

from __future__ import annotations

from headway.catalog.coefficients import Roofline
from headway.core.errors import HeadwayError
from headway.core.fleet import Gpu


def roofline_s(c: Roofline, memory_s: float, compute_s: float) -> float:
    """Seconds of a product that takes `memory_s` and `compute_s` at the GPU's peaks."""
    memory_s, compute_s = memory_s / c.memory_efficiency, compute_s / c.compute_efficiency
    high, low = (memory_s, compute_s) if memory_s > compute_s else (compute_s, memory_s)
    if high == 0.0:
        return c.latency_s
    return c.latency_s + float(high * (1.0 + (low / high) ** c.sharpness) ** (1.0 / c.sharpness))


def compute_dtype(dtype: str, gpu: Gpu) -> str:
    """The compute dtype for weights of `dtype`: fp8 for 8-bit weights if the GPU supports it, otherwise bf16."""
    return "fp8" if dtype in ("fp8", "int8") and "fp8" in gpu.peak_flops else "bf16"


def peak_flops(gpu: Gpu, dtype: str) -> float:
    """Peak FLOP/s of a dtype, or else of bf16, or else of fp16. Raises HeadwayError if none is listed."""
    for name in (dtype, "bf16", "fp16"):
        if name in gpu.peak_flops:
            return gpu.peak_flops[name]
    raise HeadwayError(f"GPU {gpu.name}: peak_flops lists none of {dtype}, bf16, fp16")
