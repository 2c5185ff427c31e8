"""Demand by minute, from the records of ended or killed gateways, stored in a separate file.

A folder keeps only the records since the last clean start, because the files of an ended run replace those of the run
before. At each start the demand in the records is therefore added to `FOLDER/demand.parquet`, which holds as many days
as forecasts read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from msgspec import Struct
from pyarrow import compute, parquet

from headway.core.errors import HeadwayError
from headway.core.past_demand import DemandKey, PastDemand
from headway.records.folder import BEGAN_S
from headway.workload.readers.run_parts import METADATA, read_all

STEP_S = 60.0
FILE = "demand.parquet"
LEAST_COVERED = 0.5
"""Minimum share of a minute for which a gateway must run for the minute's demand to be known."""
_SCHEMA = pa.schema(
    [
        ("minute", pa.int64()),
        ("model", pa.string()),
        ("region", pa.string()),
        ("tier", pa.int16()),
        ("prompt_tokens", pa.float64()),
    ]
)
Floats = npt.NDArray[np.float64]
Span = tuple[float, float]


class KeptDemand(Struct, frozen=True):
    """Demand by minute of wall-clock time, and the spans in which a gateway counted it."""

    tokens: dict[DemandKey, dict[int, float]]
    """Prompt tokens by minute since the epoch."""
    covered: tuple[Span, ...] = ()
    """Seconds since the epoch, as sorted, disjoint spans."""

    @property
    def until_s(self) -> float:
        return self.covered[-1][1] if self.covered else 0.0

    def before(self, now_s: float, days: float) -> PastDemand | None:
        """The demand of the last days, up to the last whole minute; None if nothing is known.

        Minutes without a gateway are interpolated. Such minutes at the end repeat the last known minute.
        """
        end = int(now_s // STEP_S)
        first = max(end - round(days * 86_400 / STEP_S), min((int(s // STEP_S) for s, _ in self.covered), default=end))
        shares = self._covered_shares(first, end)
        known = np.flatnonzero(shares >= LEAST_COVERED)
        if not len(known):
            return None
        first, shares, known = first + int(known[0]), shares[known[0] :], known - known[0]
        tps: dict[DemandKey, Floats] = {}
        for key, by_minute in self.tokens.items():
            tokens = np.zeros(end - first)
            for minute, number in by_minute.items():
                if first <= minute < end:
                    tokens[minute - first] += number
            tps[key] = np.interp(np.arange(end - first), known, tokens[known] / shares[known] / STEP_S)
        return PastDemand(STEP_S, tps) if tps else None

    def _covered_shares(self, first: int, end: int) -> Floats:
        shares = np.zeros(max(end - first, 0))
        for from_s, until_s in self.covered:
            for minute in range(max(int(from_s // STEP_S), first), min(int(until_s // STEP_S) + 1, end)):
                both_s = min(until_s, (minute + 1) * STEP_S) - max(from_s, minute * STEP_S)
                shares[minute - first] += max(both_s, 0.0) / STEP_S
        return np.minimum(shares, 1.0)

    def since(self, from_s: float) -> KeptDemand:
        """The demand after this time."""
        first = int(from_s // STEP_S)
        tokens = {key: {minute: n for minute, n in by.items() if minute >= first} for key, by in self.tokens.items()}
        covered = tuple((max(begin_s, from_s), end_s) for begin_s, end_s in self.covered if end_s > from_s)
        return KeptDemand({key: by for key, by in tokens.items() if by}, covered)


def read(folder: Path) -> KeptDemand:
    """The known demand of a records folder; empty if the folder does not exist. Raises HeadwayError for a damaged
    file."""
    kept = _read(folder / FILE)
    tokens, covered, until_s = {key: dict(by) for key, by in kept.tokens.items()}, list(kept.covered), kept.until_s
    for table, began_s, span in _runs(folder):
        _add(tokens, table, began_s, until_s)
        if span[1] > until_s:
            covered.append((max(span[0], until_s), span[1]))
    return KeptDemand(tokens, _united(covered))


def keep(folder: Path, demand: KeptDemand) -> None:
    """Store the known demand, so that it outlives the records. Raises HeadwayError if the folder cannot be written."""
    rows = [
        (minute, *key, number)
        for key, by_minute in demand.tokens.items()
        for minute, number in sorted(by_minute.items())
    ]
    columns = list(zip(*rows, strict=True)) or [()] * len(_SCHEMA)
    table = pa.table([pa.array(column, field.type) for column, field in zip(columns, _SCHEMA, strict=True)], _SCHEMA)
    table = table.replace_schema_metadata({METADATA: msgspec.json.encode(demand.covered)})
    beside = folder / f".{FILE}.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        parquet.write_table(table, beside, compression="zstd")
        os.replace(beside, folder / FILE)
    except (OSError, pa.ArrowException) as error:
        beside.unlink(missing_ok=True)
        raise HeadwayError(f"{folder / FILE}: cannot be written ({error})") from None


def _read(file: Path) -> KeptDemand:
    if not file.exists():
        return KeptDemand({})
    table = _table(file)
    try:
        covered = msgspec.json.decode((table.schema.metadata or {})[METADATA], type=tuple[Span, ...])
        columns = [table[field.name].to_pylist() for field in _SCHEMA]
    except (KeyError, msgspec.MsgspecError):
        raise HeadwayError(f"{file}: not the demand that a gateway has kept") from None
    tokens: dict[DemandKey, dict[int, float]] = {}
    for minute, model, region, tier, number in zip(*columns, strict=True):
        tokens.setdefault((model, region, tier), {})[minute] = number
    return KeptDemand(tokens, covered)


def _runs(folder: Path) -> Iterator[tuple[pa.Table, float, Span]]:
    """Returns, for each run, arrivals, the wall-clock time of the run's time 0, and the span in which arrivals were
    counted."""
    file = folder / "requests.parquet"
    if file.exists():
        table = _table(file)
        try:
            run = msgspec.json.decode((table.schema.metadata or {})[METADATA])
            began_s = run["provenance"].get(BEGAN_S)
            end_s = float(run["end_s"])
        except (KeyError, TypeError, AttributeError, msgspec.MsgspecError):
            raise HeadwayError(f"{file}: not the records of a gateway") from None
        if began_s is not None:  # missing in records of a simulation or an older gateway
            yield table, began_s, (began_s, began_s + end_s)
    for tables, state in read_all(folder):
        yield tables["arrivals"], state.started_s, (state.started_s, state.started_s + state.end_s)


def _table(file: Path) -> pa.Table:
    try:
        return parquet.read_table(file, memory_map=False)
    except (pa.ArrowException, OSError) as error:
        raise HeadwayError(f"{file}: cannot be read ({str(error).splitlines()[0]})") from None


def _add(tokens: dict[DemandKey, dict[int, float]], table: pa.Table, began_s: float, from_s: float) -> None:
    """Add the arrivals after a wall-clock time to the counts."""
    at_s = table["arrival_s"].to_numpy() + began_s
    columns: dict[str, Any] = {"minute": (at_s // STEP_S).astype(np.int64), "prompt_tokens": table["prompt_tokens"]}
    for name, default in (("model", ""), ("region", ""), ("tier", 0)):
        has_it = name in table.column_names
        columns[name] = (
            compute.fill_null(table[name].cast(_SCHEMA.field(name).type), default)
            if has_it
            else pa.array([default] * len(at_s), _SCHEMA.field(name).type)
        )
    counted = pa.table(columns).filter(pa.array(at_s >= from_s))
    sums = counted.group_by(["model", "region", "tier", "minute"]).aggregate([("prompt_tokens", "sum")])
    names = ("model", "region", "tier", "minute", "prompt_tokens_sum")
    for model, region, tier, minute, number in zip(*(sums[name].to_pylist() for name in names), strict=True):
        by_minute = tokens.setdefault((model, region, tier), {})
        by_minute[minute] = by_minute.get(minute, 0.0) + number


def _united(spans: Sequence[Span]) -> tuple[Span, ...]:
    """The spans in order, with touching spans merged."""
    found: list[Span] = []
    for from_s, until_s in sorted(spans):
        if found and from_s <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], until_s)
        else:
            found.append((from_s, until_s))
    return tuple(found)
