"""KV block counts against a count per request."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headway.sim.kvcache import KvCache

joins = st.lists(st.tuples(st.integers(1, 200), st.integers(0, 40)), max_size=12)
"""(own tokens, tick at which it joins) of decoding requests."""


@given(st.sampled_from([1, 2, 4, 16]), joins, st.integers(0, 60), st.integers(0, 50), st.data())
def test_block_counts_equal_those_per_request(
    block: int, joined: list[tuple[int, int]], later: int, pinned: int, data: st.DataObject
) -> None:
    tick = max((at for _, at in joined), default=0) + later
    kv = KvCache(10**6, block, 0.0)
    kv.pinned = pinned
    for tokens, at in joined:
        kv.join(tokens, at)
    for tokens, at in data.draw(st.lists(st.sampled_from(joined), unique=True)) if joined else []:
        kv.leave(tokens + tick - at, tick)
        joined = [*joined]
        joined.remove((tokens, at))

    def used(tick: int) -> int:
        return pinned + sum(-(-(tokens + tick - at) // block) for tokens, at in joined)

    assert kv.count == len(joined)
    assert kv.used(tick) == used(tick)
    assert kv.needed_next(tick) == used(tick + 1) - used(tick)
    if joined:
        same = kv.ticks_unchanged(tick)
        assert used(tick + same) == used(tick) < used(tick + same + 1)
    wanted = data.draw(st.integers(0, 100))
    kv.total = used(tick) + data.draw(st.integers(0, 40))
    assert kv.free(tick) == kv.total - used(tick)
    assert kv.can_tick(tick) == (used(tick + 1) <= kv.total)
    fits = [ticks for ticks in range(wanted + 1) if used(tick + ticks) <= kv.total]
    assert kv.ticks_left(tick, wanted) == max(fits)
    blocks = data.draw(st.integers(0, 50))
    assert kv.has_free(blocks, tick) == (kv.total - used(tick) >= blocks)


def test_the_watermark_is_whole_blocks() -> None:
    assert KvCache(150, 16, 0.01).watermark == 1
    assert KvCache(99, 16, 0.01).watermark == 0
