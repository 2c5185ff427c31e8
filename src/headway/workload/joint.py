"""The lengths of one request together: how they move with each other, and requests of several kinds.

Prompt, reasoning and answer are drawn one by one, or tied by a rank correlation: a Gaussian copula with one
common factor, so that each keeps its own distribution. In real traces long thoughts come with long answers
(Spearman 0.43 in ServeGen's reasoning requests, over its clients), and the two share a request's memory.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from headway.workload import lengths
from headway.workload.streams import draw, stream
from headway.workload.table import Longs

if TYPE_CHECKING:
    from headway.workload.spec import Part, WorkloadSpec


def token_columns(spec: WorkloadSpec, num: int, seed: int) -> dict[str, Longs]:
    """Prompts, outputs and, where any request reasons, reasoning tokens (part of the outputs) of `num` requests.

    A request of a mix has the lengths it would have if all were of its kind: changing the shares changes only
    who is of which kind.
    """
    if spec.mix is None:
        return _drawn(spec, num, seed)
    kind = draw(list(range(len(spec.mix))), [part.share for part in spec.mix], num, seed, "mix")
    parts = [_drawn(part, num, seed) for part in spec.mix]
    absent, row = np.zeros(num, "i8"), np.arange(num)
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: np.stack([part.get(name, absent) for part in parts])[kind, row] for name in names}


def _drawn(said: WorkloadSpec | Part, num: int, seed: int) -> dict[str, Longs]:
    """The columns of requests that are all of one kind."""
    common = stream(seed, "correlation").standard_normal(num) if said.correlation else None

    def column(name: lengths.Column) -> Longs:
        length, random = getattr(said, name), stream(seed, name)
        if common is None:
            return lengths.sample(length, name, random, num, name)
        # Of two normals with correlation r, the ranks have the correlation 6 / pi * asin(r / 2).
        shared = 2 * math.sin(math.pi / 6 * (said.correlation or 0.0))
        scores = math.sqrt(shared) * common + math.sqrt(1 - shared) * random.standard_normal(num)
        return lengths.at(length, name, scores, name)

    columns = {"prompt_tokens": column("prompt_tokens"), "output_tokens": column("output_tokens")}
    if said.reasoning_tokens is not None:
        columns["reasoning_tokens"] = column("reasoning_tokens")
        columns["output_tokens"] += columns["reasoning_tokens"]
    return columns
