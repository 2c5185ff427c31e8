"""The engine's HTTP surface: vLLM's, as far as gateways and clients use it."""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from headway.emulator import tokens
from headway.emulator.caches import PATH, GoneError, Remote
from headway.emulator.engine import Engine, Stream
from headway.emulator.tokens import THINK_END, Writer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


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

    def choice(self, ids: list[int], finish: str | None, is_first: bool) -> dict[str, Any]:
        """Tokens as a choice: of a chunk, or of a whole answer."""
        num = min(self.reasoning_left, len(ids)) if self.is_chat else 0
        self.reasoning_left -= num
        thought, said = tokens.decode(id for id in ids[:num] if id != THINK_END), tokens.decode(ids[num:])
        made: dict[str, Any] = {"index": 0, "finish_reason": finish, "logprobs": self._logprobs(ids)}
        if self.is_chat:
            message = {name: text for name, text in (("reasoning", thought), ("content", said)) if text}
            if is_first:
                message = {"role": "assistant", "content": "", **message}
            made["delta" if self.stream else "message"] = message
        else:
            made["text"] = said
        if self.body.get("return_token_ids"):
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
        if is_first and self.is_chat and self.body.get("return_token_ids"):
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

    def confidence_in(self, prompt: list[int]) -> float:
        """Of an answer to this prompt, wherever it was begun."""
        least, most = self.confidence
        return least + (most - least) * tokens.luck(prompt)


class Completions:
    """Both completions endpoints."""

    def __init__(self, engine: Callable[[], Engine], config: Config) -> None:
        self._engine, self._config = engine, config
        self.failures: list[int] = []
        """Statuses that the next requests are answered with."""
        self.num_kept_blocks = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        since_s = self._engine().now
        if self.failures:
            error = _error(self.failures.pop(0), "this failure was asked for")
            await error(scope, receive, send)
            return
        try:
            answer = Answer(await _json(scope, receive), scope["path"] == CHAT, self._config)
            total, most = len(answer.prompt) + answer.output_tokens, self._engine().max_tokens
            if total > most:
                raise BadRequestError(f"{total} tokens are more than this engine takes, {most}")
        except BadRequestError as error:
            await _error(400, str(error))(scope, receive, send)
            return
        answering = asyncio.create_task(self._answer(answer, since_s, send))
        watcher = asyncio.create_task(_watch(receive, answering))
        with suppress(asyncio.CancelledError):
            await answering
        watcher.cancel()

    async def _answer(self, answer: Answer, since_s: float, send: Send) -> None:
        engine, prompt_tokens, blocks = self._engine(), len(answer.prompt), None
        if answer.remote is not None:
            try:
                blocks = await engine.fetch(answer.remote, prompt_tokens, since_s)
            except GoneError as error:
                await _failed(answer, f"the KV cache could not be loaded: {error}", send)
                return
        tier = answer.body.get("priority") or 0
        stream = engine.begin(
            prompt_tokens, answer.output_tokens, tier, answer.reasoning_left, answer.keeps, blocks, since_s
        )
        try:
            await (_streamed if answer.stream else partial(_whole, self._kept(answer)))(answer, stream, send)
        finally:
            engine.abort(stream)

    def _kept(self, answer: Answer) -> dict[str, Any] | None:
        """What the engine that decodes has to be told."""
        if answer.keeps is None:
            return None
        host, port = self._config.address
        first, block = self.num_kept_blocks, self._engine().pool.engine.block_size_tokens
        self.num_kept_blocks += -(-len(answer.prompt) // block)
        return {
            "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": f"{host}:{port}",
            "remote_block_ids": list(range(first, self.num_kept_blocks)), "remote_request_id": answer.keeps,
            "remote_host": host, "remote_port": port, "tp_size": self._engine().pool.parallel.tp,
        }  # fmt: skip


async def _watch(receive: Receive, answering: asyncio.Task[None]) -> None:
    """A client that is gone wants no answer."""
    while (await receive())["type"] != "http.disconnect":
        pass
    answering.cancel()


async def _failed(answer: Answer, message: str, send: Send) -> None:
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


async def _streamed(answer: Answer, stream: Stream, send: Send) -> None:
    headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    done, is_first = 0, True
    while new := await stream.take():
        # Reasoning and answer come in chunks of their own.
        for part in [part for part in (min(new, answer.reasoning_left), max(new - answer.reasoning_left, 0)) if part]:
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


async def _whole(kept: dict[str, Any] | None, answer: Answer, stream: Stream, send: Send) -> None:
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


def _error(status: int, message: str) -> Response:
    kind = "BadRequestError" if status < 500 else "InternalServerError"
    return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": status}}, status)


def application(make: Callable[[], Engine], config: Config) -> Starlette:
    """The application; `make` is called in its event loop."""
    made: list[Engine] = []

    def engine() -> Engine:
        return made[0]

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        made.append(make())
        yield

    completions = Completions(engine, config)

    async def models(request: Request) -> Response:
        about = {"id": config.name, "object": "model", "created": 0, "owned_by": "headway", "max_model_len": 0}
        return JSONResponse({"object": "list", "data": [{**about, "max_model_len": engine().max_tokens}]})

    async def health(request: Request) -> Response:
        return Response()

    async def metrics(request: Request) -> Response:
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        label = f'{{engine="0",model_name="{config.name}"}}'
        pairs = zip(names, engine().load(), strict=True)
        return PlainTextResponse("".join(f"# TYPE vllm:{n} gauge\nvllm:{n}{label} {v}\n" for n, v in pairs))

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
    ]
    return Starlette(routes=routes, lifespan=lifespan)
