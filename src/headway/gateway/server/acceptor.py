"""Accepts clients' connections while descriptors are left for engines. Further connections wait in the system's
queue."""

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
"""Number of connections that are accepted before other work of the event loop gets a turn."""
_PAUSE_S = 0.02
"""Time between two checks for room."""
_NOTE_PERIOD_S = 60.0


class Acceptor:
    """Accepts the connections of one socket. Implements the part of asyncio's server that uvicorn uses."""

    def __init__(
        self,
        listener: socket.socket,
        make: Callable[[], asyncio.Protocol],
        connections: set[Any],
        tls: ssl.SSLContext | None,
        max_clients: int,
    ) -> None:
        """`connections`: the open connections, each an `HttpProtocol`. Create the acceptor in the event loop."""
        self._listener, self._make, self._tls, self._max_clients = listener, make, tls, max_clients
        self._connections = connections
        self._opening: set[asyncio.Task[None]] = set()
        """Tasks of connections that have no protocol yet."""
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
        except (OSError, ConnectionError) as error:  # the client is gone, or does not speak TLS
            log.debug("a connection could not be opened: %s", error)
            accepted.close()

    @property
    def is_opening(self) -> bool:
        """Whether accepted connections are still opening, as during a TLS handshake."""
        return bool(self._opening)

    def _has_room(self) -> bool:
        return len(self._connections) + len(self._opening) < self._max_clients

    def _pause(self, why: str) -> None:
        """Accept no connections until others end."""
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
        """Whether a client waits to be accepted."""
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        return bool(poll.poll(0))

    def _make_room(self) -> None:
        for connection in list(self._connections):
            connection.make_room()

    def close(self) -> None:
        """Accept no more connections. Open connections stay."""
        if self._timer is not None:
            self._timer.cancel()
        else:
            self._loop.remove_reader(self._listener.fileno())

    async def wait_closed(self) -> None:
        """Return at once. uvicorn awaits this method, but connections do not belong to this object."""
