"""Regions of batches, and the errors of predicted durations in each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from headway.calibration.steps.read import Span

PROMPTS = ((512, "up to 512"), (2048, "513 to 2,048"), (float("inf"), "over 2,048"))
"""Upper bound of an iteration's prompt tokens, and its name."""


class Region(Struct, frozen=True):
    """Spans of one kind of batch, and the errors of their predicted durations (predicted over measured, minus 1)."""

    name: str
    num_spans: int
    measured_s: float
    """Mean duration of an iteration."""
    error: float
    """Error of the sum of all durations, which is the error of latencies composed of them."""
    median_error: float
    low_error: float
    """10th percentile of the spans' errors."""
    high_error: float
    """90th percentile of the spans' errors."""


def regions(spans: Sequence[Span], predicted_s: npt.NDArray[np.float64]) -> tuple[Region, ...]:
    """Errors by region, the smallest batches first, and over everything."""
    measured_s = np.array([span.seconds for span in spans])
    num = np.array([len(span.iterations) for span in spans])
    names = np.array([_name(span) for span in spans])
    parts = [(name, names == name) for name in sorted(set(names.tolist()), key=_order)]
    found = []
    for name, own in [*parts, ("all", np.ones(len(spans), dtype=bool))]:
        errors = predicted_s[own] / measured_s[own] - 1
        low, middle, high = (float(np.quantile(errors, q)) for q in (0.1, 0.5, 0.9))
        total = float(predicted_s[own].sum() / measured_s[own].sum() - 1)
        mean_s = float(measured_s[own].sum() / num[own].sum())
        found.append(Region(name, int(own.sum()), mean_s, total, middle, low, high))
    return tuple(found)


def cell(span: Span) -> str:
    """A finer part of a region, for fits: by powers of two of sequences, contexts and prompt tokens."""
    one = max(span.iterations, key=lambda each: sum(new for new, _ in each.chunks))
    prompt = sum(new for new, _ in one.chunks)
    if prompt:
        return f"prompt {prompt.bit_length()} {one.decodes > 0}"
    mean_context = one.context_tokens // max(one.decodes, 1)
    return f"decode {max(one.decodes, 1).bit_length()} {mean_context.bit_length()} {span.has_equal_contexts}"


def _name(span: Span) -> str:
    """The region's name: by prompt tokens of the largest iteration, or by the number of sequences without prompts."""
    prompt = max(sum(new for new, _ in one.chunks) for one in span.iterations)
    if not prompt:
        low = 1 << (max(span.iterations[0].decodes, 1).bit_length() - 1)
        return f"decode, {low} to {2 * low - 1} sequences" if low > 1 else "decode, 1 sequence"
    kind = "prompts and decode" if any(one.decodes for one in span.iterations) else "prompts alone"
    return f"{kind}, {next(name for most, name in PROMPTS if prompt <= most)} tokens"


def _order(name: str) -> tuple[int, int]:
    kinds = ("decode", "prompts alone", "prompts and decode")
    kind, _, size = name.partition(",")
    number = "".join(c for c in size.split(" to ")[0] if c.isdigit())
    return kinds.index(kind), int(number or 0) + ("over" in size)
