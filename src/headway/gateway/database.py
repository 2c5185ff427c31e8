"""A database of the gateway's: an SQLite file, or PostgreSQL."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from sqlalchemy import URL, MetaData, event, make_url, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import create_async_engine

from headway.core.errors import HeadwayError

_TABLES_LOCK = 0x68656165
"""The key of the advisory lock in PostgreSQL under which tables are created."""
UNAVAILABLE = (SQLAlchemyError, OSError)
"""Raised while the database cannot be used."""


class Database:
    """One database, which several gateways may use."""

    def __init__(self, location: str, tables: MetaData) -> None:
        """`location`: a file's path, or `postgresql://user@host/database`."""
        self._tables = tables
        self.path: Path | None = None
        """The SQLite file."""
        options: dict[str, Any]
        if "://" in location:
            url = postgres_url(location)
            # A server that hangs is to fail like one that is down.
            options = {"pool_pre_ping": True, "connect_args": {"timeout": 10, "command_timeout": 60}}
        else:
            self.path = Path(location)
            url = make_url(f"sqlite+aiosqlite:///{self.path}")
            # One connection: SQLite has one writer at a time, and the pool serves waiters in turn.
            options = {"pool_size": 1, "max_overflow": 0}
        # What clients send must not appear in logs.
        self._engine = create_async_engine(url, hide_parameters=True, **options)
        if self.path is not None:
            event.listen(self._engine.sync_engine, "connect", _durable)
        self.is_open = False
        self.begin, self.connect = self._engine.begin, self._engine.connect
        """`begin` is a transaction as a context manager, committed at the end of its block."""

    async def open(self) -> None:
        """Create the tables if they do not exist."""
        if not self.is_open:
            if self.path is not None:  # create the file readable by its owner only
                os.close(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600))
            async with self._engine.begin() as connection:
                if self.path is None:  # gateways that start at the same time create the tables in turn
                    await connection.execute(text(f"SELECT pg_advisory_xact_lock({_TABLES_LOCK})"))
                await connection.run_sync(self._tables.create_all)
            self.is_open = True

    async def close(self) -> None:
        await self._engine.dispose()


def postgres_url(address: str) -> URL:
    """SQLAlchemy's URL for a PostgreSQL address. HeadwayError if the address is malformed."""
    try:
        url = make_url(address)
    except (SQLAlchemyError, ValueError):
        url = None
    if url is None or url.get_backend_name() not in ("postgresql", "postgres"):
        raise HeadwayError("not a database address; expected postgresql://user@host:port/database")
    if set(url.query) - {"sslmode"}:
        raise HeadwayError(f"{', '.join(url.query)}: unknown option in a database address; expected only sslmode")
    query = {"ssl": url.query["sslmode"]} if url.query else {}
    return url.set(drivername="postgresql+asyncpg", query=query)


def _durable(connection: Any, record: object) -> None:
    """Make commits survive a power failure."""
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "busy_timeout=10000"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()
