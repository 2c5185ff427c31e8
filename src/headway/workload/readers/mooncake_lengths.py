"""A Mooncake trace cut down to lengths: timestamp_ms,input_length,output_length,n_hash_blocks."""

from __future__ import annotations

from pathlib import Path

from headway.workload.readers import kinds
from headway.workload.readers.csvtable import header_of, read_table
from headway.workload.readers.finish import from_zero, without_failures
from headway.workload.readers.options import Options
from headway.workload.table import Workload

COLUMNS = {"timestamp_ms": kinds.SECONDS, "input_length": kinds.TOKENS, "output_length": kinds.TOKENS}


def matches(line: str) -> bool:
    """By its header."""
    return set(COLUMNS) <= set(header_of(line))


def read(path: Path, options: Options) -> Workload:
    """Arrivals, prompts and outputs; which blocks were shared is not in the file."""
    table = read_table(path, COLUMNS, "timestamp_ms", options)
    columns = {
        "arrival_s": table.columns["timestamp_ms"] / 1e3,
        "prompt_tokens": table.columns["input_length"],
        "output_tokens": table.columns["output_length"],
    }
    return from_zero(without_failures(Workload(columns, notes=tuple(table.notes))), path, options)
