"""`quality:` of a scenario's workload: where the scores of the models' answers come from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from msgspec import Struct, structs

from headway.core.errors import HeadwayError
from headway.workload.promises import positive
from headway.workload.quality import Scores
from headway.workload.quality_columns import with_scores
from headway.workload.quality_reader import Answers, read_scores
from headway.workload.quality_traces import Cascade, generate
from headway.workload.table import Workload


class QualitySpec(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How good each model's answer to each request is, and how long. Rows of one table are drawn at random, each as
    often as any other."""

    trace: int | None = None
    """1, 2 or 3: scores made to measure after the three traces of the Cascadia paper."""
    cascade: Cascade = "deepseek"
    """Of a trace: whose models."""
    num_requests: int = 400
    """Of a trace: rows of the table."""
    seed: int = 0
    """Of a trace: another seed makes another table. The scenario's seed does not."""
    path: str | None = None
    """In place of a trace: a CSV file with a line for each answer, relative to the scenario's folder."""
    layout: Answers | None = None
    """Of a file: which columns hold what. Nothing = request, model, score, output_tokens."""
    models: tuple[str, ...] | dict[str, str] | None = None
    """Only these, the smallest first; {the file's name: ours} where they differ. Nothing = all of them."""
    reasoning_share: float = 0.0
    """The part of every answer that is reasoning, and comes first."""

    def __post_init__(self) -> None:
        if (self.trace is None) == (self.path is None):
            raise ValueError("quality: expected trace or path, and not both")
        positive(self, "num_requests")
        if not 0 <= self.reasoning_share <= 1:
            raise ValueError(f"quality: reasoning_share: {self.reasoning_share}; expected 0 to 1")


def table(spec: QualitySpec, base_dir: Path) -> Scores:
    """The scores that a section stands for."""
    given = spec.models
    theirs = None if given is None else tuple(given)
    if spec.path is None:
        if isinstance(given, dict):
            raise HeadwayError("workload: quality: models: names of a file's models, but there is no file")
        assert spec.trace is not None
        made = generate(spec.trace, spec.num_requests, spec.seed, spec.cascade)
        return made if theirs is None else made.stages(theirs)
    read = read_scores(base_dir / spec.path, theirs, spec.layout)
    return replace(read, models=tuple(given.values())) if isinstance(given, dict) else read


def only(spec: QualitySpec, models: tuple[str, ...]) -> QualitySpec:
    """The same table with these models' columns only."""
    if not isinstance(spec.models, dict):
        return structs.replace(spec, models=models)
    return structs.replace(spec, models={theirs: ours for theirs, ours in spec.models.items() if ours in models})


def scored(rows: Workload, spec: QualitySpec, seed: int, base_dir: Path) -> Workload:
    """The workload's arrivals with lengths and scores of the table."""
    return with_scores(rows, table(spec, base_dir), seed, spec.reasoning_share)
