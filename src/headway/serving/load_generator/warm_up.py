"""Warm-up: an engine that compiles a kernel, or captures a graph, at its first requests stands still for seconds.

Rounds of short requests are sent until no request waits unusually long. A standstill early in the load itself is
detected because all streams pause together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import cycle
from time import perf_counter

import numpy as np
from msgspec import Struct

from headway.core.errors import HeadwayError
from headway.serving.load_generator.answer import Answer
from headway.serving.load_generator.drive import Sent
from headway.serving.load_generator.engine import Target
from headway.serving.load_generator.prompts import Vocabulary
from headway.serving.load_generator.results import tpot_s

STALL_S, STALL_FACTOR = 0.5, 3.0
"""The longest wait of a round is a stall if it exceeds the smallest longest wait of the rounds of the same size by this
time and this factor."""
LEAST_ROUNDS, MOST_ROUNDS = 4, 12
OUTPUT_TOKENS = 32
PAUSE_S, PAUSE_FACTOR = 1.0, 20.0
"""A pause of all streams is a standstill if it exceeds this time and this many median gaps."""
FIRST_USE_S = 30.0
"""Time since the start of a load. A standstill that begins later is not caused by a first use."""
Interval = tuple[float, float]


class WarmUp(Struct, frozen=True):
    """Requests and stalls of the warm-up, and the token time of a request that runs alone."""

    num_requests: int
    stalls_s: tuple[float, ...]
    """Unusual waits that did not occur again."""
    is_steady: bool
    """Whether the last rounds had no stall."""
    token_s: float | None
    """Seconds per token of a request that runs alone; None if unknown."""


async def warm_up(
    target: Target, words: Vocabulary, prompt_tokens: int, output_tokens: int, together: int, seed: int
) -> WarmUp:
    """Send rounds of one request and of `together` requests in turn. Raises HeadwayError if the engine answers no
    request of a round."""
    begun_s = perf_counter()
    now: Callable[[], float] = lambda: perf_counter() - begun_s  # noqa: E731
    tokens, length = max(prompt_tokens - words.extra_tokens, 1), min(output_tokens, OUTPUT_TOKENS)
    waits: list[tuple[int, float]] = []
    alone_s: list[float] = []
    num = 0
    for size in cycle((1, max(together, 1))):
        texts = [words.text(tokens, seed, f"load/warm-up/{num + i}") for i in range(size)]
        answers = await asyncio.gather(*(target.send(prompt_of(target, text), length, now) for text in texts))
        num += size
        whole = [each for each in answers if each.is_whole]
        if not whole:
            raise HeadwayError(f"{target.found.url}: {target.path}: {answers[0].kind}: {answers[0].error}")
        waits.append((size, max(map(longest_wait_s, whole))))
        if size == 1 and (per_token := tpot_s(whole[0])) > 0:
            alone_s.append(per_token)
        if len(waits) >= MOST_ROUNDS or (len(waits) >= LEAST_ROUNDS and is_steady(waits)):
            break
    return WarmUp(num, tuple(stalls_s(waits)), is_steady(waits), min(alone_s, default=None))


def prompt_of(target: Target, text: str) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": text}]} if target.is_chat else {"prompt": text}


def longest_wait_s(answer: Answer) -> float:
    """The longest wait for the first token or between two chunks."""
    return float(np.diff([answer.sent_s, *answer.chunk_s]).max())


def stalls_s(waits: Sequence[tuple[int, float]]) -> list[float]:
    """The longest waits of those rounds in which this wait is unusually long."""
    usual = {size: min(wait for other, wait in waits if other == size) for size, _ in waits}
    return [wait for size, wait in waits if _is_stall(wait, usual[size])]


def is_steady(waits: Sequence[tuple[int, float]]) -> bool:
    """Whether the last two rounds had no stall."""
    return not any(wait in stalls_s(waits) for _, wait in waits[-2:])


def _is_stall(wait_s: float, usual_s: float) -> bool:
    return wait_s > usual_s + STALL_S and wait_s > STALL_FACTOR * usual_s


def standstills(sent: Sequence[Sent]) -> list[Interval]:
    """Intervals in which all running streams paused at the same time, for unusually long."""
    streams = [each.answer.chunk_s for each in sent if len(each.answer.chunk_s) > 1]
    if not streams:
        return []
    usual_s = float(np.median(np.concatenate([np.diff(times) for times in streams])))
    times = np.unique(np.concatenate(streams))
    long = np.flatnonzero(np.diff(times) > max(PAUSE_S, PAUSE_FACTOR * usual_s))
    pauses = [(float(times[i]), float(times[i + 1])) for i in long]
    return [each for each in pauses if any(stream[0] <= each[0] and stream[-1] >= each[1] for stream in streams)]


def first_uses(found: Sequence[Interval]) -> list[Interval]:
    """The standstills at the beginning of a load."""
    return [each for each in found if each[0] < FIRST_USE_S]


def without(sent: Sequence[Sent], left_out: Sequence[Interval]) -> list[Sent]:
    """The requests that were not in flight during any of these intervals."""
    return [
        each
        for each in sent
        if not any(each.answer.sent_s < end and each.answer.end_s > begin for begin, end in left_out)
    ]
