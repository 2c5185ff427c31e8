"""Times all-reduces as engines run them: one process per GPU, captured in a CUDA graph.

Where vLLM is installed, its own kernel is timed for the sizes that it supports, and NCCL for larger ones. On a CPU, for
trial runs, the processes reduce with Gloo and capture nothing.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from importlib import import_module
from importlib.metadata import version
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from headway.calibration.measure.sweep import KernelError, TimedKernel

START_S = 180.0
"""Longest wait for the processes to start, and for one answer."""
GRAPH_CALLS = 16


class Ranks:
    """Processes that reduce together, one for each GPU. They live until `close`."""

    def __init__(self, num: int, device: str, load: Callable[[], Any]) -> None:
        """Raises KernelError if the processes do not start."""
        context = get_context("spawn")
        port = _free_port()
        self._links: list[Connection] = []
        self._processes = []
        for rank in range(num):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, rank, num, device, port, load), daemon=True)
            process.start()
            there.close()
            self._links.append(here)
            self._processes.append(process)
        try:
            self._answers()
        except KernelError:
            self.close()
            raise

    def kernel(self, num_bytes: int) -> TimedKernel:
        """The all-reduce of `num_bytes` bytes. KernelError if the processes cannot run it."""
        self._send(("prepare", num_bytes))
        software, calls = self._answers()[0]
        pending = [0]

        def run() -> None:
            pending[0] += 1

        def wait() -> None:
            self._send(("run", pending[0]))
            pending[0] = 0
            self._answers()

        return TimedKernel(run, wait, calls, self._release, software)

    def close(self) -> None:
        for link in self._links:
            link.close()  # closing the connection ends the process
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.terminate()
                process.join()

    def _release(self) -> None:
        self._send(("release", 0))
        self._answers()

    def _send(self, message: tuple[str, int]) -> None:
        for link in self._links:
            try:
                link.send(message)
            except OSError:
                raise KernelError("a process of the all-reduce has ended") from None

    def _answers(self) -> list[Any]:
        answers = []
        for link in self._links:
            try:
                answer = link.recv() if link.poll(START_S) else KernelError("a process of the all-reduce hangs")
            except EOFError:
                answer = KernelError("a process of the all-reduce has ended")
            answers.append(answer)
        for answer in answers:
            if isinstance(answer, KernelError):
                raise answer
        return answers


class _Rank:
    """The part of a measurement that one process runs on its own GPU."""

    def __init__(self, torch: Any, rank: int, num: int, device: str) -> None:
        self._torch, self._cuda = torch, device == "cuda"
        self._device = f"cuda:{rank}" if self._cuda else "cpu"
        self._run: Callable[[], object] = lambda: None
        if self._cuda:
            torch.cuda.set_device(rank)
        limit = timedelta(seconds=START_S)
        torch.distributed.init_process_group("nccl" if self._cuda else "gloo", rank=rank, world_size=num, timeout=limit)
        self._own = _vllm_kernel(torch, self._device) if self._cuda else None

    def prepare(self, num_bytes: int) -> tuple[str, int]:
        """Returns the kernel's software, and the number of its calls in one run."""
        torch = self._torch
        x = torch.ones(max(1, num_bytes // 2), device=self._device, dtype=torch.bfloat16)
        if self._own is not None and self._own.should_custom_ar(x):
            own = self._own
            self._run = self._captured(lambda: own.custom_all_reduce(x), own.capture())
            return f"vLLM {version('vllm')}, its own all-reduce in a CUDA graph", GRAPH_CALLS
        reduce = torch.distributed.all_reduce
        if not self._cuda:
            self._run = lambda: reduce(x)
            return f"torch {torch.__version__}, Gloo", 1
        self._run = self._captured(lambda: reduce(x), nullcontext())
        return f"torch {torch.__version__}, NCCL in a CUDA graph, one process for each GPU", GRAPH_CALLS

    def run(self, num: int) -> None:
        for _ in range(num):
            self._run()
        if self._cuda:
            self._torch.cuda.synchronize()

    def release(self, _: int) -> None:
        self._run = lambda: None
        if self._cuda:
            self._torch.cuda.empty_cache()

    def _captured(self, call: Callable[[], object], capture: Any) -> Callable[[], object]:
        call()
        self._torch.cuda.synchronize()
        graph = self._torch.cuda.CUDAGraph()
        with capture, self._torch.cuda.graph(graph):
            for _ in range(GRAPH_CALLS):
                call()
        replay: Callable[[], object] = graph.replay
        return replay


def _serve(link: Connection, rank: int, num: int, device: str, port: int, load: Callable[[], Any]) -> None:
    """The process of one rank: handles messages until the other end closes."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        here = _Rank(load(), rank, num, device)
        link.send("ready")
        while True:
            what, value = link.recv()
            link.send(_answer(here, what, value))
    except (EOFError, OSError):
        pass  # the sweep has ended
    except Exception as error:  # any error of a library goes to the sweep's notes
        link.send(_failure(error))


def _answer(rank: _Rank, what: str, value: int) -> Any:
    try:
        return getattr(rank, what)(value)
    except RuntimeError as error:
        return _failure(error)


def _failure(error: Exception) -> KernelError:
    return KernelError(str(error).strip().split("\n", 1)[0][:120] or type(error).__name__)


def _vllm_kernel(torch: Any, device: str) -> Any:
    """vLLM's all-reduce; None if it is not installed or does not support these GPUs."""
    try:
        library = import_module("vllm.distributed.device_communicators.custom_all_reduce")
    except ImportError:
        return None
    own = library.CustomAllreduce(torch.distributed.new_group(backend="gloo"), device)
    finalize = getattr(own, "finalize_p2p", None)
    if finalize is not None:
        finalize()
    return None if own.disabled else own


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
