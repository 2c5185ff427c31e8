"""Lists, a page at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import Struct
from sqlalchemy import Select, Table, select

from headway.gateway.batch.store import Store


class Page(Struct, frozen=True):
    """Which part of a list a client wants."""

    after: str | None
    """The last one that it has."""
    limit: int


async def page(
    store: Store, table: Table, asked: Select[Any], wanted: Page, told: Callable[[Any], dict[str, Any]]
) -> dict[str, Any]:
    """The newest first, as OpenAI's clients read lists."""
    if wanted.after is not None:
        last = select(table.c.created_ns).where(table.c.id == wanted.after).scalar_subquery()
        asked = asked.where(table.c.created_ns < last)
    asked = asked.order_by(table.c.created_ns.desc()).limit(wanted.limit + 1)
    async with store.begin() as connection:
        rows = [told(row) for row in (await connection.execute(asked)).mappings()]
    data = rows[: wanted.limit]
    return {
        "object": "list", "data": data, "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None, "has_more": len(rows) > wanted.limit,
    }  # fmt: skip
