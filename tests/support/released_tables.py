"""Tables of a release beside those of today, to see whether a database needs a migration."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from sqlalchemy import MetaData, create_engine

Columns = dict[str, list[tuple[str, str, int, int]]]
"""Of each table: names, types, whether NULL is refused, and places in the primary key."""


def released_columns(dump: str) -> Columns:
    """Of the dump of a database."""
    with closing(sqlite3.connect(":memory:")) as database:
        database.executescript(dump)
        return _columns(database)


def columns_now(tables: MetaData, folder: Path) -> Columns:
    """Of the tables that are created today."""
    path = folder / "now.sqlite"
    engine = create_engine(f"sqlite:///{path}")
    tables.create_all(engine)
    engine.dispose()
    with closing(sqlite3.connect(path)) as database:
        return _columns(database)


def _columns(database: sqlite3.Connection) -> Columns:
    names = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    return {name: [row[1:4] + row[5:] for row in database.execute(f"PRAGMA table_info({name})")] for name in names}
