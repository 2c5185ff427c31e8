"""What a replica runs next: the admission rules of the engines that Headway models.

Each rule looks at a batch at a boundary and fills `batch.chunks` (who prefills how much) and
`batch.advances` (whether decoding requests gain a token).
"""

from __future__ import annotations

from collections.abc import Callable

from headway.sim.preemption import Preempting


def chunked(batch: Preempting, now: float) -> None:
    """vLLM V1 and Sarathi: decodes first, then prefill chunks, within one token budget."""
    if not batch.kv.can_tick(batch.tick):
        batch.secure(now)
    budget = batch.max_num_batched_tokens - len(batch.decoding)
    if batch.prefilling:
        budget = _continue(batch, budget, now)
    if batch.num_waiting and not batch.again:
        _admit(batch, budget, now, whole=False)
    batch.advances = bool(batch.decoding)


def whole_prompt(batch: Preempting, now: float) -> None:
    """Orca: prompts join the decoding batch unsplit; one that exceeds the budget is the iteration's only one."""
    batch.secure(now)
    if batch.num_waiting and not batch.again:
        budget = batch.max_num_batched_tokens - len(batch.decoding)
        _admit(batch, budget, now, whole=True)
    batch.advances = bool(batch.decoding)


def prefill_first(batch: Preempting, now: float) -> None:
    """vLLM V0: whole prompts as soon as they fit, in iterations of their own, while decoding stands still."""
    if batch.num_waiting:
        _admit(batch, batch.max_num_batched_tokens, now, whole=True, reserve=False)
    if batch.chunks:
        batch.advances = False
        return
    batch.secure(now)
    batch.advances = bool(batch.decoding)


def request_level(batch: Preempting, now: float) -> None:
    """FasterTransformer: a batch runs to its end before the next is formed."""
    if batch.decoding:
        batch.secure(now)
    elif batch.num_waiting:
        _admit(batch, batch.max_num_batched_tokens, now, whole=True)
    batch.advances = bool(batch.decoding)


ADMISSIONS: dict[str, Callable[[Preempting, float], None]] = {
    "chunked": chunked,
    "whole-prompt": whole_prompt,
    "prefill-first": prefill_first,
    "request-level": request_level,
}


def _continue(batch: Preempting, budget: int, now: float) -> int:
    """Give the prompts in progress their next chunks; returns what is left of the budget."""
    kv = batch.kv
    for live in list(batch.prefilling.values()):
        if budget <= 0:
            break
        if live.id not in batch.prefilling:
            continue
        chunk = min(live.target_tokens - live.computed_tokens, budget)
        need = kv.blocks(live.computed_tokens + chunk) - kv.blocks(live.computed_tokens)
        while not kv.can_tick(batch.tick, need):
            victim = batch.worst(now)
            batch.preempt(victim, now)
            batch.again = True
            if victim is live:
                break
        else:
            batch.give(live, chunk)
            budget -= chunk
    return budget


def _admit(batch: Preempting, budget: int, now: float, whole: bool, reserve: bool = True) -> None:
    """Take requests from the head of the line while seats, blocks and budget last.

    With `reserve`, the blocks that decoding requests need in this iteration are left to them.
    """
    kv, tick = batch.kv, batch.tick
    while (live := batch.head()) is not None:
        if budget <= 0:
            return
        if live.swapped_tokens:
            chunk = hit = loaded = 0
            own = live.swapped_tokens - live.shared_blocks * kv.block
            blocks = kv.blocks(own + 1) - live.resident_blocks
        else:
            hit = loaded = 0
            if batch.prefixes is not None and live.prefix:
                hit = batch.prefixes.hit_blocks(live, tick)
                loaded = batch.prefixes.host_blocks(live, hit)
            cached_tokens = (hit + loaded) * kv.block
            left = live.target_tokens - cached_tokens
            chunk = left if whole or left < budget else budget
            if chunk > budget and batch.chunks:
                return
            blocks = kv.blocks(cached_tokens + chunk) - hit
            if hit and batch.prefixes is not None:
                blocks += batch.prefixes.idle_blocks(live, hit)
        if not _has_room(batch, blocks, reserve):
            if batch.preemptive and batch.displace(live, blocks + kv.watermark, now):
                continue
            if batch.resident and not batch.num_running and batch.evict_behind(live, now):
                continue
            # What is cached for it may be evicted as others grow, and then it asks for less.
            if hit + loaded and batch.num_running and (batch.preemptive or batch.num_running < batch.max_num_seqs):
                batch.again = True
            return
        batch.admit(live, hit, loaded, now)
        if chunk:
            batch.give(live, chunk)
        budget -= chunk or 1


def _has_room(batch: Preempting, blocks: int, reserve: bool) -> bool:
    kv = batch.kv
    if len(batch.decoding) + len(batch.prefilling) >= batch.max_num_seqs:
        return False
    blocks += kv.watermark
    return kv.can_tick(batch.tick, blocks) if reserve else kv.has_free(blocks, batch.tick)
