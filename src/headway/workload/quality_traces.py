"""Judge scores made to measure: Cascadia's three traces, as far as its Table 2 tells them.

Table 2 gives pairs of thresholds and of the shares of requests that go on. They fix points of the first model's score
distribution, P(s1 < h1) = p2, and of the joint one, P(s1 < h1, s2 < h2) = p3. Between those points scores are spread
evenly over intervals, and answers depend on each other in the simplest way there is: half of the requests are as hard
for the second model as for the first, for the other half the two have nothing to do with each other. What the paper
does not tell is set so that the mean score at Table 2's thresholds is what each of its rows asks for, or up to one
point above it: intervals between the points, and how well the largest model does on what the others fail.

The Llama cascade has no such table. Its first model is given the first model's scores, its second one scores with
which the qualities that the paper asks of it can be reached.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import numpy as np
from msgspec import Struct

from headway.core.errors import HeadwayError
from headway.workload.lengths import Lognormal
from headway.workload.quality import Floats, Scores
from headway.workload.streams import stream

TOGETHER = 0.5
"""The share of the requests that are as hard for the second model as for the first."""
GOLDEN = 0.6180339887498949
DEEPSEEK = ("deepseek-r1-distill-qwen-7b", "deepseek-r1-distill-llama-70b", "deepseek-r1-awq")
LLAMA = ("llama-3-8b", "llama-3-70b")
CASCADES = {"deepseek": DEEPSEEK, "llama": LLAMA}
Cascade = Literal["deepseek", "llama"]
Knots = tuple[tuple[float, float], ...]
"""(score, share of the answers below it), both rising, from share 0 to 1."""


class Row(Struct, frozen=True):
    """A row of Table 2."""

    q_min: float
    trace: int
    thresholds: tuple[float, float]
    ratios: tuple[float, float, float]
    gpus: tuple[int, int, int]


TABLE_2 = (
    Row(90, 1, (99, 91), (1, 0.94, 0.50), (4, 8, 20)),
    Row(85, 1, (74, 64), (1, 0.62, 0.21), (4, 12, 16)),
    Row(80, 1, (69, 25), (1, 0.54, 0.11), (6, 14, 12)),
    Row(80, 2, (61, 18), (1, 0.31, 0.03), (8, 16, 8)),
    Row(80, 3, (32, 0), (1, 0.23, 0), (18, 14, 0)),
    Row(70, 3, (10, 0), (1, 0.05, 0), (24, 8, 0)),
)


class Trace(Struct, frozen=True):
    """Distributions of one trace's scores."""

    first: Knots
    second: Knots
    last: tuple[float, float]
    """The last model's scores lie evenly between the two..."""
    hard: tuple[tuple[float, float, float, float], ...]
    """...but for requests whose first two scores are below (h1, h2), where they lie between (low, high); the first
    entry that holds counts."""
    llama: Knots
    """Of the second and last model of the Llama cascade."""


def below(p2: float, p3: float) -> float:
    """P(s2 < h2) from the two shares of Table 2: the joint share is TOGETHER min(u, v) + (1 - TOGETHER) u v."""
    return p3 / (TOGETHER + (1 - TOGETHER) * p2)


TRACES: dict[int, Trace] = {
    1: Trace(
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
    2: Trace(
        first=((0, 0), (61, 0.31), (80, 0.60), (100, 1)),
        second=((0, 0), (18, below(0.31, 0.03)), (70, 0.10), (85, 0.30), (100, 1)),
        last=(88, 100),
        hard=((61, 18, 30, 90),),
        llama=((0, 0), (60, 0.08), (80, 0.20), (100, 1)),
    ),
    3: Trace(
        first=((0, 0), (10, 0.05), (32, 0.23), (62, 0.26), (84, 0.55), (100, 1)),
        second=((0, 0), (60, 0.05), (70, 0.10), (85, 0.60), (100, 1)),
        last=(88, 100),
        hard=(),
        llama=((0, 0), (60, 0.05), (80, 0.15), (100, 1)),
    ),
}

PROMPT = Lognormal(mean=160, cv=1.0)
OUTPUT = Lognormal(mean=430, cv=0.8)
"""A Llama answer of MT-Bench takes about 430 tokens, by the latencies of a lone request in Cascadia's appendix H."""


def generate(
    trace: int,
    num_requests: int,
    seed: int = 0,
    cascade: Cascade = "deepseek",
    prompt: Lognormal = PROMPT,
    output: Lognormal | tuple[Lognormal, ...] = OUTPUT,
) -> Scores:
    """A score table of this trace (1 to 3). `output`: of every model, or one for each.

    Shares hit Table 2's to within about 1 / num_requests^0.5 / 3: draws are spread evenly, not independent.
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
    pairs = zip(outputs, models, strict=True)
    tokens = [each.sample(stream(seed, f"{name}: {model}"), num_requests) for each, model in pairs]
    prompts = prompt.sample(stream(seed, f"{name}: prompts"), num_requests)
    return Scores(models, scores, np.stack(tokens, axis=1), prompts)


def _scores(trace: Trace, cascade: Cascade, num: int, random: np.random.Generator) -> Floats:
    rows = np.arange(num)
    first = (rows + random.random()) / num
    other = (rows * GOLDEN + random.random()) % 1.0
    second = np.where((rows * np.sqrt(2.0) + random.random()) % 1.0 < TOGETHER, first, other)
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
    """The scores below which these shares of the answers lie."""
    scores, below_ = zip(*knots, strict=True)
    if any(b[1] <= a[1] for a, b in pairwise(knots)) or (below_[0], below_[-1]) != (0, 1):
        raise ValueError(f"knots {knots}: shares do not rise from 0 to 1")
    found: Floats = np.interp(shares, below_, scores)
    return found
