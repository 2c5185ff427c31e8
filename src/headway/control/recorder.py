"""Writes the tables of a run: rows packed as bytes, which become columns."""

from __future__ import annotations

from struct import Struct
from typing import Final, Protocol, final

import numpy as np
from librt.strings import BytesWriter, write_f64_le, write_i16_le, write_i32_le, write_i64_le

from headway.control.live import Live
from headway.core.column import Column, MakeSpill
from headway.core.record import (
    DRAFT_COLUMNS,
    FALLBACK,
    FALLBACK_REASONS,
    MOVE_COLUMNS,
    REFUSED,
    REQUEST_COLUMNS,
    SEGMENT_COLUMNS,
    STRETCH_COLUMNS,
    Columns,
    Outcome,
)

_CODES = {
    "request": "q", "outcome": "b", "attempts": "h", "attempt": "h", "preemptions": "i", "replica": "i",
    "generated_tokens": "i", "cached_prompt_tokens": "i", "joined_tick": "q", "left_tick": "q", "cause": "b",
    "tick": "q", "iterations": "i", "num_decode": "i", "prefill_tokens": "i", "context_tokens": "q", "num_waiting": "i",
    "moves": "h", "stage": "b", "source": "i", "target": "i", "kv_tokens": "q", "fallback": "b", "refused": "b",
    "tokens": "h",
}  # fmt: skip
"""`struct` and NumPy type codes. All other columns are seconds, as doubles."""
_BYTE: Final = 0xFF
"""Mask of a signed byte: columns with the code `b` may be -1."""

RequestRow = tuple[
    int, int, int, int, int, float, float, float, float, float, int, int, float, int, int, float
]  # fmt: skip
"""Values of `REQUEST_COLUMNS`."""
SegmentRow = tuple[int, int, int, int, float, float, float, int, int, float, int]
"""Values of `SEGMENT_COLUMNS`."""
BegunStretch = tuple[int, int, float, float, float, int, int, int, int]
"""Values of `STRETCH_COLUMNS`, without `iterations` and `advances`."""

FLUSH_BYTES = 1 << 22
"""Bytes of packed rows above which rows are moved to columns."""
_NARROW = {
    "request": np.int32,
    "tick": np.int32,
    "joined_tick": np.int32,
    "left_tick": np.int32,
    "context_tokens": np.int32,
    "replica": np.int16,
}
"""Narrow column types, used while all values fit."""


class RowNotes(Protocol):
    """Receives every row of a table."""

    def note(self) -> None: ...


class TableNotes(Protocol):
    """Receivers for the rows of three tables."""

    @property
    def requests(self) -> RowNotes: ...

    @property
    def segments(self) -> RowNotes: ...

    @property
    def stretches(self) -> RowNotes: ...


class Table:
    """The rows of one table, packed as bytes. Subclasses write rows, whose values are in column order."""

    def __init__(
        self, columns: tuple[str, ...], notes: RowNotes | None = None, make_spill: MakeSpill | None = None
    ) -> None:
        codes = [_CODES.get(name, "d") for name in columns]
        self._rows = BytesWriter()
        self._struct = Struct("<" + "".join(codes))
        self._dtype = np.dtype([(name, f"<{code}") for name, code in zip(columns, codes, strict=True)])
        self._names, self._make_spill = columns, make_spill
        self._columns: dict[str, Column] = {}
        """Created by the first `flush`, because most runs leave some tables empty."""
        self._notes = notes

    def clear(self) -> None:
        """Remove all rows that are not in columns."""
        self._rows = BytesWriter()

    def flush(self, least_bytes: int = FLUSH_BYTES) -> None:
        """Move packed rows to columns if the rows take at least `least_bytes`. Columns are smaller."""
        if len(self._rows) < max(least_bytes, 1):
            return
        self._make_columns()
        rows = np.frombuffer(self._rows.getvalue(), dtype=self._dtype)
        for name, column in self._columns.items():
            column.extend(np.ascontiguousarray(rows[name]))
        self._rows = BytesWriter()

    def _make_columns(self) -> None:
        if not self._columns:
            dtypes = {name: np.dtype(_NARROW.get(name, self._dtype[name])) for name in self._names}
            self._columns = {name: Column(dtype, self._make_spill) for name, dtype in dtypes.items()}

    def drain(self) -> Columns:
        """Remove and return all rows, as columns. Do not call after `flush`."""
        rows = np.frombuffer(self._rows.getvalue(), dtype=self._dtype)
        self.clear()
        return {name: rows[name] for name in self._names}

    def columns(self) -> Columns:
        """All rows, as read-only columns. After this call, nothing can be written."""
        self._make_columns()
        self.flush(0)
        return {name: column.values() for name, column in self._columns.items()}


# A compiled call for each value takes a tenth of the time of `Struct.pack`, which takes objects. The calls must write
# the types of `_CODES`.


@final
class RequestTable(Table):
    """Requests that have ended, or that are still in the system at the end of the run."""

    def write(self, row: RequestRow) -> None:
        """Append the row of a request that has ended."""
        (
            request, outcome, attempts, preemptions, replica, placed_s, admitted_s, first_token_s, answer_s, end_s,
            generated_tokens, cached_tokens, reasoning_end_s, moves, stage, score,
        ) = row  # fmt: skip
        rows = self._rows
        write_i64_le(rows, request)
        rows.append(outcome & _BYTE)
        write_i16_le(rows, attempts)
        write_i32_le(rows, preemptions)
        write_i32_le(rows, replica)
        write_f64_le(rows, placed_s)
        write_f64_le(rows, admitted_s)
        write_f64_le(rows, first_token_s)
        write_f64_le(rows, answer_s)
        write_f64_le(rows, end_s)
        write_i32_le(rows, generated_tokens)
        write_i32_le(rows, cached_tokens)
        write_f64_le(rows, reasoning_end_s)
        write_i16_le(rows, moves)
        rows.append(stage & _BYTE)
        write_f64_le(rows, score)
        if self._notes is not None:
            self._notes.note()


@final
class SegmentTable(Table):
    """Stays of requests in batches."""

    def write(self, row: SegmentRow) -> None:
        """Append the row of a request's stay at a replica."""
        (
            request, replica, attempt, stage, enqueued_s, admitted_s, prefill_end_s, joined_tick, left_tick, end_s,
            cause,
        ) = row  # fmt: skip
        rows = self._rows
        write_i64_le(rows, request)
        write_i32_le(rows, replica)
        write_i16_le(rows, attempt)
        rows.append(stage & _BYTE)
        write_f64_le(rows, enqueued_s)
        write_f64_le(rows, admitted_s)
        write_f64_le(rows, prefill_end_s)
        write_i64_le(rows, joined_tick)
        write_i64_le(rows, left_tick)
        write_f64_le(rows, end_s)
        rows.append(cause & _BYTE)
        if self._notes is not None:
            self._notes.note()


@final
class StretchTable(Table):
    """Stretches of iterations with a constant batch, without the column `advances`."""

    def write(self, begun: BegunStretch, iterations: int) -> None:
        """Append the row of a stretch that began so."""
        replica, tick, start_s, a_s, b_s, num_decode, prefill_tokens, context_tokens, num_waiting = begun
        rows = self._rows
        write_i32_le(rows, replica)
        write_i64_le(rows, tick)
        write_f64_le(rows, start_s)
        write_f64_le(rows, a_s)
        write_f64_le(rows, b_s)
        write_i32_le(rows, num_decode)
        write_i32_le(rows, prefill_tokens)
        write_i64_le(rows, context_tokens)
        write_i32_le(rows, num_waiting)
        write_i32_le(rows, iterations)
        if self._notes is not None:
            self._notes.note()


@final
class RareTable(Table):
    """Rows that few runs have."""

    def write(self, row: tuple[float, ...]) -> None:
        """Append a row of numbers, in the order of the columns."""
        self._rows.write(self._struct.pack(*row))


class Recorder:
    """The tables of a run."""

    def __init__(
        self,
        has_fallbacks: bool = False,
        notes: TableNotes | None = None,
        make_spill: MakeSpill | None = None,
        has_limits: bool = False,
    ) -> None:
        self.requests = RequestTable(REQUEST_COLUMNS, None if notes is None else notes.requests, make_spill)
        self.fallbacks = RareTable((FALLBACK,), None, make_spill) if has_fallbacks else None
        """One more column of requests; None: the fleet has no fallbacks."""
        self.refusals = RareTable((REFUSED,), None, make_spill) if has_limits else None
        """One more column of requests; None: no tenant has limits."""
        self.segments = SegmentTable(SEGMENT_COLUMNS, None if notes is None else notes.segments, make_spill)
        self.stretches = StretchTable(STRETCH_COLUMNS[:-1], None if notes is None else notes.stretches, make_spill)
        self.moves = RareTable(MOVE_COLUMNS, None, make_spill)
        self.drafts = RareTable(DRAFT_COLUMNS, None, make_spill)

    def write_request(self, live: Live, end_s: float, outcome: Outcome, refused: int = 0) -> None:
        """Write the row of a request that has ended, or that is still in the system at the end of the run. `refused`:
        the reason of a refusal, a key of `REFUSED`."""
        self.requests.write((
            live.id, outcome, live.attempt + 1, live.preemptions, live.replica, live.placed_s, live.admitted_s,
            live.first_token_s, live.answer_s, end_s, live.generated_tokens, live.cached_tokens,
            live.reasoning_end_s, live.moves, live.stage_index, live.score,
        ))  # fmt: skip
        if self.fallbacks is not None:
            self.fallbacks.write((0 if live.fallback is None else 1 + FALLBACK_REASONS.index(live.fallback.why),))
        if self.refusals is not None:
            self.refusals.write((refused,))

    def clear(self) -> None:
        """Remove all rows. Do not call after `flush`."""
        for table in self._tables():
            table.clear()

    def _tables(self) -> list[Table]:
        tables = (self.requests, self.segments, self.stretches, self.moves, self.drafts, self.fallbacks, self.refusals)
        return [table for table in tables if table is not None]

    def flush(self) -> None:
        """Free memory by compacting the tables. Call at intervals."""
        for table in self._tables():
            table.flush()

    def request_columns(self) -> Columns:
        """All requests. After this call, nothing can be written."""
        found = self.requests.columns()
        for table in (self.fallbacks, self.refusals):
            found |= {} if table is None else table.columns()
        return found

    def drain_requests(self) -> Columns:
        """Remove and return all requests. Do not call after `flush`."""
        more = {} if self.fallbacks is None else self.fallbacks.drain()
        return self.requests.drain() | more

    def stretch_columns(self) -> Columns:
        """The stretches, with the column `advances` computed from the other columns."""
        columns = self.stretches.columns()
        columns["advances"] = np.not_equal(columns["num_decode"], 0).astype(np.int8)
        return columns
