"""Batches and their lines in the database: open lines and answers."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
from msgspec import Struct
from sqlalchemy import and_, delete, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from headway.gateway.batch.files import FileWriter
from headway.gateway.batch.objects import BatchError, BatchErrorList, BatchList, BatchObject, Page, RequestCounts
from headway.gateway.batch.store import ACTIVE, ANSWERED, BATCHES, FAILED, LINES, OPEN, BatchStore
from headway.gateway.errors import DECODE_ERRORS

_ROWS_PER_READ = 200
_UNANSWERED = {
    "expired": ("batch_expired", "the completion window ended before this request was answered"),
    "cancelled": ("batch_cancelled", "the batch was cancelled before this request was answered"),
}


class ActiveBatch(Struct, frozen=True):
    """A batch that has not ended."""

    id: str
    owner: str
    status: str
    endpoint: str
    input_file_id: str
    expires_at: int
    num_total: int
    num_ended: int


class Line(Struct, frozen=True):
    """One request of a batch."""

    batch: str
    line: int
    """Line number, counted from 1."""
    custom_id: str
    body: bytes


class LineResult(Struct, frozen=True):
    """The entry of a line in the output file, or in the error file if the line failed."""

    batch: str
    line: int
    has_succeeded: bool
    entry: bytes


def encode_entry(custom_id: str, status: int, request_id: str, body: bytes) -> bytes:
    """The entry of an answered line in the output or error file."""
    try:
        value: Any = msgspec.json.decode(body)
    except DECODE_ERRORS:
        value = body.decode(errors="replace")
    response = {"status_code": status, "request_id": request_id, "body": value}
    entry = {"id": _new_id("batch_req"), "custom_id": custom_id, "response": response, "error": None}
    return msgspec.json.encode(entry)


def _unanswered_entry(custom_id: str, status: str) -> bytes:
    code, message = _UNANSWERED[status]
    error = {"code": code, "message": message}
    return msgspec.json.encode({"id": _new_id("batch_req"), "custom_id": custom_id, "response": None, "error": error})


def _new_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


def _batch_object(row: Any) -> BatchObject:
    decode, errors = msgspec.json.decode, row["errors"]
    columns = {name: row[name] for name in BatchObject.__struct_fields__ if name in BATCHES.c}
    return BatchObject(
        **columns
        | {
            "object": "batch",
            "created_at": row["created_ns"] // 10**9,
            "request_counts": RequestCounts(row["num_total"], row["num_completed"], row["num_failed"]),
            "metadata": decode(row["metadata"]) if row["metadata"] else None,
            "errors": BatchErrorList(object="list", data=decode(errors, type=list[BatchError])) if errors else None,
        }
    )


# Methods for clients.


async def create_batch(
    store: BatchStore, owner: str, file: str, endpoint: str, window: str, window_s: int, metadata: dict[str, str] | None
) -> BatchObject:
    """Create a batch. Its file is not validated yet."""
    now_ns, id = time.time_ns(), _new_id("batch")
    row = {
        "id": id,
        "owner": owner,
        "created_ns": now_ns,
        "status": "validating",
        "endpoint": endpoint,
        "input_file_id": file,
        "completion_window": window,
        "expires_at": now_ns // 10**9 + window_s,
        "metadata": None if metadata is None else msgspec.json.encode(metadata).decode(),
    }
    async with store.begin() as connection:
        await connection.execute(insert(BATCHES).values(row))
    batch = await find_batch(store, owner, id)
    assert batch is not None
    return batch


async def find_batch(store: BatchStore, owner: str, id: str) -> BatchObject | None:
    """The batch with this id, if it belongs to this owner."""
    async with store.begin() as connection:
        rows = await connection.execute(select(BATCHES).where(BATCHES.c.id == id, BATCHES.c.owner == owner))
        row = rows.mappings().first()
    return None if row is None else _batch_object(row)


async def list_batches(store: BatchStore, owner: str, page: Page) -> BatchList:
    rows, has_more = await store.page(BATCHES, select(BATCHES).where(BATCHES.c.owner == owner), page)
    return BatchList.of([_batch_object(row) for row in rows], has_more)


async def cancel_batch(store: BatchStore, owner: str, id: str) -> None:
    """Start no more lines of the batch. A batch that has ended does not change."""
    async with store.begin() as connection:
        await connection.execute(
            update(BATCHES)
            .where(BATCHES.c.id == id, BATCHES.c.owner == owner, BATCHES.c.status.in_(("validating", "in_progress")))
            .values(status="cancelling", cancelling_at=int(time.time()))
        )


# Methods for the service that answers the lines.


async def active_batches(store: BatchStore) -> list[ActiveBatch]:
    """Batches that have not ended, in order of their deadlines."""
    num_ended = (BATCHES.c.num_completed + BATCHES.c.num_failed).label("num_ended")
    query = select(BATCHES, num_ended).where(BATCHES.c.status.in_(ACTIVE))
    async with store.begin() as connection:
        rows = await connection.execute(query.order_by(BATCHES.c.expires_at, BATCHES.c.created_ns))
        return [msgspec.convert(row, ActiveBatch, from_attributes=True) for row in rows]


async def delete_lines(store: BatchStore, batch: str) -> None:
    """Delete all lines of a batch, such as those of an interrupted validation."""
    async with store.begin() as connection:
        await connection.execute(delete(LINES).where(LINES.c.batch == batch))


async def add_lines(store: BatchStore, lines: Sequence[Line]) -> None:
    rows = [{"batch": e.batch, "line": e.line, "custom_id": e.custom_id, "body": e.body, "status": OPEN} for e in lines]
    async with store.begin() as connection:
        await connection.execute(insert(LINES), rows)


async def start_batch(store: BatchStore, batch: str, num_total: int) -> None:
    """Change a validated batch, whose lines have all been added, to `in_progress`."""
    now = int(time.time())
    await _change_validating(store, batch, status="in_progress", in_progress_at=now, num_total=num_total)


async def fail_batch(store: BatchStore, batch: str, errors: list[BatchError]) -> None:
    """Change a batch whose file is invalid to `failed`."""
    encoded = msgspec.json.encode(errors).decode()
    await _change_validating(store, batch, status="failed", failed_at=int(time.time()), errors=encoded)


async def _change_validating(store: BatchStore, batch: str, **values: Any) -> None:
    async with store.begin() as connection:
        change = update(BATCHES).where(BATCHES.c.id == batch, BATCHES.c.status == "validating")
        await connection.execute(change.values(values))


async def open_lines(store: BatchStore, batch: str, after: int, max_lines: int) -> list[Line]:
    """The next lines after line number `after` that have no answer."""
    async with store.begin() as connection:
        query = select(LINES.c.batch, LINES.c.line, LINES.c.custom_id, LINES.c.body)
        query = query.where(LINES.c.batch == batch, LINES.c.status == OPEN, LINES.c.line > after)
        rows = await connection.execute(query.order_by(LINES.c.line).limit(max_lines))
        return [Line(row.batch, row.line, row.custom_id, bytes(row.body)) for row in rows]


async def write_results(store: BatchStore, results: Sequence[LineResult]) -> None:
    """Store results. Of several results for one line, the first counts."""
    async with store.begin() as connection:
        for result in results:
            status = ANSWERED if result.has_succeeded else FAILED
            is_open = and_(LINES.c.batch == result.batch, LINES.c.line == result.line, LINES.c.status == OPEN)
            written = await connection.execute(update(LINES).where(is_open).values(status=status, answer=result.entry))
            if written.rowcount:
                count = BATCHES.c.num_completed if result.has_succeeded else BATCHES.c.num_failed
                change = update(BATCHES).where(BATCHES.c.id == result.batch)
                await connection.execute(change.values({count: count + 1}))


async def finish_batch(store: BatchStore, batch: ActiveBatch, status: str) -> None:
    """Write the output and error files and end the batch, in one transaction."""
    now = int(time.time())
    async with store.begin() as connection:
        is_open = and_(LINES.c.batch == batch.id, LINES.c.status == OPEN)
        unanswered = await connection.execute(update(LINES).where(is_open).values(status=FAILED))
        values: dict[str, Any] = {"status": status, f"{status}_at": now, "finalizing_at": now}
        values["num_failed"] = BATCHES.c.num_failed + unanswered.rowcount
        for column, line_status, name in (("output_file_id", ANSWERED, "output"), ("error_file_id", FAILED, "error")):
            writer = FileWriter(connection, batch.owner, f"{batch.id}_{name}.jsonl", "batch_output")
            async for custom_id, entry in _entries(connection, batch.id, line_status):
                await writer.write((entry or _unanswered_entry(custom_id, status)) + b"\n")
            if writer.num_bytes:
                values[column] = (await writer.close()).id
        change = update(BATCHES).where(BATCHES.c.id == batch.id, BATCHES.c.status.in_(ACTIVE))
        if (await connection.execute(change.values(values))).rowcount:
            await connection.execute(delete(LINES).where(LINES.c.batch == batch.id))
        else:  # another gateway has already ended the batch
            await connection.rollback()


async def _entries(
    connection: AsyncConnection, batch: str, line_status: int
) -> AsyncIterator[tuple[str, bytes | None]]:
    line = 0
    while True:
        query = select(LINES.c.line, LINES.c.custom_id, LINES.c.answer)
        query = query.where(LINES.c.batch == batch, LINES.c.status == line_status, LINES.c.line > line)
        rows = (await connection.execute(query.order_by(LINES.c.line).limit(_ROWS_PER_READ))).all()
        if not rows:
            return
        for row in rows:
            yield row.custom_id, None if row.answer is None else bytes(row.answer)
        line = rows[-1].line
