"""A KV store that replicas share over the network, such as LMCache's or Mooncake's.

Replicas write the full blocks of prompts while they compute later ones. An admitted request reads the blocks that
follow those on its replica, before its next iteration. Reads queue for the store's bandwidth, and so do writes; blocks
can be read once they are written. The least recently used segment is evicted first, from its last block. A store
outlives the replicas.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable

from headway.control.cache_index import Span, leading_blocks
from headway.core.fleet import KvStoreConfig

Key = tuple[int, int]
"""(kind of KV, segment id): the KV of one text differs between models and shapes."""


class KvStore:
    """The store's content, and until when it is busy. `clock()` is the time of the run."""

    def __init__(self, config: KvStoreConfig, clock: Callable[[], float]) -> None:
        self.config, self._clock = config, clock
        self._held: OrderedDict[Key, int] = OrderedDict()
        """Leading blocks of each segment."""
        self._coming: dict[Key, int] = {}
        """Leading blocks of each segment, including those being written."""
        self._writes: deque[tuple[float, Key, int, int]] = deque()
        """(time written, segment, first block, end block), in order of time."""
        self._block_bytes: dict[int, float] = {}
        self._read_free_s = self._write_free_s = 0.0
        self.used_bytes = 0.0
        self.read_bytes = self.written_bytes = self.evicted_bytes = 0.0

    def client(self, kind: int, block_bytes: float, link_bytes_per_s: float) -> StoreClient:
        """One replica's access to the store. `link_bytes_per_s`: bandwidth of the replica's network link."""
        self._block_bytes[kind] = block_bytes
        return StoreClient(self, kind, block_bytes, link_bytes_per_s)

    def blocks(self, key: Key) -> int:
        """Leading blocks of a segment that can be read."""
        self._settle()
        return self._held.get(key, 0)

    def use(self, key: Key) -> None:
        """Mark a segment as used now."""
        if key in self._held:
            self._held.move_to_end(key)

    def write(self, key: Key, blocks: int, bytes_per_s: float) -> None:
        """Begin to write the first `blocks` blocks of a segment, without those already in the store."""
        self._settle()
        known = max(self._held.get(key, 0), self._coming.get(key, 0))
        if blocks <= known:
            self.use(key)
            return
        num_bytes = (blocks - known) * self._block_bytes[key[0]]
        begin_s = max(self._clock(), self._write_free_s)
        self._write_free_s = begin_s + num_bytes / min(self.config.bytes_per_s, bytes_per_s)
        self._coming[key] = blocks
        self._writes.append((self._write_free_s + self.config.latency_s, key, known, blocks))

    def read_s(self, num_bytes: float, bytes_per_s: float) -> float:
        """Queue a read of this many bytes. Returns the seconds until it is done."""
        now = self._clock()
        begin_s = max(now, self._read_free_s)
        self._read_free_s = begin_s + num_bytes / self.config.bytes_per_s
        self.read_bytes += num_bytes
        slower_s = max(0.0, num_bytes / bytes_per_s - num_bytes / self.config.bytes_per_s)
        return self._read_free_s - now + slower_s + self.config.latency_s

    def _settle(self) -> None:
        """Add the blocks whose writing has finished."""
        writes, now = self._writes, self._clock()
        while writes and writes[0][0] <= now:
            _, key, first, end = writes.popleft()
            if self._coming.get(key) == end:
                del self._coming[key]
            num_bytes = (end - first) * self._block_bytes[key[0]]
            self.written_bytes += num_bytes
            if self._held.get(key, 0) < first:  # the blocks before them were evicted meanwhile
                self.evicted_bytes += num_bytes
                continue
            self._held.pop(key, None)
            self._held[key] = end
            self.used_bytes += num_bytes
            self._evict()

    def _evict(self) -> None:
        while self.used_bytes > self.config.capacity_bytes and self._held:
            oldest, stored = self._held.popitem(last=False)
            block_bytes = self._block_bytes[oldest[0]]
            left = max(0, stored - int(-(-(self.used_bytes - self.config.capacity_bytes) // block_bytes)))
            self.used_bytes -= (stored - left) * block_bytes
            self.evicted_bytes += (stored - left) * block_bytes
            if left:
                self._held[oldest] = left
                self._held.move_to_end(oldest, last=False)


class StoreClient:
    """One replica's access to the store, for one kind of KV."""

    def __init__(self, store: KvStore, kind: int, block_bytes: float, link_bytes_per_s: float) -> None:
        self._store, self._kind = store, kind
        self._block_bytes, self._link_bytes_per_s = block_bytes, link_bytes_per_s

    def reach(self, prompt: Iterable[Span], start: int) -> int:
        """Number of leading blocks of a prompt that are available without a gap: the first `start` blocks on the
        replica, further ones in the store."""
        return leading_blocks(prompt, start, lambda segment: self._store.blocks((self._kind, segment)))

    def write(self, segment: int, blocks: int) -> None:
        """Write this many leading blocks of a segment to the store, in the background."""
        self._store.write((self._kind, segment), blocks, self._link_bytes_per_s)

    def read_s(self, prompt: Iterable[Span], start: int, end: int) -> float:
        """Queue a read of blocks `start` to `end` of a prompt. Returns the seconds until it is done."""
        for segment, low, high in prompt:
            if low < end and high > start:
                self._store.use((self._kind, segment))
        return self._store.read_s((end - start) * self._block_bytes, self._link_bytes_per_s)
