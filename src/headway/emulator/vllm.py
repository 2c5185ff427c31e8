"""The HTTP surface of an emulated engine: OpenAI's completions endpoints and vLLM's own routes.

`sglang` defines SGLang's differences.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Protocol

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from headway.emulator.adapters import UnknownModelError, adapter_routes, lora_metric, lora_of
from headway.emulator.completion import CHAT, COMPLETIONS, BadRequestError, Completion, CompletionChoice, SurfaceConfig
from headway.emulator.engine import EmulatedEngine
from headway.emulator.kv_exchange import PATH, KvGoneError
from headway.emulator.media import media_routes
from headway.emulator.other_endpoints import other_routes
from headway.sim.speculation import DraftCounts


class TokenSource(Protocol):
    """Yields the number of an answer's tokens as they are generated."""

    async def read(self) -> int:
        """Wait for tokens. Returns the number of new tokens; 0 means that the answer is complete."""


class VllmSurface:
    """An engine's routes and metrics beyond OpenAI's API. This class has vLLM's."""

    metrics = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")

    def draft_metrics(self, counts: DraftCounts, labels: str) -> Iterator[str]:
        """Lines of the speculative decoding metrics; `labels` without braces."""
        totals = {
            "num_drafts": counts.num_drafts,
            "num_draft_tokens": counts.num_draft_tokens,
            "num_accepted_tokens": counts.num_accepted,
        }
        for name, total in totals.items():
            yield f"# TYPE vllm:spec_decode_{name}_total counter\n"
            yield f"vllm:spec_decode_{name}_total{{{labels}}} {total}\n"
        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        yield f"# TYPE {name} counter\n"
        for position, num in enumerate(counts.accepted_by_position):
            yield f'{name}{{{labels},position="{position}"}} {num}\n'

    def cache_metrics(self, engine: EmulatedEngine, labels: str) -> Iterator[str]:
        """Lines of the prefix cache metrics; `labels` without braces."""
        totals = {"prefix_cache_queries": engine.num_prompt_tokens, "prefix_cache_hits": engine.num_cached_tokens}
        for name, total in totals.items():
            yield f"# TYPE vllm:{name}_total counter\nvllm:{name}_total{{{labels}}} {total}\n"
        settings = engine.pool.engine
        config = {
            "block_size": settings.block_size_tokens,
            "enable_prefix_caching": settings.prefix_caching,
            "gpu_memory_utilization": settings.gpu_memory_utilization,
            "num_gpu_blocks": engine.blocks()[1],
        }
        told = ",".join(f'{name}="{value}"' for name, value in config.items())
        yield f'# TYPE vllm:cache_config_info gauge\nvllm:cache_config_info{{engine="0",{told}}} 1.0\n'

    def completions(self, engine: Callable[[], EmulatedEngine], config: SurfaceConfig) -> CompletionsEndpoint:
        """Create the handler of both completions endpoints."""
        return CompletionsEndpoint(engine, config)

    def routes(self, engine: Callable[[], EmulatedEngine], config: SurfaceConfig) -> list[Route]:
        async def version(request: Request) -> Response:
            return JSONResponse({"version": engine().pool.engine.version})

        return [*adapter_routes(engine), Route("/version", version)]

    def lora_lines(self, engine: EmulatedEngine) -> list[str]:
        """The lines of the metric of LoRA adapters."""
        return lora_metric(engine)


class CompletionsEndpoint:
    """The handler of both completions endpoints."""

    def __init__(self, engine: Callable[[], EmulatedEngine], config: SurfaceConfig) -> None:
        self.engine, self.config = engine, config
        self.failures: list[int | str] = []
        """Failures to inject into the next requests: a status, or a name (see `sglang`)."""
        self._num_kept_blocks = 0

    async def start(self, engine: EmulatedEngine) -> None:
        """Start the endpoint's own servers. The engine exists already."""

    def stop(self) -> None:
        """Stop the endpoint's own servers."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        received_s = self.engine().now
        fault = self.failures.pop(0) if self.failures else ""
        if isinstance(fault, int):
            await self.error(fault, "this failure was asked for")(scope, receive, send)
            return
        try:
            body = await _json(scope, receive)
            completion = Completion(body, scope["path"] == CHAT, self.config, lora_of(self.engine(), self.config, body))
            total, limit = len(completion.prompt) + completion.max_output_tokens, self.engine().max_tokens
            if total > limit:
                raise BadRequestError(f"{total} tokens are more than this engine takes, {limit}")
            completion.fault, completion.received_s = fault, received_s
            self.check(completion)
        except UnknownModelError as error:
            await self.error(404, str(error))(scope, receive, send)
            return
        except BadRequestError as error:
            await self.error(400, str(error))(scope, receive, send)
            return
        answering = asyncio.create_task(self.answer(completion, send))
        watcher = asyncio.create_task(_cancel_on_disconnect(receive, answering))
        with suppress(asyncio.CancelledError):
            await answering
        watcher.cancel()

    def error(self, status: int, message: str) -> Response:
        """An error response in the engine's format."""
        kind = "BadRequestError" if status < 500 else "InternalServerError"
        return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": status}}, status)

    def check(self, completion: Completion) -> None:
        """Raise BadRequestError if this engine does not support the request."""

    def tier(self, completion: Completion) -> int:
        """The request's tier; 0 is the most urgent."""
        return self.config.priority_sign * (completion.body.get("priority") or 0)

    async def answer(self, completion: Completion, send: Send) -> None:
        """Serve a request to its end, or until its client leaves."""
        engine, prompt_tokens, blocks = self.engine(), len(completion.prompt), None
        if completion.kv_source is not None:
            try:
                blocks = await engine.fetch(completion.kv_source, prompt_tokens, completion.received_s)
            except KvGoneError as error:
                await send_failure(completion, f"the KV cache could not be loaded: {error}", send)
                return
        first, *others = completion.choices
        is_handed_over = completion.kv_name is not None or blocks is not None
        prefix = () if is_handed_over else engine.blocks_of(completion.prompt, completion.lora)
        generated = [
            engine.begin(
                prompt_tokens,
                first.output_tokens,
                self.tier(completion),
                first.reasoning_left,
                completion.kv_name,
                blocks,
                received_s=completion.received_s,
                lora=completion.lora,
                prefix=prefix,
            )
        ]
        generated += [
            engine.begin(
                prompt_tokens,
                choice.output_tokens,
                self.tier(completion),
                choice.reasoning_left,
                received_s=completion.received_s,
                lora=completion.lora,
                prefix=prefix,
            )
            for choice in others
        ]
        if self.config.reports_cached_tokens:
            told = generated[0 if completion.stream else -1]
            completion.cached_tokens = lambda: told.live.cached_tokens
        try:
            await send_answer(completion, generated, send, self._kv_transfer_params(completion))
        finally:
            for answer in generated:
                engine.abort(answer)

    def _kv_transfer_params(self, completion: Completion) -> dict[str, Any] | None:
        """The place where the decode engine finds the prompt's KV; None if the KV is not kept."""
        if completion.kv_name is None:
            return None
        host, port = self.config.address
        first, block = self._num_kept_blocks, self.engine().pool.engine.block_size_tokens
        self._num_kept_blocks += -(-len(completion.prompt) // block)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": f"{host}:{port}",
            "remote_block_ids": list(range(first, self._num_kept_blocks)),
            "remote_request_id": completion.kv_name,
            "remote_host": host,
            "remote_port": port,
            "tp_size": self.engine().pool.parallel.tp,
        }


async def _cancel_on_disconnect(receive: Receive, answering: asyncio.Task[None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    answering.cancel()


async def send_answer(
    completion: Completion,
    sources: Sequence[TokenSource],
    send: Send,
    kv_transfer_params: dict[str, Any] | None = None,
) -> None:
    """Send an answer with a source for each choice: chunk by chunk as tokens are generated, or as a whole."""
    pairs = list(zip(completion.choices, sources, strict=True))
    if completion.stream:
        await _send_stream(completion, pairs, send)
        return
    nums = await asyncio.gather(*(_read_all(source) for source in sources))
    choices = [choice.extend(num) for (choice, _), num in zip(pairs, nums, strict=True)]
    body = msgspec.json.encode(
        {**completion.answer(choices, sum(nums), True), "kv_transfer_params": kv_transfer_params}
    )
    await send_json(200, body, send)


async def _read_all(source: TokenSource) -> int:
    num = 0
    while new := await source.read():
        num += new
    return num


async def _send_stream(completion: Completion, pairs: list[tuple[CompletionChoice, TokenSource]], send: Send) -> None:
    await _start_stream(send)
    if len(pairs) == 1:
        num = await _send_choice(completion, *pairs[0], send)
    else:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_send_choice(completion, *pair, send)) for pair in pairs]
        num = sum(task.result() for task in tasks)
    if (completion.body.get("stream_options") or {}).get("include_usage"):
        await _send_event(send, completion.answer([], num, False))
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


async def _send_choice(completion: Completion, choice: CompletionChoice, source: TokenSource, send: Send) -> int:
    """Stream one choice. Returns the number of its tokens."""
    num = 0
    while new := await source.read():
        for size in choice.chunk_sizes(new):
            await _send_event(send, completion.answer([choice.extend(size)], None, num == 0))
            num += size
    return num


async def send_failure(completion: Completion, message: str, send: Send) -> None:
    """Report that a request cannot go on. In a stream, vLLM reports it by an event, because the head was sent."""
    error = {"error": {"message": message, "type": "InternalServerError", "param": None, "code": 500}}
    if completion.stream:
        await _start_stream(send)
        await _send_event(send, error)
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})
    else:
        await send_json(500, msgspec.json.encode(error), send)


async def send_json(status: int, body: bytes, send: Send) -> None:
    """Send a complete JSON response."""
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


def _models(engine: EmulatedEngine, name: str) -> list[dict[str, Any]]:
    """The model and its adapters, as /v1/models lists them."""
    model = {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "headway",
        "max_model_len": engine.max_tokens,
    }
    own = {"root": name, "parent": None} if engine.adapters else {}
    adapters = [{**model, "id": each, "root": each, "parent": name, "max_model_len": None} for each in engine.adapters]
    return [{**model, **own}, *adapters]


def _metric_lines(engine: EmulatedEngine, config: SurfaceConfig, surface: VllmSurface) -> list[str]:
    """The page /metrics, in Prometheus' text format."""
    labels = f'engine="0",model_name="{config.name}"'
    pairs = zip(surface.metrics, engine.load(), strict=True)
    lines = [f"# TYPE {name} gauge\n{name}{{{labels}}} {value}\n" for name, value in pairs]
    if (drafts := engine.drafts) is not None:
        lines += surface.draft_metrics(drafts, labels)
    lines += surface.cache_metrics(engine, labels)
    if config.ordering:
        lines.append(f'headway:ordering_info{{engine="0",ordering="{config.ordering}"}} 1\n')
        counts = zip(("used", "total", "demanded"), engine.blocks(), strict=True)
        lines += [f'headway:kv_blocks_{name}{{engine="0"}} {count}\n' for name, count in counts]
    return [*lines, *surface.lora_lines(engine)]


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
        engine().close()

    completions = surface.completions(engine, config)

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": _models(engine(), config.name)})

    async def health(request: Request) -> Response:
        return Response()

    async def metrics(request: Request) -> Response:
        return PlainTextResponse("".join(_metric_lines(engine(), config, surface)))

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
        *other_routes(engine, config),
        *media_routes(engine, config),
        *surface.routes(engine, config),
    ]
    return Starlette(routes=routes, lifespan=lifespan)
