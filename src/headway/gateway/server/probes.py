"""A port apart for probes of liveness and readiness, served by a thread of its own: however busy the gateway is with
requests, and however many connections wait, a probe is answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from time import monotonic
from typing import Any

import msgspec

from headway.core.errors import HeadwayError

_PERIOD_S = 0.25
LIVE, READY = ("/livez", "/live"), ("/readyz", "/ready", "/health")
Status = tuple[bool, dict[str, Any]]
"""Whether requests are served, and the body of /health."""


class ProbeServer:
    """Answers at `port`, on all addresses. Created in the event loop whose turns show that the gateway lives."""

    def __init__(self, port: int, status: Callable[[], Status], hang_s: float) -> None:
        """`status()` is called in the event loop. HeadwayError if the port is taken."""
        self._read_status, self._hang_s = status, hang_s
        self._status, self._turn_s = status(), monotonic()
        probes = self

        class Handler(BaseHTTPRequestHandler):
            timeout = 5.0

            def do_GET(self) -> None:
                code, body = probes.answer(self.path.partition("?")[0])
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                """Say nothing: probes come every few seconds."""

        try:
            self._server = ThreadingHTTPServer(("", port), Handler)
        except OSError as error:
            raise HeadwayError(f"probe_port {port}: {error.strerror or error}") from None
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self._thread = Thread(target=self._server.serve_forever, name="probes", daemon=True)
        self._thread.start()
        self._timer = asyncio.get_running_loop().call_later(_PERIOD_S, self._turn)

    def _turn(self) -> None:
        self._status, self._turn_s = self._read_status(), monotonic()
        self._timer = asyncio.get_running_loop().call_later(_PERIOD_S, self._turn)

    def answer(self, path: str) -> tuple[int, bytes]:
        """Status and body for a path, from any thread."""
        silent_s = monotonic() - self._turn_s
        is_live, (is_ready, body) = silent_s < self._hang_s, self._status
        if path in LIVE:
            return 200 if is_live else 503, msgspec.json.encode({"silent_s": round(silent_s, 3)})
        if path in READY:
            return 200 if is_live and is_ready else 503, msgspec.json.encode(body)
        return 404, msgspec.json.encode({"paths": [*LIVE, *READY]})

    def close(self) -> None:
        """Answer no more probes."""
        self._timer.cancel()
        self._server.shutdown()
        self._server.server_close()
