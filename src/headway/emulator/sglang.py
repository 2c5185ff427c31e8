"""SGLang's HTTP surface, and its way to prefill on one engine and decode on another."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from functools import partial
from typing import Literal

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Send

from headway.emulator.api import Answer, BadRequestError, Completions, Config, Surface, failed, streamed, whole
from headway.emulator.caches import GoneError
from headway.emulator.engine import Engine
from headway.emulator.rooms import NOBODY, Room, Rooms, within

_NO_ROOM = "Disaggregated request received without bootstrap room id."
_HANGS, _BREAKS = "hang", "transfer"
"""What may go wrong with a half, besides statuses: it says nothing any more; the transfer breaks."""


BOOTSTRAP_PORT = 8998
"""Unless another one is said."""


class Half(Struct, frozen=True):
    """What an engine is started for."""

    mode: Literal["prefill", "decode"]
    bootstrap: socket.socket | None
    """Where a prefill engine is asked for KV caches."""
    timeout_s: float
    """So long it waits for its other half."""

    @property
    def bootstrap_port(self) -> int:
        """As it says itself."""
        return BOOTSTRAP_PORT if self.bootstrap is None else int(self.bootstrap.getsockname()[1])


class _One:
    """A prefill engine's token."""

    def __init__(self) -> None:
        self._left = 1

    async def take(self) -> int:
        self._left, new = 0, self._left
        return new


class Sglang(Surface):
    """Of an engine that does both phases, or of one half."""

    metrics = ("sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:token_usage")

    def __init__(self, half: Half | None) -> None:
        self._half = half
        self._mode = "null" if half is None else half.mode
        self._port = BOOTSTRAP_PORT if half is None else half.bootstrap_port

    def completions(self, engine: Callable[[], Engine], config: Config) -> Completions:
        return _Whole(engine, config) if self._half is None else _Halves(engine, config, self._half)

    async def start(self, engine: Engine, completions: Completions) -> None:
        if isinstance(completions, _Halves):
            await completions.open(engine)

    def stop(self, completions: Completions) -> None:
        if isinstance(completions, _Halves):
            completions.close()

    def routes(self, engine: Callable[[], Engine], config: Config) -> list[Route]:
        async def info(request: Request) -> Response:
            told = {"disaggregation_mode": self._mode, "disaggregation_bootstrap_port": self._port}
            return JSONResponse({"model_path": config.name, **told})

        async def generate(request: Request) -> Response:
            stream = engine().begin(1, 1, 0, 0)
            while await stream.take():
                pass
            return Response()

        return [Route("/get_server_info", info), Route("/health_generate", generate)]


class _Whole(Completions):
    """Both phases."""

    def error(self, status: int, message: str) -> Response:
        kind = "BadRequestError" if status < 500 else "InternalServerError"
        told = {"object": "error", "message": message, "type": kind, "param": None, "code": status}
        return JSONResponse(told, status)


class _Halves(_Whole):
    """One of them."""

    def __init__(self, engine: Callable[[], Engine], config: Config, half: Half) -> None:
        super().__init__(engine, config)
        self._half = half
        self._rooms: Rooms | None = None
        self._server: asyncio.Server | None = None

    async def open(self, engine: Engine) -> None:
        """A prefill engine's bootstrap server."""
        if self._half.bootstrap is not None:
            self._rooms = Rooms(engine.caches, self._half.timeout_s)
            self._server = await self._rooms.listen(self._half.bootstrap)

    def close(self) -> None:
        """Nobody is listened to any more."""
        if self._server is not None:
            self._server.close()

    def check(self, answer: Answer) -> None:
        body = answer.body
        host, room, port = (body.get(f"bootstrap_{name}") for name in ("host", "room", "port"))
        if room is None:
            raise BadRequestError(_NO_ROOM)
        if not isinstance(host, str) or type(room) is not int or type(port) is not int:
            raise BadRequestError("bootstrap_host, bootstrap_port, bootstrap_room: expected a host and two numbers")

    async def answer(self, answer: Answer, send: Send) -> None:
        if answer.fault == _HANGS:
            await asyncio.Event().wait()
        try:
            await (self._prefill if self._half.mode == "prefill" else self._decode)(answer, send)
        except GoneError as error:
            await self._failed(answer, str(error), send)

    async def _failed(self, answer: Answer, message: str, send: Send) -> None:
        """As of SGLang's, a stream's head has been sent by then."""
        if answer.stream:
            await failed(answer, message, send)
            return
        response = self.error(500, message)
        headers = response.raw_headers
        await send({"type": "http.response.start", "status": 500, "headers": headers})
        await send({"type": "http.response.body", "body": response.body})

    async def _prefill(self, answer: Answer, send: Send) -> None:
        """Compute the prompt for who asks in the room, and give it the cache. One token is left to say."""
        room, rooms, engine = str(answer.body["bootstrap_room"]), self._rooms, self.engine()
        assert rooms is not None
        meeting, timeout_s, has_failed = rooms.meeting(room), self._half.timeout_s, False
        stream = None
        try:
            await within(meeting.asked, timeout_s, "KVPoll.Bootstrapping")
            stream = engine.begin(len(answer.prompt), 1, self.tier(answer), 0, room)
            while await stream.take():
                pass
            if answer.fault == _BREAKS:
                has_failed = True
                raise GoneError(f"KVTransferError(bootstrap_room={room}): this failure was asked for")
            meeting.computed.set_result(True)
            await within(meeting.fetched, timeout_s, "KVPoll.Transferring")
        finally:
            if stream is not None:
                engine.abort(stream)
            rooms.leave(room, has_failed)
        answer.output_tokens, answer.finish = 1, "length"
        await (streamed if answer.stream else partial(whole, None))(answer, _One(), send)

    async def _decode(self, answer: Answer, send: Send) -> None:
        """Have the other engine compute the prompt, fetch its cache, and go on from there."""
        body, engine = answer.body, self.engine()
        blocks = None
        if body["bootstrap_host"] != NOBODY:
            host, port, room = (body[f"bootstrap_{name}"] for name in ("host", "port", "room"))
            source = Room(host.strip("[]"), port, str(room), self._half.timeout_s)
            blocks = await engine.fetch(source, len(answer.prompt), answer.since_s)
            if answer.fault == _BREAKS and blocks is not None:
                engine.caches.give_up(blocks, engine.now)
                raise GoneError("KVTransferError: this failure was asked for")
        stream = engine.begin(
            len(answer.prompt), answer.output_tokens, self.tier(answer), answer.reasoning_left, None, blocks,
            blocks is not None,
        )  # fmt: skip
        try:
            await (streamed if answer.stream else partial(whole, None))(answer, stream, send)
        finally:
            engine.abort(stream)
