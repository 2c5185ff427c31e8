"""A subscriber beside a publisher, over real sockets: losses, restarts and engines that are wrong."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("zmq")

import zmq.asyncio

import serving
from headway.control import token_blocks
from headway.control.cache_index import CacheIndex
from headway.control.live import Live
from headway.emulator.kv_events import KvEventPublisher, KvEventsConfig
from headway.gateway.kv_events import subscriber, wire
from headway.gateway.kv_events.address import EventAddress
from headway.gateway.kv_events.engine_blocks import EngineBlocks
from headway.gateway.kv_events.subscriber import MAX_MALFORMED, KvEventSubscriber

BLOCK = 4


class Engine:
    """The cache of an engine, with a publisher that can be restarted and can lose batches."""

    def __init__(self, folder: Path, **config: Any) -> None:
        self.config = KvEventsConfig(True, endpoint=f"ipc://{folder}/e", replay_endpoint=f"ipc://{folder}/r", **config)
        self._chance = random.Random(5)
        self.start()

    def start(self) -> None:
        self.publisher = KvEventPublisher(self.config, BLOCK, as_arrays=True)

    def work(self, num: int) -> None:
        """Store prompts, which share beginnings, and remove the last blocks of others."""
        for _ in range(num):
            tokens = [self._chance.randrange(3) for _ in range(BLOCK)] * self._chance.randrange(1, 5)
            prefix = self.publisher.prompt(tokens, "")
            self.publisher.publish([(segment.id, 1, 0) for segment in prefix])
            if self._chance.random() < 0.3:
                self.publisher.publish([(prefix[-1].id, 0, 0)])

    def lose(self, num: int) -> None:
        """Publish batches that do not arrive."""
        pub, self.publisher._pub = self.publisher._pub, _Nowhere()
        self.work(num)
        self.publisher._pub = pub


class _Nowhere:
    def send_multipart(self, *_: object) -> None:
        """Do nothing."""


class Reader:
    """A subscriber with an index of its own."""

    def __init__(self, engine: Engine, block: int = BLOCK, replay: bool = True) -> None:
        self.context = zmq.asyncio.Context()
        self.blocks, self.index = EngineBlocks(block, 1000), CacheIndex(block, 1000, guesses=True)
        self.states: list[str] = []
        address = EventAddress(engine.config.endpoint, str(engine.config.replay_endpoint) if replay else "")
        self.subscriber = KvEventSubscriber(
            "engine", address, self.blocks, self.index, self.context, lambda state, _: self.states.append(state)
        )
        self.subscriber.start()

    def agrees(self, engine: Engine) -> bool:
        return self.blocks.names == engine.publisher.held and len(self.index.gpu) == len(engine.publisher.held)

    async def close(self) -> None:
        await self.subscriber.stop()
        self.context.destroy(0)


def run(story: Callable[[Engine], Coroutine[Any, Any, None]], folder: Path, **config: Any) -> None:
    async def told() -> None:
        engine = Engine(folder, **config)
        try:
            await story(engine)
        finally:
            engine.publisher.close()

    asyncio.run(told())


def test_an_index_begins_with_what_was_stored_before(tmp_path: Path) -> None:
    async def story(engine: Engine) -> None:
        engine.work(30)
        reader = Reader(engine)
        await serving.eventually(lambda: reader.subscriber.state == "live" and reader.agrees(engine))
        engine.work(30)
        await serving.eventually(lambda: reader.agrees(engine))
        assert reader.states == ["live"] and not reader.index.guesses and reader.subscriber.counts.lost == 0
        await reader.close()
        assert reader.index.guesses and not len(reader.index.gpu)

    run(story, tmp_path)


def test_lost_batches_are_replayed(tmp_path: Path) -> None:
    async def story(engine: Engine) -> None:
        reader = Reader(engine)
        await serving.eventually(lambda: reader.subscriber.state == "live")
        for _ in range(5):
            engine.work(3)
            engine.lose(4)
            engine.work(1)
            await serving.eventually(lambda: reader.agrees(engine))
        counts = reader.subscriber.counts
        assert counts.gaps == 5 and counts.replayed >= 20 and not counts.lost and reader.states == ["live"]
        await reader.close()

    run(story, tmp_path)


def test_a_lost_last_batch_is_asked_for_once_events_pause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(engine: Engine) -> None:
        monkeypatch.setattr(subscriber, "QUIET_S", 0.05)
        reader = Reader(engine)
        await serving.eventually(lambda: reader.subscriber.state == "live")
        for _ in range(3):
            engine.work(3)
            engine.lose(4)
            await serving.eventually(lambda: reader.agrees(engine))
        counts = reader.subscriber.counts
        assert counts.replayed >= 12 and not counts.lost and reader.states == ["live"]
        await reader.close()

    run(story, tmp_path)


def test_events_that_are_doubted_are_read_anew_after_a_while(tmp_path: Path) -> None:
    async def story(engine: Engine) -> None:
        reader = Reader(engine)
        await serving.eventually(lambda: reader.subscriber.state == "live")
        engine.work(20)
        await serving.eventually(lambda: reader.agrees(engine))
        reader.subscriber.trust()
        reader.subscriber.doubt("answers say otherwise")
        assert (reader.subscriber.state, reader.subscriber.why) == ("guess", "answers say otherwise")
        assert reader.index.guesses and not len(reader.index.gpu) and not len(reader.blocks)
        engine.work(1)
        await asyncio.sleep(0.1)
        assert reader.subscriber.state == "guess" and not len(reader.blocks)
        reader.subscriber._doubted_until_s -= subscriber.FIRST_DOUBT_S  # as if that time had passed
        engine.work(1)
        await serving.eventually(lambda: reader.subscriber.state == "live" and reader.agrees(engine))
        assert reader.states == ["live", "guess", "connecting", "live"] and not reader.subscriber.counts.lost
        await reader.close()

    run(story, tmp_path)


def test_batches_that_no_replay_has_are_told(tmp_path: Path) -> None:
    async def story(engine: Engine) -> None:
        reader = Reader(engine)
        await serving.eventually(lambda: reader.subscriber.state == "live")
        engine.lose(40)
        engine.work(1)
        await serving.eventually(lambda: reader.subscriber.state == "incomplete")
        assert reader.subscriber.counts.lost > 0 and not reader.index.guesses and "lost" in reader.subscriber.why
        await reader.close()

    run(story, tmp_path, buffer_steps=5)


def test_without_a_replay_the_index_begins_with_what_comes(tmp_path: Path) -> None:
    async def story(engine: Engine) -> None:
        engine.work(10)
        reader = Reader(engine, replay=False)
        await serving.eventually(lambda: _works_until(engine, lambda: not reader.index.guesses))
        assert reader.subscriber.state == "incomplete" and reader.blocks.names <= engine.publisher.held
        await reader.close()

    run(story, tmp_path)


def _works_until(engine: Engine, condition: Callable[[], bool]) -> bool:
    """Whether the condition holds; else the engine works a little. Subscriptions take a moment to arrive."""
    if not condition():
        engine.work(1)
    return condition()


def test_an_engine_that_restarts_is_read_anew(tmp_path: Path) -> None:
    async def story(engine: Engine) -> None:
        reader = Reader(engine)
        engine.work(20)
        await serving.eventually(lambda: reader.agrees(engine))
        engine.publisher.close()
        await serving.eventually(lambda: reader.subscriber.state == "degraded")
        assert reader.index.guesses and not len(reader.index.gpu)
        engine.start()
        engine.work(5)
        await serving.eventually(lambda: reader.subscriber.state == "live" and reader.agrees(engine))
        assert reader.subscriber.counts.restarts == 1 and reader.states == ["live", "degraded", "connecting", "live"]
        await reader.close()

    run(story, tmp_path)


def test_a_foreign_block_size_is_told(tmp_path: Path) -> None:
    async def story(engine: Engine) -> None:
        reader = Reader(engine, block=8)
        engine.work(5)
        await serving.eventually(lambda: reader.subscriber.state == "degraded")
        assert "blocks of 4 tokens; expected 8" in reader.subscriber.why and reader.index.guesses
        await reader.close()

    run(story, tmp_path)


def test_a_block_of_several_pieces_is_adopted(tmp_path: Path) -> None:
    """The engine's profile says 2 tokens a block, and so prompts are named; the engine's blocks have 4."""

    async def story(engine: Engine) -> None:
        reader = Reader(engine, block=2)
        tokens = list(range(4 * BLOCK))
        prefix = engine.publisher.prompt(tokens, "")
        engine.publisher.publish([(segment.id, 1, 0) for segment in prefix[:3]])
        await serving.eventually(lambda: reader.subscriber.state == "live" and len(reader.blocks) == 3)
        request = Live(0, 0.0, len(tokens), 1, prefix=token_blocks.segments(tokens, 2))
        assert reader.index.cached_tokens(request) == 3 * BLOCK and not reader.index.guesses
        await reader.close()

    run(story, tmp_path)


def _damage(engine: Engine, number: int, replay: bool = False) -> None:
    """Publish a batch that arrives malformed, also by replay if `replay`."""
    pub, engine.publisher._pub = engine.publisher._pub, _Nowhere()
    prefix = engine.publisher.prompt([100 + number] * BLOCK, "")
    engine.publisher.publish([(prefix[0].id, 1, 0)])
    engine.publisher._pub = pub
    sent = engine.publisher._buffer[-1][0]
    if replay:
        engine.publisher._buffer[-1] = (sent, b"\xc1")
    pub.send_multipart([b"", sent, b"\xc1"])


def test_a_batch_that_was_damaged_on_its_way_is_asked_for_again(tmp_path: Path) -> None:
    async def story(engine: Engine) -> None:
        reader = Reader(engine)
        await serving.eventually(lambda: reader.subscriber.state == "live")
        for number in range(2 * MAX_MALFORMED):
            engine.work(2)
            _damage(engine, number)
            await serving.eventually(lambda: reader.agrees(engine))
        assert reader.subscriber.counts.malformed == 2 * MAX_MALFORMED and reader.states == ["live"]
        await reader.close()

    run(story, tmp_path)


def test_events_that_make_sense_again_are_read_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After three malformed batches, which no replay has otherwise, and after the engine has emptied its cache."""
    monkeypatch.setattr(subscriber, "REBUILD_PERIOD_S", 0.0)

    async def story(engine: Engine) -> None:
        reader = Reader(engine)
        engine.work(10)
        await serving.eventually(lambda: reader.subscriber.state == "live" and reader.agrees(engine))
        for number in range(MAX_MALFORMED):
            _damage(engine, number, replay=True)
        await serving.eventually(lambda: reader.subscriber.state == "degraded")
        engine.publisher._buffer.clear()  # the engine's next batches begin with an empty cache
        engine.publisher._published.clear()
        payload = wire.encode([wire.AllBlocksCleared()], 0.0, as_arrays=True)
        number = engine.publisher._number.to_bytes(8, "big")
        engine.publisher._number += 1
        engine.publisher._buffer.append((number, payload))
        engine.publisher._pub.send_multipart([b"", number, payload])
        engine.work(5)
        await serving.eventually(lambda: reader.subscriber.state == "live" and reader.agrees(engine))
        assert reader.states == ["live", "incomplete", "degraded", "connecting", "live"]
        await reader.close()

    run(story, tmp_path)


def test_events_that_are_malformed_end_in_guesses(tmp_path: Path) -> None:
    async def story(engine: Engine) -> None:
        reader = Reader(engine)
        await serving.eventually(lambda: reader.subscriber.state == "live")
        pub = engine.publisher._pub
        for number in range(3):
            pub.send_multipart([b"", number.to_bytes(8, "big"), b"\xc1"])
        await serving.eventually(lambda: reader.subscriber.state == "degraded")
        assert reader.subscriber.counts.malformed == 3 and reader.index.guesses
        pub.send_multipart([b"what is this?"])
        await serving.eventually(lambda: reader.subscriber.counts.malformed == 4)
        await reader.close()

    run(story, tmp_path)


def test_an_engine_without_events_leaves_the_guess(tmp_path: Path) -> None:
    async def story(engine: Engine) -> None:
        engine.publisher.close()
        reader = Reader(engine)
        reader.index.placed(Live(0, 0.0, 2 * BLOCK + 1, 1, prefix=engine.publisher.prompt([1] * 2 * BLOCK, "")))
        await asyncio.sleep(0.05)
        assert reader.subscriber.state == "connecting" and reader.index.guesses and len(reader.index.gpu)
        await reader.close()

    run(story, tmp_path)


@pytest.mark.parametrize(
    ("config", "is_sglang", "is_on"),
    [
        (KvEventsConfig(enable_kv_cache_events=True), False, True),
        (KvEventsConfig(enable_kv_cache_events=True, publisher="null"), False, False),
        (KvEventsConfig(publisher="zmq"), False, False),
        (KvEventsConfig(publisher="zmq"), True, True),
        (KvEventsConfig(enable_kv_cache_events=True), True, False),
    ],
)
def test_each_engine_has_its_own_switch(config: KvEventsConfig, is_sglang: bool, is_on: bool) -> None:
    assert config.is_on(is_sglang) == is_on


@pytest.mark.parametrize(("most", "size"), [(10, 0), (100, 100_000), (100, 1 << 20)])
def test_a_replay_that_is_cut_off_is_asked_for_again(tmp_path: Path, most: int, size: int) -> None:
    """An engine drops the end of a replay for which there is no room, and a connection ends at a long batch."""

    async def story() -> None:
        context = zmq.asyncio.Context()
        replays, events = context.socket(zmq.ROUTER), context.socket(zmq.PUB)
        replays.bind(f"ipc://{tmp_path}/r")
        events.bind(f"ipc://{tmp_path}/e")
        batches = [
            wire.encode(
                [wire.BlockStored([i], None, [i] * BLOCK, BLOCK, lora_name="a" * size if i == 15 else None)], 0.0, False
            )
            for i in range(25)
        ]

        async def answer() -> None:
            while True:
                client, _, asked = await replays.recv_multipart()
                left = list(enumerate(batches))[int.from_bytes(asked, "big") :]
                for number, payload in left[:most]:
                    await replays.send_multipart((client, b"", number.to_bytes(8, "big"), payload))
                if len(left) <= most:
                    await replays.send_multipart((client, b"", wire.END_OF_REPLAY, b""))

        answering = asyncio.create_task(answer())
        blocks, index = EngineBlocks(BLOCK, 1000), CacheIndex(BLOCK, 1000, guesses=True)
        made = KvEventSubscriber(
            "engine",
            EventAddress(f"ipc://{tmp_path}/e", f"ipc://{tmp_path}/r"),
            blocks,
            index,
            context,
            lambda state, why: None,
        )
        made.start()
        await serving.eventually(lambda: len(blocks) == 25)
        assert made.state == "live" and made.counts.lost == 0
        answering.cancel()
        await made.stop()
        context.destroy(0)

    asyncio.run(story())
