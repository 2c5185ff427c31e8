"""What a replica's prefix cache holds, from events or as a guess."""

from __future__ import annotations

from random import Random

import pytest

from fakes import FakeRequest
from headway.control.cache_index import CacheIndex, Change
from headway.control.observe import CacheEvents, CacheObservation
from headway.core.errors import HeadwayError
from headway.core.request import Segment


def prompt(*segments: tuple[int, int], id: int = 0, more: int = 0) -> FakeRequest:
    prefix = tuple(Segment(segment, tokens) for segment, tokens in segments)
    return FakeRequest(id, prompt_tokens=sum(tokens for _, tokens in segments) + more, prefix=prefix)


def test_cached_are_the_leading_blocks_without_a_gap() -> None:
    index = CacheIndex(16, 1000, guesses=False)
    asked = prompt((1, 64), (2, 72), (3, 40), more=5)
    assert index.cached_tokens(asked) == 0
    index.apply([(1, 4, 0), (3, 2, 0)])
    assert index.cached_tokens(asked) == 64
    index.apply([(2, 2, 0)])
    assert index.cached_tokens(asked) == 64 + 32
    index.apply([(2, 4, 0)])  # the block that both segments 2 and 3 have a part of belongs to 3
    assert index.cached_tokens(asked) == 176 - 16
    index.apply([(3, 3, 0)])
    assert index.cached_tokens(asked) == 176
    index.apply([(1, 0, 0)])
    assert index.cached_tokens(asked) == 0


def test_the_last_token_is_always_computed() -> None:
    index = CacheIndex(16, 1000, guesses=False)
    index.apply([(1, 4, 0)])
    assert index.cached_tokens(prompt((1, 64))) == 48
    assert index.cached_tokens(prompt((1, 64), more=1)) == 64


def test_slower_memory_counts_from_where_the_gpu_ends() -> None:
    index = CacheIndex(16, 1000, guesses=False)
    asked = prompt((1, 64), (2, 64), more=1)
    index.apply([(1, 2, 4), (2, 0, 3)])
    assert (index.cached_tokens(asked), index.loadable_tokens(asked)) == (32, 32 + 48)
    index.clear()
    assert (index.cached_tokens(asked), index.loadable_tokens(asked)) == (0, 0)


def test_a_guess_forgets_the_prompt_that_was_placed_longest_ago_and_its_end_first() -> None:
    index = CacheIndex(16, 12, guesses=True)
    first, second = prompt((1, 64), (2, 64), id=1, more=1), prompt((1, 64), (3, 64), id=2, more=1)
    index.placed(first)
    assert index.cached_tokens(first) == 128
    index.placed(second)  # 9 blocks of the first, 5 more of the second
    assert index.cached_tokens(second) == 128
    assert index.cached_tokens(first) == 64 + 48
    index.placed(
        prompt(id=3, more=100)
    )  # 7 blocks without a name, for 3 of segment 2, the end of the second prompt, and 3 of segment 3
    assert (index.cached_tokens(first), index.cached_tokens(second)) == (64, 80)


def test_an_index_with_events_does_not_guess() -> None:
    index = CacheIndex(16, 12, guesses=False)
    index.placed(prompt((1, 64)))
    assert not len(index.gpu)


def test_what_was_placed_counts_until_an_event_mentions_it() -> None:
    index = CacheIndex(16, 100, guesses=False, adds_placed=True)
    asked = prompt((1, 64), (2, 64), more=1)
    index.placed(asked)
    assert (index.cached_tokens(asked), len(index.gpu)) == (128, 0)
    index.apply([(1, 4, 0)])
    assert index.cached_tokens(asked) == 128
    index.apply([(2, 2, 3)])  # the engine has less of it on the GPU than was placed
    assert (index.cached_tokens(asked), index.loadable_tokens(asked)) == (64 + 32, 16)
    index.apply([(1, 0, 0)])
    assert index.cached_tokens(asked) == 0
    index.placed(asked)
    index.forget_placed()  # a crash
    assert index.cached_tokens(asked) == 0


def test_what_was_placed_is_bounded_by_the_cache() -> None:
    index = CacheIndex(16, 10, guesses=False, adds_placed=True)
    for id in range(50):
        index.placed(prompt((id, 64), id=id))
    kept = [id for id in range(50) if index.cached_tokens(prompt((id, 64), more=1))]
    assert kept == [47, 48, 49]


class Engine:
    """Reports one more block of segment 1 with every call."""

    def __init__(self) -> None:
        self.blocks = 0

    def cache_changes(self) -> list[Change]:
        self.blocks += 1
        return [(1, self.blocks, 0)]


@pytest.mark.parametrize("replay", [True, False])
def test_a_lost_batch_comes_with_the_next_one_if_it_is_replayed(replay: bool) -> None:
    engine, index = Engine(), CacheIndex(16, 10_000, guesses=False)
    events = CacheEvents(CacheObservation("events", loss=0.5, replay=replay), Random(1))
    events.add(index, engine)
    numbers = []
    for _ in range(200):
        for _, changes in (batches := events.collect()):
            numbers += [blocks for _, blocks, _ in changes]
        events.apply(batches)
    if replay:
        assert numbers == list(range(1, len(numbers) + 1))
        assert index.gpu.blocks(1) == numbers[-1]
    else:
        assert len(numbers) == pytest.approx(100, rel=0.3)


@pytest.mark.parametrize("bad", [{"period_s": 0.0}, {"delay_s": -0.1}, {"loss": 1.0}])
def test_invalid_observations_are_errors(bad: dict[str, float]) -> None:
    with pytest.raises(HeadwayError, match="observe: cache"):
        CacheObservation(**bad)  # type: ignore[arg-type]
