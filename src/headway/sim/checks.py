"""When a replica checks its decoding requests: one tick for each of them."""

from __future__ import annotations

from math import inf
from typing import Final

from headway.control.live import Live
from headway.sim.tournament import IS_COMPILED, InterpretedTournament, Tournament

_FIRST_SLOTS: Final = 8


class Checks:
    """The next check of each decoding request, in slots that are reused."""

    __slots__ = ("_free", "_lives", "ticks")

    def __init__(self) -> None:
        self.ticks = Tournament() if IS_COMPILED else InterpretedTournament()
        """The ticks of the checks, by slot."""
        self._lives: list[Live | None] = []
        """The requests by slot."""
        self._free: list[int] = []

    def put(self, live: Live, tick: int) -> None:
        """Check a request at this tick, and not at the tick before."""
        slot = live.check_slot
        if slot < 0:
            if not self._free:
                self._extend()
            live.check_slot = slot = self._free.pop()
            self._lives[slot] = live
        live.check_tick = tick
        self.ticks.set(slot, tick)

    def _extend(self) -> None:
        num = len(self._lives)
        more = num or _FIRST_SLOTS
        self.ticks.extend_to(num + more)
        self._lives += [None] * more
        self._free += range(num, num + more)

    def remove(self, live: Live) -> None:
        """Stop checking a request before its tick."""
        slot = live.check_slot
        self.ticks.set(slot, inf)
        self._lives[slot], live.check_slot = None, -1
        self._free.append(slot)

    def due(self, tick: int) -> list[Live]:
        """Take the requests to be checked by this tick, in order of their ids."""
        ticks, due = self.ticks, list[Live]()
        while ticks.least <= tick:
            slot = ticks.pop()
            live = self._lives[slot]
            assert live is not None
            self._lives[slot], live.check_slot = None, -1
            self._free.append(slot)
            due.append(live)
        if len(due) > 1:
            due.sort(key=_id)
        return due


def _id(live: Live) -> int:
    return live.id
