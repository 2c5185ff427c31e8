"""The store of peers in PostgreSQL. A gateway counts as connected while it holds the lock of its name."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import asyncpg

from headway.gateway.errors import line_of
from headway.gateway.peers.store import KEEP_PARTS_S, PeerStore, StoredPart

CHANNEL = "headway_peers"
_ALIVE = 0x68656164
"""The first key of the advisory locks that gateways hold while they are connected."""
_TABLES_LOCK = 0x68656166
_TABLES = """
CREATE UNLOGGED TABLE IF NOT EXISTS headway_streams (
    digest bytea, part integer, gateway text NOT NULL, body bytea NOT NULL, at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (digest, part));
CREATE TABLE IF NOT EXISTS headway_leases (
    name text PRIMARY KEY, holder text NOT NULL, until timestamptz NOT NULL);
"""
_ACQUIRE_LEASE = """
INSERT INTO headway_leases VALUES ($1, $2, clock_timestamp() + make_interval(secs => $3))
ON CONFLICT (name) DO UPDATE SET holder = excluded.holder, until = excluded.until
WHERE headway_leases.holder = excluded.holder OR headway_leases.until < clock_timestamp()
RETURNING holder
"""
_ADD_PARTS = """
INSERT INTO headway_streams (digest, part, gateway, body)
SELECT digest, part, $1, body FROM unnest($2::bytea[], $3::integer[], $4::bytea[]) AS new (digest, part, body)
ON CONFLICT (digest, part) DO UPDATE SET gateway = excluded.gateway, body = excluded.body, at = now()
"""
_READ_PARTS = "SELECT part, gateway, body FROM headway_streams WHERE digest = $1 ORDER BY part"
_REMOVE = "DELETE FROM headway_streams WHERE digest = ANY($1::bytea[]) AND gateway = $2"
_RESUME = "DELETE FROM headway_streams WHERE digest = ANY($1::bytea[]) AND gateway = $2 AND part = -1"
_REMOVE_OLD = """
DELETE FROM headway_streams WHERE digest IN
(SELECT digest FROM headway_streams GROUP BY digest HAVING max(at) < now() - make_interval(secs => $1))
"""
_IS_ALIVE = """
SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND classid::bigint = $1 AND objid::bigint = $2)
"""


class PostgresPeerStore(PeerStore):
    """The state and the streams of all gateways, in one PostgreSQL database."""

    def __init__(self, address: str, gateway: str, timeout_s: float) -> None:
        self._address, self._gateway, self._timeout_s = address, gateway, timeout_s
        self._listening: asyncpg.Connection[Any] | None = None
        self._pool: asyncpg.Pool[Any] | None = None

    async def connect(self, receive: Callable[[str], None], lost: Callable[[], None]) -> None:
        await self.close()
        limits = {"timeout": self._timeout_s, "command_timeout": self._timeout_s}
        with _os_errors():
            self._listening = listening = await asyncpg.connect(self._address, **limits)
            listening.add_termination_listener(lambda _: lost())
            await listening.execute(f"SELECT pg_advisory_lock({_TABLES_LOCK})")
            try:
                await listening.execute(f"SET client_min_messages = warning; {_TABLES}")
            finally:
                await listening.execute(f"SELECT pg_advisory_unlock({_TABLES_LOCK})")
            await listening.execute(f"SELECT pg_try_advisory_lock({_ALIVE}, {_lock_of(self._gateway)})")
            await listening.add_listener(CHANNEL, lambda *event: receive(event[-1]))
            # The data is useful for seconds only, so no write waits for the disk.
            self._pool = await asyncpg.create_pool(
                self._address, min_size=1, max_size=3, server_settings={"synchronous_commit": "off"}, **limits
            )

    async def close(self) -> None:
        listening, self._listening = self._listening, None
        pool, self._pool = self._pool, None
        with suppress(OSError), _os_errors():
            if listening is not None:
                listening.terminate()
        with suppress(OSError), _os_errors():
            if pool is not None:
                pool.terminate()

    async def _execute(self, statement: str, *values: object) -> None:
        with _os_errors():
            await self._connected.execute(statement, *values)

    async def _value(self, query: str, *values: object) -> Any:
        """The first column of the first row; None without a row."""
        with _os_errors():
            return await self._connected.fetchval(query, *values)

    @property
    def _connected(self) -> asyncpg.Pool[Any]:
        if self._pool is None:
            raise ConnectionError("not connected")
        return self._pool

    async def publish(self, messages: Sequence[str]) -> None:
        for message in messages:
            await self._execute("SELECT pg_notify($1, $2)", CHANNEL, message)

    async def acquire_lease(self, name: str, lease_s: float) -> bool:
        return await self._value(_ACQUIRE_LEASE, name, self._gateway, lease_s) is not None

    async def release_lease(self, name: str) -> None:
        await self._execute("DELETE FROM headway_leases WHERE name = $1 AND holder = $2", name, self._gateway)

    async def add_parts(self, parts: Sequence[tuple[bytes, int, bytes]]) -> None:
        digests, numbers, bodies = (list(each) for each in zip(*parts, strict=True))
        await self._execute(_ADD_PARTS, self._gateway, digests, numbers, bodies)

    async def remove_streams(self, digests: Sequence[bytes]) -> None:
        await self._execute(_REMOVE, list(digests), self._gateway)

    async def resume_streams(self, digests: Sequence[bytes]) -> None:
        await self._execute(_RESUME, list(digests), self._gateway)

    async def take_stream(self, digest: bytes) -> None:
        await self._execute("UPDATE headway_streams SET gateway = $2 WHERE digest = $1", digest, self._gateway)
        await self.resume_streams([digest])

    async def tidy(self) -> None:
        await self._execute(_REMOVE_OLD, KEEP_PARTS_S)

    async def parts(self, digest: bytes) -> list[StoredPart]:
        with _os_errors():
            return [tuple(row) for row in await self._connected.fetch(_READ_PARTS, digest)]

    async def is_alive(self, gateway: str) -> bool:
        return bool(await self._value(_IS_ALIVE, _ALIVE, _lock_of(gateway)))


def _lock_of(gateway: str) -> int:
    """The second key of a gateway's advisory lock."""
    return int.from_bytes(hashlib.blake2b(gateway.encode(), digest_size=4).digest()) >> 1


@contextmanager
def _os_errors() -> Iterator[None]:
    """Raise the client's errors as OSErrors."""
    try:
        yield
    except (asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        raise ConnectionError(line_of(error)) from error
