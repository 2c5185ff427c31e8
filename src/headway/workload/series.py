"""Demand as regular time series, read from CSV files in wide or long form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import compute
from pyarrow import csv as arrow_csv

from headway.core.errors import HeadwayError, unknown
from headway.workload.table import Floats

Aggregate = Literal["mean", "max"]
TIME_COLUMNS = ("time_s", "t_seconds", "t_s", "timestamp", "time")
"""Names of the time column, in seconds or as dates. Case does not matter."""
SAME_STEP = 1e-6
"""Largest relative difference between two steps of a regular series."""


@dataclass(frozen=True, eq=False)
class DemandSeries:
    """Values at a regular step, the first at `start_s`. Each value holds for the step that begins there."""

    name: str
    start_s: float
    step_s: float
    values: Floats

    def __len__(self) -> int:
        return len(self.values)

    def resampled(self, step_s: float, aggregate: Aggregate = "mean") -> DemandSeries:
        """Aggregate into longer steps by mean or maximum. An incomplete last step is dropped."""
        times = step_s / self.step_s
        if times < 1 - SAME_STEP or abs(times - round(times)) > SAME_STEP * times:
            raise HeadwayError(f"{self.name}: steps of {step_s:g} s; expected a multiple of its own, {self.step_s:g} s")
        num = round(times)
        rows = self.values[: len(self) // num * num].reshape(-1, num)
        return replace(self, step_s=step_s, values=rows.mean(axis=1) if aggregate == "mean" else rows.max(axis=1))


def read_series(path: str | Path, columns: Sequence[str] = ()) -> tuple[DemandSeries, ...]:
    """Read all series of a CSV file (gzip if its name ends in .gz).

    Wide form: one time column (`time_s`, `time`, `timestamp`), and every other column is a series. Long form: text
    columns are keys, and each combination of keys is a series, as in `A prod`. `columns` selects value columns; empty =
    all. Raises HeadwayError for values that are not a regular series of numbers from 0.
    """
    file = Path(path)
    table = _table(file)
    time = _time_column(table, file)
    keys = [name for name in table.column_names if name != time and pa.types.is_string(table[name].type)]
    value_columns = [name for name in table.column_names if name != time and name not in keys]
    for name in columns:
        if name not in value_columns:
            raise unknown("column", name, value_columns, str(file))
    chosen = list(columns) or value_columns
    if not chosen:
        raise HeadwayError(f"{file}: no column of numbers beside {time!r}")
    series = []
    at_s = _seconds(table[time], time, file)
    for key, rows in _groups(table, keys):
        for column in chosen:
            name = " ".join([*key, *([column] if len(chosen) > 1 or not key else [])])
            series.append(_checked_series(name, at_s[rows], _numbers(table[column])[rows], rows, column, file))
    return tuple(series)


def _table(file: Path) -> pa.Table:
    if not file.is_file():
        raise HeadwayError(f"{file}: no such file")
    try:
        table = arrow_csv.read_csv(file)
    except (pa.ArrowException, OSError) as error:
        raise HeadwayError(f"{file}: not readable as CSV: {error}") from None
    if not len(table):
        raise HeadwayError(f"{file}: no rows")
    return table


def _time_column(table: pa.Table, file: Path) -> str:
    for name in table.column_names:
        if name.lower() in TIME_COLUMNS:
            return str(name)
    found = ", ".join(table.column_names)
    raise HeadwayError(f"{file}: no column of times; expected {' or '.join(TIME_COLUMNS)}, found {found}")


def _seconds(column: pa.ChunkedArray, name: str, file: Path) -> Floats:
    if pa.types.is_timestamp(column.type):
        return np.asarray(column.cast(pa.timestamp("us"), safe=False).cast(pa.int64()).to_numpy() / 1e6, "f8")
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        raise HeadwayError(f"{file}: column {name}: {column[0]}; expected seconds, or dates as in 2025-07-01 00:00:00")
    return _numbers(column)


def _numbers(column: pa.ChunkedArray) -> Floats:
    return np.asarray(compute.fill_null(column.cast(pa.float64()), float("nan")).to_numpy(), "f8")


def _groups(table: pa.Table, keys: list[str]) -> list[tuple[tuple[str, ...], npt.NDArray[np.int64]]]:
    """Row numbers of each combination of keys, in order of first occurrence."""
    if not keys:
        return [((), np.arange(len(table)))]
    rows: dict[tuple[str, ...], list[int]] = {}
    for i, key in enumerate(zip(*(table[name].to_pylist() for name in keys), strict=True)):
        rows.setdefault(tuple(str(part) for part in key), []).append(i)
    return [(key, np.array(numbers)) for key, numbers in rows.items()]


def _checked_series(
    name: str, at_s: Floats, values: Floats, rows: npt.NDArray[np.int64], column: str, file: Path
) -> DemandSeries:
    """A series of at least two evenly spaced values without gaps."""
    if len(values) < 2:
        raise HeadwayError(f"{file}: {name}: {len(values)} value; expected two or more")
    good = np.isfinite(values) & (values >= 0)
    if not good.all():
        bad = int(np.argmin(good))
        what = "nothing" if np.isnan(values[bad]) else f"{values[bad]:g}"
        raise HeadwayError(f"{file}: line {rows[bad] + 2}, column {column}: {what}; expected a number from 0")
    steps = np.diff(at_s)
    step_s = float(np.median(steps))
    even = np.abs(steps - step_s) <= SAME_STEP * abs(step_s)
    if step_s <= 0 or not even.all():
        bad = int(np.argmin(even & (steps > 0)))
        gap = f"{at_s[bad + 1]:g} s comes {steps[bad]:g} s after the time before"
        raise HeadwayError(f"{file}: line {rows[bad + 1] + 2}: {name}: {gap}; expected even steps, of {step_s:g} s")
    return DemandSeries(name, float(at_s[0]), step_s, values)
