"""What an engine says beside its answers, in any form and length: it is unknown then, and ends nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("httptools")
pytest.importorskip("zmq")

import zmq.asyncio

from headway.control.cache_index import CacheIndex
from headway.core.errors import HeadwayError
from headway.gateway.kv_events import wire
from headway.gateway.kv_events.address import EventAddress
from headway.gateway.kv_events.engine_blocks import MAX_HASH_BYTES, EngineBlocks
from headway.gateway.kv_events.subscriber import MAX_BATCH_BYTES, MAX_WAITING_BYTES, KvEventSubscriber
from headway.gateway.settings import Settings
from headway.gateway.upstream.dialects import ADAPTERS, parse_load
from headway.gateway.upstream.engine import EngineEndpoint
from headway.gateway.upstream.health import HealthMonitor
from scripted import Exchange, ScriptedEngine

MIB = 1 << 20
OK = b"HTTP/1.1 200 OK\r\n"
SAID = {"/health": b"", "/v1/models": b'{"data":[]}', "/metrics": b"vllm:num_requests_running 1\n"}
LINE = b"vllm:num_requests_running{" + b"a" * MIB + b"} 1\n"
WRONG = {
    "longer than is read": OK + b"Content-Length: %d\r\n\r\n" % (5 * MIB) + b"# a line\n" * (5 * MIB // 9 + 1),
    "without an end": OK + b"Transfer-Encoding: chunked\r\n\r\n3\r\na 1\r\n",
    "silent": OK + b"Content-Length: 10\r\n\r\n",
    "broken off": OK + b"Content-Length: 10\r\n\r\nab",
    "short": OK + b"Content-Length: 1\r\n\r\n{",
    "no text": OK + b"Content-Length: 4\r\n\r\n\xff\xfe\x00\xc1",
    "one line": OK + b"Content-Length: %d\r\n\r\n" % len(LINE) + LINE,
}


class Engine(ScriptedEngine):
    """An engine that says one thing in a wrong way."""

    def __init__(self, path: str, way: str) -> None:
        super().__init__()
        self._path, self._way = path, way
        self.num_checks = self.num_wrong = 0

    async def get(self, exchange: Exchange) -> None:
        self.num_checks += exchange.path == "/health"
        if exchange.path != self._path:
            exchange.answer(SAID[exchange.path])
            return
        self.num_wrong += 1
        exchange.send(WRONG[self._way])
        if self._way == "broken off":
            exchange.close()
        await exchange.drain()


def test_an_engine_that_says_something_wrong_of_itself_stays_up() -> None:
    async def story() -> None:
        engines = [Engine(path, way) for path in SAID for way in WRONG]
        replicas = [
            EngineEndpoint(id, "pool", "m", await each.listen(), ADAPTERS["vllm"], 9) for id, each in enumerate(engines)
        ]
        up: set[int] = set()
        down: list[str] = []
        monitor = HealthMonitor(
            replicas,
            Settings(scrape_period_s=0.05, probe_timeout_s=1.0),
            lambda replica: up.add(replica.id),
            lambda replica: down.append(replica.name),
            lambda replica: None,
            lambda replica, load: None,
        )
        monitor.start()
        async with asyncio.timeout(60):
            while len(up) < len(engines) or min(each.num_checks for each in engines) < 5:
                await asyncio.sleep(0.02)
        assert not down and all(each.num_wrong for each in engines)
        await monitor.stop()
        for each, replica in zip(engines, replicas, strict=True):
            await each.stop()
            replica.client.close()

    asyncio.run(story())


NAME = "vllm:num_requests_running"
LORA = "vllm:lora_requests_info"
PAGES = {
    "a label without a value": NAME + "{" + "a" * 4 * MIB + "} 1",
    "labels that do not end": NAME + "{" + 'a="' * MIB + "} 1",
    "spaces": NAME + "{a" + " " * 4 * MIB + "} 1",
    "many labels": NAME + "{" + ",".join([f'l{i}="{i}"' for i in range(50_000)]) + "} 1\n" + NAME + '{b="1"} 2',
    "many samples": "\n".join([f'{NAME}{{a="{i}",b="{i}"}} 1' for i in range(20_000)]),
    "many ranks": "\n".join([f'{NAME}{{engine="{i}"}} 1' for i in range(20_000)]),
    "orderings": "headway:ordering_info{" + 'ordering="a",' * 80_000 + "} 2",
    "times that are none": f'{LORA}{{max_lora="1"}} 1.2.3\n{LORA}{{max_lora="1"}} e\n{LORA}{{max_lora="1"}} 1e999',
}


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
def test_any_page_is_read_to_its_end(page: str) -> None:
    """In a time that grows with its length: these would take hours in one that grows with its square."""
    load = parse_load(ADAPTERS["vllm"], page)
    assert load.running is None or load.running in (1, 20_000)
    assert load.loras == ()


@given(st.lists(st.sampled_from([NAME, LORA, "{", "}", '"', "=", "a", "engine", ",", " ", "1", "e", ".", "\n", "\\"])))
def test_no_page_is_an_error(parts: list[str]) -> None:
    parse_load(ADAPTERS["vllm"], f"{NAME}{{a" + "".join(parts))


# KV cache events.


def _run(story: Callable[[KvEventSubscriber, Any], Coroutine[Any, Any, None]], folder: Path) -> None:
    """A subscriber of a publisher that drops nothing for lack of room."""

    async def told() -> None:
        context = zmq.asyncio.Context()
        publisher = zmq.Context.instance().socket(zmq.XPUB)
        publisher.setsockopt(zmq.XPUB_NODROP, 1)
        publisher.sndhwm, publisher.sndtimeo, publisher.linger = 1, 500, 0
        publisher.bind(f"ipc://{folder}/e")
        made = KvEventSubscriber(
            "engine",
            EventAddress(f"ipc://{folder}/e"),
            EngineBlocks(16, 1000),
            CacheIndex(16, 1000, guesses=True),
            context,
            lambda state, why: None,
        )
        made.start()
        try:
            async with asyncio.timeout(60):
                while not publisher.poll(0):  # it has subscribed
                    await asyncio.sleep(0.01)
                publisher.recv()
                await story(made, publisher)
        finally:
            await made.stop()
            context.destroy(0)
            publisher.close()

    asyncio.run(told())


def _batch(number: int, payload: bytes) -> list[bytes]:
    return [b"", number.to_bytes(8, "big"), payload]


def test_batches_that_are_not_read_wait_at_the_engine(tmp_path: Path) -> None:
    """While the event loop has other work, a bounded number of bytes comes; later the rest does."""

    async def story(made: KvEventSubscriber, publisher: Any) -> None:
        payload, num = wire.encode([wire.AllBlocksCleared()], 1.0, False), 0
        padded = payload.replace(b"\x82", b"\x83", 1) + msgspec.msgpack.encode("x") + msgspec.msgpack.encode("y" * MIB)
        assert list(wire.decode(padded)) == [wire.AllBlocksCleared()]
        with pytest.raises(zmq.Again):
            for num in range(200):
                publisher.send_multipart(_batch(num, padded))
        assert num * MIB < MAX_WAITING_BYTES
        while made.counts.batches < num:
            await asyncio.sleep(0.01)
        assert made.state == "live" and made.counts.lost == 0

    _run(story, tmp_path)


def test_a_batch_that_is_too_long_is_not_read(tmp_path: Path) -> None:
    async def story(made: KvEventSubscriber, publisher: Any) -> None:
        publisher.send_multipart(_batch(0, b"x" * (MAX_BATCH_BYTES + 1)))
        while made.state != "degraded":
            await asyncio.sleep(0.01)
        assert made.counts.batches == 0 and "connection is lost" in made.why

    _run(story, tmp_path)


def test_long_hashes_are_refused_and_counted() -> None:
    blocks = EngineBlocks(2, 1000)
    found = []
    for size in (MAX_HASH_BYTES, MAX_HASH_BYTES + 1, MIB):
        hashes: list[int | bytes] = [bytes([size % 7]) * size, 5]
        found += blocks.changes([wire.BlockStored(hashes, None, [1, 2, 3, 4], 2)])
    assert len(found) == 1 and len(blocks) == 2 and blocks.ignored == {"hash too long": 4}


def test_kinds_of_memories_and_of_layers_are_bounded() -> None:
    blocks = EngineBlocks(2, 100)
    for number in range(2000):
        stored = wire.BlockStored([number], None, [1, 2], 2, medium=f"{number}" * 100)
        window = wire.BlockStored(
            [number],
            None,
            [1, 2],
            2,
            group_idx=number,
            kv_cache_spec_kind="sliding_window",
            kv_cache_spec_sliding_window=4,
        )
        blocks.changes([stored, window, window])
    assert len(blocks._memories) <= 16 and len(blocks._groups) <= 32 and len(blocks) <= 100
    assert max(map(len, blocks._memories)) <= 128


NUMBERS = st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False)
WORDS = st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "events", "type", "GPU"])
VALUES = st.recursive(
    st.none() | NUMBERS | st.text(max_size=5) | st.binary(max_size=5) | WORDS,
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
)
STORED = st.tuples(
    st.just("BlockStored"),
    st.lists(st.integers(0, 9) | st.binary(max_size=2), max_size=4),
    st.none() | st.integers(0, 9),
    st.lists(st.integers(-9, 2**63), max_size=8),
    st.integers(-2, 4),
    st.none() | st.integers(0, 3),
    st.none() | st.text(max_size=3),
    st.none() | st.text(max_size=3),
    st.none() | st.lists(VALUES, max_size=3),
    st.none() | st.integers(-2, 3),
    st.none() | st.sampled_from(["mamba", "sliding_window", "full_attention"]),
    st.none() | st.integers(-3, 9),
    VALUES,
)


@pytest.mark.ci
@given(st.lists(STORED | VALUES, max_size=4))
def test_no_batch_is_an_error_of_the_gateway(events: list[Any]) -> None:
    blocks, index = EngineBlocks(2, 10), CacheIndex(2, 10, guesses=False)
    try:
        found = wire.decode(msgspec.msgpack.encode([1.0, events]))
    except HeadwayError:
        return
    index.apply_blocks(blocks.changes(found))


NESTED = b"\x91" * 5_000


@pytest.mark.parametrize("payload", [NESTED, b"\x93\x01" + NESTED, b"\x82\xa6events\x91\xa2\xff\xff", b""])
def test_damaged_batches_are_malformed(payload: bytes) -> None:
    with pytest.raises(HeadwayError, match="malformed"):
        wire.decode(payload)
