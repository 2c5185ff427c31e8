"""The kernels that `headway measure` times, on the CPU, if PyTorch is installed. Engines' libraries are stand-ins."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from headway.calibration.measure import engine_kernels, sweep
from headway.calibration.measure.operands import Operands
from headway.calibration.measure.plan import OperatorCase
from headway.calibration.measure.ranks import Ranks
from headway.calibration.measure.torch_kernels import TorchKernels, load
from headway.cli import main

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

SMALL = (
    OperatorCase("gemm", "bf16", (4, 64, 32)),
    OperatorCase("gemm", "fp8", (16, 64, 32)),
    OperatorCase("moe", "bf16", (6, 64, 128, 2, 4, 2, 1)),
    OperatorCase("prefill_attention", "", (2, 8, 0, 4, 2, 16)),
    OperatorCase("decode_attention", "", (2, 24, 4, 2, 16)),
    OperatorCase("mla_attention", "", (2, 24, 4, 32, 16)),
    OperatorCase("device_copy", "", (1024,)),
    OperatorCase("host_copy", "", (1024,)),
    OperatorCase("top_p_sort", "", (3, 500)),
    OperatorCase("penalties", "", (3, 500)),
)


@pytest.fixture(scope="module")
def kernels() -> Iterator[TorchKernels]:
    made = TorchKernels("cpu")
    yield made
    made.close()


def shape(operation: OperatorCase) -> dict[str, int]:
    return {name: int(value) for name, value in operation.columns().items()}


@pytest.mark.parametrize("operation", SMALL, ids=lambda each: f"{each.kind}{each.dtype}")
def test_every_kind_is_timed(operation: OperatorCase, kernels: TorchKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "ROUND_S", 0.0)
    kernel = kernels(operation)
    assert sweep.time_s(kernel, time.perf_counter) > 0
    kernel.release()


def test_what_pytorch_cannot_do_is_said(kernels: TorchKernels) -> None:
    with pytest.raises(sweep.KernelError, match="PyTorch has none; needs FlashInfer or vLLM"):
        kernels(OperatorCase("top_p", "", (3, 500)))
    with pytest.raises(sweep.KernelError):
        kernels(OperatorCase("gemm", "bf16", (-1, 64, 32)))


def test_processes_reduce_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of them, as on two GPUs; then again with another size."""
    monkeypatch.setattr(sweep, "ROUND_S", 0.0)
    ranks = Ranks(2, "cpu", load)
    try:
        for size in (1024, 4096):
            kernel = ranks.kernel(size)
            assert sweep.time_s(kernel, time.perf_counter) > 0
            assert "Gloo" in kernel.software
            kernel.release()
    finally:
        ranks.close()
    with pytest.raises(sweep.KernelError, match="has ended"):
        ranks.kernel(1024)


def test_experts_compute_what_their_tokens_chose(kernels: TorchKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """The grouped products against one expert at a time."""
    operation = SMALL[2]
    drawn: list[Any] = []

    def random(*size: int) -> Any:
        drawn.append(torch.randn(*size, dtype=torch.bfloat16) / 8)
        return drawn[-1]

    monkeypatch.setattr(kernels, "_random", random)
    found = kernels._moe("bf16", shape(operation))(0)
    up, down, x = drawn
    wanted = torch.zeros_like(x)
    for token, each in enumerate(engine_kernels.balanced(torch, "cpu", 6, 2, 4)):
        for expert in each:
            gate, value = (x[token] @ up[expert]).chunk(2)
            wanted[token] += (torch.nn.functional.silu(gate) * value) @ down[expert] / 2
    assert torch.allclose(found.float(), wanted.float(), atol=0.02)


def test_the_sampler_draws_among_the_largest(kernels: TorchKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(3, 500)
    monkeypatch.setattr(kernels, "_logits", lambda s: [logits])
    call = kernels._top_p_sort("", shape(SMALL[8]))
    largest = logits.topk(20).indices
    for _ in range(20):
        assert all(token in row for token, row in zip(call(0), largest, strict=True))


class StandIn(ModuleType):
    """A library whose calls have its signatures and record the shapes of what they get."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.seen: list[dict[str, Any]] = []

    def get_flash_attn_version(self) -> int:
        return 3

    def flash_attn_varlen_func(
        self, q: Any, k: Any, v: Any, max_seqlen_q: int, cu_seqlens_q: Any, max_seqlen_k: int, *,
        seqused_k: Any, softmax_scale: float, causal: bool, block_table: Any, fa_version: int,
    ) -> Any:  # fmt: skip
        """One sequence after the other with PyTorch's attention, through the block table."""
        outs = []
        for i, length in enumerate(seqused_k.tolist()):
            assert length <= max_seqlen_k and fa_version == 3 and causal
            own = q[cu_seqlens_q[i] : cu_seqlens_q[i + 1]]
            assert len(own) == max_seqlen_q
            keys, values = (cache[block_table[i].long()].flatten(0, 1)[:length] for cache in (k, v))
            outs.append(
                torch.nn.functional.scaled_dot_product_attention(
                    *(each.transpose(0, 1)[None] for each in (own, keys, values)), scale=softmax_scale, enable_gqa=True
                )
            )
        return torch.cat(outs)

    def flash_attn_with_kvcache(self, q: Any, k: Any, v: Any, *, cache_seqlens: Any, causal: bool) -> Any:
        assert q.shape[0] == k.shape[0] == v.shape[0] == len(cache_seqlens) and causal
        return q

    def scaled_fp8_quant(self, x: Any) -> tuple[Any, Any]:
        return x.to(torch.float8_e4m3fn), torch.ones(1)

    def cutlass_scaled_mm(self, a: Any, b: Any, scale_a: Any, scale_b: Any, out_dtype: Any) -> Any:
        return (a.to(out_dtype) @ b.to(out_dtype)) * scale_a * scale_b

    def fused_experts(self, hidden: Any, up: Any, down: Any, weights: Any, ids: Any) -> Any:
        assert up.shape[1] == 2 * down.shape[2] and up.shape[2] == down.shape[1] == hidden.shape[1]
        assert weights.shape == ids.shape and int(ids.max()) < len(up)
        return hidden

    def apply_top_k_top_p(self, logits: Any, k: Any, p: Any) -> Any:
        assert len(k) == len(p) == len(logits)
        return logits

    def top_k_top_p_sampling_from_logits(self, logits: Any, k: Any, p: Any, deterministic: bool) -> Any:
        assert len(k) == len(p) == len(logits)
        return logits.argmax(-1)

    def BatchDecodeWithPagedKVCacheWrapper(self, workspace: Any, layout: str, use_tensor_cores: bool) -> Any:  # noqa: N802 the library's name
        def plan(indptr: Any, indices: Any, last: Any, heads: int, kv: int, dim: int, page: int, **types: Any) -> None:
            assert int(indptr[-1]) == len(indices) and len(indptr) == len(last) + 1 and int(last.max()) <= page

        return SimpleNamespace(plan=plan, run=lambda q, cache: q)

    def BatchMLAPagedAttentionWrapper(self, workspace: Any) -> Any:  # noqa: N802 the library's name
        def plan(
            qo_indptr: Any, kv_indptr: Any, kv_indices: Any, kv_len_arr: Any, num_heads: int, head_dim_ckv: int,
            head_dim_kpe: int, page_size: int, causal: bool, sm_scale: float, q_data_type: Any, kv_data_type: Any,
        ) -> None:  # fmt: skip
            assert int(kv_indptr[-1]) == len(kv_indices) and len(qo_indptr) == len(kv_indptr) == len(kv_len_arr) + 1

        return SimpleNamespace(plan=plan, run=lambda q_latent, q_rope, latent, rope: latent)


@pytest.mark.parametrize("kind", engine_kernels.KERNELS, ids=lambda key: key[0])
def test_engines_kernels_get_the_operands_of_their_signatures(
    kind: tuple[Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for _, name, _ in engine_kernels.KERNELS[kind]:
        parts = name.split(".")
        for i in range(1, len(parts) + 1):
            module = ".".join(parts[:i])
            monkeypatch.setitem(sys.modules, module, StandIn(module))
    found = engine_kernels.installed(*kind)
    assert [one.package.split()[0] for one in found] == [package for package, *_ in engine_kernels.KERNELS[kind]]
    cases = {(each.kind, each.dtype): each for each in (*SMALL, OperatorCase("top_p", "", (3, 500)))}
    for one in found:
        call = one.make(Operands(torch, "cpu"), shape(cases[kind]), 2)
        call(0), call(1)


def test_no_library_is_no_kernel() -> None:
    assert engine_kernels.installed("moe", "bf16") == []


def test_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "m.csv"
    args = f"measure --model llama-3.2-3b --device cpu --minutes 0.05 --no-progress --out {out}".split()
    assert main(args) == 0
    printed = capsys.readouterr().out
    assert "timed, 0 were there" in printed and "were not tried on a GPU" in printed
    rows = sweep.read_file(out, "cpu")
    assert rows and all(row.latency_s > 0 for row in rows)
