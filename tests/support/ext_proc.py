"""Envoy's side of the endpoint picker protocol, by hand: messages, a call without a network, a proxy made of both."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from headway import serving as composition
from headway.control.decisions import Decision
from headway.gateway.gateway import Gateway
from headway.gateway.picker import ext_proc_pb2 as pb
from headway.gateway.picker.bodies import Bodies
from headway.gateway.picker.exchange import Exchange
from headway.gateway.scheduling.replica import LiveReplica
from headway.gateway.telemetry.recording import Recording
from virtual_time import Front

MODEL = "qwen3-8b"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
DUPLEX, BUFFERED, STREAMED, NONE = pb.FULL_DUPLEX_STREAMED, pb.BUFFERED, pb.STREAMED, pb.NONE


def _map(headers: Mapping[str, str]) -> pb.HeaderMap:
    return pb.HeaderMap(headers=[pb.HeaderValue(key=name, raw_value=value.encode()) for name, value in headers.items()])


def headers_message(headers: Mapping[str, str], end_of_stream: bool = False) -> pb.HttpHeaders:
    """Headers as Envoy sends them."""
    return pb.HttpHeaders(headers=_map(headers), end_of_stream=end_of_stream)


def set_headers(mutation: pb.HeaderMutation) -> dict[str, str]:
    """The headers that the picker sets."""
    return {each.header.key: each.header.raw_value.decode() for each in mutation.set_headers}


class Call:
    """A call of `Process` without a network: what Envoy says goes in, what it gets comes out."""

    def __init__(self, request_mode: int = DUPLEX, answer_mode: int = DUPLEX) -> None:
        self._requests: asyncio.Queue[pb.ProcessingRequest | None] = asyncio.Queue()
        self._responses: asyncio.Queue[pb.ProcessingResponse] = asyncio.Queue()
        self.request_mode, self.answer_mode = request_mode, answer_mode

    async def read(self) -> pb.ProcessingRequest | None:
        return await self._requests.get()

    async def write(self, data: bytes) -> None:
        self._responses.put_nowait(pb.ProcessingResponse.FromString(data))

    async def response(self) -> pb.ProcessingResponse:
        async with asyncio.timeout(20):
            return await self._responses.get()

    @property
    def num_responses(self) -> int:
        return self._responses.qsize()

    def send(self, metadata: Mapping[str, Mapping[str, Any]] | None = None, **fields: Any) -> None:
        message = pb.ProcessingRequest(**fields)
        for namespace, values in (metadata or {}).items():
            message.metadata_context.filter_metadata[namespace].update(values)
        self._requests.put_nowait(message)

    def request(
        self,
        body: Any = CHAT,
        headers: Mapping[str, str] | None = None,
        path: str = "/v1/chat/completions",
        subset: Sequence[str] | None = None,
        method: str = "POST",
    ) -> None:
        """Say the headers, and the body at once where Envoy would."""
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        hint = (
            None
            if subset is None
            else {"envoy.lb.subset_hint": {"x-gateway-destination-endpoint-subset": list(subset)}}
        )
        self.send(
            hint,
            request_headers=headers_message(
                {":method": method, ":path": path, "x-request-id": "id", **(headers or {})}, method == "GET"
            ),
            protocol_config=pb.ProtocolConfiguration(
                request_body_mode=self.request_mode, response_body_mode=self.answer_mode
            ),
        )
        if method == "POST":
            self.send(request_body=pb.HttpBody(body=data, end_of_stream=True))

    def answer(self, status: int = 200, served: str = "", **headers: str) -> None:
        """Say the headers of the engine's answer."""
        sent = {":status": str(status), **{name.replace("_", "-"): value for name, value in headers.items()}}
        metadata = {"envoy.lb": {"x-gateway-destination-endpoint-served": served}} if served else None
        self.send(metadata, response_headers=headers_message(sent))

    def part(self, body: bytes, is_last: bool = False) -> None:
        """Say a part of the engine's answer."""
        self.send(response_body=pb.HttpBody(body=body, end_of_stream=is_last))

    def end(self) -> None:
        self._requests.put_nowait(None)


class Picked:
    """Where a request is to go, with which headers and body; or the error that its client gets."""

    def __init__(self) -> None:
        self.status, self.error = 0, b""
        self.headers: dict[str, str] = {}
        self.removed: list[str] = []
        self.metadata: dict[str, Any] = {}
        self.body: bytes | None = None

    @property
    def endpoints(self) -> list[str]:
        return self.headers["x-gateway-destination-endpoint"].split(",")

    def json(self) -> Any:
        return msgspec.json.decode(self.body or self.error)

    def take(self, mutation: pb.HeaderMutation, message: pb.ProcessingResponse) -> None:
        self.headers |= set_headers(mutation)
        self.removed += mutation.remove_headers
        if "envoy.lb" in message.dynamic_metadata:
            self.metadata = dict(message.dynamic_metadata["envoy.lb"])


async def picked(call: Call) -> Picked:
    """What Envoy gets for a request, until it can be sent."""
    found, parts = Picked(), []
    while True:
        message = await call.response()
        match message.WhichOneof("response"):
            case "immediate_response":
                immediate = message.immediate_response
                found.status, found.error = immediate.status.code, immediate.body
                found.headers = set_headers(immediate.headers)
                return found
            case "request_headers":
                found.take(message.request_headers.response.header_mutation, message)
            case "request_body":
                response = message.request_body.response
                found.take(response.header_mutation, message)
                part = response.body_mutation.streamed_response
                if call.request_mode == BUFFERED:
                    has_new_body = response.body_mutation.WhichOneof("mutation") == "body"
                    found.body = response.body_mutation.body if has_new_body else None
                    return found
                parts.append(part.body)
                if part.end_of_stream:
                    found.body = b"".join(parts)
                    return found


class Desk:
    """A gateway whose replicas are message to be up and never sent anything, and calls to its picker."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.bodies = Bodies(lambda: gateway.settings)
        gateway.driver.roster.place_pairs_at_once()
        self._running: set[asyncio.Task[None]] = set()

    def call(self, request_mode: int = DUPLEX, answer_mode: int = DUPLEX) -> Call:
        call = Call(request_mode, answer_mode)
        running = asyncio.create_task(Exchange(self.gateway, self.bodies, call).run())
        self._running.add(running)
        return call

    async def over(self) -> None:
        """Wait for the calls that have been ended."""
        await asyncio.gather(*self._running)
        self._running.clear()

    def set_up(self, replica: LiveReplica, is_up: bool = True) -> None:
        self.gateway.health.breakers[replica.id].is_open = not is_up
        (self.gateway.driver.roster.replica_up if is_up else self.gateway.driver.roster.replica_down)(replica)

    async def close(self) -> None:
        for running in self._running:
            running.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        self.bodies.close()


@asynccontextmanager
async def desk(path: Path, log: list[Decision] | None = None, is_up: bool = True) -> AsyncIterator[Desk]:
    """The picker of a fleet file, in this event loop, without a server."""
    plan = composition.load(path)[1]
    made = Desk(Gateway(plan, Recording(True), None if log is None else log.append))
    for replica in made.gateway.replicas if is_up else ():
        made.set_up(replica)
    try:
        yield made
    finally:
        await made.close()


class Proxy(Front):
    """A proxy that asks the picker and sends each request where it says."""

    @asynccontextmanager
    async def beside(self, gateway: Gateway) -> AsyncIterator[None]:
        self._gateway, self._bodies = gateway, Bodies(lambda: gateway.settings)
        yield
        self._bodies.close()

    async def send(self, path: str, body: bytes, headers: Mapping[str, str]) -> bytes:
        call = Call()
        running = asyncio.create_task(Exchange(self._gateway, self._bodies, call).run())
        call.request(body, headers, path)
        found = await picked(call)
        assert not found.status, found.error
        replica = next(each for each in self._gateway.replicas if each.url.endswith(found.endpoints[0]))
        connection = await replica.client.request("POST", path, "Content-Type: application/json\r\n", found.body or b"")
        call.answer(connection.status, **connection.headers)

        def fed(parts: list[bytes]) -> bool:
            call.part(b"".join(parts))
            return True

        while await connection.stream_to(fed):
            pass
        call.part(b"", is_last=True)
        parts: list[bytes] = []
        while True:
            message = await call.response()
            if message.WhichOneof("response") == "response_body":
                part = message.response_body.response.body_mutation.streamed_response
                parts.append(part.body)
                if part.end_of_stream:
                    break
        call.end()
        await running
        replica.client.release(connection)
        return b"".join(parts)
