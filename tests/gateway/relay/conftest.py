"""An emulated engine that outlives the others of a test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import serving


@pytest.fixture(scope="module")
def survivor() -> Iterator[serving.Process]:
    made = serving.slow_emulator()
    with serving.closing(made):
        yield made
