"""The picker's gRPC server: `envoy.service.ext_proc.v3.ExternalProcessor`, and the health service of gRPC."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio

from headway.core.errors import HeadwayError
from headway.gateway.gateway import Gateway
from headway.gateway.picker import ext_proc_pb2 as pb
from headway.gateway.picker import messages
from headway.gateway.picker.bodies import Bodies
from headway.gateway.picker.exchange import Exchange
from headway.gateway.server.web_server import Tls

log = logging.getLogger("headway.gateway")
SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
_HEALTH_PERIOD_S = 0.25
_MESSAGE_BYTES = 64 << 10
"""Bytes of a message besides its body."""
_SERVING, _NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


class _Call:
    """One call of `Process`. Implements `exchange.Rpc`."""

    __slots__ = ("_context", "write")

    def __init__(self, context: Any) -> None:
        self._context = context
        self.write = context.write

    async def read(self) -> pb.ProcessingRequest | None:
        message = await self._context.read()
        if message is aio.EOF:
            return None
        if (found := messages.decoded(message)) is None:
            raise messages.invalid_message("a message cannot be decoded")
        return found


class Picker:
    """The gRPC server in front of a gateway's scheduling. Created in the gateway's event loop."""

    def __init__(self, gateway: Gateway, tls: Tls | None = None) -> None:
        self._gateway = gateway
        gateway.driver.roster.place_pairs_at_once()
        self._bodies = Bodies(lambda: gateway.settings)
        self._server = aio.server(
            options=(
                ("grpc.max_receive_message_length", gateway.settings.max_body_bytes + _MESSAGE_BYTES),
                ("grpc.so_reuseport", 1),
                ("grpc.http2.min_ping_interval_without_data_ms", 250),  # Envoy's keepalive finds a picker that hangs
                ("grpc.keepalive_permit_without_calls", 1),
            )
        )
        process = grpc.stream_stream_rpc_method_handler(self._process)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Process": process}),))
        self._health = health_aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._tls = tls
        self._has_started = False
        """Whether a replica has been up."""

    async def _process(self, _: object, context: Any) -> None:
        await Exchange(self._gateway, self._bodies, _Call(context)).run()

    def listen(self, address: str) -> int:
        """Listen at `host:port`, and return the port. Raises HeadwayError if the address cannot be used."""
        try:
            if self._tls is None:
                return int(self._server.add_insecure_port(address))
            return int(self._server.add_secure_port(address, _credentials(self._tls)))
        except (RuntimeError, OSError) as error:
            raise HeadwayError(f"{address}: cannot listen: {error}") from None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Answer calls. At the end, running calls have `drain_s` left."""
        await self._server.start()
        await self._report_health()
        watching = asyncio.create_task(self._watch_health())
        try:
            yield
        finally:
            watching.cancel()
            await self.stop()
            self._bodies.close()

    async def stop(self) -> None:
        """Accept no more calls, and let running calls end. Envoy meanwhile connects to another picker."""
        self._gateway.refuse_requests()
        await self._report_health()
        await self._server.stop(self._gateway.settings.drain_s)

    async def _watch_health(self) -> None:
        while True:
            await asyncio.sleep(_HEALTH_PERIOD_S)
            await self._report_health()

    async def _report_health(self) -> None:
        """Report the health: alive while the picker answers, ready while a replica is up, and processing once a first
        replica was up. Requests that come while none is up are held."""
        gateway = self._gateway
        num_up = gateway.num_up
        self._has_started |= num_up > 0
        is_open = self._has_started and not gateway.admission.is_closing
        for service, is_serving in (
            (health.OVERALL_HEALTH, is_open),
            (SERVICE, is_open),
            ("liveness", True),
            ("readiness", is_open and num_up > 0),
        ):
            await self._health.set(service, _SERVING if is_serving else _NOT_SERVING)


def _credentials(tls: Tls) -> Any:
    certificate = tls.certfile.read_bytes()
    key = certificate if tls.keyfile is None else tls.keyfile.read_bytes()
    return grpc.ssl_server_credentials([(key, certificate)])
