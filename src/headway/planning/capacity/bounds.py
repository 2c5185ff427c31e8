"""Lower bounds on a candidate's latencies and on its number of replicas, without a rehearsal.

A request is fastest alone on an empty replica, and a token is cheapest in the cheapest batch. `SLACK` allows for step
times that fall slightly as a batch grows, so that no feasible candidate is ruled out.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor

import numpy as np
import numpy.typing as npt
from msgspec import structs

from headway.catalog.coefficients import Coefficients
from headway.core.errors import HeadwayError
from headway.core.fleet import Pool
from headway.perf import memory
from headway.perf.speculation import AnyStepModel, step_model
from headway.planning.capacity.problem import LATENCY_SLOS, SLO_NAMES, CandidateBounds, Targets

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
SLACK = 0.9
TAIL = 0.01
"""Share of requests above a 99th percentile."""
MOST_TOKENS = 2**18
"""Tokens of the largest iteration considered; larger ones are no cheaper per token."""


@dataclass(frozen=True)
class ArrivingRequests:
    """A workload; each array has one element per request."""

    prompt_tokens: Floats
    computed_tokens: Floats
    """Prompt tokens that no prefix cache can contain."""
    output_tokens: Floats
    span_s: float | None
    """Time from the first arrival to the last; None if arrivals depend on answers."""
    counted: Mask | None = None
    """Requests to which the targets apply: after the warm-up, and with an SLO. None: unknown."""


def lower_bounds(
    pool: Pool, requests: ArrivingRequests, targets: Targets, own: Coefficients | None = None
) -> CandidateBounds:
    """Latencies of an unloaded replica and the fewest replicas for the work; or why no number suffices.

    `own`: step-time coefficients in place of the catalog's.
    """
    try:
        kv_tokens = memory.plan(
            pool.model, pool.gpu, pool.engine, pool.parallel, pool.mean_sequence_tokens or pool.model.max_context_tokens
        ).kv_capacity_tokens
        step = step_model(pool.model, pool.gpu, pool.engine, pool.parallel, own)
    except HeadwayError as error:
        return CandidateBounds(reason=str(error))
    if (reason := _too_long(pool, kv_tokens, requests, targets)) is not None:
        return CandidateBounds(reason=reason)
    if pool.parallel.num_gpus > pool.gpu.gpus_per_node:
        return CandidateBounds(reason=f"{pool.parallel.num_gpus} GPUs; a node has {pool.gpu.gpus_per_node}")
    if not len(requests.prompt_tokens):
        return CandidateBounds()
    replica = _UnloadedReplica(pool, step, kv_tokens)
    unloaded = CandidateBounds(
        ttft_p99_s=replica.prefill_s(_tail(requests.computed_tokens)),
        tpot_p99_s=replica.decode_s(_tail(np.where(requests.output_tokens > 1, requests.prompt_tokens, -1.0))),
        e2e_p99_s=_tail(replica.alone_s(requests)),
    )
    for name in LATENCY_SLOS:
        least_s = getattr(unloaded, name)
        target = getattr(targets, name)
        if target is not None and SLACK * least_s > target:
            reason = f"{SLO_NAMES[name]} is {least_s:.3g} s at best, unloaded; the target is {target:g} s"
            return structs.replace(unloaded, reason=reason)
    return structs.replace(unloaded, least_replicas=replica.fewest(requests, targets))


def _too_long(pool: Pool, kv_tokens: int, requests: ArrivingRequests, targets: Targets) -> str | None:
    """Why no number of replicas suffices, if too many requests are too long for one replica."""
    if requests.counted is None:
        return None
    tokens = (requests.prompt_tokens + requests.output_tokens)[requests.counted]
    context, room = pool.model.max_context_tokens, min(kv_tokens, pool.kv_capacity_tokens or kv_tokens) + 1
    num = int((tokens > min(context, room)).sum())
    if not num:
        return None
    shares = [] if targets.attainment is None else [1 - targets.attainment]
    if any(getattr(targets, name) is not None for name in LATENCY_SLOS):
        shares.append(TAIL)
    if all(num <= ceil(share * len(tokens)) for share in shares):
        return None
    of = f"the context of {context:,} tokens"
    if room < context:
        of = f"the {room:,} tokens that one replica has room for"
    return too_long(num, len(tokens), of)


def too_long(num: int, total: int, of: str) -> str:
    """A text such as "17 of 1,000 requests (1.7%) are longer than the context of 4,096 tokens"."""
    return f"{num:,} of {total:,} requests ({100 * num / total:.3g}%) are longer, prompt and output, than {of}"


def _tail(values: Floats) -> float:
    return float(np.quantile(values, 1 - TAIL, method="lower"))


class _UnloadedReplica:
    def __init__(self, pool: Pool, step: AnyStepModel, kv_tokens: int) -> None:
        self.engine, self.line, self.kv_tokens = pool.engine, step.line, kv_tokens
        self.window = pool.model.sliding_window_tokens or 0
        self.most_tokens = 1 if pool.engine.drafts is None else pool.engine.drafts.most_tokens
        """Maximum number of tokens of a sequence in an iteration."""

    def prefill_s(self, tokens: float) -> float:
        left, before, total_s, launch_s = max(int(tokens), 1), 0, 0.0, 0.0
        most = self.engine.max_num_batched_tokens if self.engine.batching == "chunked" else left
        while left > 0:
            chunk = min(left, most)
            step_s, chunk_launch_s, _ = self.line(0, 0, [(chunk, before)])
            total_s, launch_s = total_s + step_s, max(launch_s, chunk_launch_s)
            left, before = left - chunk, before + chunk
        return max(total_s, launch_s)

    def decode_s(self, context_tokens: float) -> float:
        """Seconds of one token of a request that runs alone; 0 for a negative context, which means that the token does
        not exist."""
        if context_tokens < 0:
            return 0.0
        context = int(context_tokens)
        return self.line(1, context, (), min(context, self.window))[0] / self.most_tokens

    def alone_s(self, requests: ArrivingRequests) -> Floats:
        """End-to-end latencies without a queue, with the shortest prompt's prefill time for all requests."""
        at_0, at_1000 = self.decode_s(0), self.line(1, 1000)[0] / self.most_tokens
        per_token = np.maximum(at_0 + (at_1000 - at_0) / 1000 * requests.prompt_tokens, 0.0)
        if self.window:
            per_token = np.full(len(requests.prompt_tokens), at_0)
        alone_s: Floats = (
            self.prefill_s(float(requests.computed_tokens.min())) + (requests.output_tokens - 1) * per_token
        )
        return alone_s

    def fewest(self, requests: ArrivingRequests, targets: Targets) -> int:
        """Fewest replicas: the work of the requests that must be in time, divided by the available time."""
        limits = [getattr(targets, name) for name in LATENCY_SLOS]
        if requests.span_s is None or not any(limits):
            return 1
        share = 1 - TAIL * sum(limit is not None for limit in limits)
        ttft_s, tpot_s, e2e_s = limits
        least = 1.0
        first_s = ttft_s or e2e_s
        if first_s is not None:
            per_token_s = self._s_per_prompt_token(float(requests.computed_tokens.max()))
            work_s = _without_tail(requests.computed_tokens * per_token_s, share)
            least = max(least, SLACK * work_s / (requests.span_s + first_s))
        last_s = e2e_s
        if last_s is None and ttft_s is not None and tpot_s is not None:
            last_s = ttft_s + tpot_s * float(requests.output_tokens.max())
        if last_s is not None:
            work_s = _without_tail(self._decoding_s(requests), share)
            least = max(least, SLACK * work_s / (requests.span_s + last_s))
        return max(1, ceil(least))

    def _s_per_prompt_token(self, longest_tokens: float) -> float:
        """Seconds per prompt token in the cheapest batch: a full token budget of short chunks.

        If prompts are not chunked, an iteration holds up to `max_num_seqs` of them.
        """
        budget = self.engine.max_num_batched_tokens
        if self.engine.batching != "chunked":
            budget = max(budget, min(self.engine.max_num_seqs * int(longest_tokens), MOST_TOKENS))
        sizes = {min(size, budget) for size in (256, 1024, budget)}
        return min(self.line(0, 0, [(size, 0)] * (budget // size))[0] / (size * (budget // size)) for size in sizes)

    def _decoding_s(self, requests: ArrivingRequests) -> Floats:
        """A lower bound on the decode seconds of each request: its share of the steps if all batches are full."""
        most = min(self.engine.max_num_seqs, max(1, floor(self.kv_tokens / requests.computed_tokens.min())))
        sizes = {min(2**i, most) for i in range(most.bit_length() + 1)}
        fixed_s = min(self.line(n, 0)[0] / n for n in sizes)
        read_s = max(0.0, (self.line(most, 1000 * most)[0] - self.line(most, 0)[0]) / (1000 * most))
        tokens = requests.output_tokens - 1
        decode_s: Floats = tokens / self.most_tokens * (fixed_s + read_s * (requests.prompt_tokens + tokens / 2))
        return decode_s


def _without_tail(work_s: Floats, share: float) -> float:
    """The sum of the smallest values, as many as the share `share` of all values. The largest values may be late."""
    return float(np.sort(work_s)[: max(int(share * len(work_s)), 0)].sum())
