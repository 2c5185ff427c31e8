"""Tests of the papers call their commands, which are found where `make` has installed them."""

import pytest

from papers_installed import HAS_PAPERS


@pytest.fixture(scope="session", autouse=True)
def _installed() -> None:
    if not HAS_PAPERS:
        pytest.skip("headway-papers is not installed")
