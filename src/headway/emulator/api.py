"""The engine's HTTP surface: vLLM's, as far as gateways and clients use it."""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, Protocol

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from headway.emulator import tokens
from headway.emulator.caches import PATH, GoneError, Remote
from headway.emulator.engine import Engine
from headway.emulator.tokens import THINK_END, Writer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class Taken(Protocol):
    """Tokens, as they are made."""

    async def take(self) -> int:
        """How many have come since the last call; 0: that was all."""


class BadRequestError(Exception):
    """What the client asked for makes no sense."""


class Answer:
    """One answer: what was asked, and how it is told."""

    def __init__(self, body: dict[str, Any], is_chat: bool, config: Config) -> None:
        self.body, self.is_chat = body, is_chat
        self.stream = bool(body.get("stream"))
        params = body.get("kv_transfer_params") or {}
        try:
            self.remote = msgspec.convert(params, Remote) if params.get("do_remote_prefill") else None
        except (msgspec.ValidationError, AttributeError) as error:
            raise BadRequestError(f"kv_transfer_params: {error}") from None
        self.prompt = _prompt(body, is_chat, config.reasoning_tokens)
        self._logprob = math.log(config.confidence_in(self.prompt))
        self._reasoning_key, self._tells_ids = config.reasoning_key, config.tells_ids
        self._is_split = config.has_chunks_of_one
        writer = self.writer = Writer(self.prompt, config.output_tokens, config.reasoning_tokens)
        most = body.get("max_completion_tokens") or body.get("max_tokens") or (1 << 30 if is_chat else 16)
        if not isinstance(most, int) or most < 1 or (body.get("n") or 1) != 1:
            raise BadRequestError("max_tokens must be 1 or more, and n 1")
        over = None if body.get("ignore_eos") else writer.left
        self.output_tokens = config.output_tokens if most == 1 << 30 and over is None else min(most, over or most)
        self.finish = "stop" if over is not None and over <= most else "length"
        self.reasoning_left = min(writer.reasoning_left, self.output_tokens)
        kind = "chatcmpl" if is_chat else "cmpl"
        name = "chat.completion" if is_chat else "text_completion"
        shape = ".chunk" if is_chat and self.stream else ""
        self.head = {
            "id": f"{kind}-{uuid.uuid4().hex}", "object": name + shape, "created": int(time.time()),
            "model": config.name,
        }  # fmt: skip
        self.keeps = str(self.head["id"]) if params.get("do_remote_decode") else None
        """For whom the prompt is computed."""
        self.fault = ""
        """What is to go wrong with it."""
        self.since_s = math.inf
        """When its head came."""

    def parts(self, num: int) -> list[int]:
        """So many new tokens as chunks, of which reasoning and answer have their own."""
        if self._is_split:
            return [1] * num
        return [part for part in (min(num, self.reasoning_left), max(num - self.reasoning_left, 0)) if part]

    def choice(self, ids: list[int], finish: str | None, is_first: bool) -> dict[str, Any]:
        """Tokens as a choice: of a chunk, or of a whole answer."""
        num = min(self.reasoning_left, len(ids)) if self.is_chat else 0
        self.reasoning_left -= num
        thought, said = tokens.decode(id for id in ids[:num] if id != THINK_END), tokens.decode(ids[num:])
        made: dict[str, Any] = {"index": 0, "finish_reason": finish, "logprobs": self._logprobs(ids)}
        if self.is_chat:
            message = {name: text for name, text in ((self._reasoning_key, thought), ("content", said)) if text}
            if is_first:
                message = {"role": "assistant", "content": "", **message}
            made["delta" if self.stream else "message"] = message
        else:
            made["text"] = said
        if self._tells_ids and self.body.get("return_token_ids"):
            made["token_ids"] = ids
            if is_first and not self.is_chat:
                made["prompt_token_ids"] = self.prompt
        return made

    def _logprobs(self, ids: list[int]) -> dict[str, Any] | None:
        """What it tells of how sure it is, if it is asked."""
        asked = self.body.get("logprobs")
        if asked is None or asked is False:
            return None
        if self.is_chat:
            words = ((tokens.decode([id]), self._logprob) for id in ids)
            return {"content": [{"token": word, "logprob": value, "top_logprobs": []} for word, value in words]}
        return {"tokens": [tokens.decode([id]) for id in ids], "token_logprobs": [self._logprob] * len(ids)}

    def told(self, choices: list[dict[str, Any]], usage: int | None, is_first: bool) -> dict[str, Any]:
        """A chunk, or a whole answer. `usage`: tokens written so far."""
        made = {**self.head, "choices": choices}
        if usage is not None:
            read = len(self.prompt)
            made["usage"] = {"prompt_tokens": read, "completion_tokens": usage, "total_tokens": read + usage}
        if is_first and self.is_chat and self._tells_ids and self.body.get("return_token_ids"):
            made["prompt_token_ids"] = self.prompt
        return made


class Config(msgspec.Struct, frozen=True):
    """How the engine answers."""

    name: str
    output_tokens: int = 128
    """Of an answer in a chat, reasoning included, if nothing else ends it."""
    reasoning_tokens: int = 0
    """With which an answer in a chat begins; the last of them is the mark of its end."""
    confidence: tuple[float, float] = (1.0, 1.0)
    """Between which the probability lies that each token of an answer is said to have had."""
    address: tuple[str, int] = ("127.0.0.1", 0)
    """Where other engines reach it."""
    reasoning_key: str = "reasoning"
    """What it calls reasoning in a chat."""
    tells_ids: bool = True
    """It tells tokens' ids, where it is asked to."""
    has_chunks_of_one: bool = False
    """Tokens that come at once are streamed one by one."""
    urgent_sign: int = 1
    """-1: a higher `priority` goes first."""

    def confidence_in(self, prompt: list[int]) -> float:
        """Of an answer to this prompt, wherever it was begun."""
        least, most = self.confidence
        return least + (most - least) * tokens.luck(prompt)


class Surface:
    """What engines have of their own, besides OpenAI's API: this is vLLM."""

    metrics = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")

    def completions(self, engine: Callable[[], Engine], config: Config) -> Completions:
        """Who answers."""
        return Completions(engine, config)

    def routes(self, engine: Callable[[], Engine], config: Config) -> list[Route]:
        """More of them."""
        return []

    async def start(self, engine: Engine, completions: Completions) -> None:
        """The engine is there."""

    def stop(self, completions: Completions) -> None:
        """It is to end."""


class Completions:
    """Both completions endpoints."""

    def __init__(self, engine: Callable[[], Engine], config: Config) -> None:
        self.engine, self.config = engine, config
        self.failures: list[int | str] = []
        """What the next requests get: a status, or what else may go wrong."""
        self.num_kept_blocks = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        since_s = self.engine().now
        fault = self.failures.pop(0) if self.failures else ""
        if isinstance(fault, int):
            await self.error(fault, "this failure was asked for")(scope, receive, send)
            return
        try:
            answer = Answer(await _json(scope, receive), scope["path"] == CHAT, self.config)
            total, most = len(answer.prompt) + answer.output_tokens, self.engine().max_tokens
            if total > most:
                raise BadRequestError(f"{total} tokens are more than this engine takes, {most}")
            answer.fault, answer.since_s = fault, since_s
            self.check(answer)
        except BadRequestError as error:
            await self.error(400, str(error))(scope, receive, send)
            return
        answering = asyncio.create_task(self.answer(answer, send))
        watcher = asyncio.create_task(_watch(receive, answering))
        with suppress(asyncio.CancelledError):
            await answering
        watcher.cancel()

    def error(self, status: int, message: str) -> Response:
        """As the engine puts it."""
        kind = "BadRequestError" if status < 500 else "InternalServerError"
        return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": status}}, status)

    def check(self, answer: Answer) -> None:
        """BadRequestError where this engine does not do that."""

    def tier(self, answer: Answer) -> int:
        """0 is the most urgent one."""
        return self.config.urgent_sign * (answer.body.get("priority") or 0)

    async def answer(self, answer: Answer, send: Send) -> None:
        """To its end, or until its client is gone."""
        engine, prompt_tokens, blocks = self.engine(), len(answer.prompt), None
        if answer.remote is not None:
            try:
                blocks = await engine.fetch(answer.remote, prompt_tokens, answer.since_s)
            except GoneError as error:
                await failed(answer, f"the KV cache could not be loaded: {error}", send)
                return
        stream = engine.begin(
            prompt_tokens, answer.output_tokens, self.tier(answer), answer.reasoning_left, answer.keeps, blocks,
            since_s=answer.since_s,
        )  # fmt: skip
        try:
            await (streamed if answer.stream else partial(whole, self._kept(answer)))(answer, stream, send)
        finally:
            engine.abort(stream)

    def _kept(self, answer: Answer) -> dict[str, Any] | None:
        """What the engine that decodes has to be told."""
        if answer.keeps is None:
            return None
        host, port = self.config.address
        first, block = self.num_kept_blocks, self.engine().pool.engine.block_size_tokens
        self.num_kept_blocks += -(-len(answer.prompt) // block)
        return {
            "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": f"{host}:{port}",
            "remote_block_ids": list(range(first, self.num_kept_blocks)), "remote_request_id": answer.keeps,
            "remote_host": host, "remote_port": port, "tp_size": self.engine().pool.parallel.tp,
        }  # fmt: skip


async def _watch(receive: Receive, answering: asyncio.Task[None]) -> None:
    """A client that is gone wants no answer."""
    while (await receive())["type"] != "http.disconnect":
        pass
    answering.cancel()


async def failed(answer: Answer, message: str, send: Send) -> None:
    """A request that cannot go on; of a stream, vLLM has sent the head by then."""
    error = {"error": {"message": message, "type": "InternalServerError", "param": None, "code": 500}}
    if answer.stream:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await _event(send, error)
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})
        return
    body = msgspec.json.encode(error)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 500, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def streamed(answer: Answer, stream: Taken, send: Send) -> None:
    """Chunk by chunk, as tokens come."""
    headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    done, is_first = 0, True
    while new := await stream.take():
        for part in answer.parts(new):
            done += part
            finish = answer.finish if done == answer.output_tokens else None
            choice = answer.choice(answer.writer.write(part), finish, is_first)
            await _event(send, answer.told([choice], None, is_first))
            is_first = False
    if (answer.body.get("stream_options") or {}).get("include_usage"):
        await _event(send, answer.told([], done, False))
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


async def _event(send: Send, value: dict[str, Any]) -> None:
    body = b"data: " + msgspec.json.encode(value) + b"\n\n"
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def whole(kept: dict[str, Any] | None, answer: Answer, stream: Taken, send: Send) -> None:
    """All at once, when all tokens are there."""
    done = 0
    while new := await stream.take():
        done += new
    choice = answer.choice(answer.writer.write(done), answer.finish, True)
    body = msgspec.json.encode({**answer.told([choice], done, True), "kv_transfer_params": kept})
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


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


def application(make: Callable[[], Engine], config: Config, surface: Surface | None = None) -> Starlette:
    """The application; `make` is called in its event loop."""
    made: list[Engine] = []
    surface = surface or Surface()

    def engine() -> Engine:
        return made[0]

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        made.append(make())
        await surface.start(engine(), completions)
        yield
        surface.stop(completions)

    completions = surface.completions(engine, config)

    async def models(request: Request) -> Response:
        about = {"id": config.name, "object": "model", "created": 0, "owned_by": "headway", "max_model_len": 0}
        return JSONResponse({"object": "list", "data": [{**about, "max_model_len": engine().max_tokens}]})

    async def health(request: Request) -> Response:
        return Response()

    async def metrics(request: Request) -> Response:
        label = f'{{engine="0",model_name="{config.name}"}}'
        pairs = zip(surface.metrics, engine().load(), strict=True)
        return PlainTextResponse("".join(f"# TYPE {name} gauge\n{name}{label} {value}\n" for name, value in pairs))

    async def cache(request: Request) -> Response:
        id, caches = request.path_params["id"], engine().caches
        found = caches.drop(id) if request.method == "DELETE" else await caches.send(id)
        return Response(status_code=200 if found else 404)

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
