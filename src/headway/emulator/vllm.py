"""The HTTP surface of an emulated engine: OpenAI's completions endpoints, and vLLM's own routes.

`sglang` has the differences of SGLang.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, Protocol

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from headway.emulator import tokens
from headway.emulator.engine import EmulatedEngine
from headway.emulator.kv_exchange import PATH, KvGoneError, VllmKvSource
from headway.emulator.tokens import THINK_END, TokenSequence

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class TokenSource(Protocol):
    """The number of an answer's tokens, as they are generated."""

    async def read(self) -> int:
        """Wait for tokens. Returns the number of new ones; 0 = the answer is complete."""


class BadRequestError(Exception):
    """The client's request is invalid."""


class Completion:
    """One completion: the request's parameters, and the JSON of its answer."""

    def __init__(self, body: dict[str, Any], is_chat: bool, config: SurfaceConfig) -> None:
        self.body, self.is_chat = body, is_chat
        self.stream = bool(body.get("stream"))
        params = body.get("kv_transfer_params") or {}
        try:
            self.kv_source = msgspec.convert(params, VllmKvSource) if params.get("do_remote_prefill") else None
        except (msgspec.ValidationError, AttributeError) as error:
            raise BadRequestError(f"kv_transfer_params: {error}") from None
        self.prompt = _prompt(body, is_chat, config.reasoning_tokens)
        self._logprob = math.log(config.confidence_in(self.prompt))
        self._reasoning_key, self._has_token_ids = config.reasoning_key, config.has_token_ids
        self._has_single_token_chunks = config.has_single_token_chunks
        sequence = self.sequence = TokenSequence(self.prompt, config.output_tokens, config.reasoning_tokens)
        max_tokens = body.get("max_completion_tokens") or body.get("max_tokens") or (1 << 30 if is_chat else 16)
        if not isinstance(max_tokens, int) or max_tokens < 1 or (body.get("n") or 1) != 1:
            raise BadRequestError("max_tokens must be 1 or more, and n 1")
        left = None if body.get("ignore_eos") else sequence.left
        self.output_tokens = min(max_tokens, left or max_tokens)
        if max_tokens == 1 << 30 and left is None:
            self.output_tokens = config.output_tokens
        self.finish = "stop" if left is not None and left <= max_tokens else "length"
        self.reasoning_left = min(sequence.reasoning_left, self.output_tokens)
        kind = "chatcmpl" if is_chat else "cmpl"
        name = "chat.completion" if is_chat else "text_completion"
        suffix = ".chunk" if is_chat and self.stream else ""
        self.head = {
            "id": f"{kind}-{uuid.uuid4().hex}", "object": name + suffix, "created": int(time.time()),
            "model": config.name,
        }  # fmt: skip
        self.kv_name = str(self.head["id"]) if params.get("do_remote_decode") else None
        """Name under which the prompt's KV is kept for another engine."""
        self.fault = ""
        """Failure to inject, in the engine's own terms."""
        self.received_s = math.inf
        """When the request's head arrived."""

    def chunk_sizes(self, num: int) -> list[int]:
        """Tokens per chunk for `num` new tokens. No chunk has both reasoning and answer."""
        if self._has_single_token_chunks:
            return [1] * num
        return [part for part in (min(num, self.reasoning_left), max(num - self.reasoning_left, 0)) if part]

    def choice(self, ids: list[int], finish: str | None, is_first: bool) -> dict[str, Any]:
        """The JSON choice of a chunk or of a whole answer with these tokens."""
        num = min(self.reasoning_left, len(ids)) if self.is_chat else 0
        self.reasoning_left -= num
        reasoning, text = tokens.decode(id for id in ids[:num] if id != THINK_END), tokens.decode(ids[num:])
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish, "logprobs": self._logprobs(ids)}
        if self.is_chat:
            message = {name: value for name, value in ((self._reasoning_key, reasoning), ("content", text)) if value}
            if is_first:
                message = {"role": "assistant", "content": "", **message}
            choice["delta" if self.stream else "message"] = message
        else:
            choice["text"] = text
        if self._has_token_ids and self.body.get("return_token_ids"):
            choice["token_ids"] = ids
            if is_first and not self.is_chat:
                choice["prompt_token_ids"] = self.prompt
        return choice

    def _logprobs(self, ids: list[int]) -> dict[str, Any] | None:
        requested = self.body.get("logprobs")
        if requested is None or requested is False:
            return None
        if self.is_chat:
            words = ((tokens.decode([id]), self._logprob) for id in ids)
            return {"content": [{"token": word, "logprob": value, "top_logprobs": []} for word, value in words]}
        return {"tokens": [tokens.decode([id]) for id in ids], "token_logprobs": [self._logprob] * len(ids)}

    def answer(self, choices: list[dict[str, Any]], usage: int | None, is_first: bool) -> dict[str, Any]:
        """The JSON of a chunk or of a whole answer. `usage`: output tokens so far, if they are to be reported."""
        answer = {**self.head, "choices": choices}
        if usage is not None:
            num = len(self.prompt)
            answer["usage"] = {"prompt_tokens": num, "completion_tokens": usage, "total_tokens": num + usage}
        if is_first and self.is_chat and self._has_token_ids and self.body.get("return_token_ids"):
            answer["prompt_token_ids"] = self.prompt
        return answer


class SurfaceConfig(msgspec.Struct, frozen=True):
    """How the engine answers."""

    name: str
    output_tokens: int = 128
    """Length of a chat answer, with its reasoning, if nothing else ends it."""
    reasoning_tokens: int = 0
    """Length of the reasoning at the start of a chat answer. The last token marks its end."""
    confidence: tuple[float, float] = (1.0, 1.0)
    """Bounds of the probability that is reported for each token of an answer."""
    address: tuple[str, int] = ("127.0.0.1", 0)
    """Host and port at which other engines reach this one."""
    reasoning_key: str = "reasoning"
    """JSON key of the reasoning in a chat."""
    has_token_ids: bool = True
    """Whether token ids are returned on request."""
    has_single_token_chunks: bool = False
    """Whether tokens that are generated together are streamed one by one."""
    priority_sign: int = 1
    """-1: a higher `priority` is more urgent."""

    def confidence_in(self, prompt: list[int]) -> float:
        """Token probability of an answer to this prompt. A continued answer has that of its beginning."""
        least, most = self.confidence
        return least + (most - least) * tokens.question_hash(prompt)


class VllmSurface:
    """What an engine's surface has besides OpenAI's API: this is vLLM's."""

    metrics = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")

    def completions(self, engine: Callable[[], EmulatedEngine], config: SurfaceConfig) -> CompletionsEndpoint:
        """Create the handler of both completions endpoints."""
        return CompletionsEndpoint(engine, config)

    def routes(self, engine: Callable[[], EmulatedEngine], config: SurfaceConfig) -> list[Route]:
        return []


class CompletionsEndpoint:
    """The handler of both completions endpoints."""

    def __init__(self, engine: Callable[[], EmulatedEngine], config: SurfaceConfig) -> None:
        self.engine, self.config = engine, config
        self.failures: list[int | str] = []
        """Failures to inject into the next requests: a status, or a name (see `sglang`)."""
        self._num_kept_blocks = 0

    async def start(self, engine: EmulatedEngine) -> None:
        """Start the endpoint's own servers, after the engine was created."""

    def stop(self) -> None:
        """Stop the endpoint's own servers."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        received_s = self.engine().now
        fault = self.failures.pop(0) if self.failures else ""
        if isinstance(fault, int):
            await self.error(fault, "this failure was asked for")(scope, receive, send)
            return
        try:
            completion = Completion(await _json(scope, receive), scope["path"] == CHAT, self.config)
            total, limit = len(completion.prompt) + completion.output_tokens, self.engine().max_tokens
            if total > limit:
                raise BadRequestError(f"{total} tokens are more than this engine takes, {limit}")
            completion.fault, completion.received_s = fault, received_s
            self.check(completion)
        except BadRequestError as error:
            await self.error(400, str(error))(scope, receive, send)
            return
        answering = asyncio.create_task(self.answer(completion, send))
        watcher = asyncio.create_task(_cancel_on_disconnect(receive, answering))
        with suppress(asyncio.CancelledError):
            await answering
        watcher.cancel()

    def error(self, status: int, message: str) -> Response:
        """An error response in the engine's form."""
        kind = "BadRequestError" if status < 500 else "InternalServerError"
        return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": status}}, status)

    def check(self, completion: Completion) -> None:
        """Raise BadRequestError if this engine does not support the request."""

    def tier(self, completion: Completion) -> int:
        """The request's tier; 0 is the most urgent."""
        return self.config.priority_sign * (completion.body.get("priority") or 0)

    async def answer(self, completion: Completion, send: Send) -> None:
        """Serve a request to its end, or until its client has gone."""
        engine, prompt_tokens, blocks = self.engine(), len(completion.prompt), None
        if completion.kv_source is not None:
            try:
                blocks = await engine.fetch(completion.kv_source, prompt_tokens, completion.received_s)
            except KvGoneError as error:
                await send_failure(completion, f"the KV cache could not be loaded: {error}", send)
                return
        generated = engine.begin(
            prompt_tokens, completion.output_tokens, self.tier(completion), completion.reasoning_left,
            completion.kv_name, blocks, received_s=completion.received_s,
        )  # fmt: skip
        try:
            await send_answer(completion, generated, send, self._kv_transfer_params(completion))
        finally:
            engine.abort(generated)

    def _kv_transfer_params(self, completion: Completion) -> dict[str, Any] | None:
        """Where the engine that decodes finds the prompt's KV; None if it is not kept."""
        if completion.kv_name is None:
            return None
        host, port = self.config.address
        first, block = self._num_kept_blocks, self.engine().pool.engine.block_size_tokens
        self._num_kept_blocks += -(-len(completion.prompt) // block)
        return {
            "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": f"{host}:{port}",
            "remote_block_ids": list(range(first, self._num_kept_blocks)), "remote_request_id": completion.kv_name,
            "remote_host": host, "remote_port": port, "tp_size": self.engine().pool.parallel.tp,
        }  # fmt: skip


async def _cancel_on_disconnect(receive: Receive, answering: asyncio.Task[None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    answering.cancel()


async def send_answer(
    completion: Completion, source: TokenSource, send: Send, kv_transfer_params: dict[str, Any] | None = None
) -> None:
    """Send an answer: chunk by chunk as tokens are generated, or as a whole."""
    if completion.stream:
        await _send_stream(completion, source, send)
        return
    num = 0
    while new := await source.read():
        num += new
    choice = completion.choice(completion.sequence.extend(num), completion.finish, True)
    body = msgspec.json.encode({**completion.answer([choice], num, True), "kv_transfer_params": kv_transfer_params})
    await send_json(200, body, send)


async def _send_stream(completion: Completion, source: TokenSource, send: Send) -> None:
    await _start_stream(send)
    num, is_first = 0, True
    while new := await source.read():
        for size in completion.chunk_sizes(new):
            num += size
            finish = completion.finish if num == completion.output_tokens else None
            choice = completion.choice(completion.sequence.extend(size), finish, is_first)
            await _send_event(send, completion.answer([choice], None, is_first))
            is_first = False
    if (completion.body.get("stream_options") or {}).get("include_usage"):
        await _send_event(send, completion.answer([], num, False))
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


async def send_failure(completion: Completion, message: str, send: Send) -> None:
    """Report that a request cannot go on. As vLLM has sent the head of a stream by then, an event does."""
    error = {"error": {"message": message, "type": "InternalServerError", "param": None, "code": 500}}
    if completion.stream:
        await _start_stream(send)
        await _send_event(send, error)
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})
    else:
        await send_json(500, msgspec.json.encode(error), send)


async def send_json(status: int, body: bytes, send: Send) -> None:
    """Send a whole JSON response."""
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _start_stream(send: Send) -> None:
    headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def _send_event(send: Send, value: dict[str, Any]) -> None:
    body = b"data: " + msgspec.json.encode(value) + b"\n\n"
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def _json(scope: Scope, receive: Receive) -> dict[str, Any]:
    try:
        body = msgspec.json.decode(await Request(scope, receive).body())
    except msgspec.MsgspecError as error:
        raise BadRequestError(f"no JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadRequestError("expected an object")
    return body


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


def application(
    make: Callable[[], EmulatedEngine], config: SurfaceConfig, surface: VllmSurface | None = None
) -> Starlette:
    """The ASGI application. `make` is called in its event loop."""
    engines: list[EmulatedEngine] = []
    surface = surface or VllmSurface()

    def engine() -> EmulatedEngine:
        return engines[0]

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        engines.append(make())
        await completions.start(engine())
        yield
        completions.stop()

    completions = surface.completions(engine, config)

    async def models(request: Request) -> Response:
        model = {
            "id": config.name, "object": "model", "created": 0, "owned_by": "headway",
            "max_model_len": engine().max_tokens,
        }  # fmt: skip
        return JSONResponse({"object": "list", "data": [model]})

    async def health(request: Request) -> Response:
        return Response()

    async def metrics(request: Request) -> Response:
        label = f'{{engine="0",model_name="{config.name}"}}'
        pairs = zip(surface.metrics, engine().load(), strict=True)
        return PlainTextResponse("".join(f"# TYPE {name} gauge\n{name}{label} {value}\n" for name, value in pairs))

    async def cache(request: Request) -> Response:
        name, kv = request.path_params["id"], engine().kv
        is_found = kv.drop(name) if request.method == "DELETE" else await kv.send(name)
        return Response(status_code=200 if is_found else 404)

    async def fail(request: Request) -> Response:
        completions.failures = await request.json()
        return JSONResponse(completions.failures)

    routes = [
        Route(CHAT, completions, methods=["POST"]),
        Route(COMPLETIONS, completions, methods=["POST"]),
        Route("/v1/models", models),
        Route("/health", health),
        Route("/metrics", metrics),
        Route("/emulator/failures", fail, methods=["PUT"]),
        Route(PATH + "/{id}", cache, methods=["GET", "DELETE"]),
        *surface.routes(engine, config),
    ]
    return Starlette(routes=routes, lifespan=lifespan)
