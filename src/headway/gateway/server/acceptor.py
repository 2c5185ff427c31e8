"""Accepts clients' connections while descriptors are left for engines; further ones wait in the system's queue."""

from __future__ import annotations

import asyncio
import logging
import select
import socket
import ssl
from collections.abc import Callable
from time import monotonic
from typing import Any

from headway.gateway import descriptors

log = logging.getLogger("headway.gateway")
_MAX_PER_TURN = 64
"""Connections that are accepted before others get a turn."""
_PAUSE_S = 0.02
"""Time between two looks for room."""
_NOTE_PERIOD_S = 60.0


class Acceptor:
    """Accepts the connections of one socket. Satisfies what uvicorn's server expects of asyncio's."""

    def __init__(
        self,
        listener: socket.socket,
        make: Callable[[], asyncio.Protocol],
        connections: set[Any],
        tls: ssl.SSLContext | None,
        max_clients: int,
    ) -> None:
        """`connections`: the open ones, each an `HttpProtocol`. To be made in the event loop."""
        self._listener, self._make, self._tls, self._max_clients = listener, make, tls, max_clients
        self._connections = connections
        self._opening: set[asyncio.Task[None]] = set()
        """Of connections that are no protocol's yet."""
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._noted_s = float("-inf")
        listener.setblocking(False)
        self._loop.add_reader(listener.fileno(), self._accept)

    def _accept(self) -> None:
        for _ in range(_MAX_PER_TURN):
            if not self._has_room():
                self._pause(f"{self._max_clients:,} clients are connected")
                return
            try:
                accepted = self._listener.accept()[0]
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if not descriptors.is_used_up(error):
                    raise
                self._pause(f"{error.strerror}")
                return
            accepted.setblocking(False)
            task = self._loop.create_task(self._open(accepted))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _open(self, accepted: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._make, accepted, ssl=self._tls)
        except (OSError, ConnectionError) as error:  # the client is gone, or speaks no TLS
            log.debug("a connection could not be opened: %s", error)
            accepted.close()

    @property
    def is_opening(self) -> bool:
        """Accepted connections are not yet open, as in a TLS handshake."""
        return bool(self._opening)

    def _has_room(self) -> bool:
        return len(self._connections) + len(self._opening) < self._max_clients

    def _pause(self, why: str) -> None:
        """Let further connections wait for the end of others."""
        now = monotonic()
        if now - self._noted_s >= _NOTE_PERIOD_S:
            self._noted_s = now
            log.warning("%s, and others wait to be accepted: ulimit -n is %s", why, f"{descriptors.limit():,}")
        self._loop.remove_reader(self._listener.fileno())
        self._make_room()
        self._timer = self._loop.call_later(_PAUSE_S, self._resume)

    def _resume(self) -> None:
        if self._has_room():
            self._timer = None
            self._loop.add_reader(self._listener.fileno(), self._accept)
            return
        if self._is_waited_for():
            self._make_room()
        self._timer = self._loop.call_later(_PAUSE_S, self._resume)

    def _is_waited_for(self) -> bool:
        """A client waits to be accepted."""
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        return bool(poll.poll(0))

    def _make_room(self) -> None:
        for connection in list(self._connections):
            connection.make_room()

    def close(self) -> None:
        """Accept no more connections; those that are open stay."""
        if self._timer is not None:
            self._timer.cancel()
        else:
            self._loop.remove_reader(self._listener.fileno())

    async def wait_closed(self) -> None:
        """Return at once, which is what uvicorn awaits of its servers: connections are not this object's."""
