"""What all tests share: the same examples on every machine, others when HEADWAY_FUZZ_EXAMPLES asks for more."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from scripted import Script

settings.register_profile("same", derandomize=True)
if "HEADWAY_FUZZ_EXAMPLES" not in os.environ:
    settings.load_profile("same")


TESTS = Path(__file__).parent
FAST = tuple(
    TESTS / name
    for name in (
        "catalog", "config", "control", "core", "forecast", "gateway/telemetry",
        "gateway/upstream", "metrics", "perf", "records", "testing", "workload",
    )
)  # fmt: skip
"""Folders whose tests take seconds. All others are marked `slow`: they start servers, or simulate at length."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not any(folder in item.path.parents for folder in FAST):
            item.add_marker("slow")


@pytest.fixture(scope="module")
def script() -> Iterator[Script]:
    """An engine that says what it is told to."""
    made = Script()
    yield made
    made.close()
