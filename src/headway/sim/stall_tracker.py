"""When the readers of a replica's answers run dry, so that asking whether all are on pace costs next to nothing.

A decoding request gains a token a tick, so the moment at which its reader runs dry moves on by `tpot_s` a tick: what
is kept is that moment less `tick * tpot_s`, and the first of them all is the first at any tick. That of a request
that does not decode stands still.
"""

from __future__ import annotations

from heapq import heappop, heappush

from headway.control.live import DECODING, Live
from headway.core.pacer import Pacer
from headway.core.request import Phase

Entry = tuple[float, int, int, Live]
"""(when, request, its `pace` then, request)."""


class StallTracker:
    """The answers of one replica."""

    __slots__ = ("_running", "_still", "pacer")

    def __init__(self, pacer: Pacer) -> None:
        self.pacer = pacer
        self._running: list[Entry] = []
        self._still: list[Entry] = []

    def runs(self, live: Live) -> None:
        """The request decodes, or something about its answer has changed while it does."""
        live.pace_version += 1
        dry_s = self._dry_s(live, live.joined_generated - live.joined_tick)
        if dry_s is not None:
            heappush(self._running, (dry_s, live.id, live.pace_version, live))

    def waits(self, live: Live) -> None:
        """The request is here and does not decode."""
        live.pace_version += 1
        dry_s = self._dry_s(live, live.generated_tokens)
        if dry_s is not None:
            heappush(self._still, (dry_s, live.id, live.pace_version, live))

    @staticmethod
    def forget(live: Live) -> None:
        """What was noted of the request holds no longer."""
        live.pace_version += 1

    def notes(self, live: Live) -> None:
        """Take in a request as it is."""
        if live.stage is DECODING:
            self.runs(live)
        else:
            self.waits(live)

    def holds(self, tick: int, now: float) -> bool:
        """No reader has run dry."""
        first_s = _first_s(self._running)
        if first_s is not None and first_s + tick * self.pacer.tpot_s <= now:
            return False
        first_s = _first_s(self._still)
        return first_s is None or first_s > now

    def _dry_s(self, live: Live, generated: int) -> float | None:
        """None: nobody reads yet."""
        if live.phase is Phase.REASONING:
            return None
        start_s = self.pacer.start_s(live.reasoning_end_s, live.answer_s)
        return None if start_s is None else self.pacer.run_dry_s(start_s, generated - live.reasoning_tokens)


def _first_s(entries: list[Entry]) -> float | None:
    while entries:
        when_s, _, pace, live = entries[0]
        if live.pace_version == pace:
            return when_s
        heappop(entries)
    return None
