"""Score tables from CSV files: a line for each answer, or a line for each request with a column for each model."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from math import isfinite
from pathlib import Path

import numpy as np
from msgspec import Struct

from headway.core.errors import HeadwayError, unknown
from headway.workload.quality import Scores
from headway.workload.readers.blocks import reading

WORDS_TO_TOKENS = 4 / 3
"""Tokens of an English word, roughly; four characters make a token."""
CHARS_TO_TOKENS = 1 / 4

Key = tuple[str, ...]


class Answers(Struct, frozen=True, forbid_unknown_fields=True):
    """Where a file with a line for each answer has what."""

    request: tuple[str, ...] = ("request",)
    """Columns that together name a request."""
    model: str = "model"
    score: str = "score"
    best: float = 100.0
    """The score that counts 100; `worst` counts 0."""
    worst: float = 0.0
    no_score: tuple[str, ...] = ()
    """What stands where the judge gave none, besides an empty cell."""
    output: str | None = "output_tokens"
    """None: no lengths; every answer then takes `default_tokens`."""
    output_scale: float = 1.0
    """Tokens to a unit of `output`, where that counts words or characters."""
    prompt: str | None = None
    prompt_scale: float = 1.0
    default_tokens: int = 430


class _Line(Struct, frozen=True):
    request: Key
    model: str
    score: float
    output_tokens: int
    prompt_tokens: int


def read_scores(path: str | Path, models: Sequence[str] | None = None, layout: Answers | None = None) -> Scores:
    """The table of these models, in this order (None: all, from the lowest mean score to the highest).

    A request that one model has no score for stays, with NaN; an answer that stands there twice is an error.
    """
    path, layout = Path(path), layout or Answers()
    lines = list(_lines(path, layout))
    if not lines:
        raise HeadwayError(f"{path}: no scores in the file, only a header")
    if models is None:
        models = _by_mean(lines)
    found = {line.model for line in lines}
    for name in models:
        if name not in found:
            raise unknown("model", name, found, str(path))
    return _table(path, lines, tuple(models), layout)


def _table(path: Path, lines: Sequence[_Line], models: tuple[str, ...], layout: Answers) -> Scores:
    kept = [line for line in lines if line.model in models]
    rows = {key: i for i, key in enumerate(dict.fromkeys(line.request for line in kept))}
    columns = {name: i for i, name in enumerate(models)}
    shape = (len(rows), len(models))
    scores, outputs = np.full(shape, np.nan), np.full(shape, layout.default_tokens, "i8")
    prompts, seen = np.full(len(rows), layout.default_tokens, "i8"), np.zeros(shape, np.bool_)
    for line in kept:
        at = rows[line.request], columns[line.model]
        if seen[at]:
            raise HeadwayError(f"{path}: {line.model} answers request {' '.join(line.request)} twice")
        seen[at], scores[at], outputs[at], prompts[at[0]] = True, line.score, line.output_tokens, line.prompt_tokens
    missing = int(np.isnan(scores).sum())
    notes = (f"{missing} of {scores.size} answers have no score",) if missing else ()
    return Scores(models, scores, outputs, prompts, notes)


def _by_mean(lines: Sequence[_Line]) -> list[str]:
    given: dict[str, list[float]] = {}
    for line in lines:
        if line.score == line.score:
            given.setdefault(line.model, []).append(line.score)
    return sorted(given, key=lambda name: (float(np.mean(given[name])), name))


def _lines(path: Path, layout: Answers) -> Iterator[_Line]:
    wanted = [*layout.request, layout.model, layout.score, *filter(None, (layout.output, layout.prompt))]
    for number, row in _rows(path, wanted):
        where = f"{path}: line {number}"
        given = "" if row[layout.score] in layout.no_score else row[layout.score]
        score = _number(given, f"{where}: column {layout.score}")
        if score == score:
            score = 100 * (score - layout.worst) / (layout.best - layout.worst)
            if not 0 <= score <= 100:
                raise HeadwayError(
                    f"{where}: column {layout.score}: {row[layout.score]}; expected {layout.worst:g} to {layout.best:g}"
                )
        yield _Line(
            tuple(row[name] for name in layout.request),
            row[layout.model],
            score,
            _tokens(row, layout.output, layout.output_scale, layout.default_tokens, where),
            _tokens(row, layout.prompt, layout.prompt_scale, layout.default_tokens, where),
        )


def _tokens(row: dict[str, str], name: str | None, scale: float, default: int, where: str) -> int:
    if name is None:
        return default
    value = _number(row[name], f"{where}: column {name}")
    return default if value != value else max(1, round(value * scale))


def read_wide(path: str | Path, columns: dict[str, str], best: float = 1.0, layout: Answers | None = None) -> Scores:
    """A file with a line for each request: `columns` names the column of each model's score, smallest model first.

    Of `layout`, only the prompt's column and `default_tokens` count.
    """
    path, layout = Path(path), layout or Answers()
    wanted = [*columns.values(), *filter(None, (layout.prompt,))]
    scores: list[list[float]] = []
    prompts: list[int] = []
    for number, row in _rows(path, wanted):
        where = f"{path}: line {number}"
        scores.append([100 * _number(row[name], f"{where}: column {name}") / best for name in columns.values()])
        prompts.append(_tokens(row, layout.prompt, layout.prompt_scale, layout.default_tokens, where))
    if not scores:
        raise HeadwayError(f"{path}: no scores in the file, only a header")
    table = np.array(scores)
    return Scores(tuple(columns), table, np.full(table.shape, layout.default_tokens, "i8"), np.array(prompts, "i8"))


def _rows(path: Path, wanted: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """(line number, cells by column) of every line."""
    with reading(path) as file:
        reader = csv.DictReader(io.TextIOWrapper(file, "utf-8-sig", newline=""))
        for name in wanted:
            if name not in (reader.fieldnames or ()):
                raise unknown("column", name, reader.fieldnames or (), f"{path}: line 1")
        for row in reader:
            if None in row.values():
                raise HeadwayError(f"{path}: line {reader.line_num}: fewer cells than the header has")
            yield reader.line_num, row


def _number(cell: str, where: str) -> float:
    """NaN for an empty cell."""
    if not cell.strip():
        return float("nan")
    try:
        value = float(cell)
    except ValueError:
        value = float("inf")
    if not isfinite(value):
        raise HeadwayError(f"{where}: {cell!r}; expected a number, or nothing")
    return value
