"""Counts tokens of responses, and determines phases and times between tokens."""

from __future__ import annotations

import logging
from math import inf
from time import monotonic

from headway.control.live import DECODING, NEVER
from headway.core.request import Phase
from headway.gateway.relay import passthrough
from headway.gateway.relay.continuation import PartialResponse
from headway.gateway.relay.request import RESPONSES, ClientRequest
from headway.gateway.scheduling.in_flight import InFlightRequest
from headway.gateway.scheduling.scheduler import Scheduler
from headway.gateway.scheduling.scorer import ConfidenceMeter
from headway.gateway.scheduling.stream_copy import StreamPart
from headway.gateway.upstream import sse
from headway.gateway.upstream.chunks import Chunk, Usage

log = logging.getLogger("headway.gateway")
_SLACK_TOKENS = 16
_CHUNKS_PER_TOKEN = 2


class ResponseMeter:
    """Counts the tokens of one model's answer, over all replicas that contribute to it.

    Counts go to `live` and to the reservation; text goes to `partial`.
    """

    tokens_before = 0
    """Tokens of the answer from replicas before the current one."""
    prompt_tokens: int | None = None
    """Prompt tokens by the engine's count; None if not reported."""
    is_beyond_limit = False
    """Whether the engine has generated more tokens than allowed."""
    _limit: float = inf
    _counted_before = 0
    """The value of `tokens_before` when an attempt's start was last counted."""
    _num_forgotten = 0
    """Number of tokens that are still counted although the next engine generates them again."""
    _is_in_think_tags = False

    def __init__(self, request: ClientRequest, in_flight: InFlightRequest, scheduler: Scheduler) -> None:
        self._request, self._in_flight, self._live, self._scheduler = request, in_flight, in_flight.live, scheduler
        self.partial = PartialResponse(request)
        several = request.may_be_several and not request.is_single
        self._counts = ChoiceCounts(request.num_sequences, request.num_prompts) if several else None
        self.passthrough = passthrough.Passthrough() if request.is_passthrough else None
        self.confidence: ConfidenceMeter | None = scheduler.confidence_meter() if in_flight.needs_score else None
        self.takes_texts = self._counts is None and self.confidence is None
        """Whether a text-only chunk can be counted by `measure_text`."""
        self.hides_logprobs = self.confidence is not None and not request.body.get("logprobs")
        """Whether only the gateway, and not the client, asked for log probabilities."""

    @property
    def num_finished(self) -> int:
        """Number of choices with a finish reason."""
        if self._counts is not None:
            return self._counts.num_finished
        return int(self.partial.finish_reason is not None)

    @property
    def has_progress(self) -> bool:
        """Whether the engine has generated a token or ended its answer."""
        return self._live.generated_tokens > 0 or self.num_finished > 0

    @property
    def answer_tokens(self) -> int:
        """Answer tokens so far. A token without text that ends the reasoning does not count."""
        live = self._live
        return 0 if live.answer_s != live.answer_s else live.answer_tokens

    def limit(self, max_tokens: int, is_exact: bool) -> None:
        """Set the largest total number of answer tokens. If chunks are counted, one token may be several chunks."""
        if self._counts is None and not self._request.body.get("echo"):
            self._limit = float(max_tokens if is_exact else _CHUNKS_PER_TOKEN * max_tokens + _SLACK_TOKENS)

    def restore(self, part: StreamPart) -> None:
        """Continue the counts of a stream that the client received before it retried."""
        partial, live, now = self.partial, self._live, self._scheduler.clock.now
        partial.restore(part)
        live.generated_tokens, live.first_token_s = partial.tokens, now
        if partial.text:
            live.answer_s = now
        else:
            live.phase = Phase.REASONING

    def forget_silent_tokens(self) -> int:
        """Begin an attempt. Returns the number of tokens that its engine generates again:
        `PartialResponse.forget_silent_ids`."""
        num = self.partial.forget_silent_ids()
        self.tokens_before = self.partial.tokens
        self._num_forgotten += num
        return num

    def _count_no_more(self) -> None:
        """Subtract the forgotten tokens from the request's count, because the engine has begun to generate them
        again."""
        num, self._num_forgotten = self._num_forgotten, 0
        self._live.generated_tokens -= num
        if self._in_flight.reservation is not None:
            self._in_flight.reservation.count_tokens(-num)

    def note_unread(self, what: str) -> None:
        """Record that an answer, or one of its events, is passed on without being read."""
        if what:
            in_flight = self._in_flight
            in_flight.answer.unread = counts = dict(in_flight.answer.unread or ())
            counts[what] = counts.get(what, 0) + 1
            replica = in_flight.replica
            if replica is not None and what not in replica.noted:
                replica.noted.add(what)
                log.warning(
                    "%s answers %s with %s, which is passed on and not read", replica.name, self._request.path, what
                )

    def measure(self, chunk: Chunk) -> None:
        """Count a chunk's tokens, and set the request's phase by their kind."""
        partial, choices, usage = self.partial, chunk.choices, chunk.usage
        tokens, has_reasoning, has_answer = 0, False, False
        for choice in choices:
            text, reasons, calls = choice.text, False, False
            delta = choice.delta
            if delta is not None:
                text = text or delta.content
                reasons = bool(delta.reasoning or delta.reasoning_content)
                calls = delta.tool_calls is not None
            if self.confidence is not None:
                self.confidence.observe(choice)
            if choice.usage is not None and usage is None and len(choices) == 1:
                usage = choice.usage
            if choice.token_ids is not None:
                tokens += len(choice.token_ids)
            elif text or reasons or calls:
                tokens += 1
            if text and (self._is_in_think_tags or not partial.text):
                reasons = self._is_in_think(text) or reasons
            has_reasoning |= reasons
            has_answer |= calls or bool(text and not reasons)
        timings, choice_counts = chunk.timings, self._counts
        if choice_counts is not None:
            tokens = max(choice_counts.add(chunk) - self._live.generated_tokens, 0)
        elif timings is not None and timings.predicted_n:  # tokens may have no text, and chunks may have several tokens
            tokens = max(self.tokens_before + timings.predicted_n - self._live.generated_tokens, 0)
            if not self.tokens_before:
                self._live.cached_tokens = max(timings.cache_n, 0)
            self._count_continued(timings.prompt_n, timings.cache_n)
        partial.add(chunk, tokens)
        if self._num_forgotten and (tokens or usage is not None):
            self._count_no_more()
        if tokens:
            self._count_tokens(tokens, has_reasoning, has_answer)
        if usage is not None:
            partial.has_usage = True
            prompt_tokens, cached_tokens = usage.prompt_tokens, usage.cached_tokens
            if choice_counts is not None and timings is not None and len(choices) == 1:
                prompt_tokens, cached_tokens = choice_counts.add_prompt(choices[0].index, usage)
            partial.prompt_tokens = max(prompt_tokens - self.tokens_before, 0)
            self.set_prompt_tokens(partial.prompt_tokens)
            if not self.tokens_before and usage.prompt_tokens_details is not None:
                self._live.cached_tokens = cached_tokens
            self._count_continued(usage.prompt_tokens - usage.cached_tokens, usage.cached_tokens)
            if choice_counts is not None:
                self._count_tokens(choice_counts.num - self._live.generated_tokens)
            elif usage.completion_tokens:  # 0: not reported, or no tokens
                self._count_tokens(self.tokens_before + usage.completion_tokens - self._live.generated_tokens)

    def measure_text(self, text: str) -> None:
        """Like `measure`, for a text-only chunk if `takes_texts`."""
        partial, reasons = self.partial, False
        if self._is_in_think_tags or not partial.text:
            reasons = self._is_in_think(text)
        partial.add_text(text)
        if self._num_forgotten:
            self._count_no_more()
        self._count_tokens(1, reasons, not reasons)

    def _count_continued(self, computed: int, cached: int) -> None:
        """Count, once per attempt that continues the answer, the tokens that its engine had to compute again."""
        if self._counted_before != self.tokens_before:
            self._counted_before = self.tokens_before
            before = self._in_flight.answer.continued_tokens
            self._in_flight.answer.continued_tokens = before[0] + max(computed, 0), before[1] + max(cached, 0)

    def measure_passthrough(self, meter: passthrough.Passthrough, payload: bytes) -> None:
        """Count the tokens of an event that is passed on unchanged."""
        tokens, is_reasoning = meter.measure(payload)
        self.note_unread(meter.unread)
        if meter.id is not None:
            self._in_flight.answer.response_id = meter.id
        if tokens:
            self._count_tokens(tokens, is_reasoning, not is_reasoning)
        if meter.prompt_tokens:
            self.set_prompt_tokens(meter.prompt_tokens)
            self._live.cached_tokens = meter.cached_tokens
        if meter.generated_tokens:
            self._count_tokens(meter.generated_tokens - self._live.generated_tokens)

    def measure_unstreamed(self, data: bytes, is_text: bool = True) -> None:
        """Count the tokens of an answer that was not streamed; the time of its first token is unknown. `is_text`: it
        may be JSON.

        Raises EngineError if it reports an error, or was given up.
        """
        usage: Usage | None = None
        if is_text and self.passthrough is not None:
            usage = self.passthrough.measure_whole(data)
            self.note_unread(self.passthrough.unread)
            if self._request.path == RESPONSES:
                self._in_flight.answer.response_id = self.passthrough.id
        elif is_text:
            chunk, unread = sse.read_chunk(data)
            if unread:
                self.note_unread(unread)
            self.partial.add(chunk, 0)
            if self.confidence is not None:
                for choice in chunk.choices:
                    self.confidence.observe(choice)
            usage = chunk.usage
            if self._counts is not None and usage is not None:
                if chunk.timings is not None:
                    usage.prompt_tokens = _of_all_prompts(self._request.body.get("prompt"), usage.prompt_tokens)
                usage.completion_tokens = self._counts.of_whole(chunk)
        self._in_flight.answer.is_unstreamed = True
        if usage is not None:
            self.set_prompt_tokens(usage.prompt_tokens)
            self._live.cached_tokens = 0 if usage.prompt_tokens_details is None else usage.cached_tokens
            self._count_tokens(usage.completion_tokens)

    def _is_in_think(self, text: str) -> bool:
        """Whether the answer's first text, or a text between <think> and </think>, is reasoning."""
        is_inside = self._is_in_think_tags or text.lstrip().startswith("<think>")
        self._is_in_think_tags = is_inside
        if is_inside and "</think>" in "".join((*self.partial.text[-8:], text)):
            self._is_in_think_tags = False
        return is_inside

    def set_prompt_tokens(self, tokens: int) -> None:
        """Replace the estimated prompt tokens by the engine's count; 0: not reported."""
        if tokens > 0:
            self.prompt_tokens = tokens
            self._live.prompt_tokens = tokens

    def _count_tokens(self, tokens: int, has_reasoning: bool = False, has_answer: bool = False) -> None:
        """Count new tokens. Reasoning ends before the first token of the answer."""
        live, reservation, now = self._live, self._in_flight.reservation, NEVER
        live.generated_tokens += tokens
        if live.generated_tokens > self._limit:
            self.is_beyond_limit = True
        if live.first_token_s != live.first_token_s and not self._in_flight.answer.is_unstreamed:
            live.first_token_s = now = self._scheduler.clock.now
        if live.stage is not DECODING:
            live.stage = DECODING
            self._in_flight.begin_answer()
        ends_reasoning = live.answer_s != live.answer_s and self._set_phase(has_reasoning, has_answer, tokens, now)
        if reservation is not None:
            reservation.count_tokens(tokens)
        if ends_reasoning:
            self._scheduler.phase_changed(live)

    def _set_phase(self, has_reasoning: bool, has_answer: bool, tokens: int, now: float) -> bool:
        """Set the phase by the kinds of the new tokens. `now`: arrival time of the tokens; NaN: the present. Returns
        True if the answer begins after reasoning."""
        live = self._live
        if has_reasoning:
            live.phase = Phase.REASONING
            live.reasoning_tokens = live.generated_tokens
        if not has_answer:
            return False
        live.answer_s = now if now == now else self._scheduler.clock.now
        live.phase = Phase.ANSWERING
        if not live.reasoning_tokens:
            return False
        if not has_reasoning:
            live.reasoning_tokens = live.generated_tokens - tokens
        live.reasoning_end_s = live.answer_s
        return True


def _of_all_prompts(prompts: object, first_tokens: int) -> int:
    """Estimated tokens of a list of prompts whose first prompt has `first_tokens`. Prompts are texts or token ids; the
    tokens per character are assumed equal."""
    if not isinstance(prompts, list) or not all(isinstance(each, str | list) for each in prompts):
        return first_tokens
    sizes = [len(each) for each in prompts]
    return round(first_tokens * sum(sizes) / sizes[0]) if sizes and sizes[0] else first_tokens


class ChoiceCounts:
    """Counts the tokens of an answer with several choices, for each engine's way to report usage. vLLM and SGLang
    report the total at the end and, on request, each choice's tokens with the choice's chunks. llama.cpp reports one
    choice's tokens in `timings`, a field of no other engine: at the end of each choice, and in an unstreamed answer.
    """

    def __init__(self, num_choices: int, num_prompts: int = 1) -> None:
        self._num_choices, self._num_prompts = num_choices, max(num_prompts, 1)
        self._prompts: dict[int, tuple[int, int]] = {}
        """Tokens of each prompt and how many of them were cached, if each choice reports its own prompt."""
        self._finished: set[int] = set()
        self._by_choice: dict[int, int] = {}
        self._total = self._sum = 0
        """(last usage that belongs to no choice, sum of all usages that belong to no choice)."""
        self._is_of_choices = False
        """Whether usages without a choice cover one choice each."""
        self._are_usages_of_choices = False
        """Whether the usages of a choice cover only that choice."""

    @property
    def num_finished(self) -> int:
        return len(self._finished)

    @property
    def num(self) -> int:
        """Tokens of all choices so far."""
        if self._is_of_choices:
            return max(self._sum, sum(self._by_choice.values()))
        return self._total or sum(self._by_choice.values())

    def add(self, chunk: Chunk) -> int:
        """Add a chunk of a stream; returns the tokens of all choices so far."""
        usage, timings, choices = chunk.usage, chunk.timings, chunk.choices
        one = choices[0] if len(choices) == 1 else None
        was_over = self.num_finished >= self._num_choices
        for choice in choices:
            if choice.finish_reason is not None:
                self._finished.add(choice.index)
            counted, delta = self._by_choice.get(choice.index, 0), choice.delta
            if choice.token_ids is not None:
                counted += len(choice.token_ids)
            elif choice.text or (
                delta is not None
                and (delta.content or delta.reasoning or delta.reasoning_content or delta.tool_calls is not None)
            ):
                counted += 1
            if choice is one and timings is not None:
                counted = timings.predicted_n or counted
            if choice.usage is not None:
                counted = choice.usage.completion_tokens or counted
            self._by_choice[choice.index] = counted
        if usage is None or not usage.completion_tokens:
            return self.num
        is_over = self.num_finished >= self._num_choices
        self._are_usages_of_choices |= one is not None and not is_over
        if one is not None and (timings is not None or was_over or self._are_usages_of_choices):
            self._by_choice[one.index] = usage.completion_tokens
        else:
            self._is_of_choices |= timings is not None or not is_over
            self._total = usage.completion_tokens
            self._sum += usage.completion_tokens
        return self.num

    def add_prompt(self, choice: int, usage: Usage) -> tuple[int, int]:
        """Add the prompt of an ended choice. Returns (prompt tokens, cached prompt tokens) of all ended choices, each
        prompt counted once."""
        prompt = choice * self._num_prompts // self._num_choices
        self._prompts.setdefault(prompt, (usage.prompt_tokens, usage.cached_tokens))
        return sum(tokens for tokens, _ in self._prompts.values()), sum(cached for _, cached in self._prompts.values())

    def of_whole(self, chunk: Chunk) -> int:
        """Tokens of all choices of an answer that is not streamed."""
        usage, timings, num = chunk.usage, chunk.timings, len(chunk.choices)
        reported = 0 if usage is None else usage.completion_tokens
        counts = [each.usage.completion_tokens for each in chunk.choices if each.usage is not None]
        if len(counts) == num and num:
            return max(reported, sum(counts))
        is_of_one = timings is not None and timings.predicted_n == reported
        return reported * max(num, 1) if is_of_one else reported


class ItlMeter:
    """Records the inter-token latencies of a stream from one replica.

    The tokens of one read count as evenly spread over the time since the previous read; the tokens of the first read
    count as simultaneous.
    """

    def __init__(self, in_flight: InFlightRequest, scheduler: Scheduler) -> None:
        self._in_flight, self._live, self._scheduler = in_flight, in_flight.live, scheduler
        self._phase, self._histogram = in_flight.live.phase, scheduler.metrics.inter_token(in_flight)
        self._tokens, self._last_s = in_flight.live.generated_tokens, 0.0

    def observe(self) -> None:
        """Observe the tokens counted since the last call, after each read."""
        live = self._live
        tokens = live.generated_tokens - self._tokens
        if tokens <= 0:
            return
        now = monotonic()
        if live.phase is not self._phase:
            self._phase, self._histogram = live.phase, self._scheduler.metrics.inter_token(self._in_flight)
        if self._last_s:
            gap_s = now - self._last_s
            self._histogram.observe(gap_s / tokens, tokens)
            if gap_s > self._in_flight.answer.longest_gap_s:
                self._in_flight.answer.longest_gap_s = gap_s
        else:
            if tokens > 1:
                self._histogram.observe(0.0, tokens - 1)
            if self._tokens:
                self._in_flight.answer.resumed_s = self._scheduler.clock.now
        self._tokens, self._last_s = live.generated_tokens, now
