"""Kernels of the operators: an installed engine's, otherwise PyTorch's, on a CUDA device or, for trials, a CPU."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

from headway.calibration.measure.engine_kernels import EngineKernel, balanced, draw, installed
from headway.calibration.measure.operands import Operands
from headway.calibration.measure.plan import OperatorCase, num_bytes
from headway.calibration.measure.ranks import Ranks
from headway.calibration.measure.sweep import KernelError, TimedKernel
from headway.calibration.operators import OperatorKind
from headway.core.errors import HeadwayError

COLD_BYTES = 512 * 2**20
"""Total bytes of the copies of operands. Repetitions rotate through the copies, so that no cache holds them, like an
engine's weights."""
MOST_COPIES = 16
GRAPH_CALLS = 16
BF16_OPERANDS = ("gemm", "moe", "prefill_attention", "decode_attention", "mla_attention")
SLACK = 1.05
"""Factor on the bytes of operands, with room for alignment and for queries."""
GRAPHED = ("gemm", "moe", "prefill_attention", "decode_attention", "mla_attention", "device_copy")
"""Operators captured in CUDA graphs. Engines launch the sampler's kernels one by one."""


def load() -> Any:
    """Import PyTorch, an optional dependency. Raises HeadwayError if it is missing."""
    try:
        import torch
    except ImportError:
        raise HeadwayError("measuring needs PyTorch: pip install 'headway[measure]'; --dry-run does without") from None
    return torch


class TorchKernels:
    """Kernels of a device, ready to be timed. `close` ends the all-reduce processes."""

    def __init__(self, device: str) -> None:
        self._torch = load()
        if device == "cuda" and not self._torch.cuda.is_available():
            raise HeadwayError("--device cuda: PyTorch finds no GPU; --device cpu tries the sweep out")
        self._device = device
        self._cuda = device == "cuda"
        self._ranks: dict[int, Ranks] = {}
        self._operands = Operands(self._torch, device)
        self._graphs: Graphs | None = None
        self._own: dict[tuple[OperatorKind, str], list[EngineKernel]] = {}
        self.notes: dict[str, None] = {}
        """Engine kernels that failed and were not timed."""

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

    def close(self) -> None:
        for ranks in self._ranks.values():
            ranks.close()
        self._ranks.clear()

    def __call__(self, operation: OperatorCase) -> TimedKernel:
        """A kernel that is ready to be timed. KernelError if this device cannot run it."""
        shape = {name: int(value) for name, value in operation.columns().items()}
        if operation.kind == "all_reduce":
            return self._reducing(shape["num_gpus"]).kernel(shape["num_bytes"])
        size = num_bytes(operation)
        copies = self._copies(size)
        for own in self._installed(operation.kind, operation.dtype) if self._cuda else ():
            try:
                return self._ready(operation, partial(own.make, self._operands, shape, copies), own.package)
            except KernelError as error:
                self.notes[f"{own.package}: {operation.kind}: {error}; another kernel is timed in its place"] = None
        make = getattr(self, f"_{operation.kind}", None)
        if make is None:
            raise KernelError("PyTorch has none; needs FlashInfer or vLLM")
        return self._ready(operation, lambda: make(operation.dtype, shape), "")

    def _ready(
        self, operation: OperatorCase, make: Callable[[], Callable[[int], object]], software: str
    ) -> TimedKernel:
        """Run a kernel once, and capture it if engines do. KernelError if it fails even with all of the memory."""
        try:
            return self._prepared(operation, make, software)
        except self._torch.OutOfMemoryError:
            self._release()
        except Exception as error:  # libraries may raise anything for unsupported cases
            raise KernelError(_reason(error)) from None
        try:
            return self._prepared(operation, make, software)
        except Exception as error:
            raise KernelError(_reason(error)) from None

    def _prepared(
        self, operation: OperatorCase, make: Callable[[], Callable[[int], object]], software: str
    ) -> TimedKernel:
        self._operands.reset()
        if operation.kind in BF16_OPERANDS:
            size = num_bytes(operation)
            self._operands.reserve(int(size * self._copies(size) * SLACK / 2), self._torch.bfloat16)
        call = make()
        call(0)
        self._wait()
        if self._cuda and operation.kind in GRAPHED:
            if self._graphs is None:
                self._graphs = Graphs(self._torch)
            return TimedKernel(self._graphs.captured(call), self._wait, GRAPH_CALLS, software=software)
        return TimedKernel(_counted(call), self._wait, software=software)

    def _installed(self, kind: OperatorKind, dtype: str) -> list[EngineKernel]:
        """The kernels of installed libraries; they are looked up once."""
        if (kind, dtype) not in self._own:
            self._own[kind, dtype] = installed(kind, dtype)
        return self._own[kind, dtype]

    def _reducing(self, num: int) -> Ranks:
        if num not in self._ranks:
            self._ranks[num] = Ranks(num, self._device, load)
        return self._ranks[num]

    def _release(self) -> None:
        """Return all memory to the device."""
        self._operands.release()
        self._graphs = None
        if self._cuda:
            gc.collect()
            self._torch.cuda.empty_cache()

    def _wait(self) -> None:
        if self._cuda:
            self._torch.cuda.synchronize()

    def _copies(self, size: float) -> int:
        """Number of sets of operands that repetitions alternate between."""
        return max(1, min(MOST_COPIES, round(COLD_BYTES / max(size, 1)))) if self._cuda else 1

    def _random(self, *size: int) -> Any:
        return self._operands.normal(*size)

    def _gemm(self, dtype: str, s: dict[str, int]) -> Callable[[int], object]:
        m, n, k = s["m"], s["n"], s["k"]
        x = self._random(m, k)
        if dtype == "bf16":
            weights = self._operands.copies(self._copies(2 * n * k), n, k)
            return lambda i: self._torch.nn.functional.linear(x, weights[i % len(weights)])
        fp8, one = self._torch.float8_e4m3fn, self._torch.ones((), device=self._device)
        eights = self._operands.copies(self._copies(n * k), n, k, dtype=fp8)
        out = self._torch.bfloat16

        def call(i: int) -> object:
            eight = eights[i % len(eights)].t()
            return self._torch._scaled_mm(x.to(fp8), eight, one, one, out_dtype=out, use_fast_accum=True)

        return call

    def _moe(self, _: str, s: dict[str, int]) -> Callable[[int], object]:
        """A layer's routed experts: tokens sorted by expert, grouped products, and the weighted sum of the outputs."""
        torch = self._torch
        hidden, width, chosen = s["hidden_size"], s["intermediate_size"] // s["tp"], s["experts_per_token"]
        up, down = self._random(s["num_experts"], hidden, 2 * width), self._random(s["num_experts"], width, hidden)
        x = self._random(s["num_tokens"], hidden)
        ids = balanced(torch, self._device, s["num_tokens"], chosen, s["num_experts"]).flatten()
        ones = torch.ones_like(ids, dtype=torch.int32)

        def call(_: int) -> object:
            order = ids.argsort()
            counts = torch.zeros(s["num_experts"], device=self._device, dtype=torch.int32).scatter_add_(0, ids, ones)
            ends, tokens = counts.cumsum(0, dtype=torch.int32), order // chosen
            gate, value = torch._grouped_mm(x[tokens], up, offs=ends).chunk(2, -1)
            out = torch._grouped_mm(torch.nn.functional.silu(gate) * value, down, offs=ends)
            return torch.zeros_like(x).index_add_(0, tokens, out / chosen)

        return call

    def _mla_attention(self, _: str, s: dict[str, int]) -> Callable[[int], object]:
        """Decoding over latent vectors as two products and a softmax, because PyTorch has no kernel for it."""
        torch, rank, wide = self._torch, s["kv_lora_rank"], s["kv_lora_rank"] + s["rope_head_dim"]
        batch, context = s["batch_size"], s["context_tokens"]
        q = self._random(batch, s["num_heads"], wide)
        caches = [self._random(batch, context, wide) for _ in range(self._copies(2 * batch * context * wide))]

        def call(i: int) -> object:
            cache = caches[i % len(caches)]
            weights = torch.softmax(q @ cache.mT * wide**-0.5, -1, dtype=torch.float32).to(torch.bfloat16)
            return weights @ cache[..., :rank]

        return call

    def _top_p_sort(self, _: str, s: dict[str, int]) -> Callable[[int], object]:
        """Cuts candidates by sorting the vocabulary, as vLLM before 0.17 does with PyTorch, then draws one."""
        torch, logits = self._torch, self._logits(s)
        top_k = torch.full((s["batch_size"], 1), s["vocab_size"] - 20, device=self._device)
        top_p = torch.full((s["batch_size"], 1), 0.9, device=self._device)

        def call(i: int) -> object:
            ordered, order = logits[i % len(logits)].sort(-1)
            ordered = ordered.masked_fill(ordered < ordered.gather(1, top_k), -float("inf"))
            cut = ordered.softmax(-1).cumsum(-1) <= 1 - top_p
            cut[:, -1] = False
            kept = torch.empty_like(ordered).scatter_(1, order, ordered.masked_fill(cut, -float("inf")))
            return draw(torch, kept.softmax(-1))

        return call

    def _penalties(self, _: str, s: dict[str, int]) -> Callable[[int], object]:
        """Penalties of repetition, frequency and presence: tokens counted by sequence, then three passes over the
        logits."""
        torch, logits = self._torch, self._logits(s)
        tokens = torch.randint(s["vocab_size"], (s["batch_size"], 1024), device=self._device)
        ones, one = torch.ones_like(tokens), torch.tensor(1.1, device=self._device)

        def call(i: int) -> object:
            counts = torch.zeros(s["batch_size"], s["vocab_size"], device=self._device, dtype=tokens.dtype)
            counts.scatter_add_(1, tokens, ones)
            seen, changed = counts > 0, logits[i % len(logits)]
            scale = torch.where(seen, one, 1.0)
            changed = torch.where(changed > 0, changed / scale, changed * scale)
            return changed - 0.1 * counts - 0.1 * seen

        return call

    def _logits(self, s: dict[str, int]) -> list[Any]:
        size = (s["batch_size"], s["vocab_size"])
        return self._operands.copies(self._copies(4 * size[0] * size[1]), *size, dtype=self._torch.float32)

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


class Graphs:
    """CUDA graphs of several calls, as in engines, so that launch time does not count.

    All graphs share one memory pool, because `torch.cuda.graph` would collect garbage and empty PyTorch's pool for each
    graph.
    """

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._pool = torch.cuda.graph_pool_handle()
        one = torch.zeros(1, device="cuda")
        self._keeps_pool = self._capture(lambda _: one.add_(1))
        """A pool without a graph cannot be reused."""

    def captured(self, call: Callable[[int], object]) -> Callable[[], object]:
        replay: Callable[[], object] = self._capture(call).replay
        return replay

    def _capture(self, call: Callable[[int], object]) -> Any:
        cuda = self._torch.cuda
        graph, stream = cuda.CUDAGraph(), cuda.Stream()
        stream.wait_stream(cuda.current_stream())
        with cuda.stream(stream):
            call(0)  # libraries initialise their state of a stream
            cuda.synchronize()
            graph.capture_begin(pool=self._pool)
            try:
                for i in range(GRAPH_CALLS):
                    call(i)
            finally:
                graph.capture_end()
        cuda.current_stream().wait_stream(stream)
        return graph


def _reason(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0][:120] or type(error).__name__


def _counted(call: Callable[[int], object]) -> Callable[[], object]:
    """A function that calls `call` with 0, 1, 2, ..."""
    count = iter(range(1 << 62))
    return lambda: call(next(count))
