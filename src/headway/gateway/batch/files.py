"""Files, as OpenAI's API has them: kept in parts, so that none is ever whole in memory."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from tempfile import SpooledTemporaryFile
from typing import IO, Any

from sqlalchemy import delete, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection

from headway.gateway.batch.pages import Page, page
from headway.gateway.batch.store import FILES, PARTS, Store

PART_BYTES = 1 << 20
PURPOSES = ("batch", "batch_output")
"""What clients give, and what they get."""


class Writer:
    """A file as it is written, within a transaction."""

    def __init__(self, connection: AsyncConnection, owner: str, filename: str, purpose: str) -> None:
        self.id = f"file-{uuid.uuid4().hex}"
        self._connection = connection
        self._about = {"id": self.id, "owner": owner, "filename": filename, "purpose": purpose}
        self._buffer = bytearray()
        self.num_bytes = self._num_parts = 0

    async def write(self, data: bytes) -> None:
        """More of it."""
        self._buffer += data
        self.num_bytes += len(data)
        while len(self._buffer) >= PART_BYTES:
            await self._put(bytes(self._buffer[:PART_BYTES]))
            del self._buffer[:PART_BYTES]

    async def _put(self, data: bytes) -> None:
        row = {"file": self.id, "part": self._num_parts, "data": data}
        await self._connection.execute(insert(PARTS).values(row))
        self._num_parts += 1

    async def end(self) -> dict[str, Any]:
        """That was all; the file object."""
        if self._buffer:
            await self._put(bytes(self._buffer))
        row = {**self._about, "bytes": self.num_bytes, "created_ns": time.time_ns()}
        await self._connection.execute(insert(FILES).values(row))
        return told(row)


def told(row: Any) -> dict[str, Any]:
    """A file as clients see it."""
    return {
        "id": row["id"], "object": "file", "bytes": row["bytes"], "created_at": row["created_ns"] // 10**9,
        "filename": row["filename"], "purpose": row["purpose"], "status": "processed",
    }  # fmt: skip


async def find(store: Store, owner: str, id: str) -> dict[str, Any] | None:
    """One of this owner's files."""
    async with store.begin() as connection:
        rows = await connection.execute(select(FILES).where(FILES.c.id == id, FILES.c.owner == owner))
        row = rows.mappings().first()
    return None if row is None else told(row)


async def listed(store: Store, owner: str, wanted: Page, purpose: str | None) -> dict[str, Any]:
    """The owner's files, the newest first."""
    asked = select(FILES).where(FILES.c.owner == owner)
    if purpose is not None:
        asked = asked.where(FILES.c.purpose == purpose)
    return await page(store, FILES, asked, wanted, told)


async def remove(store: Store, owner: str, id: str) -> bool:
    """False if there was no such file."""
    async with store.begin() as connection:
        gone = await connection.execute(delete(FILES).where(FILES.c.id == id, FILES.c.owner == owner))
        if gone.rowcount:
            await connection.execute(delete(PARTS).where(PARTS.c.file == id))
    return bool(gone.rowcount)


class DeletedError(Exception):
    """A file was deleted while it was read."""


async def content(store: Store, file: dict[str, Any]) -> AsyncIterator[bytes]:
    """A file's parts, each read when it is wanted. DeletedError where they end before it does."""
    part, left = 0, file["bytes"]
    while left > 0:
        async with store.begin() as connection:
            asked = select(PARTS.c.data).where(PARTS.c.file == file["id"], PARTS.c.part == part)
            data = (await connection.execute(asked)).scalar()
        if data is None:
            raise DeletedError
        yield bytes(data)
        part, left = part + 1, left - len(data)


async def copied(store: Store, file: dict[str, Any]) -> IO[bytes]:
    """All of it, for who takes longer to read than it may be there. DeletedError where it was not there to the end."""
    copy = SpooledTemporaryFile(PART_BYTES)  # noqa: SIM115  # whoever gets it closes it
    try:
        async for data in content(store, file):
            await asyncio.to_thread(copy.write, data)
        await asyncio.to_thread(copy.seek, 0)
    except BaseException:
        copy.close()
        raise
    return copy


async def lines(store: Store, file: dict[str, Any], limit_bytes: int) -> AsyncIterator[bytes]:
    """A file's lines. One that is longer than the limit comes cut off after it, and is the last. DeletedError, as
    above."""
    rest = b""
    async for data in content(store, file):
        *whole, rest = (rest + data).split(b"\n")
        for line in whole:
            yield line
        if len(rest) > limit_bytes:
            break
    if rest:
        yield rest
