"""Reads answers whose JSON has an unusual shape: reads as much as possible, and names the unreadable rest.

Nothing here raises an exception because of an answer, because clients get the answer's bytes anyway, and may understand
more.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import isfinite
from typing import Any

from msgspec import Struct

from headway.gateway.upstream.chunks import MAX_COUNT, Choice, Chunk, Delta, PromptDetails, Timings, Usage

_MAX_DEPTH = 8
"""Depth limit of texts in content parts, and of usage objects."""
NOT_JSON, NOT_OBJECT = "what is no JSON", "JSON that is no object"
OTHER_FIELDS, OTHER_TYPE = "fields of other types", "another content type"
"""Names for unreadable parts."""


class Unread(Struct, frozen=True):
    """A value that is not JSON."""


UNREAD = Unread()


def parse(data: bytes) -> Any:
    """The value of JSON as Python's own parser accepts it, with NaN and Infinity; `UNREAD` if it is invalid."""
    try:
        return json.loads(data.decode("utf-8-sig", "replace"))
    except (ValueError, RecursionError):
        return UNREAD


# Completions.


def chunk_of(value: Any) -> tuple[Chunk, str]:
    """The readable part of the chunk in a value, and the unreadable part; "" if all could be read."""
    if not isinstance(value, Mapping):
        return Chunk(), NOT_JSON if value is UNREAD else NOT_OBJECT
    reader = _Reader()
    chunk = Chunk(
        id=reader.text(value.get("id")),
        created=reader.integer(value.get("created")),
        model=reader.text(value.get("model")),
        choices=reader.choices(value.get("choices")),
        usage=reader.usage(value.get("usage")),
        timings=reader.timings(value.get("timings")),
        prompt_token_ids=reader.ids(value.get("prompt_token_ids")),
        error=value.get("error"),
    )
    return chunk, OTHER_FIELDS if reader.has_failed else ""


class _Reader:
    """Reads fields, and records whether a field had a type other than in OpenAI's API."""

    def __init__(self) -> None:
        self.has_failed = False

    def text(self, value: Any) -> str | None:
        if isinstance(value, str):
            return _encodable(value)
        self.has_failed |= value is not None
        return None

    def integer(self, value: Any) -> int | None:
        if isinstance(value, float) and isfinite(value):
            return int(value)
        if type(value) is int:
            return value
        self.has_failed |= value is not None
        return None

    def ids(self, value: Any) -> list[int] | None:
        if isinstance(value, list) and all(type(each) is int for each in value):
            return value
        self.has_failed |= value is not None
        return None

    def choices(self, value: Any) -> list[Choice]:
        """The choices; null means none."""
        if not isinstance(value, list):
            self.has_failed |= value is not None
            return []
        self.has_failed |= not all(isinstance(each, Mapping) for each in value)
        return [self._choice(each, at) for at, each in enumerate(value) if isinstance(each, Mapping)]

    def _choice(self, value: Mapping[str, Any], at: int) -> Choice:
        index, reason = count_of(value.get("index")), value.get("finish_reason")
        if isinstance(reason, Mapping):
            reason = reason.get("type")
        return Choice(
            index=at if index is None else index,
            delta=self._delta(value.get("delta")),
            message=self._delta(value.get("message")),
            text=self.text(value.get("text")),
            logprobs=value.get("logprobs"),
            token_ids=self.ids(value.get("token_ids")),
            prompt_token_ids=self.ids(value.get("prompt_token_ids")),
            finish_reason=None if reason is None else str(reason),
            usage=self.usage(value.get("usage")),
        )

    def _delta(self, value: Any) -> Delta | None:
        if not isinstance(value, Mapping):
            self.has_failed |= value is not None
            return None
        content, thought = _texts_of(value.get("content"))
        reasoning, _ = _texts_of(value.get("reasoning"))
        reasoning_content, _ = _texts_of(value.get("reasoning_content"))
        return Delta(content, reasoning or thought, reasoning_content, value.get("tool_calls"))

    def usage(self, value: Any) -> Usage | None:
        if isinstance(value, Mapping):
            return usage_of(value)
        self.has_failed |= value is not None
        return None

    def timings(self, value: Any) -> Timings | None:
        if not isinstance(value, Mapping):
            self.has_failed |= value is not None
            return None
        names = ("prompt_n", "cache_n", "predicted_n")
        return Timings(*(count_of(value.get(name)) or 0 for name in names))


def _encodable(text: str) -> str:
    """The text without surrogate halves. JSON can express them, but UTF-8 cannot."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _texts_of(content: Any, depth: int = 0) -> tuple[str | None, str | None]:
    """(text, reasoning) of a content: a text, or a list of parts, each a text or an object with a type."""
    if isinstance(content, str):
        return _encodable(content), None
    if content is None:
        return None, None
    if depth > _MAX_DEPTH:
        return None, None
    texts: list[str] = []
    thoughts: list[str] = []
    for part in content if isinstance(content, list) else [content]:
        if isinstance(part, Mapping):
            kind = part.get("type")
            is_thought = isinstance(kind, str) and ("think" in kind or "reason" in kind)
            inner = next((part[name] for name in ("text", "thinking", "reasoning", "summary") if name in part), None)
            text, thought = _texts_of(inner, depth + 1)
            (thoughts if is_thought else texts).append(text or "")
            thoughts.append(thought or "")
        elif isinstance(part, str):
            texts.append(_encodable(part))
    return "".join(texts) or None, "".join(thoughts) or None


# Token counts.


def count_of(value: Any) -> int | None:
    """A count given as a number or as digits; None if there is none."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 16:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_COUNT:
        return None
    return int(value) if value == int(value) else None


def _first(value: Mapping[str, Any], *names: str) -> int | None:
    """The first positive count of the fields. Without one: 0 if a field is 0, else None."""
    counts = [count for name in names if (count := count_of(value.get(name))) is not None]
    return next((count for count in counts if count), counts[0] if counts else None)


def usage_of(value: Mapping[str, Any]) -> Usage:
    """Token counts by the names of OpenAI's and Anthropic's APIs; unreported counts are 0."""
    if isinstance(tokens := value.get("tokens"), Mapping):  # Cohere's, within `meta`
        value = {**tokens, **value}
    prompt, output = _first(value, "prompt_tokens", "input_tokens"), _first(value, "completion_tokens", "output_tokens")
    beside = [_first(value, f"cache_{what}_input_tokens") or 0 for what in ("read", "creation")]
    if prompt is not None:  # Anthropic's input excludes cached tokens
        prompt += sum(beside)
    total = _first(value, "total_tokens")
    if total and prompt is None:
        prompt = max(total - (output or 0), 0)
    elif total and output is None and total > (prompt or 0):
        output = total - (prompt or 0)
    cached = beside[0] or _first(value, "prompt_cache_hit_tokens", "cached_tokens", "num_cached_tokens")
    for name in ("prompt_tokens_details", "input_tokens_details"):
        if isinstance(details := value.get(name), Mapping):
            cached = cached or _first(details, "cached_tokens")
    return Usage(prompt or 0, output or 0, None if cached is None else PromptDetails(cached))
