"""A replica's view: the gateway's own counts, and the engine's metrics while they are fresh."""

from __future__ import annotations

import asyncio

import pytest
from msgspec import structs

pytest.importorskip("httptools")

from headway.catalog import engine, gpu, model
from headway.control.live import Live
from headway.core.fleet import Pool, Preemption
from headway.core.pacer import Pacer
from headway.core.request import Phase, Segment
from headway.core.view import ReplicaView
from headway.gateway.clock import Clock
from headway.gateway.scheduling.replica import LiveReplica, ReplicaReservation, Slots
from headway.gateway.upstream.dialects import ADAPTERS, Load, parse_load
from headway.policies.ordering.fcfs import FcfsOrdering
from headway.policies.ordering.phases import PascalOrdering
from headway.sim.replica_resources import host_memory


def test_a_view_has_exact_counts_and_the_engines_metrics_only_while_they_are_fresh() -> None:
    clock = Clock(asyncio.new_event_loop())
    clock._loop.close()
    pool = Pool("p", model("qwen3-8b"), gpu("h100"), engine("vllm-0.15"))
    replica = LiveReplica(0, pool, "http://h:1", ADAPTERS["vllm"], 1000, PascalOrdering(), Pacer(), clock, stale_s=60.0)
    thinking = Live(0, 0.0, 160, 10, tier=2)
    thinking.phase = Phase.REASONING
    answering = Live(1, 0.0, 32, 10)
    seats = [replica.reserve(thinking), replica.reserve(answering)]
    assert (replica.num_in_flight, replica.num_by_tier, replica.queue_lengths) == (2, {2: 1, 0: 1}, [1, 1])
    assert (replica.num_running, replica.num_waiting, replica.kv_blocks_used) == (2, 0, 12)
    assert (replica.prefill_tokens_left, replica.tokens_generated) == (192, 0)
    thinking.generated_tokens += 3
    seats[0].count_tokens(3)
    assert (replica.prefill_tokens_left, replica.tokens_generated) == (32, 3)
    thinking.phase = Phase.ANSWERING
    seats[0].count_tokens(0)
    assert replica.queue_lengths == [0, 2]
    replica.update_load(Load(running=9, waiting=4, kv_share=0.5))
    assert (replica.num_running, replica.num_waiting, replica.kv_blocks_used) == (9, 4, 500)
    replica._stale_s = -1.0
    assert (replica.num_running, replica.num_waiting) == (2, 0)
    for seat in (*seats, *seats):
        seat.free()
    assert (replica.num_in_flight, replica.prefill_tokens_left, replica.tokens_generated) == (0, 0, 0)
    assert replica.queue_lengths == [0, 0] and not any(replica.num_by_tier.values())


def test_a_replica_has_each_field_that_views_declare() -> None:
    """Except for what only an oracle may read: a gateway refuses oracles."""
    clock = Clock(asyncio.new_event_loop())
    clock._loop.close()
    pool = Pool("p", model("qwen3-8b"), gpu("h100"), engine("vllm-0.15"))
    replica = LiveReplica(0, pool, "http://h:1", ADAPTERS["vllm"], 1000, PascalOrdering(), Pacer(), clock, stale_s=60.0)
    declared = {name for name in dir(ReplicaView) if not name.startswith("_")}
    assert not {name for name in declared if not hasattr(replica, name)}, "give LiveReplica these fields of core.view"


def test_the_prompts_placed_at_a_replica_are_guessed_to_be_cached_there() -> None:
    clock = Clock(asyncio.new_event_loop())
    clock._loop.close()
    pool = Pool("p", model("qwen3-8b"), gpu("h100"), engine("vllm-0.15"))
    replica = LiveReplica(0, pool, "http://h:1", ADAPTERS["vllm"], 1000, PascalOrdering(), Pacer(), clock, stale_s=60.0)
    prefix = (Segment(1, 256), Segment(2, 256))
    first, second = Live(0, 0.0, 600, 10, prefix=prefix), Live(1, 0.0, 600, 10, prefix=(prefix[0], Segment(3, 256)))
    assert (replica.cached_tokens(first), replica.loadable_tokens(first)) == (0, 0)
    replica.reserve(first).free()
    assert (replica.cached_tokens(first), replica.cached_tokens(second)) == (512, 256)
    replica.cache_index.guesses = False  # events say what is cached from now on
    replica.cache_index.clear()
    replica.reserve(second).free()
    assert replica.cached_tokens(second) == 512, "what was placed since the last event"
    replica.cache_index.clear()
    replica.cache_index.adds_placed = False
    replica.reserve(second).free()
    assert replica.cached_tokens(second) == 0
    assert 0 < replica.kv_transfer_s(100) < replica.kv_transfer_s(10_000)


def test_slots_are_assigned_in_turn_and_by_cached_prefix() -> None:
    slots, heard = Slots(), []

    def seat(id: int, *segments: int) -> ReplicaReservation:
        prefix = tuple(Segment(segment, 256) for segment in segments)
        made = ReplicaReservation(
            None, Live(id=id, arrival_s=0.0, prompt_tokens=1, output_tokens=1, model="m", prefix=prefix)
        )
        made.on_slot = lambda: heard.append(id)
        slots.enter(made)
        return made

    first, second = seat(0, 10, 11), seat(1, 20)
    assert first.waits_for_slot and second.waits_for_slot
    slots.resize(2)
    assert [first.slot, second.slot] == [0, 1] and heard == [0, 1]
    impatient, third, fourth = seat(2), seat(3), seat(4, 10)
    slots.leave(impatient)
    slots.leave(second)
    slots.leave(first)
    assert [third.slot, fourth.slot] == [1, 0] and heard == [0, 1, 3, 4] and not third.waits_for_slot
    slots.leave(third)
    slots.leave(fourth)
    assert seat(5, 10, 12).slot == 0, "the slot caches its prefix, though the other one has been free for longer"
    slots.resize(1)
    assert seat(6).waits_for_slot, "the server has restarted with fewer slots"


def test_a_view_has_the_blocks_of_what_waits_and_of_what_was_swapped_out() -> None:
    clock = Clock(asyncio.new_event_loop())
    clock._loop.close()

    def made(preemption: Preemption) -> LiveReplica:
        swaps = structs.replace(engine("vllm-v0"), preemption=preemption, host_memory_bytes=8 << 30)
        pool = Pool("p", model("qwen3-8b"), gpu("h100"), swaps)
        return LiveReplica(0, pool, "http://h:1", ADAPTERS["vllm"], 1000, FcfsOrdering(), Pacer(), clock, stale_s=60.0)

    replica = made("swap")
    seats = [replica.reserve(Live(i, 0.0, 16 * (i + 1), 10)) for i in range(4)]
    assert replica.head_demand_blocks == replica.kv_blocks_host == 0
    seats[0].count_tokens(1)
    replica.update_load(parse_load(ADAPTERS["vllm"], "vllm:num_requests_waiting 2\nvllm:cpu_cache_usage_perc 0.5\n"))
    assert replica.head_demand_blocks == 3  # of the third request, the second of those without a token
    whole = host_memory(Pool("p", model("qwen3-8b"), gpu("h100"), engine("vllm-v0"))).capacity_tokens
    assert 0 < replica.kv_blocks_host <= (8 << 30) / (4 << 30) * whole / 16
    replica.update_load(Load(waiting=9))
    assert (replica.head_demand_blocks, replica.kv_blocks_host) == (2, 0)
    recomputing = made("recompute")
    recomputing.update_load(Load(waiting=1, host_share=0.5))
    assert (recomputing.head_demand_blocks, recomputing.kv_blocks_host) == (0, 0)
