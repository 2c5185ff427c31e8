"""Step times of an engine that speculates: one pass verifies the drafted tokens, then the next ones are drafted.

Verification is an iteration in which each decoding sequence has k + 1 tokens: weights and KV cache are read once for
all of them, and each goes through the head and the sampler. A draft model or head runs k times: first over all tokens
of the iteration including prompt chunks, then over one token of each sequence at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import ceil
from typing import Final

from msgspec.structs import replace

from headway.catalog.coefficients import Coefficients
from headway.catalog.load import coefficients as measured
from headway.core.fleet import Engine, Gpu, Model, Parallel, Speculative
from headway.perf.memory import draft_parallel
from headway.perf.step import Chunk, StepModel

DRAFT_PASS_S = 0.17e-3
"""Host time of each draft pass: inputs and attention metadata, kernels launched one by one. With DRAFT_STEP_S, it fits
the step times of EAGLE with 2 to 7 tokens at batch size 1 on H100 (vLLM issue 20780). Other GPUs, batches and versions
were not measured."""
DRAFT_STEP_S = 0.6e-3
"""Host time of an iteration with drafts, to count rejected tokens and prepare inputs before the next one starts."""
NGRAM_SEQUENCE_S = 20e-6
"""Host time to look for a match in one sequence. An assumption."""
_MOST_KEPT: Final = 256
"""Cached step-time models."""


class SpeculativeStepModel:
    """Step times of one kind of speculating replica, with the interface of `StepModel`."""

    __slots__ = ("_draft_first", "_draft_next", "_setting", "_verify", "calibrated")

    def __init__(
        self, model: Model, gpu: Gpu, engine: Engine, parallel: Parallel, setting: Speculative, used: Coefficients
    ) -> None:
        self._setting = setting
        self._verify: dict[int, StepModel] = {}
        self._draft_first: dict[int, StepModel] = {}
        draft = setting.draft
        passes = replace(used, overhead=replace(used.overhead, step_s=DRAFT_PASS_S))
        plain = StepModel(model, gpu, engine, parallel, used)
        self._draft_next = (
            None if draft is None else StepModel(draft, gpu, engine, draft_parallel(setting, parallel), passes)
        )
        for num in {setting.num_speculative_tokens, *(n for *_, n in setting.num_speculative_tokens_per_batch_size), 0}:
            queries = 1 + ceil(num * setting.match_share)
            self._verify[num] = StepModel(model, gpu, engine, parallel, used, queries, queries) if num else plain
            if draft is not None:
                shape = draft_parallel(setting, parallel)
                self._draft_first[num] = StepModel(draft, gpu, engine, shape, passes, queries, 1)
        self.calibrated = False
        """False, because the times of drafts were not measured on this GPU and engine."""

    def line(
        self,
        num_decode: int,
        context_tokens: int,
        chunks: Sequence[Chunk] = (),
        window_tokens: int = 0,
        num_growing: int = 0,
    ) -> tuple[float, float, int | None]:
        """Like `StepModel.line`; `b_s` is the growth if each sequence gets one token per iteration.

        A batch without drafts takes as long as without speculation. The work that keeps the draft's KV complete is
        neglected.
        """
        num = self._setting.num_drafted(num_decode) if num_decode else self._setting.num_speculative_tokens
        a_s, b_s, valid = self._verify[num].line(num_decode, context_tokens, chunks, window_tokens, num_growing)
        if not num:
            return a_s, b_s, valid
        if self._draft_next is None:
            return a_s + num_decode * NGRAM_SEQUENCE_S + DRAFT_STEP_S * (num_decode > 0), b_s, valid
        first_a_s, first_b_s, _ = self._draft_first[num].line(num_decode, context_tokens, chunks)
        a_s, b_s = a_s + first_a_s + DRAFT_STEP_S, b_s + first_b_s
        if num > 1:
            next_a_s, next_b_s, _ = self._draft_next.line(num_decode + len(chunks), context_tokens)
            a_s, b_s = a_s + (num - 1) * next_a_s, b_s + (0.0 if chunks else (num - 1) * next_b_s)
        return a_s, b_s, valid

    def least_s(self, num_tokens: int) -> float:
        """Least seconds of a step with `num_tokens` tokens (`StepModel.least_s`), without drafting."""
        return self._verify[0].least_s(num_tokens)


AnyStepModel = StepModel | SpeculativeStepModel


def step_model(
    model: Model, gpu: Gpu, engine: Engine, parallel: Parallel, coefficients: Coefficients | None = None
) -> AnyStepModel:
    """The step times of a replica, including speculative decoding if it has any.

    The most recent models are cached with their computed times, because planners rehearse the same replicas many times.
    """
    return _kept(_Facts(model, gpu, engine, parallel, coefficients or measured(gpu.name, engine.name, engine.version)))


class _Facts:
    """The inputs that step times depend on. Some cannot be hashed, but all can be compared."""

    __slots__ = ("hashed", "values")

    def __init__(self, model: Model, gpu: Gpu, engine: Engine, parallel: Parallel, used: Coefficients) -> None:
        self.values = model, gpu, engine, parallel, used
        self.hashed = hash((model.name, gpu.name, engine.name, parallel))

    def __hash__(self) -> int:
        return self.hashed

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Facts) and self.values == other.values


@lru_cache(_MOST_KEPT)
def _kept(facts: _Facts) -> AnyStepModel:
    model, gpu, engine, parallel, used = facts.values
    if engine.drafts is None:
        return StepModel(model, gpu, engine, parallel, used)
    return SpeculativeStepModel(model, gpu, engine, parallel, engine.drafts, used)
