"""Chooses the operators to time for a model, and estimates the duration."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product, zip_longest

from msgspec import Struct

from headway.calibration.operators import SHAPES, OperatorKind
from headway.core.fleet import Gpu, Model
from headway.perf.roofline import peak_flops

GIB = 2**30
TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
PROMPTS = (512, 1024, 2048, 3072, 4096, 6144, 8192, 12288, 16384)
PROMPT_BATCHES = (1, 2, 4)
CONTEXTS = (16, 64, 1024, 2048, 4096, 8192, 16384)
BATCHES = (1, 4, 16, 64, 128, 256)
COPIES = tuple(2**i for i in range(16, 31))
MESSAGES = tuple(2**i for i in range(10, 29))
SAMPLED = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256)
"""Numbers of sequences whose next tokens are chosen together."""
SAMPLER: tuple[OperatorKind, ...] = ("top_p_sort", "top_p", "penalties")
COMPUTING: tuple[OperatorKind, ...] = ("gemm", "moe", "prefill_attention", "mla_attention")
DEGREES = (1, 2, 4, 8)
"""Tensor parallel degrees whose shapes are timed on one GPU."""
MEMORY_SHARE = 0.4
"""Largest share of the device's memory for the operands of one operator."""
OPERATOR_S = 0.15
"""Approximate time for one operator: set-up, warm-up, and rounds of 20 ms."""
ROUNDS = 8
SUSTAINED_S = 0.25
"""Work before a compute-bound operator is timed, because prompts run at the clock that the power limit sustains."""
LOGIT_BYTES = 32
"""Bytes per logit for the logits, their order and the probabilities in a sampler."""
LONGEST_S = 2.0
"""Maximum seconds of an operator at the device's peaks, over all rounds; slower operators are skipped."""


class OperatorCase(Struct, frozen=True):
    """One operator to time. `shape` has the columns that `SHAPES` lists for its kind."""

    kind: OperatorKind
    dtype: str
    shape: tuple[float, ...]

    def columns(self) -> dict[str, float]:
        return dict(zip(SHAPES[self.kind], self.shape, strict=True))


CPU = Gpu("cpu", 4 * GIB, 1e10, {"bf16": 1e11}, 1e10, 1e10, usd_per_hour=0.0, watts=0.0, gpus_per_node=1)
"""Round numbers, for trial runs on a CPU."""


def sweep(model: Model, on: Gpu) -> tuple[list[OperatorCase], list[str]]:
    """The operators to time, coarse shapes first so that a partial sweep is useful, and notes.

    `on.gpus_per_node` is the number of GPUs of this machine.
    """
    fitting: dict[OperatorCase, None] = {}
    too_large = 0
    for operation in _interleaved(_all(model, on)):
        if num_bytes(operation) > MEMORY_SHARE * on.memory_bytes or least_s(operation, on) * ROUNDS > LONGEST_S:
            too_large += 1
        else:
            fitting[operation] = None
    notes = [f"{too_large} shapes are too large for this device"] if too_large else []
    if model.moe is not None:
        notes.append(f"{model.name}: experts are timed in bf16 alone; other dtypes stay the catalog's")
    if on.gpus_per_node == 1:
        notes.append("one GPU: no all-reduce")
    return list(fitting), notes


def seconds(operations: Iterable[OperatorCase], on: Gpu) -> float:
    return sum(OPERATOR_S + warm_up_s(each, on) + ROUNDS * 2 * least_s(each, on) for each in operations)


def warm_up_s(operation: OperatorCase, on: Gpu) -> float:
    """Seconds to repeat an operator before it is timed, until it runs at its clock in an engine.

    A power limit lowers the clock of long computations only; memory-bound operators keep the highest clock.
    """
    if operation.kind not in COMPUTING or on is CPU:
        return 0.0
    compute_s = _flops(operation.kind, operation.columns()) / peak_flops(on, operation.dtype)
    return SUSTAINED_S if compute_s >= num_bytes(operation) / on.bandwidth_bytes_per_s else 0.0


def least_s(operation: OperatorCase, on: Gpu) -> float:
    """Seconds of the operator at the device's peaks."""
    s = operation.columns()
    if operation.kind == "all_reduce":
        return 2 * s["num_bytes"] / on.link_bytes_per_s
    if operation.kind == "host_copy":
        return s["num_bytes"] / on.host_link_bytes_per_s
    compute_s = _flops(operation.kind, s) / peak_flops(on, operation.dtype)
    if operation.kind == "moe":
        touched = min(1.0, s["num_tokens"] * s["experts_per_token"] / s["num_experts"])
        return max(touched * num_bytes(operation) / on.bandwidth_bytes_per_s, compute_s)
    return max(num_bytes(operation) / on.bandwidth_bytes_per_s, compute_s)


def num_bytes(operation: OperatorCase) -> float:
    s = operation.columns()
    if operation.kind == "gemm":
        width = 1 if operation.dtype == "fp8" else 2
        return width * (s["n"] * s["k"] + s["m"] * s["k"]) + 2 * s["m"] * s["n"]
    if operation.kind == "decode_attention":
        return 4 * s["batch_size"] * s["num_kv_heads"] * s["head_dim"] * s["context_tokens"]
    if operation.kind == "prefill_attention":
        return 4 * s["batch_size"] * s["head_dim"] * s["new_tokens"] * (s["num_heads"] + s["num_kv_heads"])
    if operation.kind == "mla_attention":
        return 2 * s["batch_size"] * s["context_tokens"] * (s["kv_lora_rank"] + s["rope_head_dim"])
    if operation.kind == "moe":
        return 2 * s["num_experts"] * _expert_params(s)
    if operation.kind in SAMPLER:
        return LOGIT_BYTES * s["batch_size"] * s["vocab_size"]
    return 2 * s["num_bytes"]


def _flops(kind: OperatorKind, s: dict[str, float]) -> float:
    if kind == "gemm":
        return 2 * s["m"] * s["n"] * s["k"]
    if kind == "prefill_attention":
        return 2 * s["batch_size"] * s["num_heads"] * s["head_dim"] * s["new_tokens"] ** 2
    if kind == "mla_attention":
        pair = 2 * (2 * s["kv_lora_rank"] + s["rope_head_dim"])
        return pair * s["num_heads"] * s["batch_size"] * s["context_tokens"]
    if kind == "moe":
        return 2 * s["num_tokens"] * s["experts_per_token"] * _expert_params(s)
    return 0.0


def _expert_params(s: dict[str, float]) -> float:
    """Parameters of one expert's share on one GPU."""
    return 3 * s["hidden_size"] * s["intermediate_size"] / s["tp"]


def _all(model: Model, on: Gpu) -> Iterator[list[OperatorCase]]:
    for dtype in ("bf16", "fp8"):
        if dtype in on.peak_flops:
            matrices = sorted({each for tp in DEGREES for each in matrices_of(model, tp)})
            yield [OperatorCase("gemm", dtype, (m, n, k)) for m, (n, k) in product(TOKENS, matrices)]
    heads = sorted({(model.num_heads // tp, max(1, model.num_kv_heads // tp)) for tp in _degrees(model)}, reverse=True)
    dim = model.head_dim
    yield [
        OperatorCase("prefill_attention", "", (b, new, 0, h, kv, dim))
        for new, b, (h, kv) in product(PROMPTS, PROMPT_BATCHES, heads)
    ]
    if model.mla is None:
        yield [
            OperatorCase("decode_attention", "", (b, context, h, kv, dim))
            for b, context, (h, kv) in product(BATCHES, CONTEXTS, heads)
        ]
    else:
        yield _latent(model)
    if model.moe is not None:
        yield _experts(model)
    vocabulary = float(model.vocab_size)
    yield [OperatorCase(kind, "", (b, vocabulary)) for b in SAMPLED for kind in SAMPLER]
    yield [OperatorCase("device_copy", "", (size,)) for size in COPIES]
    yield [OperatorCase("host_copy", "", (size,)) for size in COPIES]
    degrees = [num for num in DEGREES[1:] if num <= on.gpus_per_node]
    yield [OperatorCase("all_reduce", "", (num, size)) for size, num in product(MESSAGES, degrees)]


def _latent(model: Model) -> list[OperatorCase]:
    """Decoding over latent vectors, which all heads of a GPU share."""
    mla = model.mla
    if mla is None:
        return []
    heads = sorted({model.num_heads // tp for tp in _degrees(model)}, reverse=True)
    return [
        OperatorCase("mla_attention", "", (b, context, h, mla.kv_lora_rank, mla.qk_rope_head_dim))
        for b, context, h in product(BATCHES, CONTEXTS, heads)
    ]


def _experts(model: Model) -> list[OperatorCase]:
    """Operators of routed experts with balanced choices, for each degree of tensor parallelism that divides the
    experts' width."""
    moe = model.moe
    if moe is None:
        return []
    degrees = [tp for tp in DEGREES if moe.intermediate_size % tp == 0]
    sizes = (model.hidden_size, moe.intermediate_size, moe.experts_per_token, moe.num_experts)
    return [OperatorCase("moe", "bf16", (tokens, *sizes, tp, 1)) for tokens, tp in product(TOKENS, degrees)]


def matrices_of(model: Model, tp: int) -> list[tuple[int, int]]:
    """(output rows, input columns) of a layer's weight matrices and the head on one of `tp` GPUs; empty for invalid
    `tp`."""
    if tp not in _degrees(model):
        return []
    h, wide, dim = model.hidden_size, model.intermediate_size // tp, model.head_dim
    heads, kv_heads = model.num_heads // tp, max(1, model.num_kv_heads // tp)
    queries = (heads * dim, h) if model.mla is not None else ((heads + 2 * kv_heads) * dim, h)
    found = [queries, (h, heads * dim), (model.vocab_size // tp, h)]
    if wide:
        found += [((2 if model.gated_mlp else 1) * wide, h), (h, wide)]
    return found


def _degrees(model: Model) -> list[int]:
    """Tensor parallel degrees that divide the model."""
    sizes = (model.num_heads, model.intermediate_size, model.vocab_size)
    return [tp for tp in DEGREES if all(size % tp == 0 for size in sizes)]


def _interleaved(groups: Iterable[list[OperatorCase]]) -> Iterator[OperatorCase]:
    """Every eighth operator of each kind, with the kinds interleaved, then the operators halfway between, and so on."""
    lists = list(groups)
    for offset in (0, 4, 2, 6, 1, 5, 3, 7):
        for turn in zip_longest(*(group[offset::8] for group in lists)):
            yield from (operation for operation in turn if operation is not None)
