"""ServeGen reasoning requests: window_start_s,client,input_tokens,reason_tokens,answer_tokens.

Source: alibaba/ServeGen. The file says in which 600-second window a request came, in no order; or it has only
the three columns of tokens.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
from msgspec import structs

from headway.workload.readers import kinds
from headway.workload.readers.blocks import first_line
from headway.workload.readers.csvtable import header_of, read_table
from headway.workload.readers.finish import NO_ARRIVALS, from_zero, without_failures
from headway.workload.readers.options import Options
from headway.workload.table import Workload

WINDOW_S = 600.0
WINDOW = "window_start_s"
TOKENS = {
    "input_tokens": kinds.TOKENS,
    "reason_tokens": kinds.TOKENS,
    "answer_tokens": kinds.TOKENS,
}


def matches(line: str) -> bool:
    """By its header."""
    return set(TOKENS) <= set(header_of(line))


def read(path: Path, options: Options) -> Workload:
    """Arrivals spread evenly over their window, prompts, reasoning and answers."""
    timed = WINDOW in header_of(first_line(path))
    columns = {WINDOW: kinds.SECONDS, **TOKENS} if timed else TOKENS
    # The order of lines says nothing here, so it needs no leave to be sorted.
    table = read_table(path, columns, WINDOW, structs.replace(options, sort=True))
    reasoning = table.columns["reason_tokens"]
    requests = {
        "arrival_s": table.columns[WINDOW] if timed else np.zeros(len(table)),
        "prompt_tokens": table.columns["input_tokens"],
        "output_tokens": reasoning + table.columns["answer_tokens"],
        "reasoning_tokens": reasoning,
    }
    workload = without_failures(Workload(requests, notes=tuple(table.notes))).sorted()
    if not timed:
        return from_zero(workload.with_notes(NO_ARRIVALS), path, options)
    spread = workload.with_columns({"arrival_s": _spread(workload.arrival_s)})
    return from_zero(spread.with_notes("arrivals spread evenly over windows of 600 s"), path, options)


def _spread(window_s: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The k-th of n requests of a window, at (k + 1/2) / n of it."""
    _, first, counts = np.unique(window_s, return_index=True, return_counts=True)
    k = np.arange(len(window_s)) - np.repeat(first, counts)
    return window_s + (k + 0.5) / np.repeat(counts, counts) * WINDOW_S
