"""Requests that were paused at a replica and are held until there is room.

A paused request's KV cache is gone, and another replica may resume the request. Until the request resumes, it counts at
its old replica, because PASCAL's placement counts all answers and KV cache of an instance, including preempted requests
(IV-B).
"""

from __future__ import annotations

from headway.control.live import HELD, Live
from headway.core.pacer import Pacer

_LEAST_ROOM = 64


class PausedRequests:
    """The paused requests of one replica. Requests that have left the hold queue are removed when the list is read."""

    __slots__ = ("_lives", "_replica", "_room")

    def __init__(self, replica: int) -> None:
        self._replica = replica
        self._lives: dict[int, Live] = {}
        self._room = _LEAST_ROOM

    def __len__(self) -> int:
        """Number of requests, including some that may no longer be held."""
        return len(self._lives)

    def add(self, live: Live) -> None:
        """Add a request that leaves the replica to be held."""
        if len(self._lives) >= self._room:
            self._room = 2 * len(self.held()) + _LEAST_ROOM
        self._lives[live.id] = live

    def held(self) -> list[Live]:
        """The requests that are still held."""
        found = [live for live in self._lives.values() if live.stage is HELD and live.replica == self._replica]
        if len(found) < len(self._lives):
            self._lives = {live.id: live for live in found}
        return found

    def are_on_pace(self, pacer: Pacer, now: float) -> bool:
        """Whether every reader still has unread tokens."""
        for live in self.held():
            start_s = pacer.start_s(live.reasoning_end_s, live.answer_s)
            if start_s is not None and pacer.run_dry_s(start_s, live.answer_tokens) <= now:
                return False
        return True
