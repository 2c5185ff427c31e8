"""Readers of public CSV traces with one header line: Azure, BurstGPT, and Mooncake reduced to lengths.

Azure LLM inference traces of 2023 and 2024 (Azure/AzurePublicDataset) have timestamps with seven digits of a second
(2023) or a time zone (2024). BurstGPT (HPMLL/BurstGPT) has arrivals in seconds and the name of a model, and session
columns in newer files. Mooncake reduced to lengths (kvcache-ai/Mooncake) has arrivals in milliseconds and no shared
blocks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from headway.workload.readers.csv_table import SECONDS, TEXT, TIME, TOKENS, CellType, header_of, read_table
from headway.workload.readers.shared import ReadOptions, first_line, normalised, without_failures
from headway.workload.table import Workload

_NONE = ("nan", "null", "none")
"""Values that other tools write for an empty cell."""


class CsvTrace(Struct, frozen=True):
    """A format: for each workload column, the file's column and its cell type."""

    columns: dict[str, tuple[str, CellType]]
    ticks_per_s: float
    """Unit of the arrivals."""
    sessions: str = ""
    """The optional column that identifies a conversation; an empty cell means no conversation."""

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.columns.values()]

    def read(self, path: Path, options: ReadOptions) -> Workload:
        """Read a file of this format. Rows of zero tokens are failures: skipped and counted."""
        own = dict(self.columns.values())
        has_sessions = bool(self.sessions) and self.sessions in header_of(first_line(path))
        own |= {self.sessions: TEXT} if has_sessions else {}
        table = read_table(path, own, self.columns["arrival_s"][0], options)
        columns = {name: table.columns[own] for name, (own, _) in self.columns.items()}
        if has_sessions:
            columns["session_id"] = _numbered(table.columns[self.sessions], table.names[self.sessions])
        if self.columns["arrival_s"][1] is TIME:
            columns["arrival_s"] = columns["arrival_s"] - columns["arrival_s"].min()
        columns["arrival_s"] = columns["arrival_s"] / self.ticks_per_s
        models = table.names[self.columns["model"][0]] if "model" in self.columns else ()
        workload = Workload(columns, models=models, notes=tuple(table.notes))
        return normalised(without_failures(workload), path, options)


def _numbered(codes: npt.NDArray[Any], names: tuple[str, ...]) -> npt.NDArray[np.int64]:
    """Conversations as numbers; -1 for none."""
    known = np.array([-1 if not name.strip() or name.strip().lower() in _NONE else i for i, name in enumerate(names)])
    return known.astype("i8")[codes] if len(known) else np.full(len(codes), -1, "i8")


def _trace(
    arrival: str, cells: CellType, ticks_per_s: float, prompt: str, output: str, model: str = "", sessions: str = ""
) -> CsvTrace:
    columns = {"arrival_s": (arrival, cells), "prompt_tokens": (prompt, TOKENS), "output_tokens": (output, TOKENS)}
    return CsvTrace(columns | ({"model": (model, TEXT)} if model else {}), ticks_per_s, sessions)


AZURE = _trace("TIMESTAMP", TIME, 1e9, "ContextTokens", "GeneratedTokens")
BURSTGPT = _trace("Timestamp", SECONDS, 1.0, "Request tokens", "Response tokens", "Model", "Session ID")
MOONCAKE_LENGTHS = _trace("timestamp_ms", SECONDS, 1e3, "input_length", "output_length")
