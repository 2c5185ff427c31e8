"""The engines' endpoints as an ASGI application: reads a request and relays it."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from typing import Protocol

from starlette.types import Receive, Scope, Send

from headway.core.errors import HeadwayError
from headway.gateway.auth.keys import ApiKeys, Caller
from headway.gateway.auth.limits import limit_headers
from headway.gateway.clock import Clock
from headway.gateway.errors import ApiError, internal_error, policy_error
from headway.gateway.names import is_request_id
from headway.gateway.relay.json_body import LONG_BYTES
from headway.gateway.relay.relay import Relay
from headway.gateway.relay.request import ClientRequest
from headway.gateway.relay.request_reader import read_request
from headway.gateway.relay.writer import AsgiWriter, ClientWriter, HookedWriter, ResponseWriter, write_error
from headway.gateway.scheduling.in_flight import InFlightRequest
from headway.gateway.scheduling.stream_copy import NAMES, stream_key
from headway.gateway.server.access_log import CLIENT_LEFT, ENTRY, AccessEntry
from headway.gateway.server.bodies import BodyMemory, decompressed, read_body
from headway.gateway.server.http_cycle import TEXT_HEADERS
from headway.gateway.settings import Settings

log = logging.getLogger("headway.gateway")
_ID_BYTES, _IDS_PER_CALL = 16, 256
_DRAIN_POLL_S = 0.05
_CUT_OFF_S = 0.5
"""Time to send the last events of streams that are cut off."""


class RequestGateway(Protocol):
    """Accepts clients' requests for engines. The gateway and its workers implement it."""

    @property
    def settings(self) -> Settings: ...
    @property
    def keys(self) -> ApiKeys: ...
    @property
    def clock(self) -> Clock: ...

    async def begin(self, request: ClientRequest, caller: Caller, writer: ResponseWriter, request_id: str, /) -> Relay:
        """Accept a request. Raises ApiError if it is not accepted."""

    def end(self, request: InFlightRequest, /) -> None:
        """Account for a request whose relay has returned."""


class CompletionsApp:
    """Reads requests, and relays them."""

    gateway: RequestGateway
    """Set when the application starts."""

    def __init__(self) -> None:
        self._reader = ThreadPoolExecutor(max_workers=1)
        """Reads long bodies, one at a time, because each competes with the event loop for the interpreter."""
        self._relays: set[Relay] = set()
        self._request_ids = chain.from_iterable(iter(_random_ids, None))
        self._memory = BodyMemory()
        self.num_responses: defaultdict[tuple[str, int], int] = defaultdict(int)
        """Answers by path and HTTP status. The path is empty if no application has seen the request."""

    async def drain(self) -> None:
        """Wait for the current requests to end, and cut them off after `drain_s`. New requests are not stopped here."""
        self.cut_off_later()
        clock, drain_s = self.gateway.clock, self.gateway.settings.drain_s
        end_s = clock.now + drain_s + _CUT_OFF_S
        while self._relays and clock.now < end_s:
            await asyncio.sleep(_DRAIN_POLL_S)

    def cut_off_later(self) -> None:
        """Cut the requests off after `drain_s`."""
        asyncio.get_running_loop().call_later(self.gateway.settings.drain_s, self._cut_off)

    def _cut_off(self) -> None:
        for relay in list(self._relays):
            relay.cut_off()

    async def __call__(self, scope: Scope, receive: Receive, send: Send, writer: ClientWriter | None = None) -> None:
        """The ASGI call, with `writer` in addition: for a server that can write to the connection directly."""
        writer = writer or AsgiWriter(receive, send)
        name: bytes  # typed, so that they are decoded by compiled code
        value: bytes
        headers: dict[str, str] | None = scope.get(TEXT_HEADERS)
        if headers is None:
            headers = {}
            for name, value in scope["headers"]:
                headers[name.decode("latin-1")] = value.decode("latin-1")
        request_id = headers.get("x-request-id", "")
        if not request_id or not is_request_id(request_id):
            request_id = next(self._request_ids)
        try:
            error, writer = await self._respond(scope, headers, request_id, receive, writer)
            if error is None:
                return
            if isinstance(error, ApiError):  # written here, because compiled code must not await in a handler
                await write_error(writer, error, request_id.encode())
            else:
                if not writer.has_begun:
                    await write_error(writer, internal_error(), request_id.encode())
                raise error
        finally:
            self.num_responses[scope["path"], writer.status or CLIENT_LEFT] += 1

    def count_refused(self, status: int) -> None:
        """Count the answer of a connection to a request that this application does not see."""
        self.num_responses["", status] += 1

    async def _respond(
        self, scope: Scope, headers: dict[str, str], request_id: str, receive: Receive, writer: ClientWriter
    ) -> tuple[Exception | None, ClientWriter]:
        """Write the response. Returns an error to write in its place, and the writer for it."""
        try:
            keys = self.gateway.keys
            caller = keys.anonymous or keys.authenticate(headers)
            if caller.is_limited:
                writer = HookedWriter(writer, lambda status, sent: [*sent, *limit_headers(caller.limits())])
            await self._relay(scope, headers, caller, request_id, receive, writer)
        except HeadwayError as error:
            log.error("%s", error)
            return policy_error(), writer
        except Exception as error:
            return error, writer
        return None, writer

    async def _relay(
        self,
        scope: Scope,
        headers: dict[str, str],
        caller: Caller,
        request_id: str,
        receive: Receive,
        writer: ClientWriter,
    ) -> None:
        gateway, path = self.gateway, scope["path"]
        body = await read_body(writer, receive, headers, gateway.settings, self._memory, caller.owner)
        if body is None:
            return
        num_bytes, received_s = len(body), gateway.clock.now
        try:
            if num_bytes <= LONG_BYTES and "content-encoding" not in headers:
                request = read_request(path, body, headers)
            else:
                request = await self._read_beside(path, body, headers, gateway.settings)
                self._memory.resize(num_bytes, len(request.raw), gateway.settings.max_bodies_bytes, caller.owner)
                num_bytes = len(request.raw)  # length after decompression
            request.received_s = received_s
            if request.stream and request.can_resume and not NAMES.isdisjoint(headers):
                request.stream_key = stream_key(caller.owner, headers, path, body)
            if caller.tier > request.tier:
                request.tier = caller.tier
            entry: AccessEntry | None = scope.get(ENTRY)
            if entry is not None:
                entry.model, entry.request_id = request.model, request_id
            relay = await gateway.begin(request, caller, writer, request_id)
            if entry is not None:
                entry.relay = relay
            writer.watch(relay.client_disconnected)
            self._relays.add(relay)
            try:
                await relay.run()
            finally:
                self._relays.discard(relay)
                writer.close()
                gateway.end(relay.in_flight)
        finally:
            self._memory.free(num_bytes, caller.owner)

    async def _read_beside(self, path: str, body: bytes, headers: dict[str, str], settings: Settings) -> ClientRequest:
        """Read a request in a thread, because its body is long or compressed. Raises ApiError if it is invalid."""
        encoding = headers.get("content-encoding", "identity").lower()
        read = partial(_read_encoded, path, body, headers, encoding, settings.max_body_bytes)
        return await asyncio.get_running_loop().run_in_executor(self._reader, read)


def _random_ids() -> list[str]:
    """Random ids of 128 bits. Random bytes for many ids are fetched from the system at once."""
    digits = os.urandom(_ID_BYTES * _IDS_PER_CALL).hex()
    return [digits[start : start + 2 * _ID_BYTES] for start in range(0, len(digits), 2 * _ID_BYTES)]


def _read_encoded(path: str, body: bytes, headers: dict[str, str], encoding: str, max_bytes: int) -> ClientRequest:
    """Read a request whose body may be compressed."""
    return read_request(path, body if encoding == "identity" else decompressed(body, encoding, max_bytes), headers)
