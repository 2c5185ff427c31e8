"""Times of operators at the GPU's peaks. They are lower bounds that check measurements, and the basis of the fits."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from headway.calibration.operators import Floats, OperatorSamples, count_skipped
from headway.core.errors import HeadwayError
from headway.core.fleet import Gpu
from headway.perf.params import WEIGHT_BYTES
from headway.perf.roofline import peak_flops

CACHE_SPEED = 12.0
"""Assumed speed-up of caches over memory. Small operands stay in a cache between repeated measurements."""
SAMPLER = ("top_p_sort", "top_p", "penalties")
PASSES = {"top_p_sort": 32.0, "top_p": 4.0, "penalties": 8.0}
"""Approximate passes over the logits, and separately launched kernels, in one step of the sampler. Sorting a vocabulary
takes several passes over keys and indices. On an H100 the median of `top_p_sort` is 64 times one pass."""
LOGIT_BYTES = 8
"""Minimum bytes of a pass over logits: one read and one write of each."""
LAUNCH_S = 5e-6
"""Approximate launch time of any kernel, used only to detect wrong units."""
UNIT = 60.0
"""Largest plausible ratio of a table's times to the peaks. A larger ratio means another unit or GPU: units differ by a
factor of 1,000."""
MIXED = 150.0
"""Largest plausible ratio of a row to the median of its table. A larger ratio means another unit."""


class Peaks(NamedTuple):
    """Times at the peaks, by row."""

    memory_s: Floats
    """Time at the peak bandwidth, or at the link's rate for collectives and host copies."""
    compute_s: Floats


def peaks(samples: OperatorSamples, gpu: Gpu) -> Peaks:
    """Lower bounds for moving the bytes and computing the FLOPs of each row."""
    s = samples.shape
    zero = np.zeros(len(samples.seconds))
    if samples.kind == "gemm":
        width = WEIGHT_BYTES[samples.dtype]
        num_bytes = s["n"] * s["k"] * width + s["m"] * s["k"] * width + s["m"] * s["n"] * 2
        flops = 2 * s["m"] * s["n"] * s["k"] / peak_flops(gpu, samples.dtype)
        return Peaks(num_bytes / gpu.bandwidth_bytes_per_s, flops)
    if samples.kind == "moe":
        weights = expert_weights(samples)
        num_bytes = touched_experts(samples) * weights * WEIGHT_BYTES[samples.dtype]
        flops = 2 * s["num_tokens"] * s["experts_per_token"] * weights / peak_flops(gpu, moe_compute(samples.dtype))
        return Peaks(num_bytes / gpu.bandwidth_bytes_per_s, flops)
    if samples.kind == "prefill_attention":
        new, before = s["new_tokens"], s["context_tokens"]
        flops = 4 * s["batch_size"] * s["num_heads"] * s["head_dim"] * new * (before + new / 2)
        num_bytes = 4 * s["batch_size"] * s["num_kv_heads"] * s["head_dim"] * (before + new)
        return Peaks(num_bytes / gpu.bandwidth_bytes_per_s, flops / peak_flops(gpu, "bf16"))
    if samples.kind == "decode_attention":
        return Peaks(kv_bytes(samples) / gpu.bandwidth_bytes_per_s, zero)
    if samples.kind == "mla_attention":
        pairs = s["batch_size"] * s["context_tokens"]
        flops = 2 * pairs * s["num_heads"] * (2 * s["kv_lora_rank"] + s["rope_head_dim"])
        num_bytes = 2 * pairs * (s["kv_lora_rank"] + s["rope_head_dim"])
        return Peaks(num_bytes / gpu.bandwidth_bytes_per_s, flops / peak_flops(gpu, "bf16"))
    if samples.kind in SAMPLER:
        return Peaks(LOGIT_BYTES * s["batch_size"] * s["vocab_size"] / gpu.bandwidth_bytes_per_s, zero)
    if samples.kind == "all_reduce":
        n = s["num_gpus"]
        return Peaks(2 * (n - 1) / n * s["num_bytes"] / gpu.link_bytes_per_s, zero)
    if samples.kind == "device_copy":
        return Peaks(2 * s["num_bytes"] / gpu.bandwidth_bytes_per_s, zero)
    return Peaks(s["num_bytes"] / gpu.host_link_bytes_per_s, zero)


def kv_bytes(samples: OperatorSamples) -> Floats:
    """Bytes of the 16-bit KV cache that decoding attention reads."""
    s = samples.shape
    return 4 * s["head_dim"] * s["num_kv_heads"] * s["batch_size"] * s["context_tokens"]


def expert_weights(samples: OperatorSamples) -> Floats:
    """Parameters of one expert on one GPU."""
    s = samples.shape
    return 3 * s["hidden_size"] * s["intermediate_size"] / s["tp"]


def touched_experts(samples: OperatorSamples) -> Floats:
    """Number of experts that the tokens of a batch choose."""
    s = samples.shape
    e, k, t = s["num_experts"], s["experts_per_token"], s["num_tokens"]
    return np.asarray(np.where(s["balanced"] > 0, np.minimum(e, t * k), e * (1 - (1 - k / e) ** t)))


def moe_compute(dtype: str) -> str:
    """The compute dtype of experts with weights of `dtype`."""
    return "fp8" if dtype == "fp8" else "bf16"


def plausible(samples: OperatorSamples, gpu: Gpu, left_out: dict[str, int], file: str) -> OperatorSamples:
    """The physically possible rows. Other rows are counted by reason in `left_out`.

    Raises HeadwayError if most rows are faster than the GPU's peaks, or the median shows a wrong unit.
    """
    at_peak = peaks(samples, gpu)
    least_s = np.maximum(at_peak.memory_s / CACHE_SPEED, at_peak.compute_s)
    bound_s = LAUNCH_S + np.maximum(at_peak.memory_s, at_peak.compute_s)
    ratio = samples.seconds / (PASSES.get(samples.kind, 1.0) * bound_s)
    usual = float(np.median(ratio))
    impossible = samples.seconds < least_s
    where = f"{file}: {samples.key}"
    if impossible.mean() > 0.5 or usual < 1 / UNIT:
        raise HeadwayError(
            f"{where}: {impossible.sum():,} of {len(ratio):,} rows are faster than the peaks of {gpu.name} allow "
            f"(median {usual:.2g} of the bound); is the unit right, and the GPU?"
        )
    if usual > UNIT:
        raise HeadwayError(
            f"{where}: latencies are {usual:,.0f} times what the peaks of {gpu.name} imply (median); is the unit right,"
            " and the GPU?"
        )
    mixed = (ratio > usual * MIXED) | (ratio < usual / MIXED)
    count_skipped(left_out, f"{samples.key}: far from the rest (mixed units?)", mixed)
    count_skipped(left_out, f"{samples.key}: faster than the GPU's peaks", impossible & ~mixed)
    return samples.only(~(mixed | impossible))
