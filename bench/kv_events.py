"""What cache-aware routing costs: `python bench/kv_events.py`. CPU time of one core, medians of five."""

from __future__ import annotations

import random
import time
import tracemalloc
from collections.abc import Callable
from statistics import median

from click import echo

from headway.control import token_blocks
from headway.control.cache_index import CacheIndex
from headway.control.live import Live
from headway.gateway.kv_events import wire
from headway.gateway.kv_events.engine_blocks import EngineBlocks

BLOCK = 16
BLOCKS_PER_BATCH = 64
KV_BLOCKS = 20_000
"""Of an 80 GB GPU with an 8B model, about 320,000 tokens."""
NUM_BATCHES = 600
PROMPT_TOKENS = 10_000
NUM_REPLICAS = 4
REPLICA_EVENTS_PER_S = 2 * 20_000 / BLOCK
"""Blocks stored and removed in a second by a replica that computes 20,000 prompt tokens a second."""


def batches() -> tuple[list[bytes], int]:
    """Batches of an engine whose cache is full, and the number of their blocks."""
    chance, found, num, stored = random.Random(1), [], 0, 0
    for number in range(NUM_BATCHES):
        hashes = [i.to_bytes(32) for i in range(stored, stored + BLOCKS_PER_BATCH)]
        stored += BLOCKS_PER_BATCH
        tokens = [chance.randrange(32_000) for _ in range(BLOCKS_PER_BATCH * BLOCK)]
        events: list[wire.Event] = [wire.BlockStored(hashes, None, tokens, BLOCK, None, "GPU")]
        first = stored - KV_BLOCKS - BLOCKS_PER_BATCH
        if first >= 0:
            events.append(wire.BlockRemoved([i.to_bytes(32) for i in range(first, first + BLOCKS_PER_BATCH)], "GPU"))
        num += sum(len(event.block_hashes) for event in events if not isinstance(event, wire.AllBlocksCleared))
        found.append(wire.encode(events, float(number), as_arrays=number % 2 == 0))
    return found, num


def read(payloads: list[bytes]) -> CacheIndex:
    blocks, index = EngineBlocks(BLOCK, 8 * KV_BLOCKS), CacheIndex(BLOCK, KV_BLOCKS, guesses=False)
    for payload in payloads:
        index.apply_blocks(blocks.changes(wire.decode(payload)))
    return index


def cpu_s(work: Callable[[], object]) -> float:
    times = []
    for _ in range(5):
        start_s = time.process_time()
        work()
        times.append(time.process_time() - start_s)
    return median(times)


def main() -> None:
    payloads, num = batches()
    rate = num / cpu_s(lambda: read(payloads))
    echo(f"block events a second and core: {rate:,.0f}, {rate / REPLICA_EVENTS_PER_S:.0f} times what a replica emits")
    tracemalloc.start()
    index = read(payloads)
    echo(f"memory of an index of {len(index.gpu):,} blocks: {tracemalloc.get_traced_memory()[0] / 2**20:.1f} MiB")
    tracemalloc.stop()

    chance = random.Random(2)
    ids = [chance.randrange(32_000) for _ in range(PROMPT_TOKENS)]
    name_s = cpu_s(lambda: [token_blocks.segments(ids, BLOCK) for _ in range(100)]) / 100
    prefix = token_blocks.segments(ids, BLOCK)
    indexes = [CacheIndex(BLOCK, KV_BLOCKS, guesses=False) for _ in range(NUM_REPLICAS)]
    for share, each in enumerate(indexes, 1):
        each.apply([(segment.id, 1, 0) for segment in prefix[: len(prefix) * share // NUM_REPLICAS]])
    live = Live(0, 0.0, PROMPT_TOKENS, 1, prefix=prefix)
    look_s = cpu_s(lambda: [each.cached_tokens(live) for _ in range(100) for each in indexes]) / 100
    echo(f"naming a prompt of {PROMPT_TOKENS:,} tokens: {name_s * 1e3:.2f} ms")
    echo(f"looking it up at {NUM_REPLICAS} replicas, which hold 1/{NUM_REPLICAS} to all of it: {look_s * 1e3:.2f} ms")


if __name__ == "__main__":
    main()
