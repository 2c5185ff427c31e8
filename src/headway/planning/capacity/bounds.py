"""What holds for a kind of replica without a rehearsal: lower bounds on latencies and on the number of replicas.

A request is never faster than alone on an empty replica, and a batch is never cheaper by the token than the
cheapest batch. `SLACK` leaves room for what the step-time model does not promise (costs that fall a little where
a batch grows), so that nothing feasible is ruled out.
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
from headway.perf.step import StepModel
from headway.planning.capacity.problem import Floor, Targets

Floats = npt.NDArray[np.float64]
SLACK = 0.9
TAIL = 0.01
"""Requests that a 99th percentile does not look at."""
MOST_TOKENS = 2**18
"""In one iteration; larger ones gain nothing."""
WORDS = {"ttft_p99_s": "TTFT", "tpot_p99_s": "TPOT", "e2e_p99_s": "E2E"}


@dataclass(frozen=True)
class Demand:
    """What arrives, one element a request."""

    prompt_tokens: Floats
    computed_tokens: Floats
    """Of the prompt, those that no prefix cache can hold."""
    output_tokens: Floats
    span_s: float | None
    """From the first arrival to the last; None where arrivals wait for answers."""


def lower_bounds(pool: Pool, demand: Demand, targets: Targets, own: Coefficients | None = None) -> Floor:
    """Latencies of an unloaded replica and the fewest replicas for the work; or why no number will do.

    `own`: step-time coefficients in place of the catalog's.
    """
    try:
        room = memory.plan(pool.model, pool.gpu, pool.engine, pool.parallel).kv_capacity_tokens
        step = StepModel(pool.model, pool.gpu, pool.engine, pool.parallel, own)
    except HeadwayError as error:
        return Floor(reason=str(error))
    if pool.parallel.num_gpus > pool.gpu.gpus_per_node:
        return Floor(reason=f"{pool.parallel.num_gpus} GPUs; a node has {pool.gpu.gpus_per_node}")
    if not len(demand.prompt_tokens):
        return Floor()
    replica = _Replica(pool, step, room)
    unloaded = Floor(
        ttft_p99_s=replica.prefill_s(_tail(demand.computed_tokens)),
        tpot_p99_s=replica.decode_s(_tail(np.where(demand.output_tokens > 1, demand.prompt_tokens, -1.0))),
        e2e_p99_s=_tail(replica.alone_s(demand)),
    )
    for name in WORDS:
        found_s = getattr(unloaded, name)
        target = getattr(targets, name)
        if target is not None and SLACK * found_s > target:
            reason = f"{WORDS[name]} p99 is {found_s:.3g} s at best, unloaded; the target is {target:g} s"
            return structs.replace(unloaded, reason=reason)
    return structs.replace(unloaded, least_replicas=replica.least(demand, targets))


def _tail(values: Floats) -> float:
    """The order statistic just below the 99th percentile."""
    return float(np.quantile(values, 1 - TAIL, method="lower"))


class _Replica:
    """Seconds of one kind of replica at its fastest."""

    def __init__(self, pool: Pool, step: StepModel, room_tokens: int) -> None:
        self.engine, self.line, self.room_tokens = pool.engine, step.line, room_tokens
        self.window = pool.model.sliding_window_tokens or 0

    def prefill_s(self, tokens: float) -> float:
        """Of a prompt, alone."""
        left, before, total_s = max(int(tokens), 1), 0, 0.0
        most = self.engine.max_num_batched_tokens if self.engine.batching == "chunked" else left
        while left > 0:
            chunk = min(left, most)
            total_s += self.line(0, 0, [(chunk, before)])[0]
            left, before = left - chunk, before + chunk
        return total_s

    def decode_s(self, context_tokens: float) -> float:
        """Of one token, alone; 0 for a context below 0: no such token."""
        if context_tokens < 0:
            return 0.0
        context = int(context_tokens)
        return self.line(1, context, (), min(context, self.window))[0]

    def alone_s(self, demand: Demand) -> Floats:
        """End-to-end latencies without a queue, the prompts' own time at its shortest."""
        at_0, at_1000 = self.decode_s(0), self.line(1, 1000)[0]
        per_token = np.maximum(at_0 + (at_1000 - at_0) / 1000 * demand.prompt_tokens, 0.0)
        if self.window:
            per_token = np.full(len(demand.prompt_tokens), at_0)
        found: Floats = self.prefill_s(float(demand.computed_tokens.min())) + (demand.output_tokens - 1) * per_token
        return found

    def least(self, demand: Demand, targets: Targets) -> int:
        """Fewest replicas: the work of the requests that must be in time, over the time that there is."""
        limits = [getattr(targets, name) for name in WORDS]
        if demand.span_s is None or not any(limits):
            return 1
        kept = 1 - TAIL * sum(limit is not None for limit in limits)
        ttft_s, tpot_s, e2e_s = limits
        least = 1.0
        first_s = ttft_s or e2e_s
        if first_s is not None:
            per_token_s = self._s_per_prompt_token(float(demand.computed_tokens.max()))
            work_s = _without_tail(demand.computed_tokens * per_token_s, kept)
            least = max(least, SLACK * work_s / (demand.span_s + first_s))
        last_s = e2e_s
        if last_s is None and ttft_s is not None and tpot_s is not None:
            last_s = ttft_s + tpot_s * float(demand.output_tokens.max())
        if last_s is not None:
            work_s = _without_tail(self._decoding_s(demand), kept)
            least = max(least, SLACK * work_s / (demand.span_s + last_s))
        return max(1, ceil(least))

    def _s_per_prompt_token(self, longest_tokens: float) -> float:
        """The cheapest way to compute one: a full budget of short chunks.

        Where prompts are not cut to fit a budget, an iteration may hold as many as there are seats.
        """
        budget = self.engine.max_num_batched_tokens
        if self.engine.batching != "chunked":
            budget = max(budget, min(self.engine.max_num_seqs * int(longest_tokens), MOST_TOKENS))
        sizes = {min(size, budget) for size in (256, 1024, budget)}
        return min(self.line(0, 0, [(size, 0)] * (budget // size))[0] / (size * (budget // size)) for size in sizes)

    def _decoding_s(self, demand: Demand) -> Floats:
        """Each request's part in the fullest batches that fit."""
        most = min(self.engine.max_num_seqs, max(1, floor(self.room_tokens / demand.computed_tokens.min())))
        sizes = {min(2**i, most) for i in range(most.bit_length() + 1)}
        fixed_s = min(self.line(n, 0)[0] / n for n in sizes)
        read_s = max(0.0, (self.line(most, 1000 * most)[0] - self.line(most, 0)[0]) / (1000 * most))
        tokens = demand.output_tokens - 1
        found: Floats = tokens * (fixed_s + read_s * (demand.prompt_tokens + tokens / 2))
        return found


def _without_tail(work_s: Floats, kept: float) -> float:
    """The sum without the largest, which may be late."""
    return float(np.sort(work_s)[: max(int(kept * len(work_s)), 0)].sum())
