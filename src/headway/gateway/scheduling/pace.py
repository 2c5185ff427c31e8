"""The seconds that a replica is expected to need, by its step model."""

from __future__ import annotations

from headway.catalog.coefficients import Coefficients
from headway.core.errors import HeadwayError
from headway.core.fleet import Pool
from headway.perf.speculation import AnyStepModel, step_model

_UNKNOWN_PREFILL_S, _UNKNOWN_STEP_S = 1e-4, 0.02
"""Seconds a prompt token, and an iteration, where there is no model. What is observed corrects them."""

_HOSTED_TTFT_S = 10.0
"""Of a hosted service that nothing is known of: it may think for long before it answers."""


class ExpectedPace:
    """Prefill and iteration times of a pool's replicas on an engine of their own. Prefill times are taken as linear in
    the prompt's length, which is good enough for limits that are many times as long."""

    def __init__(self, pool: Pool, coefficients: Coefficients | None = None) -> None:
        """`coefficients` replace the catalog's step times."""
        self._model: AnyStepModel | None
        self._max_num_seqs, self._drafts = pool.engine.max_num_seqs, pool.engine.drafts
        tokens = max(pool.engine.max_num_batched_tokens, 2)
        self._step_s = _UNKNOWN_STEP_S
        if pool.hosted is not None:
            self._model, self._token_s = None, 0.0
            self._least_s = pool.hosted.ttft_s or _HOSTED_TTFT_S
            self._step_s = 1 / (pool.hosted.tokens_per_s or 1 / _UNKNOWN_STEP_S)
            return
        try:
            self._model = step_model(pool.model, pool.gpu, pool.engine, pool.parallel, coefficients)
            self._least_s = self._model.line(0, 0, [(1, 0)])[0]
            self._token_s = max(self._model.line(0, 0, [(tokens, 0)])[0] - self._least_s, 0.0) / tokens
        except HeadwayError:
            self._model, self._least_s, self._token_s = None, _UNKNOWN_STEP_S, _UNKNOWN_PREFILL_S

    def prefill_s(self, tokens: int) -> float:
        """Seconds to compute so many prompt tokens."""
        return self._least_s + max(tokens, 0) * self._token_s

    def step_s(self, num_decoding: int, context_tokens: int) -> float:
        """Seconds in which each of so many sequences gets a token, over so many tokens in all."""
        if self._model is None:
            return self._step_s
        num = min(max(num_decoding, 1), self._max_num_seqs)
        step_s = self._model.line(num, context_tokens)[0]
        return step_s if self._drafts is None else step_s / self._drafts.tokens_per_iteration(num)
