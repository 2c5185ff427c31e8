"""Inside a simulated fleet: the only place in the tests that knows how a replica keeps its state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headway.control.live import Live, Stage
from headway.sim.cluster import Cluster
from headway.sim.replica import Replica
from headway.sim.replica_resources import Line


def replicas_of(cluster: Cluster) -> list[Replica]:
    """A cluster's replicas."""
    return cluster._replicas


def watched(cluster: Cluster, look: Callable[[Replica], None]) -> Cluster:
    """The cluster; `look` is called whenever a replica has decided on an iteration (with `exact`, on each)."""

    def wrapped(replica: Replica, line: Line) -> Line:
        def looked_at(*batch: Any) -> tuple[float, float, int | None]:
            look(replica)
            return line(*batch)

        return looked_at

    views = cluster._observation._views
    add = views.add

    def add_watched(view: Any) -> Any:
        replica = cluster._replicas[view.id]
        replica.timeline._line = wrapped(replica, replica.timeline._line)
        return add(view)

    views.add = add_watched  # type: ignore[method-assign]
    for replica in cluster._replicas:
        replica.timeline._line = wrapped(replica, replica.timeline._line)
    return cluster


def own_tokens(replica: Replica, live: Live) -> int:
    """KV tokens of a decoding request that no other shares."""
    return live.computed_tokens + replica.batch.tick - live.joined_tick - live.shared_blocks * replica.batch.kv.block


def shared_blocks(replica: Replica) -> int:
    """Blocks of the prefix cache that running requests share."""
    if replica.batch.prefixes is None:
        return 0
    return sum(node.cached for node in replica.batch.prefixes.nodes.values() if node.users)


def assert_sound(replica: Replica) -> None:
    """The replica's sums are those of its requests, counted one at a time, and no limit is exceeded."""
    view, kv, tick, engine = replica.view, replica.batch.kv, replica.batch.tick, replica.batch.engine
    decoding, prefilling = list(replica.batch.decoding.values()), list(replica.batch.prefilling.values())
    own = [own_tokens(replica, live) for live in decoding]
    pinned = sum(-(-live.computed_tokens // kv.block) - live.shared_blocks for live in prefilling)
    leaving = [live for live in replica.transit.leaving.values() if not live.swapped_tokens]
    pinned += sum(-(-live.computed_tokens // kv.block) - live.shared_blocks for live in leaving)
    pinned += sum(live.resident_blocks for live in replica.batch.resident.values()) + replica.transit.reserved_blocks
    assert kv.pinned == pinned + shared_blocks(replica)
    assert kv.count == len(decoding)
    assert kv.used(tick) == kv.pinned + sum(-(-tokens // kv.block) for tokens in own)
    growing = sum(tokens % kv.block == 0 for tokens in own)
    assert kv.needed_next(tick) == growing
    assert kv.used(tick) + (growing if replica.timeline.advances else 0) <= kv.total
    assert len(decoding) + len(prefilling) == view.num_running <= engine.max_num_seqs
    assert replica.batch.chunk_tokens == sum(tokens for _, tokens in replica.batch.chunks)
    in_batch = replica.batch.chunk_tokens + (len(decoding) if replica.timeline.advances else 0)
    whole_and_alone = len(replica.batch.chunks) == 1 and engine.batching != "chunked"
    assert in_batch <= max(engine.max_num_batched_tokens, len(decoding)) or whole_and_alone
    waiting = replica.batch.queue.requests()
    coming = list(replica.transit.expected.values())
    staying = [live for live in replica.transit.leaving.values() if live.move is None or not live.move.is_sent]
    assert view.num_waiting - len(coming) == len({live.id for live in waiting}) == len(waiting)
    assert all(live.stage is Stage.WAITING for live in waiting)
    assert view.num_in_flight == view.num_running + len(waiting) + len(coming) + len(staying)
    left = replica.batch.chunk_tokens + sum(live.target_tokens - live.computed_tokens for live in prefilling)
    queued = sum(live.target_tokens for live in waiting if not live.swapped_tokens)
    assert view.prefill_tokens_left == left + queued
    swapped = [live for live in (*waiting, *replica.transit.leaving.values()) if live.id not in replica.batch.resident]
    host = replica.batch.host
    assert sum(live.swapped_tokens for live in swapped) <= host.used_tokens <= host.capacity_tokens
    grown = sum(live.joined_generated + tick - live.joined_tick for live in decoding)
    standing = (*waiting, *prefilling, *coming, *staying)
    generated = grown + sum(live.generated_tokens for live in standing)
    assert view.tokens_generated == generated
    everybody = (*standing, *decoding)
    assert sum(view.num_by_tier.values()) == sum(view.queue_lengths) == len(everybody)
    assert view.output_tokens_left == sum(live.output_tokens for live in everybody) - generated


def assert_empty(replica: Replica) -> None:
    """Nobody is here, and nothing is held for anybody."""
    kv, view = replica.batch.kv, replica.view
    assert (view.num_in_flight, view.num_waiting, view.num_running) == (0, 0, 0)
    assert (view.prefill_tokens_left, view.tokens_generated, view.output_tokens_left) == (0, 0, 0)
    assert (kv.used(replica.batch.tick), kv.pinned, kv.count, kv.free(replica.batch.tick)) == (0, 0, 0, kv.total)
    assert shared_blocks(replica) == 0
    assert (replica.batch.window_tokens, replica.batch.num_growing) == (0, 0)
    assert (replica.batch.resident, replica.transit.leaving, replica.transit.expected) == ({}, {}, {})
    assert (replica.transit.reserved_blocks, view.num_arriving) == (0, 0)
    assert not any(view.num_by_tier.values()) and not any(view.queue_lengths)
    assert (replica.batch.queue.inbox, replica._cancelling, replica.batch.chunks) == ([], [], [])
    assert replica.batch.host.used_tokens == 0
