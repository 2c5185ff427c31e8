"""The simulator's replica in real time, with the same batches, memory and step times.

Every iteration is one event.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection
from itertools import count
from math import inf
from time import monotonic

from headway.control import token_blocks
from headway.control.live import ENDED, Live
from headway.control.recorder import Recorder
from headway.core.errors import HeadwayError
from headway.core.fleet import LoraAdapter, Network, Pool
from headway.core.pacer import Pacer
from headway.core.policy import Ordering
from headway.core.request import Phase, Segment
from headway.emulator.kv_events import KvEventPublisher, KvEventsConfig
from headway.emulator.kv_exchange import KvExchange, KvGoneError, KvLink, KvSource
from headway.gateway.upstream.dialects import api_of
from headway.sim.kernel import Kernel
from headway.sim.replica import Replica, Run
from headway.sim.replica_resources import Line, PoolResources, adapter_times, calibrated_line
from headway.sim.speculation import DraftCounts


class GeneratedTokens:
    """Counts the generated tokens of one request. `kv_name`: its KV is kept for another engine."""

    def __init__(self, live: Live, kv_name: str | None = None) -> None:
        self.live, self.kv_name = live, kv_name
        self.num_generated = 0
        """Tokens that the replica has generated."""
        self.num_published = 0
        """Tokens that the client may read."""
        self._num_read = 0
        self._is_complete = False
        self._changed: asyncio.Future[None] | None = None

    def publish(self, num: int, is_complete: bool) -> None:
        """Make the first `num` tokens available."""
        if num > self.num_published or is_complete:
            self.num_published, self._is_complete = num, is_complete
            if self._changed is not None and not self._changed.done():
                self._changed.set_result(None)

    async def read(self) -> int:
        """Wait for tokens. Returns the number of new tokens; 0 means that the answer is complete."""
        while self.num_published == self._num_read and not self._is_complete:
            self._changed = asyncio.get_running_loop().create_future()
            await self._changed
        new, self._num_read = self.num_published - self._num_read, self.num_published
        return new


class EmulatedEngine:
    """One replica in real time. With `speed` 2.0 everything takes half as long. `line`: step times; by default perf's
    model.

    Prompts share the KV of their leading blocks if the pool's engine caches prefixes. `events`: publishes changes of
    these blocks. `throttle`: seconds from the start, and a factor for the duration of later iterations.
    """

    def __init__(
        self,
        pool: Pool,
        ordering: Ordering,
        speed: float = 1.0,
        link: KvLink | None = None,
        line: Line | None = None,
        events: KvEventsConfig | None = None,
        throttle: tuple[float, float] | None = None,
    ) -> None:
        self.pool = pool
        self.adapters = {} if pool.lora is None else {each.name: each for each in pool.lora.adapters}
        """LoRA adapters that requests may name, by name."""
        self._speed = speed
        self._loop = asyncio.get_running_loop()
        self._start_s = monotonic()
        self._kernel, self._recorder = Kernel(), Recorder()
        self._run_timer: asyncio.TimerHandle | None = None
        self._publish_timer: asyncio.TimerHandle | None = None
        self._unpublished: deque[tuple[float, GeneratedTokens, int, bool]] = deque()
        """(time, answer, number of tokens, is complete): tokens appear when the engine's output processing ends after
        an iteration."""
        self._answers: dict[int, GeneratedTokens] = {}
        self._ids = count()
        self._replica = Replica(
            0,
            PoolResources(pool, line or calibrated_line(pool)),
            ordering,
            Run(self._kernel, self, self._recorder, True, Pacer(), Network(), 0),
            0,
            None,
        )
        if (speculation := self._replica.batch.speculation) is not None:
            speculation.counts = DraftCounts([0] * speculation.setting.num_speculative_tokens)
        self.num_cached_tokens = self.num_prompt_tokens = 0
        """(tokens found in the prefix cache, all tokens), summed over all computed prompts."""
        self.events: KvEventPublisher | None = None
        is_sglang = api_of(pool.engine.name) == "sglang"
        if events is not None and events.is_on(is_sglang):
            self._replica.batch.report_cache_changes()
            self.events = KvEventPublisher(events, pool.engine.block_size_tokens, as_arrays=is_sglang)
        self.kv = KvExchange(pool, link or KvLink(), self._kernel, self._replica, self._run)
        if throttle is not None:
            at_s, factor = throttle
            self._loop.call_later(at_s / speed, self._throttle, factor)

    @property
    def now(self) -> float:
        """Seconds since the start, in the engine's time."""
        return (monotonic() - self._start_s) * self._speed

    @property
    def max_tokens(self) -> int:
        """Length of the longest possible request: prompt and output tokens."""
        return self._replica.max_request_tokens

    @property
    def drafts(self) -> DraftCounts | None:
        """Counts of the draft tokens so far; None if the engine does not speculate."""
        speculation = self._replica.batch.speculation
        return None if speculation is None else speculation.counts

    def load(self) -> tuple[int, int, float]:
        """Running requests, waiting requests, and the share of the KV cache in use."""
        self._run()
        view = self._replica.view
        return view.num_running, view.num_waiting + self.kv.num_fetching, view.kv_blocks_used / view.kv_blocks_total

    def blocks(self) -> tuple[int, int, int]:
        """Numbers of KV blocks: held by requests, in total, and needed by the first waiting request."""
        self._run()
        view = self._replica.view
        return view.kv_blocks_used, view.kv_blocks_total, view.head_demand_blocks

    def lora_load(self) -> tuple[Collection[str], Collection[str], int]:
        """LoRA adapters of running and of waiting requests, and the number of slots."""
        self._run()
        view = self._replica.view
        return view.loras_running, view.loras_waiting, view.max_loras

    def load_adapter(self, adapter: LoraAdapter) -> None:
        """Load a LoRA adapter, which requests may then name. Raises HeadwayError if the engine has no slots, or has the
        adapter."""
        slots = self._replica.batch.adapters
        if slots is None:
            raise HeadwayError("LoRA is not enabled; start the engine with --max-loras or --lora")
        if adapter.name in self.adapters:
            raise HeadwayError(f"the LoRA adapter {adapter.name!r} has already been loaded")
        self.adapters[adapter.name] = adapter
        slots.times[adapter.name] = adapter_times(self.pool, adapter)

    def unload_adapter(self, name: str) -> None:
        """Refuse further requests for a LoRA adapter; accepted requests end. Raises HeadwayError if it is unknown."""
        if name not in self.adapters:
            raise HeadwayError(f"the LoRA adapter {name!r} cannot be found")
        del self.adapters[name]

    def begin(
        self,
        prompt_tokens: int,
        output_tokens: int,
        tier: int,
        reasoning_tokens: int,
        kv_name: str | None = None,
        blocks: int | None = None,
        has_token: bool = False,
        received_s: float = inf,
        lora: str = "",
        prefix: tuple[Segment, ...] = (),
    ) -> GeneratedTokens:
        """Begin to serve a request.

        `kv_name`: keep the request's KV for another engine under this name. `blocks`: reserved blocks that hold the
        request's fetched KV, and its first token if `has_token`. `received_s`: arrival time of the HTTP request's head;
        the time from then to now is part of the engine's overhead. `prefix`: the prompt's blocks (`blocks_of`).
        """
        now = self._run()
        live = Live(
            next(self._ids), now, prompt_tokens, output_tokens, "", tier, reasoning_tokens, prefix=prefix, lora=lora
        )
        if reasoning_tokens:
            live.phase = Phase.REASONING
        answer = self._answers[live.id] = GeneratedTokens(live, kv_name)
        if blocks is None:
            self._replica.enqueue(live, min(max(received_s, now - self._replica.scheduler.request_s), now))
        elif has_token and output_tokens == 1:
            del self._answers[live.id]
            self.kv.release(blocks, now)
            answer.publish(1, True)
        else:
            self.kv.resume(live, blocks, now, has_token)
            answer.publish(int(has_token), False)
        self._run()
        return answer

    def blocks_of(self, prompt: list[int], lora: str) -> tuple[Segment, ...]:
        """The blocks of a prompt that the prefix cache may hold, named by their content."""
        if not self.pool.engine.prefix_caching:
            return ()
        if self.events is not None:
            return self.events.prompt(prompt, lora)
        return token_blocks.segments(prompt, self.pool.engine.block_size_tokens, lora)

    def close(self) -> None:
        """Close the sockets of the KV cache events."""
        if self.events is not None:
            self.events.close()

    async def fetch(self, source: KvSource, prompt_tokens: int, received_s: float) -> int | None:
        """Fetch the KV that another engine keeps. Returns the KV's blocks; None if the prompt must be computed.
        `received_s`: arrival time of the request's head. Raises KvGoneError if the KV is gone and requests without
        their KV fail.
        """
        tokenized_s = received_s + self._replica.scheduler.tokenize_s * prompt_tokens
        await asyncio.sleep((tokenized_s - self.now) / self._speed)
        try:
            return await self.kv.fetch(source, prompt_tokens)
        except KvGoneError:
            if not self.kv.link.recomputes:
                raise
            return None

    def abort(self, answer: GeneratedTokens) -> None:
        """Stop an answer whose client has left."""
        if answer.live.stage is not ENDED and answer.live.id in self._answers:
            now = self._run()
            if answer.live.stage is not ENDED:
                self._replica.cancel(answer.live, now)
                self._run()

    # Time.

    def _throttle(self, factor: float) -> None:
        self._replica.slow_down(factor, self._run())
        self._run()

    def _run(self) -> float:
        """Handle the events that are due, and set a timer for the next one. Returns the time."""
        now, kernel = self.now, self._kernel
        kernel.run(now)
        boundary_s, kernel.now = kernel.now, now
        self.kv.grant(now)
        kernel.run(now)
        self._recorder.clear()
        batch = self._replica.batch
        for live in batch.decoding.values():
            num = live.joined_generated + batch.tick - live.joined_tick
            self._publish_later(self._answers[live.id], num, False, boundary_s)
        if self._run_timer is not None:
            self._run_timer.cancel()
            self._run_timer = None
        if self.events is not None and (changes := self._replica.view.cache_changes()):
            self.events.publish(changes)
        if (next_s := kernel.next_s()) < inf:
            wait_s = next_s / self._speed - (monotonic() - self._start_s)
            self._run_timer = self._loop.call_later(max(wait_s, 0.0), self._run)
        return now

    def _publish_later(self, answer: GeneratedTokens, num: int, is_complete: bool, now: float) -> None:
        """Publish the tokens of an iteration that ended at `now`, after the engine's response overhead."""
        if num <= answer.num_generated and not is_complete:
            return
        answer.num_generated = num
        self._unpublished.append((now + self._replica.response_s, answer, num, is_complete))
        if self._publish_timer is None:
            self._publish()

    def _publish(self) -> None:
        unpublished, self._publish_timer = self._unpublished, None
        while unpublished and unpublished[0][0] <= self.now:
            _, answer, num, is_complete = unpublished.popleft()
            answer.publish(num, is_complete)
        if unpublished:
            wait_s = unpublished[0][0] / self._speed - (monotonic() - self._start_s)
            self._publish_timer = self._loop.call_later(max(wait_s, 0.0), self._publish)

    # Events of the replica (`sim.replica.Listener`).

    def on_finished(self, live: Live, now: float) -> None:
        live.stage = ENDED
        answer = self._answers.pop(live.id)
        self.num_cached_tokens += live.cached_tokens
        self.num_prompt_tokens += live.prompt_tokens
        if answer.kv_name is not None:
            self.kv.keep(answer.kv_name, live, now)
        self._publish_later(answer, live.output_tokens, True, now)

    def on_cancelled(self, live: Live, now: float) -> None:
        live.stage = ENDED
        answer = self._answers.pop(live.id)
        answer.publish(answer.num_published, True)

    def on_paused(self, live: Live, now: float) -> None:
        """Do nothing: only gateways pause requests, and engines see a cancellation."""

    def on_prompt_computed(self, live: Live, now: float) -> None:
        """Do nothing: the engine holds no requests back."""

    def on_phase_changed(self, live: Live, now: float) -> None:
        """Do nothing: the engine does not act on phases."""

    def on_prefilled(self, live: Live, now: float) -> None:
        """Do nothing: all requests decode on this replica."""
