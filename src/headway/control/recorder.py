"""Writes the tables of a run: rows packed as bytes, which become columns."""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Protocol

import numpy as np

from headway.control.column import Column, MakeSpill
from headway.control.live import Live
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
    """The rows of one table; `write(pack(*row))` appends one, in column order."""

    def __init__(
        self, columns: tuple[str, ...], notes: RowNotes | None = None, make_spill: MakeSpill | None = None
    ) -> None:
        codes = [_CODES.get(name, "d") for name in columns]
        self._rows = bytearray()
        self._dtype = np.dtype([(name, f"={code}") for name, code in zip(columns, codes, strict=True)])
        self._names, self._make_spill = columns, make_spill
        self._columns: dict[str, Column] = {}
        """Created by the first `flush`, because most runs leave some tables empty."""
        self.pack = Struct("=" + "".join(codes)).pack
        self.write: Callable[[bytes], None] = self._rows.extend if notes is None else self._write_noted
        self._notes = notes

    def _write_noted(self, row: bytes) -> None:
        assert self._notes is not None
        self._rows.extend(row)
        self._notes.note()

    def flush(self, least_bytes: int = FLUSH_BYTES) -> None:
        """Move packed rows to columns if the rows take at least `least_bytes`. Columns are smaller."""
        if len(self._rows) < max(least_bytes, 1):
            return
        self._make_columns()
        rows = np.frombuffer(self._rows, dtype=self._dtype)
        for name, column in self._columns.items():
            column.extend(np.ascontiguousarray(rows[name]))
        del rows
        self._rows.clear()

    def _make_columns(self) -> None:
        if not self._columns:
            dtypes = {name: np.dtype(_NARROW.get(name, self._dtype[name])) for name in self._names}
            self._columns = {name: Column(dtype, self._make_spill) for name, dtype in dtypes.items()}

    def drain(self) -> Columns:
        """Remove and return all rows, as columns. Do not call after `flush`."""
        rows = np.frombuffer(bytes(self._rows), dtype=self._dtype)
        self._rows.clear()
        return {name: rows[name] for name in self._names}

    def columns(self) -> Columns:
        """All rows, as read-only columns. After this call, nothing can be written."""
        self._make_columns()
        self.flush(0)
        return {name: column.values() for name, column in self._columns.items()}


class Recorder:
    """The tables of a run."""

    def __init__(
        self,
        has_fallbacks: bool = False,
        notes: TableNotes | None = None,
        make_spill: MakeSpill | None = None,
        has_limits: bool = False,
    ) -> None:
        self.requests = Table(REQUEST_COLUMNS, None if notes is None else notes.requests, make_spill)
        self.fallbacks = Table((FALLBACK,), None, make_spill) if has_fallbacks else None
        """One more column of requests; None: the fleet has no fallbacks."""
        self.refusals = Table((REFUSED,), None, make_spill) if has_limits else None
        """One more column of requests; None: no tenant has limits."""
        self.segments = Table(SEGMENT_COLUMNS, None if notes is None else notes.segments, make_spill)
        self.stretches = Table(STRETCH_COLUMNS[:-1], None if notes is None else notes.stretches, make_spill)
        self.moves = Table(MOVE_COLUMNS, None, make_spill)
        self.drafts = Table(DRAFT_COLUMNS, None, make_spill)

    def write_request(self, live: Live, end_s: float, outcome: Outcome, refused: int = 0) -> None:
        """Write the row of a request that has ended, or that is still in the system at the end of the run. `refused`:
        the reason of a refusal, a key of `REFUSED`."""
        row = (
            live.id, outcome, live.attempt + 1, live.preemptions, live.replica, live.placed_s, live.admitted_s,
            live.first_token_s, live.answer_s, end_s, live.generated_tokens, live.cached_tokens,
            live.reasoning_end_s, live.moves, live.stage_index, live.score,
        )  # fmt: skip
        self.requests.write(self.requests.pack(*row))
        if (rows := self.fallbacks) is not None:
            rows.write(rows.pack(0 if live.fallback is None else 1 + FALLBACK_REASONS.index(live.fallback.why)))
        if (rows := self.refusals) is not None:
            rows.write(rows.pack(refused))

    def flush(self) -> None:
        """Free memory by compacting the tables. Call at intervals."""
        tables = (self.requests, self.segments, self.stretches, self.moves, self.drafts, self.fallbacks, self.refusals)
        for table in tables:
            if table is not None:
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
