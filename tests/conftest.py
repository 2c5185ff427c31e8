"""What all tests share: the same examples on every machine, however slow, and others for HEADWAY_FUZZ_EXAMPLES."""

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from scripted import Script

settings.register_profile("same", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
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


@cache  # thousands of tests are in a few hundred files
def _is_fast(path: Path) -> bool:
    return any(folder in (path, *path.parents) for folder in FAST)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Whether to skip the import of a file whose tests are all deselected."""
    return (
        True
        if config.option.markexpr == "not slow" and collection_path.is_file() and not _is_fast(collection_path)
        else None
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not _is_fast(item.path):
            item.add_marker("slow")


@pytest.fixture(scope="module")
def script() -> Iterator[Script]:
    """An engine that says what it is told to."""
    made = Script()
    yield made
    made.close()
