"""The requests that were paused at a replica, and are held until there is room.

Their KV cache is gone, and they may continue at another replica. Until then they count where they were: PASCAL's
placement goes by all answers of an instance and all its KV cache, of preempted requests, too (IV-B).
"""

from __future__ import annotations

from headway.control.live import HELD, Live
from headway.core.pacer import Pacer

_LEAST_ROOM = 64


class PausedRequests:
    """Those of one replica. A request that has left the hold queue is forgotten when the others are looked at."""

    __slots__ = ("_lives", "_replica", "_room")

    def __init__(self, replica: int) -> None:
        self._replica = replica
        self._lives: dict[int, Live] = {}
        self._room = _LEAST_ROOM

    def __len__(self) -> int:
        """Number of requests, some of which may not be held any more."""
        return len(self._lives)

    def add(self, live: Live) -> None:
        """A request leaves the replica, to be held."""
        if len(self._lives) >= self._room:
            self._room = 2 * len(self.held()) + _LEAST_ROOM
        self._lives[live.id] = live

    def held(self) -> list[Live]:
        """Those that are held still."""
        found = [live for live in self._lives.values() if live.stage is HELD and live.replica == self._replica]
        if len(found) < len(self._lives):
            self._lives = {live.id: live for live in found}
        return found

    def are_on_pace(self, pacer: Pacer, now: float) -> bool:
        """Whether the reader of each answer still has tokens to read."""
        for live in self.held():
            start_s = pacer.start_s(live.reasoning_end_s, live.answer_s)
            if start_s is not None and pacer.run_dry_s(start_s, live.answer_tokens) <= now:
                return False
        return True
