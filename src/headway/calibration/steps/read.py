"""Reads a log of an engine's iterations, and groups them into spans with certain durations.

An engine that schedules ahead processes an iteration's output only after it has launched the next iteration. If the
next one has prompt tokens, its launch takes the host 10 to 40 ms: the first iteration then seems to end late, and the
next one seems too short. Only the sum of both is certain. A span therefore ends with an iteration whose successor has
no prompt tokens.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from msgspec import Struct

from headway.core.errors import HeadwayError
from headway.perf.step import Chunk
from headway.workload.readers.shared import open_unpacked

COLUMNS = (
    "seq",
    "scheduled_s",
    "done_s",
    "decodes",
    "decode_context_tokens",
    "prompt_tokens",
    "prompt_chunks",
)
"""Required columns. Optional: `model`, `phase` (iterations of different phases are never neighbours) and `first_use`
(if not empty, an effect that happens once after a start)."""
MARKS = ("scheduled_s", "done_s", "decode_context_tokens", "prompt_chunks")
STILL_S = 1.0
"""Largest mean time of a span's iterations. A larger one includes a standstill of the engine, for example to compile a
kernel at its first use."""


class Iteration(Struct, frozen=True):
    decodes: int
    context_tokens: int
    """KV tokens of the decoding sequences."""
    chunks: tuple[Chunk, ...]


class Span(Struct, frozen=True):
    """Consecutive iterations and their total seconds."""

    iterations: tuple[Iteration, ...]
    seconds: float
    has_equal_contexts: bool = False
    """Whether all prompts of the traffic had one length, so that all sequences have about the same context."""


class StepLog(Struct, frozen=True):
    """The spans of one file, and the number of unused iterations by reason."""

    file: str
    about: dict[str, Any]
    """The log's facts on its engine: `version`, `model`, `device`, `tp`, ...; empty for a plain table."""
    spans: tuple[Span, ...]
    num_rows: int
    left_out: dict[str, int]

    @property
    def num_used(self) -> int:
        return sum(len(span.iterations) for span in self.spans)


def is_steps(path: Path) -> bool:
    """Whether a file is a log of iterations, or a folder holds such logs."""
    if path.is_dir():
        return any(path.glob("steps-*.csv"))
    try:
        with open_unpacked(path) as file:
            line = next((line for line in file if not line.startswith(b"#")), b"").decode("utf-8", "replace")
    except HeadwayError:
        return False
    return all(mark in line.strip().split(",") for mark in MARKS)


def read(path: Path) -> StepLog:
    """Read one file, or all rotated files of a folder. Raises HeadwayError for a bad cell, with its line."""
    files = sorted(path.glob("steps-*.csv")) if path.is_dir() else [path]
    parts = [_read(file) for file in files]
    left_out: dict[str, int] = {}
    for part in parts:
        for why, num in part.left_out.items():
            left_out[why] = left_out.get(why, 0) + num
    about = {key: value for part in parts for key, value in part.about.items()}
    spans = tuple(span for part in parts for span in part.spans)
    return StepLog(str(path), about, spans, sum(part.num_rows for part in parts), left_out)


def _read(path: Path) -> StepLog:
    about: dict[str, Any] = {}
    left_out: dict[str, int] = {}
    with open_unpacked(path) as packed, TextIOWrapper(packed, "utf-8", "replace", newline="") as file:
        first = file.readline()
        head = first
        if first.startswith("#"):
            about = _about(first, path)
            head = file.readline()
        header = [name.strip() for name in head.rstrip("\r\n").split(",")]
        if missing := [name for name in COLUMNS if name not in header]:
            raise HeadwayError(f"{path}: not a log of iterations: missing columns {', '.join(missing)}")
        offset = 2 if not first.startswith("#") else 3
        rows = [
            _Row(dict(zip(header, cells, strict=False)), path, i) for i, cells in enumerate(csv.reader(file), offset)
        ]
    models = sorted({row.cells.get("model", "") for row in rows})
    if len(models) > 1:
        raise HeadwayError(f"{path}: iterations of several models: {', '.join(models)}; expected one model a file")
    lengths: dict[str, set[int]] = {}
    for row in rows:
        lengths.setdefault(row.part, set()).update(new for new, before in row.iteration.chunks if not before)
    equal = {part for part, each in lengths.items() if len(each) == 1}
    spans = tuple(_spans(rows, equal, left_out))
    return StepLog(str(path), about, spans, len(rows), left_out)


def _about(line: str, path: Path) -> dict[str, Any]:
    try:
        found = json.loads(line.lstrip("# "))
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise HeadwayError(f"{path}:1: expected a JSON object after '#'")
    return found


class _Row:
    """The cells of one line of a step log, with the numbers parsed."""

    def __init__(self, cells: Mapping[str, str], path: Path, line: int) -> None:
        self.cells = cells
        try:
            self.scheduled_s, self.done_s = float(cells["scheduled_s"]), float(cells["done_s"])
            self.seq = int(cells["seq"])
            chunks = tuple(_chunk(each) for each in cells["prompt_chunks"].split(";") if each)
            self.iteration = Iteration(int(cells["decodes"]), int(cells["decode_context_tokens"]), chunks)
            if sum(new for new, _ in chunks) != int(cells["prompt_tokens"]):
                raise ValueError("prompt_tokens is not the sum of prompt_chunks")
        except (KeyError, ValueError) as error:
            raise HeadwayError(f"{path}:{line}: not an iteration: {error}") from None
        self.part = cells.get("phase", "")
        self.is_first_use = bool(cells.get("first_use"))


def _chunk(text: str) -> Chunk:
    new, _, before = text.partition(":")
    return int(new), int(before)


def _spans(rows: Sequence[_Row], equal: Collection[str], left_out: dict[str, int]) -> Iterator[Span]:
    """Group iterations. The start of a span is certain if the engine was idle, or if the end of the previous span is
    certain."""
    span: list[Iteration] = []
    start_s: float | None = None
    for i, row in enumerate(rows):
        before = rows[i - 1] if i else None
        follows = before is not None and before.part == row.part and before.seq == row.seq - 1
        if not follows or before is None or row.scheduled_s > before.done_s:
            _drop(span, left_out, "of a span without an end")
            start_s = row.scheduled_s
        span.append(row.iteration)
        if row.is_first_use:
            _drop(span, left_out, "of first use")
            start_s = None
        after = rows[i + 1] if i + 1 < len(rows) else None
        is_next = after is not None and after.part == row.part and after.seq == row.seq + 1
        if after is not None and is_next and after.scheduled_s <= row.done_s and after.iteration.chunks:
            continue  # its output was processed only after the launch of prompts
        if span and start_s is not None:
            seconds = row.done_s - start_s
            if 0 < seconds < STILL_S * len(span):
                yield Span(tuple(span), seconds, row.part in equal)
                span.clear()
            else:
                _drop(span, left_out, "in which the engine stood still")
        else:
            _drop(span, left_out, "after one without an end")
        start_s = row.done_s
    _drop(span, left_out, "of a span without an end")


def _drop(span: list[Iteration], left_out: dict[str, int], why: str) -> None:
    if span:
        left_out[why] = left_out.get(why, 0) + len(span)
        span.clear()
