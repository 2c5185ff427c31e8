"""Stores of keys: an SQLite file, and servers of PostgreSQL and of Valkey if they are installed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import postgres
import valkey_server
from keys import Place, hidden


@pytest.fixture(scope="module")
def server() -> Iterator[postgres.Server]:
    if postgres.missing():
        pytest.skip(postgres.missing())
    pytest.importorskip("asyncpg")
    with postgres.server() as made:
        yield made


@pytest.fixture(params=["sqlite", "postgres", "valkey"])
def location(request: pytest.FixtureRequest, file: str) -> str:
    """Where a store is: an empty one, but for PostgreSQL's, which all tests of a module share."""
    if request.param == "postgres":
        return str(request.getfixturevalue("server").url)
    if request.param == "valkey":
        return str(request.getfixturevalue("valkey").new())
    return file


@pytest.fixture
def file(tmp_path: Path) -> str:
    return str(tmp_path / "keys.sqlite")


@pytest.fixture(params=["sqlite", "valkey"])
def place(request: pytest.FixtureRequest, file: str) -> Place:
    if request.param == "sqlite":
        return Place(file, lambda: hidden(file))
    server: valkey_server.Server = request.getfixturevalue("valkey")
    return Place(server.new(), server.stopped)
