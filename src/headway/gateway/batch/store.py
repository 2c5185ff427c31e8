"""The database of files, batches and their lines: SQLite or PostgreSQL."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    RowMapping,
    Select,
    Table,
    Text,
    select,
    text,
)
from sqlalchemy.ext.asyncio import AsyncConnection

from headway.gateway.batch.objects import Page
from headway.gateway.blocking import in_thread
from headway.gateway.database import Database

TABLES = MetaData()
FILES = Table(
    "headway_files",
    TABLES,
    Column("id", Text, primary_key=True),
    Column("owner", Text, nullable=False),
    Column("created_ns", BigInteger, nullable=False),
    Column("purpose", Text, nullable=False),
    Column("filename", Text, nullable=False),
    Column("bytes", BigInteger, nullable=False),
)
PARTS = Table(
    "headway_file_parts",
    TABLES,
    Column("file", Text, primary_key=True),
    Column("part", Integer, primary_key=True),
    Column("data", LargeBinary, nullable=False),
)
_BATCH_COLUMNS: list[Column[Any]] = [
    Column("id", Text, primary_key=True),
    Column("owner", Text, nullable=False),
    Column("created_ns", BigInteger, nullable=False),
    Column("status", Text, nullable=False),
    Column("endpoint", Text, nullable=False),
    Column("input_file_id", Text, nullable=False),
    Column("output_file_id", Text),
    Column("error_file_id", Text),
    Column("completion_window", Text, nullable=False),
]
_TIMED = ("in_progress", "expires", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
BATCHES = Table(
    "headway_batches",
    TABLES,
    *_BATCH_COLUMNS,
    *[Column(f"{status}_at", BigInteger) for status in _TIMED],
    *[Column(f"num_{what}", Integer, nullable=False, default=0) for what in ("total", "completed", "failed")],
    Column("metadata", Text),
    Column("errors", Text),
)
LINES = Table(
    "headway_batch_lines",
    TABLES,
    Column("batch", Text, primary_key=True),
    Column("line", Integer, primary_key=True),
    Column("custom_id", Text, nullable=False),
    Column("body", LargeBinary, nullable=False),
    Column("status", Integer, nullable=False, default=0),
    Column("answer", LargeBinary),
)
Index("headway_files_by_owner", FILES.c.owner, FILES.c.created_ns)
Index("headway_batches_by_owner", BATCHES.c.owner, BATCHES.c.created_ns)
Index("headway_batch_lines_by_status", LINES.c.batch, LINES.c.status, LINES.c.line)
ACTIVE = ("validating", "in_progress", "cancelling")
"""The status of batches that have not ended."""
OPEN, ANSWERED, FAILED = range(3)
"""The status of a line."""
_LOCK = 0x68656164
"""The key of PostgreSQL's advisory lock for batch stores."""


class BatchStore(Database):
    """The database. Several gateways may share it; one gateway at a time runs the batches."""

    def __init__(self, location: str) -> None:
        super().__init__(location, TABLES)
        self._lock_file: int | None = None
        self._lock_held: AsyncConnection | None = None

    async def page(self, table: Table, query: Select[Any], page: Page) -> tuple[list[RowMapping], bool]:
        """One page of a query's rows, newest first, and whether more rows follow."""
        if page.after is not None:
            last = select(table.c.created_ns).where(table.c.id == page.after).scalar_subquery()
            query = query.where(table.c.created_ns < last)
        query = query.order_by(table.c.created_ns.desc()).limit(page.limit + 1)
        async with self.begin() as connection:
            rows = list((await connection.execute(query)).mappings())
        return rows[: page.limit], len(rows) > page.limit

    async def acquire_lock(self) -> bool:
        """Become or remain the gateway that runs batches. False if another gateway holds the lock. The lock ends with
        the process."""
        if self.path is not None:
            return self._lock_file is not None or await in_thread(self._lock, self.path)
        if self._lock_held is not None:
            await self._lock_held.execute(text("SELECT 1"))
            return True
        connection = await self.connect()
        try:
            await connection.execution_options(isolation_level="AUTOCOMMIT")
            is_leader = bool((await connection.execute(text(f"SELECT pg_try_advisory_lock({_LOCK})"))).scalar())
        except BaseException:
            await connection.close()
            raise
        if is_leader:
            self._lock_held = connection
        else:
            await connection.close()
        return is_leader

    def _lock(self, path: Path) -> bool:
        handle = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(handle)
            return False
        self._lock_file = handle
        return True

    async def release_lock(self) -> None:
        """Release the lock, so that another gateway may run batches."""
        handle, self._lock_file = self._lock_file, None
        if handle is not None:
            os.close(handle)
        held, self._lock_held = self._lock_held, None
        if held is not None:
            await held.invalidate()
            await held.close()

    async def close(self) -> None:
        await self.release_lock()
        await super().close()
