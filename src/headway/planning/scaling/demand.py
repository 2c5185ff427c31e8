"""Converts recorded demand into a scenario's arrivals: from a CSV of rates, a Prometheus range query, or records."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Mapping
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import msgspec

from headway.core.errors import HeadwayError

TIMEOUT_S = 30.0
UNEVEN = 0.01
"""Largest relative difference of a step from the first step; a larger difference is an error."""
RATE_COLUMNS = ("rate", "rps", "requests_per_s", "requests")
MOST_STEPS = 200_000


def with_demand(document: Mapping[str, Any], source: str, per_s: float, past_hours: float = 0.0) -> dict[str, Any]:
    """The document with the arrivals of a source, whose values are per `per_s` seconds.

    Request lengths stay the scenario's own. Records of `headway serve` (a folder, or a Parquet file) replace the whole
    workload; the run begins after their first `past_hours`. Raises HeadwayError if the source cannot be read.
    """
    workload = dict(document.get("workload") or {})
    path = Path(source)
    if not _is_url(source) and (path.is_dir() or path.suffix == ".parquet"):
        trace: dict[str, Any] = {"path": str(path.absolute())}
        return {**document, "workload": {"trace": trace | ({"from_s": 3600.0 * past_hours} if past_hours else {})}}
    if "trace" in workload or "demand" in workload or "builtin" in workload:
        raise HeadwayError(
            f"{source}: the scenario's workload has requests of its own; expected one with prompt_tokens and"
            " output_tokens, of which the file gives the rates"
        )
    step_s, values = _rates(source)
    if not any(values):
        raise HeadwayError(f"{source}: all rates are 0")
    for key in ("num_requests", "duration_s", "arrivals"):
        workload.pop(key, None)
    curve = {"kind": "curve", "step_s": step_s, "rates": [value / per_s for value in values]}
    return {**document, "workload": {**workload, "arrivals": curve, "duration_s": step_s * len(values)}}


def _is_url(source: str) -> bool:
    return source.startswith(("http://", "https://"))


def _rates(source: str) -> tuple[float, list[float]]:
    """The step in seconds, and the values step by step."""
    text = read_bytes(source)
    if text.lstrip()[:1] == b"{":
        times, values = prometheus_series(text, source)
    else:
        times, values = csv_series(text.decode("utf-8-sig", "replace"), source)
    if len(times) < 2:
        raise HeadwayError(f"{source}: {len(times)} values; expected at least two, whose distance is the step")
    step_s = times[1] - times[0]
    for i, (before, after) in enumerate(pairwise(times)):
        if not (step_s > 0 and abs(after - before - step_s) <= UNEVEN * step_s):
            raise HeadwayError(
                f"{source}: value {i + 2} is {after - before:g} s after the one before; expected {step_s:g}"
            )
    if len(times) > MOST_STEPS:
        raise HeadwayError(f"{source}: {len(times):,} values; expected {MOST_STEPS:,} at most")
    return step_s, values


def read_bytes(source: str) -> bytes:
    """The content of a file or an address. Raises HeadwayError if it cannot be read."""
    try:
        if _is_url(source):
            with urlopen(source, timeout=TIMEOUT_S) as answer:
                return bytes(answer.read())
        path = Path(source)
        content = path.read_bytes()
        return gzip.decompress(content) if path.suffix == ".gz" else content
    except (OSError, URLError) as error:
        reason = getattr(error, "strerror", None) or getattr(error, "reason", None) or error
        raise HeadwayError(f"{source}: {reason}") from None


class PrometheusSeries(msgspec.Struct):
    """One series of a range query's answer."""

    values: list[tuple[float, str]]
    """(time in seconds since the epoch, value)."""
    metric: dict[str, str] = {}
    """Labels of the series."""


class _Matrix(msgspec.Struct, rename="camel"):
    result_type: str
    result: list[PrometheusSeries]


class _Answer(msgspec.Struct):
    status: str
    data: _Matrix | None = None
    error: str = ""


def prometheus_series(text: bytes, source: str) -> tuple[list[float], list[float]]:
    """Times and values of the answer to `/api/v1/query_range`, summed over its series.

    A missing value of one series counts as 0. At a time without any value, the previous value is used.
    """
    sums: dict[float, float] = {}
    for series in range_query(text, source):
        for at_s, value in series.values:
            sums[at_s] = sums.get(at_s, 0.0) + rate_of(value, at_s, source)
    times = sorted(sums)
    steps = [after - before for before, after in pairwise(times)]
    if not steps:
        return times, [sums[at_s] for at_s in times]
    step_s = min(steps)
    num = round((times[-1] - times[0]) / step_s) + 1
    if num > MOST_STEPS:
        raise HeadwayError(f"{source}: {num:,} steps of {step_s:g} s; expected {MOST_STEPS:,} at most")
    values = {round((at_s - times[0]) / step_s): value for at_s, value in sums.items()}
    filled: list[float] = []
    for i in range(num):
        filled.append(values.get(i, filled[-1] if filled else 0.0))
    return [times[0] + i * step_s for i in range(num)], filled


def range_query(text: bytes, source: str) -> list[PrometheusSeries]:
    """The series in an answer to `/api/v1/query_range`. Raises HeadwayError for another answer."""
    try:
        answer = msgspec.json.decode(text, type=_Answer)
    except msgspec.DecodeError as error:
        raise HeadwayError(f"{source}: not the answer of a Prometheus range query: {error}") from None
    if answer.status != "success" or answer.data is None:
        raise HeadwayError(f"{source}: Prometheus answered {answer.status}: {answer.error or 'no data'}")
    if answer.data.result_type != "matrix":
        raise HeadwayError(f"{source}: a result of type {answer.data.result_type}; expected matrix, of query_range")
    return answer.data.result


def rate_of(value: str, at_s: float, source: str) -> float:
    """A value of a series. Raises HeadwayError if it is not a nonnegative number."""
    number = _number(value)
    if number is None:
        raise HeadwayError(f"{source}: {value!r} at {at_s:g}; expected a number from 0")
    return number


def csv_series(text: str, source: str) -> tuple[list[float], list[float]]:
    """Times and values of a CSV with a column `time` (seconds, or a date and time) and a column of rates."""
    rows = list(csv.reader(text.splitlines()))
    heads = [head.strip().lower() for head in rows[0]] if rows else []
    if "time" not in heads:
        raise HeadwayError(
            f"{source}:1: expected a column `time` beside the rates; found {', '.join(heads) or 'nothing'}"
        )
    at = heads.index("time")
    others = [i for i in range(len(heads)) if i != at]
    chosen = [i for i in others if heads[i] in RATE_COLUMNS] or others
    if len(chosen) != 1:
        raise HeadwayError(f"{source}:1: expected one column of rates, such as `rate`; found {', '.join(heads)}")
    times, values = [], []
    for line, row in enumerate(rows[1:], 2):
        if not row:
            continue
        if len(row) != len(heads):
            raise HeadwayError(f"{source}:{line}: {len(row)} columns; expected {len(heads)}")
        number, at_s = _number(row[chosen[0]]), _time_s(row[at])
        if at_s is None:
            raise HeadwayError(f"{source}:{line}: time: {row[at]!r}; expected seconds, or as in 2026-01-31T09:00:00")
        if number is None:
            raise HeadwayError(f"{source}:{line}: {heads[chosen[0]]}: {row[chosen[0]]!r}; expected a number from 0")
        times.append(at_s)
        values.append(number)
    return times, values


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 <= value < float("inf") else None


def _time_s(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        pass
    try:
        return datetime.fromisoformat(text.strip()).timestamp()
    except ValueError:
        return None
