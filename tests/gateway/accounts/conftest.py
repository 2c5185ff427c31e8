"""Databases for keys: an SQLite file, and a PostgreSQL server if one is installed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import postgres


@pytest.fixture(scope="module")
def server() -> Iterator[postgres.Server]:
    if postgres.missing():
        pytest.skip(postgres.missing())
    pytest.importorskip("asyncpg")
    with postgres.server() as made:
        yield made


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def location(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where a database is, which all tests of a module share."""
    if request.param == "postgres":
        return str(request.getfixturevalue("server").url)
    return str(tmp_path_factory.mktemp("keys") / "keys.sqlite")


@pytest.fixture
def file(tmp_path: Path) -> str:
    return str(tmp_path / "keys.sqlite")
