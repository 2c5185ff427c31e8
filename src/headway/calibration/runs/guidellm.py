"""Reports of guidellm, JSON or YAML: `benchmarks` with `metrics`, and optional `requests`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from headway.calibration.runs.run import (
    MeasuredRun,
    Object,
    RequestRows,
    latencies_s,
    number,
    objects,
    run_of,
    settings_in,
)
from headway.core.errors import HeadwayError

METRICS = (
    "prompt_token_count",
    "output_token_count",
    "request_latency",
    "time_to_first_token_ms",
    "requests_per_second",
)
"""Required metrics, each with `successful: {mean: ...}`."""
KEYS = {"ttft": ("time_to_first_token_ms", 1e3), "e2e": ("request_latency", 1.0)}
"""Metrics, and how many of their units make a second."""
SAME_GAPS = (
    "guidellm's processes draw the same gaps between requests (seen in 0.8.1), so that queues are longer than under "
    "Poisson arrivals, which are assumed, as the report lacks the times of some requests"
)


def is_report(document: Object) -> bool:
    return isinstance(document.get("benchmarks"), list)


def read(document: Object, where: str) -> Iterator[MeasuredRun]:
    """One run for each benchmark. Raises HeadwayError if one lacks required metrics."""
    for i, benchmark in enumerate(document["benchmarks"]):
        at = f"{where}: benchmarks[{i}]"
        yield _read(objects(benchmark, at), document, at)


def _read(benchmark: Object, report: Object, where: str) -> MeasuredRun:
    load, model = _load(benchmark), _model(benchmark, report)
    metrics = objects(benchmark.get("metrics"), f"{where}: metrics")
    if missing := [name for name in METRICS if name not in metrics]:
        raise HeadwayError(f"{where}: metrics: missing {', '.join(missing)}")
    mean = {name: _statistic(value, "mean") for name, value in metrics.items()}
    rows = _rows(benchmark)
    num = objects(_successful(metrics["request_latency"]) or {}, where).get("count")
    # fewer rows are only a sample of the requests
    if rows is not None and (not isinstance(num, int) or len(rows) >= num):
        return run_of(rows, where, model, duration_s=len(rows) / mean["requests_per_second"], **load)
    given = {
        f"{kind}_{name}": _statistic(metrics[key], name) / per_s
        for kind, (key, per_s) in KEYS.items()
        for name in ("mean", "p90", "p99")
    }
    if load["requested_rps"] is not None and not math.isinf(load["burstiness"]):
        load["notes"] = (SAME_GAPS,)
    given["itl_mean"] = mean.get("inter_token_latency_ms", math.nan) / 1e3
    return MeasuredRun(
        where=where,
        model=model,
        num_requests=num if isinstance(num, int) else 0,
        rate_rps=mean["requests_per_second"],
        prompt_tokens=mean["prompt_token_count"],
        output_tokens=mean["output_token_count"],
        latencies_s=latencies_s(given, mean["output_token_count"]),
        **load,
    )


def _successful(value: Any) -> Any:
    """A metric over successful requests only."""
    return value.get("successful", value) if isinstance(value, dict) else None


def _statistic(value: Any, name: str) -> float:
    found = _successful(value)
    if not isinstance(found, dict):
        return math.nan
    return number(found if name == "mean" else found.get("percentiles") or {}, name)


def _load(benchmark: Object) -> dict[str, Any]:
    """The load by the scheduling strategy: streams in a closed loop, or a rate."""
    config = benchmark.get("config") or benchmark.get("args") or {}
    strategy = (config.get("strategy") if isinstance(config, dict) else None) or {}
    kind = strategy.get("type_", "")
    rate = number(strategy, "rate")
    limit = number(strategy, "max_concurrency")
    streams = 1.0 if kind == "synchronous" else number(strategy, "streams") if kind == "concurrent" else limit
    backend = config.get("backend") if isinstance(config, dict) else None
    return {
        "requested_rps": rate if kind in ("constant", "poisson", "async") and rate > 0 else None,
        "burstiness": math.inf if kind == "constant" else 1.0,
        "concurrency": int(streams) if streams >= 1 else None,
        "settings": settings_in(backend) if isinstance(backend, dict) else {},
    }


def _model(benchmark: Object, report: Object) -> str:
    """The model's name, at its place in the various releases of guidellm."""
    places = [
        (benchmark, ("config", "backend", "model")),
        (benchmark, ("worker", "backend_model")),
        (report, ("config", "backend", "model")),
        (report, ("args", "model")),
        (report, ("config", "model")),
    ]
    for start, path in places:
        value: Any = start
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        if isinstance(value, str) and value:
            return value
    return ""


def _rows(benchmark: Object) -> RequestRows | None:
    """The requests that succeeded, if the report has all required fields."""
    requests = benchmark.get("requests")
    found = requests.get("successful") if isinstance(requests, dict) else None
    if not isinstance(found, list) or not found:
        return None
    rows = []
    for each in found:
        if not isinstance(each, dict):
            return None
        start, latency = number(each, "request_start_time"), number(each, "request_latency")
        ttft = number(each, "time_to_first_token_ms") / 1e3
        row = (start, number(each, "prompt_tokens"), number(each, "output_tokens"), ttft, latency)
        if any(map(math.isnan, row)):
            return None
        rows.append((*row, number(each, "cached_tokens")))
    return RequestRows.of(rows)
