"""Keys, teams and their use in a database: an SQLite file, or PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import date
from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    Float,
    Integer,
    MetaData,
    RowMapping,
    Table,
    Text,
    func,
    insert,
    select,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from headway.core.errors import HeadwayError, unknown
from headway.gateway.accounts.store import AccountStore, Spent, StoredKey, Use, stamped
from headway.gateway.database import Database
from headway.limits.budgets import Budget

TABLES = MetaData()
_BUDGET = ("budget_tokens", "budget_usd", "period")


def _budget_columns() -> list[Column[Any]]:
    return [Column("budget_tokens", BigInteger), Column("budget_usd", Float), Column("period", Text, nullable=False)]


TEAMS = Table("headway_teams", TABLES, Column("name", Text, primary_key=True), *_budget_columns())
_KEY_COLUMNS: list[Column[Any]] = [
    Column("sha256", Text, primary_key=True),
    Column("name", Text, nullable=False),
    Column("team", Text, nullable=False),
    Column("weight", Float, nullable=False),
    Column("tier", Integer, nullable=False),
    Column("requests_per_minute", Float),
    Column("tokens_per_minute", Float),
    Column("expires", Text),
    *_budget_columns(),
    Column("created_ns", BigInteger, nullable=False),
    Column("revoked_ns", BigInteger),
]
KEYS = Table("headway_keys", TABLES, *_KEY_COLUMNS)
_USAGE_COLUMNS: list[Column[Any]] = [
    Column("sha256", Text, primary_key=True),
    Column("team", Text, primary_key=True),
    Column("day", Text, primary_key=True),
    Column("model", Text, primary_key=True),
    Column("requests", BigInteger, nullable=False),
    Column("input_tokens", BigInteger, nullable=False),
    Column("output_tokens", BigInteger, nullable=False),
    Column("usd", Float, nullable=False),
]
USAGE = Table("headway_usage", TABLES, *_USAGE_COLUMNS)
CHANGES = Table(
    "headway_key_changes", TABLES, Column("one", Integer, primary_key=True), Column("num", BigInteger, nullable=False)
)
"""One row: the number of changes of keys and teams."""


class SqlAccountStore(Database, AccountStore):
    """Keys, teams and their spending in one SQL database."""

    def __init__(self, location: str) -> None:
        super().__init__(location, TABLES)

    # Keys and teams.

    async def num_changes(self) -> int:
        async with self.begin() as connection:
            return (await connection.execute(select(CHANGES.c.num))).scalar() or 0

    async def keys(self, with_revoked: bool = False) -> list[StoredKey]:
        query = select(KEYS).order_by(KEYS.c.created_ns)
        if not with_revoked:
            query = query.where(KEYS.c.revoked_ns.is_(None))
        async with self.begin() as connection:
            return [_stored_key(row) for row in (await connection.execute(query)).mappings()]

    async def teams(self) -> dict[str, Budget]:
        async with self.begin() as connection:
            rows = (await connection.execute(select(TEAMS).order_by(TEAMS.c.name))).mappings()
            return {row["name"]: _budget(row) for row in rows}

    async def add_key(self, key: StoredKey) -> None:
        async with self.begin() as connection:
            await _check_team(connection, key.team)
            found = (await connection.execute(select(KEYS.c.sha256).where(KEYS.c.sha256 == key.sha256))).first()
            if found is not None:
                raise HeadwayError(f"there is a key {key.id} already")
            await connection.execute(insert(KEYS).values(_row(key)))
            await self._count_change(connection)

    async def change_key(self, key: StoredKey) -> None:
        async with self.begin() as connection:
            await _check_team(connection, key.team)
            await connection.execute(update(KEYS).where(KEYS.c.sha256 == key.sha256).values(_row(key)))
            await self._count_change(connection)

    async def replace_key(self, old: StoredKey, new: StoredKey) -> None:
        async with self.begin() as connection:
            await connection.execute(update(KEYS).where(KEYS.c.sha256 == old.sha256).values(_row(old)))
            await connection.execute(insert(KEYS).values(_row(new)))
            await self._count_change(connection)

    async def set_team(self, name: str, budget: Budget) -> None:
        values = {"budget_tokens": budget.tokens, "budget_usd": budget.usd, "period": budget.period}
        async with self.begin() as connection:
            statement = self._insert(TEAMS).values(name=name, **values)
            await connection.execute(statement.on_conflict_do_update(index_elements=["name"], set_=values))
            await self._count_change(connection)

    async def _count_change(self, connection: AsyncConnection) -> None:
        statement = self._insert(CHANGES).values(one=1, num=1)
        change = {"num": CHANGES.c.num + 1}
        await connection.execute(statement.on_conflict_do_update(index_elements=["one"], set_=change))

    def _insert(self, table: Table) -> Any:
        """An insertion that can be turned into an update."""
        return postgresql.insert(table) if self.path is None else sqlite.insert(table)

    # Use.

    async def exchange(self, uses: Sequence[Use], today: str) -> tuple[Spent, Spent]:
        async with self.begin() as connection:
            for use in sorted(uses, key=lambda use: (use.sha256, use.team, use.day, use.model)):  # avoids deadlocks
                statement = self._insert(USAGE).values({name: getattr(use, name) for name in use.__struct_fields__})
                added = ("requests", "input_tokens", "output_tokens", "usd")
                sums = {name: USAGE.c[name] + getattr(use, name) for name in added}
                await connection.execute(
                    statement.on_conflict_do_update(index_elements=["sha256", "team", "day", "model"], set_=sums)
                )
            return await _spent(connection, "sha256", today, None), await _spent(connection, "team", today, None)

    async def spent(self, since: str, before: str) -> tuple[Spent, Spent]:
        async with self.begin() as connection:
            by_key = await _spent(connection, "sha256", since, before)
            return by_key, await _spent(connection, "team", since, before)

    async def report(self, by: Iterable[str], since: str, until: str) -> list[dict[str, Any]]:
        names = {"key": USAGE.c.sha256, "team": USAGE.c.team, "model": USAGE.c.model, "day": USAGE.c.day}
        columns = [names[name].label(name) for name in by]
        totals = [func.sum(USAGE.c[name]).label(name) for name in ("requests", "input_tokens", "output_tokens", "usd")]
        query = select(*columns, *totals).where(USAGE.c.day >= since, USAGE.c.day <= until)
        if columns:
            query = query.group_by(*columns).order_by(*columns)
        async with self.begin() as connection:
            rows = [dict(row) for row in (await connection.execute(query)).mappings()]
        whole = ("requests", "input_tokens", "output_tokens")
        return [row | {name: int(row[name] or 0) for name in whole} | {"usd": float(row["usd"] or 0)} for row in rows]


async def _check_team(connection: AsyncConnection, team: str) -> None:
    names = [row.name for row in await connection.execute(select(TEAMS.c.name))]
    if team and team not in names:
        raise unknown("team", team, names)


async def _spent(connection: AsyncConnection, by: str, since: str, before: str | None) -> Spent:
    column = USAGE.c[by]
    query = select(column, func.sum(USAGE.c.input_tokens + USAGE.c.output_tokens), func.sum(USAGE.c.usd))
    query = query.where(USAGE.c.day >= since).group_by(column)
    if before is not None:
        query = query.where(USAGE.c.day < before)
    return {row[0]: (int(row[1]), float(row[2])) for row in await connection.execute(query)}


def _budget(row: RowMapping) -> Budget:
    return Budget(row["budget_tokens"], row["budget_usd"], row["period"])


def _row(key: StoredKey) -> dict[str, Any]:
    names = [column.name for column in KEYS.c if column.name not in _BUDGET]
    key = stamped(key)
    expires = None if key.expires is None else key.expires.isoformat()
    return {name: getattr(key, name) for name in names} | {
        "expires": expires,
        "budget_tokens": key.budget.tokens,
        "budget_usd": key.budget.usd,
        "period": key.budget.period,
    }


def _stored_key(row: RowMapping) -> StoredKey:
    names = [name for name in StoredKey.__struct_fields__ if name not in ("budget", "expires")]
    expires = None if row["expires"] is None else date.fromisoformat(row["expires"])
    return StoredKey(**{name: row[name] for name in names}, budget=_budget(row), expires=expires)
