"""One gateway's connections to a Valkey or Redis server."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from redis.asyncio import BlockingConnectionPool, Connection, Redis, SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as LostError
from redis.exceptions import MovedError, ReadOnlyError, RedisError, ResponseError
from redis.exceptions import TimeoutError as LateError

from headway.gateway.errors import line_of
from headway.gateway.valkey_address import valkey_address

T = TypeVar("T")
Argument = str | bytes | int | float
_LOST = (LostError, LateError, ReadOnlyError, OSError)
"""Errors after which another server may have to be used."""
_KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""TCP keepalive: idle seconds, interval and number of probes after which a silent server counts as lost."""


class Valkey:
    """One gateway's connections to a server, in one event loop, opened on demand.

    Every method raises an OSError if the server cannot be used. Commands are never repeated, because after an error it
    is unknown whether the server has executed them. All keys have the same hash tag, so one node of a cluster holds
    all keys; the other nodes redirect to that node.
    """

    def __init__(self, location: str, timeout_s: float, most: int = 3) -> None:
        """`timeout_s`: limit for a connection, and for each answer. `most`: maximum connections that send commands."""
        self._address, self._timeout_s, self._most = valkey_address(location), timeout_s, most
        self._client = self._new_client(self._address.host, self._address.port)

    @property
    def _pool(self) -> Any:
        return self._client.connection_pool

    def key(self, *parts: str) -> str:
        """The full name of a key."""
        return ":".join((f"{{{self._address.prefix}}}", *parts))

    def channel(self, *parts: str) -> str:
        """The full name of a channel. A server has one set of channels for all of its databases."""
        return self.key(str(self._address.database), *parts)

    async def run(self, *command: Argument) -> Any:
        """Send one command, and return the answer."""
        return await self._follow(lambda: self._client.execute_command(*command))

    async def run_script(self, script: str, keys: Sequence[str], arguments: Iterable[Argument] = ()) -> Any:
        """Run a script at the server atomically, and return its answer."""
        return await self.run("EVAL", script, len(keys), *keys, *arguments)

    async def subscribe(self, *channels: str) -> Subscription:
        """Listen to channels from now on, on a separate connection."""
        return await self._follow(lambda: self._subscribe(channels))

    async def _subscribe(self, channels: tuple[str, ...]) -> Subscription:
        connection = self._pool.connection_class(**{**self._pool.connection_kwargs, "socket_timeout": None})
        made = Subscription(connection)
        try:
            async with asyncio.timeout(self._timeout_s):  # the connection itself has no timeout
                await connection.connect()
                await connection.send_command("SUBSCRIBE", *channels)
                for _ in channels:
                    await connection.read_response()
        except BaseException:
            await made.close()
            raise
        return made

    async def close(self) -> None:
        """Close the connections. Never fails."""
        with suppress(RedisError, OSError):
            await self._pool.disconnect()

    async def _follow(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run the call. In a cluster, run the call at the node that has the keys."""
        try:
            try:
                return await work()
            except ResponseError as error:
                node = _node(error)
                if node is None:
                    raise
            await self._use(node[0] or self._pool.connection_kwargs["host"], node[1])
            return await work()
        except _LOST as error:  # the name may now belong to another server, and the keys to another node
            await self._use(self._address.host, self._address.port)
            raise ConnectionError(line_of(error)) from error
        except RedisError as error:
            raise ConnectionError(line_of(error)) from error

    async def _use(self, host: str, port: int) -> None:
        """Use this server from now on."""
        before, self._client = self._pool, self._new_client(host, port)
        with suppress(RedisError, OSError):
            await before.disconnect(inuse_connections=False)

    def _new_client(self, host: str, port: int) -> Any:
        address = self._address
        keepalive = {getattr(socket, name): value for name, value in _KEEPALIVE.items() if hasattr(socket, name)}
        pool = BlockingConnectionPool(
            max_connections=self._most, timeout=self._timeout_s,
            connection_class=Connection if address.tls is None else SSLConnection, **(address.tls or {}),
            host=host, port=port, db=address.database, username=address.user, password=address.password, protocol=2,
            socket_timeout=self._timeout_s, socket_connect_timeout=self._timeout_s,
            socket_keepalive=True, socket_keepalive_options=keepalive, retry=Retry(NoBackoff(), 0),
        )  # fmt: skip
        client = Redis(connection_pool=pool)
        client.response_callbacks.clear()  # answers stay unparsed, so that scripts and commands return the same form
        return client


def _node(error: Exception) -> tuple[str, int] | None:
    """The cluster node that has the keys, from another node's redirection. An empty name means the name of the node
    that sent the redirection."""
    if isinstance(error, MovedError):
        return error.host, error.port
    words = str(error).split()
    if len(words) != 3 or words[0] != "MOVED":  # the form of older clients
        return None
    host, _, port = words[2].rpartition(":")
    return host, int(port)


class Subscription:
    """A connection that receives the messages published in some channels."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    async def next(self) -> bytes:
        """The next message. Raises OSError if the connection breaks."""
        try:
            while True:
                kind, *_, body = await self._connection.read_response()
                if kind == b"message":
                    return bytes(body)
        except RedisError as error:
            raise ConnectionError(line_of(error)) from error

    async def close(self) -> None:
        """Close the connection without the TLS handshake, which would wait for the server. Never fails."""
        writer = getattr(self._connection, "_writer", None)
        if writer is not None:
            writer.transport.abort()
        with suppress(RedisError, OSError):
            await self._connection.disconnect(nowait=True)
