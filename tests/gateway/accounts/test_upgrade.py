"""The database of keys as Headway 0.3.0 creates it, the first release that has one: keys-0.3.0.sql is its dump."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("sqlalchemy")

from headway.gateway.accounts.sql import TABLES
from released_tables import columns_now, released_columns


def test_the_tables_are_those_of_0_3_0(tmp_path: Path) -> None:
    """A change of them needs a migration: `create_all` leaves tables that exist as they are."""
    dump = (Path(__file__).parent / "keys-0.3.0.sql").read_text()
    assert columns_now(TABLES, tmp_path) == released_columns(dump)
