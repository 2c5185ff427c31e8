"""What a run writes down while it runs: rows packed as bytes, which are columns already."""

from __future__ import annotations

from struct import Struct

import numpy as np

from headway.core.record import MOVE_COLUMNS, REQUEST_COLUMNS, SEGMENT_COLUMNS, STRETCH_COLUMNS, Columns

_CODES = {
    "request": "q", "outcome": "b", "attempts": "h", "attempt": "h", "preemptions": "i", "replica": "i",
    "generated_tokens": "i", "cached_prompt_tokens": "i", "joined_tick": "q", "left_tick": "q", "cause": "b",
    "tick": "q", "iterations": "i", "num_decode": "i", "prefill_tokens": "i", "context_tokens": "q", "num_waiting": "i",
    "moves": "h", "stage": "b", "source": "i", "target": "i", "kv_tokens": "q",
}  # fmt: skip
"""Type codes of `struct`, and of NumPy. All other columns are seconds, as doubles."""


class Table:
    """Rows of one table: `write(pack(*row))` adds one, in the order of the columns."""

    def __init__(self, columns: tuple[str, ...]) -> None:
        codes = [_CODES.get(name, "d") for name in columns]
        self._rows = bytearray()
        self._dtype = np.dtype([(name, f"={code}") for name, code in zip(columns, codes, strict=True)])
        self.pack = Struct("=" + "".join(codes)).pack
        self.write = self._rows.extend

    def columns(self) -> Columns:
        """All rows, as columns. The rows are gone then: of ten million requests, both are several GB."""
        rows = np.frombuffer(self._rows, dtype=self._dtype)
        found = {name: rows[name].copy() for name in rows.dtype.names or ()}
        del rows
        self._rows.clear()
        return found


class Recorder:
    """The tables that grow with a run."""

    def __init__(self) -> None:
        self.requests = Table(REQUEST_COLUMNS)
        self.segments = Table(SEGMENT_COLUMNS)
        self.stretches = Table(STRETCH_COLUMNS[:-1])
        self.moves = Table(MOVE_COLUMNS)

    def stretch_columns(self) -> Columns:
        """The stretches, with the column that follows from others."""
        columns = self.stretches.columns()
        columns["advances"] = np.not_equal(columns["num_decode"], 0).astype(np.int8)
        return columns
