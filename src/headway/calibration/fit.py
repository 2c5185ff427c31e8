"""Fits kernel coefficients to operator latencies, with `perf`'s formulas over columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from msgspec.structs import replace

from headway.calibration.operators import Floats, OperatorSamples
from headway.calibration.peaks import expert_weights, kv_bytes, moe_compute, peaks, touched_experts
from headway.calibration.solve import Coefficient, FitResult, held_out, solve
from headway.core.errors import HeadwayError
from headway.core.fleet import Gpu
from headway.perf.operators import CAST_BYTES, TILES
from headway.perf.params import WEIGHT_BYTES
from headway.perf.roofline import peak_flops

L2_RESIDENT_BYTES = 96e6
"""Minimum bytes of the KV cache in a measurement: a smaller cache stays in the L2 cache between repetitions, unlike in
an engine."""
MATRICES_IN_TURN = 6
"""Number of matrices of one shape that AIConfigurator's collector uses in turn."""
MOST_HEADS_PER_KV_HEAD = 8
"""Maximum number of heads per KV head in a measurement: kernels for more heads are compute-bound or use padding."""
SMALL_MATRIX = 4e6
SMALL_SIDE = 512
"""Minimum side of a weight matrix: smaller matrices occur in no relevant model, but would weigh as much as the
others."""
SHORT_PREFILL_S = 50e-6
"""Minimum seconds of prefill attention at the peak: launch time dominates shorter ones."""
MIN_LATENT_TOKENS = 4_096
"""Minimum number of cached tokens for latent attention: launch time dominates for fewer."""
MIN_SHAPES = 3
"""Minimum number of shapes per coefficient."""

_EFFICIENCIES = (Coefficient("memory_efficiency", 0.8, 0.1, 1), Coefficient("compute_efficiency", 0.7, 0.02, 1))
ROOFLINE = (Coefficient("latency_s", 4, 0, 100, 1e-6), *_EFFICIENCIES, Coefficient("sharpness", 3, 1, 12))
CASTING = (*ROOFLINE, Coefficient("cast_efficiency", 0.3, 0.01, 1))
WAVES = Coefficient("wave_share", 0.3, 0, 1)
LEAST_GAIN = 0.01
"""Minimum amount by which a refinement must lower the median error of held-out shapes."""
EXPERTS = (
    Coefficient("latency_s", 20, 0, 300, 1e-6),
    *_EFFICIENCIES,
    Coefficient("sharpness", 3, 1, 12),
    Coefficient("tile_tokens", 16, 0, 256),
)
PREFILL = (Coefficient("compute_efficiency", 0.5, 0.02, 1), Coefficient("tile_tokens", 256, 0, 4096))
DECODE = (Coefficient("latency_s", 1.2, 1, 2), Coefficient("memory_efficiency", 0.8, 0.1, 1))
"""Latency is in units of the latency of the shortest contexts. A long kernel starts and ends within two such units."""
LATENT = (
    Coefficient("latency_s", 10, 0, 300, 1e-6),
    Coefficient("memory_efficiency", 0.6, 0.02, 1),
    Coefficient("compute_efficiency", 0.5, 0.02, 1),
)
"""Decoding over latent vectors, which the heads share: the larger of the times for bytes and FLOPs."""
SAMPLING = (Coefficient("latency_s", 100, 0, 10_000, 1e-6), Coefficient("bytes_per_logit", 100, 1, 100_000))
"""`bytes_per_logit`: the bytes that the GPU's peak bandwidth moves in the time of one logit."""
ALL_REDUCE = (
    Coefficient("latency_s", 5, 0, 1000, 1e-6),
    Coefficient("ramp_s_per_sqrt_byte", 5, 0, 1000, 1e-9),
    Coefficient("link_efficiency", 0.7, 0.01, 1),
)
COPY = (Coefficient("latency_s", 5, 0, 1000, 1e-6), Coefficient("efficiency", 0.7, 0.02, 1))


def roofline(p: Floats, memory_s: Floats, compute_s: Floats) -> Floats:
    """`perf.operators.roofline_s` over columns; `p` is latency, memory and compute efficiency, sharpness."""
    memory_s, compute_s = memory_s / p[1], compute_s / p[2]
    high, low = np.maximum(memory_s, compute_s), np.minimum(memory_s, compute_s)
    return np.asarray(p[0] + high * (1 + (low / high) ** p[3]) ** (1 / p[3]))


def tiled_rows(rows: Floats, out: Floats, num_sms: int, wave_share: float) -> Floats:
    """`perf.operators.tiled_rows` for many shapes at once: element i of the arrays is shape i."""
    tiles = TILES["fp8"]
    which = np.searchsorted([tile[0] for tile in tiles], rows)
    _, unit, high, wide = np.array(tiles)[which].T
    padded = unit * np.ceil(rows / unit)
    waves = padded / high * np.ceil(out / wide) / num_sms
    return np.asarray(padded * (1 - wave_share + wave_share * np.ceil(waves) / waves))


def fit(samples: OperatorSamples, gpu: Gpu) -> tuple[list[FitResult], list[str]]:
    """Fit the coefficients of one operator. Returns the fits, and the reasons for coefficients that were not fitted.

    Raises HeadwayError if a fit fails: see `solve`.
    """
    if samples.kind == "all_reduce":
        sizes = sorted({int(num) for num in samples.shape["num_gpus"]})
        results = [_all_reduce(samples.only(samples.shape["num_gpus"] == num), gpu, num) for num in sizes]
    else:
        results = [FITS[samples.kind](samples, gpu)]
    return [one for one in results if isinstance(one, FitResult)], [one for one in results if isinstance(one, str)]


def fit_all(all_samples: Iterable[OperatorSamples], gpu: Gpu) -> tuple[list[FitResult], list[str]]:
    fits, notes = [], []
    for samples in all_samples:
        more_fits, more_notes = fit(samples, gpu)
        fits += more_fits
        notes += more_notes
    return fits, notes


def _gemm(samples: OperatorSamples, gpu: Gpu) -> FitResult | str:
    n, k = samples.shape["n"], samples.shape["k"]
    from_memory = MATRICES_IN_TURN * n * k * WEIGHT_BYTES[samples.dtype] >= (gpu.l2_bytes or 0.0)
    samples = samples.only((n >= SMALL_SIDE) & (k >= SMALL_SIDE) & (n * k >= SMALL_MATRIX) & from_memory)
    coefficients = CASTING if samples.dtype == "fp8" else ROOFLINE
    if why := _too_few(samples, coefficients):
        return why
    s, at_peak = samples.shape, peaks(samples, gpu)
    cast_s = CAST_BYTES * s["m"] * s["k"] / gpu.bandwidth_bytes_per_s

    def model(p: Floats) -> Floats:
        compute_s = at_peak.compute_s
        if len(p) > len(CASTING) and gpu.num_sms:
            compute_s = compute_s * tiled_rows(s["m"], s["n"], gpu.num_sms, p[5]) / s["m"]
        return np.asarray(roofline(p, at_peak.memory_s, compute_s) + (cast_s / p[4] if len(p) > 4 else 0.0))

    smooth = solve(samples.key, coefficients, model, samples.seconds)
    if samples.dtype != "fp8" or not gpu.num_sms:
        return smooth
    return _refined(smooth, coefficients, (WAVES,), model, samples.seconds)


def _refined(
    plain: FitResult,
    coefficients: tuple[Coefficient, ...],
    more: tuple[Coefficient, ...],
    model: Callable[[Floats], Floats],
    seconds: Floats,
) -> FitResult:
    """The fit with `more` coefficients if it is clearly better; otherwise `plain`, also if the refined fit does not
    converge.

    Both fits are compared on held-out shapes.
    """
    refined = tuple(replace(c, start=plain.values[c.name] / c.unit) for c in coefficients) + more
    seen = ~held_out(len(seconds))

    def error(candidates: tuple[Coefficient, ...]) -> float:
        return solve(plain.key, candidates, lambda p: model(p)[seen], seconds[seen]).residual

    try:
        if error(coefficients) - error(refined) < LEAST_GAIN:
            return plain
        return solve(plain.key, refined, model, seconds)
    except HeadwayError:
        return plain


def _moe(samples: OperatorSamples, gpu: Gpu) -> FitResult | str:
    if why := _too_few(samples, EXPERTS):
        return why
    at_peak = peaks(samples, gpu)
    row_s = 2 * expert_weights(samples) / peak_flops(gpu, moe_compute(samples.dtype))
    padded_s = row_s * touched_experts(samples)

    def model(p: Floats) -> Floats:
        return roofline(p, at_peak.memory_s, at_peak.compute_s + p[4] * padded_s)

    return solve(samples.key, EXPERTS, model, samples.seconds)


def _prefill(samples: OperatorSamples, gpu: Gpu) -> FitResult | str:
    samples = samples.only(peaks(samples, gpu).compute_s > SHORT_PREFILL_S)
    if why := _too_few(samples, PREFILL):
        return why
    compute_s = peaks(samples, gpu).compute_s
    s = samples.shape
    per_key_s = compute_s / (s["context_tokens"] + s["new_tokens"] / 2)
    return solve(samples.key, PREFILL, lambda p: (compute_s + per_key_s * p[1] / 2) / p[0], samples.seconds)


def _decode(samples: OperatorSamples, gpu: Gpu) -> FitResult | str:
    s = samples.shape
    usual = s["num_heads"] <= MOST_HEADS_PER_KV_HEAD * s["num_kv_heads"]
    large = samples.only((kv_bytes(samples) >= L2_RESIDENT_BYTES) & usual)
    small = (s["batch_size"] <= 64) & (s["context_tokens"] <= 64)
    if why := _too_few(large, DECODE) or ("" if small.any() else f"{samples.key}: no short context, so no latency"):
        return why
    shortest_s = float(np.median(samples.seconds[small]))
    latency, efficiency = DECODE
    coefficients = (replace(latency, unit=shortest_s), efficiency)
    read_s = peaks(large, gpu).memory_s
    return solve(samples.key, coefficients, lambda p: p[0] + read_s / p[1], large.seconds)


def _latent(samples: OperatorSamples, gpu: Gpu) -> FitResult | str:
    samples = samples.only(samples.shape["batch_size"] * samples.shape["context_tokens"] >= MIN_LATENT_TOKENS)
    if why := _too_few(samples, LATENT):
        return why
    at_peak = peaks(samples, gpu)

    def model(p: Floats) -> Floats:
        return np.asarray(p[0] + np.maximum(at_peak.memory_s / p[1], at_peak.compute_s / p[2]))

    return solve(samples.key, LATENT, model, samples.seconds)


def _sampling(samples: OperatorSamples, gpu: Gpu) -> FitResult | str:
    if why := _too_few(samples, SAMPLING):
        return why
    byte_s = samples.shape["batch_size"] * samples.shape["vocab_size"] / gpu.bandwidth_bytes_per_s
    return solve(samples.key, SAMPLING, lambda p: p[0] + byte_s * p[1], samples.seconds)


def _all_reduce(samples: OperatorSamples, gpu: Gpu, num_gpus: int) -> FitResult | str:
    if why := _too_few(samples, ALL_REDUCE):
        return f"{why} (among {num_gpus} GPUs)"
    wire_s, root = peaks(samples, gpu).memory_s, np.sqrt(samples.shape["num_bytes"])
    key = f"{samples.key}.{num_gpus}"
    return solve(key, ALL_REDUCE, lambda p: p[0] + p[1] * root + wire_s / p[2], samples.seconds)


def _copy(samples: OperatorSamples, gpu: Gpu) -> FitResult | str:
    if why := _too_few(samples, COPY):
        return why
    moved_s = peaks(samples, gpu).memory_s
    return solve(samples.key, COPY, lambda p: p[0] + moved_s / p[1], samples.seconds)


def _too_few(samples: OperatorSamples, coefficients: tuple[Coefficient, ...]) -> str:
    num, need = len(samples.seconds), MIN_SHAPES * len(coefficients) + 1
    return "" if num >= need else f"{samples.key}: {num} usable shapes, {need} are needed; not fitted"


FITS = {
    "gemm": _gemm,
    "moe": _moe,
    "prefill_attention": _prefill,
    "decode_attention": _decode,
    "mla_attention": _latent,
    "device_copy": _copy,
    "host_copy": _copy,
    "top_p_sort": _sampling,
    "top_p": _sampling,
    "penalties": _sampling,
}
