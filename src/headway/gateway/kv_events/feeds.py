"""The subscriptions to the KV cache events of a gateway's engines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from math import gcd

import zmq.asyncio

from headway.gateway.kv_events.address import KvEvents
from headway.gateway.kv_events.engine_blocks import EngineBlocks
from headway.gateway.kv_events.subscriber import KvEventSubscriber, State
from headway.gateway.scheduling.replica import LiveReplica
from headway.gateway.telemetry.metrics import Metric, Sample

_BLOCKS_PER_KV_BLOCK = 8
"""Blocks that are kept of an engine, in slower memory, too, for each of its GPU's."""
_LEAST_BLOCKS = 1 << 16

_METRICS = {
    "kv_events_live": "Whether a replica's KV cache events are read, and none are missing",
    "kv_events_cached_blocks": "KV blocks that a replica's prefix cache holds, as far as is known",
    "kv_events_blocks_total": "KV blocks that were stored or removed, by replica",
    "kv_events_ignored_total": "KV blocks of events that make no sense",
    "kv_events_gaps_total": "Times that batches of events were missing",
    "kv_events_lost_total": "Batches of events that no replay had, either",
    "kv_events_malformed_total": "Batches of events that could not be read",
    "kv_events_restarts_total": "Times that the index of a replica's prefix cache was built anew",
}


class CacheFeeds:
    """By replica, the subscriber that keeps its cache index. `on_state(replica, state, why)` is called on changes."""

    def __init__(
        self, on_state: Callable[[LiveReplica, State, str], None], name_tokens: Mapping[str, int] | None = None
    ) -> None:
        """`name_tokens`: by model, tokens of the pieces in which prompts are named; default: a block of the pool."""
        self._on_state, self._name_tokens = on_state, name_tokens or {}
        self._context = zmq.asyncio.Context()
        self.subscribers: dict[int, KvEventSubscriber] = {}
        self._stopping: set[asyncio.Task[None]] = set()

    def add(self, replica: LiveReplica, events: KvEvents | None) -> None:
        """Read a replica's events from now on; None: its engine publishes none."""
        if events is None:
            return
        address = events.address(replica.url)
        size = replica.block_size_tokens
        piece = gcd(size, self._name_tokens.get(replica.model, size))
        replica.event_block_tokens, replica.tokenizer = piece, events.tokenizer
        most = max(_BLOCKS_PER_KV_BLOCK * replica.kv_blocks_total, _LEAST_BLOCKS)
        subscriber = self.subscribers[replica.id] = KvEventSubscriber(
            replica.name, address, EngineBlocks(size, most, piece), replica.cache_index, self._context,
            lambda state, why: self._on_state(replica, state, why),
        )  # fmt: skip
        subscriber.start()

    def remove(self, replica: LiveReplica) -> None:
        """Read a replica's events no more."""
        subscriber = self.subscribers.pop(replica.id, None)
        if subscriber is not None:
            stopping = asyncio.get_running_loop().create_task(subscriber.stop())
            self._stopping.add(stopping)
            stopping.add_done_callback(self._stopping.discard)

    def metrics(self, replicas: Iterable[LiveReplica]) -> list[Metric]:
        """What was read of these replicas' events."""
        values: dict[str, list[Sample]] = {name: [] for name in _METRICS}
        for replica in replicas:
            if (subscriber := self.subscribers.get(replica.id)) is None:
                continue
            labels = {"pool": replica.pool, "model": replica.model, "replica": str(replica.id)}
            counts, blocks = subscriber.counts, subscriber.blocks
            numbers = (
                subscriber.state == "live", len(replica.cache_index.gpu), blocks.num_events, blocks.ignored.total(),
                counts.gaps, counts.lost, counts.malformed, counts.restarts,
            )  # fmt: skip
            for name, number in zip(_METRICS, numbers, strict=True):
                values[name].append((labels, float(number)))
        return [(name, help, values[name]) for name, help in _METRICS.items()]

    async def stop(self) -> None:
        subscribers = list(self.subscribers.values())
        self.subscribers.clear()
        await asyncio.gather(*self._stopping, *(subscriber.stop() for subscriber in subscribers))
        self._context.destroy(0)
