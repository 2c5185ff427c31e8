"""Serves an ASGI application on a port, with uvicorn."""

from __future__ import annotations

import gc
import socket
import ssl
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from msgspec import Struct

from headway.core.errors import HeadwayError

_GC_THRESHOLDS = 2000, 100, 10
"""Python's own are 700, 10 and 10. Requests leave no cycles behind, so that collections find nothing, and stop all
streams for as long as it takes to look at those that have begun: in small parts, and rarely all over again."""
_BACKLOG = 4096
"""Connections that may wait to be accepted."""
_TCP = socket.IPPROTO_TCP
"""Said of a socket, or asyncio does not see what it is, and has small pieces wait for 40 ms (Nagle)."""


class Tls(Struct, frozen=True):
    """What encrypts connections: files in PEM format."""

    certfile: Path
    """The certificate, and those between it and a trusted one."""
    keyfile: Path | None = None
    """Its key; None: it is in the same file."""

    def check(self) -> None:
        """HeadwayError where it cannot be used."""
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.certfile, self.keyfile, _no_password)
        except (OSError, ValueError) as error:
            said = error.strerror if isinstance(error, OSError) and error.strerror else error
            where = self.certfile if self.keyfile is None else f"{self.certfile}, {self.keyfile}"
            raise HeadwayError(f"{where}: no certificate and key that go together: {said}") from None


def _no_password() -> str:
    raise ValueError("the key has a password; expected one without")


def needed(module: str, extra: str = "gateway") -> HeadwayError:
    """The error for an extra that is not installed."""
    return HeadwayError(f"{module} is not installed; try: pip install 'headway[{extra}]'")


def listen(host: str, port: int) -> socket.socket:
    """A socket on this port; 0: any that is free. HeadwayError where it cannot be had."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, socket.SOCK_STREAM, _TCP)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(_BACKLOG)
    except OSError as error:
        raise HeadwayError(f"{host}:{port}: cannot listen there: {error.strerror or error}") from None
    return made


def address(made: socket.socket) -> str:
    """`host:port`, as it is in a URL."""
    host, port = made.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen_together(host: str, port: int, num: int) -> list[socket.socket]:
    """As many sockets on this port, among which the system shares out what comes. HeadwayError as above."""
    if sys.platform != "linux":  # others give all connections to one of such sockets
        return num * [listen(host, port)]
    with listen(host, port) as only:  # nobody else has it: sockets that share a port do not see that
        family, (host, port) = only.family, only.getsockname()[:2]
    made = []
    for _ in range(num):
        one = socket.socket(family, socket.SOCK_STREAM, _TCP)
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            one.setsockopt(socket.SOL_SOCKET, option, 1)
        one.bind((host, port))
        one.listen(_BACKLOG)
        made.append(one)
    return made


def listen_privately(path: Path) -> socket.socket:
    """A socket that is a file."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    made.bind(str(path))
    made.listen(_BACKLOG)
    return made


def serve(
    application: Any,
    made: socket.socket,
    shutdown_s: float,
    tls: Tls | None = None,
    ending: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Until the process is told to stop; then `ending` is waited for, and requests have so long to end."""
    try:
        import uvicorn

        from headway.gateway.server.http_protocol import Guarded
    except ModuleNotFoundError as error:
        raise needed(str(error.name)) from None
    config = uvicorn.Config(
        application, log_level="warning", access_log=False, http=Guarded, lifespan="on", server_header=False,
        proxy_headers=False, timeout_graceful_shutdown=round(shutdown_s) or None, timeout_keep_alive=75,
        backlog=_BACKLOG,
        ssl_certfile=None if tls is None else tls.certfile, ssl_keyfile=None if tls is None else tls.keyfile,
    )  # fmt: skip
    config.load()
    # What has been imported and read stays: collections need not go through it, which stops all streams for a while.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            if ending is not None:
                await ending()
            await super().shutdown(sockets)

    Server(config).run(sockets=[made])
