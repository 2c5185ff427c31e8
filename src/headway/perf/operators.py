"""Seconds of the operators that depend only on the number of tokens or sequences of a batch.

Tiles and clusters of matrix products are those of vLLM's FP8 kernels for Hopper (its CUTLASS dispatch by the number of
rows); a cluster of two tiles of 128 rows makes 256 the unit of long batches. Tiles go to the multiprocessors in waves.
A partly filled wave takes as long as a full one, less what faster clocks and a free memory bus recover.
"""

from __future__ import annotations

from itertools import pairwise
from math import ceil, inf, sqrt

from headway.catalog.coefficients import AllReduce, Coefficients, Roofline
from headway.core.errors import HeadwayError
from headway.core.fleet import Gpu, Model, Parallel
from headway.perf.params import (
    expert_params,
    linear_bytes,
    num_dense_layers,
    num_mlp_matrices,
    num_moe_layers,
    weight_dtype_bytes,
)

NETWORK_BYTES_PER_S = 50e9
"""Between nodes, per GPU and direction: one 400 Gb/s port."""
NETWORK_LATENCY_S = 10e-6
SEND_LATENCY_S = 5e-6
CAST_BYTES = 3.0
"""Read 16 bit, write 8 bit."""
ROUTING_SKEW = 0.4
"""Exponent of the power law of expert popularity; 0: all equally popular."""
SKEW_BINS = 16
TILES = ((64, 64, 64, 64), (128, 128, 64, 128), (inf, 256, 128, 128))
"""(up to this many rows, rows of a cluster, rows of a tile, columns of a tile)."""

Matrix = tuple[float, float, float]
"""(number in the model, rows out, columns in) of a weight matrix on one GPU."""


class Operators:
    """Operator times on one GPU of a replica, for one micro-batch through all layers.

    With several data parallel ranks, `tokens_s` and `rows_s` refer to one rank and `joint_s` to all ranks.
    """

    def __init__(self, model: Model, gpu: Gpu, parallel: Parallel, coefficients: Coefficients) -> None:
        self._model, self._gpu, self._parallel = model, gpu, parallel
        self._kernels, self._overhead = coefficients.kernels, coefficients.overhead
        dtype = compute_dtype(model.dtype, gpu)
        self._gemm, self._gemm_flops = self._kernels.gemm[dtype], peak_flops(gpu, dtype)
        self._matrices = _attention_matrices(model, parallel.tp) + _mlp_matrices(model, parallel.tp)
        self._chances = expert_chances(model)

    def tokens_s(self, num_tokens: int) -> float:
        """Operators whose time depends on the number of tokens. With 0 tokens, the step and its weights still count."""
        model = self._model
        width = linear_bytes(model)
        gemm_s = sum(
            count * self._product_s(num_tokens, out, into, width, self._gemm, self._gemm_flops)
            for count, out, into in self._matrices
        )
        experts_s = num_moe_layers(model) * self._experts_s(num_tokens) if self._parallel.dp == 1 else 0.0
        return (
            gemm_s
            + experts_s
            + self._elementwise_s(num_tokens)
            + (2 * model.num_layers + 1) * self._all_reduce_s(2.0 * num_tokens * model.hidden_size)
            + self._sends_s(2.0 * num_tokens * model.hidden_size)
            + model.num_layers * (self._overhead.layer_s + self._kernels.decode_attention.latency_s)
            + self._overhead.step_s
        )

    def joint_s(self, num_tokens: int) -> float:
        """Experts, and the exchange of tokens with them, for the tokens of all ranks."""
        return num_moe_layers(self._model) * (self._experts_s(num_tokens) + self._exchange_s(num_tokens))

    def rows_s(self, num_rows: int) -> float:
        model, tp = self._model, self._parallel.tp
        gemm = self._kernels.gemm["bf16"]
        flops = peak_flops(self._gpu, "bf16")
        head_s = self._product_s(num_rows, model.vocab_size / tp, model.hidden_size, 2.0, gemm, flops)
        gather_s = 0.0
        if tp > 1:
            gather_s = 2.0 * num_rows * model.vocab_size * (tp - 1) / tp / self._link_bytes_per_s(tp)
        return head_s + gather_s + num_rows * self._overhead.sequence_s

    def _product_s(self, rows: float, out: float, into: float, width: float, c: Roofline, flops: float) -> float:
        per_s = self._gpu.bandwidth_bytes_per_s
        memory_s = (out * into * width + rows * (2.0 * out + (1.0 if c.cast_efficiency else 2.0) * into)) / per_s
        cast_s = CAST_BYTES * rows * into / (per_s * c.cast_efficiency) if c.cast_efficiency else 0.0
        if c.wave_share and self._gpu.num_sms:
            rows = tiled_rows(rows, out, self._gpu.num_sms, c.wave_share)
        return cast_s + roofline_s(c, memory_s, 2.0 * rows * out * into / flops)

    def _experts_s(self, num_tokens: int) -> float:
        """One mixture-of-experts layer: loads the experts that a batch touches; each pads its rows to a tile.

        Tensor parallelism slices every expert; expert parallelism gives each GPU whole experts. In both cases a GPU
        holds and computes an equal share, and the outputs are summed by an all-reduce.
        """
        model, moe = self._model, self._model.moe
        if moe is None:
            return 0.0
        c = self._kernels.moe["bf16" if model.dtype == "fp16" else model.dtype]
        chosen = float(num_tokens * moe.experts_per_token)
        touched = sum(count * (1.0 - (1.0 - chance) ** num_tokens) for count, chance in self._chances)
        weights = expert_params(model) / (self._parallel.tp * self._parallel.dp)
        memory_s = touched * weights * weight_dtype_bytes(model) / self._gpu.bandwidth_bytes_per_s
        flops = peak_flops(self._gpu, compute_dtype(model.dtype, self._gpu))
        return roofline_s(c, memory_s, 2.0 * (chosen + touched * c.tile_tokens) * weights / flops)

    def _elementwise_s(self, num_tokens: int) -> float:
        """Norms, residuals, rotary embedding, activations, cache writes: bytes through memory."""
        model, tp = self._model, self._parallel.tp
        heads = (2 * model.num_heads + 3 * model.num_kv_heads) * model.head_dim
        width = model.intermediate_size if model.moe is None else model.moe.shared_intermediate_size
        num_bytes = 2.0 * num_tokens * (8 * model.hidden_size + (heads + 3 * width) / tp)
        per_s = self._gpu.bandwidth_bytes_per_s * self._kernels.elementwise_efficiency
        return model.num_layers * num_bytes / per_s

    def _all_reduce_s(self, num_bytes: float) -> float:
        tp = self._parallel.tp
        if tp == 1:
            return 0.0
        c = _nearest(self._kernels.all_reduce, tp)
        wire_s = 2.0 * (tp - 1) / tp * num_bytes / (self._link_bytes_per_s(tp) * c.link_efficiency)
        hop_s = NETWORK_LATENCY_S if tp > self._gpu.gpus_per_node else 0.0
        return c.latency_s + hop_s + c.ramp_s_per_sqrt_byte * sqrt(num_bytes) + wire_s

    def _exchange_s(self, num_tokens: int) -> float:
        """Exchange between data parallel ranks: all tokens to every rank, and the sums of the experts' outputs back.

        An all-gather and a reduce-scatter, vLLM's default; together they are an all-reduce with two latencies.
        """
        dp, span = self._parallel.dp, self._parallel.tp * self._parallel.dp
        if dp == 1:
            return 0.0
        c = _nearest(self._kernels.all_reduce, dp)
        num_bytes = 2.0 * num_tokens * self._model.hidden_size
        wire_s = (dp - 1) / dp * num_bytes / (self._link_bytes_per_s(span) * c.link_efficiency)
        hop_s = NETWORK_LATENCY_S if span > self._gpu.gpus_per_node else 0.0
        return 2.0 * (c.latency_s + hop_s + c.ramp_s_per_sqrt_byte * sqrt(num_bytes) + wire_s)

    def _sends_s(self, num_bytes: float) -> float:
        """Sends of a micro-batch's activations from stage to stage, and of its tokens back to the first stage."""
        pp, tp = self._parallel.pp, self._parallel.tp
        if pp == 1:
            return 0.0
        if self._parallel.num_gpus > self._gpu.gpus_per_node:
            return pp * (NETWORK_LATENCY_S + num_bytes / tp / NETWORK_BYTES_PER_S)
        return pp * (SEND_LATENCY_S + num_bytes / tp / self._gpu.link_bytes_per_s)

    def _link_bytes_per_s(self, num_gpus: int) -> float:
        """Link rate within a group of `num_gpus` GPUs."""
        if num_gpus > self._gpu.gpus_per_node:
            return min(NETWORK_BYTES_PER_S, self._gpu.link_bytes_per_s)
        return self._gpu.link_bytes_per_s


def expert_chances(model: Model) -> list[tuple[float, float]]:
    """(number of experts, probability that a token chooses one of them), by a power law over the experts' ranks.

    Routers are trained for even choices, but texts of one kind use experts unevenly, so a batch touches fewer experts
    than by even chance. Experts of similar rank share a bin.
    """
    if model.moe is None:
        return []
    num = model.moe.num_experts
    weights = [rank**-ROUTING_SKEW for rank in range(1, num + 1)]
    bins = min(num, SKEW_BINS)
    edges = [num * i // bins for i in range(bins + 1)]
    scale = model.moe.experts_per_token / sum(weights)
    return [(high - low, min(1.0, scale * sum(weights[low:high]) / (high - low))) for low, high in pairwise(edges)]


def tiled_rows(rows: float, out: float, num_sms: int, wave_share: float) -> float:
    """The number of fully used rows that would take as long as `rows` rows of `out` columns in whole tiles.

    `wave_share` is the lost share of a partly filled wave, 0 to 1. The result never falls as `rows` grows.
    """
    if not rows:
        return 0.0
    _, unit, high, wide = next(tile for tile in TILES if rows <= tile[0])
    padded = unit * ceil(rows / unit)
    waves = padded / high * ceil(out / wide) / num_sms
    return padded * (1.0 - wave_share + wave_share * ceil(waves) / waves)


def roofline_s(c: Roofline, memory_s: float, compute_s: float) -> float:
    """Seconds of a product that takes `memory_s` and `compute_s` at the GPU's peaks."""
    memory_s, compute_s = memory_s / c.memory_efficiency, compute_s / c.compute_efficiency
    high, low = (memory_s, compute_s) if memory_s > compute_s else (compute_s, memory_s)
    if high == 0.0:
        return c.latency_s
    return c.latency_s + float(high * (1.0 + (low / high) ** c.sharpness) ** (1.0 / c.sharpness))


def compute_dtype(dtype: str, gpu: Gpu) -> str:
    """The dtype in which weights of `dtype` are multiplied: fp8 if the GPU supports it, else bf16."""
    return "fp8" if dtype == "fp8" and "fp8" in gpu.peak_flops else "bf16"


def peak_flops(gpu: Gpu, dtype: str) -> float:
    """Peak FLOP/s of a dtype, else of bf16, else of fp16. HeadwayError if none of them is listed."""
    for name in (dtype, "bf16", "fp16"):
        if name in gpu.peak_flops:
            return gpu.peak_flops[name]
    raise HeadwayError(f"GPU {gpu.name}: peak_flops lists none of {dtype}, bf16, fp16")


def _nearest(table: dict[str, AllReduce], num_gpus: int) -> AllReduce:
    sizes = sorted(map(int, table))
    return table[str(next((size for size in sizes if size >= num_gpus), sizes[-1]))]


def _attention_matrices(model: Model, tp: int) -> list[Matrix]:
    layers, h = model.num_layers, model.hidden_size
    heads = model.num_heads / tp
    if model.mla is None:
        kv_heads = max(model.num_kv_heads / tp, 1.0)
        return [(layers, (heads + 2 * kv_heads) * model.head_dim, h), (layers, h, heads * model.head_dim)]
    mla = model.mla
    q_dim = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    latent = mla.q_lora_rank + mla.kv_lora_rank + mla.qk_rope_head_dim
    return [
        (layers, latent, h),
        (layers, q_dim, mla.q_lora_rank or h),
        (layers, heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank),
        (layers, h, heads * mla.v_head_dim),
    ]


def _mlp_matrices(model: Model, tp: int) -> list[Matrix]:
    h, up = model.hidden_size, num_mlp_matrices(model) - 1
    matrices: list[Matrix] = []
    dense = num_dense_layers(model)
    if dense:
        width = model.intermediate_size / tp
        matrices += [(dense, up * width, h), (dense, h, width)]
    if model.moe is not None:
        sparse = num_moe_layers(model)
        matrices.append((sparse, model.moe.num_experts, h))
        if model.moe.shared_intermediate_size:
            width = model.moe.shared_intermediate_size / tp
            matrices += [(sparse, up * width, h), (sparse, h, width)]
    return matrices
