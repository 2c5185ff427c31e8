"""Host memory of one replica: where preempted requests' KV goes when it is swapped out, and what is cached there."""

from __future__ import annotations

from collections.abc import Callable

from headway.control.live import Live
from headway.sim.offload import HostTier


class HostMemory:
    """Room for swapped KV, and the time a copy takes. A copy stands in front of the next iteration."""

    __slots__ = ("_copy_s", "_offload_tokens", "room_tokens", "used_tokens")

    def __init__(self, room_tokens: int, copy_s: Callable[[int], float], offload_tokens: int = 0) -> None:
        self.room_tokens = room_tokens
        self.used_tokens = 0
        self._copy_s = copy_s
        """Seconds of one copy of so many tokens."""
        self._offload_tokens = offload_tokens

    def tier(self, block: int) -> HostTier | None:
        """The prefix cache's second tier, empty; None if there is none. A block is so many tokens."""
        room_blocks = self._offload_tokens // block
        return HostTier(room_blocks, lambda blocks: self._copy_s(blocks * block)) if room_blocks else None

    def out(self, live: Live, tokens: int) -> float | None:
        """Swap out this many KV tokens: seconds on the host link, or None if there is no room."""
        if self.used_tokens + tokens > self.room_tokens:
            return None
        self.used_tokens += tokens
        live.swapped_tokens = tokens
        return self._copy_s(tokens)

    def set_aside(self, tokens: int) -> bool:
        """Reserve room for KV tokens that come from elsewhere, if there is so much."""
        if self.used_tokens + tokens > self.room_tokens:
            return False
        self.used_tokens += tokens
        return True

    def clear_aside(self, tokens: int) -> None:
        """Give reserved room back."""
        self.used_tokens -= tokens

    def hold(self, live: Live, tokens: int) -> None:
        """Tokens that came from elsewhere are here; there is room."""
        self.used_tokens += tokens
        live.swapped_tokens = tokens

    def back(self, live: Live) -> float:
        """Swap back in: seconds on the host link."""
        tokens = live.swapped_tokens
        self.drop(live)
        return self._copy_s(tokens)

    def drop(self, live: Live) -> None:
        """Forget what was swapped out, if anything."""
        self.used_tokens -= live.swapped_tokens
        live.swapped_tokens = 0
