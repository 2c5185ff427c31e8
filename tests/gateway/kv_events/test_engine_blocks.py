"""An engine's events as changes of the index."""

from __future__ import annotations

import random

import pytest

from headway.control import token_blocks
from headway.control.cache_index import CacheIndex
from headway.control.live import Live
from headway.gateway.kv_events.engine_blocks import EngineBlocks
from headway.gateway.kv_events.wire import AllBlocksCleared, BlockRemoved, BlockStored, Event

BLOCK = 4
TOKENS = list(range(100, 100 + 5 * BLOCK))


def _request(tokens: list[int], lora: str = "") -> Live:
    return Live(0, 0.0, len(tokens), 1, prefix=token_blocks.segments(tokens, BLOCK, lora))


class _Engine:
    """An index that one engine's events feed."""

    def __init__(self, most_blocks: int = 1000) -> None:
        self.blocks = EngineBlocks(BLOCK, most_blocks)
        self.index = CacheIndex(BLOCK, 1000, guesses=False)

    def report(self, *events: Event) -> None:
        self.index.apply_blocks(self.blocks.changes(events))

    def cached_tokens(self, tokens: list[int], lora: str = "") -> int:
        return self.index.cached_tokens(_request(tokens, lora))


def _stored(hashes: list[int | bytes], tokens: list[int], parent: int | bytes | None = None, **more: object) -> Event:
    return BlockStored(hashes, parent, tokens, BLOCK, **more)  # type: ignore[arg-type]


def test_blocks_are_found_by_their_tokens() -> None:
    engine = _Engine()
    engine.report(_stored([1, 2], TOKENS[: 2 * BLOCK]), _stored([b"3"], TOKENS[2 * BLOCK : 3 * BLOCK], 2))
    assert engine.cached_tokens(TOKENS) == 3 * BLOCK
    assert engine.cached_tokens(TOKENS[: 2 * BLOCK + 1]) == 2 * BLOCK
    assert engine.cached_tokens(TOKENS[: 2 * BLOCK]) == BLOCK, "the last token is always computed"
    assert engine.cached_tokens([1, *TOKENS[1:]]) == 0
    assert engine.cached_tokens(TOKENS[BLOCK:]) == 0, "a block is known by all tokens before it, too"


def test_removed_blocks_are_not_found() -> None:
    engine = _Engine()
    engine.report(_stored([1, 2, 3], TOKENS[: 3 * BLOCK]), BlockRemoved([3], "GPU"))
    assert engine.cached_tokens(TOKENS) == 2 * BLOCK
    engine.report(BlockRemoved([2], remaining_copy_counts=[1]))
    assert engine.cached_tokens(TOKENS) == 2 * BLOCK, "a copy stays"
    engine.report(BlockRemoved([1]))
    assert engine.cached_tokens(TOKENS) == 0
    engine.report(AllBlocksCleared())
    assert not engine.blocks.names and not len(engine.index.gpu)


def test_slower_memory_is_told_apart() -> None:
    engine = _Engine()
    engine.report(_stored([1, 2], TOKENS[: 2 * BLOCK], medium="CPU"), _stored([1], TOKENS[:BLOCK], medium="GPU"))
    request = _request(TOKENS)
    assert (engine.index.cached_tokens(request), engine.index.loadable_tokens(request)) == (BLOCK, BLOCK)
    engine.report(BlockRemoved([1], "GPU"))
    assert (engine.index.cached_tokens(request), engine.index.loadable_tokens(request)) == (0, 2 * BLOCK)


def test_adapters_and_images_make_other_blocks() -> None:
    engine = _Engine()
    engine.report(_stored([1], TOKENS[:BLOCK], lora_name="a", extra_keys=[("a",)]))
    assert engine.cached_tokens(TOKENS, "a") == BLOCK and engine.cached_tokens(TOKENS) == 0
    engine.report(_stored([2], TOKENS[:BLOCK], extra_keys=[("image",)]))
    assert engine.cached_tokens(TOKENS) == 0


WRONG: dict[str, Event] = {
    "block size": BlockStored([1], None, TOKENS[:8], 8),
    "malformed": _stored([1, 2], TOKENS[:BLOCK]),
    "unknown parent": _stored([9], TOKENS[:BLOCK], 77),
    "unknown block": BlockRemoved([5]),
    "another group": _stored([1], TOKENS[:BLOCK], group_idx=1),
}


@pytest.mark.parametrize("reason", WRONG)
def test_events_that_make_no_sense_change_nothing(reason: str) -> None:
    engine = _Engine()
    engine.report(WRONG[reason])
    assert engine.blocks.ignored[reason] >= 1 and not engine.blocks.names and engine.cached_tokens(TOKENS) == 0


def test_an_engine_that_reports_too_much_is_bounded() -> None:
    engine = _Engine(most_blocks=50)
    for i in range(200):
        engine.report(_stored([i], [i] * BLOCK))
    assert len(engine.blocks) == len(engine.index.gpu) == 50 and engine.blocks.ignored["too many blocks"] == 150
    assert engine.cached_tokens([199] * (BLOCK + 1)) == BLOCK and engine.cached_tokens([0] * (BLOCK + 1)) == 0


def test_any_history_ends_in_what_the_engine_holds() -> None:
    """Against a model that keeps the prompts' blocks by their tokens."""
    chance, engine = random.Random(3), _Engine()
    held: dict[tuple[int, ...], int] = {}
    for number in range(2000):
        length = chance.randrange(1, 4)
        tokens = [chance.randrange(2) for _ in range(length * BLOCK)]
        keys = [tuple(tokens[: (i + 1) * BLOCK]) for i in range(length)]
        if chance.random() < 0.6:
            for i, key in enumerate(keys):
                if key not in held:
                    held[key] = hash((number, i))
                    parent = held[keys[i - 1]] if i else None
                    engine.report(_stored([held[key]], list(key[-BLOCK:]), parent))
        elif (leaf := tuple(tokens)) in held and not any(key[: len(leaf)] == leaf and key != leaf for key in held):
            engine.report(BlockRemoved([held.pop(leaf)]))
        expected = next((i for i, key in enumerate(keys) if key not in held), length)
        assert engine.cached_tokens([*tokens, 9]) == expected * BLOCK
    assert len(engine.blocks) == len(held) > 10


def test_any_history_in_two_memories_ends_in_what_each_holds() -> None:
    chance, engine = random.Random(4), _Engine()
    held: dict[str, set[int]] = {"GPU": set(), "CPU": set()}
    for _ in range(500):
        medium, block = chance.choice(("GPU", "CPU")), chance.randrange(6)
        if chance.random() < 0.5:
            engine.report(_stored([block], [block] * BLOCK, medium=medium))
            held[medium].add(block)
        elif block in held["GPU"] | held["CPU"]:
            engine.report(BlockRemoved([block], medium))
            held[medium].discard(block)
        for each in range(6):
            request = _request([each] * (BLOCK + 1))
            on_gpu, loadable = engine.index.cached_tokens(request), engine.index.loadable_tokens(request)
            assert on_gpu == BLOCK * (each in held["GPU"])
            assert loadable == BLOCK * (each in held["CPU"] - held["GPU"])
        assert len(engine.blocks) == len(held["GPU"] | held["CPU"]) and len(engine.blocks.names) == len(held["GPU"])
