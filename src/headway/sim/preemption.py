"""Preemption: which requests stop when blocks run out, or when a higher-ranked request waits.

The lowest-ranked requests are preempted first; their KV is dropped or swapped out.
"""

from __future__ import annotations

from headway.control.live import DECODING, WAITING, Live
from headway.core.record import Cause, MoveOutcome
from headway.sim.batch import Batch


def make_room(batch: Batch, now: float) -> None:
    """Preempt the lowest-ranked requests until the blocks of the next tick are free."""
    kv = batch.kv
    while not kv.can_tick(batch.tick):
        preempt(batch, last_ranked(batch, now), now)
        batch.must_recheck = True


def last_ranked(batch: Batch, now: float) -> Live:
    """The lowest-ranked request that holds blocks."""
    return max(_ranked(batch, now))[2]


def displace(batch: Batch, live: Live, blocks: int, now: float) -> bool:
    """Preempt the last request that ranks behind `live`, if preempting all such requests would make room for `live`."""
    behind = [entry for entry in _ranked(batch, now) if entry[:2] > (live.rank, live.id)]
    if not behind:
        return False
    kv = batch.kv
    sizes = [(_kv_tokens(batch, other), other) for _, _, other in behind]
    gain = sum(kv.blocks(tokens) - other.shared_blocks for tokens, other in sizes)
    if batch.speculation is None:
        growing = sum(tokens % kv.block == 0 for tokens, other in sizes if other.stage is DECODING)
    else:
        growing = sum(kv.needed(tokens) for tokens, other in sizes if other.stage is DECODING)
    if kv.free(batch.tick) + gain < blocks + kv.needed_next(batch.tick) - growing:
        return False
    preempt(batch, max(behind)[2], now)
    return True


def evict_for(batch: Batch, live: Live, now: float) -> bool:
    """If no request runs: evict the lowest-ranked waiting request that holds blocks, unless it is `live`."""
    last = last_ranked(batch, now)
    if last is not live:
        preempt(batch, last, now)
    return last is not live


def preempt(batch: Batch, live: Live, now: float) -> None:
    """Return a request to the queue, with its KV dropped or swapped out."""
    live.preemptions += 1
    batch.cache_prefixes()  # its blocks may be found again
    if live.stage is WAITING:
        _evict(batch, live)
        return
    if live.move is not None:
        live.move.abandon(now, MoveOutcome.PREEMPTED)
    cause = Cause.PREEMPTED
    if live.stage is DECODING:
        batch.stop_decode(live, returns=True)
        if _swap_out(batch, live, live.computed_tokens):
            cause = Cause.SWAPPED
    else:
        batch.stop_prefill(live, returns=True)
    batch.write_segment(live, now, cause)
    batch.count_waiting(live)
    batch.queue.push(live, now)


def _evict(batch: Batch, live: Live) -> None:
    """Take a waiting request's blocks: its KV is swapped out, or recomputed later."""
    tokens = live.swapped_tokens
    batch.discard_kv(live, returns=True)
    if not _swap_out(batch, live, tokens):
        live.target_tokens = live.prompt_tokens + live.generated_tokens
        batch.prefill_tokens_left += live.target_tokens
        live.computed_tokens = 0


def _swap_out(batch: Batch, live: Live, tokens: int) -> bool:
    copy_s = batch.host.swap_out(live, tokens) if batch.engine.preemption == "swap" else None
    batch.stall_s += copy_s or 0.0
    return copy_s is not None


def _ranked(batch: Batch, now: float) -> list[tuple[object, int, Live]]:
    rank = batch.queue.rank
    for live in batch.decoding.values():
        batch.sync(live)
    lives = [*batch.decoding.values(), *batch.prefilling.values(), *batch.resident.values()]
    return [(rank(live, now), live.id, live) for live in lives]


def _kv_tokens(batch: Batch, live: Live) -> int:
    if live.stage is WAITING:
        return live.swapped_tokens
    grown = batch.tick - live.joined_tick if live.stage is DECODING else 0
    return live.computed_tokens + grown
