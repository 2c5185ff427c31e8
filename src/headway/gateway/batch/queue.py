"""Batches and their lines in the database: what is to be done, and what has been answered."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
from msgspec import Struct
from sqlalchemy import and_, delete, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from headway.gateway.batch.files import Writer
from headway.gateway.batch.pages import Page, page
from headway.gateway.batch.store import ANSWERED, BATCHES, FAILED, LINES, OPEN, Store

_ACTIVE = ("validating", "in_progress", "cancelling")
_PAGE = 200
_WHY = {
    "expired": ("batch_expired", "the completion window ended before this request was answered"),
    "cancelled": ("batch_cancelled", "the batch was cancelled before this request was answered"),
}
_TIMES = (
    "in_progress", "expires", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled",
)  # fmt: skip


class Line(Struct, frozen=True):
    """One request of a batch."""

    batch: str
    line: int
    """Counted from 1."""
    custom_id: str
    body: bytes


class Result(Struct, frozen=True):
    """A line's answer, as the output or error file has it."""

    batch: str
    line: int
    good: bool
    answer: bytes


def told(row: Any) -> dict[str, Any]:
    """A batch as clients see it."""
    decode = msgspec.json.decode
    return {
        "id": row["id"], "object": "batch", "endpoint": row["endpoint"], "status": row["status"],
        "input_file_id": row["input_file_id"], "output_file_id": row["output_file_id"],
        "error_file_id": row["error_file_id"], "completion_window": row["completion_window"],
        "created_at": row["created_ns"] // 10**9, **{f"{what}_at": row[f"{what}_at"] for what in _TIMES},
        "request_counts": {what: row[f"num_{what}"] for what in ("total", "completed", "failed")},
        "metadata": decode(row["metadata"]) if row["metadata"] else None,
        "errors": {"object": "list", "data": decode(row["errors"])} if row["errors"] else None,
    }  # fmt: skip


def told_answer(custom_id: str, status: int, request_id: str, body: bytes) -> bytes:
    """A line of the output or error file."""
    try:
        value: Any = msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        value = body.decode(errors="replace")
    response = {"status_code": status, "request_id": request_id, "body": value}
    made = {"id": _id("batch_req"), "custom_id": custom_id, "response": response, "error": None}
    return msgspec.json.encode(made)


def _id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


# What clients ask for.


async def create(
    store: Store, owner: str, file: str, endpoint: str, window: str, window_s: int, metadata: dict[str, str] | None
) -> dict[str, Any]:
    """A new batch, to be validated."""
    now_ns, id = time.time_ns(), _id("batch")
    row = {
        "id": id, "owner": owner, "created_ns": now_ns, "status": "validating", "endpoint": endpoint,
        "input_file_id": file, "completion_window": window, "expires_at": now_ns // 10**9 + window_s,
        "metadata": None if metadata is None else msgspec.json.encode(metadata).decode(),
    }  # fmt: skip
    async with store.begin() as connection:
        await connection.execute(insert(BATCHES).values(row))
    found = await find(store, owner, id)
    assert found is not None
    return found


async def find(store: Store, owner: str, id: str) -> dict[str, Any] | None:
    """One of this owner's batches."""
    async with store.begin() as connection:
        rows = await connection.execute(select(BATCHES).where(BATCHES.c.id == id, BATCHES.c.owner == owner))
        row = rows.mappings().first()
    return None if row is None else told(row)


async def listed(store: Store, owner: str, wanted: Page) -> dict[str, Any]:
    """The owner's batches, the newest first."""
    return await page(store, BATCHES, select(BATCHES).where(BATCHES.c.owner == owner), wanted, told)


async def cancel(store: Store, owner: str, id: str) -> None:
    """No more of its lines are begun. One that has ended stays as it is."""
    async with store.begin() as connection:
        await connection.execute(
            update(BATCHES)
            .where(BATCHES.c.id == id, BATCHES.c.owner == owner, BATCHES.c.status.in_(("validating", "in_progress")))
            .values(status="cancelling", cancelling_at=int(time.time()))
        )


# What the runner does.


async def active(store: Store) -> list[dict[str, Any]]:
    """Batches that have not ended, those that have the least time first."""
    async with store.begin() as connection:
        asked = select(BATCHES).where(BATCHES.c.status.in_(_ACTIVE))
        asked = asked.order_by(BATCHES.c.expires_at, BATCHES.c.created_ns)
        return [dict(row) for row in (await connection.execute(asked)).mappings()]


async def empty(store: Store, batch: str) -> None:
    """Forget lines: of a validation that was cut short."""
    async with store.begin() as connection:
        await connection.execute(delete(LINES).where(LINES.c.batch == batch))


async def add(store: Store, lines: Sequence[Line]) -> None:
    """Lines that are well."""
    rows = [{"batch": e.batch, "line": e.line, "custom_id": e.custom_id, "body": e.body, "status": OPEN} for e in lines]
    async with store.begin() as connection:
        await connection.execute(insert(LINES), rows)


async def begin(store: Store, batch: str, total: int) -> None:
    """All lines are there."""
    await _change(store, batch, "validating", status="in_progress", in_progress_at=int(time.time()), num_total=total)


async def reject(store: Store, batch: str, errors: list[dict[str, Any]]) -> None:
    """The file is no batch."""
    said = msgspec.json.encode(errors).decode()
    await _change(store, batch, "validating", status="failed", failed_at=int(time.time()), errors=said)


async def _change(store: Store, batch: str, before: str, **values: Any) -> None:
    async with store.begin() as connection:
        asked = update(BATCHES).where(BATCHES.c.id == batch, BATCHES.c.status == before)
        await connection.execute(asked.values(values))


async def waiting(store: Store, batch: str, after: int, most: int) -> list[Line]:
    """The next lines that have no answer."""
    async with store.begin() as connection:
        asked = select(LINES.c.batch, LINES.c.line, LINES.c.custom_id, LINES.c.body)
        asked = asked.where(LINES.c.batch == batch, LINES.c.status == OPEN, LINES.c.line > after)
        rows = await connection.execute(asked.order_by(LINES.c.line).limit(most))
        return [Line(row.batch, row.line, row.custom_id, bytes(row.body)) for row in rows]


async def write(store: Store, results: Sequence[Result]) -> None:
    """Keep answers: of each line the first, whoever it was that asked."""
    async with store.begin() as connection:
        for result in results:
            status = ANSWERED if result.good else FAILED
            here = and_(LINES.c.batch == result.batch, LINES.c.line == result.line, LINES.c.status == OPEN)
            kept = await connection.execute(update(LINES).where(here).values(status=status, answer=result.answer))
            if kept.rowcount:
                count = BATCHES.c.num_completed if result.good else BATCHES.c.num_failed
                asked = update(BATCHES).where(BATCHES.c.id == result.batch)
                await connection.execute(asked.values({count: count + 1}))


async def end(store: Store, batch: dict[str, Any], status: str) -> None:
    """Make the files of what was answered and of what was not, and be done; all at once."""
    now = int(time.time())
    id, owner = batch["id"], batch["owner"]
    async with store.begin() as connection:
        here = and_(LINES.c.batch == id, LINES.c.status == OPEN)
        left = await connection.execute(update(LINES).where(here).values(status=FAILED))
        values: dict[str, Any] = {"status": status, f"{status}_at": now, "finalizing_at": now}
        values["num_failed"] = BATCHES.c.num_failed + left.rowcount
        for column, kind, name in (("output_file_id", ANSWERED, "output"), ("error_file_id", FAILED, "error")):
            writer = Writer(connection, owner, f"{id}_{name}.jsonl", "batch_output")
            async for custom_id, answer in _answers(connection, id, kind):
                await writer.write((answer or _unanswered(custom_id, status)) + b"\n")
            if writer.num_bytes:
                values[column] = (await writer.end())["id"]
        asked = update(BATCHES).where(BATCHES.c.id == id, BATCHES.c.status.in_(_ACTIVE))
        if (await connection.execute(asked.values(values))).rowcount:
            await connection.execute(delete(LINES).where(LINES.c.batch == id))
        else:  # another gateway was here first
            await connection.rollback()


async def _answers(connection: AsyncConnection, batch: str, kind: int) -> AsyncIterator[tuple[str, bytes | None]]:
    line = 0
    while True:
        asked = select(LINES.c.line, LINES.c.custom_id, LINES.c.answer)
        asked = asked.where(LINES.c.batch == batch, LINES.c.status == kind, LINES.c.line > line)
        rows = (await connection.execute(asked.order_by(LINES.c.line).limit(_PAGE))).all()
        if not rows:
            return
        for row in rows:
            yield row.custom_id, None if row.answer is None else bytes(row.answer)
        line = rows[-1].line


def _unanswered(custom_id: str, status: str) -> bytes:
    code, message = _WHY[status]
    error = {"code": code, "message": message}
    return msgspec.json.encode({"id": _id("batch_req"), "custom_id": custom_id, "response": None, "error": error})
