"""Imperfect judges: the reference with bias and noise, and a trained linear judge. Both convert score tables.

An imperfect judge decides which requests escalate, while the reference scores the answers:
`reference.quality_of(imperfect.final_stage(thresholds))`.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
from msgspec import Struct

from headway.core.errors import HeadwayError
from headway.workload.quality import Scores
from headway.workload.random_streams import stream
from headway.workload.table import Floats


class JudgeNoise(Struct, frozen=True, forbid_unknown_fields=True):
    """The error of a judge's scores against the reference."""

    bias: float = 0.0
    """Relative bias: at -0.094 scores are 9.4% lower, as with GPT-4o-mini (Cascadia, Table 6)."""
    spread: float = 0.0
    """Standard deviation of the normal error, in points."""

    def __post_init__(self) -> None:
        if not -1 <= self.bias < float("inf") or not 0 <= self.spread < float("inf"):
            raise ValueError(f"bias {self.bias}, spread {self.spread}; expected a bias from -1 and a spread from 0")


GPT_4O_MINI, LLAMA_70B = JudgeNoise(bias=-0.094, spread=8.0), JudgeNoise(bias=-0.086, spread=8.0)
"""The weaker judges of Table 6. The paper says only that their spread exceeds GPT-4o's; 8 points is our choice."""


def misjudged(scores: Scores, noise: JudgeNoise, seed: int = 0) -> Scores:
    """The table with the scores of a noisy judge, clipped to 0 to 100."""
    normal = stream(seed, "judge").normal(0.0, 1.0, scores.scores.shape)
    return replace(scores, scores=np.clip(scores.scores * (1 + noise.bias) + noise.spread * normal, 0, 100))


def noisy_score(score: float, bias: float, noise: float, seed: int, request: int, stage: int) -> float:
    """Score of one answer by a judge with a mean error of `bias` points and a standard deviation of `noise` points.

    The score depends only on the arguments, not on the order of the calls.
    """
    error = bias
    if noise:
        error += Random(f"{seed}/judge/{request}/{stage}").gauss(0.0, noise)
    return min(max(score + error, 0.0), 100.0)


class LinearJudge:
    """Each model's score as a linear function of the logarithms of prompt and answer tokens.

    With `blind`, a function of the prompt only, because a router knows only the prompt before generation (Cascadia,
    appendix I).
    """

    def __init__(self, blind: bool = False) -> None:
        self._blind = blind
        self._weights: dict[str, Floats] = {}

    def fit(self, scores: Scores) -> None:
        for i, name in enumerate(scores.models):
            known = ~np.isnan(scores.scores[:, i])
            if not known.any():
                raise HeadwayError(f"judge: no scores of {name} to fit")
            features = self._features(scores, i)[known]
            self._weights[name] = np.linalg.lstsq(features, scores.scores[known, i], rcond=None)[0]

    def judge(self, scores: Scores) -> Scores:
        for name in scores.models:
            if name not in self._weights:
                raise HeadwayError(f"judge: not fitted for {name}")
        predicted = [self._features(scores, i) @ self._weights[name] for i, name in enumerate(scores.models)]
        return replace(scores, scores=np.clip(np.stack(predicted, axis=1), 0, 100))

    def _features(self, scores: Scores, model: int) -> Floats:
        columns = [np.ones(len(scores)), np.log(scores.prompt_tokens)]
        if not self._blind:
            columns.append(np.log(scores.output_tokens[:, model]))
        return np.stack(columns, axis=1)


def trained(scores: Scores, judge: LinearJudge, share: float = 0.7, seed: int = 0) -> tuple[Scores, Scores]:
    """Fit the judge on `share` of the requests (appendix N: 70%). Return the other requests, scored by the reference
    and by the judge.
    """
    training, rest = scores.split(share, seed)
    judge.fit(training)
    return rest, judge.judge(rest)
