"""Continuation of an answer on another engine, from the tokens or the text that the client already has."""

from __future__ import annotations

from typing import Any

from headway.gateway.relay.request import CHAT, COMPLETIONS, ClientRequest
from headway.gateway.scheduling.stream_copy import StreamPart
from headway.gateway.upstream import sse
from headway.gateway.upstream.chunks import Chunk, Delta
from headway.gateway.upstream.dialects import Adapter
from headway.gateway.upstream.loose_json import usage_of

_SAMPLING_OPTIONS = (
    "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "logit_bias", "user",
    "skip_special_tokens", "priority", "cache_salt", "vllm_xargs",
)  # fmt: skip
_CHAT_OPTIONS = frozenset(
    (
        "messages",
        "chat_template_kwargs",
        "reasoning_format",
        "max_completion_tokens",
        "stream",
        "stream_options",
    )
)
_THINK, _THINK_END = "<think>", "</think>"
DEFAULT_COMPLETION_TOKENS = 16
"""The default of `max_tokens` at `/v1/completions`."""


class CannotResumeError(Exception):
    """The answer cannot be continued on this engine."""


class PartialResponse:
    """The answer so far, with everything that another engine needs to continue it."""

    # Initial values are set in the class, because most answers keep them.
    tokens = 0
    reasoning_key = "reasoning_content"
    finish_reason: str | None = None
    has_usage = False
    """Whether the engine has reported the usage."""
    prompt_tokens = 0
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

    def __init__(self, request: ClientRequest) -> None:
        self._request = request
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

    def add(self, chunk: Chunk, tokens: int) -> None:
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

    def add_text(self, text: str) -> None:
        """Add a chunk with the text of one token, whose id did not come with it."""
        self.tokens += 1
        self.token_ids = None
        self.text.append(text)
        self.last_text = text

    def restore(self, part: StreamPart) -> None:
        """Take over an answer from the events that the client already has."""
        for event in sse.EventSplitter().split(part.data):
            payload = sse.payload(event)
            if payload is not None and not sse.is_done(payload):
                self.add(sse.read_chunk(payload)[0], 0)
        self.tokens, self.prompt_ids = part.tokens, part.prompt_ids or self.prompt_ids
        self.token_ids = None if part.token_ids is None else list(part.token_ids)
        self._ids_of_reasoning, self._ids_read, self.end_tag = len(self.token_ids or ()), 0, ""

    def set_token_ids(self, tokens: list[int]) -> None:
        """Set all token ids from a KV snapshot: the prompt, the answer so far, and tokens that were not streamed."""
        start = self.seen_tokens - self.tokens
        self.prompt_ids, self.token_ids = tokens[:start], tokens[start : self.seen_tokens]
        self._ids_of_reasoning = self._ids_read = len(self.token_ids)  # the file ends with the text of the last chunk

    def forget_silent_ids(self) -> int:
        """Forget the tokens after the reasoning if they brought no text. One of them may be the end tag, and an engine
        that continues after the tag does not mark its tokens as answer. The next engine generates them again. Returns
        their number."""
        if not self.token_ids or not self._may_end_reasoning:
            return 0
        num = len(self.token_ids) - self._ids_of_reasoning
        del self.token_ids[self._ids_of_reasoning :]
        self.tokens -= num
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
        self.end_tag = _THINK_END if _THINK_END in text else _start_of_tag(text)
        self._ids_read = self._ids_of_reasoning

    def forget_end(self, chunk: Chunk) -> None:
        """Forget the end of the stream in a chunk that the client does not get."""
        if any(choice.finish_reason is not None for choice in chunk.choices):
            self.finish_reason = None
        if chunk.usage is not None:
            self.has_usage = False

    def answer(self) -> str:
        """The answer for scoring: text and tool calls."""
        return "".join(self.text) + "".join(self.tool_calls)

    def tokens_left(self, context_tokens: int, prompt_tokens: int) -> int:
        """Tokens left for the answer. `prompt_tokens` counts if the prompt's ids are unknown."""
        limit = self._request.max_tokens
        if limit is None:
            prompt = prompt_tokens if self.prompt_ids is None else len(self.prompt_ids)
            limit = context_tokens - prompt if self._request.is_chat else DEFAULT_COMPLETION_TOKENS
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

    def resume_request(self, adapter: Adapter, context_tokens: int, prompt_tokens: int) -> tuple[str, dict[str, Any]]:
        """Path and body of the request that continues the answer. CannotResumeError if it cannot be continued."""
        request = self._request
        if not request.can_resume:
            raise CannotResumeError
        if self.goes_on_from_ids:
            prompt: Any = [*(self.prompt_ids or ()), *(self.token_ids or ())]
        elif self.prompt is not None:
            prompt = self.prompt + self._raw_text(self.prompt)
        elif request.is_chat and adapter.continue_options is not None and not self.reasoning:
            answer = {"role": "assistant", "content": "".join(self.text)}
            body = {**request.body, **adapter.continue_options, "messages": [*request.body["messages"], answer]}
            body.pop("max_completion_tokens", None)
            if request.max_tokens is not None:
                body["max_tokens"] = request.max_tokens - self.tokens
            return CHAT, body
        else:
            raise CannotResumeError
        if adapter.template is None:
            body = {name: request.body[name] for name in _SAMPLING_OPTIONS if name in request.body}
        else:  # the engine accepts the other options, too, but outputs the think tags only if they are preserved
            body = {name: request.body[name] for name in request.body if name not in _CHAT_OPTIONS}
            body["preserved_tokens"] = [_THINK, _THINK_END]
        return COMPLETIONS, {**body, "prompt": prompt, "max_tokens": self.tokens_left(context_tokens, prompt_tokens)}

    def _raw_text(self, prompt: str) -> str:
        """The answer so far as the model wrote it, with the usual white space around reasoning, which engines strip."""
        text, reasoning = "".join(self.text), "".join(self.reasoning)
        if not reasoning:
            return text
        start = "" if prompt.rstrip().endswith(_THINK) else f"{_THINK}\n"
        return f"{start}{reasoning}\n{_THINK_END}\n\n{text}" if text else start + reasoning


class ResumedStream:
    """Rewrites the chunks of the engine that continues an answer to the first engine's head, format and token
    counts."""

    def __init__(self, request: ClientRequest, partial: PartialResponse, path: str, num_repeated: int = 0) -> None:
        """`num_repeated`: tokens at the start whose ids the client already has."""
        self._is_chat, self._partial = request.is_chat, partial
        self._is_converted = request.is_chat and path == COMPLETIONS
        """Whether the client gets chat chunks although the engine completes the chat's rendered prompt."""
        end_tag = partial.end_tag if partial.goes_on_from_ids else ""
        reasons = self._is_converted and bool(partial.reasoning) and not partial.text
        self._is_reasoning = reasons and end_tag != _THINK_END
        self._tokens_before, self.num_repeated = partial.tokens, num_repeated
        self._held_back = end_tag if self._is_reasoning else ""
        """Text that may be the start of the reasoning's end tag."""
        self._deltas: list[dict[str, str]] = []

    def convert(self, chunk: Chunk) -> None:
        """Convert a completion's chunk to a chat's chunk, before its tokens are counted."""
        if self._is_converted:
            self._deltas = [self._delta(each.text or "", each.finish_reason is not None) for each in chunk.choices]
            for choice, delta in zip(chunk.choices, self._deltas, strict=True):
                choice.text, choice.delta = None, Delta(**delta)

    def rewrite(self, value: dict[str, Any]) -> bool:
        """Rewrite the same chunk completely, after its tokens were counted. Returns False if the chunk has nothing for
        the client."""
        value |= self._partial.head
        usage = value.get("usage")
        if isinstance(usage, dict):
            counts = usage_of(usage)
            prompt = self._partial.prompt_tokens or max(counts.prompt_tokens - self._tokens_before, 0)
            generated = counts.completion_tokens + self._tokens_before
            usage |= {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}
        choices = value.get("choices")
        if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
            return True
        if self.num_repeated:
            for choice in choices:
                self._leave_out_repeated(choice)
        if self._is_converted:
            if any(self._partial.reasoning_key in delta for delta in self._deltas):
                self._partial.read_ids(self._held_back if self._is_reasoning else _THINK_END)
            value["object"] = "chat.completion.chunk"
            pairs = zip(choices, self._deltas, strict=True)
            value["choices"] = choices = [_chat_choice(choice, delta) for choice, delta in pairs]
        elif self._is_chat:
            for choice in choices:
                if isinstance(delta := choice.get("delta"), dict):
                    delta.pop("role", None)
        return len(choices) != 1 or _has_content(choices[0])

    def _leave_out_repeated(self, choice: dict[str, Any]) -> None:
        ids = choice.get("token_ids")
        if isinstance(ids, list):
            choice["token_ids"] = ids[self.num_repeated :]
            self.num_repeated = max(self.num_repeated - len(ids), 0)

    def _delta(self, text: str, is_last: bool) -> dict[str, str]:
        """Text as reasoning or as answer. The end tag of reasoning may come in pieces."""
        if not self._is_reasoning:
            return {"content": text} if text else {}
        text = self._held_back + text
        self._held_back = ""
        reasoning, tag, answer = text.partition(_THINK_END)
        key = self._partial.reasoning_key
        if tag:
            self._is_reasoning = False
            return {name: part for name, part in ((key, reasoning), ("content", answer)) if part}
        if not is_last:
            self._held_back = _start_of_tag(text)
            text = text[: len(text) - len(self._held_back)]
        return {key: text} if text else {}


def _start_of_tag(text: str) -> str:
    """The end of a text that may be the start of the reasoning's end tag."""
    return next((_THINK_END[:n] for n in range(len(_THINK_END) - 1, 0, -1) if text.endswith(_THINK_END[:n])), "")


def _chat_choice(choice: dict[str, Any], delta: dict[str, str]) -> dict[str, Any]:
    shared: dict[str, Any] = {name: choice[name] for name in ("index", "finish_reason", "token_ids") if name in choice}
    return {**shared, "delta": delta}


def _has_content(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta")
    has_text = choice.get("text") or (any(delta.values()) if isinstance(delta, dict) else delta)
    return bool(has_text or choice.get("finish_reason") is not None or choice.get("token_ids"))
