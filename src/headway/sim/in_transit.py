"""KV caches that come to a replica or go to another one: the blocks that they take meanwhile.

At the target, blocks are reserved before anything is copied. At the source, a request that is pulled out of its
batch keeps its blocks until the copy has ended. Both happen at any time; what they change is taken into account at
the next boundary.
"""

from __future__ import annotations

from heapq import heapify

from headway.control.live import PAUSED, Live
from headway.control.recorder import Recorder
from headway.core.fleet import Pool
from headway.core.pacer import Pacer
from headway.core.policy import Ordering
from headway.core.record import Cause
from headway.sim.kernel import Kernel
from headway.sim.stall_tracker import StallTracker
from headway.sim.swap import HostMemory
from headway.sim.timeline import Line, Timeline


class Transit(Timeline):
    """A replica's doors."""

    __slots__ = ("_pacer", "coming", "inbox", "leaving", "num_arriving", "pausing", "reserved_blocks")

    def __init__(
        self,
        id: int,
        pool: Pool,
        line: Line,
        kv_blocks: int,
        swap: HostMemory,
        ordering: Ordering,
        kernel: Kernel,
        recorder: Recorder,
        pacer: Pacer,
    ) -> None:
        super().__init__(id, pool, line, kv_blocks, swap, ordering, kernel, recorder)
        self._pacer = pacer
        self.inbox: list[Live] = []
        """Who is on the way to the scheduler."""
        self.num_arriving = 0
        self.coming: dict[int, Live] = {}
        """Who is counted here already, and as waiting, while its KV is still where its prompt was computed."""
        self.reserved_blocks = 0
        """Set aside for who arrives."""
        self.pausing: list[Live] = []
        """Who leaves the batch at the next boundary."""
        self.leaving: dict[int, Live] = {}
        """Who is out of the batch, with its KV being copied."""

    # At the target.

    def reserve(self, blocks: int, now: float) -> bool:
        """Set free blocks aside, if there are so many besides what the running iteration takes."""
        self.catch_up(now)
        if not self.kv.can_tick(self.tick, blocks + self.kv.watermark):
            return False
        self.kv.pinned += blocks
        self.reserved_blocks += blocks
        self._look(now)
        return True

    def unreserve(self, blocks: int, now: float) -> None:
        """They are not needed after all."""
        self.catch_up(now)
        if self.prefixes is not None:
            self.prefixes.free(blocks, self.tick)
        self.kv.pinned -= blocks
        self.reserved_blocks -= blocks
        self._look(now)

    def awaits(self, live: Live) -> None:
        """A request is sent here before its KV has come: it counts here in place of as arriving."""
        self.num_arriving -= 1
        self.num_waiting += 1
        self.coming[live.id] = live
        self.come(live)

    def awaits_not(self, live: Live) -> None:
        """Its KV is here, or will not come: it counts as before."""
        self.gone(live)
        del self.coming[live.id]
        self.num_waiting -= 1
        self.num_arriving += 1

    def receive(self, live: Live, blocks: int, now: float) -> None:
        """A request comes whose `swapped_tokens` of KV are in these reserved blocks; 0 = in host memory."""
        if blocks:
            self.reserved_blocks -= blocks
            self.keep(live, blocks)
            self._look(now)
        self.enqueue(live, now, tokenized=True)

    def enqueue(self, live: Live, now: float, tokenized: bool = False, delay_s: float = 0.0) -> None:
        """A request is placed here."""
        raise NotImplementedError

    # At the source.

    def tokens_of(self, live: Live, now: float) -> int:
        """KV tokens of a decoding request, as of the last completed iteration."""
        return live.computed_tokens + self.tick + self._ahead(now) - live.joined_tick

    def pause(self, live: Live, now: float) -> None:
        """Take a decoding request out of the batch at the next boundary, and tell its move."""
        self.catch_up(now)
        if self.k == self.k_end:
            self._pause(live, now)
        else:
            self.pausing.append(live)
        self._look(now)

    def _pause_all(self, now: float) -> None:
        pausing, self.pausing = self.pausing, []
        for live in pausing:
            if live.move is not None and self.decoding.get(live.id) is live:
                self._pause(live, now)

    def _pause(self, live: Live, now: float) -> None:
        self.leave(live, keeping=True)
        self.record(live, now, Cause.MOVED)
        live.enter(PAUSED)
        self.leaving[live.id] = live
        if self.pace is not None:
            self.pace.waits(live)
        live.move.paused(now)

    def send_off(self, live: Live, now: float) -> None:
        """A waiting request leaves the line; its KV stays in host memory until it is copied."""
        self.strike(live)
        self.num_waiting -= 1
        live.enter(PAUSED)
        self.leaving[live.id] = live
        self._look(now)

    def strike(self, live: Live) -> None:
        """Take a request out of the line."""
        self.inbox = [other for other in self.inbox if other is not live]
        self.waiting = [entry for entry in self.waiting if entry[2] is not live]
        heapify(self.waiting)

    def let_go(self, live: Live, now: float) -> None:
        """A paused request is no longer here, nor is its KV."""
        self.catch_up(now)
        del self.leaving[live.id]
        if live.swapped_tokens:
            self.swap.drop(live)
        else:
            own = live.computed_tokens - live.shared_blocks * self.kv.block
            if self.prefixes is not None:
                self.prefixes.release(live, own, self.tick, live.computed_tokens)
            self.kv.pinned -= self.kv.blocks(own)
            live.shared_blocks = 0
        self.gone(live)
        self._look(now)

    def take_back(self, live: Live, now: float) -> None:
        """A paused request goes on here: it stands in line, and its KV is where it was."""
        del self.leaving[live.id]
        if not live.swapped_tokens:
            own = live.computed_tokens - live.shared_blocks * self.kv.block
            live.swapped_tokens = live.computed_tokens
            self.keep(live, self.kv.blocks(own))
            self._look(now)
        self.gone(live)
        self.enqueue(live, now, tokenized=True)

    # For views.

    @property
    def answers_on_pace(self) -> bool:
        """Every reader of an answer still has tokens to read."""
        pace = self.pace
        if pace is None:
            pace = self.pace = StallTracker(self._pacer)
            for live in self.requests:
                pace.notes(live)
        now = self.kernel.now
        return pace.holds(self.tick + self._ahead(now), now)

    @property
    def requests(self) -> list[Live]:
        """Who is placed here."""
        raise NotImplementedError
