"""What a run writes down while it runs, kept compact: rows go to flat arrays, and those to typed columns."""

from __future__ import annotations

from array import array

import numpy as np
import numpy.typing as npt

from headway.core.record import REQUEST_COLUMNS, SEGMENT_COLUMNS, STRETCH_COLUMNS, Columns

_INTEGERS = {
    "request": np.int64, "outcome": np.int8, "attempts": np.int16, "attempt": np.int16, "preemptions": np.int32,
    "replica": np.int32, "generated_tokens": np.int32, "cached_prompt_tokens": np.int32, "joined_tick": np.int64,
    "left_tick": np.int64, "cause": np.int8, "tick": np.int64, "iterations": np.int32, "advances": np.int8,
    "num_decode": np.int32, "prefill_tokens": np.int32, "context_tokens": np.int64, "num_waiting": np.int32,
}  # fmt: skip


class Table:
    """Rows of one table. `add(row)` takes a tuple in the order of the columns; call `pack()` now and then."""

    def __init__(self, columns: tuple[str, ...]) -> None:
        self._names = columns
        self._rows: array[float] = array("d")
        self._packed: list[list[npt.NDArray[np.generic]]] = [[] for _ in columns]
        self.add = self._rows.extend

    def pack(self) -> None:
        """Turn the rows so far into typed columns."""
        if not self._rows:
            return
        block = np.frombuffer(self._rows, dtype=np.float64).reshape(-1, len(self._names))
        for i, name in enumerate(self._names):
            self._packed[i].append(block[:, i].astype(_INTEGERS.get(name, np.float64)))
        del block
        del self._rows[:]

    def columns(self) -> Columns:
        """All rows, as columns. The table is empty afterwards."""
        self.pack()
        out: Columns = {}
        for i, name in enumerate(self._names):
            parts, self._packed[i] = self._packed[i], []
            out[name] = np.concatenate(parts) if parts else np.empty(0, _INTEGERS.get(name, np.float64))
        return out


class Recorder:
    """The three tables that grow with a run."""

    def __init__(self) -> None:
        self.requests = Table(REQUEST_COLUMNS)
        self.segments = Table(SEGMENT_COLUMNS)
        self.stretches = Table(STRETCH_COLUMNS[:-1])

    def stretch_columns(self) -> Columns:
        """The stretches, with the columns that follow from others."""
        columns = self.stretches.columns()
        columns["advances"] = np.not_equal(columns["num_decode"], 0).astype(np.int8)
        return columns

    def pack(self) -> None:
        """Keep memory flat on long runs."""
        self.requests.pack()
        self.segments.pack()
        self.stretches.pack()
