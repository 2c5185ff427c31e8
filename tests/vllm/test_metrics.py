"""What an engine says of itself on `/metrics`, with stand-ins for vLLM's loggers and for the client of Prometheus."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from headway.policies import resolve
from headway.vllm.counts import BLOCKS_DEMANDED, BLOCKS_TOTAL, BLOCKS_USED, FAILURES, TIER

PAGE: dict[tuple[str, ...], float] = {}
COUNTS = {FAILURES: 0, BLOCKS_USED: 7, BLOCKS_TOTAL: 99, BLOCKS_DEMANDED: 3, f"{TIER}/0": 2, f"{TIER}/4": 0}


class Gauge:
    """Writes its samples on `PAGE`."""

    def __init__(self, name: str, text: str, labels: list[str]) -> None:
        self._name = name

    def labels(self, *values: object) -> Any:
        key = (self._name, *map(str, values))
        return SimpleNamespace(set=lambda value: PAGE.__setitem__(key, value))

    def remove(self, *values: object) -> None:
        del PAGE[self._name, *map(str, values)]


@pytest.fixture
def logger(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Makes the logger of an engine, by the name of its scheduler's class and its ordering."""
    PAGE.clear()
    names: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.v1": {},
        "vllm.v1.metrics": {},
        "vllm.v1.metrics.loggers": {"AggregateStatLoggerBase": object},
        "prometheus_client": {"Gauge": Gauge, "REGISTRY": SimpleNamespace(_collector_to_names={})},
    }
    for name, contents in names.items():
        module = ModuleType(name)
        module.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "headway.vllm.metrics", raising=False)
    from headway.vllm.metrics import StatLogger

    def made(scheduler: str, ordering: Any) -> Any:
        config = SimpleNamespace(
            scheduler_config=SimpleNamespace(scheduler_cls=scheduler),
            additional_config={"headway_ordering": ordering},
        )
        return StatLogger(config, [0])

    return made


def record(logger: Any, **changes: int) -> None:
    logger.record(SimpleNamespace(num_kv_fetch_reqs_by_stage=COUNTS | changes), None)


def test_counts_have_stable_names_and_a_failure_shows_fcfs(logger: Callable[..., Any]) -> None:
    one = logger("headway.vllm.Scheduler", "pascal")
    one.log_engine_initialized()
    assert PAGE == {("headway:ordering_info", "0", "pascal"): 1}
    record(one)
    assert PAGE == {
        ("headway:ordering_info", "0", "pascal"): 1,
        ("headway:ordering_failures", "0"): 0,
        ("headway:kv_blocks_used", "0"): 7,
        ("headway:kv_blocks_total", "0"): 99,
        ("headway:kv_blocks_demanded", "0"): 3,
        ("headway:requests", "0", "0"): 2,
        ("headway:requests", "0", "4"): 0,
    }
    record(one, **{FAILURES: 1})
    assert {key: value for key, value in PAGE.items() if key[0] == "headway:ordering_info"} == {
        ("headway:ordering_info", "0", "fcfs"): 1
    }


def test_an_ordering_has_one_name_whatever_the_order_of_its_arguments(logger: Callable[..., Any]) -> None:
    """A gateway asks engines for the name that its own file gives."""
    arguments = {"quantum_tokens": 30, "demotion_tokens": 400}
    logger("headway.vllm.Scheduler", {"name": "pascal", **arguments}).log_engine_initialized()
    expected = resolve.identity(resolve.ordering({"name": "pascal", **dict(sorted(arguments.items()))}))
    assert list(PAGE) == [("headway:ordering_info", "0", expected)]


@pytest.mark.parametrize("scheduler", ["vllm.v1.core.sched.async_scheduler.AsyncScheduler", None])
def test_engines_with_another_scheduler_say_nothing(scheduler: str | None, logger: Callable[..., Any]) -> None:
    """vLLM 0.25 names no class where it runs its own scheduler, and loads this plug-in nevertheless."""
    other = logger(scheduler, "unknown")
    other.log_engine_initialized()
    record(other)
    assert not PAGE
