"""Results of a load: latencies over requests and over tokens, counts, and errors by kind."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from headway.core.record import Outcome
from headway.metrics.latency import Distribution, distribution
from headway.serving.load_generator.answer import STOPPED, Answer
from headway.serving.load_generator.drive import Sent

Floats = npt.NDArray[np.float64]
LATE_S = 0.05
"""Delay of a request's sending from which this machine is named as the cause."""
CACHED = 0.05
"""Share of cached tokens of new prompts up to which the share may be due to chance."""
MAX_EXAMPLE_CHARS = 200


class Errors(Struct, frozen=True):
    """Requests that failed for one reason."""

    num: int
    example: str


class Measured(Struct, frozen=True, kw_only=True):
    """Results of one load. A latency without data is None."""

    num_requests: int
    """Number of requests sent."""
    num_completed: int
    num_stopped: int
    """Requests in flight when the load was stopped."""
    errors: dict[str, Errors]
    """Errors by kind. Requests that the load's end stopped are not errors."""
    duration_s: float
    """Time from the due time of the first request to the end of the last answer."""
    offered_rps: float | None
    """Rate of arrivals; None for a single request."""
    throughput_rps: float
    """Rate of complete answers."""
    output_tokens_per_s: float
    total_tokens_per_s: float
    concurrency: float
    """Mean number of requests in flight."""
    ttft_s: Distribution | None
    """Time from sending to the first token."""
    tpot_s: Distribution | None
    """Time per token after the first token, one value per request."""
    itl_s: Distribution | None
    """Gaps between tokens, one value per token: a gap of s seconds before a chunk of k tokens counts as k gaps of s /
    k."""
    chunk_gap_s: Distribution | None
    """Gaps between two pieces of text as clients see them, one value per chunk."""
    e2e_s: Distribution | None
    """Time from sending to the last token."""
    late_s: Distribution | None
    """Delay of this machine from a request's due time to its sending. No other latency includes this delay."""
    prompt_tokens: int
    """Prompt tokens of complete answers, by the engine's count if reported."""
    output_tokens: int
    num_unlike_prompts: int
    """Number of prompts for which the engine's count differs from the requested length."""
    num_short: int
    """Number of answers with fewer tokens than requested."""
    num_merged: int
    """Number of answers with chunks of several tokens that the engine does not count. The gaps of such tokens are
    spread evenly."""
    tokens_per_chunk: float | None
    cached_prompt_share: float | None
    """Share of prompt tokens that the engine found in its prefix cache; None: not reported."""
    unshared_cached_share: float | None = None
    """`cached_prompt_share` for prompts that share no text with other prompts of the load."""
    slo_attainment: float | None = None
    """Share of the requests that met all SLOs; None without SLOs."""


class Slo(Struct, frozen=True):
    """Limits in seconds; None: no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None


def measured(sent: Sequence[Sent], slo: Slo | None = None) -> Measured:
    """The results of a load, or of a part of it."""
    done = [each for each in sent if each.answer.is_whole]
    answers = [each.answer for each in done]
    begun_s = min((each.request.arrival_s for each in sent), default=0.0)
    duration_s = max((each.answer.end_s for each in sent), default=0.0) - begun_s
    prompts = [_prompt_tokens(each) for each in done]
    outputs = [each.output_tokens for each in answers]
    arrivals_s = np.array([each.request.arrival_s for each in sent])
    span_s = float(np.ptp(arrivals_s)) if len(sent) > 1 else 0.0
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    num_chunks = sum(len(each.chunk_s) for each in answers)
    return Measured(
        num_requests=len(sent),
        num_completed=len(done),
        num_stopped=sum(each.outcome is Outcome.UNFINISHED for each in sent),
        errors=_errors(sent),
        duration_s=duration_s,
        offered_rps=(len(sent) - 1) / span_s if span_s > 0 else None,
        throughput_rps=len(done) * per_s,
        output_tokens_per_s=sum(outputs) * per_s,
        total_tokens_per_s=(sum(prompts) + sum(outputs)) * per_s,
        concurrency=sum(each.answer.end_s - each.answer.sent_s for each in sent) * per_s,
        ttft_s=distribution(np.array([each.first_s - each.sent_s for each in answers])),
        tpot_s=distribution(np.array([tpot_s(each) for each in answers])),
        itl_s=distribution(np.concatenate([np.empty(0), *map(token_gaps_s, answers)])),
        chunk_gap_s=distribution(np.concatenate([np.empty(0), *(np.diff(each.chunk_s) for each in answers)])),
        e2e_s=distribution(np.array([each.last_s - each.sent_s for each in answers])),
        late_s=distribution(np.array([max(each.answer.sent_s - each.request.arrival_s, 0.0) for each in sent])),
        prompt_tokens=sum(prompts),
        output_tokens=sum(outputs),
        num_unlike_prompts=sum(each.answer.prompt_tokens not in (None, each.request.prompt_tokens) for each in done),
        num_short=sum(each.answer.output_tokens < each.request.output_tokens for each in done),
        num_merged=sum(each.is_merged for each in answers),
        tokens_per_chunk=sum(outputs) / num_chunks if num_chunks else None,
        cached_prompt_share=_cached_share(done),
        unshared_cached_share=_cached_share([each for each in done if not each.request.prefix]),
        slo_attainment=None if slo is None else attainment(sent, slo),
    )


def _cached_share(sent: Sequence[Sent]) -> float | None:
    cached = [each.answer.cached_tokens for each in sent]
    known = [tokens for tokens in cached if tokens is not None]
    return sum(known) / max(sum(map(_prompt_tokens, sent)), 1) if sent and len(known) == len(sent) else None


def _prompt_tokens(sent: Sent) -> int:
    counted = sent.answer.prompt_tokens
    return sent.request.prompt_tokens if counted is None else counted


def tpot_s(answer: Answer) -> float:
    """Time per token after the first token; NaN for a single token."""
    num = answer.output_tokens - answer.chunk_tokens[0]
    return (answer.last_s - answer.first_s) / num if num > 0 and len(answer.chunk_s) > 1 else math.nan


def token_gaps_s(answer: Answer) -> Floats:
    """Time before each token after the first chunk."""
    if len(answer.chunk_s) < 2:
        return np.empty(0)
    if answer.is_merged:
        return np.full(answer.output_tokens - answer.chunk_tokens[0], tpot_s(answer))
    tokens = np.array(answer.chunk_tokens[1:])
    return np.repeat(np.diff(answer.chunk_s) / tokens, tokens)


def attainment(sent: Sequence[Sent], slo: Slo) -> float:
    """Share of the requests that met all SLOs. A failed request met no SLO; a stopped request does not count."""
    judged = [each for each in sent if each.answer.kind != STOPPED]
    return sum(_meets(each, slo) for each in judged) / len(judged) if judged else math.nan


def _meets(sent: Sent, slo: Slo) -> bool:
    answer = sent.answer
    if not answer.is_whole:
        return False
    pairs = (
        (answer.first_s - answer.sent_s, slo.ttft_s),
        (tpot_s(answer), slo.tpot_s),
        (answer.last_s - answer.sent_s, slo.e2e_s),
    )
    return not any(limit_s is not None and found_s > limit_s for found_s, limit_s in pairs)


def _errors(sent: Sequence[Sent]) -> dict[str, Errors]:
    failed = [each.answer for each in sent if each.answer.kind not in ("", STOPPED)]
    examples = {each.kind: each.error[:MAX_EXAMPLE_CHARS] for each in reversed(failed)}
    return {kind: Errors(num, examples[kind]) for kind, num in Counter(each.kind for each in failed).most_common()}


def notes(found: Measured) -> Iterator[str]:
    """Notes for the reader of the numbers."""
    whole = found.num_completed
    for kind, errors in found.errors.items():
        yield f"{errors.num:,} of {found.num_requests:,} requests failed, {kind}: {errors.example}"
    if found.num_stopped:
        yield f"stopped: {found.num_stopped:,} requests were in flight, and are left out"
    if found.num_unlike_prompts:
        yield f"{found.num_unlike_prompts:,} of {whole:,} prompts have another length by the engine's count"
    if (found.unshared_cached_share or 0.0) > CACHED:
        yield (
            f"the engine had {found.unshared_cached_share:.0%} of the prompts in its prefix cache, though they share no"
            " text: it was sent the same ones before (another --seed, or none, sends new ones)"
        )
    if found.num_short:
        yield f"{found.num_short:,} of {whole:,} answers ended before the length that was asked for"
    if found.num_merged:
        yield (
            f"{found.num_merged:,} of {whole:,} answers have several tokens in a chunk, and the engine does not say in"
            " which: the gaps of their tokens are spread evenly"
        )
    if found.late_s is not None and found.late_s.p99 > LATE_S:
        yield (
            f"this machine sent 1% of the requests {1e3 * found.late_s.p99:.0f} ms late or more: it is too slow, or"
            " busy, for this load"
        )
