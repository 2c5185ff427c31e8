"""Who has to give way when a replica's memory or seats run out, and what becomes of its KV cache."""

from __future__ import annotations

from headway.control.live import DECODING, WAITING, Live
from headway.core.record import Cause, MoveOutcome
from headway.sim.batch import Batch


class Preempting(Batch):
    """A batch that requests can be made to leave. So can waiting ones that hold blocks."""

    __slots__ = ()

    def secure(self, now: float) -> None:
        """Preempt from the end of the ranking until the next tick's blocks are there."""
        kv = self.kv
        while not kv.can_tick(self.tick):
            self.preempt(self.worst(now), now)
            self.again = True

    def worst(self, now: float) -> Live:
        """Who ranks last in the batch."""
        return max(self._ranked(now))[2]

    def displace(self, live: Live, blocks: int, now: float) -> bool:
        """Preempt the last-ranked request behind `live`, if all behind it would make room for it."""
        behind = [entry for entry in self._ranked(now) if entry[:2] > (live.rank, live.id)]
        if not behind:
            return False
        kv = self.kv
        sizes = [(self._tokens(other), other) for _, _, other in behind]
        gain = sum(kv.blocks(tokens) - other.shared_blocks for tokens, other in sizes)
        growing = sum(tokens % kv.block == 0 for tokens, other in sizes if other.stage is DECODING)
        if kv.free(self.tick) + gain < blocks + kv.needed_next(self.tick) - growing:
            return False
        self.preempt(max(behind)[2], now)
        return True

    def preempt(self, live: Live, now: float) -> None:
        """Back into the line, with the KV dropped or swapped out."""
        live.preemptions += 1
        if live.stage is WAITING:
            self._evict(live)
            return
        if live.move is not None:
            live.move.abandon(now, MoveOutcome.PREEMPTED)
        cause = Cause.PREEMPTED
        if live.stage is DECODING:
            self.leave(live)
            copy_s = self.swap.out(live, live.computed_tokens) if self.engine.preemption == "swap" else None
            if copy_s is not None:
                self.stall_s += copy_s
                cause = Cause.SWAPPED
        else:
            self.drop_prefill(live)
        self.record(live, now, cause)
        self.queue(live, now)

    def _ranked(self, now: float) -> list[tuple[object, int, Live]]:
        for live in self.decoding.values():
            self.sync(live)
        lives = [*self.decoding.values(), *self.prefilling.values(), *self.resident.values()]
        return [(self.rank(live, now), live.id, live) for live in lives]

    def _tokens(self, live: Live) -> int:
        """KV tokens of a request that holds blocks."""
        if live.stage is WAITING:
            return live.swapped_tokens
        grown = self.tick - live.joined_tick if live.stage is DECODING else 0
        return live.computed_tokens + grown

    def evict_behind(self, live: Live, now: float) -> bool:
        """Nobody runs and `live` lacks blocks: whoever is last in line gives up those it holds, unless it is `live`."""
        last = self.worst(now)
        if last is not live:
            self.preempt(last, now)
        return last is not live

    def _evict(self, live: Live) -> None:
        """A waiting request gives up its blocks: swapped out, or to be computed anew."""
        tokens = live.swapped_tokens
        self.drop_kept(live)
        copy_s = self.swap.out(live, tokens) if self.engine.preemption == "swap" else None
        if copy_s is not None:
            self.stall_s += copy_s
            return
        live.target_tokens = live.prompt_tokens + live.generated_tokens
        self.prefill_tokens_left += live.target_tokens
        live.computed_tokens = 0
