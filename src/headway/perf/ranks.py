"""A batch over data parallel ranks that step together (vLLM's data parallelism with expert parallelism). Pure.

Every iteration lasts as long as its slowest rank, and ranks without work run dummy batches. What is not simulated is
which sequence is at which rank: sequences are dealt out as evenly as they can be, with contexts of the mean length.
That is what a balancing router strives for; where it fails, iterations take longer than said here.
"""

from __future__ import annotations

from collections.abc import Sequence

Chunk = tuple[int, int]
"""(new tokens, context before them)."""


def fullest(num: int, num_ranks: int) -> int:
    """How many of `num` things the fullest rank has."""
    return -(-num // num_ranks)


def dealt(chunks: Sequence[Chunk], num_ranks: int) -> list[list[Chunk]]:
    """The chunks of each rank that has any: the largest first, each to the rank with the fewest new tokens."""
    ranks: list[list[Chunk]] = [[] for _ in range(min(num_ranks, len(chunks)))]
    tokens = [0] * len(ranks)
    for chunk in sorted(chunks, reverse=True):
        rank = tokens.index(min(tokens))
        ranks[rank].append(chunk)
        tokens[rank] += chunk[0]
    return ranks
