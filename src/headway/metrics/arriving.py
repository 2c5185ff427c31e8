"""Tokens and cost while requests arrive, which gives the tokens per dollar of a fleet in steady operation.

After the last arrival a run goes on until the last answer ends. A fleet that keeps its replicas pays for that time,
too, while it serves less and less. For a run of minutes with long answers, this adds a tenth to the paid time. Tokens
and cost are therefore counted until the last arrival.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from headway.metrics.columns import Mask, floats
from headway.metrics.latency import Sample


class WhileArriving(Struct, frozen=True, forbid_unknown_fields=True):
    """Metrics of the span from the start of a run until its last arrival."""

    seconds: float
    usd: float
    joules: float
    """Energy by the rated power of the GPUs."""
    tokens: float
    """Prompt tokens of the requests whose first token came before the last arrival, and their output tokens until the
    last arrival."""
    tokens_in_time: float
    """The tokens of the requests that met their SLOs."""

    @property
    def usd_per_hour(self) -> float:
        return 3600 * self.usd / self.seconds if self.seconds > 0 else 0.0

    @property
    def tokens_per_usd(self) -> float | None:
        """Tokens per USD; None if the run cost nothing."""
        return self.tokens / self.usd if self.usd > 0 else None


def while_arriving(chosen: Sample, is_in_time: Mask) -> WhileArriving:
    """`is_in_time`: whether each request of the sample met its SLOs. Answer tokens are assumed to come evenly."""
    records = chosen.records
    arrival_s = floats(records.workload, "arrival_s")
    end_s = float(arrival_s[-1]) if len(arrival_s) else 0.0
    first_s = floats(records.requests, "first_token_s", chosen.rows)
    last_s = floats(records.requests, "end_s", chosen.rows)
    began = first_s <= end_s
    shares = np.where(began, np.clip((end_s - first_s) / np.maximum(last_s - first_s, 1e-9), 0.0, 1.0), 0.0)
    tokens = np.where(began, chosen.prompt_tokens, 0) + shares * chosen.column("generated_tokens")
    up_s = [sum(max(0.0, min(to_s, end_s) - from_s) for from_s, to_s in each.up) for each in records.replicas]
    return WhileArriving(
        seconds=end_s,
        usd=sum(each.usd_per_hour * paid_s / 3600 for each, paid_s in zip(records.replicas, up_s, strict=True)),
        joules=sum(each.watts * paid_s for each, paid_s in zip(records.replicas, up_s, strict=True)),
        tokens=float(tokens.sum()),
        tokens_in_time=float(tokens[is_in_time].sum()),
    )
