"""Kernels of the operators in PyTorch, on a CUDA device or, for trial runs, on the CPU."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from headway.calibration.measure.plan import OperatorCase
from headway.calibration.measure.sweep import KernelError, TimedKernel
from headway.core.errors import HeadwayError

COLD_BYTES = 512 * 2**20
"""Operands rotate through copies of this total size, so that no cache holds them, as with an engine's weights."""
MOST_COPIES = 16
GRAPH_CALLS = 16
GRAPHED = ("gemm", "prefill_attention", "decode_attention", "device_copy")


def load() -> Any:
    """Import PyTorch, an optional dependency. HeadwayError if it is missing."""
    try:
        import torch
    except ImportError:
        raise HeadwayError("measuring needs PyTorch: pip install 'headway[measure]'; --dry-run does without") from None
    return torch


class TorchKernels:
    def __init__(self, device: str) -> None:
        self._torch = load()
        if device == "cuda" and not self._torch.cuda.is_available():
            raise HeadwayError("--device cuda: PyTorch finds no GPU; --device cpu tries the sweep out")
        self._device = device
        self._cuda = device == "cuda"

    @property
    def software(self) -> str:
        cuda = f", CUDA {self._torch.version.cuda}" if self._cuda else ", CPU"
        return f"torch {self._torch.__version__}{cuda}"

    @property
    def gpu_name(self) -> str:
        return str(self._torch.cuda.get_device_name(0)) if self._cuda else "cpu"

    @property
    def num_gpus(self) -> int:
        return int(self._torch.cuda.device_count()) if self._cuda else 1

    def __call__(self, operation: OperatorCase) -> TimedKernel:
        """Return a kernel ready to be timed. KernelError if this device cannot run it."""
        make = getattr(self, f"_{operation.kind}")
        shape = {name: int(value) for name, value in operation.columns().items()}
        try:
            call = make(operation.dtype, shape)
            call(0)
            self._wait()
            if self._cuda and operation.kind in GRAPHED:
                return self._graph(call)
        except (RuntimeError, AttributeError, TypeError, NotImplementedError) as error:
            self._release()
            reason = str(error).strip().split("\n", 1)[0][:120]
            raise KernelError(reason or type(error).__name__) from None
        return TimedKernel(_counted(call), self._wait, release=self._release)

    def _release(self) -> None:
        """Empty PyTorch's pool: it keeps blocks of one shape's sizes, which the next shape cannot use."""
        if self._cuda:
            gc.collect()
            self._torch.cuda.empty_cache()

    def _wait(self) -> None:
        if self._cuda:
            self._torch.cuda.synchronize()

    def _graph(self, call: Callable[[int], object]) -> TimedKernel:
        """Capture several calls in a CUDA graph, as engines do, so that launch time does not count."""
        graph = self._torch.cuda.CUDAGraph()
        with self._torch.cuda.graph(graph):
            for i in range(GRAPH_CALLS):
                call(i)
        return TimedKernel(graph.replay, self._wait, GRAPH_CALLS, self._release)

    def _copies(self, num_bytes: float) -> int:
        """Number of sets of operands to rotate through."""
        return max(1, min(MOST_COPIES, round(COLD_BYTES / max(num_bytes, 1)))) if self._cuda else 1

    def _random(self, *size: int) -> Any:
        return self._torch.randn(*size, device=self._device, dtype=self._torch.bfloat16)

    def _gemm(self, dtype: str, s: dict[str, int]) -> Callable[[int], object]:
        m, n, k = s["m"], s["n"], s["k"]
        weights = [self._random(n, k) for _ in range(self._copies(2 * n * k))]
        x = self._random(m, k)
        if dtype == "bf16":
            return lambda i: self._torch.nn.functional.linear(x, weights[i % len(weights)])
        fp8, one = self._torch.float8_e4m3fn, self._torch.ones((), device=self._device)
        eights = [weight.to(fp8) for weight in weights]
        out = self._torch.bfloat16
        return lambda i: self._torch._scaled_mm(x.to(fp8), eights[i % len(eights)].t(), one, one, out_dtype=out)

    def _prefill_attention(self, _: str, s: dict[str, int]) -> Callable[[int], object]:
        q, k, v = self._qkv(s["batch_size"], s["new_tokens"], s["new_tokens"], s)
        attend = self._torch.nn.functional.scaled_dot_product_attention
        return lambda _: attend(q, k, v, is_causal=True, enable_gqa=True)

    def _decode_attention(self, _: str, s: dict[str, int]) -> Callable[[int], object]:
        each = 4 * s["batch_size"] * s["context_tokens"] * s["num_kv_heads"] * s["head_dim"]
        sets = [self._qkv(s["batch_size"], 1, s["context_tokens"], s) for _ in range(self._copies(each))]
        attend = self._torch.nn.functional.scaled_dot_product_attention
        return lambda i: attend(*sets[i % len(sets)], enable_gqa=True)

    def _qkv(self, batch: int, new: int, context: int, s: dict[str, int]) -> tuple[Any, Any, Any]:
        dim, kv_heads = s["head_dim"], s["num_kv_heads"]
        q = self._random(batch, s["num_heads"], new, dim)
        return q, self._random(batch, kv_heads, context, dim), self._random(batch, kv_heads, context, dim)

    def _device_copy(self, _: str, s: dict[str, int]) -> Callable[[int], object]:
        byte = self._torch.uint8
        pairs = [
            tuple(self._torch.empty(s["num_bytes"], dtype=byte, device=self._device) for _ in range(2))
            for _ in range(self._copies(2 * s["num_bytes"]))
        ]
        return lambda i: pairs[i % len(pairs)][0].copy_(pairs[i % len(pairs)][1])

    def _host_copy(self, _: str, s: dict[str, int]) -> Callable[[int], object]:
        byte = self._torch.uint8
        host = self._torch.empty(s["num_bytes"], dtype=byte, pin_memory=self._cuda)
        there = self._torch.empty(s["num_bytes"], dtype=byte, device=self._device)
        return lambda _: there.copy_(host, non_blocking=True)

    def _all_reduce(self, _: str, s: dict[str, int]) -> Callable[[int], object]:
        size = max(1, s["num_bytes"] // 2)
        half = self._torch.bfloat16
        parts = [self._torch.ones(size, dtype=half, device=f"cuda:{i}") for i in range(s["num_gpus"])]
        return lambda _: self._torch.cuda.nccl.all_reduce(parts)


def _counted(call: Callable[[int], object]) -> Callable[[], object]:
    """A function that calls `call` with 0, 1, 2, ..."""
    count = iter(range(1 << 62))
    return lambda: call(next(count))
