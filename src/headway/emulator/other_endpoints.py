"""Endpoints of an emulated engine besides completions: responses, embeddings, scores and tokens.

Their compute time comes from the engine: a pooled input is a prefill, a response is a chat.
"""

from __future__ import annotations

import base64
import math
import struct
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from headway.emulator import tokens
from headway.emulator.adapters import UnknownModelError, lora_of
from headway.emulator.completion import BadRequestError, Completion, SurfaceConfig
from headway.emulator.engine import EmulatedEngine

_EMBEDDING_SIZE = 64
GetEngine = Callable[[], EmulatedEngine]
Handler = Callable[[GetEngine, SurfaceConfig, dict[str, Any]], Awaitable[Response]]


def other_routes(engine: GetEngine, config: SurfaceConfig) -> list[Route]:
    """The routes for responses, embeddings, scores and tokens of vLLM's API."""
    handlers: dict[str, Handler] = {
        "/v1/responses": _responses,
        "/v1/embeddings": _embeddings,
        "/tokenize": _tokenize,
        "/detokenize": _detokenize,
        **dict.fromkeys(("/rerank", "/v1/rerank"), _rerank),
        **dict.fromkeys(("/score", "/v1/score"), _score),
    }
    return [Route(path, _endpoint(engine, config, handler), methods=["POST"]) for path, handler in handlers.items()]


def _endpoint(engine: GetEngine, config: SurfaceConfig, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    async def respond(request: Request) -> Response:
        try:
            body = msgspec.json.decode(await request.body())
            if not isinstance(body, dict):
                raise BadRequestError("expected an object")
            return await handler(engine, config, body)
        except UnknownModelError as error:
            return JSONResponse(
                {"error": {"message": str(error), "type": "NotFoundError", "param": None, "code": 404}}, 404
            )
        except (BadRequestError, msgspec.MsgspecError) as error:
            kind = {"message": str(error), "type": "BadRequestError", "param": None, "code": 400}
            return JSONResponse({"error": kind}, 400)

    return respond


# Pooled inputs.


async def _embeddings(engine: GetEngine, config: SurfaceConfig, body: dict[str, Any]) -> Response:
    inputs = _inputs(body.get("input"), "input")
    size = _EMBEDDING_SIZE if body.get("dimensions") is None else body["dimensions"]
    if type(size) is not int or not 1 <= size <= 4096:
        raise BadRequestError("dimensions must be from 1 to 4096")
    form = body.get("encoding_format", "float")
    if form not in ("float", "base64"):
        raise BadRequestError("encoding_format: expected float or base64")
    await _prefill(engine(), inputs)
    vectors = [_vector(each, size) for each in inputs]
    data = [{"object": "embedding", "index": i, "embedding": _encoded(v, form)} for i, v in enumerate(vectors)]
    return JSONResponse({"object": "list", "model": config.name, "data": data, "usage": _usage(inputs)})


async def _rerank(engine: GetEngine, config: SurfaceConfig, body: dict[str, Any]) -> Response:
    (query,), documents = _texts([body.get("query")], "query"), _texts(body.get("documents"), "documents")
    top_n = body.get("top_n")
    if top_n is not None and (type(top_n) is not int or top_n < 1):
        raise BadRequestError("top_n must be 1 or more")
    pairs = [[*query, *document] for document in documents]
    await _prefill(engine(), pairs)
    results: list[dict[str, Any]] = [
        {"index": i, "relevance_score": _relevance(query, document), "document": {"text": body["documents"][i]}}
        for i, document in enumerate(documents)
    ]
    results.sort(key=lambda result: -result["relevance_score"])
    answer = {"id": f"rerank-{uuid.uuid4().hex}", "model": config.name, "usage": _usage(pairs)}
    return JSONResponse({**answer, "results": results[:top_n]})


async def _score(engine: GetEngine, config: SurfaceConfig, body: dict[str, Any]) -> Response:
    one, other = body.get("text_1"), body.get("text_2")
    left = _texts([one] if isinstance(one, str) else one, "text_1")
    right = _texts([other] if isinstance(other, str) else other, "text_2")
    if len(left) not in (1, len(right)):
        raise BadRequestError("text_1: expected one text, or as many as text_2 has")
    both = list(zip(left * len(right) if len(left) == 1 else left, right, strict=True))
    await _prefill(engine(), [[*a, *b] for a, b in both])
    data = [{"index": i, "object": "score", "score": _relevance(*pair)} for i, pair in enumerate(both)]
    usage = _usage([[*a, *b] for a, b in both])
    answer = {"id": f"score-{uuid.uuid4().hex}", "object": "list", "created": int(time.time()), "model": config.name}
    return JSONResponse({**answer, "data": data, "usage": usage})


async def _prefill(engine: EmulatedEngine, inputs: list[list[int]]) -> None:
    """Compute the inputs as prompts."""
    if (longest := max(map(len, inputs))) >= engine.max_tokens:
        raise BadRequestError(f"{longest} tokens are more than this engine takes, {engine.max_tokens}")
    generated = [engine.begin(max(len(each), 1), 1, 0, 0) for each in inputs]
    try:
        for each in generated:
            while await each.read():
                pass
    finally:
        for each in generated:
            engine.abort(each)


def _inputs(value: Any, name: str) -> list[list[int]]:
    """The token ids of one or several texts or token arrays."""
    if isinstance(value, str) or (isinstance(value, list) and value and all(type(id) is int for id in value)):
        value = [value]
    if not isinstance(value, list) or not value:
        raise BadRequestError(f"{name} must be a text, token ids, or an array of them")
    for each in value:
        if not isinstance(each, str) and not (isinstance(each, list) and all(type(id) is int for id in each)):
            raise BadRequestError(f"{name} must be a text, token ids, or an array of them")
    return [tokens.encode(each) if isinstance(each, str) else each for each in value]


def _texts(value: Any, name: str) -> list[list[int]]:
    """The token ids of texts."""
    if not isinstance(value, list) or not value or not all(isinstance(each, str) for each in value):
        raise BadRequestError(f"{name} must be a text, or an array of texts")
    return [tokens.encode(each) for each in value]


def _vector(ids: list[int], size: int) -> list[float]:
    """A unit vector. Equal words give similar vectors, in any order."""
    sums = [1e-9] * size
    for id in ids:
        sums[id % size] += 1.0
        sums[id * 48_271 % size] -= 0.5
    norm = math.sqrt(sum(each * each for each in sums))
    return [each / norm for each in sums]


def _relevance(one: list[int], other: list[int]) -> float:
    """Cosine of two embeddings, from 0 to 1."""
    pairs = zip(_vector(one, _EMBEDDING_SIZE), _vector(other, _EMBEDDING_SIZE), strict=True)
    return min(max(0.5 + 0.5 * sum(a * b for a, b in pairs), 0.0), 1.0)


def _encoded(vector: list[float], form: str) -> list[float] | str:
    return vector if form == "float" else base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


def _usage(inputs: list[list[int]]) -> dict[str, int]:
    num = sum(map(len, inputs))
    return {"prompt_tokens": num, "total_tokens": num}


# Tokens.


async def _tokenize(engine: GetEngine, config: SurfaceConfig, body: dict[str, Any]) -> Response:
    is_chat = "messages" in body
    ids = Completion({**body, "max_tokens": 1}, is_chat, config).prompt
    return JSONResponse({"count": len(ids), "max_model_len": engine().max_tokens, "tokens": ids})


async def _detokenize(engine: GetEngine, config: SurfaceConfig, body: dict[str, Any]) -> Response:
    ids = body.get("tokens")
    if not isinstance(ids, list) or not all(type(id) is int and id >= 0 for id in ids):
        raise BadRequestError("tokens must be an array of token ids")
    return JSONResponse({"prompt": tokens.decode(ids)})


# Responses.


async def _responses(engine: GetEngine, config: SurfaceConfig, body: dict[str, Any]) -> Response:
    """Answer a response request: a chat whose answer has OpenAI's newer format."""
    completion = Completion(_as_chat(body), True, config, lora_of(engine(), config, body))
    limit = engine().max_tokens
    if (total := len(completion.prompt) + completion.max_output_tokens) > limit:
        raise BadRequestError(f"{total} tokens are more than this engine takes, {limit}")
    response = _Response(completion, body)
    if not body.get("stream"):
        async for _ in response.generate(engine()):
            pass
        return JSONResponse(response.json("completed"))
    return StreamingResponse(response.events(engine()), media_type="text/event-stream")


def _as_chat(body: dict[str, Any]) -> dict[str, Any]:
    """The chat request with the same meaning."""
    given = body.get("input")
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given or not all(isinstance(each, dict) for each in given):
        raise BadRequestError("input must be a text or an array of items")
    messages = [each if "role" in each else {"role": "tool", "content": each.get("output", "")} for each in given]
    if body.get("instructions"):
        messages.insert(0, {"role": "system", "content": body["instructions"]})
    chat: dict[str, Any] = {"messages": messages, "max_tokens": body.get("max_output_tokens")}
    form = (body.get("text") or {}).get("format") or {}
    if form.get("type") == "json_schema":
        chat["response_format"] = {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}
    elif form.get("type") == "json_object":
        chat["response_format"] = form
    if body.get("tools"):
        chat["tools"] = [{"type": "function", "function": tool} for tool in body["tools"]]
        choice = body.get("tool_choice", "auto")
        chat["tool_choice"] = {"function": {"name": choice.get("name")}} if isinstance(choice, dict) else choice
    return chat


class _Response:
    """One response and its events."""

    def __init__(self, completion: Completion, body: dict[str, Any]) -> None:
        self._completion, self._body = completion, body
        self._created = int(time.time())
        self._id = f"resp_{uuid.uuid4().hex}"
        self._item_id = f"{'fc' if completion.tool else 'msg'}_{uuid.uuid4().hex}"
        self._call_id = f"call_{uuid.uuid4().hex[:24]}"
        self._reasoning: list[str] = []
        self._text: list[str] = []
        self._num_tokens = 0
        self._num_events = 0

    async def generate(self, engine: EmulatedEngine) -> AsyncIterator[str]:
        """Generate the answer; yields its text piece by piece."""
        choice, completion = self._completion.choices[0], self._completion
        generated = engine.begin(
            len(completion.prompt), choice.output_tokens, 0, choice.reasoning_left, lora=completion.lora
        )
        try:
            while new := await generated.read():
                self._num_tokens += new
                for size in choice.chunk_sizes(new):
                    message = choice.extend(size)["message"]
                    self._reasoning.append(message.get(completion.reasoning_key) or "")
                    calls = message.get("tool_calls")
                    piece = calls[0]["function"]["arguments"] if calls else message.get("content") or ""
                    self._text.append(piece)
                    yield piece
        finally:
            engine.abort(generated)

    async def events(self, engine: EmulatedEngine) -> AsyncIterator[bytes]:
        """The server-sent events of a streamed response."""
        place = {"item_id": self._item_id, "output_index": 0}
        part = {**place, "content_index": 0}
        kind = "response.function_call_arguments" if self._completion.tool else "response.output_text"
        yield self._event("response.created", response=self.json("in_progress"))
        yield self._event("response.in_progress", response=self.json("in_progress"))
        yield self._event("response.output_item.added", output_index=0, item=self._item("in_progress"))
        if not self._completion.tool:
            yield self._event("response.content_part.added", **part, part=self._part(""))
        async for piece in self.generate(engine):
            if piece:
                yield self._event(f"{kind}.delta", **(place if self._completion.tool else part), delta=piece)
        text = "".join(self._text)
        if self._completion.tool:
            yield self._event(f"{kind}.done", **place, arguments=text, name=self._completion.tool.name)
        else:
            yield self._event(f"{kind}.done", **part, text=text, logprobs=[])
            yield self._event("response.content_part.done", **part, part=self._part(text))
        yield self._event("response.output_item.done", output_index=0, item=self._item("completed"))
        yield self._event("response.completed", response=self.json("completed"))

    def json(self, status: str) -> dict[str, Any]:
        """The object that the endpoint answers."""
        choice, prompt = self._completion.choices[0], len(self._completion.prompt)
        is_cut = status == "completed" and choice.finish == "length"
        num_reasoning = len("".join(self._reasoning).split())
        return {
            "id": self._id, "object": "response", "created_at": self._created,
            "status": "incomplete" if is_cut else status,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "model": self._completion.head["model"], "error": None, "instructions": self._body.get("instructions"),
            "metadata": self._body.get("metadata") or {}, "parallel_tool_calls": True, "temperature": 1.0, "top_p": 1.0,
            "tool_choice": self._body.get("tool_choice", "auto"), "tools": self._body.get("tools") or [],
            "output": self._output() if status == "completed" else [],
            "usage": None if status != "completed" else {
                "input_tokens": prompt, "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": self._num_tokens, "output_tokens_details": {"reasoning_tokens": num_reasoning},
                "total_tokens": prompt + self._num_tokens,
            },
        }  # fmt: skip

    def _output(self) -> list[dict[str, Any]]:
        reasoning = "".join(self._reasoning)
        content = [{"type": "reasoning_text", "text": reasoning}]
        item = {"type": "reasoning", "id": f"rs_{self._id[5:]}", "summary": [], "content": content}
        return [*([item] if reasoning else []), self._item("completed")]

    def _item(self, status: str) -> dict[str, Any]:
        text = "".join(self._text)
        if self._completion.tool:
            name = self._completion.tool.name
            call = {"type": "function_call", "id": self._item_id, "call_id": self._call_id, "name": name}
            return {**call, "arguments": text, "status": status}
        content = [self._part(text)] if status == "completed" else []
        return {"type": "message", "id": self._item_id, "role": "assistant", "status": status, "content": content}

    def _part(self, text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _event(self, kind: str, **fields: Any) -> bytes:
        value = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return b"event: " + kind.encode() + b"\ndata: " + msgspec.json.encode(value) + b"\n\n"
