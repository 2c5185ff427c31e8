"""Public CSV traces with one header line: Azure, BurstGPT, and Mooncake cut down to lengths.

Azure LLM inference traces of 2023 and 2024 (Azure/AzurePublicDataset) have timestamps with seven digits of a second
(2023) or a time zone (2024). BurstGPT (HPMLL/BurstGPT) has arrivals in seconds and the name of a model. Mooncake cut
down to lengths (kvcache-ai/Mooncake) has arrivals in milliseconds and does not say which blocks requests share.
"""

from __future__ import annotations

from pathlib import Path

from headway.workload.readers.csv_table import SECONDS, TEXT, TIME, TOKENS, header_of, read_table
from headway.workload.readers.shared import ReadOptions, normalised, without_failures
from headway.workload.table import Workload

AZURE = {"TIMESTAMP": TIME, "ContextTokens": TOKENS, "GeneratedTokens": TOKENS}
BURSTGPT = {"Timestamp": SECONDS, "Model": TEXT, "Request tokens": TOKENS, "Response tokens": TOKENS}
MOONCAKE_LENGTHS = {"timestamp_ms": SECONDS, "input_length": TOKENS, "output_length": TOKENS}


def is_azure(line: str) -> bool:
    return header_of(line) == list(AZURE)


def read_azure(path: Path, options: ReadOptions) -> Workload:
    """Read arrivals, prompts and outputs. Rows of zero tokens are skipped and counted."""
    table = read_table(path, AZURE, "TIMESTAMP", options)
    nanoseconds = table.columns["TIMESTAMP"]
    columns = {
        "arrival_s": (nanoseconds - nanoseconds.min()) / 1e9,
        "prompt_tokens": table.columns["ContextTokens"],
        "output_tokens": table.columns["GeneratedTokens"],
    }
    return normalised(without_failures(Workload(columns, notes=tuple(table.notes))), path, options)


def is_burstgpt(line: str) -> bool:
    """Newer files have session columns besides."""
    return set(BURSTGPT) <= set(header_of(line))


def read_burstgpt(path: Path, options: ReadOptions) -> Workload:
    """Read arrivals, models, prompts and outputs. Rows of zero tokens are failures: skipped and counted."""
    table = read_table(path, BURSTGPT, "Timestamp", options)
    columns = {
        "arrival_s": table.columns["Timestamp"],
        "prompt_tokens": table.columns["Request tokens"],
        "output_tokens": table.columns["Response tokens"],
        "model": table.columns["Model"],
    }
    workload = Workload(columns, models=table.names["Model"], notes=tuple(table.notes))
    return normalised(without_failures(workload), path, options)


def is_mooncake_lengths(line: str) -> bool:
    return set(MOONCAKE_LENGTHS) <= set(header_of(line))


def read_mooncake_lengths(path: Path, options: ReadOptions) -> Workload:
    table = read_table(path, MOONCAKE_LENGTHS, "timestamp_ms", options)
    columns = {
        "arrival_s": table.columns["timestamp_ms"] / 1e3,
        "prompt_tokens": table.columns["input_length"],
        "output_tokens": table.columns["output_length"],
    }
    return normalised(without_failures(Workload(columns, notes=tuple(table.notes))), path, options)
