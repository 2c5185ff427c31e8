"""The batching rules of the engines: what a replica runs in its next iteration.

At a boundary, a rule reads the batch, fills `batch.chunks` (the prefill chunks), and returns whether the decoding
requests gain a token in the next iteration.
"""

from __future__ import annotations

from collections.abc import Callable

from headway.sim.batch import Batch
from headway.sim.preemption import displace, evict_for, last_ranked, make_room, preempt


def chunked(batch: Batch, now: float) -> bool:
    """vLLM V1 and Sarathi: first decodes, then prefill chunks, within one token budget."""
    if not batch.kv.can_tick(batch.tick):
        make_room(batch, now)
    budget = batch.max_num_batched_tokens - len(batch.decoding)
    if batch.speculation is not None:
        budget -= batch.speculation.drafted_tokens(len(batch.decoding))
    if batch.prefilling:
        budget = _continue_prefills(batch, budget, now)
    if batch.num_waiting and not batch.must_recheck:
        _admit(batch, budget, now, whole=False)
    return bool(batch.decoding)


def whole_prompt(batch: Batch, now: float) -> bool:
    """Orca: prompts join the decoding batch unsplit; a prompt over the budget is the iteration's only one."""
    make_room(batch, now)
    if batch.num_waiting and not batch.must_recheck:
        budget = batch.max_num_batched_tokens - len(batch.decoding)
        if batch.speculation is not None:
            budget -= batch.speculation.drafted_tokens(len(batch.decoding))
        _admit(batch, budget, now, whole=True)
    return bool(batch.decoding)


def prefill_first(batch: Batch, now: float) -> bool:
    """vLLM V0: whole prompts as soon as they fit, in separate iterations, during which decoding pauses."""
    if batch.num_waiting:
        _admit(batch, batch.max_num_batched_tokens, now, whole=True, reserve=False)
    if batch.chunks:
        return False
    make_room(batch, now)
    return bool(batch.decoding)


def request_level(batch: Batch, now: float) -> bool:
    """FasterTransformer: a batch runs to its end before the next one is formed."""
    if batch.decoding:
        make_room(batch, now)
    elif batch.num_waiting:
        _admit(batch, batch.max_num_batched_tokens, now, whole=True)
    return bool(batch.decoding)


BATCHING_RULES: dict[str, Callable[[Batch, float], bool]] = {
    "chunked": chunked,
    "whole-prompt": whole_prompt,
    "prefill-first": prefill_first,
    "request-level": request_level,
}


def _continue_prefills(batch: Batch, budget: int, now: float) -> int:
    """Give the prompts in progress their next chunks. Returns the remaining budget in tokens."""
    kv = batch.kv
    for live in list(batch.prefilling.values()):
        if budget <= 0:
            break
        if live.id not in batch.prefilling:
            continue
        chunk = min(live.target_tokens - live.computed_tokens, budget)
        need = kv.blocks(live.computed_tokens + chunk) - kv.blocks(live.computed_tokens)
        while not kv.can_tick(batch.tick, need):
            victim = last_ranked(batch, now)
            preempt(batch, victim, now)
            batch.must_recheck = True
            if victim is live:
                break
        else:
            batch.add_chunk(live, chunk)
            budget -= chunk
    return budget


def _admit(batch: Batch, budget: int, now: float, whole: bool, reserve: bool = True) -> None:
    """Admit requests from the head of the queue while there are sequences, blocks and budget (in tokens) left.

    A request whose LoRA adapter has no slot is skipped, as in vLLM. With `reserve`, the blocks that decoding requests
    need in this iteration stay free.
    """
    kv, tick, queue, adapters = batch.kv, batch.tick, batch.queue, batch.adapters
    while (live := queue.first()) is not None:
        if budget <= 0:
            return
        if adapters is not None and live.lora and not adapters.has_room_for(live.lora):
            queue.pass_over()
            continue
        hit, loaded, prefixes = 0, 0, batch.prefixes  # none before a request with a prefix, or preempted here
        if live.swapped_tokens:
            chunk = 0
            own = live.swapped_tokens - live.shared_blocks * kv.block
            blocks = kv.blocks(own + 1 + batch.draft_slots) - live.resident_blocks
        else:
            if prefixes is not None and (live.prefix or live.preemptions):
                hit = prefixes.hit_blocks(live, tick)
                loaded = prefixes.loadable_blocks(live, hit)
            cached_tokens = (hit + loaded) * kv.block
            left = live.target_tokens - cached_tokens
            chunk = left if whole or left < budget else budget
            if chunk > budget and batch.chunks:
                return
            blocks = -(-(cached_tokens + chunk + batch.draft_slots) // kv.block) - hit
            if hit and prefixes is not None:
                blocks += prefixes.idle_blocks(live, hit)
        num_running = len(batch.decoding) + len(batch.prefilling)
        with_watermark = blocks + kv.watermark
        if num_running >= batch.max_num_seqs or not (
            kv.can_tick(tick, with_watermark) if reserve else kv.has_free(with_watermark, tick)
        ):
            if queue.preemptive and displace(batch, live, with_watermark, now):
                continue
            if batch.resident and not num_running and evict_for(batch, live, now):
                continue
            # Cached blocks may be evicted as other requests grow, and the request then needs fewer blocks. Exception:
            # it alone holds them and its whole prompt is scheduled; then it needs one more free block for each evicted
            # one.
            shrinks = hit + loaded and (live.prefix or chunk == budget)
            if shrinks and num_running and (queue.preemptive or num_running < batch.max_num_seqs):
                batch.must_recheck = True
            return
        batch.admit(live, hit, loaded, now)
        if chunk:
            batch.add_chunk(live, chunk)
        budget -= chunk or 1
