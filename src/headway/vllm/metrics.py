"""A stat-logger plug-in that publishes the counts of `headway.vllm.Scheduler` on vLLM's `/metrics`.

The scheduler and `/metrics` are in different processes. The scheduler's counts are sent in vLLM's `SchedulerStats`, as
additional entries of the counts of KV fetches by stage. Other readers of these entries look only for vLLM's own stages.
Before vLLM 0.32, which counts no such fetches, they are entries of another map: see `counts.passed_on`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client import REGISTRY, Gauge
from vllm.v1.metrics.loggers import AggregateStatLoggerBase

from headway.policies import resolve
from headway.vllm import settings
from headway.vllm.counts import BLOCKS_DEMANDED, BLOCKS_TOTAL, BLOCKS_USED, FAILURES, TIER, passed_on

_SCHEDULER = "headway.vllm.Scheduler"
_HELP = {
    FAILURES: "Times that the ordering failed; since then requests are ordered by fcfs.",
    BLOCKS_USED: "KV blocks held by requests; idle blocks of the prefix cache are free.",
    BLOCKS_TOTAL: "KV blocks of the engine.",
    BLOCKS_DEMANDED: "KV blocks that the first waiting request needs; 0 = no request waits.",
}


class StatLogger(AggregateStatLoggerBase):  # type: ignore[misc]  # vLLM is not here when types are checked
    """Publishes nothing if vLLM runs another scheduler."""

    def __init__(self, vllm_config: Any, engine_indexes: Sequence[int]) -> None:
        self._name = _ordering(vllm_config)
        self._has_failed: dict[int, bool] = {}
        if not self._name:
            return
        for collector in list(REGISTRY._collector_to_names):  # collectors of an earlier engine in the same process
            if getattr(collector, "_name", "").startswith("headway:"):
                REGISTRY.unregister(collector)
        self._info = Gauge(settings.INFO_METRIC, "The ordering that the scheduler applies.", ["engine", "ordering"])
        self._gauges = {name: Gauge(name, text, ["engine"]) for name, text in _HELP.items()}
        self._tiers = Gauge(TIER, "Requests in the engine, by tier.", ["engine", "tier"])

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        if self._name and scheduler_stats is not None:
            self._publish(passed_on(scheduler_stats), engine_idx)

    def _publish(self, counts: Mapping[str, int], engine: int) -> None:
        if FAILURES not in counts:
            return
        has_failed = counts[FAILURES] > 0
        if self._has_failed.get(engine) is not has_failed:
            self._has_failed[engine] = has_failed
            self._info.labels(engine, "fcfs" if has_failed else self._name).set(1)
            if has_failed:
                self._info.remove(engine, self._name)
        for name, gauge in self._gauges.items():
            gauge.labels(engine).set(counts[name])
        for name, number in counts.items():
            base, _, tier = name.partition("/")
            if base == TIER:
                self._tiers.labels(engine, tier).set(number)

    def log_engine_initialized(self) -> None:
        """Publish at once, because a gateway may ask before the first request."""
        if self._name:
            self._info.labels(0, self._name).set(1)


def _ordering(vllm_config: Any) -> str:
    """The ordering that the engine reports; empty for another scheduler. vLLM 0.25 reports none when it runs its
    own."""
    scheduler = vllm_config.scheduler_config.scheduler_cls
    if scheduler is None:
        return ""
    name = scheduler if isinstance(scheduler, str) else f"{scheduler.__module__}.{scheduler.__qualname__}"
    if name not in (_SCHEDULER, "headway.vllm.scheduler.Scheduler"):
        return ""
    return resolve.identity(settings.read(vllm_config.additional_config, os.environ).ordering)
