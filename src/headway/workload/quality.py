"""How good each model's answer to each request is: score tables, and what thresholds make of them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import isfinite

import numpy as np
import numpy.typing as npt

from headway.core.errors import HeadwayError, unknown
from headway.workload.streams import stream

Floats = npt.NDArray[np.float64]
Longs = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Scores:
    """One row per request, one column per model, the smallest model first: the stages of a cascade.

    A score is 0 to 100, NaN where nobody judged the answer. Do not write to the arrays.
    """

    models: tuple[str, ...]
    scores: Floats
    """[request, model]."""
    output_tokens: Longs
    """[request, model]: how long each model's answer is."""
    prompt_tokens: Longs
    """[request]."""
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
        """These requests, in this order; a mask is as good."""
        return replace(
            self,
            scores=self.scores[index],
            output_tokens=self.output_tokens[index],
            prompt_tokens=self.prompt_tokens[index],
        )

    def stages(self, models: Sequence[str]) -> Scores:
        """These models only, in this order."""
        for name in models:
            if name not in self.models:
                raise unknown("model", name, self.models, "scores")
        at = [self.models.index(name) for name in models]
        return replace(self, models=tuple(models), scores=self.scores[:, at], output_tokens=self.output_tokens[:, at])

    def split(self, share: float, seed: int) -> tuple[Scores, Scores]:
        """`share` of the requests at random, and the others, both in their own order."""
        if not 0 < share < 1:
            raise HeadwayError(f"share: {share}; expected a number between 0 and 1")
        first = np.zeros(len(self), np.bool_)
        first[stream(seed, "split of scores").permutation(len(self))[: round(share * len(self))]] = True
        return self.take(first), self.take(~first)

    def final_stage(self, thresholds: Sequence[float]) -> Longs:
        """The stage whose answer each request is given: the first whose score reaches its threshold, else the last.

        One threshold for every stage but the last. An answer that was not judged is not accepted.
        """
        check_thresholds(thresholds, len(self.models))
        accepted = np.ones(self.scores.shape, np.bool_)
        with np.errstate(invalid="ignore"):
            accepted[:, :-1] = self.scores[:, :-1] >= np.asarray(thresholds, "f8")
        found: Longs = np.argmax(accepted, axis=1)
        return found

    def ratios(self, thresholds: Sequence[float]) -> tuple[float, ...]:
        """The share of the requests that each stage processes (Table 2's p)."""
        return processed(self.final_stage(thresholds), len(self.models))

    def quality(self, thresholds: Sequence[float]) -> float | None:
        """Mean score of the answers given (3.3, footnote 3)."""
        return self.quality_of(self.final_stage(thresholds))

    def quality_of(self, final: Longs) -> float | None:
        """The same where `final` says whose answer each request is given; None where none of them was judged."""
        given = self.scores[np.arange(len(self)), final]
        given = given[~np.isnan(given)]
        return float(given.mean()) if len(given) else None


def processed(final: Longs, num_stages: int) -> tuple[float, ...]:
    """The share of the requests that reaches each stage, where `final` is the last that a request reaches."""
    if not len(final):
        return (0.0,) * num_stages
    return tuple(float((final >= stage).mean()) for stage in range(num_stages))


def check_thresholds(thresholds: Sequence[float], num_stages: int) -> None:
    """HeadwayError unless there is one for every stage but the last."""
    if len(thresholds) != num_stages - 1:
        raise HeadwayError(f"thresholds: {len(thresholds)} for {num_stages} models; expected one fewer than models")
    for each in thresholds:
        if not isfinite(each):
            raise HeadwayError(f"thresholds: {each}; expected a number (0 accepts all, above 100 accepts none)")
