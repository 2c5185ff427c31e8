"""Files of OpenAI's API in the database, in parts, so that no file is ever whole in memory."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from tempfile import SpooledTemporaryFile
from typing import IO, Any

from sqlalchemy import delete, func, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection

from headway.gateway.batch.objects import FileList, FileObject, Page
from headway.gateway.batch.store import ACTIVE, BATCHES, FILES, PARTS, BatchStore
from headway.gateway.errors import ApiError

PART_BYTES = 1 << 20


class DeletedError(Exception):
    """A file was deleted during the read."""


class FileWriter:
    """Writes one file within a transaction."""

    def __init__(self, connection: AsyncConnection, owner: str, filename: str, purpose: str) -> None:
        self.id = f"file-{uuid.uuid4().hex}"
        self._connection = connection
        self._columns = {"id": self.id, "owner": owner, "filename": filename, "purpose": purpose}
        self._buffer = bytearray()
        self.num_bytes = self._num_parts = 0

    async def write(self, data: bytes) -> None:
        self._buffer += data
        self.num_bytes += len(data)
        while len(self._buffer) >= PART_BYTES:
            await self._write_part(bytes(self._buffer[:PART_BYTES]))
            del self._buffer[:PART_BYTES]

    async def _write_part(self, data: bytes) -> None:
        row = {"file": self.id, "part": self._num_parts, "data": data}
        await self._connection.execute(insert(PARTS).values(row))
        self._num_parts += 1

    async def close(self) -> FileObject:
        """Write the remaining data. From now on the file exists."""
        if self._buffer:
            await self._write_part(bytes(self._buffer))
        row = {**self._columns, "bytes": self.num_bytes, "created_ns": time.time_ns()}
        await self._connection.execute(insert(FILES).values(row))
        return _file_object(row)


def _file_object(row: Any) -> FileObject:
    return FileObject(
        id=row["id"],
        object="file",
        bytes=row["bytes"],
        created_at=row["created_ns"] // 10**9,
        filename=row["filename"],
        purpose=row["purpose"],
        status="processed",
    )


async def require_room(connection: AsyncConnection, owner: str, num_bytes: int, max_bytes: int) -> None:
    """Raise ApiError if `num_bytes` more would put the owner above `max_bytes`. The lines of a running batch count as a
    copy of its file."""
    files = select(func.coalesce(func.sum(FILES.c.bytes), 0)).where(FILES.c.owner == owner)
    lines = files.join(BATCHES, BATCHES.c.input_file_id == FILES.c.id).where(BATCHES.c.status.in_(ACTIVE))
    stored = sum([int((await connection.execute(query)).scalar_one()) for query in (files, lines)])
    if stored + num_bytes > max_bytes:
        what = f"this key stores {stored:,} bytes, and may store {max_bytes:,}: delete files, or wait for batches"
        raise ApiError(429, what, "insufficient_quota")


async def find_file(store: BatchStore, owner: str, id: str) -> FileObject | None:
    """The file with this id, if it belongs to this owner."""
    async with store.begin() as connection:
        rows = await connection.execute(select(FILES).where(FILES.c.id == id, FILES.c.owner == owner))
        row = rows.mappings().first()
    return None if row is None else _file_object(row)


async def list_files(store: BatchStore, owner: str, page: Page, purpose: str | None) -> FileList:
    query = select(FILES).where(FILES.c.owner == owner)
    if purpose is not None:
        query = query.where(FILES.c.purpose == purpose)
    rows, has_more = await store.page(FILES, query, page)
    return FileList.of([_file_object(row) for row in rows], has_more)


async def delete_file(store: BatchStore, owner: str, id: str) -> bool:
    """Delete the file with this id if it belongs to this owner; False otherwise."""
    async with store.begin() as connection:
        deleted = await connection.execute(delete(FILES).where(FILES.c.id == id, FILES.c.owner == owner))
        if deleted.rowcount:
            await connection.execute(delete(PARTS).where(PARTS.c.file == id))
    return bool(deleted.rowcount)


async def read_parts(store: BatchStore, file: FileObject) -> AsyncIterator[bytes]:
    """A file's parts, each read from the database on demand. Raises DeletedError if the file is deleted during the
    reading."""
    part, bytes_left = 0, file.bytes
    while bytes_left > 0:
        async with store.begin() as connection:
            query = select(PARTS.c.data).where(PARTS.c.file == file.id, PARTS.c.part == part)
            data = (await connection.execute(query)).scalar()
        if data is None:
            raise DeletedError
        yield bytes(data)
        part, bytes_left = part + 1, bytes_left - len(data)


async def copy_file(store: BatchStore, file: FileObject) -> IO[bytes]:
    """A copy for a client that may read slowly; the caller closes it. DeletedError as in `read_parts`."""
    copy = SpooledTemporaryFile(PART_BYTES)  # noqa: SIM115  # the caller closes it
    try:
        async for data in read_parts(store, file):
            await asyncio.to_thread(copy.write, data)
        await asyncio.to_thread(copy.seek, 0)
    except BaseException:
        copy.close()
        raise
    return copy


async def read_lines(store: BatchStore, file: FileObject, max_bytes: int) -> AsyncIterator[bytes]:
    """A file's lines. A line longer than `max_bytes` comes truncated and ends the iteration. DeletedError as in
    `read_parts`."""
    rest = b""
    async for data in read_parts(store, file):
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line
        if len(rest) > max_bytes:
            break
    if rest:
        yield rest
