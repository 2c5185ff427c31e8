"""Step-time coefficients: how far a GPU's kernels and an engine fall short of the peaks. With sources."""

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
    """Mixture of experts only: rows of padding that each touched expert computes in vain."""
    cast_efficiency: float = 0.0
    """Of the peak bandwidth, at which 16-bit inputs are read and written as 8-bit ones first; 0: they are not."""
    wave_share: float = 0.0
    """How much of a partly filled wave of tiles is lost, 0 to 1. Above 0, rows are computed in whole tiles."""


class PrefillAttention(Struct, frozen=True, forbid_unknown_fields=True):
    """Attention of a chunk: FLOPs over peak, each query row paying for half a tile more than it needs."""

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
    """What the kernels of one GPU reach."""

    gemm: dict[str, Roofline]
    """By the dtype it computes in: bf16, fp8."""
    moe: dict[str, Roofline]
    """By the dtype of the experts' weights: bf16, fp8, int4."""
    prefill_attention: PrefillAttention
    decode_attention: DecodeAttention
    all_reduce: dict[str, AllReduce]
    """By the number of GPUs, as text: "2", "4", "8"."""
    elementwise_efficiency: float
    """Norms, activations, rotary embedding, cache writes: of the peak bandwidth."""
    residuals: dict[str, float] = field(default_factory=dict)
    """Median absolute relative error of each fit."""
    source: str = ""


class Overhead(Struct, frozen=True, forbid_unknown_fields=True):
    """What one engine adds to its kernels."""

    step_s: float
    """Once an iteration: scheduling, input preparation, sampling."""
    layer_s: float
    """Once a layer and iteration: small kernels and the gaps between kernels."""
    sequence_s: float
    """Once a sequence and iteration."""
    launch_layer_s: float = 0.0
    """Host time to launch a layer's kernels one by one, which bounds iterations too large for a captured graph."""
    launch_expert_layer_s: float = 0.0
    """The same for a layer with a mixture of experts."""
    launch_shared_expert_s: float = 0.0
    """What a shared expert adds to that."""
    version: str = ""
    residuals: dict[str, float] = field(default_factory=dict)
    source: str = ""


class Coefficients(Struct, frozen=True, forbid_unknown_fields=True):
    """Kernels of one GPU under one engine's overhead."""

    kernels: Kernels
    overhead: Overhead
    calibrated: bool = False
    """True: both were measured on this very GPU and engine. False: taken from a near relation, or generic."""


class CoefficientFile(Struct, frozen=True, forbid_unknown_fields=True):
    """One data file: a GPU's kernels and, for each engine measured there, its overhead."""

    gpus: tuple[str, ...]
    """Measured on these."""
    kernels: Kernels
    engines: dict[str, Overhead] = field(default_factory=dict)
    like: tuple[str, ...] = ()
    """GPUs of the same silicon that were not measured."""
