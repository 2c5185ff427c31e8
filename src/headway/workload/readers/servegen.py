"""ServeGen reasoning requests: window_start_s,client,input_tokens,reason_tokens,answer_tokens.

Source: alibaba/ServeGen. The file says in which 600-second window a request came, in no order.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from headway.workload.readers import kinds
from headway.workload.readers.csvtable import header_of, read_table
from headway.workload.readers.finish import from_zero, without_failures
from headway.workload.readers.options import Options
from headway.workload.table import Workload

WINDOW_S = 600.0
COLUMNS = {
    "window_start_s": kinds.SECONDS,
    "input_tokens": kinds.TOKENS,
    "reason_tokens": kinds.TOKENS,
    "answer_tokens": kinds.TOKENS,
}


def matches(line: str) -> bool:
    """By its header."""
    return set(COLUMNS) <= set(header_of(line))


def read(path: Path, options: Options) -> Workload:
    """Arrivals spread evenly over their window, prompts, reasoning and answers."""
    # The order of lines says nothing here, so it needs no leave to be sorted.
    table = read_table(path, COLUMNS, "window_start_s", _sorting(options))
    reasoning = table.columns["reason_tokens"]
    columns = {
        "arrival_s": table.columns["window_start_s"],
        "prompt_tokens": table.columns["input_tokens"],
        "output_tokens": reasoning + table.columns["answer_tokens"],
        "reasoning_tokens": reasoning,
    }
    workload = without_failures(Workload(columns, notes=tuple(table.notes))).sorted()
    spread = workload.with_columns({"arrival_s": _spread(workload.arrival_s)})
    return from_zero(spread.with_notes("arrivals spread evenly over windows of 600 s"), path, options)


def _sorting(options: Options) -> Options:
    """The options, with sorting on."""
    return Options(limit=options.limit, sort=True, skip_bad=options.skip_bad)


def _spread(window_s: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The k-th of n requests of a window, at (k + 1/2) / n of it."""
    _, first, counts = np.unique(window_s, return_index=True, return_counts=True)
    k = np.arange(len(window_s)) - np.repeat(first, counts)
    return window_s + (k + 0.5) / np.repeat(counts, counts) * WINDOW_S
