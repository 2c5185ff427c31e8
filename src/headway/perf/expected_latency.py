"""What a step-time model says of one request's latencies, given the requests that it met at its replica."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headway.core.fleet import Pool
from headway.perf.speculation import AnyStepModel

FULL = 0.9
"""Largest share of the time that may be due to prompts."""
Floats = npt.NDArray[np.float64]
Stay = tuple[float, float, float, float, float]
"""Placement, first token and end of a request at its replica, in seconds; prompt and output tokens. Of several, a row
each: the load that another one met. A first token is NaN if it is not known."""


def itl_s(
    start_s: float, end_s: float, context: float, others: Floats, pool: Pool, model: AnyStepModel
) -> float | None:
    """Predicted time between tokens of a request that decodes in this time, by the mean load that it meets."""
    begins_s = np.where(np.isnan(others[:, 1]), np.inf, others[:, 1])
    shares = np.clip(np.minimum(others[:, 2], end_s) - np.maximum(begins_s, start_s), 0, None) / (end_s - start_s)
    num = max(1, round(1 + float(shares.sum())))
    num = min(num, pool.engine.max_num_seqs)
    tokens = round(context + float((shares * (others[:, 3] + others[:, 4] / 2)).sum()))
    decode_s = model.line(num, tokens, window_tokens=tokens)[0]
    prompts = others[(begins_s > start_s) & (begins_s < end_s), 3]
    if not len(prompts):
        return decode_s
    mixed_s = _mixed_s(float(prompts.mean()), num, tokens, pool, model) - decode_s
    share = len(prompts) * mixed_s / (end_s - start_s)
    if share > FULL:  # the engine took longer than what it computed meanwhile: prompts alone would fill the time
        return None
    return decode_s / (1 - share)


def ttft_s(placed_s: float, prompt: float, others: Floats, pool: Pool, model: AnyStepModel) -> float | None:
    """Predicted time to the first token; None if the request had to wait for a seat."""
    there = others[(others[:, 0] < placed_s) & (others[:, 2] > placed_s)]
    if len(there) + 1 > pool.engine.max_num_seqs:
        return None
    is_computed = there[:, 1] <= placed_s
    decoding, queued = there[is_computed], there[~is_computed]
    left = np.nan_to_num((queued[:, 1] - placed_s) / (queued[:, 1] - queued[:, 0]), nan=1.0)
    context = round(float((decoding[:, 3] + decoding[:, 4] / 2).sum()))
    num, engine = len(decoding), pool.engine
    total = prompt + float((left * queued[:, 3]).sum())
    computed_s = _mixed_s(total, num, context, pool, model)
    waited_s = (0.5 + engine.schedule_lag) * model.line(num, context, window_tokens=context)[0] if num else 0.0
    host_s = engine.request_overhead_s + engine.response_overhead_s + engine.tokenize_s_per_token * prompt
    return host_s + waited_s + computed_s


def _mixed_s(prompt_tokens: float, num: int, context: int, pool: Pool, model: AnyStepModel) -> float:
    """Seconds of the iterations that compute so many prompt tokens beside decoding sequences."""
    tokens = max(1, round(prompt_tokens))
    chunks = -(-tokens // max(1, pool.engine.max_num_batched_tokens - num))
    chunk = -(-tokens // chunks)
    return sum(model.line(num, context, [(chunk, i * chunk)], context)[0] for i in range(chunks))
