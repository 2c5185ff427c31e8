"""The stream of an engine that continues an answer, rewritten as the rest of the first engine's stream."""

from __future__ import annotations

from typing import Any

from headway.gateway.relay.partial_answer import THINK_END, PartialAnswer, start_of_tag
from headway.gateway.relay.request import COMPLETIONS, ClientRequest
from headway.gateway.upstream.chunks import Chunk, Delta
from headway.gateway.upstream.loose_json import usage_of


class ResumedStream:
    """Rewrites the chunks of the engine that continues an answer to the first engine's head, format and token
    counts."""

    def __init__(self, request: ClientRequest, partial: PartialAnswer, path: str, num_repeated: int = 0) -> None:
        """`num_repeated`: tokens at the start whose ids the client already has."""
        self._is_chat, self._partial = request.is_chat, partial
        self._is_converted = request.is_chat and path == COMPLETIONS
        """Whether the client gets chat chunks although the engine completes the chat's rendered prompt."""
        end_tag = partial.end_tag if partial.goes_on_from_ids else ""
        reasons = self._is_converted and bool(partial.reasoning) and not partial.text
        self._is_reasoning = reasons and end_tag != THINK_END
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
                self._partial.read_ids(self._held_back if self._is_reasoning else THINK_END)
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
        reasoning, tag, answer = text.partition(THINK_END)
        key = self._partial.reasoning_key
        if tag:
            self._is_reasoning = False
            return {name: part for name, part in ((key, reasoning), ("content", answer)) if part}
        if not is_last:
            self._held_back = start_of_tag(text)
            text = text[: len(text) - len(self._held_back)]
        return {key: text} if text else {}


def _chat_choice(choice: dict[str, Any], delta: dict[str, str]) -> dict[str, Any]:
    shared: dict[str, Any] = {name: choice[name] for name in ("index", "finish_reason", "token_ids") if name in choice}
    return {**shared, "delta": delta}


def _has_content(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta")
    has_text = choice.get("text") or (any(delta.values()) if isinstance(delta, dict) else delta)
    return bool(has_text or choice.get("finish_reason") is not None or choice.get("token_ids"))
