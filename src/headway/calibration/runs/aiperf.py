"""Exports of AIPerf and of genai-perf, its predecessor: the summary as JSON or CSV, and AIPerf's requests as JSONL.

CSV and JSONL contain no model and no load. AIPerf's summary in the same folder, `profile_export_aiperf.json`, contains
both.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
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

SUMMARY = "profile_export_aiperf.json"
NEEDED = (
    "request_throughput",
    "request_latency",
    "time_to_first_token",
    "output_sequence_length",
    "input_sequence_length",
)
PER_S = {"ns": 1e9, "us": 1e6, "ms": 1e3, "sec": 1.0, "s": 1.0}
"""Number of units in a second."""
CSV_NAMES = {
    "Request Latency": "request_latency",
    "Time To First Token": "time_to_first_token",
    "Time to First Token": "time_to_first_token",
    "Inter Token Latency": "inter_token_latency",
    "Output Sequence Length": "output_sequence_length",
    "Input Sequence Length": "input_sequence_length",
    "Request Throughput": "request_throughput",
    "Request Count": "request_count",
}
"""Metrics of the CSV file, by title."""
CACHED = "usage_prompt_cache_read_tokens"
KINDS = {"ttft": "time_to_first_token", "tpot": "inter_token_latency", "e2e": "request_latency"}
"""AIPerf's inter-token latency is the time per output token of each request."""
DEFAULT_PROMPTS = 100
"""Number of synthetic prompts where neither their number nor that of requests was given (AIPerf 0.13.0)."""


def is_summary(document: Object) -> bool:
    return isinstance(document.get("request_latency"), dict) and "unit" in document["request_latency"]


def is_request(document: Object) -> bool:
    """Whether a line of JSONL is one of AIPerf's requests."""
    return {"metadata", "metrics"} <= document.keys()


def is_csv(header: Sequence[str]) -> bool:
    return list(header[:2]) == ["Metric", "avg"]


def read(document: Object, where: str) -> MeasuredRun:
    """The run of a summary. Raises HeadwayError if required metrics are missing."""
    if missing := [name for name in NEEDED if not isinstance(document.get(name), dict)]:
        streamed = "; were answers streamed?" if "time_to_first_token" in missing else ""
        raise HeadwayError(f"{where}: missing {', '.join(missing)}{streamed}")
    given = {
        f"{kind}_{name}": _seconds(document[key], {"mean": "avg"}.get(name, name), f"{where}: {key}")
        for kind, key in KINDS.items()
        if isinstance(document.get(key), dict)
        for name in ("mean", "p90", "p99")
    }
    output_tokens = number(document["output_sequence_length"], "avg")
    count = number(document.get("request_count") or {}, "avg")
    cached = number(document.get(CACHED) or {}, "avg")
    is_counted = count > 0
    return MeasuredRun(
        where=where,
        model=_model(document),
        num_requests=int(count) if is_counted else 0,
        rate_rps=number(document["request_throughput"], "avg"),
        prompt_tokens=number(document["input_sequence_length"], "avg"),
        output_tokens=output_tokens,
        latencies_s=latencies_s(given, output_tokens),
        cached_tokens=0.0 if math.isnan(cached) else cached,
        notes=_repeats(document, count) if math.isnan(cached) else (),
        **_load(document),
    )


def read_csv(lines: Iterable[str], summary: Object, where: str) -> MeasuredRun:
    """The run of a CSV summary, which has a table of metrics with statistics and a table of single values."""
    document: dict[str, Any] = {key: summary[key] for key in ("input_config",) if key in summary}
    header: list[str] = []
    for row in csv.reader(lines):
        if row[:1] == ["Metric"]:
            header = ["avg" if name == "Value" else name for name in row[1:]]
        elif len(row) > 1 and header:
            title, _, unit = row[0].partition(" (")
            if (key := CSV_NAMES.get(title)) is not None and key not in document:
                document[key] = {"unit": unit.rstrip(")"), **_cells(header, row[1:])}
    return read(document, where)


def _cells(header: Sequence[str], cells: Sequence[str]) -> dict[str, float]:
    found = {}
    for name, cell in zip(header, cells, strict=False):
        try:
            found[name] = float(cell.replace(",", ""))
        except ValueError:
            continue
    return found


def read_requests(entries: Sequence[Object], summary: Object, where: str) -> MeasuredRun:
    """The run that consists of AIPerf's requests, without the warm-up."""
    rows, failed = [], 0
    for i, entry in enumerate(entries):
        about, metrics = objects(entry["metadata"], f"{where}: line {i + 1}: metadata"), entry["metrics"]
        if about.get("benchmark_phase") == "warmup":
            continue
        if entry.get("error") or about.get("was_cancelled"):
            failed += 1
            continue
        row = _row(about, objects(metrics, f"{where}: line {i + 1}: metrics"), f"{where}: line {i + 1}")
        rows.append(row)
    notes: tuple[str, ...] = (f"{failed} requests failed, and are left out",) if failed else ()
    if all(math.isnan(row[-1]) for row in rows):
        notes += _repeats(summary, len(rows))
    return run_of(RequestRows.of(rows), where, _model(summary), notes=notes, **_load(summary))


def _repeats(document: Object, num_requests: float) -> tuple[str, ...]:
    """A note if synthetic prompts were sent several times, to an engine of which the file tells no cached tokens."""
    datasets = _config(document).get("datasets")
    data = datasets[0] if isinstance(datasets, list) and datasets else None
    if not isinstance(data, dict) or data.get("type") != "synthetic":
        return ()
    entries = number(data, "entries")
    num_prompts = int(entries) if entries >= 1 else DEFAULT_PROMPTS
    if not num_requests > num_prompts:
        return ()
    return (
        f"{num_requests:g} requests share {num_prompts} synthetic prompts (--num-dataset-entries), which count as new "
        "ones each time: an engine with a prefix cache has a shorter TTFT",
    )


def _row(about: Object, metrics: Object, where: str) -> tuple[float, ...]:
    values = {}
    for key in ("request_latency", "time_to_first_token", "input_sequence_length", "output_sequence_length"):
        if not isinstance(metrics.get(key), dict):
            streamed = "; were answers streamed?" if key == "time_to_first_token" else ""
            raise HeadwayError(f"{where}: metrics: missing {key}{streamed}")
        values[key] = metrics[key]
    return (
        number(about, "request_start_ns") / 1e9,
        number(values["input_sequence_length"], "value"),
        number(values["output_sequence_length"], "value"),
        _seconds(values["time_to_first_token"], "value", where),
        _seconds(values["request_latency"], "value", where),
        number(metrics.get(CACHED) or {}, "value"),
    )


def _seconds(metric: Object, name: str, where: str) -> float:
    unit = str(metric.get("unit", ""))
    if unit not in PER_S:
        raise HeadwayError(f"{where}: unit {unit!r}; expected {', '.join(PER_S)}")
    return number(metric, name) / PER_S[unit]


def _config(document: Object) -> Mapping[str, Any]:
    config = document.get("input_config")
    return config if isinstance(config, dict) else {}


def _model(document: Object) -> str:
    """The model's name, at its place in the various releases."""
    config = _config(document)
    models = config.get("models")
    if isinstance(models, dict) and models.get("items"):
        return str(models["items"][0].get("name", ""))
    endpoint = config.get("endpoint")
    names = config.get("model_names") or (endpoint.get("model_names") if isinstance(endpoint, dict) else None)
    return str(names[0]) if isinstance(names, list) and names else ""


def _load(document: Object) -> dict[str, Any]:
    """How requests were sent: by phases, `loadgen` or `perf_analyzer.stimulus`, depending on the release."""
    config = _config(document)
    phases = config.get("phases")
    found: dict[str, Any] = {}
    if isinstance(phases, list):
        found = next(
            (one for one in phases if isinstance(one, dict) and one.get("kind", "profiling") == "profiling"), {}
        )
    elif isinstance(config.get("loadgen"), dict):
        found = config["loadgen"]
    elif isinstance(config.get("perf_analyzer"), dict):
        stimulus = config["perf_analyzer"].get("stimulus")
        found = stimulus if isinstance(stimulus, dict) else {}
    rate = next((rate for key in ("rate", "request_rate") if (rate := number(found, key)) > 0), math.nan)
    concurrency = number(found, "concurrency")
    kind = str(found.get("type") or found.get("request_rate_mode") or found.get("arrival_pattern") or "")
    return {
        "requested_rps": None if math.isnan(rate) else rate,
        "burstiness": math.inf if kind.startswith("constant") else 1.0,
        "concurrency": int(concurrency) if concurrency >= 1 else None,
        "settings": settings_in(config),
    }
