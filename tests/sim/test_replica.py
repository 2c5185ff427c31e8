"""Runs worked out by hand. An iteration takes one second unless a test says otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan
from typing import Any

import pytest

from headway.control.observe import Scrape
from headway.core.decision import Placement
from headway.core.errors import HeadwayError
from headway.core.fleet import Fault, Pool
from headway.core.record import Cause, Outcome, Records
from headway.core.request import Request, Segment
from headway.core.view import FleetView, RequestView
from headway.metrics.tokens import token_times
from headway.perf import copies, memory
from headway.policies.ordering.tiers import PriorityOrdering
from headway.policies.ordering.time_sharing import RoundRobinOrdering
from headway.sim.kernel import COMMAND
from replica_state import replicas_of
from simulation import GPU, MODEL, Demoting, Scenario, by_request, pool, request, seconds

pytestmark = pytest.mark.parametrize("step", ["stretch", "exact"])

FINISHED, CANCELLED, REJECTED, UNFINISHED = Outcome


def run(step: Any, requests: Sequence[Request], *pools: Pool, **given: Any) -> Records:
    """One second an iteration."""
    return Scenario(tuple(requests), pools or (pool(),), **{"line": seconds(1.0), **given}).play(step)


def tokens(records: Records) -> list[list[float]]:
    """When each request's tokens came."""
    found = token_times(records, range(len(records.workload["arrival_s"])))
    return [times.tolist() for times in found.values()]


def column(records: Records, name: str) -> list[Any]:
    """A column of the request table, in order of id; None for what never was."""
    values = by_request(records.requests)[name].tolist()
    return [None if isinstance(value, float) and isnan(value) else value for value in values]


# Batching.


def test_chunks_interleave_with_decodes(step: str) -> None:
    records = run(step, [request(0, 0, 4, 4), request(1, 1, 20, 2)], pool(max_num_batched_tokens=10))
    assert tokens(records) == [[1, 2, 3, 4], [4, 5]]  # chunks of 9, 9 and 2
    assert records.stretches["prefill_tokens"].tolist() == [4, 9, 9, 2, 0]
    assert records.stretches["num_decode"].tolist() == [0, 1, 1, 1, 1]
    assert column(records, "admitted_s") == [0, 1]


def test_prefill_first_stalls_decodes(step: str) -> None:
    engine = {"batching": "prefill-first", "max_num_batched_tokens": 10}
    records = run(step, [request(0, 0, 4, 3), request(1, 1, 20, 2), request(2, 1, 3, 2)], pool(**engine))
    assert tokens(records) == [[1, 4, 5], [2, 4], [3, 4]]


def test_a_request_level_batch_runs_to_its_end(step: str) -> None:
    engine = {"batching": "request-level", "max_num_seqs": 2}
    records = run(step, [request(0, 0, 4, 3), request(1, 0, 4, 1), request(2, 0.5, 4, 1)], pool(**engine))
    assert tokens(records) == [[1, 2, 3], [1], [4]]


def test_an_iteration_takes_what_its_line_says(step: str) -> None:
    one = request(0, 10.0, 100, 3)
    assert tokens(run(step, [one], line=seconds(0.5, 0.01))) == [[11.5, 12.0, 12.5]]


def test_an_arrival_waits_for_the_boundary(step: str) -> None:
    records = run(step, [request(0, 0, 1, 6), request(1, 2.5, 1, 1), request(2, 4.0, 1, 1)])
    assert tokens(records)[1:] == [[4], [5]]
    assert column(records, "admitted_s") == [0, 3, 4]


def test_a_scheduling_lag_admits_one_iteration_later(step: str) -> None:
    requests = [request(0, 0, 1, 6), request(1, 2.5, 1, 1)]
    assert column(run(step, requests, pool(schedule_lag=0)), "admitted_s") == [0, 3]
    assert column(run(step, requests, pool(schedule_lag=1)), "admitted_s") == [0, 4]


def test_an_idle_engine_has_no_lag(step: str) -> None:
    requests = [request(0, 0, 1, 2), request(1, 7.5, 1, 1)]
    assert column(run(step, requests, pool(schedule_lag=1)), "admitted_s") == [0, 7.5]


# Turns and preemption.


def test_quanta_rotate(step: str) -> None:
    requests = [request(0, 0, 1, 5), request(1, 0, 1, 5)]
    records = run(step, requests, pool(max_num_seqs=1), ordering=lambda: RoundRobinOrdering(2))
    # The first token of a turn comes with the prefill, on the way back in as well.
    assert tokens(records) == [[1, 2, 5, 6, 9], [3, 4, 7, 8, 10]]
    assert column(records, "preemptions") == [2, 2]


def test_nobody_rotates_while_nobody_waits(step: str) -> None:
    records = run(step, [request(0, 0, 1, 9)], pool(max_num_seqs=1), ordering=lambda: RoundRobinOrdering(2))
    assert column(records, "preemptions") == [0]
    assert tokens(records) == [[1, 2, 3, 4, 5, 6, 7, 8, 9]]


URGENT = [request(0, 0, 32, 6, tier=1), request(1, 2.5, 16, 2, tier=0)]
"""The second needs blocks that the first has."""


def test_the_urgent_take_the_place_of_others_by_recompute(step: str) -> None:
    small = pool(kv_capacity_tokens=48, max_num_batched_tokens=64)
    records = run(step, URGENT, small, ordering=PriorityOrdering)
    # At 3 the first has 3 tokens and all 3 blocks; it computes its 32 + 3 anew once the second is done at 5.
    assert tokens(records) == [[1, 2, 3, 6, 7, 8], [4, 5]]
    assert records.stretches["prefill_tokens"].tolist()[:4] == [32, 0, 16, 0]
    assert records.segments["cause"].tolist() == [Cause.PREEMPTED, Cause.FINISHED, Cause.FINISHED]


def test_the_urgent_take_the_place_of_others_by_swap(step: str) -> None:
    small = pool(kv_capacity_tokens=48, max_num_batched_tokens=64, preemption="swap", host_memory_bytes=1e9)
    records = run(step, URGENT, small, ordering=PriorityOrdering)
    # 34 tokens have KV at 3 (the newest has none yet). Each copy stands before the next iteration.
    copy_s = copies.host_copy_s(34 * memory.kv_bytes_per_token(MODEL), GPU)
    assert tokens(records)[1] == pytest.approx([4 + copy_s, 5 + copy_s], abs=1e-9)
    back = [t + 2 * copy_s for t in (6, 7, 8)]
    assert tokens(records)[0] == pytest.approx([1, 2, 3, *back], abs=1e-9)
    assert records.segments["cause"].tolist() == [Cause.SWAPPED, Cause.FINISHED, Cause.FINISHED]
    assert records.stretches["prefill_tokens"].sum() == 32 + 16


def test_swap_without_room_recomputes(step: str) -> None:
    small = {"kv_capacity_tokens": 48, "max_num_batched_tokens": 64}
    no_room = pool(preemption="swap", host_memory_bytes=33 * memory.kv_bytes_per_token(MODEL), **small)
    assert tokens(run(step, URGENT, no_room, ordering=PriorityOrdering)) == tokens(
        run(step, URGENT, pool(**small), ordering=PriorityOrdering)
    )


def test_who_came_last_gives_way_when_blocks_run_out(step: str) -> None:
    tiny = pool(block_size_tokens=4, kv_capacity_tokens=12)
    records = run(step, [request(0, 0, 4, 3), request(1, 0, 4, 3)], tiny)
    assert tokens(records) == [[1, 2, 3], [1, 4, 5]]
    assert column(records, "preemptions") == [0, 1]


def test_swapped_in_requests_count_in_the_budget(step: str) -> None:
    # Memory for about four of ten requests: some are swapped out and back, beside prompts that are cut.
    engine = {"max_num_batched_tokens": 8, "max_num_seqs": 8, "block_size_tokens": 4, "kv_capacity_tokens": 32}
    swap = {"preemption": "swap", "host_memory_bytes": 1e9}
    requests = [request(i, 0, 4, 8) for i in range(6)] + [request(6 + i, 9, 16, 2) for i in range(4)]
    stretches = run(step, requests, pool(**engine, **swap)).stretches
    assert (stretches["num_decode"] + stretches["prefill_tokens"]).max() <= 8


def test_a_rank_that_falls_with_tokens(step: str) -> None:
    requests = [request(0, 0, 1, 60), request(1, 20.5, 1, 60)]
    records = run(step, requests, pool(max_num_seqs=1), ordering=Demoting)
    # Turns of 15 tokens: the first is let go at 30, and 10 tokens into its next turn it has given 40.
    assert column(records, "preemptions")[0] >= 2
    assert [round(t) for t in tokens(records)[0][:31]] == [*range(1, 31), 46]


# The prefix cache.


def test_a_hit_pays_only_for_the_suffix(step: str) -> None:
    shared = Segment(1, 64)
    requests = [
        request(0, 0, 70, 1, prefix=(shared, Segment(2, 6))),
        request(1, 2, 80, 1, prefix=(shared, Segment(3, 16))),
        request(2, 4, 80, 1, prefix=(Segment(4, 80),)),
    ]
    records = run(step, requests, pool(prefix_caching=True))
    assert column(records, "cached_prompt_tokens") == [0, 64, 0]
    assert records.stretches["prefill_tokens"].tolist() == [70, 16, 80]
    without = run(step, requests, pool(prefix_caching=False))
    assert without.stretches["prefill_tokens"].tolist() == [70, 80, 80]


def test_what_the_gpu_let_go_comes_back_from_host_memory(step: str) -> None:
    # Memory for one of the two prompts: each takes the blocks of the other.
    first, second = (Segment(1, 64),), (Segment(2, 64),)
    requests = [request(i, 2.0 * i, 64, 1, prefix=second if i % 2 else first) for i in range(4)]
    small = {"kv_capacity_tokens": 64, "prefix_caching": True}
    assert column(run(step, requests, pool(**small)), "cached_prompt_tokens") == [0, 0, 0, 0]
    records = run(step, requests, pool(**small, kv_offload_bytes=1e9))
    # All blocks but the last, whose last token is always computed; the copy stands in front of the iteration.
    assert column(records, "cached_prompt_tokens") == [0, 0, 48, 48]
    assert records.stretches["prefill_tokens"].tolist() == [64, 64, 16, 16]
    copy_s = copies.host_copy_s(48 * memory.kv_bytes_per_token(MODEL), GPU)
    assert records.stretches["start_s"] - [0.0, 2.0, 4.0, 6.0] == pytest.approx([0.0, 0.0, copy_s, copy_s])
    # Room for one prompt in host memory as well: the other has always pushed it out.
    one = run(step, requests, pool(**small, kv_offload_bytes=64 * memory.kv_bytes_per_token(MODEL)))
    assert column(one, "cached_prompt_tokens") == [0, 0, 0, 0]


def test_the_last_prompt_token_is_never_a_hit(step: str) -> None:
    same = (Segment(1, 64),)
    records = run(step, [request(i, 2.0 * i, 64, 1, prefix=same) for i in range(2)], pool(prefix_caching=True))
    assert column(records, "cached_prompt_tokens") == [0, 48]


def test_only_whole_blocks_are_shared(step: str) -> None:
    requests = [request(i, 2.0 * i, 100, 1, prefix=(Segment(1, 30), Segment(2 + i, 70))) for i in range(2)]
    assert column(run(step, requests, pool(prefix_caching=True)), "cached_prompt_tokens") == [0, 16]


def test_the_oldest_is_evicted_first(step: str) -> None:
    def ask(id: int, group: int) -> Request:
        return request(id, 2.0 * id, 65, 1, prefix=(Segment(group, 64), Segment(100 + id, 1)))

    # 10 blocks; each request takes 5, and leaves 4 with content. A third group costs the oldest its blocks.
    order = [1, 2, 1, 3, 1, 2]
    records = run(step, [ask(i, g) for i, g in enumerate(order)], pool(prefix_caching=True, kv_capacity_tokens=160))
    assert column(records, "cached_prompt_tokens") == [0, 0, 64, 0, 64, 0]


def test_the_next_turn_finds_what_was_said(step: str) -> None:
    # 33 + 32 - 1 tokens have KV when the first turn ends: 4 whole blocks.
    first = (Segment(1, 33),)
    second = (*first, Segment(50, 32), Segment(2, 20))
    requests = [request(0, 0, 33, 32, prefix=first, output_id=50), request(1, 40, 85, 1, prefix=second)]
    assert column(run(step, requests, pool(prefix_caching=True)), "cached_prompt_tokens") == [0, 64]


# Faults.


def test_a_crash_keeps_what_was_completed(step: str) -> None:
    requests = [request(0, 0, 10, 8), request(1, 0, 10, 8)]
    records = run(step, requests, pool(replicas=2), faults=(Fault(3.5, 1, None),))
    # Round robin puts request 1 on replica 1; 3 tokens are out. On replica 0 it goes on at the boundary at 4.
    assert tokens(records) == [[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 5, 6, 7, 8, 9]]
    assert column(records, "attempts") == [1, 2]
    assert column(records, "replica") == [0, 0]
    crashed = records.segments["cause"] == Cause.CRASHED
    assert records.segments["end_s"][crashed].tolist() == [3.5]
    assert records.stretches["prefill_tokens"].sum() == 10 + 10 + 13
    assert records.replicas[1].down == ((3.5, records.end_s),)


def test_held_until_somebody_is_up_again(step: str) -> None:
    requests = [request(0, 0, 10, 4), request(1, 3, 10, 1)]
    records = run(step, requests, faults=(Fault(2.5, 0, 10.0),))
    assert tokens(records) == [[1, 2, 13.5, 14.5], [13.5]]
    assert column(records, "placed_s") == [0, 12.5]
    assert column(records, "attempts") == [2, 1]
    assert records.replicas[0].down == ((2.5, 12.5),)


def test_never_up_again_is_unfinished(step: str) -> None:
    records = run(step, [request(0, 0, 10, 4), request(1, 3, 10, 1)], faults=(Fault(2.5, 0),))
    assert column(records, "outcome") == [UNFINISHED, UNFINISHED]
    assert column(records, "generated_tokens") == [2, 0]


def test_a_run_that_is_stopped_counts_who_is_left(step: str) -> None:
    records = run(step, [request(0, 0, 10, 9), request(1, 0.5, 10, 1), request(2, 9, 1, 1)], until_s=3.25)
    assert column(records, "outcome") == [UNFINISHED, FINISHED]
    assert column(records, "generated_tokens") == [3, 1]
    assert column(records, "end_s") == [3.25, 2]


# Clients that give up.


def test_time_outs(step: str) -> None:
    requests = [
        request(0, 0, 10, 9, timeout_s=4.5),  # decodes; goes at the boundary at 5
        request(1, 0.1, 10, 9, timeout_s=2.0),  # waits for the seat
        request(2, 0.2, 10, 9, timeout_s=1.5),  # is held, there being a window of 2
        request(3, 0.3, 10, 2),
    ]
    records = run(step, requests, pool(max_num_seqs=1), window=2)
    assert column(records, "outcome") == [CANCELLED, CANCELLED, CANCELLED, FINISHED]
    assert column(records, "end_s") == pytest.approx([4.5, 2.1, 1.7, 7])
    assert column(records, "generated_tokens") == [5, 0, 0, 2]
    assert column(records, "placed_s") == pytest.approx([0, 0.1, None, 2.1], nan_ok=True)
    assert column(records, "admitted_s") == [0, None, None, 5]


def test_a_time_out_during_prefill(step: str) -> None:
    requests = [request(0, 0, 100, 2, timeout_s=1.5), request(1, 0, 5, 1)]
    records = run(step, requests, pool(max_num_batched_tokens=10, max_num_seqs=1))
    assert column(records, "outcome") == [CANCELLED, FINISHED]
    assert column(records, "first_token_s") == [None, 3]


def test_who_gave_up_gets_no_first_token_afterwards(step: str) -> None:
    # The token is made at 1, and would be with the client at 1.5.
    records = run(step, [request(0, 0, 10, 9, timeout_s=1.25)], pool(response_overhead_s=0.5))
    assert column(records, "outcome") == [CANCELLED]
    assert column(records, "first_token_s") == [None]


def test_who_is_done_cannot_give_up(step: str) -> None:
    records = run(step, [request(0, 0, 10, 2, timeout_s=2.0), request(1, 0, 10, 2, timeout_s=1.9)])
    assert column(records, "outcome") == [FINISHED, CANCELLED]


# What is turned away.


def test_full_queues_reject(step: str) -> None:
    requests = [request(i, 0.1 * i, 10, 3) for i in range(5)]
    records = run(step, requests, pool(max_num_seqs=1, max_num_waiting=2))
    assert column(records, "outcome") == [FINISHED, FINISHED, FINISHED, REJECTED, REJECTED]
    assert column(records, "replica") == [0, 0, 0, -1, -1]


def test_a_window_holds_instead(step: str) -> None:
    requests = [request(i, 0.1 * i, 10, 3) for i in range(5)]
    records = run(step, requests, pool(max_num_seqs=1, max_num_waiting=2), window=2)
    assert column(records, "outcome") == [FINISHED] * 5
    assert column(records, "placed_s") == pytest.approx([0, 0.1, 3, 6, 9])


def test_longer_than_any_memory(step: str) -> None:
    two = (pool("small", kv_capacity_tokens=64), pool("large", kv_capacity_tokens=128))
    requests = [request(0, 0, 100, 29), request(1, 0, 100, 30), request(2, 0, 64, 1), request(3, 0, 60, 6)]
    records = run(step, requests, *two)
    # The last token needs no KV: 128 tokens of KV are 129 of prompt and output.
    assert column(records, "outcome") == [FINISHED, REJECTED, FINISHED, FINISHED]
    assert column(records, "replica")[0] == column(records, "replica")[3] == 1


@pytest.mark.parametrize("scrape", [Scrape(), Scrape(1.0, 0.5)], ids=["fresh", "scraped"])
def test_longer_than_any_memory_while_others_are_held(step: str, scrape: Scrape) -> None:
    requests = [request(i, 0.5 * i, 1, 2) for i in range(3)]
    requests += [request(3, 1.5, 600, 96), request(4, 1.6, 1, 2)]
    records = run(step, requests, pool(kv_capacity_tokens=600), window=2, scrape=scrape, until_s=50.0)
    assert column(records, "outcome") == [FINISHED, FINISHED, FINISHED, REJECTED, FINISHED]


def test_longer_than_the_context(step: str) -> None:
    records = run(step, [request(0, 0, 99_999, 1), request(1, 0, 100_000, 1)])
    assert column(records, "outcome") == [FINISHED, REJECTED]


# Phases.


@pytest.mark.parametrize(("reasoning", "answer_s"), [(0, 1.0), (3, 4.0), (4, 5.0), (5, None)])
def test_the_answer_begins_with_its_first_token(step: str, reasoning: int, answer_s: float | None) -> None:
    records = run(step, [request(0, 0, 10, 5, reasoning_tokens=reasoning)])
    assert column(records, "answer_s") == [answer_s]
    assert column(records, "first_token_s") == [1]
    assert column(records, "end_s") == [5]


# What routers see, and what they may answer.


class Looking:
    """Routes to replica 0, and writes down what it sees of it."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, int, int, int, int]] = []

    def route(self, request: RequestView, view: FleetView) -> Placement:
        r = view.replicas[0]
        self.seen.append((view.now, r.num_in_flight, r.num_running, r.prefill_tokens_left, r.tokens_generated))
        return Placement(0)


ARRIVALS = [request(0, 0, 10, 9), request(1, 2.5, 10, 9), request(2, 2.75, 10, 9), request(3, 4.5, 10, 1)]


def test_views_are_of_the_last_completed_iteration(step: str) -> None:
    looking = Looking()
    run(step, ARRIVALS, router=lambda: looking)
    assert looking.seen == [(0, 0, 0, 0, 0), (2.5, 1, 1, 0, 2), (2.75, 2, 1, 10, 2), (4.5, 3, 3, 0, 6)]


def test_scraped_views_are_stale_but_for_what_was_placed(step: str) -> None:
    looking = Looking()
    run(step, ARRIVALS, router=lambda: looking, scrape=Scrape(2.0, 0.6, 0.0))
    # Scrapes at 0 (before anything is scheduled), 2 and 4 are seen at 0.6, 2.6 and 4.6: who runs is known from these.
    assert looking.seen == [(0, 0, 0, 0, 0), (2.5, 1, 0, 0, 2), (2.75, 2, 1, 10, 2), (4.5, 3, 1, 0, 6)]


class Nowhere:
    """Routes to a replica that does not exist."""

    def route(self, request: RequestView, view: FleetView) -> Placement:
        return Placement(7)


def test_a_replica_that_was_not_offered(step: str) -> None:
    with pytest.raises(HeadwayError, match=r"Nowhere chose replica 7; it was offered \[0, 1\]"):
        run(step, ARRIVALS, pool(replicas=2), router=Nowhere)


def test_a_fault_of_a_replica_that_does_not_exist(step: str) -> None:
    with pytest.raises(HeadwayError, match=r"faults\[0\].replica: 2; the fleet has 0 to 1"):
        run(step, ARRIVALS, pool(replicas=2), faults=(Fault(1.0, 2),))


def test_no_replicas(step: str) -> None:
    with pytest.raises(HeadwayError, match="no replicas"):
        run(step, ARRIVALS, pool(replicas=0))


def test_held_for_a_replica_that_never_comes_back(step: str) -> None:
    # The only replica that could hold it is gone for good: scraping on would never end.
    pools = (pool("small", kv_capacity_tokens=64), pool("large", kv_capacity_tokens=128))
    scrape, faults = Scrape(1.0, 0.5), (Fault(0.5, 1),)
    records = run(step, [request(0, 1.0, 100, 20)], *pools, window=4, scrape=scrape, faults=faults)
    assert column(records, "outcome") == [Outcome.UNFINISHED]


def test_a_crash_and_recovery_at_a_boundary(step: str) -> None:
    # Down for no time, at the instant at which the replica was about to decide: it decides once, within its budget.
    requests = [request(i, 0.0, 6, 3) for i in range(6)]
    engine = pool(max_num_batched_tokens=8, max_num_seqs=8)
    records = run(step, requests, engine, faults=(Fault(2.0, 0, 0.0),))
    assert set(column(records, "outcome")) == {Outcome.FINISHED}
    assert (records.stretches["num_decode"] + records.stretches["prefill_tokens"]).max() <= 8


def test_the_way_to_the_client_is_that_of_the_replica_that_finished(step: str) -> None:
    far = pool("far", response_overhead_s=0.5)
    near = pool("near")
    records = run(step, [request(0, 0.0, 4, 8)], far, near, faults=(Fault(2.5, 0),))
    assert column(records, "replica") == [1]
    ends = token_times(records, [0])[0][-1]
    assert column(records, "end_s") == [ends]


def test_a_request_that_is_paused_while_it_waits_waits_once(step: Any) -> None:
    """It is placed here again at once, as the queue has no limit. A crash then loses each request once."""
    pools, faults = (pool(max_num_seqs=1),), (Fault(5.5, 0, 1.0),)
    scenario = Scenario((request(0, 0, 4, 9), request(1, 1, 4, 2)), pools, line=seconds(1.0), faults=faults)
    cluster = scenario.cluster(step)
    (replica,) = replicas_of(cluster)
    at, seen = replica.timeline.kernel.at, list[int]()
    at(2.5, COMMAND, 0, lambda now, _: replica.pause(replica.batch.queue.requests()[0], now))
    at(4.5, COMMAND, 0, lambda now, _: seen.extend(sorted(live.id for live in replica.view.requests)))
    records = scenario.run(cluster)
    assert seen == [0, 1]
    assert column(records, "preemptions") == [0, 1]
    assert column(records, "attempts") == [2, 2]
    assert column(records, "outcome") == [FINISHED, FINISHED]
