"""Seconds of the operators that depend only on the number of tokens or sequences of a batch.

Tiles and clusters of fp8 products follow vLLM's kernels for Hopper (its CUTLASS dispatch by the number of rows); a
cluster of two tiles of 128 rows makes 256 the unit of long batches. In bf16 the unit is a tile of 128 rows. Tiles go to
the multiprocessors in waves. A partly filled wave takes as long as a full one, apart from gains by faster clocks and a
free memory bus.
"""

from __future__ import annotations

from math import ceil, inf, sqrt

from headway.catalog.coefficients import AllReduce, Coefficients, Roofline
from headway.core.fleet import Gpu, Layers, Model, Parallel
from headway.perf.experts import Experts
from headway.perf.params import (
    base_dtype,
    dtype_bytes,
    embedding_bytes,
    linear_bytes,
    linear_dtype,
    mixer_bytes,
    mlp_bytes,
    num_mlp_matrices,
    num_moe_layers,
    state_bytes,
)
from headway.perf.roofline import compute_dtype, peak_flops, roofline_s

NETWORK_BYTES_PER_S = 50e9
"""Rate between nodes, per GPU and direction: one 400 Gb/s port."""
NETWORK_LATENCY_S = 10e-6
SEND_LATENCY_S = 5e-6
CAST_BYTES = 3.0
"""Bytes to read 16 bits and write 8 bits."""
Tile = tuple[float, int, int, int]
"""(largest number of rows, rows of a cluster, rows of a tile, columns of a tile)."""
TILES: dict[str, tuple[Tile, ...]] = {
    "fp8": ((64, 64, 64, 64), (128, 128, 64, 128), (inf, 256, 128, 128)),
    "bf16": ((64, 16, 64, 128), (128, 64, 64, 128), (inf, 128, 128, 256)),
}
"""Tiles by the dtype of the product. For bf16, vLLM 0.25 on an H100 takes 21.0 ms for 380 sequences and 24.2 ms for
392."""

STATE_FLOPS_PER_NUMBER = 8.0
"""FLOPs of a prompt token for each number of a state: decay, read, write and output of a chunked scan, two FLOPs each.
Not measured."""

Matrix = tuple[float, float, float, float, str]
"""(count in the model, output rows, input columns, bytes per weight, dtype of the products) of a matrix on one GPU."""


class Operators:
    """Operator times on one GPU of a replica, for one micro-batch through all layers.

    With several data-parallel ranks, `tokens_s` and `rows_s` refer to one rank and `joint_s` to all ranks.
    """

    def __init__(
        self,
        model: Model,
        gpu: Gpu,
        parallel: Parallel,
        coefficients: Coefficients,
    ) -> None:
        self._model, self._gpu, self._parallel = model, gpu, parallel
        self._experts = Experts(model, gpu, parallel, coefficients)
        self._kernels, self._overhead = coefficients.kernels, coefficients.overhead
        self._products = self._kernels.products()
        matrices = _attention_matrices(model, gpu, parallel.tp) + _mlp_matrices(model, gpu, parallel.tp)
        self._matrices = [
            (count, out, into, width, self._products[dtype], peak_flops(gpu, dtype))
            for count, out, into, width, dtype in matrices
        ]
        dtype = compute_dtype(_shared_dtype(model), gpu)
        self._gemm, self._gemm_flops = self._products[dtype], peak_flops(gpu, dtype)
        self._shared = _shared_matrices(model, parallel.tp)
        self._num_moe_layers = num_moe_layers(model)
        self._shared_bytes = dtype_bytes(_shared_dtype(model), model.name)
        self._head_bytes = embedding_bytes(model)
        self._elementwise_bytes = _elementwise_bytes(model, parallel.tp)
        states = state_bytes(model) / parallel.tp
        prompt_flops = peak_flops(gpu, "bf16") * self._kernels.prefill_attention.compute_efficiency
        self._state_token_s = STATE_FLOPS_PER_NUMBER * states / 4.0 / prompt_flops
        self._state_row_s = (
            2.0 * states / (gpu.bandwidth_bytes_per_s * self._kernels.decode_attention.memory_efficiency)
        )

    def tokens_s(self, num_tokens: int) -> float:
        """Time of the operators that depend on the number of tokens. With 0 tokens, the step and its weights still
        count."""
        model = self._model
        gemm_s = sum(
            count * self._product_s(num_tokens, out, into, width, gemm, flops)
            for count, out, into, width, gemm, flops in self._matrices
        )
        return (
            gemm_s
            + self._mixtures_s(num_tokens)
            + self._elementwise_s(num_tokens)
            + (2 * model.num_layers + 1) * self._all_reduce_s(2.0 * num_tokens * model.hidden_size)
            + self._sends_s(2.0 * num_tokens * model.hidden_size)
            + model.num_layers * (self._overhead.layer_s + self._kernels.decode(model).latency_s)
            + self._num_moe_layers * self._overhead.expert_layer_s
            + self._overhead.step_s
            + num_tokens * self._state_token_s
        )

    def joint_s(self, num_tokens: int) -> float:
        """Time of the experts and of the exchange of tokens with them, for the tokens of all ranks."""
        return self._num_moe_layers * (self._experts.seconds(num_tokens) + self._exchange_s(num_tokens))

    def _mixtures_s(self, num_tokens: int) -> float:
        """Time of the shared experts of all layers and, with one data-parallel rank, the routed ones.

        For small batches, engines run the shared expert in parallel with the routed ones, on a second stream. Together
        they take as long as the slower one, or as the bytes of both.
        """
        width = self._shared_bytes
        shared_s = sum(
            self._product_s(num_tokens, out, into, width, self._gemm, self._gemm_flops) for out, into in self._shared
        )
        num_layers = self._num_moe_layers
        if self._parallel.dp > 1 or not num_layers:
            return num_layers * shared_s
        routed_s = self._experts.seconds(num_tokens)
        if not self._shared or num_tokens > self._overhead.shared_beside_tokens:
            return num_layers * (routed_s + shared_s)
        num_bytes = self._experts.num_bytes(num_tokens) + sum(out * into * width for out, into in self._shared)
        memory_s = num_bytes / (self._gpu.bandwidth_bytes_per_s * self._gemm.memory_efficiency)
        return num_layers * max(routed_s, shared_s, memory_s)

    def rows_s(self, num_rows: int) -> float:
        model, tp = self._model, self._parallel.tp
        gemm = self._products["bf16"]
        flops = peak_flops(self._gpu, "bf16")
        head_s = self._product_s(num_rows, model.vocab_size / tp, model.hidden_size, self._head_bytes, gemm, flops)
        gather_s = 0.0
        if tp > 1:
            gather_s = 2.0 * num_rows * model.vocab_size * (tp - 1) / tp / self._link_bytes_per_s(tp)
        return head_s + gather_s + num_rows * (self._overhead.sequence_s + self._state_row_s)

    def _product_s(self, rows: float, out: float, into: float, width: float, c: Roofline, flops: float) -> float:
        per_s = self._gpu.bandwidth_bytes_per_s
        memory_s = (out * into * width + rows * (2.0 * out + (1.0 if c.cast_efficiency else 2.0) * into)) / per_s
        cast_bytes = c.cast_share * CAST_BYTES * rows * into
        cast_s = cast_bytes / (per_s * c.cast_efficiency) if c.cast_efficiency else 0.0
        if c.wave_share and self._gpu.num_sms:
            tiles = TILES["bf16" if c is self._products.get("bf16") else "fp8"]
            rows = tiled_rows(rows, out, self._gpu.num_sms, c.wave_share, tiles)
        return cast_s + roofline_s(c, memory_s, 2.0 * rows * out * into / flops)

    def _elementwise_s(self, num_tokens: int) -> float:
        """Time of norms, residuals, rotary embedding, activations and cache writes, from their bytes through memory."""
        per_s = self._gpu.bandwidth_bytes_per_s * self._kernels.elementwise_efficiency
        return num_tokens * self._elementwise_bytes / per_s

    def _all_reduce_s(self, num_bytes: float) -> float:
        tp = self._parallel.tp
        if tp == 1:
            return 0.0
        c = _nearest(self._kernels.all_reduce, tp)
        wire_s = 2.0 * (tp - 1) / tp * num_bytes / (self._link_bytes_per_s(tp) * c.link_efficiency)
        hop_s = NETWORK_LATENCY_S if tp > self._gpu.gpus_per_node else 0.0
        return c.latency_s + hop_s + c.ramp_s_per_sqrt_byte * sqrt(num_bytes) + wire_s

    def _exchange_s(self, num_tokens: int) -> float:
        """Time of the exchange between data-parallel ranks: all tokens to every rank, and the sums of the experts'
        outputs back.

        An all-gather and a reduce-scatter, vLLM's default. Together they are an all-reduce with two latencies.
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
        """Time to send a micro-batch's activations from stage to stage, and its tokens back to the first stage."""
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


def tiled_rows(
    rows: float, out: float, num_sms: int, wave_share: float, tiles: tuple[Tile, ...] = TILES["fp8"]
) -> float:
    """The number of fully used rows that would take as long as `rows` rows of `out` columns in whole tiles.

    `wave_share` is the lost share of a partly filled wave, 0 to 1. The result never falls as `rows` grows.
    """
    if not rows:
        return 0.0
    _, unit, high, wide = next(tile for tile in tiles if rows <= tile[0])
    padded = unit * ceil(rows / unit)
    waves = padded / high * ceil(out / wide) / num_sms
    return padded * (1.0 - wave_share + wave_share * ceil(waves) / waves)


def _nearest(table: dict[str, AllReduce], num_gpus: int) -> AllReduce:
    sizes = sorted(map(int, table))
    return table[str(next((size for size in sizes if size >= num_gpus), sizes[-1]))]


def _elementwise_bytes(model: Model, tp: int) -> float:
    """Bytes of one token's norms, activations and cache writes in all layers."""
    shared = 0 if model.moe is None else model.moe.shared_intermediate_size
    total = 0.0
    for each in model.all_layers:
        heads = 2 * each.num_heads * each.v_head_dim + 3 * each.num_kv_heads * each.head_dim
        width = shared if each.has_experts else each.mlp_width if model.moe is None else shared
        total += each.num * 2.0 * (8 * model.hidden_size + (heads + 3 * width) / tp)
    return total


def _shared_dtype(model: Model) -> str:
    """Type of the weights of shared experts."""
    return next((each.mlp_dtype for each in model.all_layers if each.has_experts and each.mlp_dtype), "") or (
        linear_dtype(model)
    )


def _product_dtype(dtype: str, model: Model, gpu: Gpu) -> str:
    return compute_dtype(base_dtype(dtype or linear_dtype(model)), gpu)


def _attention_matrices(model: Model, gpu: Gpu, tp: int) -> list[Matrix]:
    matrices: list[Matrix] = []
    for each in model.all_layers:
        width, dtype = mixer_bytes(model, each), _product_dtype(each.mixer_dtype, model, gpu)
        matrices += [(each.num, out, into, width, dtype) for out, into in _mixer_shapes(model, each, tp)]
    return matrices


def _mixer_shapes(model: Model, layer: Layers, tp: int) -> list[tuple[float, float]]:
    """(output rows, input columns) of the matrices of one layer's attention or state, on one GPU."""
    h, heads = model.hidden_size, layer.num_heads / tp
    if not layer.num_heads:
        return [(layer.mixer_params / tp / h, h)] if layer.mixer_params else []
    if model.mla is None:
        kv_heads = max(layer.num_kv_heads / tp, 1.0) if layer.num_kv_heads else 0.0
        queries, values = heads * layer.head_dim, heads * layer.v_head_dim
        own = h * (layer.num_heads * (layer.head_dim + layer.v_head_dim))
        own += h * layer.num_kv_heads * (layer.head_dim + layer.v_head_dim)
        rest = (layer.mixer_params - own) / tp / h
        shapes = [(queries + kv_heads * (layer.head_dim + layer.v_head_dim), float(h)), (float(h), values)]
        return shapes if abs(rest) < 1 else [(max(shapes[0][0] + rest, 1.0), float(h)), shapes[1]]
    mla = model.mla
    q_dim = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    latent = mla.q_lora_rank + mla.kv_lora_rank + mla.qk_rope_head_dim
    return [
        (latent, h),
        (q_dim, mla.q_lora_rank or h),
        (heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank),
        (h, heads * mla.v_head_dim),
    ]


def _mlp_matrices(model: Model, gpu: Gpu, tp: int) -> list[Matrix]:
    h, up = model.hidden_size, num_mlp_matrices(model) - 1
    matrices: list[Matrix] = []
    for each in model.all_layers:
        dtype = _product_dtype(each.mlp_dtype, model, gpu)
        if each.mlp_width:
            width, num_bytes = each.mlp_width / tp, mlp_bytes(model, each)
            matrices += [(each.num, up * width, h, num_bytes, dtype), (each.num, h, width, num_bytes, dtype)]
        if each.has_experts and model.moe is not None:
            matrices.append((each.num, model.moe.num_experts, h, linear_bytes(model), dtype))
    return matrices


def _shared_matrices(model: Model, tp: int) -> list[tuple[float, float]]:
    """(output rows, input columns) of the shared experts' matrices of one layer, on one GPU."""
    if model.moe is None or not model.moe.shared_intermediate_size:
        return []
    h, width = model.hidden_size, model.moe.shared_intermediate_size / tp
    return [((num_mlp_matrices(model) - 1) * width, h), (h, width)]
