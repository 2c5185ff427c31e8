"""The slowest requests that finished in the last minutes, for the dashboard; `headway why ID` explains one."""

from __future__ import annotations

from collections import deque
from heapq import heappush, heappushpop, nlargest
from typing import Annotated

from msgspec import Meta, Struct

from headway.control.live import Live
from headway.gateway.telemetry.metrics import latencies_s
from headway.gateway.telemetry.rolling_stats import NUM_SLOTS, SLOT_S

NUM_SLOWEST = 10
Num = Annotated[int, Meta(ge=0)]


class SlowRequest(Struct, forbid_unknown_fields=True):
    """A request that finished. TTFT and TPOT are null for an answer that was not streamed."""

    request: str
    """The request's one id."""
    model: str
    tier: Num
    replica: str
    """Name of the last replica; empty without one."""
    prompt_tokens: Num
    output_tokens: Num
    e2e_s: float
    ttft_s: float | None
    tpot_s: float | None


_Slot = list[tuple[float, int, SlowRequest]]
"""A heap of (E2E in seconds, the gateway's own number of the request, the request): the fastest first."""


class SlowestRequests:
    """The slowest requests of each slot of a few seconds."""

    def __init__(self) -> None:
        self._slots: deque[tuple[int, _Slot]] = deque(maxlen=NUM_SLOTS + 1)

    def add(self, live: Live, request_id: str, replica: str, now: float) -> None:
        """Add a request that finishes now."""
        number = int(now // SLOT_S)
        if not self._slots or self._slots[-1][0] != number:
            self._slots.append((number, []))
        slot = self._slots[-1][1]
        e2e_s, ttft_s, tpot_s = latencies_s(live, now)
        if len(slot) == NUM_SLOWEST and e2e_s <= slot[0][0]:
            return
        found = SlowRequest(
            request=request_id,
            model=live.model,
            tier=live.tier,
            replica=replica,
            prompt_tokens=live.prompt_tokens,
            output_tokens=live.generated_tokens,
            e2e_s=e2e_s,
            ttft_s=ttft_s,
            tpot_s=tpot_s,
        )
        (heappush if len(slot) < NUM_SLOWEST else heappushpop)(slot, (e2e_s, live.id, found))

    def last(self, now: float) -> list[SlowRequest]:
        """The slowest requests of the last five minutes, slowest first."""
        first = int(now // SLOT_S) - NUM_SLOTS
        recent = (each for number, slot in self._slots if number > first for each in slot)
        return [found for _, _, found in nlargest(NUM_SLOWEST, recent)]
