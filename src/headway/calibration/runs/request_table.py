"""A table with a row for each request, as written by a user's own client: CSV, or one JSON object per line."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from headway.calibration.runs.run import MeasuredRun, RequestRows, latencies_s, run_of
from headway.core.errors import HeadwayError

STARTS = ("sent_s", "start_s", "arrival_s")
"""Names of the column with a request's send time, on any clock."""
LENGTHS = ("prompt_tokens", "output_tokens")
LATENCIES = ("ttft", "e2e")
"""Latency columns, each with the unit `_s` or `_ms`. Both begin when the request was sent."""
EXPECTED = "prompt_tokens, output_tokens, ttft_s or ttft_ms, e2e_s or e2e_ms"
SERIAL = "serial"
Cells = Mapping[str, Any]


def is_table(columns: Iterable[str]) -> bool:
    """Whether these are the columns of a request table."""
    names = set(columns)
    return names.issuperset(LENGTHS) and all({f"{kind}_s", f"{kind}_ms"} & names for kind in LATENCIES)


def read_csv(lines: Iterable[str], where: str) -> Iterator[MeasuredRun]:
    reader = csv.DictReader(lines, skipinitialspace=True)
    yield from read(((reader.line_num, row) for row in reader), where)


def read_json(entries: Iterable[Cells], where: str) -> Iterator[MeasuredRun]:
    yield from read(enumerate(entries, 1), where)


def read(rows: Iterable[tuple[int, Cells]], where: str) -> Iterator[MeasuredRun]:
    """One run for each `model` and `phase`, if the table has such columns.

    A request without `ttft` has failed. A request with a text in `first_use` shows an effect that happens once after a
    start. Both are left out and counted. If most requests of a run are of the second kind, the whole run is left out.
    `kind` serial: one request at a time. `temperature` 0 everywhere: greedy. Raises HeadwayError for a non-numeric
    cell, with its line.
    """
    parts: dict[tuple[str, str], list[tuple[int, Cells]]] = {}
    for line, cells in rows:
        parts.setdefault((str(cells.get("model") or ""), str(cells.get("phase") or "")), []).append((line, cells))
    for (model, phase), part in parts.items():
        name = " ".join(word for word in (model if len({key[0] for key in parts}) > 1 else "", phase) if word)
        yield _run(part, f"{where}: {name}" if name else where, model, where)


def _run(part: list[tuple[int, Cells]], where: str, model: str, file: str) -> MeasuredRun:
    used, notes = [], []
    failed = [cells for _, cells in part if _is_empty(cells, "ttft")]
    once = [cells for _, cells in part if cells.get("first_use") and not _is_empty(cells, "ttft")]
    for what, left in (("failed", failed), ("show what happens once after a start", once)):
        if left:
            notes.append(f"{len(left)} requests {what}, and are left out")
    if 2 * len(once) > len(part) > len(once):
        notes.append("the rest met an engine that had stood still, which no replay does")
        part = []
    for line, cells in part:
        if not _is_empty(cells, "ttft") and not cells.get("first_use"):
            used.append(_row(cells, f"{file}: line {line}"))
    is_serial = all(cells.get("kind") == SERIAL for _, cells in part)
    temperatures = {_number(cells, "temperature", f"{file}: line {line}") for line, cells in part}
    if not used:
        unknown = math.nan
        return MeasuredRun(where, model, 0, unknown, unknown, unknown, latencies_s({}, unknown), notes=tuple(notes))
    rows = RequestRows.of(used)
    duration_s = {"duration_s": float(rows.e2e_s.sum())} if is_serial else {}
    return run_of(
        rows,
        where,
        model,
        **duration_s,
        concurrency=1 if is_serial else None,
        notes=tuple(notes),
        is_greedy=None if any(map(math.isnan, temperatures)) else temperatures == {0.0},
    )


def _row(cells: Cells, where: str) -> tuple[float, ...]:
    start_s = next((_number(cells, name, where) for name in STARTS if name in cells), math.nan)
    lengths = [_number(cells, name, where) for name in LENGTHS]
    if min(lengths) < 0 or any(map(math.isnan, lengths)):
        raise HeadwayError(f"{where}: expected numbers of tokens in {' and '.join(LENGTHS)}")
    ttft_s, e2e_s = (_seconds(cells, kind, where) for kind in LATENCIES)
    if not 0 < ttft_s <= e2e_s:
        raise HeadwayError(f"{where}: TTFT of {ttft_s:g} s and E2E of {e2e_s:g} s; expected 0 < TTFT <= E2E")
    return (start_s, *lengths, ttft_s, e2e_s, _number(cells, "cached_tokens", where))


def _seconds(cells: Cells, kind: str, where: str) -> float:
    if _is_empty(cells, kind):
        raise HeadwayError(f"{where}: {kind} is empty; a request that failed has no ttft either")
    seconds = _number(cells, f"{kind}_s", where)
    return _number(cells, f"{kind}_ms", where) / 1e3 if math.isnan(seconds) else seconds


def _is_empty(cells: Cells, kind: str) -> bool:
    return all(cells.get(f"{kind}_{unit}") in (None, "") for unit in ("s", "ms"))


def _number(cells: Cells, name: str, where: str) -> float:
    """The number in a cell; NaN for an empty cell. Raises HeadwayError at `where` if it is not a number."""
    value = cells.get(name)
    if value is None or value == "":
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError):
        raise HeadwayError(f"{where}: {name}: expected a number, found {value!r}") from None
