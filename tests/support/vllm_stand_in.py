"""Stands in for the parts of vLLM that `headway.vllm.scheduler` extends, so that it is tested without vLLM.

The loops are those of vLLM 0.32's scheduler, for a text model without prefix cache, connectors and speculation. The
recorded decisions of vLLM itself (`tests/vllm/recorded.json`) say whether they still are.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum, auto
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

ANSWER, END = 7, 9
MODULES = {
    "vllm": (),
    "vllm.logger": ("init_logger",),
    "vllm.utils": (),
    "vllm.utils.math_utils": ("cdiv",),
    "vllm.v1": (),
    "vllm.v1.core": (),
    "vllm.v1.core.sched": (),
    "vllm.v1.core.sched.async_scheduler": ("AsyncScheduler",),
    "vllm.v1.core.sched.interface": ("PauseState",),
    "vllm.v1.core.sched.output": ("SchedulerOutput",),
    "vllm.v1.core.sched.request_queue": ("SchedulingPolicy",),
    "vllm.v1.metrics": (),
    "vllm.v1.metrics.stats": ("SchedulerStats",),
    "vllm.v1.request": ("Request",),
}


class PauseState(Enum):
    UNPAUSED = auto()
    PAUSED_ALL = auto()


class SchedulingPolicy(Enum):
    FCFS = "fcfs"


def init_logger(name: str) -> logging.Logger:
    return logging.getLogger(name)


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


class Request:
    """A request, with no more than the scheduler reads."""

    lora_request = None
    spec_token_ids: tuple[int, ...] = ()
    num_stale_output_tokens = num_output_placeholders = num_in_flight_tokens = num_computed_tokens = 0
    drop_stale_output = is_prefill_chunk = False

    def __init__(
        self, id: str, prompt: list[int], max_tokens: int, arrival_s: float, priority: int, extra: Any
    ) -> None:
        self.request_id, self.prompt_token_ids, self.max_tokens = id, prompt, max_tokens
        self.arrival_time, self.priority = arrival_s, priority
        self.num_prompt_tokens = len(prompt)
        self.sampling_params = SimpleNamespace(extra_args=extra)
        self._output_token_ids: list[int] = []

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self._output_token_ids)

    num_tokens_with_spec = num_tokens


class SchedulerOutput(SimpleNamespace):
    num_scheduled_tokens: dict[str, int]


class KvCache:
    """Counts blocks. Those of a request that nobody shares have `ref_cnt` 1."""

    watermark_blocks = 0

    def __init__(self, blocks: int, block_size: int) -> None:
        self.free, self._size = blocks, block_size
        self.num_gpu_blocks = blocks + 1
        self.held: dict[str, int] = {}
        self.block_pool = self.coordinator = self

    def get_num_free_blocks(self) -> int:
        return self.free

    def get_blocks(self, id: str) -> Any:
        return SimpleNamespace(blocks=[[SimpleNamespace(ref_cnt=1, is_null=False)] * self.held.get(id, 0)])

    def get_computed_blocks(self, request: Request) -> Any:
        return SimpleNamespace(blocks=()), 0, 0

    def get_num_blocks_to_allocate(self, num_tokens: int, **others: Any) -> int:
        return cdiv(num_tokens, self._size)

    def allocate(self, id: str, num_tokens: int) -> bool:
        more = cdiv(num_tokens, self._size) - self.held.get(id, 0)
        if more > self.free:
            return False
        self.free -= more
        self.held[id] = self.held.get(id, 0) + more
        return True

    def release(self, id: str) -> None:
        self.free += self.held.pop(id, 0)


class SchedulerStats:
    def __init__(self) -> None:
        self.num_kv_fetch_reqs_by_stage: dict[str, int] = {}


class AsyncScheduler:
    """vLLM's, without what a text model on one GPU does not need."""

    connector = lora_config = None
    log_stats = True
    requires_kv_delivery = False
    scheduler_reserve_full_isl = False
    num_waiting_for_streaming_input = num_spec_tokens = num_lookahead_tokens = 0

    def __init__(self, config: Any, seats: int, blocks: int, block_size: int, budget: int) -> None:
        self.vllm_config = config
        self.max_num_active_reqs, self.max_num_scheduled_tokens = seats, budget
        self.block_size = block_size
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=[None])
        self.kv_cache_manager = KvCache(blocks, block_size)
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.waiting: Any = None
        self.kv_holding_waiting: Any = None
        self.prev_step_scheduled_req_ids: set[str] = set()
        self._inflight_prefills: set[Request] = set()
        self._pause_state = PauseState.UNPAUSED

    def add_request(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.waiting.add_request(request)

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        return True

    def _request_blocks_can_be_freed(self, request: Request) -> bool:
        return True

    def _preempt_request(self, request: Request, timestamp: float, drop_stale_output: bool = False) -> None:
        self.kv_cache_manager.release(request.request_id)
        self._inflight_prefills.discard(request)
        request.num_computed_tokens = 0
        self.waiting.prepend_request(request)

    def schedule(self) -> SchedulerOutput:
        scheduled: dict[str, int] = {}
        budget, preempted = self.max_num_scheduled_tokens, False
        at = 0
        while at < len(self.running) and budget > 0:
            request = self.running[at]
            tokens = min(request.num_tokens - request.num_computed_tokens, budget)
            after = request.num_computed_tokens + tokens
            while not (fits := self.kv_cache_manager.allocate(request.request_id, after)):
                victim = self.running.pop()
                self._preempt_request(victim, 0.0)
                preempted = True
                if victim is request:
                    break
            if not fits:
                break
            scheduled[request.request_id] = tokens
            budget -= tokens
            at += 1
        skipped: deque[Request] = deque()
        while not preempted and self.waiting and budget > 0 and len(self.running) < self.max_num_active_reqs:
            request = self.waiting.peek_request()
            if request.num_stale_output_tokens:
                skipped.appendleft(self.waiting.pop_request())
                continue
            tokens = min(request.num_tokens, budget)
            if not self.kv_cache_manager.allocate(request.request_id, tokens):
                break
            self.running.append(self.waiting.pop_request())
            scheduled[request.request_id] = tokens
            budget -= tokens
        self.waiting.prepend_requests(skipped)
        for id, tokens in scheduled.items():
            request = self.requests[id]
            request.num_computed_tokens += tokens
            request.is_prefill_chunk = request.num_computed_tokens < request.num_tokens
            (self._inflight_prefills.add if request.is_prefill_chunk else self._inflight_prefills.discard)(request)
        return SchedulerOutput(num_scheduled_tokens=scheduled)

    def update_from_output(self, output: SchedulerOutput, sampled: dict[str, int]) -> None:
        for id in output.num_scheduled_tokens:
            request = self.requests[id]
            if id in sampled:
                request._output_token_ids.append(sampled[id])
            if len(request._output_token_ids) >= request.max_tokens:
                self.running.remove(request)
                self._free_request(request)

    def _free_request(self, request: Request) -> None:
        del self.requests[request.request_id]
        self.kv_cache_manager.release(request.request_id)

    def make_stats(self) -> SchedulerStats | None:
        return SchedulerStats() if self.log_stats else None


@contextmanager
def installed(version: str = "0.32.0") -> Iterator[None]:
    """`import vllm` finds this; `headway.vllm.scheduler` is imported anew, and forgotten at the end."""
    made = {}
    for name, contents in MODULES.items():
        made[name] = ModuleType(name)
        for each in contents:
            setattr(made[name], each, globals()[each])
    made["vllm"].__version__ = version  # type: ignore[attr-defined]
    sys.modules.pop("headway.vllm.scheduler", None)
    with patch.dict(sys.modules, made):
        try:
            yield
        finally:
            sys.modules.pop("headway.vllm.scheduler", None)
