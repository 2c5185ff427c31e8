"""Serves an ASGI application on a socket, with uvicorn."""

from __future__ import annotations

import gc
import signal
import socket
import ssl
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import Struct

from headway.core.errors import HeadwayError
from headway.gateway.server.hosts import ExpectedHosts
from headway.gateway.settings import Settings
from headway.gateway.termination import ignore_sigterm

_GC_THRESHOLDS = 5000, 100, 10
"""Python's defaults are 700, 10 and 10. Requests leave no reference cycles (tests/gateway/server/test_garbage.py), so
collections find nothing, but pause all streams. These thresholds keep collections short, and full collections rare."""
_LARGE_BYTES = 16 << 20
_BACKLOG = 4096
"""Maximum number of connections that wait to be accepted."""
_TCP = socket.IPPROTO_TCP
"""The protocol is given explicitly, because otherwise asyncio does not recognise TCP and keeps Nagle's delay of 40
ms."""


class Tls(Struct, frozen=True):
    """Files in PEM format that encrypt connections."""

    certfile: Path
    """The certificate, with intermediate certificates."""
    keyfile: Path | None = None
    """The certificate's private key; None if it is in the same file."""

    def check(self) -> None:
        """Raises HeadwayError if certificate and key cannot be used together."""
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.certfile, self.keyfile, _no_password)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            where = self.certfile if self.keyfile is None else f"{self.certfile}, {self.keyfile}"
            raise HeadwayError(f"{where}: not a certificate and its key: {reason}") from None


def tls_of(certfile: Path | None, keyfile: Path | None) -> Tls | None:
    """The checked certificate; None if there is none. Raises HeadwayError if the certificate cannot be used."""
    if certfile is None:
        if keyfile is not None:
            raise HeadwayError("--keyfile: needs --certfile")
        return None
    tls = Tls(certfile, keyfile)
    tls.check()
    return tls


def _no_password() -> str:
    raise ValueError("the key has a password; expected one without")


def not_installed(module: str, extra: str = "gateway") -> HeadwayError:
    """The error for a module that belongs to one of Headway's extras and is not installed."""
    return HeadwayError(f"{module} is not installed; try: pip install 'headway[{extra}]'")


def listen(host: str, port: int) -> socket.socket:
    """A listening socket on this port; port 0 picks a free one. Raises HeadwayError if the port is taken."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return _listener(family, address)
    except OSError as error:
        raise HeadwayError(f"{host}:{port}: cannot listen: {error.strerror or error}") from None


def reserve(host: str, port: int) -> socket.socket:
    """A socket that keeps this port for servers that share it; port 0 picks a free one. Raises HeadwayError if the port
    is taken."""
    with listen(host, port) as exclusive:  # fails if the port is taken; a socket with SO_REUSEPORT would not fail
        family, where = exclusive.family, exclusive.getsockname()
    reserved = socket.socket(family, socket.SOCK_STREAM, _TCP)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    reserved.bind(where)
    return reserved


def _listener(family: int, address: Any, *options: int) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM, _TCP)
    try:
        for option in (socket.SO_REUSEADDR, *options):
            listener.setsockopt(socket.SOL_SOCKET, option, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def address(listener: socket.socket) -> str:
    """The `host:port` of a socket, in a URL's notation."""
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def expected_hosts(settings: Settings, listener: socket.socket) -> ExpectedHosts | None:
    """The hosts that a gateway with these settings serves on this socket; None: all hosts."""
    if settings.needs_key:
        return None
    origins = () if settings.cors is None else settings.cors.origins
    return ExpectedHosts(listener.getsockname()[0], settings.hosts, origins)


def listen_shared(host: str, port: int, num: int) -> list[socket.socket]:
    """`num` sockets on one port, to which Linux distributes connections. Raises HeadwayError if the port is taken."""
    if sys.platform != "linux":  # other systems give all connections to only one of the sockets
        return num * [listen(host, port)]
    with listen(host, port) as exclusive:  # fails if the port is taken; a socket with SO_REUSEPORT would not fail
        family, address = exclusive.family, exclusive.getsockname()[:2]
    return [_listener(family, address, socket.SO_REUSEPORT) for _ in range(num)]


def listen_unix(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen(_BACKLOG)
    return listener


def serve(
    application: Any,
    listener: socket.socket,
    shutdown_s: float,
    tls: Tls | None = None,
    on_shutdown: Callable[[], Awaitable[None]] | None = None,
    hosts: ExpectedHosts | None = None,
    take_stop: Callable[[Callable[[], None]], None] = lambda stop: None,
    relays: bool = False,
    count_refused: Callable[[int], None] | None = None,
) -> None:
    """Serve until a signal. Then await `on_shutdown`, while connections are still accepted, and wait for open requests.
    The end takes at most `shutdown_s`; a second signal ends it at once.

    `hosts`: the hosts that are served; None for all. `take_stop` receives a function with the effect of a signal.
    `relays`: each client may need a connection to an engine. `count_refused(status)`: called for each answer to a
    request that the application does not see.
    """
    try:
        import uvicorn

        from headway.gateway.server.draining_server import DrainingServer
        from headway.gateway.server.http_protocol import HttpProtocol
    except ModuleNotFoundError as error:
        raise not_installed(str(error.name)) from None
    config = uvicorn.Config(
        application,
        log_config=None,
        access_log=False,
        lifespan="on",
        ws="none",
        http=partial(HttpProtocol, hosts=hosts, count_refused=count_refused),  # type: ignore[arg-type]  # called like a class
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=round(shutdown_s) or None,
        timeout_keep_alive=75,
        backlog=_BACKLOG,
        ssl_certfile=None if tls is None else tls.certfile,
        ssl_keyfile=None if tls is None else tls.keyfile,
    )
    config.load()
    # Exempt all current objects from later collections, which pause all streams.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
    _keep_freed_memory()

    server = DrainingServer(config, shutdown_s, on_shutdown, relays)
    take_stop(partial(setattr, server, "should_exit", True))
    signal.signal(signal.SIGTERM, server.handle_exit)  # also before and after uvicorn handles it
    server.run(sockets=[listener])
    ignore_sigterm()


def _keep_freed_memory() -> None:
    """Have glibc keep freed memory of up to twice `_LARGE_BYTES` at the end of the heap, as it does once a block of
    this length has been freed. By default it gives back what the metrics of many engines have taken, and takes it anew
    page by page."""
    block = bytearray(_LARGE_BYTES)
    del block
