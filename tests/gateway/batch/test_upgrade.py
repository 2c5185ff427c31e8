"""A database of batches that Headway 0.2.0 has written.

batches-0.2.0.sql is the dump of that of a gateway that was killed: one batch was completed and one was running.
"""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

pytest.importorskip("aiosqlite")

from headway.gateway.batch import queue
from headway.gateway.batch.files import list_files
from headway.gateway.batch.objects import Page
from headway.gateway.batch.store import TABLES, BatchStore
from released_tables import columns_now, released_columns

DUMP = (Path(__file__).parent / "batches-0.2.0.sql").read_text()


def test_batches_of_0_2_0_are_served_and_go_on(tmp_path: Path) -> None:
    path = tmp_path / "batches.sqlite"
    with closing(sqlite3.connect(path)) as old:
        old.executescript(DUMP)

    async def run() -> None:
        store = BatchStore(str(path))
        await store.open()
        try:
            running, done = (await queue.list_batches(store, "", Page(None, 10))).data
            assert (done.status, done.metadata, done.request_counts.completed) == ("completed", {"night": "short"}, 2)
            assert (running.status, running.metadata) == ("in_progress", {"night": "long"})
            files = (await list_files(store, "", Page(None, 10), None)).data
            assert {each.purpose for each in files} == {"batch", "batch_output"} and len(files) == 3
            lines = await queue.open_lines(store, running.id, 0, 10)
            assert [each.custom_id for each in lines] == ["line-0", "line-1"]
        finally:
            await store.close()

    asyncio.run(run())


def test_the_tables_are_those_of_0_2_0(tmp_path: Path) -> None:
    """A change of them needs a migration: `create_all` leaves tables that exist as they are."""
    assert columns_now(TABLES, tmp_path) == released_columns(DUMP)
