"""Step-time coefficients: efficiencies of a GPU's kernels against its peaks, and an engine's overhead, with sources."""

from __future__ import annotations

from msgspec import Struct, field


class Roofline(Struct, frozen=True, forbid_unknown_fields=True):
    """A matrix product: `latency_s + (memory_s**p + compute_s**p)**(1/p)`, `p` being the `sharpness`."""

    latency_s: float
    memory_efficiency: float
    """Of the GPU's peak bandwidth, 0 to 1."""
    compute_efficiency: float
    """Of the GPU's peak FLOP/s, 0 to 1."""
    sharpness: float
    tile_tokens: float = 0.0
    """Mixture of experts only: rows of padding for each touched expert."""
    cast_efficiency: float = 0.0
    """Share of peak bandwidth at which 16-bit inputs are first converted to 8 bit; 0: no conversion."""
    wave_share: float = 0.0
    """Lost share of a partly filled wave of tiles, 0 to 1. Above 0, rows are computed in whole tiles."""


class PrefillAttention(Struct, frozen=True, forbid_unknown_fields=True):
    """Attention of a chunk: FLOPs over peak, with half a tile of extra keys for each query row."""

    compute_efficiency: float
    tile_tokens: float


class DecodeAttention(Struct, frozen=True, forbid_unknown_fields=True):
    """Attention of decoding sequences: a floor for each layer, and KV bytes over bandwidth."""

    latency_s: float
    memory_efficiency: float
    compute_efficiency: float


class AllReduce(Struct, frozen=True, forbid_unknown_fields=True):
    """`latency_s + ramp * sqrt(bytes) + 2 (n-1)/n bytes / (link * link_efficiency)` among n GPUs."""

    latency_s: float
    ramp_s_per_sqrt_byte: float
    link_efficiency: float


class Kernels(Struct, frozen=True, forbid_unknown_fields=True):
    gemm: dict[str, Roofline]
    """By the dtype it computes in: bf16, fp8."""
    moe: dict[str, Roofline]
    """By the dtype of the experts' weights: bf16, fp8, int4."""
    prefill_attention: PrefillAttention
    decode_attention: DecodeAttention
    all_reduce: dict[str, AllReduce]
    """By the number of GPUs, as text: "2", "4", "8"."""
    elementwise_efficiency: float
    """Share of peak bandwidth of norms, activations, rotary embedding and cache writes."""
    residuals: dict[str, float] = field(default_factory=dict)
    """Median absolute relative error of each fit."""
    source: str = ""


class Overhead(Struct, frozen=True, forbid_unknown_fields=True):
    """Time that one engine adds to its kernels."""

    step_s: float
    """Per iteration: scheduling, input preparation, sampling."""
    layer_s: float
    """Per layer and iteration: small kernels and the gaps between kernels."""
    sequence_s: float
    """Per sequence and iteration."""
    launch_layer_s: float = 0.0
    """Host time to launch a layer's kernels one by one, a lower bound for iterations too large for a captured graph."""
    launch_expert_layer_s: float = 0.0
    """The same for a layer with a mixture of experts."""
    launch_shared_expert_s: float = 0.0
    """Additional launch time of a shared expert."""
    version: str = ""
    residuals: dict[str, float] = field(default_factory=dict)
    source: str = ""


class Coefficients(Struct, frozen=True, forbid_unknown_fields=True):
    """Kernels of one GPU under one engine's overhead."""

    kernels: Kernels
    overhead: Overhead
    calibrated: bool = False
    """True: both were measured on this very GPU and engine. False: from GPUs of the same silicon, or generic."""
    estimated: tuple[str, ...] = ()
    """If not calibrated: what was not measured, and where it is from."""


class CoefficientFile(Struct, frozen=True, forbid_unknown_fields=True):
    """One data file: the kernels of a GPU and the overhead of each engine measured on it."""

    gpus: tuple[str, ...]
    """GPUs of the measurements."""
    kernels: Kernels
    engines: dict[str, Overhead] = field(default_factory=dict)
    like: tuple[str, ...] = ()
    """GPUs of the same silicon without measurements."""
