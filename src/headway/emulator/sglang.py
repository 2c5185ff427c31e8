"""SGLang's HTTP surface, and its protocol to prefill on one engine and decode on another."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Send

from headway.emulator.bootstrap import FAKE_BOOTSTRAP_HOST, BootstrapRoom, BootstrapServer, wait_for
from headway.emulator.completion import BadRequestError, Completion, SurfaceConfig
from headway.emulator.engine import EmulatedEngine
from headway.emulator.kv_exchange import KvGoneError
from headway.emulator.vllm import CompletionsEndpoint, VllmSurface, send_answer, send_failure, send_json
from headway.sim.speculation import DraftCounts

_NO_ROOM = "Disaggregated request received without bootstrap room id."
_HANG, _BREAK_TRANSFER = "hang", "transfer"
"""Injected failures other than statuses: no answer at all, or a broken KV transfer."""

BOOTSTRAP_PORT = 8998
"""The default bootstrap port."""


class SinglePhase(Struct, frozen=True):
    """The phase that an engine was started for."""

    mode: Literal["prefill", "decode"]
    bootstrap: socket.socket | None
    """Socket at which a prefill engine receives requests for KV caches."""
    timeout_s: float
    """Longest wait for the engine of the other phase."""

    @property
    def bootstrap_port(self) -> int:
        """The port that the engine reports."""
        return BOOTSTRAP_PORT if self.bootstrap is None else int(self.bootstrap.getsockname()[1])


def as_sglang(config: SurfaceConfig) -> SurfaceConfig:
    """The answers converted to SGLang's fields and chunks."""
    return replace(
        config, reasoning_key="reasoning_content", has_token_ids=False, has_single_token_chunks=True, priority_sign=-1
    )


class SglangSurface(VllmSurface):
    """SGLang's surface of an engine for both phases or for a single one."""

    metrics = ("sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:token_usage")

    def __init__(self, phase: SinglePhase | None) -> None:
        self._phase = phase
        self._mode = "null" if phase is None else phase.mode
        self._port = BOOTSTRAP_PORT if phase is None else phase.bootstrap_port

    def draft_metrics(self, counts: DraftCounts, labels: str) -> Iterator[str]:
        """The lines of the draft metrics. SGLang's gauges cover the engine's last seconds; the emulator's gauges cover
        all drafts so far."""
        length = 1.0 + counts.num_accepted / max(counts.num_drafts, 1)
        rate = counts.num_accepted / max(counts.num_draft_tokens, 1)
        for name, value in (("sglang:spec_accept_length", length), ("sglang:spec_accept_rate", rate)):
            yield f"# TYPE {name} gauge\n{name}{{{labels}}} {value}\n"

    def cache_metrics(self, engine: EmulatedEngine, labels: str) -> Iterator[str]:
        rate = engine.num_cached_tokens / max(engine.num_prompt_tokens, 1)
        yield f"# TYPE sglang:cache_hit_rate gauge\nsglang:cache_hit_rate{{{labels}}} {rate}\n"

    def completions(self, engine: Callable[[], EmulatedEngine], config: SurfaceConfig) -> CompletionsEndpoint:
        if self._phase is None:
            return _SglangEndpoint(engine, config)
        return _SinglePhaseEndpoint(engine, config, self._phase)

    def routes(self, engine: Callable[[], EmulatedEngine], config: SurfaceConfig) -> list[Route]:
        async def info(request: Request) -> Response:
            bootstrap = {"disaggregation_mode": self._mode, "disaggregation_bootstrap_port": self._port}
            pool, (_, blocks, _) = engine().pool, engine().blocks()
            settings = pool.engine
            limits = {
                "tp_size": pool.parallel.tp,
                "pp_size": pool.parallel.pp,
                "dp_size": pool.parallel.dp,
                "page_size": settings.block_size_tokens,
                "max_total_num_tokens": blocks * settings.block_size_tokens,
                "max_running_requests": settings.max_num_seqs,
                "chunked_prefill_size": settings.max_num_batched_tokens,
                "disable_radix_cache": not settings.prefix_caching,
                "version": settings.version,
                "mem_fraction_static": settings.gpu_memory_utilization,
            }
            return JSONResponse({"model_path": config.name, **limits, **bootstrap})

        async def generate(request: Request) -> Response:
            generated = engine().begin(1, 1, 0, 0)
            while await generated.read():
                pass
            return Response()

        return [Route("/get_server_info", info), Route("/health_generate", generate)]

    def lora_lines(self, engine: EmulatedEngine) -> list[str]:
        return []  # SGLang has no such metric


class _SglangEndpoint(CompletionsEndpoint):
    """The completions endpoints of an engine for both phases."""

    def error(self, status: int, message: str) -> Response:
        kind = "BadRequestError" if status < 500 else "InternalServerError"
        return JSONResponse(
            {"object": "error", "message": message, "type": kind, "param": None, "code": status}, status
        )


class _SingleToken:
    """The single token of a prefill engine. Implements `vllm.TokenSource`."""

    def __init__(self) -> None:
        self._left = 1

    async def read(self) -> int:
        self._left, new = 0, self._left
        return new


class _SinglePhaseEndpoint(_SglangEndpoint):
    """The completions endpoints of an engine for a single phase."""

    def __init__(self, engine: Callable[[], EmulatedEngine], config: SurfaceConfig, phase: SinglePhase) -> None:
        super().__init__(engine, config)
        self._phase = phase
        self._bootstrap: BootstrapServer | None = None
        self._server: asyncio.Server | None = None

    async def start(self, engine: EmulatedEngine) -> None:
        if self._phase.bootstrap is not None:
            self._bootstrap = BootstrapServer(engine.kv, self._phase.timeout_s)
            self._server = await self._bootstrap.listen(self._phase.bootstrap)

    def stop(self) -> None:
        if self._server is not None:
            self._server.close()

    def check(self, completion: Completion) -> None:
        host, room, port = (completion.body.get(f"bootstrap_{name}") for name in ("host", "room", "port"))
        if room is None:
            raise BadRequestError(_NO_ROOM)
        if len(completion.choices) > 1:
            raise BadRequestError("n: expected 1 with disaggregation")
        if not isinstance(host, str) or type(room) is not int or type(port) is not int:
            raise BadRequestError("bootstrap_host, bootstrap_port, bootstrap_room: expected a host and two numbers")

    async def answer(self, completion: Completion, send: Send) -> None:
        if completion.fault == _HANG:
            await asyncio.Event().wait()
        try:
            await (self._prefill if self._phase.mode == "prefill" else self._decode)(completion, send)
        except KvGoneError as error:
            if completion.stream:  # a stream's head is always sent before this point
                await send_failure(completion, str(error), send)
            else:
                await send_json(500, bytes(self.error(500, str(error)).body), send)

    async def _prefill(self, completion: Completion, send: Send) -> None:
        """Compute the prompt for the engine that enters the room, send it the KV, and answer with one token."""
        number, bootstrap, engine = str(completion.body["bootstrap_room"]), self._bootstrap, self.engine()
        assert bootstrap is not None
        room, timeout_s, has_failed = bootstrap.enter(number), self._phase.timeout_s, False
        generated = None
        try:
            await wait_for(room.requested, timeout_s, "KVPoll.Bootstrapping")
            generated = engine.begin(len(completion.prompt), 1, self.tier(completion), 0, number)
            while await generated.read():
                pass
            if completion.fault == _BREAK_TRANSFER:
                has_failed = True
                raise KvGoneError(f"KVTransferError(bootstrap_room={number}): this failure was asked for")
            room.prefilled.set_result(True)
            await wait_for(room.fetched, timeout_s, "KVPoll.Transferring")
        finally:
            if generated is not None:
                engine.abort(generated)
            bootstrap.leave(number, has_failed)
        completion.choices[0].truncate(1)
        await send_answer(completion, [_SingleToken()], send)

    async def _decode(self, completion: Completion, send: Send) -> None:
        """Let the other engine compute the prompt, fetch the prompt's KV from that engine, and decode."""
        body, engine = completion.body, self.engine()
        blocks = None
        if body["bootstrap_host"] != FAKE_BOOTSTRAP_HOST:
            host, port, number = (body[f"bootstrap_{name}"] for name in ("host", "port", "room"))
            source = BootstrapRoom(host.strip("[]"), port, str(number), self._phase.timeout_s)
            blocks = await engine.fetch(source, len(completion.prompt), completion.received_s)
            if completion.fault == _BREAK_TRANSFER and blocks is not None:
                engine.kv.release(blocks, engine.now)
                raise KvGoneError("KVTransferError: this failure was asked for")
        choice = completion.choices[0]
        generated = engine.begin(
            len(completion.prompt),
            choice.output_tokens,
            self.tier(completion),
            choice.reasoning_left,
            None,
            blocks,
            blocks is not None,
        )
        try:
            await send_answer(completion, [generated], send)
        finally:
            engine.abort(generated)
