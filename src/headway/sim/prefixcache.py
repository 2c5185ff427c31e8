"""The prefix cache of one replica: full KV blocks kept by content, oldest freed blocks reused first.

A node is the run of blocks that belong to one prompt segment. A segment's id identifies its tokens and all before
them, so nodes need no parent links. A block that straddles two segments belongs to the later one. Nodes in use are
held as a whole. Freed blocks, with content or without, form one queue and are reused from its head, as in vLLM's free
queue; the last blocks of a request are freed first. Blocks that growing requests take are removed from the queue
lazily: before the next lookup, share or free, and in bulk while nothing is cached.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from headway.control.live import Live
from headway.sim.host_memory import HostPrefixTier
from headway.sim.kvcache import KvCache


class _Node:
    __slots__ = ("cached", "users")

    def __init__(self) -> None:
        self.cached = 0
        self.users = 0


class PrefixCache:
    """The cached nodes, the requests that share them, and the order of eviction."""

    __slots__ = ("_accounted", "_anonymous", "_free_queue", "_kv", "_leases", "host", "nodes")

    def __init__(self, kv: KvCache, host: HostPrefixTier | None = None) -> None:
        self._kv = kv
        self.host = host
        self.nodes: dict[int, _Node] = {}
        self._leases: dict[int, dict[int, None]] = {}
        self._accounted = 0
        self._anonymous = 0
        self._free_queue: OrderedDict[tuple[bool, int], int] = OrderedDict()
        """(has content, node or running number) -> blocks. The sum is the blocks not accounted as used."""
        self._free_queue[False, 0] = kv.total

    def hit_blocks(self, live: Live, tick: int) -> int:
        """Cached leading blocks of the tokens that the request must compute; the last token is always computed."""
        self._settle(tick)
        limit = (live.target_tokens - 1) // self._kv.block
        hit = 0
        for node_id, low, high in self._spans(live):
            node = self.nodes.get(node_id)
            if node is None:
                break
            hit = low + node.cached
            if hit < high:
                break
        return min(hit, limit)

    def host_blocks(self, live: Live, hit: int) -> int:
        """Blocks in host memory that follow the `hit` leading ones."""
        if self.host is None:
            return 0
        reach = hit
        for node_id, low, high in self._spans(live):
            if high <= reach:
                continue
            if low > reach:
                break
            reach = max(reach, low + self.host.blocks(node_id))
            if reach < high:
                break
        return max(0, min(reach, (live.target_tokens - 1) // self._kv.block) - hit)

    def touch(self, live: Live, blocks: int) -> None:
        """Mark the segments of `blocks` leading blocks as used, so that host memory evicts others first."""
        if self.host is not None:
            for node_id, low, _ in self._spans(live):
                if low < blocks and self.host.blocks(node_id):
                    self.host.store(node_id, 0)

    def share(self, live: Live, blocks: int) -> None:
        """Hold the nodes of `blocks` leading blocks for this request."""
        for node_id, low, _ in self._spans(live):
            if low >= blocks:
                break
            self._use(live, node_id)
        live.shared_blocks = blocks

    def idle_blocks(self, live: Live, blocks: int) -> int:
        """Free blocks that `share` would hold."""
        return sum(
            node.cached
            for node_id, low, _ in self._spans(live)
            if low < blocks and not (node := self.nodes[node_id]).users
        )

    def publish(self, live: Live, tick: int) -> None:
        """Make the full blocks of prompt segments that the request has computed findable, and share them."""
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
            if self.host is not None:
                self.host.store(node_id, node.cached)

    def release(self, live: Live, own_tokens: int, tick: int, computed_tokens: int) -> None:
        """Release a request's blocks. Call before its own blocks leave the block counts; shared ones leave here."""
        own_blocks = self._kv.blocks(own_tokens)
        self._settle(tick)
        self._accounted -= own_blocks
        output = self._output_blocks(live, own_blocks, computed_tokens)
        if own_blocks > output:
            self._anonymous += 1
            self._free_queue[False, self._anonymous] = own_blocks - output
        if output and live.output_id is not None:
            node = self.nodes[live.output_id] = _Node()
            node.cached = output
            self._free_queue[True, live.output_id] = output
            if self.host is not None:
                self.host.store(live.output_id, output)
        for node_id in reversed(self._leases.pop(live.id, {})):
            self._unuse(node_id)
        live.shared_blocks = 0

    def free(self, blocks: int, tick: int) -> None:
        """Free this many blocks without content. Call before they leave the block counts."""
        self._settle(tick)
        self._accounted -= blocks
        self._anonymous += 1
        self._free_queue[False, self._anonymous] = blocks

    def give_up(self, live: Live, blocks: int, tick: int) -> None:
        """Free a request's own blocks, without content, and its shared ones. Call before they leave the counts."""
        self.free(blocks, tick)
        for node_id in reversed(self._leases.pop(live.id, {})):
            self._unuse(node_id)
        live.shared_blocks = 0

    def _spans(self, live: Live) -> Iterator[tuple[int, int, int]]:
        """(node, first block, end block) of the segments that own at least one full block."""
        block = self._kv.block
        start = 0
        for segment in live.prefix:
            end = start + segment.tokens
            low, high = start // block, end // block
            if high > low:
                yield segment.id, low, high
            start = end

    def _output_blocks(self, live: Live, own_blocks: int, computed_tokens: int) -> int:
        """Full blocks of output that the next turn of the session can share."""
        if live.output_id is None or live.output_id in self.nodes or live.generated_tokens < live.output_tokens:
            return 0
        if sum(segment.tokens for segment in live.prefix) != live.prompt_tokens:
            return 0
        block = self._kv.block
        return min(own_blocks, computed_tokens // block - live.prompt_tokens // block)

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
            del self._free_queue[True, node_id]

    def _unuse(self, node_id: int) -> None:
        node = self.nodes[node_id]
        node.users -= 1
        if not node.users:
            self._kv.pinned -= node.cached
            self._accounted -= node.cached
            self._free_queue[True, node_id] = node.cached

    def _settle(self, tick: int) -> None:
        """Remove the blocks that requests have grown into from the head of the queue, with their content."""
        used = self._kv.used(tick)
        taken = used - self._accounted
        self._accounted = used
        queue = self._free_queue
        if not self.nodes:
            queue.clear()
            queue[False, 0] = self._kv.total - used
            return
        while taken > 0:
            (has_content, key), blocks = next(iter(queue.items()))
            step = min(taken, blocks)
            taken -= step
            if has_content:
                node = self.nodes[key]
                node.cached -= step
                if not node.cached:
                    del self.nodes[key]
            if step == blocks:
                del queue[has_content, key]
            else:
                queue[has_content, key] = blocks - step
