"""ServeGen's requests. Source: alibaba/ServeGen.

Reasoning requests are a CSV file, window_start_s,client,input_tokens,reason_tokens,answer_tokens, where the first
column is the 600-second window of the arrival, unordered. Some files have only the three token columns. Batch jobs are
JSON lines, {"request_id", "type", "input_length", "output_length", "duration"}, without arrivals.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import structs

from headway.core.errors import HeadwayError
from headway.workload.readers.csv_table import SECONDS, TOKENS, header_of, read_table
from headway.workload.readers.shared import (
    NO_ARRIVALS,
    ReadOptions,
    blocks,
    first_line,
    normalised,
    without_failures,
)
from headway.workload.table import MAX_TOKENS, Workload

WINDOW_S = 600.0
WINDOW = "window_start_s"
LENGTHS = {"input_tokens": TOKENS, "reason_tokens": TOKENS, "answer_tokens": TOKENS}


def read(path: Path, options: ReadOptions) -> Workload:
    """Read prompts, reasoning and answers. Arrivals are spread evenly over their windows."""
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


class _BatchRequest(msgspec.Struct, gc=False):
    input_length: int
    output_length: int | None = None


def matches_batch(line: str) -> bool:
    return line.startswith("{") and all(f'"{key}"' in line for key in ("request_id", "type", "input_length"))


def read_batch(path: Path, options: ReadOptions) -> Workload:
    """Read the lengths of a batch job's requests, which all arrive together."""
    decode, bad = msgspec.json.Decoder(_BatchRequest).decode, list[str]()
    lengths: list[tuple[int, int]] = []
    for first, block in blocks(path):
        for number, text in enumerate(block.split(b"\n"), first):
            if not text.strip() or len(lengths) == options.limit:
                continue
            try:
                request = decode(text)
                found = _batch_lengths(request)
            except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
                if not options.skip_bad:
                    raise HeadwayError(f"{path}: line {number}: {error}; --skip-bad leaves bad lines out") from None
                bad.append(f"line {number}: {error}")
                continue
            lengths.append(found)
    prompt, output = np.array(lengths, "i4").reshape(-1, 2).T
    notes = (*([f"{len(bad)} bad lines skipped; the first: {bad[0]}"] if bad else []), NO_ARRIVALS)
    columns = {"arrival_s": np.zeros(len(prompt)), "prompt_tokens": prompt, "output_tokens": output}
    return normalised(without_failures(Workload(columns, notes=notes)), path, options)


def _batch_lengths(request: _BatchRequest) -> tuple[int, int]:
    if request.output_length is None:
        raise ValueError("no output_length: content-hash traces have no lengths of answers")
    for name, tokens in (("input_length", request.input_length), ("output_length", request.output_length)):
        if not 0 <= tokens <= MAX_TOKENS:
            raise ValueError(f"{name}: {tokens}; expected 0 to {MAX_TOKENS:,}")
    return request.input_length, request.output_length
