"""Stores of peers: servers of PostgreSQL and of Valkey, if they are installed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import postgres


@pytest.fixture(scope="session")
def database() -> Iterator[postgres.Server]:
    if postgres.missing():
        pytest.skip(postgres.missing())
    pytest.importorskip("asyncpg")
    with postgres.server() as made:
        yield made
