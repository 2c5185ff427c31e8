"""Capacities of small grids, found in short runs."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="package", autouse=True)
def _short_runs() -> Iterator[None]:
    """Capacities within a tenth are enough for what is tested with them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headway_papers.arena.capacity.MOST_REQUESTS", 2_000)
        patch.setattr("headway_papers.arena.capacity.PRECISION", 0.1)
        yield
