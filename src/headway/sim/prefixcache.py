"""The prefix cache of one replica: full KV blocks kept by content, oldest freed blocks reused first.

A node is the run of blocks of one prompt segment. A segment's id identifies its tokens and all before them, so nodes
need no parent links. A block that straddles two segments belongs to the later one. Nodes in use are held as a whole.
Freed blocks, with or without content, form one queue and are reused from its head, as in vLLM's free queue; a request's
last blocks are freed first. Blocks taken by growing requests are removed from the queue lazily: before the next lookup,
share or free, and in bulk while nothing is cached.

Blocks of a request that a later one continues can be kept: for some time they are taken only when the queue is empty.

Every full block has content, but content outside of any segment serves only the request that computed it, and only
after a preemption. So it gets a node when the request is preempted, which is removed when the request ends.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

from headway.control.cache_index import Change, Span, spans
from headway.control.live import Live
from headway.sim.host_memory import HostPrefixTier
from headway.sim.kv_store import StoreClient
from headway.sim.kvcache import KvCache


def _own_id(live: Live) -> int:
    """Id of the node for content that only this request has. Negative, because ids of segments are at least 0."""
    return -1 - live.id


class _Node:
    __slots__ = ("cached", "kept_until_s", "users")

    def __init__(self) -> None:
        self.cached = 0
        self.users = 0
        self.kept_until_s = 0.0


class Keeping:
    """How long blocks of continued requests are evicted after all others."""

    __slots__ = ("_at", "clock", "keep_s", "share")

    def __init__(
        self,
        keep_s: float,
        share: float,
        clock: Callable[[], float],
        at: Callable[[float, PrefixCache], None],
    ) -> None:
        """`at(time_s, cache)` schedules a call of `cache.end_keeping`; at most `share` of the blocks are kept."""
        self.keep_s, self.share = keep_s, share
        self.clock = clock
        self._at = at

    def begin(self, cache: PrefixCache) -> float:
        """Keep blocks that are released from now on. Returns the time at which this keeping ends."""
        until_s = self.clock() + self.keep_s
        self._at(until_s, cache)
        return until_s


class PrefixCache:
    """The cached nodes, the requests that share them, and the order of eviction."""

    __slots__ = (
        "_accounted", "_anonymous", "_free_queue", "_keeping", "_kept", "_kv", "_leases", "changed", "host", "nodes",
        "num_kept_blocks", "store",
    )  # fmt: skip

    def __init__(
        self,
        kv: KvCache,
        host: HostPrefixTier | None = None,
        changed: set[int] | None = None,
        store: StoreClient | None = None,
        keeping: Keeping | None = None,
    ) -> None:
        """`changed` collects the segments whose blocks change; None = there is no reader."""
        self._kv = kv
        self.host, self.store = host, store
        self._keeping = keeping
        self._kept: OrderedDict[int, int] = OrderedDict()
        """Node -> free blocks evicted after all others, in order of their release."""
        self.num_kept_blocks = 0
        self.changed = changed
        if host is not None:
            host.changed = changed
        self.nodes: dict[int, _Node] = {}
        self._leases: dict[int, dict[int, None]] = {}
        self._accounted = 0
        self._anonymous = 0
        self._free_queue: OrderedDict[tuple[bool, int], int] = OrderedDict()
        """(has content, node or running number) -> blocks. Together with `_kept`, these are all blocks that do not
        count as used."""
        self._free_queue[False, 0] = kv.total

    def hit_blocks(self, live: Live, tick: int) -> int:
        """Cached leading blocks of a request that does not run; its last token is always computed."""
        self._settle(tick)
        limit = (live.prompt_tokens + live.generated_tokens - 1) // self._kv.block
        hit = 0
        for node_id, low, high in self._findable(live):
            node = self.nodes.get(node_id)
            if node is None:
                break
            hit = low + node.cached
            if hit < high:
                break
        return min(hit, limit)

    def host_blocks(self, live: Live, hit: int) -> int:
        """Blocks in host memory that follow the first `hit` blocks."""
        if self.host is None:
            return 0
        limit = (live.prompt_tokens + live.generated_tokens - 1) // self._kv.block
        return max(0, min(self.host.reach(self._findable(live), hit), limit) - hit)

    def loadable_blocks(self, live: Live, hit: int) -> int:
        """Blocks that follow the first `hit` blocks, first in host memory, then in the shared store."""
        loaded = self.host_blocks(live, hit)
        if self.store is None:
            return loaded
        limit = (live.prompt_tokens + live.generated_tokens - 1) // self._kv.block
        return max(0, min(self.store.reach(self._spans(live), hit + loaded), limit) - hit)

    def load_s(self, live: Live, hit: int, blocks: int) -> float:
        """Seconds to load the `blocks` that `loadable_blocks` found, from host memory, then from the store."""
        on_host = min(self.host_blocks(live, hit), blocks)
        seconds = self.host.load_s(on_host) if self.host is not None and on_host else 0.0
        if self.store is not None and blocks > on_host:
            seconds += self.store.read_s(self._spans(live), hit + on_host, hit + blocks)
        return seconds

    def touch(self, live: Live, blocks: int) -> None:
        """Mark the segments of the first `blocks` blocks as used, so that host memory evicts others first."""
        if self.host is not None:
            for node_id, low, _ in self._findable(live):
                if low < blocks and self.host.blocks(node_id):
                    self.host.store(node_id, 0)

    def share(self, live: Live, blocks: int) -> None:
        """Hold the nodes of the first `blocks` blocks for this request."""
        for node_id, low, _ in self._findable(live):
            if low >= blocks:
                break
            self._use(live, node_id)
        live.shared_blocks = blocks

    def idle_blocks(self, live: Live, blocks: int) -> int:
        """Number of free blocks that `share` would hold for the request."""
        return sum(
            node.cached
            for node_id, low, _ in self._findable(live)
            if low < blocks and not (node := self.nodes[node_id]).users
        )

    def publish(self, live: Live, tick: int) -> None:
        """Make the computed full blocks of prompt segments findable, and share them."""
        self._settle(tick)
        full = live.computed_tokens // self._kv.block
        for node_id, low, high in self._spans(live):
            fresh = min(high, full) - low
            if fresh <= 0:
                break
            node = self.nodes.get(node_id)
            if node is None:
                node = self.nodes[node_id] = _Node()
            more = fresh - node.cached
            if more <= 0:
                continue
            self._use(live, node_id)
            node.cached += more
            live.shared_blocks += more
            if self.changed is not None:
                self.changed.add(node_id)
            if self.host is not None:
                self.host.store(node_id, node.cached)
            if self.store is not None:
                self.store.write(node_id, node.cached)

    def release(self, live: Live, own_blocks: int, tick: int, computed_tokens: int = 0, returns: bool = False) -> None:
        """Release a request's blocks. Call it before its own blocks leave the block counts; shared ones leave them
        here.

        With `returns`, the request will compute its tokens again, and can reuse its full blocks that remain by then.
        """
        self._settle(tick)
        self._accounted -= own_blocks
        leases = self._leases.pop(live.id, {})
        if live.preemptions:
            own_blocks += self._take_own(live, leases)
        until_s = None
        if self._keeping is not None and not returns and self._is_continued(live):
            until_s = self._keeping.begin(self)
        kept_id = _own_id(live) if returns else self._output_id(live)
        kept = 0
        if kept_id is not None:
            first = sum([segment.tokens for segment in live.prefix]) // self._kv.block
            kept = max(0, min(own_blocks, computed_tokens // self._kv.block - first))
        if own_blocks > kept:
            self._queue_anonymous(own_blocks - kept)
        if kept and kept_id is not None:
            node = self.nodes[kept_id] = _Node()
            node.cached = self._free_queue[True, kept_id] = kept
            if self.changed is not None:
                self.changed.add(kept_id)
            if self.host is not None:
                self.host.store(kept_id, kept)
            if self.store is not None and kept_id >= 0:
                self.store.write(kept_id, kept)
            if until_s is not None:
                node.kept_until_s = until_s
                self._keep(kept_id)
        for node_id in reversed(leases):
            if until_s is not None:
                self.nodes[node_id].kept_until_s = until_s
            self._unuse(node_id)
        live.shared_blocks = 0

    def end_keeping(self, now: float, tick: int) -> None:
        """Let kept blocks whose time is over be evicted in normal order from now on."""
        self._settle(tick)
        for node_id in [each for each in self._kept if self.nodes[each].kept_until_s <= now]:
            self._no_longer_keep(node_id)

    def free(self, blocks: int, tick: int) -> None:
        """Free this many blocks without content. Call before they leave the block counts."""
        self._settle(tick)
        self._accounted -= blocks
        self._queue_anonymous(blocks)

    def changes(self, tick: int) -> list[Change]:
        """The segments changed since the last call, in order of ids."""
        self._settle(tick)
        changed, nodes, host = self.changed, self.nodes, self.host
        if not changed:
            return []
        shared = sorted(id for id in changed if id >= 0)
        changed.clear()
        on_host = [0 if host is None else host.blocks(id) for id in shared]
        on_gpu = [node.cached if (node := nodes.get(id)) is not None else 0 for id in shared]
        return list(zip(shared, on_gpu, on_host, strict=True))

    def _findable(self, live: Live) -> Iterator[Span]:
        """The spans of the prompt's segments, and of the content that the request left here when it was preempted."""
        yield from self._spans(live)
        if live.preemptions:
            block = self._kv.block
            low = sum([segment.tokens for segment in live.prefix]) // block
            high = (live.prompt_tokens + live.generated_tokens) // block
            if high > low:
                yield _own_id(live), low, high

    def _spans(self, live: Live) -> Iterator[Span]:
        return spans(live.prefix, self._kv.block)

    def _is_continued(self, live: Live) -> bool:
        """Whether the request is complete, and a later request begins with its prompt and its answer."""
        return live.output_id is not None and live.generated_tokens >= live.output_tokens

    def _keep(self, node_id: int) -> None:
        """Evict a free node's blocks after all others. If too many blocks are kept, the oldest kept blocks lose this
        protection."""
        self._kept[node_id] = blocks = self._free_queue.pop((True, node_id))
        self.num_kept_blocks += blocks
        assert self._keeping is not None
        most = self._keeping.share * self._kv.total
        while self.num_kept_blocks > most:
            self._no_longer_keep(next(iter(self._kept)))

    def _no_longer_keep(self, node_id: int) -> None:
        self._free_queue[True, node_id] = blocks = self._kept.pop(node_id)
        self.num_kept_blocks -= blocks

    def _output_id(self, live: Live) -> int | None:
        """Id of the node for the request's output, if a later turn of the session can share it; None if not."""
        if live.output_id is None or live.output_id in self.nodes or live.generated_tokens < live.output_tokens:
            return None
        return live.output_id if sum([segment.tokens for segment in live.prefix]) == live.prompt_tokens else None

    def _take_own(self, live: Live, leases: dict[int, None]) -> int:
        """Remove the content that the request left here when it was preempted. Returns the number of its blocks that it
        shares again."""
        own_id = _own_id(live)
        if self.host is not None:
            self.host.discard(own_id)
        node = self.nodes.pop(own_id, None)
        if node is None:
            return 0
        if own_id not in leases:
            self._queue_anonymous(self._free_queue.pop((True, own_id)))
            return 0
        del leases[own_id]
        self._kv.pinned -= node.cached
        self._accounted -= node.cached
        return node.cached

    def _queue_anonymous(self, blocks: int) -> None:
        """Queue free blocks without content."""
        self._anonymous += 1
        self._free_queue[False, self._anonymous] = blocks

    def _use(self, live: Live, node_id: int) -> None:
        leases = self._leases.setdefault(live.id, {})
        if node_id in leases:
            return
        leases[node_id] = None
        node = self.nodes[node_id]
        node.users += 1
        if node.users == 1 and node.cached:
            self._kv.pinned += node.cached
            self._accounted += node.cached
            if node_id in self._kept:
                self.num_kept_blocks -= self._kept.pop(node_id)
            else:
                del self._free_queue[True, node_id]

    def _unuse(self, node_id: int) -> None:
        node = self.nodes[node_id]
        node.users -= 1
        if not node.users:
            self._kv.pinned -= node.cached
            self._accounted -= node.cached
            self._free_queue[True, node_id] = node.cached
            if self._keeping is not None and node.kept_until_s > self._keeping.clock():
                self._keep(node_id)

    def _settle(self, tick: int) -> None:
        """Remove the blocks that requests have grown into, with their content, from the head of the queue."""
        used = self._kv.used(tick)
        taken = used - self._accounted
        self._accounted = used
        queue = self._free_queue
        if not self.nodes:
            queue.clear()
            self._kept.clear()
            self.num_kept_blocks = 0
            queue[False, 0] = self._kv.total - used
            return
        while taken > 0:
            if not queue:
                self._no_longer_keep(next(iter(self._kept)))
            (has_content, key), blocks = next(iter(queue.items()))
            step = min(taken, blocks)
            taken -= step
            if has_content:
                node = self.nodes[key]
                node.cached -= step
                if self.changed is not None:
                    self.changed.add(key)
                if not node.cached:
                    del self.nodes[key]
            if step == blocks:
                del queue[has_content, key]
            else:
                queue[has_content, key] = blocks - step
