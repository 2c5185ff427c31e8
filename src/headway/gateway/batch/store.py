"""The database that files, batches and their lines are kept in: SQLite, or PostgreSQL."""

from __future__ import annotations

import fcntl
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import (
    URL,
    BigInteger,
    Column,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    event,
    make_url,
    text,
)  # fmt: skip
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

from headway.core.errors import HeadwayError

TABLES = MetaData()
FILES = Table(
    "headway_files", TABLES,
    Column("id", Text, primary_key=True), Column("owner", Text, nullable=False),
    Column("created_ns", BigInteger, nullable=False), Column("purpose", Text, nullable=False),
    Column("filename", Text, nullable=False), Column("bytes", BigInteger, nullable=False),
)  # fmt: skip
PARTS = Table(
    "headway_file_parts", TABLES,
    Column("file", Text, primary_key=True), Column("part", Integer, primary_key=True),
    Column("data", LargeBinary, nullable=False),
)  # fmt: skip
BATCHES = Table(
    "headway_batches", TABLES,
    Column("id", Text, primary_key=True), Column("owner", Text, nullable=False),
    Column("created_ns", BigInteger, nullable=False), Column("status", Text, nullable=False),
    Column("endpoint", Text, nullable=False), Column("input_file_id", Text, nullable=False),
    Column("output_file_id", Text), Column("error_file_id", Text), Column("completion_window", Text, nullable=False),
    *(Column(f"{what}_at", BigInteger) for what in (
        "in_progress", "expires", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled",
    )),
    *(Column(f"num_{what}", Integer, nullable=False, default=0) for what in ("total", "completed", "failed")),
    Column("metadata", Text), Column("errors", Text),
)  # fmt: skip
LINES = Table(
    "headway_batch_lines", TABLES,
    Column("batch", Text, primary_key=True), Column("line", Integer, primary_key=True),
    Column("custom_id", Text, nullable=False), Column("body", LargeBinary, nullable=False),
    Column("status", Integer, nullable=False, default=0), Column("answer", LargeBinary),
)  # fmt: skip
Index("headway_files_by_owner", FILES.c.owner, FILES.c.created_ns)
Index("headway_batches_by_owner", BATCHES.c.owner, BATCHES.c.created_ns)
Index("headway_batch_lines_by_status", LINES.c.batch, LINES.c.status, LINES.c.line)
OPEN, ANSWERED, FAILED = range(3)
"""Of a line."""
_LOCK = 0x68656164
"""Of PostgreSQL's advisory locks."""
UNAVAILABLE = (SQLAlchemyError, OSError)
"""What a database that cannot be used raises."""


class Store:
    """One database. Several gateways may use the same; one of them at a time runs the batches."""

    def __init__(self, where: str) -> None:
        """`where`: a file's path, or `postgresql://user@host/database`."""
        self._path: Path | None = None
        options: dict[str, Any]
        if "://" in where:
            url = postgres_url(where)
            # A server that says nothing is as good as none.
            options = {"pool_pre_ping": True, "connect_args": {"timeout": 10, "command_timeout": 60}}
        else:
            self._path = Path(where)
            url = make_url(f"sqlite+aiosqlite:///{self._path}")
            # One connection: SQLite has one writer at a time, and those that wait here wait in turn.
            options = {"pool_size": 1, "max_overflow": 0}
        # What clients ask is nothing for logs.
        self._engine = create_async_engine(url, hide_parameters=True, **options)
        if self._path is not None:
            event.listen(self._engine.sync_engine, "connect", _durable)
        self._lock_file: int | None = None
        self._lock_held: AsyncConnection | None = None
        self.is_open = False

    async def open(self) -> None:
        """Make the tables where there are none."""
        if not self.is_open:
            if self._path is not None:  # nobody else's to read
                os.close(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600))
            async with self._engine.begin() as connection:
                if self._path is None:  # two gateways that start at the same time
                    await connection.execute(text(f"SELECT pg_advisory_xact_lock({_LOCK + 1})"))
                await connection.run_sync(TABLES.create_all)
            self.is_open = True

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[AsyncConnection]:
        """A transaction: all of it, or nothing."""
        async with self._engine.begin() as connection:
            yield connection

    async def lead(self) -> bool:
        """Be the one gateway that runs batches, now and until `close`, or until the process is gone."""
        if self._path is not None:
            return self._lock_file is not None or self._take_file(self._path)
        if self._lock_held is not None:
            await self._lock_held.execute(text("SELECT 1"))
            return True
        connection = await self._engine.connect()
        try:
            await connection.execution_options(isolation_level="AUTOCOMMIT")
            got = bool((await connection.execute(text(f"SELECT pg_try_advisory_lock({_LOCK})"))).scalar())
        except BaseException:
            await connection.close()
            raise
        if got:
            self._lock_held = connection
        else:
            await connection.close()
        return got

    def _take_file(self, path: Path) -> bool:
        handle = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(handle)
            return False
        self._lock_file = handle
        return True

    async def resign(self) -> None:
        """Another gateway may run batches."""
        handle, self._lock_file = self._lock_file, None
        if handle is not None:
            os.close(handle)
        held, self._lock_held = self._lock_held, None
        if held is not None:
            await held.invalidate()
            await held.close()

    async def close(self) -> None:
        """All connections."""
        await self.resign()
        await self._engine.dispose()


def postgres_url(where: str) -> URL:
    """A PostgreSQL's address as SQLAlchemy takes it. HeadwayError where it is none."""
    try:
        url = make_url(where)
    except (SQLAlchemyError, ValueError):
        raise HeadwayError("no address of a database; expected postgresql://user@host:port/database") from None
    if set(url.query) - {"sslmode"}:
        raise HeadwayError(f"{', '.join(url.query)}: only sslmode can be said in a database's address")
    query = {"ssl": url.query["sslmode"]} if url.query else {}
    return url.set(drivername="postgresql+asyncpg", query=query)


def _durable(connection: Any, record: object) -> None:
    """What is committed outlives the machine's loss of power."""
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "busy_timeout=10000"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()
