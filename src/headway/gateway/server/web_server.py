"""Serves an ASGI application on a socket, with uvicorn."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
import ssl
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, cast

from msgspec import Struct

from headway.core.errors import HeadwayError
from headway.gateway import descriptors
from headway.gateway.server.hosts import ExpectedHosts
from headway.gateway.settings import Settings
from headway.gateway.termination import ignore_sigterm

_GC_THRESHOLDS = 2000, 100, 10
"""Python's own are 700, 10 and 10. Requests leave no reference cycles, so collections find nothing, and pause all
streams meanwhile: these thresholds make them short, and full ones rare."""
_FORCE_POLL_S = 0.1
_OPENING_S = 2.0
"""A server that ends waits so long for TLS handshakes of connections that it has accepted."""
_BACKLOG = 4096
"""Connections that may wait to be accepted."""
_TCP = socket.IPPROTO_TCP
"""Named explicitly, as asyncio otherwise does not see TCP and leaves Nagle's delay of 40 ms on."""


class Tls(Struct, frozen=True):
    """Files in PEM format that encrypt connections."""

    certfile: Path
    """The certificate, with intermediate certificates."""
    keyfile: Path | None = None
    """The certificate's key; None if it is in the same file."""

    def check(self) -> None:
        """HeadwayError if certificate and key cannot be used together."""
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.certfile, self.keyfile, _no_password)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            where = self.certfile if self.keyfile is None else f"{self.certfile}, {self.keyfile}"
            raise HeadwayError(f"{where}: not a certificate and its key: {reason}") from None


def tls_of(certfile: Path | None, keyfile: Path | None) -> Tls | None:
    """The certificate, after a check; None without one. HeadwayError if it cannot be used."""
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
    """The error for a missing module of one of Headway's extras."""
    return HeadwayError(f"{module} is not installed; try: pip install 'headway[{extra}]'")


def listen(host: str, port: int) -> socket.socket:
    """A listening socket on this port; 0 for a free port. HeadwayError if the port is taken."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return _listener(family, address)
    except OSError as error:
        raise HeadwayError(f"{host}:{port}: cannot listen: {error.strerror or error}") from None


def reserve(host: str, port: int) -> socket.socket:
    """A socket that keeps this port for servers that share it; 0 for a free port. HeadwayError if the port is taken."""
    with listen(host, port) as exclusive:  # fails if the port is taken, as sockets with SO_REUSEPORT do not
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
    """`host:port` of a socket, as in a URL."""
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def expected_hosts(settings: Settings, listener: socket.socket) -> ExpectedHosts | None:
    """The hosts that a gateway with these settings serves on this socket; None for all."""
    if settings.needs_key:
        return None
    origins = () if settings.cors is None else settings.cors.origins
    return ExpectedHosts(listener.getsockname()[0], settings.hosts, origins)


def listen_shared(host: str, port: int, num: int) -> list[socket.socket]:
    """`num` sockets on one port, to which Linux distributes connections. HeadwayError if the port is taken."""
    if sys.platform != "linux":  # other systems give all connections to one of the sockets
        return num * [listen(host, port)]
    with listen(host, port) as exclusive:  # fails if the port is taken, as sockets with SO_REUSEPORT do not
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
) -> None:
    """Serve until a signal; then await `on_shutdown`, during which connections are still accepted, and wait for open
    requests; all that for at most `shutdown_s`, and not after a second signal.

    `hosts`: the hosts that are served; None for all. `take_stop` gets a function that has the same effect as a signal.
    `relays`: each client may need a connection to an engine.
    """
    try:
        import uvicorn

        from headway.gateway.server.acceptor import Acceptor
        from headway.gateway.server.http_protocol import HttpProtocol
    except ModuleNotFoundError as error:
        raise not_installed(str(error.name)) from None
    config = uvicorn.Config(
        application, log_config=None, access_log=False, lifespan="on", ws="none",
        http=partial(HttpProtocol, hosts=hosts),  # type: ignore[arg-type]  # called like a class
        server_header=False, proxy_headers=False, timeout_graceful_shutdown=round(shutdown_s) or None,
        timeout_keep_alive=75,
        backlog=_BACKLOG,
        ssl_certfile=None if tls is None else tls.certfile, ssl_keyfile=None if tls is None else tls.keyfile,
    )  # fmt: skip
    config.load()
    # Objects that exist now stay: exempt them from collections, which pause all streams.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            """End at a signal. uvicorn would raise SIGTERM again, and the process would be killed by it."""
            if sig == signal.SIGTERM:
                self.should_exit = True
            else:
                super().handle_exit(sig, frame)

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets=[])
            protocol, state = self.config.http_protocol_class, self.server_state
            make = partial(cast(Any, protocol), config=self.config, server_state=state, app_state=self.lifespan.state)
            most = descriptors.max_clients(2 if relays else 1)
            accepting = [Acceptor(each, make, state.connections, self.config.ssl, most) for each in sockets or ()]
            self.servers = cast(Any, accepting)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            start_s = time.monotonic()
            draining = asyncio.ensure_future(on_shutdown()) if on_shutdown is not None else None
            while draining is not None and not draining.done() and not self.force_exit:
                await asyncio.wait({draining}, timeout=_FORCE_POLL_S)
            if draining is not None and not draining.cancel():
                await draining
            await self.accept_no_more(min(time.monotonic() + _OPENING_S, start_s + shutdown_s))
            left_s = shutdown_s - (time.monotonic() - start_s)
            self.config.timeout_graceful_shutdown = max(round(left_s), 1)
            await super().shutdown(sockets)

        async def accept_no_more(self, end_s: float) -> None:
            """Connections that were accepted are opened, until this time at most."""
            accepting = cast(list[Acceptor], self.servers)
            for each in accepting:
                each.close()
            while any(each.is_opening for each in accepting) and not self.force_exit and time.monotonic() < end_s:
                await asyncio.sleep(_FORCE_POLL_S)

    server = Server(config)
    take_stop(partial(setattr, server, "should_exit", True))
    signal.signal(signal.SIGTERM, server.handle_exit)  # also before and after uvicorn handles it
    server.run(sockets=[listener])
    ignore_sigterm()
