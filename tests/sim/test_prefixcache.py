"""The prefix cache against one that identifies every block."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.request import Segment
from simulation import play, pool, request, seconds


@dataclass
class NaiveCache:
    """A replica that serves one request at a time and identifies blocks by content: (segment, index), or None.

    `free` is a queue: the block freed longest ago is reused first, and loses its content then.
    """

    total: int
    block: int
    free: list[tuple[int, int] | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.free = [None] * self.total

    def serve(self, prefix: tuple[Segment, ...], output_tokens: int, output_id: int | None) -> int:
        """Prompt tokens served from the cache."""
        owners = [segment.id for segment in prefix for _ in range(segment.tokens)]
        prompt = len(owners)
        kv_tokens = prompt + output_tokens - 1
        # A block that straddles segments belongs to the later one; it is named by its owner and its place.
        names: list[tuple[int, int] | None] = [
            (owners[end - 1], end) for end in range(self.block, prompt + 1, self.block)
        ]
        hit = 0
        while hit < min(len(names), (prompt - 1) // self.block) and names[hit] in self.free:
            hit += 1
        for name in names[:hit]:
            self.free.remove(name)
        kept = set(self.free)
        num_blocks = -(-kv_tokens // self.block)
        del self.free[: num_blocks - hit]
        # What is computed anew although another copy is still cached stays nameless.
        still = kept & set(self.free)
        mine = [name if i < hit or name not in still else None for i, name in enumerate(names)]
        said = [(output_id, end) for end in range(len(names), kv_tokens // self.block)] if output_id else []
        mine += [*said, *([None] * (num_blocks - len(names) - len(said)))]
        self.free += self.order(mine, len(names))
        return hit * self.block

    def order(self, mine: list[Any], num_prompt: int) -> list[Any]:
        """Nameless blocks first, then those of the last segment, and so on to the first."""
        owners = list(dict.fromkeys(name[0] for name in mine if name is not None))
        nameless = [None] * sum(name is None for name in mine)
        return nameless + [
            name for owner in reversed(owners) for name in reversed(mine) if name is not None and name[0] == owner
        ]


chains = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 3), st.integers(1, 30), st.booleans()),
    min_size=1,
    max_size=25,
)
LENGTHS = ((20, 16, 37), (5, 16, 40, 33), (8, 31, 4, 50))
"""Tokens of the segments at each depth of a tree of prompts."""


@settings(deadline=None)
@given(chains, st.sampled_from([4, 16]), st.integers(0, 12))
def test_hits_equal_those_of_identified_blocks(chains: Any, block: int, spare: int) -> None:
    requests, longest = [], 0
    for id, (a, b, c, output, says) in enumerate(chains):
        ids = (1 + a, 10 + 10 * a + b, 1000 + 100 * a + 10 * b + c)
        lengths = (LENGTHS[0][a], LENGTHS[1][b], LENGTHS[2][c])
        prefix = tuple(Segment(i, n) for i, n in zip(ids, lengths, strict=True))
        output_id = 50_000 + id if says else None
        requests.append(request(id, 1e3 * id, sum(lengths), output, prefix=prefix, output_id=output_id))
        longest = max(longest, sum(lengths) + output)
    blocks = -(-longest // block) + spare
    one = pool(prefix_caching=True, block_size_tokens=block, kv_capacity_tokens=blocks * block)
    records = play(requests, one, line=seconds(1.0))
    naive = NaiveCache(blocks, block)
    expected = [naive.serve(r.prefix, r.output_tokens, r.output_id) for r in requests]
    assert records.requests["cached_prompt_tokens"].tolist() == expected
