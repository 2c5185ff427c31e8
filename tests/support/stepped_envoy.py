"""A real Envoy between clients and engines whose time is a loop's own: time stands still while Envoy has something on
its way. So what comes of a day behind it does not depend on how fast the machine is."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping, MutableMapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httptools
from grpc import aio

import envoys
from envoys import Envoy
from headway.gateway.gateway import Gateway
from headway.gateway.picker import ext_proc_pb2 as pb
from headway.gateway.picker.server import Picker
from virtual_time import Front


class Passage:
    """One request's way through Envoy: what each side has sent, and what the other one has received of it."""

    def __init__(self) -> None:
        self.is_asked = self.is_told = self.is_refused = self.has_reached = self.is_over = False
        """The picker has the request's body; has said where it goes, or that it goes nowhere; its engine has it; the
        picker's call is over."""
        self.answer_at = {"engine": 0, "picker in": 0, "picker out": 0, "client": 0}
        """Steps of the answer so far, at each place: its head, the bytes of its body, its end."""

    def is_in_transit(self) -> bool:
        if not self.is_asked:
            return True
        if self.is_refused:
            return self.answer_at["client"] < 2
        at = self.answer_at
        return (
            (self.is_told and not self.has_reached)
            or at["engine"] != at["picker in"]
            or at["picker out"] != at["client"]
            or (self.has_ended and not self.is_over)
        )

    has_ended = False
    """The client has the whole answer."""

    def __repr__(self) -> str:
        return str(vars(self))


class _Client(asyncio.Protocol):
    """One request to Envoy, on a connection of its own."""

    def __init__(self, passage: Passage, request: bytes) -> None:
        self._passage, self._request = passage, request
        self._parser = httptools.HttpResponseParser(self)
        self._parts: list[bytes] = []
        self.answer = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.answer.done():
            self.answer.set_exception(exc or ConnectionError("Envoy has closed the connection"))

    def on_headers_complete(self) -> None:
        self._passage.answer_at["client"] += 1

    def on_body(self, data: bytes) -> None:
        self._parts.append(data)
        self._passage.answer_at["client"] += len(data)

    def on_message_complete(self) -> None:
        self._passage.answer_at["client"] += 1
        self._passage.has_ended = True
        self.answer.set_result(b"".join(self._parts))
        self._transport.close()


class _Context:
    """The context of a call of `Process`, whose messages are counted."""

    def __init__(self, context: Any, passages: Mapping[str, Passage]) -> None:
        self._context, self._passages = context, passages
        self.passage = Passage()

    async def read(self) -> Any:
        message = await self._context.read()
        if message is not aio.EOF:
            self._count_said(pb.ProcessingRequest.FromString(message))
        return message

    def _count_said(self, message: pb.ProcessingRequest) -> None:
        at = self.passage.answer_at
        match message.WhichOneof("request"):
            case "request_headers":
                headers = {each.key: each.raw_value.decode() for each in message.request_headers.headers.headers}
                self.passage = self._passages[headers["x-request-id"]]
            case "request_body":
                self.passage.is_asked |= message.request_body.end_of_stream
            case "response_headers":
                at["picker in"] += 1
            case "response_body":
                at["picker in"] += len(message.response_body.body) + message.response_body.end_of_stream

    async def write(self, data: bytes) -> None:
        told, at = pb.ProcessingResponse.FromString(data), self.passage.answer_at
        match told.WhichOneof("response"):
            case "immediate_response":
                self.passage.is_refused = True
            case "request_headers":
                self.passage.is_told = True
            case "response_headers":
                at["picker out"] += 1
            case "response_body":
                part = told.response_body.response.body_mutation.streamed_response
                at["picker out"] += len(part.body) + part.end_of_stream
        await self._context.write(data)


class _Picker(Picker):
    """A picker whose calls are counted."""

    def __init__(self, gateway: Gateway, passages: Mapping[str, Passage]) -> None:
        super().__init__(gateway)
        self._passages = passages

    async def _process(self, request: object, context: Any) -> None:
        counted = _Context(context, self._passages)
        try:
            await super()._process(request, counted)
        finally:
            counted.passage.is_over = True


class SteppedEnvoy(Front):
    """An Envoy, configured as docs/envoy.md says, for engines that are to listen at `ports` of this machine."""

    def __init__(self, num_engines: int, folder: Path) -> None:
        self._sockets = {}
        for _ in range(num_engines):
            listener = socket.create_server(("127.0.0.1", 0))
            self._sockets[int(listener.getsockname()[1])] = listener
        self.ports = list(self._sockets)
        self._picker_port = envoys.free_port()
        self.passages: dict[str, Passage] = {}
        self._is_starting = False
        spare = [self.ports[i % num_engines] for i in range(4)]  # the page's configuration has four engines
        self._envoy = Envoy(envoys.unwatched(envoys.configuration()), self._picker_port, spare, folder)
        envoys.listening(self._envoy)

    def close(self) -> None:
        self._envoy.close()
        for listener in self._sockets.values():
            listener.close()

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self.ports]

    def __repr__(self) -> str:
        return str({id: passage for id, passage in self.passages.items() if passage.is_in_transit()})

    def is_in_transit(self) -> bool:
        return self._is_starting or any(passage.is_in_transit() for passage in self.passages.values())

    def listener(self, port: int) -> socket.socket | None:
        return self._sockets[port]

    def watched(self, app: Any) -> Any:
        async def counted(scope: Any, receive: Any, send: Any) -> None:
            passage = self.passages[dict(scope["headers"])[b"x-request-id"].decode()]

            async def received() -> Any:
                message = await receive()
                passage.has_reached |= message["type"] == "http.request" and not message.get("more_body")
                return message

            async def sent(message: MutableMapping[str, Any]) -> None:
                if message["type"] == "http.response.start":
                    passage.answer_at["engine"] += 1
                elif message["type"] == "http.response.body":
                    passage.answer_at["engine"] += len(message.get("body", b"")) + (not message.get("more_body"))
                await send(message)

            await app(scope, received, sent)

        return counted

    @asynccontextmanager
    async def beside(self, gateway: Gateway) -> AsyncIterator[None]:
        picker = _Picker(gateway, self.passages)
        picker.listen(f"127.0.0.1:{self._picker_port}")
        self._is_starting = True
        async with picker.running():
            self._is_starting = False
            yield

    async def send(self, path: str, body: bytes, headers: Mapping[str, str]) -> bytes:
        lines = [f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json", "connection: close"]
        lines += [f"content-length: {len(body)}", *(f"{name}: {value}" for name, value in headers.items())]
        passage = self.passages[headers["x-request-id"]] = Passage()
        loop: Any = asyncio.get_running_loop()
        request = "\r\n".join([*lines, "", ""]).encode() + body
        _, client = await loop.tcp_connection(lambda: _Client(passage, request), "127.0.0.1", self._envoy.port)
        answer: bytes = await client.answer
        return answer
