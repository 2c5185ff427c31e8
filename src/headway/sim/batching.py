"""What a replica runs next: the admission rules of the engines that Headway models.

Each rule looks at a replica at a boundary and fills `replica.chunks` (who prefills how much) and
`replica.advances` (whether decoding requests gain a token).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headway.sim.engine import Replica


def chunked(replica: Replica, now: float) -> None:
    """vLLM V1 and Sarathi: decodes first, then prefill chunks, within one token budget."""
    replica.secure(now)
    budget = replica.max_num_batched_tokens - len(replica.decoding)
    if replica.prefilling:
        budget = _continue(replica, budget, now)
    if replica.num_waiting and not replica.again:
        _admit(replica, budget, now, whole=False)
    replica.advances = bool(replica.decoding)


def whole_prompt(replica: Replica, now: float) -> None:
    """Orca: prompts join the decoding batch unsplit; one that exceeds the budget is the iteration's only one."""
    replica.secure(now)
    if replica.num_waiting and not replica.again:
        budget = replica.max_num_batched_tokens - len(replica.decoding)
        _admit(replica, budget, now, whole=True)
    replica.advances = bool(replica.decoding)


def prefill_first(replica: Replica, now: float) -> None:
    """vLLM V0: whole prompts as soon as they fit, in iterations of their own, while decoding stands still."""
    if replica.num_waiting:
        _admit(replica, replica.max_num_batched_tokens, now, whole=True, reserve=False)
    if replica.chunks:
        replica.advances = False
        return
    replica.secure(now)
    replica.advances = bool(replica.decoding)


def request_level(replica: Replica, now: float) -> None:
    """FasterTransformer: a batch runs to its end before the next is formed."""
    if replica.decoding:
        replica.secure(now)
    elif replica.num_waiting:
        _admit(replica, replica.max_num_batched_tokens, now, whole=True)
    replica.advances = bool(replica.decoding)


ADMISSIONS: dict[str, Callable[[Replica, float], None]] = {
    "chunked": chunked,
    "whole-prompt": whole_prompt,
    "prefill-first": prefill_first,
    "request-level": request_level,
}


def _continue(replica: Replica, budget: int, now: float) -> int:
    """Give the prompts in progress their next chunks; returns what is left of the budget."""
    kv = replica.kv
    for live in list(replica.prefilling.values()):
        if budget <= 0:
            break
        if live.id not in replica.prefilling:
            continue
        chunk = min(live.target_tokens - live.computed_tokens, budget)
        need = kv.blocks(live.computed_tokens + chunk) - kv.blocks(live.computed_tokens)
        while not kv.has_free(need + kv.needed_next(replica.tick), replica.tick):
            victim = replica.worst(now)
            replica.preempt(victim, now)
            replica.again = True
            if victim is live:
                break
        else:
            replica.give(live, chunk)
            budget -= chunk
    return budget


def _admit(replica: Replica, budget: int, now: float, whole: bool, reserve: bool = True) -> None:
    """Take requests from the head of the line while seats, blocks and budget last.

    With `reserve`, the blocks that decoding requests need in this iteration are left to them.
    """
    kv, tick = replica.kv, replica.tick
    while (live := replica.head()) is not None:
        if budget <= 0:
            return
        if live.swapped_tokens:
            chunk = hit = 0
            blocks = kv.blocks(live.swapped_tokens + 1)
        else:
            hit = replica.prefixes.hit_blocks(live, tick) if replica.prefixes is not None and live.prefix else 0
            left = live.target_tokens - hit * kv.block
            chunk = left if whole or left < budget else budget
            if chunk > budget and replica.chunks:
                return
            blocks = kv.blocks(hit * kv.block + chunk) - hit
            if hit and replica.prefixes is not None:
                blocks += replica.prefixes.idle_blocks(live, hit)
        if not _has_room(replica, blocks, reserve):
            if replica.preemptive and replica.displace(live, blocks + kv.watermark, now):
                continue
            # What is cached for it may be evicted as others grow, and then it asks for less.
            replica.again |= hit > 0 and (replica.preemptive or replica.num_running < replica.max_num_seqs)
            return
        replica.admit(live, hit, now)
        if chunk:
            replica.give(live, chunk)
        budget -= chunk or 1


def _has_room(replica: Replica, blocks: int, reserve: bool) -> bool:
    kv, tick = replica.kv, replica.tick
    if replica.num_running >= replica.max_num_seqs:
        return False
    kept = kv.watermark + (kv.needed_next(tick) if reserve else 0)
    return kv.has_free(blocks + kept, tick)
