"""Host memory of one replica: where preempted requests' KV goes when it is swapped out."""

from __future__ import annotations

from headway.control.live import Live


class HostMemory:
    """Room for swapped KV, and the time a copy takes. A copy stands in front of the next iteration."""

    __slots__ = ("_s_per_token", "room_tokens", "used_tokens")

    def __init__(self, room_tokens: int, s_per_token: float) -> None:
        self.room_tokens = room_tokens
        self.used_tokens = 0
        self._s_per_token = s_per_token

    def out(self, live: Live, tokens: int) -> float | None:
        """Swap out this many KV tokens: seconds on the host link, or None if there is no room."""
        if self.used_tokens + tokens > self.room_tokens:
            return None
        self.used_tokens += tokens
        live.swapped_tokens = tokens
        return tokens * self._s_per_token

    def back(self, live: Live) -> float:
        """Swap back in: seconds on the host link."""
        tokens = live.swapped_tokens
        self.drop(live)
        return tokens * self._s_per_token

    def drop(self, live: Live) -> None:
        """Forget what was swapped out, if anything."""
        self.used_tokens -= live.swapped_tokens
        live.swapped_tokens = 0
