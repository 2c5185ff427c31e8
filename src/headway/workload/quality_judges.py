"""Judges that are not the reference: one with a bias and a spread, and ones that are trained. Score tables in and out.

A weak judge decides who goes on; how good the answers are, the reference says:
`reference.quality_of(weak.final_stage(thresholds))`.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Protocol

import numpy as np
from msgspec import Struct

from headway.core.errors import HeadwayError
from headway.workload.quality import Floats, Scores
from headway.workload.streams import stream


class JudgeError(Struct, frozen=True, forbid_unknown_fields=True):
    """How a judge's scores differ from the reference's."""

    bias: float = 0.0
    """Relative: -0.094 scores 9.4% lower, as GPT-4o-mini does (Cascadia, Table 6)."""
    spread: float = 0.0
    """Standard deviation of a normal error, in points."""

    def __post_init__(self) -> None:
        if not -1 <= self.bias < float("inf") or not 0 <= self.spread < float("inf"):
            raise ValueError(f"bias {self.bias}, spread {self.spread}; expected a bias from -1 and a spread from 0")


GPT_4O_MINI, LLAMA_70B = JudgeError(bias=-0.094, spread=8.0), JudgeError(bias=-0.086, spread=8.0)
"""Table 6's weaker judges. Of their spread the paper says only that it is higher than GPT-4o's: 8 points is ours."""


def misjudged(scores: Scores, error: JudgeError, seed: int = 0) -> Scores:
    """The table as this judge would have it, cut to 0 to 100."""
    noise = stream(seed, "judge").normal(0.0, 1.0, scores.scores.shape)
    return replace(scores, scores=np.clip(scores.scores * (1 + error.bias) + error.spread * noise, 0, 100))


def noisy_score(score: float, bias: float, noise: float, seed: int, request: int, stage: int) -> float:
    """What a judge that is off by `bias` points on average says of one answer, whoever decides what about others."""
    error = bias
    if noise:
        error += Random(f"{seed}/judge/{request}/{stage}").gauss(0.0, noise)
    return min(max(score + error, 0.0), 100.0)


class Judge(Protocol):
    """Learns from a score table and scores another one."""

    def learn(self, scores: Scores) -> None:
        """From answers that the reference has judged."""
        ...

    def judge(self, scores: Scores) -> Scores:
        """The same table with scores of its own. It may look at the reference's only if it is an oracle."""
        ...


class Oracle:
    """Agrees with the reference in everything: what is left is a judge's speed (appendix N, second experiment)."""

    def learn(self, scores: Scores) -> None:
        pass

    def judge(self, scores: Scores) -> Scores:
        return scores


class LinearJudge:
    """Each model's score as a line in the logarithms of prompt and answer tokens: the least that can be learned.

    With `blind`, of the prompt alone: what a router knows before anything is generated (appendix I).
    """

    def __init__(self, blind: bool = False) -> None:
        self._blind = blind
        self._weights: dict[str, Floats] = {}

    def learn(self, scores: Scores) -> None:
        for i, name in enumerate(scores.models):
            known = ~np.isnan(scores.scores[:, i])
            if not known.any():
                raise HeadwayError(f"judge: no score of {name} to learn from")
            features = self._features(scores, i)[known]
            self._weights[name] = np.linalg.lstsq(features, scores.scores[known, i], rcond=None)[0]

    def judge(self, scores: Scores) -> Scores:
        for name in scores.models:
            if name not in self._weights:
                raise HeadwayError(f"judge: has learned nothing of {name}")
        found = [self._features(scores, i) @ self._weights[name] for i, name in enumerate(scores.models)]
        return replace(scores, scores=np.clip(np.stack(found, axis=1), 0, 100))

    def _features(self, scores: Scores, model: int) -> Floats:
        columns = [np.ones(len(scores)), np.log(scores.prompt_tokens)]
        if not self._blind:
            columns.append(np.log(scores.output_tokens[:, model]))
        return np.stack(columns, axis=1)


def trained(scores: Scores, judge: Judge, share: float = 0.7, seed: int = 0) -> tuple[Scores, Scores]:
    """The requests that the judge did not learn from: as the reference scores them, and as the judge does.

    It learns from `share` of them (appendix N: 70%).
    """
    seen, unseen = scores.split(share, seed)
    judge.learn(seen)
    return unseen, judge.judge(unseen)
