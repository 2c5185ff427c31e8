"""The subscriptions to the KV cache events of a gateway's engines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from urllib.parse import urlsplit

import zmq.asyncio
from msgspec import Struct

from headway.core.errors import HeadwayError
from headway.gateway.kv_events.engine_blocks import EngineBlocks
from headway.gateway.kv_events.subscriber import EventAddress, KvEventSubscriber, State
from headway.gateway.scheduling.replica import LiveReplica

_BLOCKS_PER_KV_BLOCK = 8
"""Blocks that are kept of an engine, in slower memory, too, for each of its GPU's."""
_LEAST_BLOCKS = 1 << 16


class KvEventsSpec(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """For `headway serve`: where the engines publish their KV cache events (vLLM's and SGLang's
    `--kv-events-config`). Policies then see what each prefix cache holds; without it they see a guess."""

    endpoint: str = "tcp://{host}:5557"
    """The address of an engine's events. `{host}` and `{port}` stand for those of the engine's own endpoint."""
    replay_endpoint: str = ""
    """Where an engine sends past batches again. Without one, a lost batch leaves the index incomplete."""
    topic: str = ""

    def address(self, url: str) -> EventAddress:
        """The address of the engine with this endpoint. HeadwayError for an unknown placeholder."""
        parts = urlsplit(url)
        names = {"host": parts.hostname or "", "port": parts.port or (443 if parts.scheme == "https" else 80)}
        try:
            return EventAddress(
                self.endpoint.format(**names), self.replay_endpoint.format(**names), self.topic.format(**names)
            )
        except (LookupError, ValueError):
            what = f"{self.endpoint!r}, {self.replay_endpoint!r}; expected no placeholders but {{host}} and {{port}}"
            raise HeadwayError(f"kv_events: {what}") from None


class CacheFeeds:
    """By replica, the subscriber that keeps its cache index. `on_state(replica, state, why)` is called on changes."""

    def __init__(self, on_state: Callable[[LiveReplica, State, str], None]) -> None:
        self._on_state = on_state
        self._context = zmq.asyncio.Context()
        self.subscribers: dict[int, KvEventSubscriber] = {}
        self._stopping: set[asyncio.Task[None]] = set()

    def add(self, replica: LiveReplica, address: EventAddress) -> None:
        """Read a replica's events from now on."""
        most = max(_BLOCKS_PER_KV_BLOCK * replica.kv_blocks_total, _LEAST_BLOCKS)
        subscriber = self.subscribers[replica.id] = KvEventSubscriber(
            replica.name, address, EngineBlocks(replica.block_size_tokens, most), replica.cache_index, self._context,
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

    def reads(self, replicas: Iterable[LiveReplica]) -> bool:
        """Whether the events of one of the replicas are read, so that prompts are named by their tokens."""
        return any(replica.id in self.subscribers for replica in replicas)

    async def stop(self) -> None:
        subscribers = list(self.subscribers.values())
        self.subscribers.clear()
        await asyncio.gather(*self._stopping, *(subscriber.stop() for subscriber in subscribers))
        self._context.destroy(0)
