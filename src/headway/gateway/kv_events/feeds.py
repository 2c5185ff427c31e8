"""The subscriptions to the KV cache events of a gateway's engines."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import gcd

import zmq.asyncio
from msgspec.structs import replace

from headway.control.cache_index import RanksIndex
from headway.core.errors import HeadwayError
from headway.gateway.kv_events.address import KvEvents
from headway.gateway.kv_events.agreement import LEAST_AGREEMENT, Agreement
from headway.gateway.kv_events.engine_blocks import EngineBlocks
from headway.gateway.kv_events.subscriber import EventCounts, KvEventSubscriber, State
from headway.gateway.scheduling.replica import LiveReplica
from headway.gateway.telemetry.definitions import DEFINITIONS
from headway.gateway.telemetry.metrics import Metric, Sample

log = logging.getLogger("headway.gateway")
OnState = Callable[[LiveReplica, State, str], None]
_BY_KNOWLEDGE: list[State] = ["guess", "degraded", "connecting", "incomplete", "live"]
_BLOCKS_PER_KV_BLOCK = 8
"""Number of blocks that are kept for an engine, including its slower memory, per block of its GPU."""
_LEAST_BLOCKS = 1 << 16

_METRICS = tuple(name for name in DEFINITIONS if name.startswith("headway_kv_events_"))


class ReplicaFeed:
    """The events of one replica: a subscriber for each data-parallel rank, and their agreement with answers."""

    def __init__(self, replica: LiveReplica, on_state: OnState) -> None:
        self._replica, self._on_state = replica, on_state
        self.subscribers: list[KvEventSubscriber] = []
        """Subscribers by rank."""
        self.agreement = Agreement()
        self._reported: tuple[State, str] = "connecting", ""

    @property
    def state(self) -> State:
        """The worst state of all ranks."""
        return min([each.state for each in self.subscribers], key=_BY_KNOWLEDGE.index)

    @property
    def why(self) -> str:
        """The reason for the state; empty if the events are live."""
        state = self.state
        number, found = next((i, each) for i, each in enumerate(self.subscribers) if each.state == state)
        return f"rank {number}: {found.why}" if found.why and len(self.subscribers) > 1 else found.why

    @property
    def age_s(self) -> float | None:
        """Seconds since the last batch of any rank; None if no batch has come."""
        return min([age_s for each in self.subscribers if (age_s := each.age_s) is not None], default=None)

    @property
    def counts(self) -> EventCounts:
        """The event counts of all ranks together."""
        counts = [each.counts for each in self.subscribers]
        return EventCounts(*(sum(getattr(each, name) for each in counts) for name in EventCounts.__struct_fields__))

    def changed(self) -> None:
        """A subscriber's state has changed: report it."""
        found = self.state, self.why
        if found[0] != self._reported[0]:
            self._on_state(self._replica, *found)
            if found[0] == "live":
                self.agreement.forget()
        self._reported = found

    def answered(self, expected: Sequence[int], reported_tokens: int) -> None:
        """Compare the reported cached tokens of an ended request with the expected cached tokens at each rank."""
        agreement = self.agreement
        agreement.add(expected, reported_tokens, self.subscribers[0].blocks.block_size_tokens)
        share = agreement.share
        if share is None:
            return
        if share >= LEAST_AGREEMENT:
            for each in self.subscribers:
                each.trust()
            return
        agreement.forget()
        what = f"of the last answers' cached tokens and those that the events let expect, {share:.0%} are the same"
        for each in self.subscribers:
            each.doubt(what)


class CacheFeeds:
    """The event feeds by replica, which maintain the cache indexes. `on_state(replica, state, why)` is called on
    changes."""

    def __init__(self, on_state: OnState, name_tokens: Mapping[str, int] | None = None) -> None:
        """`name_tokens`: by model, the tokens per named piece of a prompt; default: a block of the pool."""
        self._on_state, self._name_tokens = on_state, name_tokens or {}
        self._context = zmq.asyncio.Context()
        self.of: dict[int, ReplicaFeed] = {}
        """Feeds by the replica's id."""
        self._events: dict[int, KvEvents] = {}
        self._stopping: set[asyncio.Task[None]] = set()

    def add(self, replica: LiveReplica, events: KvEvents | None) -> None:
        """Read a replica's events from now on; None if its engine publishes none."""
        if events is not None:
            self._events[replica.id] = events
            self._follow(replica, events, events.ranks or 1)

    def _follow(self, replica: LiveReplica, events: KvEvents, num_ranks: int) -> None:
        size = replica.block_size_tokens
        piece = gcd(size, self._name_tokens.get(replica.model, size))
        replica.event_block_tokens, replica.tokenizer = piece, events.tokenizer
        most = max(_BLOCKS_PER_KV_BLOCK * replica.kv_blocks_total, _LEAST_BLOCKS)
        feed = self.of[replica.id] = ReplicaFeed(replica, self._on_state)
        indexes = [replica.cache_index]
        if num_ranks > 1:
            replica.cache_index = index = RanksIndex(size, replica.kv_blocks_total, num_ranks)
            indexes = index.ranks
        for rank, each in enumerate(indexes):
            name = replica.name if num_ranks == 1 else f"{replica.name}, rank {rank}"
            feed.subscribers.append(
                KvEventSubscriber(
                    name,
                    events.address(replica.url, rank),
                    EngineBlocks(size, most, piece),
                    each,
                    self._context,
                    lambda state, why: feed.changed(),
                )
            )
        for subscriber in feed.subscribers:
            subscriber.start()

    def ranks_reported(self, replica: LiveReplica, num_ranks: int) -> None:
        """Adapt to the number of data-parallel ranks that a replica's metrics show. Each rank publishes its own
        events."""
        events, feed = self._events.get(replica.id), self.of.get(replica.id)
        if events is None or feed is None or events.ranks is not None or num_ranks <= len(feed.subscribers):
            return
        try:
            events.check(num_ranks)
        except HeadwayError as error:
            self._events[replica.id] = replace(events, ranks=len(feed.subscribers))  # the failure is logged once
            log.warning(
                "%s has %d data-parallel ranks, of which the first one's KV cache events are read: %s",
                replica.name,
                num_ranks,
                error,
            )
            return
        log.info("%s has %d data-parallel ranks: the KV cache events of each are read", replica.name, num_ranks)
        self._stop(self.of.pop(replica.id))
        self._follow(replica, events, num_ranks)

    def answered(self, replica: LiveReplica, expected: Sequence[int], reported_tokens: int) -> None:
        """Compare the cached tokens that an engine reports with the expected cached tokens (`ReplicaFeed.answered`)."""
        if (feed := self.of.get(replica.id)) is not None and feed.state in ("live", "incomplete"):
            feed.answered(expected, reported_tokens)

    def remove(self, replica: LiveReplica) -> None:
        """Stop reading a replica's events."""
        self._events.pop(replica.id, None)
        if (feed := self.of.pop(replica.id, None)) is not None:
            self._stop(feed)

    def _stop(self, feed: ReplicaFeed) -> None:
        for subscriber in feed.subscribers:
            stopping = asyncio.get_running_loop().create_task(subscriber.stop())
            self._stopping.add(stopping)
            stopping.add_done_callback(self._stopping.discard)

    def metrics(self, replicas: Iterable[LiveReplica]) -> list[Metric]:
        """Metrics of these replicas' events."""
        values: dict[str, list[Sample]] = {name: [] for name in _METRICS}
        for replica in replicas:
            if (feed := self.of.get(replica.id)) is None:
                continue
            labels = {"pool": replica.pool, "model": replica.model, "replica": str(replica.id)}
            counts, blocks, agreement = feed.counts, [each.blocks for each in feed.subscribers], feed.agreement
            numbers = (
                feed.state == "live",
                replica.cache_index.num_blocks,
                sum(each.num_events for each in blocks),
                sum(each.ignored.total() for each in blocks),
                counts.gaps,
                counts.lost,
                counts.malformed,
                counts.restarts,
                len(blocks),
                agreement.num_compared,
                agreement.expected_tokens,
                agreement.reported_tokens,
                agreement.share,
            )
            for name, number in zip(_METRICS, numbers, strict=True):
                if number is not None:
                    values[name].append((labels, float(number)))
        return list(values.items())

    async def stop(self) -> None:
        feeds = list(self.of.values())
        self.of.clear()
        stopping = [subscriber.stop() for feed in feeds for subscriber in feed.subscribers]
        await asyncio.gather(*self._stopping, *stopping)
        self._context.destroy(0)
