"""Serves an ASGI application on a port, with uvicorn."""

from __future__ import annotations

import socket
from typing import Any

from headway.core.errors import HeadwayError

_BACKLOG = 4096
"""Connections that may wait to be accepted."""


def needed(module: str) -> HeadwayError:
    """The error for an extra that is not installed."""
    return HeadwayError(f"{module} is not installed; try: pip install 'headway[gateway]'")


def listen(host: str, port: int) -> socket.socket:
    """A socket on this port; 0: any that is free. HeadwayError where it cannot be had."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, socket.SOCK_STREAM)
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


def serve(application: Any, made: socket.socket, shutdown_s: float) -> None:
    """Until the process is told to stop; then requests have so long to end."""
    try:
        import httptools
        import uvicorn
    except ModuleNotFoundError as error:
        raise needed(str(error.name)) from None
    assert httptools
    config = uvicorn.Config(
        application, log_level="warning", access_log=False, http="httptools", lifespan="on", server_header=False,
        timeout_graceful_shutdown=round(shutdown_s) or None, timeout_keep_alive=75, backlog=_BACKLOG,
    )  # fmt: skip
    uvicorn.Server(config).run(sockets=[made])
