"""The prefix cache against one that identifies every block."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

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
        expected = [(output_id, end) for end in range(len(names), kv_tokens // self.block)] if output_id else []
        mine += [*expected, *([None] * (num_blocks - len(names) - len(expected)))]
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


# Prompts without a name.

alone = st.lists(st.tuples(st.floats(0.0, 0.4), st.integers(1, 150), st.integers(1, 120)), min_size=2, max_size=20)


@settings(deadline=None)
@given(alone, st.sampled_from([4, 16]), st.integers(0, 20), st.sampled_from([24, 64, 8192]))
def test_a_prompt_of_its_own_is_cached_whether_it_has_a_name_or_not(
    rows: Any, block: int, spare: int, budget: int
) -> None:
    arrivals_s = accumulate(gap_s for gap_s, _, _ in rows)
    blocks = max(-(-(prompt + output) // block) for _, prompt, output in rows) + spare
    small = pool(
        prefix_caching=True,
        block_size_tokens=block,
        kv_capacity_tokens=blocks * block,
        max_num_seqs=8,
        max_num_batched_tokens=budget,
    )
    requests = [
        request(id, at_s, prompt, output)
        for id, (at_s, (_, prompt, output)) in enumerate(zip(arrivals_s, rows, strict=True))
    ]
    named = [replace(one, prefix=(Segment(one.id, one.prompt_tokens),)) for one in requests]
    left, right = (play(these, small).requests for these in (requests, named))
    for column in ("preemptions", "cached_prompt_tokens", "first_token_s", "end_s"):
        assert left[column].tolist() == right[column].tolist(), column


def test_a_preempted_prompt_finds_its_own_blocks() -> None:
    # 32 prompts of five iterations each, and memory for three and a third of them.
    requests = [request(id, 0.0, 9000, 500) for id in range(32)]
    full = pool(prefix_caching=True, max_num_batched_tokens=2048, kv_capacity_tokens=30_000)
    records = play(requests, full, line=seconds(0.01, 1e-5))
    stretches = records.stretches
    computed_tokens = (stretches["prefill_tokens"] * stretches["iterations"]).sum()
    assert records.requests["preemptions"].sum() <= 32
    assert computed_tokens < 1.05 * 32 * 9000


def test_a_later_turn_finds_an_answer_that_was_preempted() -> None:
    # The second request is preempted for the first, resumes and ends; the third continues its conversation.
    requests = [
        request(0, 0.0, 64, 100),
        request(1, 1.0, 64, 60, prefix=(Segment(1, 64),), output_id=2),
        request(2, 1000.0, 140, 1, prefix=(Segment(1, 64), Segment(2, 60), Segment(3, 16))),
    ]
    small = pool(prefix_caching=True, kv_capacity_tokens=13 * 16)
    records = play(requests, small, line=seconds(1.0)).requests
    assert records["preemptions"].tolist() == [0, 1, 0]
    assert records["cached_prompt_tokens"].tolist() == [0, 0, 7 * 16]
