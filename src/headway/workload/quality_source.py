"""The `quality:` section of a workload: scores from a CSV file with one line per answer, or from a generated trace."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import isfinite
from pathlib import Path

import numpy as np
from msgspec import Struct, structs

from headway.core.errors import HeadwayError, unknown
from headway.workload.arrivals import check_positive
from headway.workload.quality import Scores, with_scores
from headway.workload.quality_traces import AnswerLengths, Cascade, generate_scores
from headway.workload.readers.shared import ReadOptions, open_unpacked, trace_file
from headway.workload.table import LENGTH, QUALITY, Workload


class AnswerLayout(Struct, frozen=True, forbid_unknown_fields=True):
    """Columns of a file with one line per answer."""

    request: tuple[str, ...] = ("request",)
    """Columns that together identify a request."""
    model: str = "model"
    score: str = "score"
    best: float = 100.0
    """The score that maps to 100; `worst` maps to 0."""
    worst: float = 0.0
    no_score: tuple[str, ...] = ()
    """Values that mean no score, besides an empty cell."""
    output: str | None = "output_tokens"
    """Column of the answers' lengths. None: every answer has `default_tokens`."""
    output_scale: float = 1.0
    """Tokens per unit of `output`, if the column counts words or characters."""
    prompt: str | None = None
    prompt_scale: float = 1.0
    default_tokens: int = 430


class QualitySpec(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Score and length of each model's answer to each request. Rows of one table are drawn at random with equal
    frequency."""

    trace: int | None = None
    """1, 2 or 3: synthetic scores after the three traces of the Cascadia paper."""
    cascade: Cascade = "deepseek"
    """The cascade of models of a trace."""
    num_requests: int = 400
    """Number of rows in a trace's table."""
    seed: int = 0
    """Seed of a trace's table. The scenario's seed does not change the table."""
    lengths: AnswerLengths = "alike"
    """Lengths of a trace's answers: alike, or growing with difficulty and different by model."""
    path: str | None = None
    """A CSV file with one line per answer, instead of a trace; relative to the scenario's folder. Or the
    `requests.parquet` of a run with a cascade, whose answers have scores."""
    layout: AnswerLayout | None = None
    """The file's columns. Default: request, model, score, output_tokens."""
    models: tuple[str, ...] | dict[str, str] | None = None
    """Only these models, the smallest first, or {name in the file: name in the fleet} if the names differ. Default: all
    models."""
    reasoning_share: float = 0.0
    """Share of every answer that is reasoning, which comes first."""

    def __post_init__(self) -> None:
        if (self.trace is None) == (self.path is None):
            raise ValueError("quality: expected trace or path, and not both")
        check_positive(self, "num_requests")
        if not 0 <= self.reasoning_share <= 1:
            raise ValueError(f"quality: reasoning_share: {self.reasoning_share}; expected 0 to 1")


def score_table(spec: QualitySpec, base_dir: Path) -> Scores:
    """The scores that a `quality:` section describes."""
    models = spec.models
    names = None if models is None else tuple(models)
    if spec.path is None:
        if isinstance(models, dict):
            raise HeadwayError("workload: quality: models: maps names of a file, but there is no file")
        assert spec.trace is not None
        scores = generate_scores(spec.trace, spec.num_requests, spec.seed, spec.cascade, lengths=spec.lengths)
        return scores if names is None else scores.stages(names)
    path = trace_file(base_dir / spec.path)
    if path.suffix == ".parquet":
        if spec.layout is not None:
            raise HeadwayError("workload: quality: layout: for CSV files; a run's records have their own columns")
        scores = served_scores(path, names)
    else:
        scores = read_scores(path, names, spec.layout)
    return replace(scores, models=tuple(models.values())) if isinstance(models, dict) else scores


def restricted_to(spec: QualitySpec, models: tuple[str, ...]) -> QualitySpec:
    """This section, restricted to these models."""
    if not isinstance(spec.models, dict):
        return structs.replace(spec, models=models)
    return structs.replace(
        spec, models={name: own_name for name, own_name in spec.models.items() if own_name in models}
    )


def scored(rows: Workload, spec: QualitySpec, seed: int, base_dir: Path) -> Workload:
    """Give the workload's arrivals lengths and scores from the table of a `quality:` section."""
    return with_scores(rows, score_table(spec, base_dir), seed, spec.reasoning_share)


LEAST_COMPLETE = 20
"""Minimum number of requests with a score of every model in a table of a served day."""


def served_scores(path: Path, models: Sequence[str] | None = None) -> Scores:
    """The scores in the records of a run. `models` None: all models, ordered by the mean score of complete requests.

    Easy requests have no answer of the larger models, and the last model's answers are not judged. The table therefore
    has only requests that every model answered and the judge scored: the random share that replanning audits. They are
    weighted so that the first model's scores are distributed as in all requests.
    """
    from headway.workload.files import read_parquet  # imports pyarrow; other sources do not need it

    rows = read_parquet(path, ReadOptions())
    known = [name.removeprefix(QUALITY) for name in rows.columns if name.startswith(QUALITY)]
    if not known:
        raise HeadwayError(f"{path}: no column {QUALITY}MODEL; expected the records of a run with a cascade")
    for name in models or ():
        if name not in known:
            raise unknown("model", name, known, str(path))
    chosen = tuple(models or known)
    scores = np.stack([rows.columns[QUALITY + name].astype("f8") for name in chosen], axis=1)
    none = np.full(len(rows), -1)
    lengths = np.stack([rows.columns.get(LENGTH + name, none).astype("i8") for name in chosen], axis=1)
    is_complete = (~np.isnan(scores) & (lengths >= 1)).all(axis=1)
    num = int(is_complete.sum())
    if num < LEAST_COMPLETE:
        raise HeadwayError(
            f"{path}: {num} requests have a score of each of {', '.join(chosen)}; expected {LEAST_COMPLETE} or more. "
            "`cascade: {replan: {audit_share: ...}}` has a share of the requests answered by all models"
        )
    if models is None:
        order = np.argsort(scores[is_complete].mean(axis=0), kind="stable")
        chosen, scores, lengths = tuple(chosen[i] for i in order), scores[:, order], lengths[:, order]
    prompts = np.maximum(rows.columns["prompt_tokens"][is_complete].astype("i8"), 1)
    table = Scores(chosen, scores[is_complete], lengths[is_complete], prompts)
    note = f"{num:,} of {len(rows):,} requests have a score of every model"
    return replace(table.reweighted(scores[:, 0]), notes=(note,))


class AnswerLine(Struct, frozen=True):
    request: tuple[str, ...]
    model: str
    score: float
    output_tokens: int
    prompt_tokens: int


def read_scores(path: str | Path, models: Sequence[str] | None = None, layout: AnswerLayout | None = None) -> Scores:
    """Read the scores of these models, in this order. None: all models, in order of their mean score.

    A request without a score of some model stays, with NaN. A repeated answer is an error.
    """
    path, layout = Path(path), layout or AnswerLayout()
    lines = list(_lines(path, layout))
    if not lines:
        raise HeadwayError(f"{path}: no scores in the file, only a header")
    if models is None:
        models = _by_mean(lines)
    in_file = {line.model for line in lines}
    for name in models:
        if name not in in_file:
            raise unknown("model", name, in_file, str(path))
    return _score_table(path, lines, tuple(models), layout)


def _score_table(path: Path, lines: Sequence[AnswerLine], models: tuple[str, ...], layout: AnswerLayout) -> Scores:
    chosen = [line for line in lines if line.model in models]
    rows = {key: i for i, key in enumerate(dict.fromkeys(line.request for line in chosen))}
    columns = {name: i for i, name in enumerate(models)}
    shape = (len(rows), len(models))
    scores, outputs = np.full(shape, np.nan), np.full(shape, layout.default_tokens, "i8")
    prompts, seen = np.full(len(rows), layout.default_tokens, "i8"), np.zeros(shape, np.bool_)
    for line in chosen:
        at = rows[line.request], columns[line.model]
        if seen[at]:
            raise HeadwayError(f"{path}: {line.model} answers request {' '.join(line.request)} twice")
        seen[at], scores[at], outputs[at], prompts[at[0]] = True, line.score, line.output_tokens, line.prompt_tokens
    missing = int(np.isnan(scores).sum())
    notes = (f"{missing} of {scores.size} answers have no score",) if missing else ()
    return Scores(models, scores, outputs, prompts, notes)


def _by_mean(lines: Sequence[AnswerLine]) -> list[str]:
    scores: dict[str, list[float]] = {}
    for line in lines:
        if line.score == line.score:
            scores.setdefault(line.model, []).append(line.score)
    return sorted(scores, key=lambda name: (float(np.mean(scores[name])), name))


def _lines(path: Path, layout: AnswerLayout) -> Iterator[AnswerLine]:
    wanted = [*layout.request, layout.model, layout.score, *filter(None, (layout.output, layout.prompt))]
    for number, row in _rows(path, wanted):
        where = f"{path}: line {number}"
        cell = "" if row[layout.score] in layout.no_score else row[layout.score]
        score = _number(cell, f"{where}: column {layout.score}")
        if score == score:
            score = 100 * (score - layout.worst) / (layout.best - layout.worst)
            if not 0 <= score <= 100:
                raise HeadwayError(
                    f"{where}: column {layout.score}: {row[layout.score]}; expected {layout.worst:g} to {layout.best:g}"
                )
        yield AnswerLine(
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


def _rows(path: Path, wanted: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield (line number, cells by column) of every line."""
    with open_unpacked(path) as file:
        reader = csv.DictReader(io.TextIOWrapper(file, "utf-8-sig", newline=""))
        for name in wanted:
            if name not in (reader.fieldnames or ()):
                raise unknown("column", name, reader.fieldnames or (), f"{path}: line 1")
        for row in reader:
            if None in row.values():
                raise HeadwayError(f"{path}: line {reader.line_num}: fewer cells than the header has")
            yield reader.line_num, row


def _number(cell: str, where: str) -> float:
    """The number in a cell, NaN if the cell is empty."""
    if not cell.strip():
        return float("nan")
    try:
        value = float(cell)
    except ValueError:
        value = float("inf")
    if not isfinite(value):
        raise HeadwayError(f"{where}: {cell!r}; expected a number, or nothing")
    return value
