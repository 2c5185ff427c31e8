"""Synthetic judge scores that reproduce Table 2 of the Cascadia paper for its three traces.

Table 2 gives pairs of thresholds and the shares of requests that escalate. They fix points of the first model's score
distribution, P(s1 < h1) = p2, and of the joint one, P(s1 < h1, s2 < h2) = p3. Between those points scores are spread
evenly, and the two models' scores depend on each other in the simplest way: half of the requests are as hard for the
second model as for the first; for the other half the two scores are independent. Parameters that the paper does not
give (the intervals between the points, and the largest model's scores on requests that the others fail) are set so
that the mean score at Table 2's thresholds is what each row requires, or up to one point above it.

The Llama cascade has no such table. Its first model has the first model's scores; its second model has scores with
which the qualities required in the paper can be reached.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import numpy as np
from msgspec import Struct, structs

from headway.core.errors import HeadwayError
from headway.workload.lengths import Lognormal
from headway.workload.quality import Scores
from headway.workload.random_streams import stream
from headway.workload.table import Floats

CORRELATED = 0.5
"""Share of the requests that are as hard for the second model as for the first."""
GOLDEN = 0.6180339887498949
DEEPSEEK = ("deepseek-r1-distill-qwen-7b", "deepseek-r1-distill-llama-70b", "deepseek-r1-awq")
LLAMA = ("llama-3-8b", "llama-3-70b")
CASCADES = {"deepseek": DEEPSEEK, "llama": LLAMA}
Cascade = Literal["deepseek", "llama"]
Knots = tuple[tuple[float, float], ...]
"""(score, share of the answers below it), both rising, from share 0 to 1."""


class Table2Row(Struct, frozen=True):
    """Quality target, trace, thresholds, share of requests per stage, and GPUs per stage."""

    q_min: float
    trace: int
    thresholds: tuple[float, float]
    ratios: tuple[float, float, float]
    gpus: tuple[int, int, int]


TABLE_2 = (
    Table2Row(90, 1, (99, 91), (1, 0.94, 0.50), (4, 8, 20)),
    Table2Row(85, 1, (74, 64), (1, 0.62, 0.21), (4, 12, 16)),
    Table2Row(80, 1, (69, 25), (1, 0.54, 0.11), (6, 14, 12)),
    Table2Row(80, 2, (61, 18), (1, 0.31, 0.03), (8, 16, 8)),
    Table2Row(80, 3, (32, 0), (1, 0.23, 0), (18, 14, 0)),
    Table2Row(70, 3, (10, 0), (1, 0.05, 0), (24, 8, 0)),
)


class ScoreDistributions(Struct, frozen=True):
    first: Knots
    second: Knots
    last: tuple[float, float]
    """Range of the last model's scores, spread evenly. `hard` requests have other ranges."""
    hard: tuple[tuple[float, float, float, float], ...]
    """(h1, h2, low, high): if the first two scores are below (h1, h2), the last one lies between (low, high). The first
    matching entry counts."""
    llama: Knots
    """Scores of the second and last model of the Llama cascade."""


def below(p2: float, p3: float) -> float:
    """P(s2 < h2) from the two shares of Table 2: the joint share is CORRELATED min(u, v) + (1 - CORRELATED) u v."""
    return p3 / (CORRELATED + (1 - CORRELATED) * p2)


TRACES: dict[int, ScoreDistributions] = {
    1: ScoreDistributions(
        first=((0, 0), (69, 0.54), (74, 0.62), (92, 0.75), (99, 0.94), (100, 1)),
        second=(
            (0, 0),
            (25, below(0.54, 0.11)),
            (52, 0.18),
            (64, below(0.62, 0.21)),
            (91, below(0.94, 0.50)),
            (100, 1),
        ),
        last=(94, 100),
        hard=((69, 25, 30, 80), (74, 64, 82, 100), (99, 91, 88, 100)),
        llama=((0, 0), (60, 0.10), (80, 0.25), (100, 1)),
    ),
    2: ScoreDistributions(
        first=((0, 0), (61, 0.31), (80, 0.60), (100, 1)),
        second=((0, 0), (18, below(0.31, 0.03)), (70, 0.10), (85, 0.30), (100, 1)),
        last=(88, 100),
        hard=((61, 18, 30, 90),),
        llama=((0, 0), (60, 0.08), (80, 0.20), (100, 1)),
    ),
    3: ScoreDistributions(
        first=((0, 0), (10, 0.05), (32, 0.23), (62, 0.26), (84, 0.55), (100, 1)),
        second=((0, 0), (60, 0.05), (70, 0.10), (85, 0.60), (100, 1)),
        last=(88, 100),
        hard=(),
        llama=((0, 0), (60, 0.05), (80, 0.15), (100, 1)),
    ),
}

PROMPT = Lognormal(mean=160, cv=1.0)
OUTPUT = Lognormal(mean=430, cv=0.8)
"""A Llama answer to MT-Bench has about 430 tokens, by the latencies of single requests in Cascadia's appendix H."""
AnswerLengths = Literal["alike", "by_difficulty"]
MEAN_TOKENS = {"deepseek": (1100.0, 1300.0, 1531.0), "llama": (430.0, 430.0)}
"""Mean answers by model where lengths differ. DeepSeek-R1's are those of one of its public traces (ServeGen's reasoning
requests: thoughts and answer); those of its distilled models are assumed to be somewhat shorter."""
HARDEST_TO_EASIEST = 4.0
"""Ratio of answer lengths between the hardest and the easiest request, where lengths differ: assumed."""


def generate_scores(
    trace: int,
    num_requests: int,
    seed: int = 0,
    cascade: Cascade = "deepseek",
    prompt: Lognormal = PROMPT,
    output: Lognormal | tuple[Lognormal, ...] = OUTPUT,
    lengths: AnswerLengths = "alike",
) -> Scores:
    """Generate a score table of a trace (1 to 3). `output`: one distribution for all models, or one per model.

    `lengths`: either all answers follow `output`, or each model's mean length grows with the request's difficulty,
    which is the rank of the first model's score. In the second case only the variation of `output` is used.

    Shares match Table 2 to within about 1 / num_requests^0.5 / 3, because draws are spread evenly, not independent.
    """
    if trace not in TRACES:
        raise HeadwayError(f"trace: {trace}; expected 1, 2 or 3")
    if num_requests < 1:
        raise HeadwayError(f"num_requests: {num_requests}; expected 1 or more")
    models = CASCADES[cascade]
    outputs = output if isinstance(output, tuple) else (output,) * len(models)
    if len(outputs) != len(models):
        raise HeadwayError(f"output: {len(outputs)} distributions for {len(models)} models")
    name = f"scores of trace {trace}"
    random = stream(seed, name)
    scores = _scores(TRACES[trace], cascade, num_requests, random)[random.permutation(num_requests)]
    if lengths == "by_difficulty":
        outputs = tuple(
            structs.replace(each, mean=mean) for each, mean in zip(outputs, MEAN_TOKENS[cascade], strict=True)
        )
    pairs = zip(outputs, models, strict=True)
    tokens = [each.sample(stream(seed, f"{name}: {model}"), num_requests) for each, model in pairs]
    prompts = prompt.sample(stream(seed, f"{name}: prompts"), num_requests)
    answers = np.stack(tokens, axis=1)
    if lengths == "by_difficulty":
        answers = np.maximum(1, np.rint(answers * _growth(scores[:, :1]))).astype("i8")
    return Scores(models, scores, answers, prompts)


def _growth(first_scores: Floats) -> Floats:
    """Relative length of each request's answers, by the rank of its first score."""
    ease = np.argsort(np.argsort(first_scores, axis=0, kind="stable"), axis=0) / max(1, len(first_scores) - 1)
    growth = HARDEST_TO_EASIEST ** (0.5 - ease)
    return np.asarray(growth / growth.mean())


def _scores(trace: ScoreDistributions, cascade: Cascade, num: int, random: np.random.Generator) -> Floats:
    rows = np.arange(num)
    first = (rows + random.random()) / num
    other = (rows * GOLDEN + random.random()) % 1.0
    second = np.where((rows * np.sqrt(2.0) + random.random()) % 1.0 < CORRELATED, first, other)
    s1 = _inverse(trace.first, first)
    if cascade == "llama":
        return np.stack([s1, _inverse(trace.llama, second)], axis=1)
    s2 = _inverse(trace.second, second)
    low, high = np.full(num, trace.last[0], "f8"), np.full(num, trace.last[1], "f8")
    for h1, h2, worst, best in reversed(trace.hard):
        inside = (s1 < h1) & (s2 < h2)
        low[inside], high[inside] = worst, best
    return np.stack([s1, s2, low + (high - low) * random.random(num)], axis=1)


def _inverse(knots: Knots, shares: Floats) -> Floats:
    """Scores below which these shares of the answers lie."""
    scores, below_ = zip(*knots, strict=True)
    if any(b[1] <= a[1] for a, b in pairwise(knots)) or (below_[0], below_[-1]) != (0, 1):
        raise ValueError(f"knots {knots}: shares do not rise from 0 to 1")
    inverse: Floats = np.interp(shares, below_, scores)
    return inverse
