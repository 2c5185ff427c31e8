"""A separate port for liveness and readiness probes, served by its own thread. A probe is answered even if the gateway
is busy and many connections wait."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from threading import Event, Thread
from time import monotonic
from typing import Any

import msgspec

from headway.core.errors import HeadwayError

_PERIOD_S = 0.25
_TIMEOUT_S = 5.0
"""Time limit of a probe with its answer."""
_MAX_CONNECTIONS = 64
"""Maximum number of connections. When one more client connects, the oldest connection is closed, because a probe takes
only a few milliseconds."""
_MAX_HEAD_BYTES = 8 << 10
_HEAD = b"HTTP/1.1 %d %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
LIVE, READY = ("/livez", "/live"), ("/readyz", "/ready", "/health")
Status = tuple[bool, dict[str, Any]]
"""(whether requests are served, the body of /health)."""


class ProbeServer:
    """Answers probes at `port` on all addresses. Created in the gateway's event loop: the gateway is alive while this
    loop runs."""

    def __init__(self, port: int, status: Callable[[], Status], hang_s: float) -> None:
        """`status()` is called in the event loop. Raises HeadwayError if the port is taken."""
        self._read_status, self._hang_s = status, hang_s
        self._status, self._turn_s = status(), monotonic()
        self._open: deque[asyncio.StreamWriter] = deque()
        try:
            listener = socket.create_server(("", port))
        except OSError as error:
            raise HeadwayError(f"probe_port {port}: {error.strerror or error}") from None
        self.port = listener.getsockname()[1]
        self._has_begun = Event()
        self._thread = Thread(target=lambda: asyncio.run(self._serve(listener)), name="probes", daemon=True)
        self._thread.start()
        self._has_begun.wait()
        self._timer = asyncio.get_running_loop().call_later(_PERIOD_S, self._turn)

    def _turn(self) -> None:
        self._status, self._turn_s = self._read_status(), monotonic()
        self._timer = asyncio.get_running_loop().call_later(_PERIOD_S, self._turn)

    async def _serve(self, listener: socket.socket) -> None:
        """Answer probes until the task is cancelled."""
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        server = await asyncio.start_server(self._connected, sock=listener, limit=_MAX_HEAD_BYTES)
        self._has_begun.set()
        with suppress(asyncio.CancelledError):
            await server.serve_forever()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.append(writer)
        if len(self._open) > _MAX_CONNECTIONS:
            self._open.popleft().transport.abort()
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                method, _, rest = head.partition(b" ")
                path = rest.partition(b" ")[0].partition(b"?")[0].decode("latin-1")
                code, body = self.answer(path) if method == b"GET" else (405, b"{}")
                writer.write(_HEAD % (code, HTTPStatus(code).phrase.encode(), len(body)) + body)
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # not a probe
        finally:
            writer.close()
            with suppress(ValueError):
                self._open.remove(writer)

    def answer(self, path: str) -> tuple[int, bytes]:
        """Status and body for a path; may be called from any thread."""
        silent_s = monotonic() - self._turn_s
        is_live, (is_ready, body) = silent_s < self._hang_s, self._status
        if path in LIVE:
            return 200 if is_live else 503, msgspec.json.encode({"silent_s": round(silent_s, 3)})
        if path in READY:
            return 200 if is_live and is_ready else 503, msgspec.json.encode(body)
        return 404, msgspec.json.encode({"paths": [*LIVE, *READY]})

    def close(self) -> None:
        """Stop answering probes, and wait for the thread to end."""
        self._timer.cancel()
        assert self._task is not None
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join()
