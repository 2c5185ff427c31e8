"""A database of the gateway: an SQLite file, or PostgreSQL."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from stat import S_ISREG
from typing import Any

from msgspec import Struct
from sqlalchemy import URL, MetaData, event, make_url, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

from headway.core.errors import HeadwayError
from headway.gateway.blocking import in_thread

_TABLES_LOCK = 0x68656165
"""The key of the advisory lock in PostgreSQL under which tables are created."""
UNAVAILABLE = (SQLAlchemyError, OSError)
"""Errors that are raised while the database cannot be used."""
_TURN_S = 30.0
"""Longest wait for SQLite's only connection."""


class _Files(Struct, frozen=True):
    """The state of an SQLite database's files, to detect that they were replaced."""

    database: tuple[int, int, int, int]
    """(device, inode, size, time of the last change) of the database's file."""
    log: tuple[int, int] | None
    """(device, inode) of the write-ahead log; None if there is none."""
    is_log_empty: bool

    def is_replaced(self, before: _Files) -> bool:
        return self.database[:2] != before.database[:2]


class Database:
    """A database that several gateways may share."""

    def __init__(self, location: str, tables: MetaData) -> None:
        """`location`: a file's path, or `postgresql://user@host/database`."""
        self._tables = tables
        self.path: Path | None = None
        """The SQLite file."""
        options: dict[str, Any]
        if "://" in location:
            url = postgres_url(location)
            # a hanging server must fail like a server that is down
            options = {"pool_pre_ping": True, "connect_args": {"timeout": 10, "command_timeout": 60}}
        else:
            self.path = Path(location)
            url = make_url(f"sqlite+aiosqlite:///{self.path}")
            # only one connection, because SQLite has one writer at a time
            options = {"pool_size": 1, "max_overflow": 0}
        # clients' data must not appear in logs
        self._engine = create_async_engine(url, hide_parameters=True, **options)
        if self.path is not None:
            event.listen(self._engine.sync_engine, "connect", _durable)
        self._files: _Files | None = None
        """The state of the SQLite files when the database was opened or last used."""
        self.num_opened = 0
        """Number of times that the database was opened. Increases when the database's file has been replaced, for
        example by a backup."""
        self._turns = asyncio.Lock()
        self.connect = self._engine.connect

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[AsyncConnection]:
        """A transaction, committed at the end of its block. Opens the database if it is not open yet."""
        if self.path is None:
            if not self.num_opened:
                await self.open()
            async with self._engine.begin() as connection:
                yield connection
            return
        async with self._turn():  # a file that was replaced is not opened while the connection is in use
            if not self.num_opened:
                await self._open()
            async with self._engine.begin() as connection:
                yield connection

    async def open(self) -> None:
        """Create the tables if they do not exist. Called repeatedly while the database is in use: if another file has
        taken the place of the database's file, the other file is opened. Raises one of `UNAVAILABLE` if the database,
        or its file, is gone."""
        async with self._turn():
            await self._open()

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Exclusive use of SQLite's connection, or of opening the database. Raises TimeoutError if others do not
        release it in time."""
        async with asyncio.timeout(_TURN_S):
            await self._turns.acquire()
        try:
            yield
        finally:
            self._turns.release()

    async def _open(self) -> None:
        if self.path is None:
            if not self.num_opened:
                await self._create_tables()
                self.num_opened = 1
            return
        before = self._files
        if before is None:
            # a file that disappears later is not created again, because it would have no keys
            await in_thread(_create, self.path)
        found = await in_thread(_files, self.path)
        if before is not None and found.database == before.database:
            if not found.is_log_empty:  # a file that is overwritten in place would receive the content of the log
                await self._checkpoint()
                found = await in_thread(_files, self.path)
            self._files = found
            return
        if before is not None and found.is_replaced(before):
            await self._leave_file(found.log == before.log)
        await self._engine.dispose()
        await self._create_tables()
        found, opened = await in_thread(_files, self.path), found
        if found.is_replaced(opened):
            raise OSError(f"{self.path} is being replaced")
        self._files, self.num_opened = found, self.num_opened + 1

    async def _leave_file(self, has_own_log: bool) -> None:
        """Complete the replaced file, and delete its write-ahead log, because SQLite would apply the log to the new
        file.

        `has_own_log`: the log belongs to the replaced file, and did not come with the new one.
        """
        assert self.path is not None
        if self._engine.sync_engine.pool.checkedin():  # type: ignore[attr-defined]
            with suppress(*UNAVAILABLE):  # through the connection that has the old file open
                await self._checkpoint()
        await self._engine.dispose()
        if has_own_log:
            await in_thread(_delete_log, self.path)

    async def _checkpoint(self) -> None:
        """Move the content of the write-ahead log to the database, as far as other processes allow it."""
        async with self._engine.connect() as connection:
            await connection.execute(text("PRAGMA wal_checkpoint(TRUNCATE)"))

    async def _create_tables(self) -> None:
        async with self._engine.begin() as connection:
            if self.path is None:  # gateways that start at the same time create the tables one after the other
                await connection.execute(text(f"SELECT pg_advisory_xact_lock({_TABLES_LOCK})"))
            await connection.run_sync(self._tables.create_all)

    async def close(self) -> None:
        await self._engine.dispose()


def _create(path: Path) -> None:
    """Create the file, readable only by its owner, if it does not exist."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))


def _files(path: Path) -> _Files:
    """The state of the files. Raises OSError if there is no file."""
    found = path.stat()
    if not S_ISREG(found.st_mode):
        raise OSError(f"{path} is no file")
    try:
        log = _log(path).stat()
    except FileNotFoundError:
        log = None
    database = found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
    return _Files(database, None if log is None else (log.st_dev, log.st_ino), log is None or not log.st_size)


def _log(path: Path) -> Path:
    """SQLite's write-ahead log of the database in a file."""
    return path.with_name(path.name + "-wal")


def _delete_log(path: Path) -> None:
    _log(path).unlink(missing_ok=True)
    path.with_name(path.name + "-shm").unlink(missing_ok=True)


def postgres_url(address: str) -> URL:
    """SQLAlchemy's URL for a PostgreSQL address. Raises HeadwayError if the address is malformed."""
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
