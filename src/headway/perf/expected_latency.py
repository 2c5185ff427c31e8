"""Predicts one request's latencies from a step-time model and the other requests at its replica."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headway.core.fleet import Pool
from headway.perf.speculation import AnyStepModel
from headway.perf.step import launched_s

MOMENTS = 8
"""Moments of a request's decoding at which the load is sampled."""
_MIDDLES = (np.arange(MOMENTS) + 0.5) / MOMENTS
FULL = 0.9
"""Largest share of the time that prompts may take."""
Floats = npt.NDArray[np.float64]
"""Stays at a replica, one row each: placement, first token and end in seconds; prompt and output tokens; for
`decode_parts` also the computed prompt tokens. An unknown first token is NaN."""


class Seconds(NamedTuple):
    """A time divided into its parts."""

    decode: float
    """Time of decoding sequences, including their part of iterations with prompts."""
    prefill: float
    """Time that prompts add to iterations."""
    request: float = 0.0
    """Time outside the batch: from the arrival to the scheduler, and from the scheduler to the client."""

    @property
    def total(self) -> float:
        return self.decode + self.prefill + self.request


def decode_parts(stay: Floats, others: Floats, pool: Pool, model: AnyStepModel) -> Seconds:
    """Predicted seconds from a request's first token to its end, from the load at several moments."""
    _, start_s, end_s, prompt, tokens, _ = stay.tolist()
    begun = others[others[:, 1] < end_s]  # stays with an unknown first token are left out
    begins_s = begun[:, 1]
    batch = _batches(start_s + (end_s - start_s) * _MIDDLES, begun, pool)
    own = (prompt + tokens * _MIDDLES).tolist()
    rates = 0.0
    for (num, context), mine in zip(batch, own, strict=True):
        rates += 1.0 / model.line(num, round(context + mine), window_tokens=round(context + mine))[0]
    decode_s = (tokens - 1) * MOMENTS / rates
    added_s = 0.0
    came = np.flatnonzero(begins_s > start_s)
    if len(came):
        came = came[np.argsort(begins_s[came])]
        came_s = begins_s[came]
        each = np.minimum((came_s - start_s) / (end_s - start_s) * MOMENTS, MOMENTS - 1).astype(int)
        is_apart = came_s[1:] - came_s[:-1] > 0.25 * decode_s / (tokens - 1)
        together = np.flatnonzero(np.concatenate(([True], is_apart)))
        sums = np.add.reduceat(begun[came, 5], together)
        for at, sum_tokens in zip(each[together].tolist(), sums.tolist(), strict=True):
            num, context = batch[at]
            added_s += _prompts(sum_tokens, num, round(context + own[at]), pool, model).prefill
    return Seconds(decode_s, added_s)


def _batches(moments_s: Floats, others: Floats, pool: Pool) -> list[tuple[int, float]]:
    """The number of decoding sequences at each moment, including the request itself, and the KV tokens of the other
    sequences."""
    begins_s, ends_s, moments_s = others[:, 1], others[:, 2], moments_s[:, None]
    is_there = (begins_s <= moments_s) & (ends_s > moments_s)
    done = (moments_s - begins_s) / np.maximum(ends_s - begins_s, 1e-9)
    context = ((others[:, 3] + others[:, 4] * done) * is_there).sum(axis=1)
    nums = np.minimum(1 + is_there.sum(axis=1), pool.engine.max_num_seqs)
    return list(zip(nums.tolist(), context.tolist(), strict=True))


def itl_s(
    start_s: float, end_s: float, context: float, others: Floats, pool: Pool, model: AnyStepModel
) -> float | None:
    """Predicted time between tokens of a request that decodes in this interval, from the mean load."""
    begins_s = np.where(np.isnan(others[:, 1]), np.inf, others[:, 1])
    shares = np.clip(np.minimum(others[:, 2], end_s) - np.maximum(begins_s, start_s), 0, None) / (end_s - start_s)
    num = max(1, round(1 + float(shares.sum())))
    num = min(num, pool.engine.max_num_seqs)
    tokens = round(context + float((shares * (others[:, 3] + others[:, 4] / 2)).sum()))
    decode_s = model.line(num, tokens, window_tokens=tokens)[0]
    prompts = others[(begins_s > start_s) & (begins_s < end_s), 3]
    if not len(prompts):
        return decode_s
    added_s = _prompts(float(prompts.mean()), num, tokens, pool, model).prefill
    share = len(prompts) * added_s / (end_s - start_s)
    if share > FULL:  # the engine was slower than predicted: prompts alone would fill the time
        return None
    return decode_s / (1 - share)


def is_undisturbed(stay: Floats, others: Floats) -> bool:
    """Whether no other prompt was computed before a request's first token."""
    placed_s, first_s = stay[0], stay[1]
    return not bool(((others[:, 0] < first_s) & ~(others[:, 1] < placed_s)).any())


def first_token_parts(
    placed_s: float, prompt: float, others: Floats, pool: Pool, model: AnyStepModel
) -> Seconds | None:
    """Predicted seconds to the first token; None if the request waited for a batch slot."""
    there = others[(others[:, 0] < placed_s) & (others[:, 2] > placed_s)]
    if len(there) + 1 > pool.engine.max_num_seqs:
        return None
    is_computed = there[:, 1] <= placed_s
    decoding, queued = there[is_computed], there[~is_computed]
    left = (queued[:, 1] - placed_s) / (queued[:, 1] - queued[:, 0])
    left[np.isnan(left)] = 1.0
    context = round(float((decoding[:, 3] + decoding[:, 4] / 2).sum()))
    num, engine = len(decoding), pool.engine
    total = prompt + float((left * queued[:, 3]).sum())
    computed = _prompts(total, num, context, pool, model)
    waited_s = (0.5 + engine.schedule_lag) * model.line(num, context, window_tokens=context)[0] if num else 0.0
    host_s = engine.request_overhead_s + engine.response_overhead_s + engine.tokenize_s_per_token * prompt
    return Seconds(computed.decode + waited_s, computed.prefill, host_s)


def ttft_s(placed_s: float, prompt: float, others: Floats, pool: Pool, model: AnyStepModel) -> float | None:
    """Predicted time to the first token; None if the request waited for a batch slot."""
    parts = first_token_parts(placed_s, prompt, others, pool, model)
    return None if parts is None else parts.total


def _prompts(prompt_tokens: float, num: int, context: int, pool: Pool, model: AnyStepModel) -> Seconds:
    """Seconds of the iterations that compute this many prompt tokens beside decoding sequences."""
    tokens = max(1, round(prompt_tokens))
    chunks = -(-tokens // max(1, pool.engine.max_num_batched_tokens - num))
    chunk = -(-tokens // chunks)
    decode_s = model.line(num, context, window_tokens=context)[0] if num else 0.0
    mixed_s = sum(launched_s(model.line(num, context, [(chunk, i * chunk)], context)) for i in range(chunks))
    return Seconds(chunks * decode_s, max(mixed_s - chunks * decode_s, 0.0))
