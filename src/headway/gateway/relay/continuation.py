"""What a request's client has been told so far, and what goes on with it on another engine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from headway.gateway.relay.request import CHAT, COMPLETIONS, ClientRequest
from headway.gateway.upstream import sse
from headway.gateway.upstream.dialects import Adapter

_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "logit_bias", "user",
    "skip_special_tokens", "priority",
)  # fmt: skip
_OF_CHATS = frozenset((
    "messages", "chat_template_kwargs", "reasoning_format", "max_completion_tokens", "stream", "stream_options",
))  # fmt: skip
_THINK, _THINK_END = "<think>", "</think>"
DEFAULT_COMPLETION_TOKENS = 16
"""Of `/v1/completions`, where a client names no limit."""


class CannotGoOnError(Exception):
    """The answer can be continued on no other engine."""


class PartialResponse:
    """An answer so far. Holds what the client has, so that another engine can go on from there."""

    def __init__(self, ask: ClientRequest) -> None:
        self._ask = ask
        self.tokens = 0
        self.head: dict[str, Any] = {}
        """`id`, `created` and `model`: the first engine's, for the whole stream."""
        self.prompt_ids = ask.prompt_ids
        self.prompt: str | None = ask.body["prompt"] if isinstance(ask.body.get("prompt"), str) else None
        """The prompt's text, as far as that is known; of chats, engines can tell it."""
        self.ids: list[int] | None = []
        self.text: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[str] = []
        """Of tools, as they came."""
        self.reasoning_key = "reasoning_content"
        self.finish: str | None = None
        self.prompt_tokens = 0
        self.seen_tokens = 0
        """Of prompt and answer, as far as the engine has said; 0: unknown."""
        self.last = ""
        """What the last chunk said."""

    def heard(self, chunk: sse.Chunk, tokens: int) -> None:
        """An engine's chunk that goes to the client."""
        if not self.head and chunk.id is not None:
            self.head = {"id": chunk.id, "created": chunk.created, "model": chunk.model}
        if chunk.prompt_token_ids is not None and self.prompt_ids is None:
            self.prompt_ids = chunk.prompt_token_ids
        self.tokens += tokens
        if chunk.timings is not None:
            self.seen_tokens = chunk.timings.prompt_n + chunk.timings.cache_n + chunk.timings.predicted_n
        for choice in chunk.choices:
            if choice.prompt_token_ids is not None and self.prompt_ids is None:
                self.prompt_ids = choice.prompt_token_ids
            self._choice(choice, tokens)

    def _choice(self, choice: sse.Choice, tokens: int) -> None:
        if choice.token_ids is None:
            if tokens:
                self.ids = None
        elif self.ids is not None:
            self.ids += choice.token_ids
        if choice.text:
            self.text.append(choice.text)
            self.last = choice.text
        delta = choice.delta if choice.delta is not None else choice.message
        if delta is not None:
            if delta.content:
                self.text.append(delta.content)
                self.last = delta.content
            if delta.reasoning or delta.reasoning_content:
                self.reasoning_key = "reasoning" if delta.reasoning else "reasoning_content"
                self.reasoning.append(delta.reasoning or delta.reasoning_content or "")
                self.last = self.reasoning[-1]
            if delta.tool_calls is not None:
                self.calls.append(msgspec.json.encode(delta.tool_calls).decode())
        self.finish = choice.finish_reason or self.finish

    def learn(self, tokens: list[int]) -> None:
        """The engine's tokens: of the prompt, of the answer so far, and maybe some that nobody has been told of."""
        begin = self.seen_tokens - self.tokens
        self.prompt_ids, self.ids = tokens[:begin], tokens[begin : self.seen_tokens]

    def answer(self) -> str:
        """What there is to judge: the answer's text, and its calls of tools."""
        return "".join(self.text) + "".join(self.calls)

    def left(self, context_tokens: int, prompt_tokens: int) -> int:
        """Tokens that the answer may still have."""
        most = self._ask.max_tokens
        if most is None:
            read = prompt_tokens if self.prompt_ids is None else len(self.prompt_ids)
            most = context_tokens - read if self._ask.is_chat else DEFAULT_COMPLETION_TOKENS
        return most - self.tokens

    def go_on(self, adapter: Adapter, context_tokens: int, prompt_tokens: int) -> tuple[str, dict[str, Any]]:
        """Path and body of the request that continues the answer. CannotGoOnError if there is none."""
        ask = self._ask
        if not ask.can_go_on:
            raise CannotGoOnError
        if self.prompt_ids is not None and self.ids is not None:
            prompt: Any = [*self.prompt_ids, *self.ids]
        elif self.prompt is not None:
            prompt = self.prompt + self._raw(self.prompt)
        elif ask.is_chat and adapter.continue_options is not None and not self.reasoning:
            answer = {"role": "assistant", "content": "".join(self.text)}
            body = {**ask.body, **adapter.continue_options, "messages": [*ask.body["messages"], answer]}
            body.pop("max_completion_tokens", None)
            if ask.max_tokens is not None:
                body["max_tokens"] = ask.max_tokens - self.tokens
            return CHAT, body
        else:
            raise CannotGoOnError
        if adapter.template is None:
            body = {name: ask.body[name] for name in _SAMPLING if name in ask.body}
        else:  # takes the rest for a prompt, too, and writes marks only where it is told that they matter
            body = {name: ask.body[name] for name in ask.body if name not in _OF_CHATS}
            body["preserved_tokens"] = [_THINK, _THINK_END]
        return COMPLETIONS, {**body, "prompt": prompt, "max_tokens": self.left(context_tokens, prompt_tokens)}

    def _raw(self, prompt: str) -> str:
        """The answer so far as the model wrote it. Space around its reasoning, which engines cut off, is as usual."""
        text, reasoning = "".join(self.text), "".join(self.reasoning)
        if not reasoning:
            return text
        begin = "" if prompt.rstrip().endswith(_THINK) else f"{_THINK}\n"
        return f"{begin}{reasoning}\n{_THINK_END}\n\n{text}" if text else begin + reasoning


class ResumedStream:
    """Makes another engine's chunks continue the first one's stream: same head, same shape."""

    def __init__(self, ask: ClientRequest, said: PartialResponse, path: str) -> None:
        self._ask, self._said = ask, said
        self._converts = ask.is_chat and path == COMPLETIONS
        self._reasons = self._converts and bool(said.reasoning) and not said.text
        self._before = said.tokens
        self._kept = ""
        self._deltas: list[dict[str, str]] = []

    def read(self, chunk: sse.Chunk) -> None:
        """Have a chunk that `event` is to be asked for say what it is in a chat: reasoning, or the answer."""
        if self._converts:
            self._deltas = [self._delta(one.text or "", one.finish_reason is not None) for one in chunk.choices]
            for choice, delta in zip(chunk.choices, self._deltas, strict=True):
                choice.text, choice.delta = None, sse.Delta(**delta)

    def event(self, payload: bytes) -> bytes | None:
        """The chunk that the client gets in place of this one; None: nothing."""
        chunk = sse.decode_object(payload)
        chunk |= self._said.head
        usage = chunk.get("usage")
        if isinstance(usage, dict):
            prompt = self._said.prompt_tokens or max(usage.get("prompt_tokens", 0) - self._before, 0)
            written = usage.get("completion_tokens", 0) + self._before
            usage |= {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}
        if self._converts:
            chunk["object"] = "chat.completion.chunk"
            pairs = zip(chunk.get("choices", ()), self._deltas, strict=True)
            chunk["choices"] = [self._choice(choice, delta) for choice, delta in pairs]
        elif self._ask.is_chat:
            for choice in chunk.get("choices", ()):
                (choice.get("delta") or {}).pop("role", None)
        if len(chunk.get("choices", ())) == 1 and not self._says(chunk["choices"][0]):
            return None
        return msgspec.json.encode(chunk)

    @staticmethod
    def _choice(choice: dict[str, Any], delta: dict[str, str]) -> dict[str, Any]:
        kept: dict[str, Any] = {n: choice[n] for n in ("index", "finish_reason", "token_ids") if n in choice}
        return {**kept, "delta": delta}

    def _delta(self, text: str, is_last: bool) -> dict[str, str]:
        """Text as the reasoning it still is, or the answer. The mark between them may come in pieces."""
        if not self._reasons:
            return {"content": text} if text else {}
        text = self._kept + text
        self._kept = ""
        before, mark, after = text.partition(_THINK_END)
        if mark:
            self._reasons = False
            return {name: part for name, part in ((self._said.reasoning_key, before), ("content", after)) if part}
        if not is_last:
            kept = next((n for n in range(len(_THINK_END) - 1, 0, -1) if text.endswith(_THINK_END[:n])), 0)
            text, self._kept = text[: len(text) - kept], text[len(text) - kept :]
        return {self._said.reasoning_key: text} if text else {}

    @staticmethod
    def _says(choice: dict[str, Any]) -> bool:
        delta = choice.get("delta") or {}
        has_text = choice.get("text") or any(value for value in delta.values())
        return bool(has_text or choice.get("finish_reason") is not None or choice.get("token_ids"))


def without(names: Iterable[str], payload: bytes) -> bytes:
    """A chunk, or a whole answer, without what its client did not ask for."""
    chunk = sse.decode_object(payload)
    sse.remove_fields(names, chunk)
    return msgspec.json.encode(chunk)
