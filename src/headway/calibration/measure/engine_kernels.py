"""Kernels of installed engine libraries: vLLM, FlashAttention and FlashInfer.

The signatures follow their public sources in November 2026. A library that refuses a call is named in the sweep's
notes, and PyTorch's kernel is timed in its place.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from headway.calibration.measure.operands import Operands
from headway.calibration.operators import OperatorKind

PAGE_TOKENS = 16
"""Tokens of a block of the KV cache, vLLM's default."""
WORKSPACE_BYTES = 128 * 2**20
"""FlashInfer's recommendation."""
Shape = dict[str, int]
Call = Callable[[int], object]
"""Calls the operator with the i-th set of operands."""


class EngineKernel:
    """One library's kernel for one operator."""

    def __init__(self, package: str, make: Callable[[Operands, Shape, int], Call]) -> None:
        self.package = package
        """The package and its version."""
        self.make = make
        """Creates the call from operands, shape and number of operand sets."""


def installed(kind: OperatorKind, dtype: str) -> list[EngineKernel]:
    """The installed kernels for an operator; the kernel of the catalog's engine comes first."""
    found = []
    for package, module, make in KERNELS.get((kind, dtype), ()):
        try:
            library = import_module(module)
        except Exception:  # a broken installation may raise anything; PyTorch's kernel then remains
            continue
        found.append(EngineKernel(f"{package} {_version(package)}", _bound(make, library)))
    return found


def _bound(make: Callable[..., Call], library: Any) -> Callable[[Operands, Shape, int], Call]:
    return lambda operands, shape, copies: make(library, operands, shape, copies)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "of unknown version"


def _paged(operands: Operands, s: Shape) -> tuple[Any, Any, Any, Any]:
    """A KV cache in blocks, and the block tables of the sequences."""
    pages = -(-s["context_tokens"] // PAGE_TOKENS)
    num = s["batch_size"] * pages
    size = (num, PAGE_TOKENS, s["num_kv_heads"], s["head_dim"])
    keys, values = (operands.normal(*size) for _ in range(2))
    torch, device = operands.torch, operands.device
    table = torch.randperm(num, device=device, dtype=torch.int32).view(s["batch_size"], pages)
    lengths = torch.full((s["batch_size"],), s["context_tokens"], device=device, dtype=torch.int32)
    return keys, values, table, lengths


def _queries(operands: Operands, s: Shape, num: int) -> Any:
    return operands.normal(num, s["num_heads"], s["head_dim"])


def _starts(operands: Operands, num: int, step: int) -> Any:
    return step * operands.torch.arange(num + 1, device=operands.device, dtype=operands.torch.int32)


def _vllm_attention(library: Any, operands: Operands, s: Shape, copies: int) -> Call:
    """Prefill and decode attention over vLLM's paged cache, with the version of FlashAttention that vLLM selects."""
    new = s.get("new_tokens", 1)
    shape = {**s, "context_tokens": s["context_tokens"] + (new if "new_tokens" in s else 0)}
    q = _queries(operands, s, s["batch_size"] * new)
    starts = _starts(operands, s["batch_size"], new)
    caches = [_paged(operands, shape) for _ in range(copies)]
    fa_version = library.get_flash_attn_version()

    def call(i: int) -> object:
        keys, values, table, lengths = caches[i % copies]
        return library.flash_attn_varlen_func(
            q=q,
            k=keys,
            v=values,
            cu_seqlens_q=starts,
            max_seqlen_q=new,
            seqused_k=lengths,
            max_seqlen_k=shape["context_tokens"],
            softmax_scale=s["head_dim"] ** -0.5,
            causal=True,
            block_table=table,
            fa_version=fa_version,
        )

    return call


def _flash_attention(library: Any, operands: Operands, s: Shape, copies: int) -> Call:
    """FlashAttention 2 or 3 over a contiguous cache."""
    new = s.get("new_tokens", 1)
    context = s["context_tokens"] + (new if "new_tokens" in s else 0)
    q = _queries(operands, s, s["batch_size"] * new).view(s["batch_size"], new, s["num_heads"], s["head_dim"])
    size = (s["batch_size"], context, s["num_kv_heads"], s["head_dim"])
    caches = [tuple(operands.normal(*size) for _ in range(2)) for _ in range(copies)]
    torch = operands.torch
    lengths = torch.full((s["batch_size"],), context, device=operands.device, dtype=torch.int32)

    def call(i: int) -> object:
        return library.flash_attn_with_kvcache(q, *caches[i % copies], cache_seqlens=lengths, causal=True)

    return call


def _flashinfer_decode(library: Any, operands: Operands, s: Shape, copies: int) -> Call:
    batch, heads, kv_heads, context = s["batch_size"], s["num_heads"], s["num_kv_heads"], s["context_tokens"]
    torch, device = operands.torch, operands.device
    q = _queries(operands, s, batch)
    caches = [_paged(operands, s) for _ in range(copies)]
    table, last = caches[0][2], (context - 1) % PAGE_TOKENS + 1
    workspace = torch.zeros(WORKSPACE_BYTES, device=device, dtype=torch.uint8)
    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=heads >= 4 * kv_heads)
    wrapper.plan(
        _starts(operands, batch, table.shape[1]),
        table.flatten(),
        torch.full((batch,), last, device=device, dtype=torch.int32),
        heads,
        kv_heads,
        s["head_dim"],
        PAGE_TOKENS,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )
    return lambda i: wrapper.run(q, caches[i % copies][:2])


def _flashinfer_latent(library: Any, operands: Operands, s: Shape, copies: int) -> Call:
    batch, heads, context = s["batch_size"], s["num_heads"], s["context_tokens"]
    rank, rope = s["kv_lora_rank"], s["rope_head_dim"]
    pages = -(-context // PAGE_TOKENS)

    torch, device, normal = operands.torch, operands.device, operands.normal
    q_latent, q_rope = normal(batch, heads, rank), normal(batch, heads, rope)
    caches = [
        (normal(batch * pages, PAGE_TOKENS, rank), normal(batch * pages, PAGE_TOKENS, rope)) for _ in range(copies)
    ]
    workspace = torch.zeros(WORKSPACE_BYTES, device=device, dtype=torch.uint8)
    wrapper = library.BatchMLAPagedAttentionWrapper(workspace)
    wrapper.plan(
        qo_indptr=_starts(operands, batch, 1),
        kv_indptr=_starts(operands, batch, pages),
        kv_indices=torch.randperm(batch * pages, device=device, dtype=torch.int32),
        kv_len_arr=torch.full((batch,), context, device=device, dtype=torch.int32),
        num_heads=heads,
        head_dim_ckv=rank,
        head_dim_kpe=rope,
        page_size=PAGE_TOKENS,
        causal=False,
        sm_scale=(rank + rope) ** -0.5,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )
    return lambda i: wrapper.run(q_latent, q_rope, *caches[i % copies])


def _vllm_fp8(library: Any, operands: Operands, s: Shape, copies: int) -> Call:
    """vLLM's products of 8-bit matrices, with the pass that casts the activations."""
    torch = operands.torch
    x = operands.normal(s["m"], s["k"])
    one = torch.ones(1, device=operands.device, dtype=torch.float32)
    weights = operands.copies(copies, s["n"], s["k"], dtype=torch.float8_e4m3fn)

    def call(i: int) -> object:
        eights, scale = library.scaled_fp8_quant(x)
        return library.cutlass_scaled_mm(eights, weights[i % copies].t(), scale, one, out_dtype=torch.bfloat16)

    return call


def _vllm_experts(library: Any, operands: Operands, s: Shape, copies: int) -> Call:
    hidden, width = s["hidden_size"], s["intermediate_size"] // s["tp"]
    num, chosen = s["num_experts"], s["experts_per_token"]
    torch, device = operands.torch, operands.device
    x, up, down = (
        operands.normal(*size) for size in ((s["num_tokens"], hidden), (num, 2 * width, hidden), (num, hidden, width))
    )
    ids = balanced(torch, device, s["num_tokens"], chosen, num).to(torch.int32)
    weights = torch.full((s["num_tokens"], chosen), 1 / chosen, device=device, dtype=torch.float32)
    return lambda _: library.fused_experts(x, up, down, weights, ids)


def _vllm_cut(library: Any, operands: Operands, s: Shape, copies: int) -> Call:
    """Cuts candidates as this version of vLLM does without FlashInfer, then draws one."""
    torch, device = operands.torch, operands.device
    logits = operands.copies(copies, s["batch_size"], s["vocab_size"], dtype=torch.float32)
    top_k = torch.full((s["batch_size"],), 20, device=device, dtype=torch.int32)
    top_p = torch.full((s["batch_size"],), 0.9, device=device)

    def call(i: int) -> object:
        probs = library.apply_top_k_top_p(logits[i % copies].clone(), top_k, top_p).softmax(-1)
        return draw(torch, probs)

    return call


def _flashinfer_cut(library: Any, operands: Operands, s: Shape, copies: int) -> Call:
    torch, device = operands.torch, operands.device
    logits = operands.copies(copies, s["batch_size"], s["vocab_size"], dtype=torch.float32)
    top_k = torch.full((s["batch_size"],), 20, device=device, dtype=torch.int32)
    top_p = torch.full((s["batch_size"],), 0.9, device=device)
    return lambda i: library.top_k_top_p_sampling_from_logits(logits[i % copies], top_k, top_p, deterministic=True)


def balanced(torch: Any, device: str, num_tokens: int, chosen: int, num_experts: int) -> Any:
    """The experts of each token; all experts are chosen equally often."""
    each = torch.arange(num_tokens * chosen, device=device) % num_experts
    return each.view(num_tokens, chosen)


def draw(torch: Any, probs: Any) -> Any:
    """Draw one token for each row without a host synchronisation, as vLLM does: the largest of p over an exponential
    number."""
    return (probs / torch.empty_like(probs).exponential_()).argmax(-1)


FA_UTILS = "vllm.v1.attention.backends.fa_utils"
KERNELS: dict[tuple[OperatorKind, str], tuple[tuple[str, str, Callable[..., Call]], ...]] = {
    ("gemm", "fp8"): (("vllm", "vllm._custom_ops", _vllm_fp8),),
    ("moe", "bf16"): (("vllm", "vllm.model_executor.layers.fused_moe", _vllm_experts),),
    ("prefill_attention", ""): (
        ("vllm", FA_UTILS, _vllm_attention),
        ("flash-attn-3", "flash_attn_interface", _flash_attention),
        ("flash-attn", "flash_attn", _flash_attention),
    ),
    ("decode_attention", ""): (
        ("vllm", FA_UTILS, _vllm_attention),
        ("flash-attn-3", "flash_attn_interface", _flash_attention),
        ("flashinfer-python", "flashinfer", _flashinfer_decode),
        ("flash-attn", "flash_attn", _flash_attention),
    ),
    ("mla_attention", ""): (("flashinfer-python", "flashinfer.mla", _flashinfer_latent),),
    ("top_p", ""): (
        ("flashinfer-python", "flashinfer.sampling", _flashinfer_cut),
        ("vllm", "vllm.v1.sample.ops.topk_topp_sampler", _vllm_cut),
    ),
}
"""(kind, dtype) -> (package, module, maker) in order of preference."""
