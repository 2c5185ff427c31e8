"""Step-time coefficients with sources: the efficiencies of a GPU's kernels against its peaks, and an engine's
overhead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct, field
from msgspec.structs import replace

from headway.core.fleet import Engine, Model


class Roofline(Struct, frozen=True, forbid_unknown_fields=True):
    """A matrix product: `latency_s + (memory_s**p + compute_s**p)**(1/p)`, where `p` is the `sharpness`."""

    latency_s: float
    memory_efficiency: float
    """Share of the GPU's peak bandwidth, 0 to 1."""
    compute_efficiency: float
    """Share of the GPU's peak FLOP/s, 0 to 1."""
    sharpness: float
    tile_tokens: float = 0.0
    """Mixture of experts only: rows of padding for each touched expert."""
    cast_efficiency: float = 0.0
    """Share of peak bandwidth at which 16-bit inputs are first converted to 8 bit; 0: no conversion."""
    cast_share: float = 1.0
    """Share of the conversion's time that remains; 0: the engine converts within the previous kernel."""
    wave_share: float = 0.0
    """Lost share of a partly filled wave of tiles, 0 to 1. If positive, rows are computed in whole tiles."""


class ExpertCurve(Struct, frozen=True, forbid_unknown_fields=True):
    """Latency of one mixture-of-experts layer on one GPU, for one shape."""

    dtype: str
    """Dtype of the experts' weights: bf16, fp8, int4."""
    hidden_size: int
    intermediate_size: int
    experts_per_token: int
    num_experts: int
    """Experts over all GPUs."""
    tp: int
    """GPUs that share each expert."""
    ep: int
    """Number of GPUs among which the experts are divided; each expert stays whole."""
    latency_us: tuple[float, ...]
    """Microseconds at the table's numbers of tokens."""


class ExpertTable(Struct, frozen=True, forbid_unknown_fields=True):
    """Latencies of mixture-of-experts layers on one GPU, by shape."""

    source: str
    residuals: dict[str, float]
    """Maps each dtype to the median absolute relative error at token counts that the fit has not seen."""
    balanced: bool
    """True: measured with tokens that choose all experts equally often. False: with a power law."""
    tokens: tuple[float, ...]
    """Token counts of all GPUs together at which the curves have values."""
    curves: tuple[ExpertCurve, ...]


class PrefillAttention(Struct, frozen=True, forbid_unknown_fields=True):
    """Attention of a prompt chunk: FLOPs over peak, with half a tile of extra keys for each query row."""

    compute_efficiency: float
    tile_tokens: float


class DecodeAttention(Struct, frozen=True, forbid_unknown_fields=True):
    """Attention of decoding sequences: a minimum for each layer, and KV bytes over bandwidth."""

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
    """Efficiencies of matrix products, keyed by compute dtype: bf16, fp8."""
    moe: dict[str, Roofline]
    """Efficiencies of routed experts, keyed by dtype of their weights: bf16, fp8, int4."""
    prefill_attention: PrefillAttention
    decode_attention: DecodeAttention
    all_reduce: dict[str, AllReduce]
    """All-reduce times, keyed by the number of GPUs as text: "2", "4", "8"."""
    elementwise_efficiency: float
    """Share of peak bandwidth of norms, activations, rotary embedding and cache writes."""
    mla_attention: DecodeAttention | None = None
    """Decoding over latent vectors, if it was measured; None: as `decode_attention`."""
    expert_table: str = ""
    """Name of the expert table that replaces `moe` for its shapes; empty if there is none."""
    residuals: dict[str, float] = field(default_factory=dict)
    """Median absolute relative error of each fit."""
    source: str = ""

    def decode(self, model: Model) -> DecodeAttention:
        """Attention of this model's decoding sequences."""
        return self.decode_attention if self.mla_attention is None or model.mla is None else self.mla_attention

    def products(self) -> dict[str, Roofline]:
        """Matrix products by compute dtype, with the latency of the remaining share of a cast. What a product with
        cast inputs takes longer at least than one in bf16 is the latency of the cast."""
        found = dict(self.gemm)
        for dtype, one in self.gemm.items():
            if one.cast_efficiency and "bf16" in self.gemm:
                plain_s = min(self.gemm["bf16"].latency_s, one.latency_s)
                found[dtype] = replace(one, latency_s=plain_s + one.cast_share * (one.latency_s - plain_s))
        return found


class Overhead(Struct, frozen=True, forbid_unknown_fields=True):
    """Time that one engine adds to its kernels."""

    step_s: float
    """Time per iteration: scheduling, input preparation, sampling."""
    layer_s: float
    """Time per layer and iteration: small kernels and the gaps between kernels."""
    sequence_s: float
    """Time per sequence and iteration."""
    launch_layer_s: float = 0.0
    """Host time to launch a layer's kernels one by one, for iterations too large for a captured graph. The launch
    begins when the engine schedules the iteration: see `perf.step.launched_s` and `sim.timeline`."""
    launch_part_layer_s: float = 0.0
    """As `launch_layer_s`, for an iteration with prompt tokens that fits into graphs, which are captured in parts
    between which attention runs."""
    launch_expert_layer_s: float = 0.0
    """Like `launch_layer_s`, for a layer with a mixture of experts."""
    launch_fp8_expert_s: float = 0.0
    """Additional launch time of experts in 8 bits, whose inputs are cast."""
    launch_shared_expert_s: float = 0.0
    """Additional launch time of a shared expert."""
    expert_layer_s: float = 0.0
    """Further time per layer with a mixture of experts and iteration, besides `layer_s`."""
    shared_beside_tokens: int = 0
    """Largest number of tokens for which the shared expert runs in parallel with the routed ones, on a second
    stream."""
    sampler_latency_s: float = 0.0
    """Time of the kernels that cut the candidates of one sequence. The kernels that penalise repetition take this time
    again."""
    sort_bytes_per_logit: float = 0.0
    """Bytes that the GPU's peak bandwidth moves in the time to sort one logit, for top-p and top-k."""
    sorts_before: str = ""
    """Engine version from which candidates are cut without sorting; empty: it always sorts."""
    cut_bytes_per_logit: float = 0.0
    """As `sort_bytes_per_logit`, for engine versions from `sorts_before` on."""
    penalty_bytes_per_logit: float = 0.0
    """Like `sort_bytes_per_logit`, for repetition penalties."""
    pipeline_step_s: float = 0.0
    """Per pipeline iteration: host time between a micro-batch's result and its next start, for scheduling and input
    preparation. With one stage this work is done ahead."""
    pipeline_waits_before: str = ""
    """Engine version from which pipelines are scheduled ahead, too; empty: never."""
    kernel_factors: dict[str, float] = field(default_factory=dict)
    """Factors on the efficiencies of this GPU's kernels under this engine, by the names of `scaled`. Another engine
    version has other kernels, or sustains another clock."""
    prefill_factor: float = 1.0
    """Observed seconds of prompts over the seconds that the other coefficients predict."""
    decode_factor: float = 1.0
    """As `prefill_factor`, for decode iterations and the decoding part of mixed iterations."""
    request_overhead_s: float | None = None
    """Replaces the profile's value (see `core.fleet.Engine`); None: the profile's. The next two fields work alike."""
    tokenize_s_per_token: float | None = None
    response_overhead_s: float | None = None
    version: str = ""
    residuals: dict[str, float] = field(default_factory=dict)
    source: str = ""

    def on(self, profile: Engine) -> Engine:
        """The engine's profile with the request times measured here."""
        names = ("request_overhead_s", "tokenize_s_per_token", "response_overhead_s")
        measured = {name: value for name in names if (value := getattr(self, name)) is not None}
        return replace(profile, **measured) if measured else profile


class Coefficients(Struct, frozen=True, forbid_unknown_fields=True):
    """Kernels of one GPU under one engine's overhead."""

    kernels: Kernels
    overhead: Overhead
    calibrated: bool = False
    """Whether kernels and overhead were measured on this GPU and engine. Otherwise they come from GPUs of the same
    silicon, or are generic."""
    estimated: tuple[str, ...] = ()
    """The unmeasured parts and the sources of their values, if not calibrated."""
    experts: ExpertTable | None = None


class CoefficientFile(Struct, frozen=True, forbid_unknown_fields=True):
    """One data file: the kernels of a GPU and the overhead of each engine measured on it."""

    gpus: tuple[str, ...]
    """Measured GPUs."""
    kernels: Kernels
    engines: dict[str, Overhead] = field(default_factory=dict)
    like: tuple[str, ...] = ()
    """GPUs of the same silicon, without measurements."""


class PoolCalibration(Struct, frozen=True, forbid_unknown_fields=True):
    """Whether a pool's step times were measured on its GPU and engine."""

    name: str
    gpu: str
    engine: str
    calibrated: bool
    uncalibrated: tuple[str, ...] = ()
    """The substitutes for missing measurements, such as "kernels of h100-80gb-sxm"."""
    version: str = ""
    """Version of the engine, given or assumed; empty if the profile has none."""


def versions_notes(engines: Iterable[tuple[str, str]]) -> list[str]:
    """A sentence with the engines and versions, given or assumed, of the step times; none without versions."""
    found = dict.fromkeys(f"{name} as version {version}" for name, version in engines if version)
    return [f"Step times are for {', '.join(found)}."] if found else []


def scaled(kernels: Kernels, values: Mapping[str, float]) -> Kernels:
    """The kernels with factors on their efficiencies. Keys: `memory`, `compute`, `fp8_compute` (of fp8 products alone),
    `cast`, `attention` with its two parts `decode_attention` and `prompt_attention`; `wave_share`, which replaces the
    value of products that have one; and `cast_share`, the remaining share of a cast's latency and bytes (see
    `Roofline`)."""
    memory, compute, attention = (values.get(name, 1.0) for name in ("memory", "compute", "attention"))
    decoding, prompts = (attention * values.get(name, 1.0) for name in ("decode_attention", "prompt_attention"))
    gemm = {
        dtype: replace(
            one,
            memory_efficiency=one.memory_efficiency * memory,
            compute_efficiency=one.compute_efficiency
            * compute
            * (values.get("fp8_compute", 1.0) if dtype == "fp8" else 1.0),
            cast_efficiency=one.cast_efficiency * values.get("cast", 1.0),
            cast_share=one.cast_share * values.get("cast_share", 1.0),
            wave_share=values.get("wave_share", one.wave_share) if one.wave_share else 0.0,
        )
        for dtype, one in kernels.gemm.items()
    }
    moe = {
        dtype: replace(
            one,
            memory_efficiency=min(one.memory_efficiency * memory, 1.0),
            compute_efficiency=min(one.compute_efficiency * compute, 1.0),
        )
        for dtype, one in kernels.moe.items()
    }
    decode, latent, prefill = kernels.decode_attention, kernels.mla_attention, kernels.prefill_attention
    return replace(
        kernels,
        gemm=gemm,
        moe=moe,
        elementwise_efficiency=kernels.elementwise_efficiency * memory,
        decode_attention=_scaled_decode(decode, decoding),
        mla_attention=None if latent is None else _scaled_decode(latent, decoding),
        prefill_attention=replace(prefill, compute_efficiency=prefill.compute_efficiency * prompts),
    )


def corrected(known: Coefficients, prefill: float, decode: float) -> Coefficients:
    """The coefficients of an engine whose prompts and decoding take longer by these factors."""
    overhead = known.overhead
    factors = {"prefill_factor": overhead.prefill_factor * prefill, "decode_factor": overhead.decode_factor * decode}
    return replace(known, overhead=replace(overhead, **factors))


def _scaled_decode(decode: DecodeAttention, factor: float) -> DecodeAttention:
    return replace(
        decode,
        memory_efficiency=decode.memory_efficiency * factor,
        compute_efficiency=decode.compute_efficiency * factor,
    )
