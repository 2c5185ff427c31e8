"""What all tests share: the same examples on every machine, others when HEADWAY_FUZZ_EXAMPLES asks for more."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from scripted import Script

settings.register_profile("same", derandomize=True)
if "HEADWAY_FUZZ_EXAMPLES" not in os.environ:
    settings.load_profile("same")


@pytest.fixture(scope="module")
def script() -> Iterator[Script]:
    """An engine that says what it is told to."""
    made = Script()
    yield made
    made.close()
