"""Expected times of a replica's engine for prompts and iterations, from its step-time model."""

from __future__ import annotations

from headway.catalog.coefficients import Coefficients
from headway.core.errors import HeadwayError
from headway.core.fleet import Pool
from headway.perf.hosted import Line
from headway.perf.speculation import step_model
from headway.perf.step import launched_s

_UNKNOWN_PREFILL_S, _UNKNOWN_STEP_S = 1e-4, 0.02
"""Seconds per prompt token and per iteration without a model. Observations correct them."""

_HOSTED_TTFT_S = 10.0
"""TTFT of a hosted service of unknown speed, which may reason for long before it answers."""


class PoolTimes:
    """Times of a pool's replicas, each on its own engine. Implements `core.view.EngineTimes`.

    Prefill times are assumed to be linear in the prompt's length. `line` is the pool's step-time function; None:
    unknown. Nothing is computed before the first query.
    """

    __slots__ = ("_drafts", "_hosted", "_least_s", "_line", "_max_num_seqs", "_most_tokens", "_token_s")

    def __init__(self, pool: Pool, line: Line | None) -> None:
        self._line = line
        self._hosted = pool.hosted
        self._max_num_seqs, self._drafts = pool.engine.max_num_seqs, pool.engine.drafts
        self._most_tokens = max(pool.engine.max_num_batched_tokens, 2)
        self._least_s: float | None = None
        self._token_s = 0.0

    @property
    def is_known(self) -> bool:
        """Whether the times come from a model, and are not assumed."""
        return self._line is not None if self._hosted is None else bool(self._hosted.tokens_per_s)

    def prefill_s(self, tokens: int, /) -> float:
        if self._least_s is None:
            self._least_s, self._token_s = self._prefill_line()
        return self._least_s + max(tokens, 0) * self._token_s

    def step_s(self, num_decoding: int, context_tokens: int, /) -> float:
        if self._line is None or self._hosted is not None:
            return 1 / self._hosted.tokens_per_s if self._hosted and self._hosted.tokens_per_s else _UNKNOWN_STEP_S
        num = min(max(num_decoding, 1), self._max_num_seqs)
        step_s = self._line(num, context_tokens, (), 0, 0)[0]
        return step_s if self._drafts is None else step_s / self._drafts.tokens_per_iteration(num)

    def _prefill_line(self) -> tuple[float, float]:
        """Seconds of the shortest prompt, and of each additional token."""
        if self._hosted is not None:
            return self._hosted.ttft_s or _HOSTED_TTFT_S, 0.0
        if self._line is None:
            return _UNKNOWN_STEP_S, _UNKNOWN_PREFILL_S
        least_s = launched_s(self._line(0, 0, [(1, 0)], 0, 0))
        longest_s = launched_s(self._line(0, 0, [(self._most_tokens, 0)], 0, 0))
        return least_s, max(longest_s - least_s, 0.0) / self._most_tokens


def pool_times(pool: Pool, coefficients: Coefficients | None = None) -> PoolTimes:
    """The times of a pool's replicas. `coefficients` replace the catalog's step times."""
    if pool.hosted is not None:
        return PoolTimes(pool, None)
    try:
        model = step_model(pool.model, pool.gpu, pool.engine, pool.parallel, coefficients)
        model.line(0, 0, [(1, 0)])
    except HeadwayError:
        return PoolTimes(pool, None)
    return PoolTimes(pool, model.line)
