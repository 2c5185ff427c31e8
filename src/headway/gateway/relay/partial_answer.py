"""One model's answer so far: its content, for the client and for an engine that continues it, and its token counts."""

from __future__ import annotations

import asyncio
import logging
from math import inf
from typing import Any

from headway.control.live import DECODING, NEVER
from headway.core.request import Phase
from headway.gateway.relay import passthrough
from headway.gateway.relay.choice_counts import ChoiceCounts
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
THINK, THINK_END = "<think>", "</think>"
_DEFAULT_COMPLETION_TOKENS = 16
"""The default of `max_tokens` at `/v1/completions`."""


class PartialAnswer:
    """One model's answer so far, over all replicas that contribute to it.

    Counts also go to `live` and to the reservation.
    """

    # Initial values are set in the class, because most answers keep them.
    tokens = 0
    reasoning_key = "reasoning_content"
    finish_reason: str | None = None
    has_usage = False
    """Whether the engine has reported the usage."""
    seen_tokens = 0
    """Tokens of prompt and answer by the engine's own count; 0: not reported."""
    last_text = ""
    """The last chunk's text."""
    end_tag = ""
    """The part of the reasoning's end tag in the ids up to `_ids_of_reasoning`."""
    _ids_of_reasoning = 0
    """Number of token ids up to the last one that brought reasoning, or whose text did not come with it."""
    _ids_read = 0
    """Number of token ids that `end_tag` covers."""
    tokens_before = 0
    """Tokens of the answer from replicas before the current one."""
    is_beyond_limit = False
    """Whether the engine has generated more tokens than allowed."""
    _limit: float = inf
    _counted_before = 0
    """The value of `tokens_before` when an attempt's start was last counted."""
    _num_forgotten = 0
    """Number of tokens that are still counted although the next engine generates them again."""
    _is_in_think_tags = False
    rendering: asyncio.Task[None] | None = None
    """Task in which an engine renders the chat as a prompt."""

    def __init__(self, request: ClientRequest, in_flight: InFlightRequest, scheduler: Scheduler) -> None:
        self._request, self._in_flight, self._live, self._scheduler = request, in_flight, in_flight.live, scheduler
        in_flight.counted_prompt_tokens = 0
        has_several = request.may_be_several and not request.is_single
        self._counts = ChoiceCounts(request.num_sequences, request.num_prompts) if has_several else None
        self.passthrough = passthrough.Passthrough() if request.is_passthrough else None
        scorer = scheduler.scorer if in_flight.needs_score else None
        self.confidence: ConfidenceMeter | None = None if scorer is None else scorer.confidence_meter()
        self.takes_texts = self._counts is None and self.confidence is None
        """Whether a text-only chunk can be counted by `measure_text`."""
        self.hides_logprobs = self.confidence is not None and not request.body.get("logprobs")
        """Whether only the gateway, and not the client, asked for log probabilities."""
        self.head: dict[str, Any] = {}
        """`id`, `created` and `model` of the first engine's chunks, which the whole stream uses."""
        self.prompt_ids = request.prompt_ids
        self.prompt: str | None = request.body["prompt"] if isinstance(request.body.get("prompt"), str) else None
        """The prompt's text, if known. For a chat, `EngineEndpoint.render_chat` returns it."""
        self.token_ids: list[int] | None = []
        """Token ids so far; None if the engine did not send all of them."""
        self.text: list[str] = []
        self.reasoning: list[str] = []
        self.tool_calls: list[str] = []
        """Deltas of tool calls, as JSON."""

    @property
    def num_finished(self) -> int:
        """Number of choices with a finish reason."""
        if self._counts is not None:
            return self._counts.num_finished
        return int(self.finish_reason is not None)

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens by the engine's count; 0: not reported."""
        return self._in_flight.counted_prompt_tokens

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

    def scored_text(self) -> str:
        """The answer for scoring: text and tool calls."""
        return "".join(self.text) + "".join(self.tool_calls)

    # The content, as far as another engine needs it.

    def _add(self, chunk: Chunk, tokens: int) -> None:
        """Add an engine's chunk with this many tokens."""
        if not self.head and chunk.id is not None:
            self.head = {"id": chunk.id, "created": chunk.created, "model": chunk.model}
        if chunk.prompt_token_ids is not None and self.prompt_ids is None:
            self.prompt_ids = chunk.prompt_token_ids
        self.tokens += tokens
        if chunk.timings is not None:
            self.seen_tokens = chunk.timings.prompt_n + chunk.timings.cache_n + chunk.timings.predicted_n
        for choice in chunk.choices:
            num_before = len(self.token_ids or ())
            if choice.token_ids is None:
                if tokens:
                    self.token_ids = None
            elif self.token_ids is not None:
                self.token_ids += choice.token_ids
            if choice.prompt_token_ids is not None and self.prompt_ids is None:
                self.prompt_ids = choice.prompt_token_ids
            if choice.text:
                self.text.append(choice.text)
                self.last_text = choice.text
            delta = choice.delta if choice.delta is not None else choice.message
            self.finish_reason = choice.finish_reason or self.finish_reason
            if delta is None:
                continue
            if delta.content:
                self.text.append(delta.content)
                self.last_text = delta.content
            if delta.reasoning or delta.reasoning_content:
                self.reasoning_key = "reasoning" if delta.reasoning else "reasoning_content"
                self.last_text = delta.reasoning or delta.reasoning_content or ""
                self.reasoning.append(self.last_text)
                self.end_tag, num = "", len(self.token_ids or ())
                self._ids_of_reasoning = num
                self._ids_read = num_before if num > num_before + 1 else num  # an id of reasoning text is no tag
            if delta.tool_calls is not None:
                self.tool_calls.append(sse.encoded(delta.tool_calls).decode())

    def restore(self, part: StreamPart) -> None:
        """Take over a stream from the events that the client received before it retried."""
        for event in sse.EventSplitter().split(part.data):
            payload = sse.payload(event)
            if payload is not None and not sse.is_done(payload):
                self._add(sse.read_chunk(payload)[0], 0)
        self.tokens, self.prompt_ids = part.tokens, part.prompt_ids or self.prompt_ids
        self.token_ids = None if part.token_ids is None else list(part.token_ids)
        self._ids_of_reasoning, self._ids_read, self.end_tag = len(self.token_ids or ()), 0, ""
        live, now = self._live, self._scheduler.clock.now
        live.generated_tokens, live.first_token_s = self.tokens, now
        if self.text:
            live.answer_s = now
        else:
            live.phase = Phase.REASONING

    def set_token_ids(self, tokens: list[int]) -> None:
        """Set all token ids from a KV snapshot: the prompt, the answer so far, and tokens that were not streamed."""
        start = self.seen_tokens - self.tokens
        self.prompt_ids, self.token_ids = tokens[:start], tokens[start : self.seen_tokens]
        self._ids_of_reasoning = self._ids_read = len(self.token_ids)  # the file ends with the text of the last chunk

    def begin_attempt(self) -> int:
        """Begin to continue the answer at a replica. Forget the tokens after the reasoning if they brought no text: one
        of them may be the end tag, and an engine that continues after the tag does not mark its tokens as answer.
        Returns the number of these tokens, which the replica's engine generates again."""
        num = 0
        if self.token_ids and self._may_end_reasoning:
            num = len(self.token_ids) - self._ids_of_reasoning
            del self.token_ids[self._ids_of_reasoning :]
            self.tokens -= num
        self.tokens_before = self.tokens
        self._num_forgotten += num
        return num

    @property
    def _may_end_reasoning(self) -> bool:
        """Whether the reasoning may have ended without any sign in the data sent."""
        return bool(self.reasoning) and not self.text and not self.tool_calls and self.finish_reason is None

    @property
    def goes_on_from_ids(self) -> bool:
        """Whether the answer is continued from its token ids. Otherwise it is continued from its text."""
        return self.prompt_ids is not None and self.token_ids is not None

    def unread_ids(self) -> list[int]:
        """Token ids that may contain the unseen end tag of the reasoning: ids that came in a chunk with reasoning text,
        or in a chunk without text. An answer that continues after the tag is not marked as answer."""
        if self.token_ids is None or not self.goes_on_from_ids or not self._may_end_reasoning:
            return []
        return self.token_ids[self._ids_read : self._ids_of_reasoning]

    def read_ids(self, text: str) -> None:
        """Find the end tag or the start tag of the reasoning in the text of the ids that last brought reasoning."""
        self.end_tag = THINK_END if THINK_END in text else start_of_tag(text)
        self._ids_read = self._ids_of_reasoning

    def forget_end(self, chunk: Chunk) -> None:
        """Forget the end of the stream in a chunk that the client does not get."""
        if any(choice.finish_reason is not None for choice in chunk.choices):
            self.finish_reason = None
        if chunk.usage is not None:
            self.has_usage = False

    def tokens_left(self, context_tokens: int, prompt_tokens: int) -> int:
        """Tokens left for the answer. `prompt_tokens` counts if the prompt's ids are unknown."""
        limit = self._request.max_tokens
        if limit is None:
            prompt = prompt_tokens if self.prompt_ids is None else len(self.prompt_ids)
            limit = context_tokens - prompt if self._request.is_chat else _DEFAULT_COMPLETION_TOKENS
        return limit - self.tokens

    def closing_events(self, prompt_tokens: int) -> bytes:
        """The missing events at the end of a stream whose tokens the client has: finish reason, usage and [DONE].
        `prompt_tokens` is used if the engine has reported no usage."""
        request = self._request
        kind = "chat.completion.chunk" if request.is_chat else "text_completion"
        events = []
        if self.finish_reason is None:
            rest: dict[str, Any] = {"delta": {}} if request.is_chat else {"text": ""}
            choice = {"index": 0, **rest, "finish_reason": "length"}
            events.append({**self.head, "object": kind, "choices": [choice]})
        if request.wants_usage and not self.has_usage:
            prompt = self.prompt_tokens or (len(self.prompt_ids) if self.prompt_ids is not None else prompt_tokens)
            tokens = min(self.tokens, request.max_tokens or self.tokens)
            usage = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}
            events.append({**self.head, "object": kind, "choices": [], "usage": usage})
        return b"".join(map(sse.encode_event, events)) + sse.DONE

    # Token counts.

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
        choices, usage = chunk.choices, chunk.usage
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
            if text and (self._is_in_think_tags or not self.text):
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
        self._add(chunk, tokens)
        if self._num_forgotten and (tokens or usage is not None):
            self._count_no_more()
        if tokens:
            self._count_tokens(tokens, has_reasoning, has_answer)
        if usage is not None:
            self.has_usage = True
            prompt_tokens, cached_tokens = usage.prompt_tokens, usage.cached_tokens
            if choice_counts is not None and timings is not None and len(choices) == 1:
                prompt_tokens, cached_tokens = choice_counts.add_prompt(choices[0].index, usage)
            self.set_prompt_tokens(prompt_tokens - self.tokens_before)
            if not self.tokens_before and usage.prompt_tokens_details is not None:
                self._live.cached_tokens = cached_tokens
            self._count_continued(usage.prompt_tokens - usage.cached_tokens, usage.cached_tokens)
            if choice_counts is not None:
                self._count_tokens(choice_counts.num - self._live.generated_tokens)
            elif usage.completion_tokens:  # 0: not reported, or no tokens
                self._count_tokens(self.tokens_before + usage.completion_tokens - self._live.generated_tokens)

    def measure_text(self, text: str) -> None:
        """Like `measure`, for a chunk with only the text of one token if `takes_texts`. The token's id is unknown."""
        reasons = False
        if self._is_in_think_tags or not self.text:
            reasons = self._is_in_think(text)
        self.tokens += 1
        self.token_ids = None
        self.text.append(text)
        self.last_text = text
        if self._num_forgotten:
            self._count_no_more()
        self._count_tokens(1, reasons, not reasons)

    def measure_texts(self, text: str, last: str, num: int) -> bool:
        """`measure_text` for `num` chunks with this joint text and last text. Returns False if each must be measured by
        itself."""
        if self._is_in_think_tags or not self.text or self._live.generated_tokens + num > self._limit:
            return False
        self.tokens += num
        self.token_ids = None
        self.text.append(text)
        self.last_text = last
        if self._num_forgotten:
            self._count_no_more()
        self._count_tokens(num, False, True)
        return True

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
            if self._in_flight.needs_score:
                self._add(chunk, 0)
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
        if is_inside and "</think>" in "".join((*self.text[-8:], text)):
            self._is_in_think_tags = False
        return is_inside

    def set_prompt_tokens(self, tokens: int) -> None:
        """Replace the estimated prompt tokens by the engine's count; 0: not reported."""
        if tokens > 0:
            self._in_flight.counted_prompt_tokens = tokens
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


def start_of_tag(text: str) -> str:
    """The end of a text that may be the start of the reasoning's end tag."""
    return next((THINK_END[:n] for n in range(len(THINK_END) - 1, 0, -1) if text.endswith(THINK_END[:n])), "")
