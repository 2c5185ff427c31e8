"""Reads clients' requests. Only values that the gateway itself needs are checked: the model, whether the answer is a
stream, the number of answers, and the tier. Other values are read as far as possible, and the engine decides about
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from headway.gateway.errors import DECODE_ERRORS, ApiError
from headway.gateway.names import cut
from headway.gateway.relay import json_body
from headway.gateway.relay.form_body import Form
from headway.gateway.relay.request import (
    CHAT,
    CLASSIFY,
    COMPLETIONS,
    COUNT_TOKENS,
    DETOKENIZE,
    EMBEDDINGS,
    FORMS,
    IMAGES,
    MAX_NAME_CHARS,
    MAX_SLO_MS,
    MAX_TIER,
    MAX_TOKENS,
    MESSAGES,
    MIN_SLO_MS,
    POOLING,
    RERANK,
    RESPONSES,
    SCORE,
    SPEECH,
    TOKENIZE,
    ClientRequest,
)
from headway.gateway.upstream.loose_json import count_of

_STREAMED_PATHS: Final = frozenset((CHAT, COMPLETIONS, RESPONSES, MESSAGES, *FORMS))
"""Endpoints that may stream. Other endpoints never stream, regardless of `stream`."""
_STATEFUL_OPTIONS: Final = frozenset((
    "logprobs", "top_logprobs", "prompt_logprobs", "echo", "suffix", "frequency_penalty", "presence_penalty",
    "repetition_penalty", "response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    "structured_outputs", "grammar", "json_schema", "tools", "functions", "min_tokens", "best_of", "prompt_embeds",
))  # fmt: skip
"""Options that depend on all tokens so far or on a parser's state. With such an option, no other engine can continue
the answer."""
_FORWARDED_HEADERS: Final = frozenset(
    (
        "authorization",
        "traceparent",
        "tracestate",
        "x-api-key",
        "anthropic-version",
        "anthropic-beta",
    )
)
_SERVICE_TIERS = {"priority": 0, "auto": 0, "default": 0, "flex": 1}
_MEDIA_SIGNS = (b'_url"', b'"input_', b'"image"', b'"document"')
"""Texts of which a body with images, audio or files has one."""
_TYPES: Final[dict[str, tuple[Any, ...]]] = {
    "model": ("string", str), "stream": ("boolean", bool), "n": ("integer", int, float),
    "priority": ("integer", int, float),
}  # fmt: skip
"""The checked fields: the type that errors name, and the types of their values."""
_SLO_HEADERS: Final = frozenset(
    f"{prefix}-{metric}-ms" for prefix in ("x-llm-d-slo", "x-slo") for metric in ("ttft", "tpot")
)
Prompt = tuple[str, list[int] | None]
"""The prompt's text, and its token ids if it was given as token ids."""


def read_request(path: str, raw: bytes, headers: Mapping[str, str]) -> ClientRequest:
    """Read a request's body and headers (names in lower case). Raises ApiError if they are invalid."""
    if path in FORMS:
        return _read_form(path, raw, headers)
    try:
        body, sent_fields = json_body.decode(raw)
    except DECODE_ERRORS as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", "invalid_json") from None
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object", "invalid_type")
    named, stream, num, priority = body.get("model"), body.get("stream"), body.get("n"), body.get("priority")
    if (
        not (named is None or isinstance(named, str))
        or not (stream is None or isinstance(stream, bool))
        or not (num is None or (isinstance(num, int | float) and not isinstance(num, bool)))
        or not (priority is None or (isinstance(priority, int | float) and not isinstance(priority, bool)))
    ):
        raise _first_wrong(body)
    model, service_tier = named or "", body.get("service_tier")
    region = headers.get("x-headway-region", "")
    if len(model) > MAX_NAME_CHARS:
        raise _long_model()
    if num is not None:
        _integer("n", num)
    text, prompt_ids = _PROMPT_READERS[path](body)
    cache_key = body.get("prompt_cache_key")
    options, is_chat = body.get("stream_options"), path == CHAT
    may_have_media = not is_chat
    messages = body.get("messages")
    for message in messages if is_chat and isinstance(messages, list) else ():
        may_have_media |= not isinstance(message, dict) or not isinstance(message.get("content"), str)
    has_media = may_have_media and any(raw.find(sign) >= 0 for sign in _MEDIA_SIGNS)
    request = ClientRequest(path, body, raw, sent_fields)
    request.model, request.text, request.prompt_ids = model, text, prompt_ids
    request.stream = stream is True and path in _STREAMED_PATHS
    request.can_resume = _can_resume(path, body, prompt_ids)
    request.wants_usage = isinstance(options, dict) and bool(options.get("include_usage"))
    request.max_tokens = _max_tokens(body)
    if priority is not None or service_tier is not None or "x-headway-tier" in headers:
        request.tier = _tier(priority, service_tier, headers)
        request.is_flex = service_tier == "flex"
    if not _SLO_HEADERS.isdisjoint(headers):
        request.slo_ttft_s, request.slo_tpot_s = _slo_s(headers, "ttft"), _slo_s(headers, "tpot")
    request.session = headers.get("x-session-id") or (cache_key if isinstance(cache_key, str) else None)
    request.region = cut(region) if region else ""
    if not _FORWARDED_HEADERS.isdisjoint(headers):
        forwarded = _FORWARDED_HEADERS.intersection(headers)
        request.engine_headers = "".join([f"{name}: {headers[name]}\r\n" for name in sorted(forwarded)])
    request.wants_explanation = headers.get("x-headway-explain") == "1"
    request.has_media = has_media  # or only a text about the prompt, which does not show the number of token ids
    request.may_be_several = path == COMPLETIONS or "n" in body or "best_of" in body or "n_cmpl" in body
    return request


def checked_model(name: str) -> str:
    """A model's name. Raises ApiError if it is too long."""
    if len(name) > MAX_NAME_CHARS:
        raise _long_model()
    return name


def _long_model() -> ApiError:
    return ApiError(400, f"'model' has more than {MAX_NAME_CHARS} characters", "invalid_value", "model")


def _read_form(path: str, raw: bytes, headers: Mapping[str, str]) -> ClientRequest:
    """Read a form like a JSON body with the same fields."""
    content_type = headers.get("content-type", "")
    form = Form(raw, content_type)
    body: dict[str, Any] = {name: form.fields[name] for name in ("model", "prompt") if name in form.fields}
    if not body.get("model"):
        raise ApiError(400, "'model' is missing", "missing_required_parameter", "model")
    body["stream"] = form.fields.get("stream", "").lower() in ("true", "1")
    request = read_request(SPEECH, msgspec.json.encode({"input": body.get("prompt", ""), **body}), headers)
    request.path, request.body, request.raw, request.sent_fields = path, body, raw, None
    request.form, request.content_type, request.stream, request.has_media = form, content_type, body["stream"], True
    return request


def _first_wrong(body: dict[str, Any]) -> ApiError:
    """The error of the first field of the body whose type is wrong."""
    fields = [(name, value) for name, value in body.items() if name in _TYPES and value is not None]
    return next(_wrong_type(name, _TYPES[name][0]) for name, value in fields if type(value) not in _TYPES[name][1:])


def _wrong_type(name: str, kind: str) -> ApiError:
    return ApiError(400, f"{name!r} must be of type {kind}", "invalid_type", name)


def _integer(name: str, value: Any) -> int:
    """A whole number, which may be written as 3.0 in JSON, or be too long for a float."""
    if value != value // 1:
        raise _wrong_type(name, "integer")
    return int(value)


def _can_resume(path: str, body: dict[str, Any], prompt_ids: list[int] | None) -> bool:
    """Whether another engine can continue the answer: it is one sequence that depends only on its tokens, and the
    prompt could be read."""
    if path not in (CHAT, COMPLETIONS) or body.get("n") not in (None, 1):
        return False
    if path == COMPLETIONS and not isinstance(body.get("prompt"), str) and not prompt_ids:
        return False
    if path == CHAT:
        messages = body.get("messages")
        if not isinstance(messages, list):
            return False
        for message in messages:
            if not isinstance(message, dict):
                return False
    return _STATEFUL_OPTIONS.isdisjoint(body) or not any(map(body.get, _STATEFUL_OPTIONS))


def _max_tokens(body: dict[str, Any]) -> int | None:
    """The limit of an answer's tokens. None: the engine's own limit applies. A negative limit is None, as in
    llama.cpp."""
    for name in ("max_completion_tokens", "max_tokens", "max_output_tokens"):
        value = body.get(name)
        if value is not None:
            if type(value) is int and 0 <= value <= MAX_TOKENS:
                return value
            tokens = count_of(value)
            if tokens is None and isinstance(value, int | float) and value > MAX_TOKENS:
                return MAX_TOKENS
            return tokens
    return None


def _chat_prompt(body: dict[str, Any]) -> Prompt:
    parts: list[str] = []
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else ():
        if not isinstance(message, dict):
            continue
        parts.append(str(message.get("role", "")))
        content = message.get("content")
        if isinstance(content, str):
            parts.append(content)
        else:
            parts += _texts(content)
    return "\n".join(parts), None


def _texts(content: object) -> list[str]:
    """The text parts of a message's content."""
    if isinstance(content, str):
        return [content]
    parts = content if isinstance(content, list) else []
    return [text for part in parts if isinstance(part, dict) and isinstance(text := part.get("text"), str)]


def _messages_prompt(body: dict[str, Any]) -> Prompt:
    """The prompt of /v1/messages, whose system prompt is in a separate field."""
    text, _ = _chat_prompt(body)
    return "\n".join([*_texts(body.get("system")), text]), None


def _input_prompt(body: dict[str, Any]) -> Prompt:
    """The prompt of /v1/embeddings, /v1/responses and similar endpoints: an input, or a chat."""
    value, instructions = body.get("input"), _texts(body.get("instructions"))
    if isinstance(value, str):
        return "\n".join([*instructions, value]), None
    if isinstance(value, list) and value:
        if (ids := _token_ids(value)) is not None:
            return "", ids
        items = [
            [item] if isinstance(item, str) else _texts(item.get("content")) if isinstance(item, dict) else []
            for item in value
        ]
        return "\n".join([*instructions, *(text for item in items for text in item)]), None
    text, _ = _chat_prompt(body)
    return "\n".join([*instructions, *([text] if text else [])]), None


def _token_ids(values: list[Any]) -> list[int] | None:
    """The values as token ids; None if some value is not an integer."""
    if all(type(value) is int for value in values):
        return values
    are_integers = all(type(value) is int or (isinstance(value, float) and value.is_integer()) for value in values)
    return [int(value) for value in values] if are_integers else None


def _completion_prompt(body: dict[str, Any]) -> Prompt:
    """The prompt if it is text or token ids. Other prompts, such as embeddings, are left to the engine."""
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return prompt, None
    if isinstance(prompt, list) and prompt:
        if (ids := _token_ids(prompt)) is not None:
            return "", ids
        return "\n".join([text for text in prompt if isinstance(text, str)]), None
    return "", None


def _fields_prompt(*names: str) -> Callable[[dict[str, Any]], Prompt]:
    """A reader of fields with texts. Each field is a text, or an array of texts and of objects with a text."""

    def read(body: dict[str, Any]) -> Prompt:
        parts: list[str] = []
        for name in names:
            value = body.get(name)
            for each in value if isinstance(value, list) else [value]:
                parts += [each] if isinstance(each, str) else _texts([each])
        return "\n".join(parts), None

    return read


def _tokenized_prompt(body: dict[str, Any]) -> Prompt:
    """The prompt of /tokenize: a text or a chat."""
    return _chat_prompt(body) if body.get("prompt") is None else _fields_prompt("prompt")(body)


def _no_prompt(body: dict[str, Any]) -> Prompt:
    """/detokenize computes no prompt; the engine checks the tokens."""
    return "", None


_PROMPT_READERS: Final[dict[str, Callable[[dict[str, Any]], Prompt]]] = {
    CHAT: _chat_prompt,
    COMPLETIONS: _completion_prompt,
    EMBEDDINGS: _input_prompt,
    RESPONSES: _input_prompt,
    MESSAGES: _messages_prompt,
    COUNT_TOKENS: _messages_prompt,
    TOKENIZE: _tokenized_prompt,
    DETOKENIZE: _no_prompt,
    **dict.fromkeys(RERANK, _fields_prompt("query", "documents")),
    **dict.fromkeys(SCORE, _fields_prompt("text_1", "text_2", "queries", "documents", "items")),
    POOLING: _input_prompt,
    **dict.fromkeys(CLASSIFY, _input_prompt),
    SPEECH: _fields_prompt("input"),
    IMAGES: _fields_prompt("prompt"),
}


def _tier(priority: Any, service_tier: object, headers: Mapping[str, str]) -> int:
    """The body's `priority`, otherwise the header's tier, otherwise OpenAI's `service_tier`; 0 is the most urgent."""
    if priority is not None:
        tier = _integer("priority", priority)
    elif "x-headway-tier" in headers:
        try:
            tier = int(headers["x-headway-tier"])
        except ValueError:
            raise ApiError(400, "x-headway-tier must be a whole number", "invalid_value", "x-headway-tier") from None
    else:
        return _SERVICE_TIERS.get(str(service_tier), 0)
    if not 0 <= tier <= MAX_TIER:
        raise ApiError(400, f"a tier is from 0 (most urgent) to {MAX_TIER}, not {tier}", "invalid_value", "priority")
    return tier


def _slo_s(headers: Mapping[str, str], metric: str) -> float | None:
    """An SLO in seconds, from llm-d's header in milliseconds."""
    for name in (f"x-llm-d-slo-{metric}-ms", f"x-slo-{metric}-ms"):
        if name in headers:
            try:
                value = float(headers[name])
            except ValueError:
                value = 0.0
            if not MIN_SLO_MS <= value <= MAX_SLO_MS:
                message = f"{name} must be milliseconds, {MIN_SLO_MS:g} to {MAX_SLO_MS:g}"
                raise ApiError(400, message, "invalid_value", name)
            return value / 1e3
    return None
