"""The KV cache events of an emulated engine, published in the format of vLLM and SGLang: `--kv-events-config`."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Literal, NamedTuple

import zmq
import zmq.asyncio
from msgspec import Struct

from headway.control import token_blocks
from headway.control.cache_index import Change
from headway.core.request import Segment
from headway.gateway.kv_events import wire

_MOST_UNPUBLISHED = 100_000
"""Blocks of recent prompts that are kept because they may enter the cache. Each takes about 300 bytes."""


class KvEventsConfig(Struct, forbid_unknown_fields=True):
    """The value of `--kv-events-config`, with names and defaults of vLLM and SGLang."""

    enable_kv_cache_events: bool = False
    """vLLM publishes events if this is set."""
    publisher: Literal["zmq", "null"] | None = None
    """SGLang publishes events with `zmq`. vLLM publishes none with `null`."""
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    """Number of batches that can be replayed."""
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""

    def is_on(self, is_sglang: bool) -> bool:
        """Whether an engine of this kind publishes events."""
        return self.publisher == "zmq" if is_sglang else self.enable_kv_cache_events and self.publisher != "null"


class _Block(NamedTuple):
    before: int
    """The name of the previous block, or of the root."""
    token_ids: tuple[int, ...]
    lora: str


class KvEventPublisher:
    """Publishes the blocks that a prefix cache stores and removes, one batch for each change."""

    def __init__(self, config: KvEventsConfig, block_size_tokens: int, as_arrays: bool) -> None:
        """`as_arrays`: use the format of SGLang and earlier vLLM. zmq.ZMQError if an endpoint is in use."""
        self._config, self._block, self._as_arrays = config, block_size_tokens, as_arrays
        self._tokens: dict[int, _Block] = {}
        """All published blocks and the blocks of recent prompts, by name."""
        self._published: set[int] = set()
        self._buffer: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._number = 0
        context = self._context = zmq.asyncio.Context()
        self._pub = zmq.Socket(context, zmq.PUB)
        self._pub.set_hwm(config.hwm)
        self._pub.bind(config.endpoint)
        self._replays: asyncio.Task[None] | None = None
        if config.replay_endpoint is not None:
            router = context.socket(zmq.ROUTER)
            router.bind(config.replay_endpoint)
            self._replays = asyncio.get_running_loop().create_task(self._answer_replays(router))

    @property
    def held(self) -> frozenset[int]:
        """The names of the blocks in the cache, as published."""
        return frozenset(self._published)

    def prompt(self, token_ids: list[int], lora: str) -> tuple[Segment, ...]:
        """The blocks of a prompt that the cache may store, as segments of one block each."""
        prefix = token_blocks.segments(token_ids, self._block, lora)
        before = token_blocks.root(lora)
        for i, segment in enumerate(prefix):
            start = i * self._block
            self._tokens.pop(segment.id, None)
            self._tokens[segment.id] = _Block(before, tuple(token_ids[start : start + self._block]), lora)
            before = segment.id
        if len(self._tokens) > len(self._published) + 2 * _MOST_UNPUBLISHED:
            unpublished = [name for name in self._tokens if name not in self._published]
            for name in unpublished[:-_MOST_UNPUBLISHED]:
                del self._tokens[name]
        return prefix

    def publish(self, changes: list[Change]) -> None:
        """Publish a batch. A change of a block is (name, on the GPU, in slower memory)."""
        stored: dict[int, None] = {}
        removed: list[int] = []
        for name, on_gpu, _ in changes:
            if on_gpu and name not in self._published and name in self._tokens:
                stored[name] = None
            elif not on_gpu and name in self._published:
                removed.append(name)
        self._published.update(stored)
        self._published.difference_update(removed)
        events: list[wire.Event] = []
        if removed:
            events.append(wire.BlockRemoved([_hash(name) for name in removed], "GPU"))
        events += self._runs(stored)
        if events:
            payload, number = wire.encode(events, time.time(), self._as_arrays), self._number.to_bytes(8, "big")
            self._number += 1
            self._buffer.append((number, payload))
            with suppress(zmq.Again):
                self._pub.send_multipart((self._config.topic.encode(), number, payload), zmq.NOBLOCK)

    def _runs(self, stored: dict[int, None]) -> Iterator[wire.Event]:
        """One event for each run of consecutive blocks of a prompt. An event never comes before the event that it
        continues."""
        followers: dict[int, list[int]] = {}
        heads = []
        for name in stored:
            before = self._tokens[name].before
            followers.setdefault(before, []).append(name)
            if before not in stored:
                heads.append(name)
        while heads:
            run = [heads.pop()]
            while following := followers.get(run[-1]):
                heads += following[1:]
                run.append(following[0])
            first = self._tokens[run[0]]
            parent = _hash(first.before) if first.before in self._published else None
            tokens: list[int | tuple[int, ...]] = [token for name in run for token in self._tokens[name].token_ids]
            yield wire.BlockStored(
                [_hash(name) for name in run], parent, tokens, self._block, None, "GPU", first.lora or None
            )

    async def _answer_replays(self, router: zmq.asyncio.Socket) -> None:
        while True:
            parts = await router.recv_multipart()
            if len(parts) != 3:
                continue
            client, start = parts[0], parts[2]
            for number, payload in list(self._buffer):
                if number >= start:
                    await router.send_multipart((client, b"", number, payload))
            await router.send_multipart((client, b"", wire.END_OF_REPLAY, b""))

    def close(self) -> None:
        if self._replays is not None:
            self._replays.cancel()
        self._pub.close(0)
        self._context.destroy(0)


def _hash(name: int) -> bytes:
    """The engine's own name of a block: bytes. The common names are integers."""
    return b"engine" + name.to_bytes(8, "big")
