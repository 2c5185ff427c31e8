"""Score tables and the columns of workloads: `quality:MODEL` and `output_tokens:MODEL`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headway.core.errors import HeadwayError, unknown
from headway.workload.quality import Scores
from headway.workload.streams import stream
from headway.workload.table import LENGTH, QUALITY, Workload


def scores_of(workload: Workload, models: Sequence[str]) -> Scores:
    """The table of a workload that carries `quality:MODEL` columns.

    Lengths are those of `output_tokens:MODEL`, else of `output_tokens`.
    """
    for name in models:
        if name not in workload.quality_models:
            raise unknown("model", name, workload.quality_models, "quality columns of the workload")
    lengths = [workload.column(f"{LENGTH}{name}") for name in models]
    outputs = [np.where(tokens < 1, workload.output_tokens, tokens) for tokens in lengths]
    scores = [workload.column(f"{QUALITY}{name}") for name in models]
    return Scores(
        tuple(models),
        np.stack(scores, axis=1),
        np.stack(outputs, axis=1).astype("i8"),
        workload.prompt_tokens.astype("i8"),
        workload.notes,
    )


def with_scores(workload: Workload, scores: Scores, seed: int = 0, reasoning_share: float = 0.0) -> Workload:
    """The workload's arrivals with the prompts, answers and scores of rows drawn at random from the table.

    Every row is drawn as often as any other, give or take once. `reasoning_share` of each answer is reasoning.
    """
    if not len(scores):
        raise HeadwayError("scores: no requests in the table")
    random, num = stream(seed, "rows of scores"), len(workload)
    rounds = [random.permutation(len(scores)) for _ in range(-(-num // len(scores)))]
    rows = np.concatenate([*rounds, np.zeros(0, "i8")])[:num].astype("i8")
    columns: dict[str, npt.NDArray[Any]] = {"prompt_tokens": scores.prompt_tokens[rows]}
    columns["output_tokens"] = scores.output_tokens[rows, 0]
    if reasoning_share:
        columns["reasoning_tokens"] = np.rint(reasoning_share * columns["output_tokens"]).astype("i4")
    for i, name in enumerate(scores.models):
        columns[f"{QUALITY}{name}"] = scores.scores[rows, i]
        columns[f"{LENGTH}{name}"] = scores.output_tokens[rows, i]
    return workload.with_columns(columns)
