"""Azure LLM inference traces of 2023 and 2024: TIMESTAMP,ContextTokens,GeneratedTokens.

Timestamps have seven digits of a second (2023) or a time zone (2024). Source: Azure/AzurePublicDataset.
"""

from __future__ import annotations

from pathlib import Path

from headway.workload.readers import kinds
from headway.workload.readers.csvtable import header_of, read_table
from headway.workload.readers.finish import from_zero, without_failures
from headway.workload.readers.options import Options
from headway.workload.table import Workload

COLUMNS = {"TIMESTAMP": kinds.TIME, "ContextTokens": kinds.TOKENS, "GeneratedTokens": kinds.TOKENS}


def matches(line: str) -> bool:
    """By its header."""
    return header_of(line) == list(COLUMNS)


def read(path: Path, options: Options) -> Workload:
    """Arrivals, prompts and outputs. Rows of zero tokens are skipped and counted."""
    table = read_table(path, COLUMNS, "TIMESTAMP", options)
    nanoseconds = table.columns["TIMESTAMP"]
    columns = {
        "arrival_s": (nanoseconds - nanoseconds.min()) / 1e9,
        "prompt_tokens": table.columns["ContextTokens"],
        "output_tokens": table.columns["GeneratedTokens"],
    }
    return from_zero(without_failures(Workload(columns, notes=tuple(table.notes))), path, options)
