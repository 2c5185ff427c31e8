"""Time to choose the next tokens from a batch's logits, beyond the argmax of greedy decoding.

Engines cut the candidates of top-p and top-k by sorting the whole vocabulary, for every row of the batch as soon as one
of its requests needs it. Each tensor-parallel rank does the same work, so the time is that of one GPU.
"""

from __future__ import annotations

from headway.catalog.coefficients import Overhead
from headway.core.fleet import Engine, Gpu, Model


class Sampler:
    """The sampler of one engine, for one model with its requests' sampling parameters."""

    __slots__ = ("_latency_s", "_row_s", "_share")

    def __init__(self, model: Model, gpu: Gpu, engine: Engine, overhead: Overhead) -> None:
        sampling = model.sampling
        num_bytes = self._latency_s = 0.0
        if sampling is not None and sampling.is_cut:
            sorts = is_before(engine.version, overhead.sorts_before)
            num_bytes += overhead.sort_bytes_per_logit if sorts else overhead.cut_bytes_per_logit
            self._latency_s += overhead.sampler_latency_s
        if sampling is not None and sampling.is_penalised:
            num_bytes += overhead.penalty_bytes_per_logit
            self._latency_s += overhead.sampler_latency_s
        self._row_s = num_bytes * model.vocab_size / gpu.bandwidth_bytes_per_s
        self._share = sampling.share if sampling is not None else 0.0

    def seconds(self, num_rows: int) -> float:
        """Expected sampling seconds of `num_rows` sequences, each of which needs the sampler with the probability
        `share`."""
        if not num_rows:
            return 0.0
        return (self._latency_s + num_rows * self._row_s) * (1.0 - (1.0 - self._share) ** num_rows)


def is_before(version: str, limit: str) -> bool:
    """Whether an engine's version is older than `limit`. An unknown version counts as older; no version is older than
    an empty limit."""
    if not limit or not version:
        return True
    return _numbers(version) < _numbers(limit)


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: (0, 15, 1) for 0.15.1."""
    numbers = []
    for part in version.lstrip("v").split("."):
        digits = part[: next((i for i, c in enumerate(part) if not c.isdigit()), len(part))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)
