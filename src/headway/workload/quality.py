"""Score tables: the quality of each model's answer to each request, and the effect of thresholds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any

import numpy as np
import numpy.typing as npt

from headway.core.errors import HeadwayError, unknown
from headway.workload.random_streams import stream
from headway.workload.table import LENGTH, QUALITY, Floats, Longs, Workload

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Scores:
    """One row per request, one column per model, the smallest model first: the stages of a cascade.

    A score is 0 to 100, or NaN if the answer was not judged. Do not write to the arrays.
    """

    models: tuple[str, ...]
    scores: Floats
    """Scores with shape [request, model]."""
    output_tokens: Longs
    """Length of each model's answer, with shape [request, model]."""
    prompt_tokens: Longs
    """Prompt lengths with shape [request]."""
    notes: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        shape = (len(self.prompt_tokens), len(self.models))
        if len(set(self.models)) < len(self.models) or not self.models:
            raise HeadwayError(f"scores: models {', '.join(self.models)}; expected one or more, each once")
        if self.scores.shape != shape or self.output_tokens.shape != shape:
            raise HeadwayError(f"scores: {self.scores.shape} scores and {self.output_tokens.shape} lengths of {shape}")
        known = self.scores[~np.isnan(self.scores)]
        if len(known) and not (known.min() >= 0 and known.max() <= 100):
            raise HeadwayError(f"scores: {known.min():g} to {known.max():g}; expected 0 to 100")
        if shape[0] and min(self.output_tokens.min(), self.prompt_tokens.min()) < 1:
            raise HeadwayError("scores: a prompt or an answer without tokens; expected 1 or more")

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    def take(self, index: npt.NDArray[np.int64] | Bools) -> Scores:
        """The requests at these positions in this order, or the requests that a mask selects."""
        return replace(
            self,
            scores=self.scores[index],
            output_tokens=self.output_tokens[index],
            prompt_tokens=self.prompt_tokens[index],
        )

    def stages(self, models: Sequence[str]) -> Scores:
        """Restrict the table to these models, in this order."""
        for name in models:
            if name not in self.models:
                raise unknown("model", name, self.models, "scores")
        at = [self.models.index(name) for name in models]
        return replace(self, models=tuple(models), scores=self.scores[:, at], output_tokens=self.output_tokens[:, at])

    def split(self, share: float, seed: int) -> tuple[Scores, Scores]:
        """Split into a random `share` of the requests and the rest, both in the original order."""
        if not 0 < share < 1:
            raise HeadwayError(f"share: {share}; expected a number between 0 and 1")
        first = np.zeros(len(self), np.bool_)
        first[stream(seed, "split of scores").permutation(len(self))[: round(share * len(self))]] = True
        return self.take(first), self.take(~first)

    def final_stage(self, thresholds: Sequence[float]) -> Longs:
        """The stage whose answer each request gets: the first whose score reaches its threshold, else the last.

        There is one threshold per stage except the last. An answer without a score is not accepted.
        """
        check_thresholds(thresholds, len(self.models))
        accepted = np.ones(self.scores.shape, np.bool_)
        with np.errstate(invalid="ignore"):
            accepted[:, :-1] = self.scores[:, :-1] >= np.asarray(thresholds, "f8")
        first: Longs = np.argmax(accepted, axis=1)
        return first

    def ratios(self, thresholds: Sequence[float]) -> tuple[float, ...]:
        """Share of the requests that each stage processes (p in Cascadia's Table 2)."""
        return processed(self.final_stage(thresholds), len(self.models))

    def quality(self, thresholds: Sequence[float]) -> float | None:
        """Mean score of the final answers (Cascadia, section 3.3, footnote 3)."""
        return self.quality_of(self.final_stage(thresholds))

    def quality_of(self, final: Longs) -> float | None:
        """Mean score of the answers of the stages in `final`; None if none of these answers was judged."""
        scores = self.scores[np.arange(len(self)), final]
        scores = scores[~np.isnan(scores)]
        return float(scores.mean()) if len(scores) else None

    def reweighted(self, first_scores: Floats) -> Scores:
        """A table of the same size, with the first model's scores distributed as `first_scores`.

        Each request is replaced by the request whose first score is nearest to the score of the same rank in
        `first_scores`. Returns the table itself if either set of first scores is unknown.
        """
        own, known = self.scores[:, 0], first_scores[~np.isnan(first_scores)]
        if not len(known) or np.isnan(own).any():
            return self
        rank = np.argsort(np.argsort(own, kind="stable"), kind="stable")
        same_rank = np.quantile(known, (rank + 0.5) / len(own))
        return self.take(np.abs(own - same_rank[:, None]).argmin(axis=1))


def processed(final: Longs, num_stages: int) -> tuple[float, ...]:
    """Share of the requests that reach each stage; `final` is the last stage of each request."""
    if not len(final):
        return (0.0,) * num_stages
    return tuple(float((final >= stage).mean()) for stage in range(num_stages))


def check_thresholds(thresholds: Sequence[float], num_stages: int) -> None:
    """Raise HeadwayError unless there is one finite threshold per stage except the last."""
    if len(thresholds) != num_stages - 1:
        raise HeadwayError(f"thresholds: {len(thresholds)} for {num_stages} models; expected one fewer than models")
    for each in thresholds:
        if not isfinite(each):
            raise HeadwayError(f"thresholds: {each}; expected a number (0 accepts all, above 100 accepts none)")


def with_scores(workload: Workload, scores: Scores, seed: int = 0, reasoning_share: float = 0.0) -> Workload:
    """Give the workload's arrivals the prompts, answers and scores of random rows of the table.

    Rows are drawn equally often, to within one. `reasoning_share` of each answer is reasoning.
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
