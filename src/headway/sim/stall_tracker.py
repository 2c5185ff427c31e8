"""When the readers of a replica's answers run out of tokens, tracked so that `answers_on_pace` is cheap to read.

A decoding request gains one token per tick, so the time at which its reader stalls grows by `tpot_s` per tick. The
tracker stores that time less `tick * tpot_s`: at any tick, the minimum belongs to the first reader to stall. The stall
time of a request that does not decode is constant.
"""

from __future__ import annotations

from heapq import heappop, heappush
from math import inf

from headway.control.live import DECODING, Live
from headway.core.pacer import Pacer
from headway.core.request import Phase

Entry = tuple[float, int, int, Live]
"""(stall time in s, request id, its `pace_version` at entry, request)."""


class StallTracker:
    """The stall times of one replica's answers."""

    __slots__ = ("_decoding", "_paused", "pacer")

    def __init__(self, pacer: Pacer) -> None:
        self.pacer = pacer
        self._decoding: list[Entry] = []
        self._paused: list[Entry] = []

    def update(self, live: Live) -> None:
        """A request at the replica began or stopped decoding, or its answer changed while it decodes."""
        live.pace_version += 1
        is_decoding = live.stage is DECODING
        generated = live.joined_generated - live.joined_tick if is_decoding else live.generated_tokens
        stall_s = self._stall_s(live, generated)
        if stall_s is not None:
            entries = self._decoding if is_decoding else self._paused
            heappush(entries, (stall_s, live.id, live.pace_version, live))

    @staticmethod
    def forget(live: Live) -> None:
        """Invalidate a request's entry."""
        live.pace_version += 1

    def all_on_pace(self, tick: int, now: float) -> bool:
        """Whether no reader has stalled."""
        first_s = _first_s(self._decoding)
        if first_s is not None and first_s + tick * self.pacer.tpot_s <= now:
            return False
        first_s = _first_s(self._paused)
        return first_s is None or first_s > now

    def first_stall_s(self, tick: int) -> float:
        """Time at which the first reader stalls if no further tick passes; infinite without readers."""
        first_s = _first_s(self._decoding)
        paused_s = _first_s(self._paused)
        return min(
            inf if first_s is None else first_s + tick * self.pacer.tpot_s, inf if paused_s is None else paused_s
        )

    def _stall_s(self, live: Live, generated: int) -> float | None:
        """The reader's stall time; None: the answer has no reader yet."""
        if live.phase is Phase.REASONING:
            return None
        start_s = self.pacer.start_s(live.reasoning_end_s, live.answer_s)
        return None if start_s is None else self.pacer.run_dry_s(start_s, generated - live.reasoning_tokens)


def _first_s(entries: list[Entry]) -> float | None:
    while entries:
        stall_s, _, version, live = entries[0]
        if live.pace_version == version:
            return stall_s
        heappop(entries)
    return None
