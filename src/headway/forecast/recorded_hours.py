"""Converts recorded days into requests by hour, from any supported trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from msgspec import Struct
from pyarrow import parquet

from headway.core.errors import HeadwayError
from headway.core.policy import Floats
from headway.limits.calendar import moment, zone
from headway.records.folder import BEGAN_S
from headway.workload.read import read
from headway.workload.readers import run_parts
from headway.workload.readers.run_parts import METADATA
from headway.workload.readers.shared import trace_file
from headway.workload.table import Workload

HOUR_S = 3600.0
DAY_HOURS = 24
LEAST_OBSERVED_S = 1800.0
"""Minimum recorded time of an hour. An hour with less gives no rate, unless there is no other hour."""
MOST_REHEARSED = 10_000
"""Maximum number of requests of the recorded hour that plans rehearse."""


class RecordedHour(Struct, frozen=True, forbid_unknown_fields=True):
    """The busiest hour of the records, as a section of a trace."""

    path: str
    from_s: float
    """Start in the trace's own time."""
    to_s: float
    num_requests: int
    requests_per_s: float


class Hours(Struct, frozen=True):
    """Requests per hour in whole days from a midnight on."""

    begins: datetime
    """Time at which the first hour begins, with its time zone."""
    per_hour: Floats
    """Requests per hour; NaN if not recorded."""
    by_model: dict[str, Floats]
    prompt_tokens_mean: dict[str, float]
    output_tokens_mean: dict[str, float]
    num_requests: int
    ends: datetime
    """Time of the last request, or of the end of the run."""
    busiest: RecordedHour
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Day:
    path: Path
    rows: Workload
    began_s: float | None
    """Wall-clock time of the trace's time 0; None if unknown."""

    @property
    def span_s(self) -> float:
        return float(self.rows.arrival_s[-1])


def recorded_hours(paths: Sequence[Path], time_zone: str = "UTC", begins: str | None = None) -> Hours:
    """The requests of all days by hour and model.

    A gateway's records contain the wall-clock time of their beginning. For other traces, `begins` is the beginning of
    the first trace, and each other trace begins on the day after the previous one. Without `begins`, the first one
    begins at midnight of a Monday. Raises HeadwayError for a trace that cannot be read, or is given twice.
    """
    where = zone(time_zone)
    days = [_read(path) for path in paths]
    if not days:
        raise HeadwayError("expected one recorded day or more")
    if len({day.path.resolve() for day in days}) < len(days):
        raise HeadwayError("a recorded day is given twice; expected each once")
    starts, notes = _starts(days, where, begins)
    order = sorted(range(len(days)), key=lambda i: starts[i])
    days, starts = [days[i] for i in order], [starts[i] for i in order]
    first = starts[0].replace(hour=0, minute=0, second=0, microsecond=0)
    ends = max(start + timedelta(seconds=day.span_s) for start, day in zip(starts, days, strict=True))
    num = max(int(np.ceil((ends - first).total_seconds() / HOUR_S / DAY_HOURS)), 1) * DAY_HOURS
    seen_s, counts = np.zeros(num), dict[str, npt.NDArray[np.float64]]()
    tokens: dict[str, list[float]] = {}
    busiest: RecordedHour | None = None
    for day, start in zip(days, starts, strict=True):
        offset_s = (start - first).total_seconds()
        hour = ((offset_s + day.rows.arrival_s) // HOUR_S).astype("i8").clip(0, num - 1)
        edges_s = np.arange(num + 1) * HOUR_S
        covered = np.clip(np.diff(np.clip(edges_s, offset_s, offset_s + day.span_s)), 0, HOUR_S)
        seen_s = np.minimum(seen_s + covered, HOUR_S)
        for name, mask in _models(day.rows):
            counts.setdefault(name, np.zeros(num))
            counts[name] += np.bincount(hour[mask], minlength=num)
            sums = tokens.setdefault(name, [0.0, 0.0, 0.0])
            sums[0] += float(mask.sum())
            sums[1] += float(day.rows.prompt_tokens[mask].sum())
            sums[2] += float(day.rows.output_tokens[mask].sum())
        own = _busiest(day, hour, covered, offset_s)
        if busiest is None or own.requests_per_s > busiest.requests_per_s:
            busiest = own
    assert busiest is not None
    least_s = min(LEAST_OBSERVED_S, float(seen_s.max()))
    scale = np.where(seen_s >= least_s, HOUR_S / np.maximum(seen_s, 1e-9), np.nan)
    by_model = {name: each * scale for name, each in counts.items()}
    return Hours(
        begins=first,
        per_hour=np.sum(list(by_model.values()), axis=0),
        by_model=by_model,
        prompt_tokens_mean={name: prompt / number for name, (number, prompt, _) in tokens.items() if number},
        output_tokens_mean={name: output / number for name, (number, _, output) in tokens.items() if number},
        num_requests=sum(len(day.rows) for day in days),
        ends=ends,
        busiest=busiest,
        notes=tuple(notes),
    )


def _read(path: Path) -> _Day:
    rows = read(path)
    if len(rows) < 2 or not float(rows.arrival_s[-1]) > 0:
        raise HeadwayError(f"{path}: {len(rows)} requests over no time; expected a recorded day")
    return _Day(path.absolute(), rows, recorded_began_s(path))


def recorded_began_s(path: Path) -> float | None:
    """The wall-clock time at which a gateway's records begin; None for other traces."""
    if run_parts.is_under_way(path):
        return run_parts.began_s(run_parts.read_all(path))
    file = trace_file(path) if path.is_dir() else path
    if file.suffix != ".parquet" or not file.is_file():
        return None
    try:
        metadata = parquet.read_metadata(file).metadata or {}
        provenance = msgspec.json.decode(metadata.get(METADATA, b"{}")).get("provenance") or {}
    except (pa.ArrowException, OSError, msgspec.DecodeError, AttributeError):
        return None
    began_s = provenance.get(BEGAN_S)
    return float(began_s) if isinstance(began_s, int | float) and began_s > 0 else None


def _starts(days: Sequence[_Day], where: ZoneInfo, begins: str | None) -> tuple[list[datetime], list[str]]:
    known = [day.began_s for day in days if day.began_s is not None]
    if begins is None and len(known) == len(days):
        return [datetime.fromtimestamp(began_s, where) for began_s in known], []
    if begins is None and known:
        unknown = next(day.path for day in days if day.began_s is None)
        raise HeadwayError(
            f"{unknown}: does not say when it was recorded, as others do; expected --begins, the time of the first"
        )
    notes = []
    if begins is None:
        begins = "2001-01-01"  # a Monday
        notes.append(
            "the records do not say when they began: the first is taken to begin at a Monday's midnight "
            "(--begins says when)"
        )
    at, starts = moment(begins, where), []
    for day in days:
        starts.append(at)
        end = at + timedelta(seconds=day.span_s)
        at = end.replace(hour=0, minute=0, second=0, microsecond=0) + timedelta(days=1)
        if end.hour == 0 and end.minute == 0:  # the day's last request came in the next minute
            at -= timedelta(days=1)
    if len(days) > 1:
        notes.append("each further record is taken to begin at the midnight after the one before")
    return starts, notes


def _models(rows: Workload) -> list[tuple[str, npt.NDArray[np.bool_]]]:
    if "model" not in rows.columns or not rows.models:
        return [("", np.ones(len(rows), bool))]
    codes = rows.columns["model"]
    return [(name, codes == i) for i, name in enumerate(rows.models) if (codes == i).any()]


def _busiest(day: _Day, hour: npt.NDArray[np.int64], covered_s: Floats, offset_s: float) -> RecordedHour:
    """The hour with the highest rate; a shorter record is used whole."""
    counts = np.bincount(hour, minlength=len(covered_s))
    least_s = min(LEAST_OBSERVED_S, float(covered_s.max()))
    rates = np.where(covered_s >= least_s, counts / np.maximum(covered_s, 1e-9), 0.0)
    best = int(np.argmax(rates))
    begin_s = max(best * HOUR_S - offset_s, 0.0)
    inside = day.rows.arrival_s[(day.rows.arrival_s >= begin_s) & (day.rows.arrival_s < begin_s + HOUR_S)]
    if len(inside) > MOST_REHEARSED:
        inside = inside[:MOST_REHEARSED]
    end_s = float(np.nextafter(inside[-1], np.inf))
    span_s = max(end_s - begin_s, 1e-9)
    return RecordedHour(str(day.path), begin_s, end_s, len(inside), len(inside) / span_s)
