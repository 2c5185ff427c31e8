"""An engine's events as changes of the index."""

from __future__ import annotations

import random
import tracemalloc

import pytest

from headway.control import token_blocks
from headway.control.cache_index import CacheIndex, RanksIndex
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


def test_a_block_takes_at_most_300_bytes() -> None:
    engine = _Engine(most_blocks=1 << 16)
    num = 5000
    engine.report(_stored([b"first"], [0] * BLOCK))
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for i in range(num):
        engine.report(_stored([i.to_bytes(32, "big")], [i] * BLOCK))
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert len(engine.blocks) == num + 1 and taken < 300 * num


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


def _kind(kind: str, window: int | None = None, group: int = 0, medium: str = "GPU") -> dict[str, object]:
    return {"kv_cache_spec_kind": kind, "kv_cache_spec_sliding_window": window, "group_idx": group, "medium": medium}


@pytest.mark.parametrize("seed", range(4))
def test_groups_of_layers_reach_as_far_as_each_has_what_it_needs(seed: int) -> None:
    """Against the definition: the longest beginning of a prompt whose end has the blocks that each group needs."""
    chance = random.Random(seed)
    for _ in range(100):
        engine, num = _Engine(), 5
        engine.index.groups = engine.blocks.layer_groups
        groups = {1: ("sliding_window", chance.randrange(2, 14)), 2: ("mamba", None), 0: ("full_attention", None)}
        held = {group: {i for i in range(num) if chance.random() < 0.8} for group in groups}
        for group, (kind, window) in groups.items():
            engine.report(_stored([1, 2, 3, 4, 5], TOKENS, **_kind(kind, window, group)))
            gone = [i + 1 for i in range(num) if i not in held[group]]
            engine.report(BlockRemoved(gone, "GPU", group))
        window_blocks = -(-(int(groups[1][1] or 0) - 1) // BLOCK)
        able = [
            end
            for end in range(1, num + 1)
            if all(i in held[0] for i in range(end))
            and end - 1 in held[2]
            and all(i in held[1] for i in range(max(end - max(window_blocks, 1), 0), end))
        ]
        assert engine.cached_tokens([*TOKENS, 9]) == BLOCK * max(able, default=0)


def test_a_group_that_reports_some_of_its_blocks_is_placed_by_the_others() -> None:
    engine = _Engine()
    engine.index.groups = engine.blocks.layer_groups
    state, full = _kind("mamba", group=0), _kind("full_attention", group=1)
    engine.report(_stored([2, 4], TOKENS[: 4 * BLOCK], **state), _stored([1, 2, 3, 4], TOKENS[: 4 * BLOCK], **full))
    assert engine.cached_tokens(TOKENS) == 4 * BLOCK
    engine.report(BlockRemoved([4], "GPU", 0))
    assert engine.cached_tokens(TOKENS) == 2 * BLOCK, "at the state before"
    engine.report(AllBlocksCleared())
    assert engine.cached_tokens(TOKENS) == 0 and not engine.blocks.layer_groups[0].held


@pytest.mark.parametrize("kind", ["encoder_only_attention", "cross_attention", "chunked_local_attention", "new kind"])
def test_groups_that_say_nothing_about_reuse_are_counted(kind: str) -> None:
    engine = _Engine()
    engine.report(_stored([8], TOKENS[:BLOCK], **_kind(kind, group=0)))
    engine.report(_stored([1, 2], TOKENS[: 2 * BLOCK], **_kind("mla_attention", group=1)))
    assert engine.cached_tokens(TOKENS) == 2 * BLOCK and engine.blocks.ignored == {"another group": 1}


def test_a_copy_without_tokens_says_that_a_known_block_is_in_slower_memory_too() -> None:
    engine = _Engine()
    copy = BlockStored([1, 2, 77], None, [], 0, medium="CPU")
    engine.report(_stored([1, 2], TOKENS[: 2 * BLOCK]), copy, BlockStored([1], None, [], 0, medium="STORAGE"))
    request = _request(TOKENS)
    assert engine.cached_tokens(TOKENS) == 2 * BLOCK and engine.blocks.ignored == {"copy of an unknown block": 1}
    engine.report(BlockRemoved([1, 2], "GPU"))
    assert (engine.cached_tokens(TOKENS), engine.index.loadable_tokens(request)) == (0, 2 * BLOCK)
    engine.report(BlockRemoved([1, 2], "CPU"))
    assert engine.index.loadable_tokens(request) == BLOCK, "one of them is in the other slower memory"
    engine.report(BlockRemoved([1], "STORAGE"))
    assert engine.index.loadable_tokens(request) == 0 and not len(engine.blocks)
    engine.report(BlockStored([3], None, TOKENS[: 8 * BLOCK], 8 * BLOCK, medium="cpu"))
    assert engine.blocks.sizes([copy]) == set() and engine.blocks.ignored["block size"] == 1


PAIRS = [(token, token + 1) for token in TOKENS]


@pytest.mark.parametrize("salt", ["", "team-a"])
def test_pairs_of_tokens_and_salts_name_blocks_as_prompts_do(salt: str) -> None:
    engine = _Engine()
    by_salt = [
        _stored([1, 2], PAIRS[: 2 * BLOCK], cache_salt=salt or None),  # type: ignore[arg-type]
        _stored([3], TOKENS[2 * BLOCK : 3 * BLOCK], 2, cache_salt=salt or None),
    ]
    engine.report(*by_salt)
    for other in ("", "team-a", "team-b"):
        prefix = token_blocks.segments(TOKENS, BLOCK, "", other)
        found = engine.index.cached_tokens(Live(0, 0.0, len(TOKENS), 1, prefix=prefix))
        assert found == (3 * BLOCK if other == salt else 0)


@pytest.mark.parametrize(
    "keys", [["team-a"], [["cache_salt", "team-a"]], ["lora", "team-a"], [["lora", "lora"], "team-a"]]
)
def test_vllm_s_salt_is_among_the_keys_of_the_first_block(keys: list[object]) -> None:
    engine, lora = _Engine(), "lora" if len(keys) > 1 else ""
    engine.report(
        _stored([1, 2], TOKENS[: 2 * BLOCK], lora_name=lora or None, extra_keys=[keys, keys[:1] if lora else None])
    )
    for salt, expected in (("team-a", 2), ("team-b", 0), ("", 0)):
        prefix = token_blocks.segments(TOKENS, BLOCK, lora, salt)
        assert engine.index.cached_tokens(Live(0, 0.0, len(TOKENS), 1, prefix=prefix)) == expected * BLOCK
    image = _Engine()
    image.report(_stored([1], TOKENS[:BLOCK], extra_keys=[[["image", 3], "team-a"]]))
    prefix = token_blocks.segments(TOKENS, BLOCK, "", "team-a")
    assert image.index.cached_tokens(Live(0, 0.0, len(TOKENS), 1, prefix=prefix)) == 0, "the image makes another block"


def test_each_rank_has_a_cache_of_its_own() -> None:
    index = RanksIndex(BLOCK, 100, 2)
    blocks = [EngineBlocks(BLOCK, 100) for _ in index.ranks]

    def report(rank: int, *events: Event) -> None:
        index.ranks[rank].guesses = False
        index.ranks[rank].apply_blocks(blocks[rank].changes(events))

    request = _request(TOKENS)
    index.placed(request)
    assert index.cached_tokens(request) == 4 * BLOCK and index.guesses, "a guess while no rank is known"
    report(0, _stored([1], TOKENS[:BLOCK]))
    assert index.cached_tokens(request) == BLOCK and not index.guesses
    report(1, _stored([8, 9], TOKENS[BLOCK : 3 * BLOCK]), _stored([1, 2], TOKENS[: 2 * BLOCK]))
    assert index.cached_tokens(request) == 2 * BLOCK and index.rank_cached_tokens(request) == [BLOCK, 2 * BLOCK]
    report(1, AllBlocksCleared())
    assert index.cached_tokens(request) == BLOCK, "the other rank's blocks stay"
    index.placed(request)
    assert index.cached_tokens(request) == 4 * BLOCK, "what is placed counts until a rank reports it"
    report(0, BlockRemoved([1]))
    assert index.cached_tokens(request) == 0
