"""BurstGPT: Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type. Source: HPMLL/BurstGPT."""

from __future__ import annotations

from pathlib import Path

from headway.workload.readers import kinds
from headway.workload.readers.csvtable import header_of, read_table
from headway.workload.readers.finish import from_zero, without_failures
from headway.workload.readers.options import Options
from headway.workload.table import Workload

COLUMNS = {
    "Timestamp": kinds.SECONDS,
    "Model": kinds.TEXT,
    "Request tokens": kinds.TOKENS,
    "Response tokens": kinds.TOKENS,
}


def matches(line: str) -> bool:
    """By its header; newer files have session columns besides."""
    return set(COLUMNS) <= set(header_of(line))


def read(path: Path, options: Options) -> Workload:
    """Arrivals, models, prompts and outputs. Rows of zero tokens are failures: skipped and counted."""
    table = read_table(path, COLUMNS, "Timestamp", options)
    columns = {
        "arrival_s": table.columns["Timestamp"],
        "prompt_tokens": table.columns["Request tokens"],
        "output_tokens": table.columns["Response tokens"],
        "model": table.columns["Model"],
    }
    workload = Workload(columns, models=table.names["Model"], notes=tuple(table.notes))
    return from_zero(without_failures(workload), path, options)
