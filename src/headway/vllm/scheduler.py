"""vLLM's own scheduler with a Headway ordering, which orders its queues and selects requests to preempt.

vLLM admits the head of its queue; here the queue is ordered by rank. When KV blocks run out, vLLM preempts from the end
of `running`; here the requests that rank last are moved to the end first. `_displace` adds a function that vLLM lacks:
under a preemptive ordering, a waiting request takes the batch slot or the KV blocks of running requests that rank
behind it. The rest is vLLM's code.
"""

from __future__ import annotations

import os
import time
from inspect import signature
from typing import Any

from vllm.logger import init_logger
from vllm.utils.math_utils import cdiv
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.request import Request

import vllm
from headway.core.errors import HeadwayError
from headway.vllm import counts, settings
from headway.vllm.counts import TierCounts
from headway.vllm.ranking import RankedQueue, Ranking
from headway.vllm.request import EngineRequest

logger = init_logger("vllm.headway")
_MAX_COMPLAINTS = 20
"""Maximum number of requests whose unreadable hints are logged."""


class Scheduler(AsyncScheduler):  # type: ignore[misc]  # vLLM is not here when types are checked
    """vLLM's scheduler with the order of a policy: `--scheduler-cls headway.vllm.Scheduler`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Raises HeadwayError for an unknown version of vLLM, ordering or setting."""
        settings.require_known(vllm.__version__)
        super().__init__(*args, **kwargs)
        config = self.vllm_config
        if self.lora_config is not None and not hasattr(SchedulerStats(), "num_kv_fetch_reqs_by_stage"):
            raise HeadwayError(f"vLLM {vllm.__version__} with LoRA: headway.vllm.Scheduler expects 0.32 or later")
        parser = config.reasoning_config
        self.headway = settings.read(
            config.additional_config,
            os.environ,
            None if parser is None else parser.reasoning_start_token_ids,
            None if parser is None else parser.natural_reasoning_end_token_ids,
        )
        ordering = self.headway.ordering
        self.ranking = Ranking(ordering(), str(ordering), self._log_failure)
        self.clock = time.time
        """The clock of `Request.arrival_time`."""
        self.num_bad_hints = 0
        self._tiers = TierCounts()
        self._late: list[Request] = []
        """Preempted requests with tokens still being generated."""
        self.policy = SchedulingPolicy.FCFS  # requests are preempted from the end of `running`
        self.waiting = RankedQueue(self.ranking)
        self._admits_from_both = hasattr(self, "skipped_waiting")
        """Whether vLLM admits requests from the queue of those that waited for more than a batch slot and KV blocks,
        too, as it did before 0.31."""
        setattr(self, "skipped_waiting" if self._admits_from_both else "kv_holding_waiting", RankedQueue(self.ranking))
        self._drops_late = "drop_stale_output" in signature(AsyncScheduler._preempt_request).parameters
        """Whether tokens that come after their request was preempted may be dropped; since vLLM 0.27."""
        self._takes = set(signature(self.kv_cache_manager.coordinator.get_num_blocks_to_allocate).parameters)
        logger.info("Headway orders requests by %s", ordering)

    def _log_failure(self, name: str, error: Exception) -> None:
        logger.error("ordering %s failed; requests go on as fcfs", name, exc_info=error)

    def _log_bad_hint(self, text: str) -> None:
        self.num_bad_hints += 1
        if self.num_bad_hints <= _MAX_COMPLAINTS:
            logger.warning("%s; it goes on without", text)

    def add_request(self, request: Request) -> None:
        if request.request_id not in self.requests:
            config = self.headway
            view = EngineRequest(request, config.reasoning_start, config.reasoning_end, self._log_bad_hint)
            self.ranking.join(view)
            request.headway = view
            self._tiers.add(view.tier)
        super().add_request(request)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self._tiers.remove(request.headway.tier)
        return super()._free_request(request, *args, **kwargs)

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        stats = super().make_stats(*args, **kwargs)
        if stats is not None:
            passed_on = counts.passed_on(stats)
            pool = self.kv_cache_manager.block_pool
            total = pool.num_gpu_blocks - 1  # one block is vLLM's own
            head: Request = self.waiting.peek_request() if self.waiting else None
            passed_on |= {
                counts.FAILURES: self.ranking.num_failures,
                counts.BLOCKS_USED: total - pool.get_num_free_blocks(),
                counts.BLOCKS_TOTAL: total,
                counts.BLOCKS_DEMANDED: 0 if head is None else cdiv(head.num_tokens, self.block_size),
                **self._tiers.named(),
            }
        return stats

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        ranking = self.ranking
        ranking.begin(self.clock())
        free = self.kv_cache_manager.block_pool.get_num_free_blocks() - self._blocks_of_next_step()
        if free < 0:
            self._move_victims(-free)
        elif self.waiting:
            late = bool(self._late)
            if late:
                self._end_lateness()
            self.waiting.refresh(late)
            if ranking.preemptive and self._pause_state == PauseState.UNPAUSED:
                self._displace(free)
        return super().schedule(*args, **kwargs)

    def _select_waiting_queue_for_scheduling(self) -> RankedQueue | None:
        """The queue whose first request ranks first. vLLM asks before 0.31; since then it admits from one queue."""
        first, second = self.waiting, self.skipped_waiting
        if not (first and second):
            return first or second or None
        heads = [queue.peek_request() for queue in (first, second)]
        return second if self.ranking.ordered(heads)[0] is heads[1] else first

    def update_from_output(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        if not self.ranking.counts_tokens:
            return super().update_from_output(scheduler_output, *args, **kwargs)
        requests = self.requests
        scheduled = [requests[id].headway for id in scheduler_output.num_scheduled_tokens if id in requests]
        outputs = super().update_from_output(scheduler_output, *args, **kwargs)
        self.ranking.gained(scheduled)
        return outputs

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        is_late = getattr(request, "num_in_flight_tokens", request.num_output_placeholders) > 0
        self.ranking.preempted(request.headway, is_late)
        if is_late:
            self._late.append(request)
        super()._preempt_request(request, *args, **kwargs)

    def _end_lateness(self) -> None:
        """Handle preempted requests whose pending tokens may all have arrived."""
        for request in self._late:
            request.headway.is_late = _num_late(request) > 0
        self._late = [request for request in self._late if request.headway.is_late]

    # Preemption by rank.

    def _move_victims(self, missing_blocks: int) -> None:
        """Move the requests that must be preempted in this step to the end of `running`. The step then admits no
        request."""
        ranked, victims = self.ranking.ordered(self.running), list[Request]()
        while missing_blocks > 0 and ranked:
            victims.append(ranked.pop())
            missing_blocks -= self._own_blocks(victims[-1])
        gone = {request.request_id for request in victims}
        self.running[:] = [request for request in self.running if request.request_id not in gone] + victims[::-1]

    def _displace(self, free: int) -> None:
        """Preempt running requests that rank behind waiting requests, if the waiting requests can then start in this
        step. `free`: number of blocks that running requests leave free.
        """
        most = self.max_num_running_reqs if self._admits_from_both else self.max_num_active_reqs
        seats = most - len(self.running) - self.num_waiting_for_streaming_input
        if not self._admits_from_both:
            seats -= len(self.kv_holding_waiting)
        budget = self._budget_left()
        running: list[Request] | None = None
        passed: list[Request] = []
        while self.waiting and budget > 0:
            head: Request = self.waiting.peek_request()
            if self._can_start(head):
                blocks = self._blocks_to_start(head, budget, free)
                if seats <= 0 or blocks > free:
                    if running is None:
                        running = self.ranking.ordered(self.running, head)
                    freed = self._preempt_for(head, seats, blocks - free, running)
                    if freed is None:
                        break
                    num, more, tokens = freed
                    seats, free, budget = seats + num, free + more, budget + tokens
                seats -= 1
                free -= blocks
                budget -= head.num_tokens
            self.waiting.pop_request()
            passed.append(head)
        self.waiting.prepend_requests(passed)

    def _preempt_for(
        self, head: Request, seats: int, missing_blocks: int, running: list[Request]
    ) -> tuple[int, int, int] | None:
        """Preempt from the end of `running` until the head has a batch slot and its blocks; None if that is impossible.

        Returns the slots, blocks and tokens of this step's budget that are then free.
        """
        behind = self.ranking.behind(head, running)
        if self.connector is not None and not self._admits_from_both:
            behind = [request for request in behind if self._request_blocks_can_be_freed(request)]
        if not behind:
            return None
        if missing_blocks > 0 and missing_blocks > sum(self._own_blocks(request) for request in behind):
            return None
        num = freed = tokens = 0
        while behind and (seats + num <= 0 or missing_blocks > freed):
            victim = behind.pop()
            num += 1
            freed += self._own_blocks(victim)
            tokens += self._tokens_of_next_step(victim)
            running.remove(victim)
            self.running.remove(victim)
            if self._drops_late:
                self._preempt_request(victim, time.monotonic(), drop_stale_output=self.requires_kv_delivery)
            else:
                self._preempt_request(victim, time.monotonic())
            self.prev_step_scheduled_req_ids.discard(victim.request_id)
        return num, freed, tokens

    def _can_start(self, request: Request) -> bool:
        """Whether a waiting request lacks only a batch slot and KV blocks to run."""
        if self._admits_from_both:
            if self._is_blocked_waiting_status(request.status):
                return False
        elif not self._handle_blocked_waiting_request(request):
            return False
        if self._drops_late and request.num_stale_output_tokens and not request.drop_stale_output:
            return False
        if self.lora_config is None or request.lora_request is None:
            return True
        loras = {other.lora_request.lora_int_id for other in self.running if other.lora_request is not None}
        return bool(len(loras | {request.lora_request.lora_int_id}) <= self.lora_config.max_loras)

    def _tokens_of_next_step(self, request: Request) -> int:
        wanted: int = request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens
        most: int = self.max_num_scheduled_tokens
        return max(0, min(wanted, most))

    def _budget_left(self) -> int:
        """Tokens of this step that running requests do not use."""
        prefills = sum(self._tokens_of_next_step(request) - 1 for request in self._inflight_prefills)
        decodes = len(self.running) * (1 + self.num_spec_tokens)
        return int(self.max_num_scheduled_tokens - decodes - prefills)

    def _blocks_of_next_step(self) -> int:
        """Blocks that running requests need in this step; 0 if enough blocks are free in any case."""
        most = len(self.kv_cache_config.kv_cache_groups) * (
            2 * len(self.running) + cdiv(self.max_num_scheduled_tokens, self.block_size)
        )
        if 4 * most < self.kv_cache_manager.block_pool.get_num_free_blocks():
            return 0
        return sum(self._new_blocks(request) for request in self.running)

    def _new_blocks(self, request: Request) -> int:
        """Blocks that a running request needs in this step."""
        computed, size = request.num_computed_tokens, self.block_size
        after = computed + self._tokens_of_next_step(request) + self.num_lookahead_tokens
        return int(cdiv(after, size) - cdiv(computed, size)) * len(self.kv_cache_config.kv_cache_groups)

    def _blocks_to_start(self, request: Request, budget: int, free: int) -> int:
        """Free blocks that vLLM needs to admit a waiting request, without blocks found in the prefix cache."""
        manager = self.kv_cache_manager
        watermark = manager.watermark_blocks if self.running else 0
        groups = len(self.kv_cache_config.kv_cache_groups)
        most: int = groups * cdiv(request.num_tokens + self.num_lookahead_tokens, self.block_size) + watermark
        if most <= free:
            return most
        hits, num_hit, *_ = manager.get_computed_blocks(request)
        num_tokens = request.num_tokens
        if not self.scheduler_reserve_full_isl:
            num_tokens = min(num_tokens, num_hit + budget)
        given: dict[str, Any] = {
            "request_id": request.request_id,
            "num_tokens": num_tokens,
            "new_computed_blocks": hits.blocks,
            "num_encoder_tokens": 0,
            "total_computed_tokens": num_hit,
            "num_local_computed_tokens": num_hit,
            "num_tokens_main_model": num_tokens,
            "apply_admission_cap": self.scheduler_reserve_full_isl,
            "prefill_end": max(request.num_prompt_tokens, request.num_tokens - 1),  # since vLLM 0.31
        }
        known = {name: value for name, value in given.items() if name in self._takes}
        return int(manager.coordinator.get_num_blocks_to_allocate(**known)) + watermark

    def _own_blocks(self, request: Request) -> int:
        """Blocks that become available when this request is preempted: the blocks that only it holds, and its next
        blocks."""
        groups = self.kv_cache_manager.get_blocks(request.request_id).blocks
        own = sum(block.ref_cnt == 1 and not block.is_null for group in groups for block in group)
        return int(own) + self._new_blocks(request)


def _num_late(request: Request) -> int:
    """Tokens of a preempted request that are still being generated."""
    return int(getattr(request, "num_stale_output_tokens", request.num_output_placeholders))
