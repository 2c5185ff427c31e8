"""uvicorn's server with Headway's own connections. It ends without aborting open requests."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from functools import partial
from types import FrameType
from typing import Any, cast

import uvicorn

from headway.gateway import descriptors
from headway.gateway.server.acceptor import Acceptor

_FORCE_POLL_S = 0.1
_OPENING_S = 2.0
"""Longest time for which an ending server waits for TLS handshakes of accepted connections."""


class DrainingServer(uvicorn.Server):
    """At its end, the server awaits `drain` while it still accepts connections, then waits for open requests, in all at
    most `shutdown_s`.

    `relays`: each client may need a connection to an engine.
    """

    def __init__(
        self, config: uvicorn.Config, shutdown_s: float, drain: Callable[[], Awaitable[None]] | None, relays: bool
    ) -> None:
        super().__init__(config)
        self._shutdown_s, self._drain, self._relays = shutdown_s, drain, relays

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal by ending. uvicorn would raise SIGTERM again, which would kill the process."""
        if sig == signal.SIGTERM:
            self.should_exit = True
        else:
            super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections on these sockets."""
        await super().startup(sockets=[])
        protocol, state = self.config.http_protocol_class, self.server_state
        make = partial(cast(Any, protocol), config=self.config, server_state=state, app_state=self.lifespan.state)
        tls, most = self.config.ssl, descriptors.max_clients(2 if self._relays else 1)
        self.servers = cast(Any, [Acceptor(each, make, state.connections, tls, most) for each in sockets or ()])

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain, and close the remaining connections."""
        start_s = time.monotonic()
        draining = asyncio.ensure_future(self._drain()) if self._drain is not None else None
        while draining is not None and not draining.done() and not self.force_exit:
            await asyncio.wait({draining}, timeout=_FORCE_POLL_S)
        if draining is not None and not draining.cancel():
            await draining
        await self._accept_no_more(min(time.monotonic() + _OPENING_S, start_s + self._shutdown_s))
        left_s = self._shutdown_s - (time.monotonic() - start_s)
        self.config.timeout_graceful_shutdown = max(round(left_s), 1)
        await super().shutdown(sockets)

    async def _accept_no_more(self, end_s: float) -> None:
        """Stop accepting. TLS handshakes of accepted connections may go on until `end_s`."""
        accepting = cast(list[Acceptor], self.servers)
        for each in accepting:
            each.close()
        while any(each.is_opening for each in accepting) and not self.force_exit and time.monotonic() < end_s:
            await asyncio.sleep(_FORCE_POLL_S)
