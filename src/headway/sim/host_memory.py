"""Host memory of one replica: swapped-out KV of preempted requests, and a second tier of the prefix cache.

A copy back to the GPU delays the next iteration. Second-tier blocks are copied out in the background, as in vLLM's
offloading.
"""

from __future__ import annotations

from collections.abc import Callable

from headway.control.cache_index import SegmentBlocks
from headway.control.live import Live


class HostPrefixTier(SegmentBlocks):
    """Leading blocks of prompt segments (see `prefixcache`), in host memory."""

    __slots__ = ("load_s",)

    def __init__(self, capacity_blocks: int, load_s: Callable[[int], float]) -> None:
        super().__init__(capacity_blocks)
        self.load_s = load_s
        """Seconds to copy a number of blocks to the GPU."""


class HostMemory:
    """Capacity for swapped KV, and the time of a copy."""

    __slots__ = ("_copy_s", "_offload_tokens", "capacity_tokens", "used_tokens")

    def __init__(self, capacity_tokens: int, copy_s: Callable[[int], float], offload_tokens: int = 0) -> None:
        self.capacity_tokens = capacity_tokens
        self.used_tokens = 0
        self._copy_s = copy_s
        """Seconds to copy a number of tokens' KV over the host link."""
        self._offload_tokens = offload_tokens

    def empty(self) -> HostMemory:
        """An empty host memory of the same size."""
        return HostMemory(self.capacity_tokens, self._copy_s, self._offload_tokens)

    def prefix_tier(self, block_size_tokens: int) -> HostPrefixTier | None:
        """An empty second tier for the prefix cache; None if it has no memory."""
        capacity_blocks = self._offload_tokens // block_size_tokens
        if not capacity_blocks:
            return None
        return HostPrefixTier(capacity_blocks, lambda blocks: self._copy_s(blocks * block_size_tokens))

    def swap_out(self, live: Live, tokens: int) -> float | None:
        """Swap out this many KV tokens. Returns the seconds on the host link, or None if they do not fit."""
        if not self.reserve(tokens):
            return None
        live.swapped_tokens = tokens
        return self._copy_s(tokens)

    def swap_in(self, live: Live) -> float:
        """Swap a request's KV back in. Returns the seconds on the host link."""
        tokens = live.swapped_tokens
        self.drop(live)
        return self._copy_s(tokens)

    def drop(self, live: Live) -> None:
        """Discard a request's swapped KV, if there is any."""
        self.used_tokens -= live.swapped_tokens
        live.swapped_tokens = 0

    def reserve(self, tokens: int) -> bool:
        """Reserve capacity for KV tokens if they fit."""
        if self.used_tokens + tokens > self.capacity_tokens:
            return False
        self.used_tokens += tokens
        return True

    def unreserve(self, tokens: int) -> None:
        self.used_tokens -= tokens

    def receive(self, live: Live, reserved_tokens: int, tokens: int) -> None:
        """Store a request's KV from another replica in `reserved_tokens` of capacity."""
        self.used_tokens += tokens - reserved_tokens
        live.swapped_tokens = tokens
