"""The emulated engine behind the gateways of these tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import serving


@pytest.fixture(scope="module")
def engine() -> Iterator[serving.Process]:
    made = serving.emulator("--speed", "4")
    with serving.closing(made):
        yield made
