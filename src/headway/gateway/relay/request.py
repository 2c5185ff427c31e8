"""What a client asks for: checked as far as the gateway must understand it, and no further."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from msgspec import Struct

from headway.core.request import Segment
from headway.gateway.errors import ApiError

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
EMBEDDINGS, RESPONSES, MESSAGES = "/v1/embeddings", "/v1/responses", "/v1/messages"
PATHS = (CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES, MESSAGES)
BLOCK_BYTES = 1024
"""Prompts that share so many leading bytes share a segment."""
_MOST_SEGMENTS = 64
MOST_TOKENS = 1 << 30
MOST_TIER = (1 << 15) - 1
SLO_MS = (1e-3, 1e12)
"""The least and the most that can be promised."""
_HISTORY = (
    "logprobs", "top_logprobs", "prompt_logprobs", "echo", "suffix", "frequency_penalty", "presence_penalty",
    "repetition_penalty", "response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    "structured_outputs", "grammar", "json_schema", "tools", "functions", "min_tokens", "best_of",
)  # fmt: skip
"""What an answer cannot be continued with on another engine: it hangs on all tokens so far, or on a parser's state."""
_PASSED_ON = ("authorization", "traceparent", "tracestate", "x-api-key", "anthropic-version", "anthropic-beta")
_SERVICE_TIERS = {"priority": 0, "auto": 0, "default": 0, "flex": 1}


class ClientRequest(Struct, kw_only=True):
    """One request of a client."""

    path: str
    body: dict[str, Any]
    raw: bytes
    model: str
    stream: bool
    wants_usage: bool
    max_tokens: int | None
    text: str
    """All of the prompt, as far as it is text."""
    prompt_ids: list[int] | None
    """The prompt, where it was given as token ids."""
    tier: int
    slo_ttft_s: float | None
    slo_tpot_s: float | None
    session: str | None
    region: str
    """Where the client says that it is."""
    passed_on: str
    """Header lines for the engine."""
    explains: bool = False
    """The client wants to know what became of it in the gateway."""
    read_s: float | None = None
    """When its last byte had come; None: that does not matter, or has been counted."""

    @property
    def is_chat(self) -> bool:
        """Messages, not a prompt."""
        return self.path == CHAT

    @property
    def is_opaque(self) -> bool:
        """Its answer is passed on as it comes."""
        return self.path not in (CHAT, COMPLETIONS)

    @property
    def can_go_on(self) -> bool:
        """Its answer, once begun, can be continued on another engine."""
        if self.is_opaque:
            return False
        body = self.body
        single = body.get("n") in (None, 1) and (self.is_chat or isinstance(body.get("prompt"), str) or self.prompt_ids)
        return bool(single) and not any(body.get(name) for name in _HISTORY)

    def prefix(self) -> tuple[Segment, ...]:
        """Leading segments of the prompt, by content; an id stands for all text up to its end."""
        if len(self.text) < BLOCK_BYTES // 4:
            return ()
        data = memoryview(_bytes(self.text))
        chained, segments = hashlib.sha1(usedforsecurity=False), []
        for i in range(min(len(data) // BLOCK_BYTES, _MOST_SEGMENTS)):
            chained.update(data[i * BLOCK_BYTES : (i + 1) * BLOCK_BYTES])
            segments.append(Segment(_number(chained.digest()), BLOCK_BYTES // 4))
        return tuple(segments)

    def features(self, arrival_s: float) -> Features:
        """What control reads of the request, which arrived at `arrival_s`."""
        num_ids = None if self.prompt_ids is None else len(self.prompt_ids)
        return Features(
            arrival_s, self.model, self.is_opaque, len(self.text), num_ids, self.max_tokens, self.tier, self.region,
            self.session_id(), self.prefix(), self.slo_ttft_s, self.slo_tpot_s,
        )  # fmt: skip

    def session_id(self) -> int | None:
        """The session's name as a number."""
        if self.session is None:
            return None
        return _number(hashlib.sha1(_bytes(self.session), usedforsecurity=False).digest())


class Features(Struct, array_like=True, gc=False):
    """What control reads of a request: everything but its text."""

    arrival_s: float
    """On the clock of the process that received it."""
    model: str
    is_opaque: bool
    num_chars: int
    """Characters of the prompt's text."""
    prompt_tokens: int | None
    """None unless the prompt was given as token ids."""
    max_tokens: int | None
    tier: int
    region: str
    session_id: int | None
    prefix: tuple[Segment, ...]
    slo_ttft_s: float | None
    slo_tpot_s: float | None


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _number(digest: bytes) -> int:
    """The same in every process, which Python's own hashes are not; no less than 0."""
    return int.from_bytes(digest[:8]) >> 1


def read_request(path: str, raw: bytes, headers: Mapping[str, str]) -> ClientRequest:
    """A request, from its body and headers (names in lower case). ApiError where it makes no sense."""
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", "invalid_json") from None
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object", "invalid_type")
    model = _field(body, "model", str)
    if model is None:
        raise ApiError(400, "'model' is missing", "missing_required_parameter", "model")
    options = _field(body, "stream_options", dict) or {}
    _field(body, "n", int)
    text, prompt_ids = _READERS[path](body)
    return ClientRequest(
        path=path, body=body, raw=raw, model=model, stream=bool(_field(body, "stream", bool)),
        wants_usage=bool(options.get("include_usage")), max_tokens=_max_tokens(body), text=text,
        prompt_ids=prompt_ids, tier=_tier(body, headers), slo_ttft_s=_slo_s(headers, "ttft"),
        slo_tpot_s=_slo_s(headers, "tpot"),
        session=headers.get("x-session-id") or _field(body, "prompt_cache_key", str),
        region=headers.get("x-headway-region", ""),
        passed_on="".join(f"{name}: {headers[name]}\r\n" for name in _PASSED_ON if name in headers),
        explains=headers.get("x-headway-explain") == "1",
    )  # fmt: skip


def _field(body: dict[str, Any], name: str, kind: type[Any]) -> Any:
    value = body.get(name)
    if value is None or (isinstance(value, kind) and not (kind is int and isinstance(value, bool))):
        return value
    if kind is int and isinstance(value, float) and value.is_integer():  # as JSON has it, 3.0 is a whole number
        return int(value)
    raise ApiError(400, f"{name!r} must be of type {_WORDS[kind]}", "invalid_type", name)


_WORDS = {str: "string", bool: "boolean", int: "integer", dict: "object", list: "array"}


def _max_tokens(body: dict[str, Any]) -> int | None:
    for name in ("max_completion_tokens", "max_tokens", "max_output_tokens"):
        value = _field(body, name, int)
        if value is not None:
            if not 0 < value <= MOST_TOKENS:
                raise ApiError(400, f"{name!r} must be 1 or more, not {value}", "invalid_value", name)
            return int(value)
    return None


def _messages(body: dict[str, Any]) -> tuple[str, None]:
    messages = _field(body, "messages", list)
    if not messages:
        raise ApiError(400, "'messages' is missing or empty", "missing_required_parameter", "messages")
    parts: list[str] = []
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            raise ApiError(400, f"'messages[{i}]' must be of type object", "invalid_type", f"messages[{i}]")
        parts.append(str(message.get("role", "")))
        parts += _texts(message.get("content"))
    return "\n".join(parts), None


def _texts(content: object) -> list[str]:
    """What is text in a message's content."""
    if isinstance(content, str):
        return [content]
    parts = content if isinstance(content, list) else []
    return [text for part in parts if isinstance(part, dict) and isinstance(text := part.get("text"), str)]


def _told(body: dict[str, Any]) -> tuple[str, None]:
    """/v1/messages: what the model is told to be comes beside the messages."""
    text, _ = _messages(body)
    return "\n".join([*_texts(body.get("system")), text]), None


def _input(body: dict[str, Any]) -> tuple[str, list[int] | None]:
    """/v1/embeddings and /v1/responses."""
    given, before = body.get("input"), _texts(body.get("instructions"))
    if isinstance(given, str):
        return "\n".join([*before, given]), None
    if isinstance(given, list) and given:
        if (ids := _ids(given)) is not None:
            return "", ids
        items = [[item] if isinstance(item, str) else _texts(item.get("content")) if isinstance(item, dict) else []
                 for item in given]  # fmt: skip
        return "\n".join([*before, *(text for item in items for text in item)]), None
    if given is None:
        raise ApiError(400, "'input' is missing", "missing_required_parameter", "input")
    raise ApiError(400, "'input' must be a string or an array that is not empty", "invalid_type", "input")


def _ids(given: list[Any]) -> list[int] | None:
    """Token ids, if they are."""
    if all(type(token) is int for token in given):
        return given
    whole = all(type(token) is int or (isinstance(token, float) and token.is_integer()) for token in given)
    return [int(token) for token in given] if whole else None


def _prompt(body: dict[str, Any]) -> tuple[str, list[int] | None]:
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return prompt, None
    if isinstance(prompt, list) and prompt:
        if (ids := _ids(prompt)) is not None:
            return "", ids
        if all(isinstance(text, str) for text in prompt):
            return "\n".join(prompt), None
        if all(isinstance(ids, list) for ids in prompt):
            return "", None
    if prompt is None:
        raise ApiError(400, "'prompt' is missing", "missing_required_parameter", "prompt")
    raise ApiError(400, "'prompt' must be a string, or an array of strings or of token ids", "invalid_type", "prompt")


_READERS: dict[str, Callable[[dict[str, Any]], tuple[str, list[int] | None]]] = {
    CHAT: _messages, COMPLETIONS: _prompt, EMBEDDINGS: _input, RESPONSES: _input, MESSAGES: _told,
}  # fmt: skip


def _tier(body: dict[str, Any], headers: Mapping[str, str]) -> int:
    """0 is the most urgent: the body's `priority`, else a header, else OpenAI's `service_tier`."""
    given = _field(body, "priority", int)
    if given is None and "x-headway-tier" in headers:
        try:
            given = int(headers["x-headway-tier"])
        except ValueError:
            raise ApiError(400, "x-headway-tier must be a whole number", "invalid_value", "x-headway-tier") from None
    if given is None:
        return _SERVICE_TIERS.get(str(body.get("service_tier")), 0)
    if not 0 <= given <= MOST_TIER:
        raise ApiError(400, f"a tier is 0 (most urgent) or more, not {given}", "invalid_value", "priority")
    return int(given)


def _slo_s(headers: Mapping[str, str], what: str) -> float | None:
    """A promise in milliseconds, as llm-d's clients send it."""
    for name in (f"x-llm-d-slo-{what}-ms", f"x-slo-{what}-ms"):
        if name in headers:
            try:
                value = float(headers[name])
            except ValueError:
                value = 0.0
            least, most = SLO_MS
            if not least <= value <= most:
                said = f"{name} must be milliseconds, {least:g} to {most:g}"
                raise ApiError(400, said, "invalid_value", name)
            return value / 1e3
    return None
