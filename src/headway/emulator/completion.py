"""Chat and text completions of an emulated engine: parameters of the request and JSON of the answer."""

from __future__ import annotations

import json
import math
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from headway.emulator import structured, tokens
from headway.emulator.kv_exchange import VllmKvSource
from headway.emulator.tokens import THINK_END, TokenSequence

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_UNLIMITED = 1 << 30
_MAX_CHOICES = 128


class BadRequestError(Exception):
    """The client's request is invalid."""


class SurfaceConfig(msgspec.Struct, frozen=True):
    """Properties of an emulated engine's answers: lengths, probabilities and fields."""

    name: str
    output_tokens: int = 128
    """Length of a chat answer, including its reasoning, unless something else ends it."""
    reasoning_tokens: int = 0
    """Length of the reasoning at the start of a chat answer. The last token marks its end."""
    confidence: tuple[float, float] = (1.0, 1.0)
    """Bounds of the probability reported for the tokens of an answer."""
    address: tuple[str, int] = ("127.0.0.1", 0)
    """Host and port at which other engines reach this engine."""
    reasoning_key: str = "reasoning"
    """JSON key of the reasoning in a chat."""
    has_token_ids: bool = True
    """Whether token ids are returned on request."""
    has_single_token_chunks: bool = False
    """Whether tokens that are generated together are streamed in separate chunks."""
    priority_sign: int = 1
    """-1 if a higher `priority` is more urgent."""
    ordering: str = ""
    """The ordering that the engine reports, as vLLM does with `headway.vllm.Scheduler`; empty if none is reported."""
    reports_cached_tokens: bool = False
    """Whether an answer's usage reports the prompt tokens found in the prefix cache."""

    def confidence_in(self, prompt: list[int]) -> float:
        """Token probability of an answer to this prompt. A continued answer keeps the probability of its beginning."""
        least, most = self.confidence
        return least + (most - least) * tokens.question_hash(prompt)


class Completion:
    """One request: its parameters, its choices, and the JSON around them."""

    def __init__(self, body: dict[str, Any], is_chat: bool, config: SurfaceConfig, lora: str = "") -> None:
        """`lora`: the adapter that answers; empty for the model itself."""
        self.body, self.is_chat = body, is_chat
        self.lora = lora
        self.stream = bool(body.get("stream"))
        params = body.get("kv_transfer_params") or {}
        try:
            self.kv_source = msgspec.convert(params, VllmKvSource) if params.get("do_remote_prefill") else None
        except (msgspec.ValidationError, AttributeError) as error:
            raise BadRequestError(f"kv_transfer_params: {error}") from None
        self.prompt = _prompt(body, is_chat, config.reasoning_tokens)
        self.has_token_ids = config.has_token_ids and bool(body.get("return_token_ids"))
        self.has_single_token_chunks = config.has_single_token_chunks
        self.reasoning_key = config.reasoning_key
        self.logprob = math.log(config.confidence_in(self.prompt))
        max_tokens = body.get("max_completion_tokens") or body.get("max_tokens") or (_UNLIMITED if is_chat else 16)
        if type(max_tokens) is not int or max_tokens < 1:
            raise BadRequestError("max_tokens must be 1 or more")
        num = 1 if body.get("n") is None else body["n"]
        if type(num) is not int or not 1 <= num <= _MAX_CHOICES:
            raise BadRequestError(f"n must be from 1 to {_MAX_CHOICES}")
        self.tool = _called_function(body) if is_chat else None
        script = _script(body, self.tool)
        self.choices = [CompletionChoice(self, i, config, max_tokens, script) for i in range(num)]
        name = "chat.completion" if is_chat else "text_completion"
        suffix = ".chunk" if is_chat and self.stream else ""
        self.head = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": name + suffix,
            "created": int(time.time()),
            "model": lora or config.name,
        }
        self.kv_name = str(self.head["id"]) if params.get("do_remote_decode") else None
        """Name under which the prompt's KV is kept for another engine; empty if it is not kept."""
        self.fault = ""
        """The failure to inject, by the surface's name."""
        self.received_s = math.inf
        """Time at which the request's head arrived."""
        self.cached_tokens: Callable[[], int] | None = None
        """Prompt tokens found in the prefix cache, for the usage; None if they are not reported."""

    @property
    def max_output_tokens(self) -> int:
        """Tokens of the longest choice."""
        return max(choice.output_tokens for choice in self.choices)

    def answer(self, choices: list[dict[str, Any]], usage: int | None, is_first: bool) -> dict[str, Any]:
        """The JSON of a chunk or of a complete answer. `usage`: output tokens so far; None: not reported."""
        answer: dict[str, Any] = {**self.head, "choices": choices}
        if usage is not None:
            num = len(self.prompt)
            answer["usage"] = {"prompt_tokens": num, "completion_tokens": usage, "total_tokens": num + usage}
            if self.cached_tokens is not None:
                answer["usage"]["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens()}
        if is_first and self.is_chat and self.has_token_ids:
            answer["prompt_token_ids"] = self.prompt
        return answer


class CompletionChoice:
    """One of a request's answers."""

    def __init__(
        self, completion: Completion, index: int, config: SurfaceConfig, max_tokens: int, script: list[str] | None
    ) -> None:
        self._completion, self._index = completion, index
        self._sequence = TokenSequence(
            completion.prompt, config.output_tokens, config.reasoning_tokens, script=script, variant=index
        )
        left = None if completion.body.get("ignore_eos") and script is None else self._sequence.left
        self.output_tokens = config.output_tokens if left is None and max_tokens == _UNLIMITED else max_tokens
        if left is not None:
            self.output_tokens = min(max_tokens, left)
        self.finish = "length" if left is None or left > max_tokens else "tool_calls" if completion.tool else "stop"
        self.reasoning_left = min(self._sequence.reasoning_left, self.output_tokens)
        self._is_first = True
        self._num_written = 0

    def chunk_sizes(self, num: int) -> list[int]:
        """Tokens per chunk for `num` new tokens. No chunk mixes reasoning and answer."""
        if self._completion.has_single_token_chunks:
            return [1] * num
        return [part for part in (min(num, self.reasoning_left), max(num - self.reasoning_left, 0)) if part]

    def truncate(self, num: int) -> None:
        """End the answer after `num` tokens."""
        self.output_tokens, self.finish = num, "length"

    def extend(self, num: int) -> dict[str, Any]:
        """Generate `num` tokens. Returns the choice for a chunk, or for the complete answer."""
        completion, is_first = self._completion, self._is_first
        ids = self._sequence.extend(num)
        self._num_written += num
        self._is_first = False
        num_reasoning = min(self.reasoning_left, len(ids)) if completion.is_chat else 0
        self.reasoning_left -= num_reasoning
        finish = self.finish if self._num_written == self.output_tokens else None
        choice: dict[str, Any] = {"index": self._index, "finish_reason": finish, "logprobs": self._logprobs(ids)}
        if completion.is_chat:
            reasoning = self._sequence.decode(id for id in ids[:num_reasoning] if id != THINK_END)
            choice["delta" if completion.stream else "message"] = self._message(
                reasoning, self._sequence.decode(ids[num_reasoning:]), is_first
            )
        else:
            choice["text"] = self._sequence.decode(ids)
        if completion.has_token_ids:
            choice["token_ids"] = ids
            if is_first and not completion.is_chat:
                choice["prompt_token_ids"] = completion.prompt
        return choice

    def _message(self, reasoning: str, text: str, is_first: bool) -> dict[str, Any]:
        """The chat message, or its new part."""
        completion = self._completion
        content = None if completion.tool and not completion.stream else ""
        message: dict[str, Any] = {"role": "assistant", "content": content} if is_first else {}
        if reasoning:
            message[completion.reasoning_key] = reasoning
        if completion.tool is None:
            return {**message, "content": text} if text else message
        call: dict[str, Any] = {"function": {"arguments": text}}
        if completion.stream:
            call["index"] = 0
        if is_first:
            call |= {"id": f"call-{uuid.uuid4().hex[:24]}", "type": "function"}
            call["function"]["name"] = completion.tool.name
        if text or is_first:
            message["tool_calls"] = [call]
        return message

    def _logprobs(self, ids: list[int]) -> dict[str, Any] | None:
        """Log probabilities in OpenAI's format. Each alternative is half as probable as the one before."""
        body, value = self._completion.body, self._completion.logprob
        requested = body.get("logprobs")
        if requested is None or requested is False:
            return None
        words = [self._sequence.decode([id]) for id in ids]
        num = body.get("top_logprobs") if self._completion.is_chat else requested
        ranked = [value - math.log(2) * i for i in range(num or 0)]
        tops = [[(word if i == 0 else f"{word}~{i}", top) for i, top in enumerate(ranked)] for word in words]
        if self._completion.is_chat:
            return {
                "content": [
                    {**_logprob(word, value), "top_logprobs": [_logprob(*each) for each in top]}
                    for word, top in zip(words, tops, strict=True)
                ]
            }
        offsets = [sum(map(len, words[:i])) for i in range(len(words))]
        return {
            "tokens": words,
            "token_logprobs": [value] * len(ids),
            "text_offset": offsets,
            "top_logprobs": [dict(top) for top in tops],
        }


def _logprob(word: str, value: float) -> dict[str, Any]:
    return {"token": word, "logprob": value, "bytes": list(word.encode())}


def _prompt(body: Mapping[str, Any], is_chat: bool, reasoning_tokens: int) -> list[int]:
    if is_chat:
        messages = body.get("messages")
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise BadRequestError("messages must be an array of objects")
        return tokens.chat(messages, reasoning_tokens > 0, bool(body.get("continue_final_message")))
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return tokens.encode(prompt) or [tokens.ASSISTANT]
    if isinstance(prompt, list) and prompt and all(type(id) is int for id in prompt):
        return prompt
    raise BadRequestError("prompt must be a string or an array of token ids")


class _Function(msgspec.Struct):
    name: str
    parameters: Any = None


class _Tool(msgspec.Struct):
    function: _Function


def _called_function(body: Mapping[str, Any]) -> _Function | None:
    """The function that the answer must call. With `auto` the emulator answers in words."""
    choice = body.get("tool_choice", "auto")
    tools = body.get("tools") or []
    try:
        functions = [msgspec.convert(tool, _Tool).function for tool in tools]
    except (msgspec.ValidationError, TypeError) as error:
        raise BadRequestError(f"tools must be an array of functions with names: {error}") from None
    if choice in ("auto", "none", None):
        return None
    if choice == "required":
        if not functions:
            raise BadRequestError("tool_choice is required, but there are no tools")
        return functions[0]
    name = choice.get("function", {}).get("name") if isinstance(choice, dict) else None
    if name not in (names := [function.name for function in functions]):
        raise BadRequestError(f"tool_choice: expected auto, none, required, or one of {names}")
    return functions[names.index(name)]


def _script(body: Mapping[str, Any], tool: _Function | None) -> list[str] | None:
    """The answer's text in pieces, if a schema or a function determines it."""
    kind, schema = _schema(body)
    if tool is not None:
        schema = tool.parameters or {"type": "object"}
    elif kind is None:
        return None
    try:
        return structured.pieces(structured.text(schema))
    except (structured.SchemaError, AttributeError, TypeError, ValueError) as error:
        raise BadRequestError(f"the JSON schema cannot be followed: {error}") from None


def _schema(body: Mapping[str, Any]) -> tuple[str | None, Any]:
    """The requested kind of structured output, and its schema."""
    form = body.get("response_format") or {}
    kind = form.get("type") if isinstance(form, dict) else None
    if kind == "json_schema":
        schema = form.get("json_schema")
        if not isinstance(schema, dict) or "schema" not in schema:
            raise BadRequestError("response_format.json_schema.schema is missing")
        return kind, schema["schema"]
    if kind == "json_object":
        return kind, {"type": "object", "properties": {"answer": {"type": "string"}}}
    if kind not in (None, "text"):
        raise BadRequestError("response_format.type: expected text, json_object or json_schema")
    guided = body.get("guided_json")
    if guided is None:
        return None, None
    try:
        return "guided_json", json.loads(guided) if isinstance(guided, str) else guided
    except ValueError as error:
        raise BadRequestError(f"guided_json: {error}") from None
