"""ServeGen reasoning requests: window_start_s,client,input_tokens,reason_tokens,answer_tokens.

Source: alibaba/ServeGen. The file gives the 600-second window in which each request arrived, unordered; or it has only
the three columns of tokens.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
from msgspec import structs

from headway.workload.readers.csv_table import SECONDS, TOKENS, header_of, read_table
from headway.workload.readers.shared import NO_ARRIVALS, ReadOptions, first_line, normalised, without_failures
from headway.workload.table import Workload

WINDOW_S = 600.0
WINDOW = "window_start_s"
LENGTHS = {"input_tokens": TOKENS, "reason_tokens": TOKENS, "answer_tokens": TOKENS}


def read(path: Path, options: ReadOptions) -> Workload:
    """Read prompts, reasoning and answers, with arrivals spread evenly over their window."""
    timed = WINDOW in header_of(first_line(path))
    columns = {WINDOW: SECONDS, **LENGTHS} if timed else LENGTHS
    # The order of lines carries no meaning here, so the rows are sorted whatever the options.
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
        return normalised(workload.with_notes(NO_ARRIVALS), path, options)
    spread = workload.with_columns({"arrival_s": _spread(workload.arrival_s)})
    return normalised(spread.with_notes("arrivals spread evenly over windows of 600 s"), path, options)


def _spread(window_s: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Put request k of the n in a window at (k + 1/2) / n of the window."""
    _, first, counts = np.unique(window_s, return_index=True, return_counts=True)
    k = np.arange(len(window_s)) - np.repeat(first, counts)
    return window_s + (k + 0.5) / np.repeat(counts, counts) * WINDOW_S
