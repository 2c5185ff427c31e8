"""Requests that move, replicas that come and go: by hand, and in anything that can be drawn."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from headway.catalog.costs import costs
from headway.core.decision import Move, Placement
from headway.core.fleet import Fault
from headway.core.record import Cause, MoveOutcome, Outcome, Records
from headway.core.request import Request
from headway.core.view import FleetView, PoolsView, RequestView
from headway.metrics.tokens import token_times
from headway.perf import memory
from headway.perf.copies import NETWORK
from headway.policies.migration.llumnix import LlumnixMigration
from headway.policies.ordering.fcfs import FcfsOrdering
from headway.policies.ordering.tiers import PriorityOrdering
from headway.sim.fabric import Fabric
from headway.sim.kernel import COMMAND, Kernel
from replica_state import assert_empty, assert_sound, replicas_of, watched
from simulation import (
    MODEL,
    Breathing,
    Made,
    Restless,
    Scenario,
    both_steps,
    by_request,
    moves,
    num_examples,
    pool,
    request,
    scenarios,
    seconds,
    times,
)

DONE, ENDED, PREEMPTED, FULL, CRASHED, _, _ = MoveOutcome
BYTES_PER_TOKEN = memory.kv_bytes_per_token(MODEL, 2)
LATENCY_S = costs().kv_transfer[NETWORK].latency_s
TOKENS_PER_S = 16
"""What a replica's network carries, where a test reckons by hand."""


class Planned:
    """Moves at times set beforehand. `interval_s` divides them."""

    interval_s = 0.5

    def __init__(self, *moves: tuple[float, Move]) -> None:
        self._moves = moves

    def moves(self, view: FleetView) -> list[Move]:
        return [move for at_s, move in self._moves if at_s == view.now]

    def at_phase(self, request: RequestView, view: FleetView) -> Move | None:
        return None


class Wanted:
    """As many replicas of the only pool as a plan says, by the time from which on."""

    interval_s = 1.0

    def __init__(self, *plan: tuple[float, int]) -> None:
        self._plan = plan

    def scale(self, view: PoolsView) -> dict[str, int]:
        numbers = [number for at_s, number in self._plan if at_s <= view.now]
        return {view.pools[0].name: numbers[-1]} if numbers else {}


def slow(name: str = "main", **given: Any) -> Any:
    """A pool whose network carries `TOKENS_PER_S`."""
    return pool(name, network_bytes_per_s=TOKENS_PER_S * BYTES_PER_TOKEN, **{"replicas": 2, **given})


def run(requests: Sequence[Request], *pools: Any, step: Any = "stretch", **given: Any) -> Records:
    """One second an iteration; in the end every replica that has not crashed for good is empty."""
    scenario = Scenario(tuple(requests), pools or (slow(),), **{"line": seconds(1.0), **given})
    cluster = watched(scenario.cluster(step), assert_sound)
    records = scenario.run(cluster)
    for replica in replicas_of(cluster):
        assert_empty(replica)
    return records


# By hand.


@both_steps
def test_a_live_move_goes_on_decoding_and_stops_for_the_last_stage_only(step: str) -> None:
    plan = Made(Planned, ((2.5, Move(0, 1, 2)),))
    records = run([request(0, 0, 64, 12)], migration=plan, step=step)
    # 65 tokens at 2.5 s. Stages of 32, sent by 4.5 and 6.5 s, leave 69 - 64; the next boundary is at 7 s, with 70.
    (move,) = moves(records)
    assert (move["start_s"], move["paused_s"], move["outcome"]) == (2.5, 7.0, DONE)
    assert (move["kv_tokens"], move["num_bytes"]) == (70, 70 * BYTES_PER_TOKEN)
    assert move["end_s"] == pytest.approx(7 + 6 / TOKENS_PER_S + LATENCY_S)
    assert times(records) == pytest.approx([*range(1, 8), *(move["end_s"] + k for k in range(1, 6))])


@both_steps
def test_a_request_that_stops_waits_for_the_whole_copy(step: str) -> None:
    plan = Made(Planned, ((2.5, Move(0, 1, None)),))
    records = run([request(0, 0, 64, 12)], migration=plan, step=step)
    (move,) = moves(records)
    assert (move["paused_s"], move["kv_tokens"]) == (3.0, 66)
    assert move["end_s"] == pytest.approx(3 + 66 / TOKENS_PER_S + LATENCY_S)
    assert times(records) == pytest.approx([1, 2, 3, *(move["end_s"] + k for k in range(1, 10))])


@both_steps
def test_one_that_waits_moves_for_nothing(step: str) -> None:
    plan = Made(Planned, ((2.5, Move(1, 1, 2)),))
    only_first = {"router": Made(Pinned), "migration": plan}
    records = run([request(0, 0, 4, 9), request(1, 1, 4, 2)], slow(max_num_seqs=1), step=step, **only_first)
    (move,) = moves(records)
    assert (move["start_s"], move["end_s"], move["num_bytes"], move["outcome"]) == (2.5, 2.5, 0.0, DONE)
    assert times(records, 1) == [3.5, 4.5]


class Pinned:
    """All to the first replica."""

    def route(self, request: RequestView, view: FleetView) -> Placement:
        return Placement(min(replica.id for replica in view.replicas))


@both_steps
@pytest.mark.parametrize("stage_blocks", [None, 1])
def test_a_target_without_room_leaves_the_request_where_it_is(step: str, stage_blocks: int | None) -> None:
    pools = slow(replicas=1), slow("little", replicas=1, kv_capacity_tokens=96, host_memory_bytes=0.0)
    plan = Made(Planned, ((2.5, Move(0, 1, stage_blocks)),))
    # 42 tokens at the target leave 3 of its 6 blocks; the copy needs 4.
    requests = [request(0, 0, 60, 9), request(1, 0, 40, 40, timeout_s=30.0)]
    records = run(requests, *pools, migration=plan, router=Made(ById), step=step)
    (move,) = moves(records)
    assert move["outcome"] == FULL
    assert times(records) == list(range(1, 10)), "a move that comes to nothing costs no token"


class ById:
    """Request i to replica i."""

    def route(self, request: RequestView, view: FleetView) -> Placement:
        return Placement(request.id % 2)


@both_steps
def test_one_that_ends_first_is_not_moved(step: str) -> None:
    plan = Made(Planned, ((2.5, Move(0, 1, 1)),))
    records = run([request(0, 0, 200, 5)], migration=plan, step=step)
    assert [move["outcome"] for move in moves(records)] == [ENDED]
    assert times(records) == [1, 2, 3, 4, 5]


@both_steps
@pytest.mark.parametrize("stage_blocks", [None, 1])
@pytest.mark.parametrize("give_up_s", [3.25, 4.25])
def test_a_client_that_gives_up_ends_the_copy(step: str, stage_blocks: int | None, give_up_s: float) -> None:
    plan = Made(Planned, ((2.5, Move(0, 1, stage_blocks)),))
    records = run([request(0, 0, 200, 50, timeout_s=give_up_s)], migration=plan, step=step)
    assert [move["outcome"] for move in moves(records)] == [ENDED]
    assert records.requests["outcome"].tolist() == [Outcome.CANCELLED]


@both_steps
def test_one_that_gives_way_for_want_of_memory_is_not_moved(step: str) -> None:
    # 6 blocks: two of 33 tokens are in; when both have grown beyond 48, the later one gives way.
    requests = [request(0, 0, 33, 30), request(1, 0, 33, 30)]
    pools = slow(replicas=1, kv_capacity_tokens=96), slow("other", replicas=1)
    fast = [msgspec.structs.replace(each, network_bytes_per_s=BYTES_PER_TOKEN) for each in pools]
    plan = Made(Planned, ((10.5, Move(1, 1, 1)),))
    records = run(requests, *fast, migration=plan, router=Made(Pinned), ordering=FcfsOrdering, step=step)
    assert [move["outcome"] for move in moves(records)] == [PREEMPTED]
    assert by_request(records.requests)["preemptions"].tolist() == [0, 1]


@both_steps
@pytest.mark.parametrize("stage_blocks", [None, 1])
def test_a_target_that_crashes_leaves_the_request_at_its_source(step: str, stage_blocks: int | None) -> None:
    plan = Made(Planned, ((2.5, Move(0, 1, stage_blocks)),))
    records = run([request(0, 0, 200, 9)], migration=plan, faults=(Fault(3.75, 1, 100.0),), step=step)
    assert [move["outcome"] for move in moves(records)] == [CRASHED]
    assert records.requests["attempts"].tolist() == [1]
    # Stopped at 3 s, it is back in its batch when the target is gone.
    stopped = [1, 2, 3, *(3.75 + k for k in range(1, 7))]
    assert times(records) == (stopped if stage_blocks is None else list(range(1, 10)))


class Quarterly(Planned):
    interval_s = 0.25


@both_steps
def test_a_move_that_follows_an_abandoned_one_does_not_stop_the_request_for_it(step: str) -> None:
    """The first move would stop the request at 3 s; its target is gone by then, and the second one has begun."""
    plan = Made(Quarterly, ((2.25, Move(0, 1, None)), (2.5, Move(0, 2, 2))))
    faults = (Fault(2.375, 1, 100.0),)
    records = run([request(0, 0, 64, 12)], slow(replicas=3), migration=plan, faults=faults, step=step)
    first, second = moves(records)
    assert (first["outcome"], second["outcome"]) == (CRASHED, DONE)
    assert (second["start_s"], second["paused_s"], second["kv_tokens"]) == (2.5, 7.0, 70)
    assert times(records) == pytest.approx([*range(1, 8), *(second["end_s"] + k for k in range(1, 6))])


@both_steps
@pytest.mark.parametrize("stage_blocks", [None, 1])
def test_a_source_that_crashes_loses_the_cache_but_no_token(step: str, stage_blocks: int | None) -> None:
    plan = Made(Planned, ((2.5, Move(0, 1, stage_blocks)),))
    records = run([request(0, 0, 200, 9)], migration=plan, faults=(Fault(3.75, 0, 100.0),), step=step)
    assert [move["outcome"] for move in moves(records)] == [CRASHED]
    assert times(records) == [1, 2, 3, *(3.75 + k for k in range(1, 7))]
    assert records.requests["replica"].tolist() == [1]


@both_steps
def test_two_copies_on_one_link_take_turns_of_half_of_it(step: str) -> None:
    plan = Made(Planned, ((2.5, Move(0, 1, None)), (2.5, Move(1, 2, None))))
    requests = [request(0, 0, 62, 9), request(1, 0, 30, 9)]
    records = run(requests, slow(replicas=3), migration=plan, router=Made(Pinned), step=step)
    # 64 and 32 tokens from 3 s on at 8 tokens a second each, until the shorter is there, 4 s later.
    first, second = sorted(moves(records), key=lambda move: -move["kv_tokens"])
    assert second["end_s"] == pytest.approx(3 + LATENCY_S + 32 / 8)
    assert first["end_s"] == pytest.approx(3 + LATENCY_S + 32 / 8 + 32 / 16)


# The fabric.


def sent(flows: Sequence[tuple[float, int, int, float]], capacity: Callable[[int], float]) -> list[float]:
    """When each flow (start, source, target, bytes) has arrived, as the fabric has it."""
    kernel, ends = Kernel(), [float("nan")] * len(flows)
    fabric = Fabric(kernel, capacity, 0.0)

    def begin(now: float, i: int) -> None:
        _, source, target, num_bytes = flows[i]
        fabric.send(i, source, target, num_bytes, now, lambda end_s: ends.__setitem__(i, end_s))

    for i, (start_s, *_) in enumerate(flows):
        kernel.at(start_s, COMMAND, -1 - i, begin, i)
    kernel.run()
    return ends


def filled(flows: Sequence[tuple[float, int, int, float]], capacity: Callable[[int], float]) -> list[Fraction]:
    """The same, all flows looked at anew at every start and end, in exact arithmetic."""
    left = {i: Fraction(flow[3]) for i, flow in enumerate(flows)}
    starts = [Fraction(flow[0]) for flow in flows]
    ends, now = [Fraction(0)] * len(flows), Fraction(0)
    while left:
        active = [i for i in left if starts[i] <= now]
        rate = {}
        for i in active:
            _, source, target, _ = flows[i]
            share = [sum(flows[j][end] == flows[i][end] for j in active) for end in (1, 2)]
            rate[i] = min(Fraction(capacity(source)) / share[0], Fraction(capacity(target)) / share[1])
        until = [now + left[i] / rate[i] for i in active] + [starts[i] for i in left if starts[i] > now]
        step = min(until) - now
        now += step
        for i in active:
            left[i] -= rate[i] * step
            if not left[i]:
                del left[i]
                ends[i] = now
    return ends


def test_flows_by_hand() -> None:
    full = lambda replica: 100.0  # noqa: E731
    assert sent([(0, 0, 1, 100)], full) == [1.0]
    assert sent([(0, 0, 1, 100), (0.5, 0, 2, 100)], full) == [1.5, 2.0], "what one sends is shared"
    assert sent([(0, 0, 2, 100), (0.5, 1, 2, 100)], full) == [1.5, 2.0], "what one receives is shared"
    assert sent([(0, 0, 1, 100), (0, 1, 0, 100), (0, 2, 3, 100)], full) == [1.0, 1.0, 1.0], "both ways at once"
    assert sent([(0, 0, 1, 100), (0, 0, 2, 100)], lambda replica: (100.0, 10.0, 100.0)[replica]) == [10.0, 2.0]


@settings(max_examples=num_examples(100), deadline=None, derandomize="HEADWAY_FUZZ_EXAMPLES" not in os.environ)
@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.integers(0, 3), st.integers(0, 3), st.integers(1, 300)),
        min_size=1,
        max_size=8,
    ),
    st.lists(st.sampled_from((8.0, 16.0, 64.0)), min_size=4, max_size=4),
)
def test_flows_fill_as_in_exact_arithmetic(flows: list[Any], capacities: list[float]) -> None:
    there = [(start / 4, source, (source + 1 + target % 3) % 4, size) for start, source, target, size in flows]
    assert sent(there, capacities.__getitem__) == pytest.approx(
        [float(f) for f in filled(there, capacities.__getitem__)]
    )


def test_flows_beside_each_other_need_few_events() -> None:
    """Every start and end changes the ends of all flows of a source; not each of them gets a new event."""
    kernel, ends = Kernel(), dict[int, float]()
    fabric = Fabric(kernel, lambda replica: 100.0, 0.0)
    for i in range(50):
        fabric.send(i, 0, 1 + i % 5, 100.0 + i, 0.01 * i, lambda end_s, i=i: ends.__setitem__(i, end_s))  # type: ignore[misc]
    kernel.run()
    assert list(ends) == list(range(50)), "the shorter end first"
    assert kernel._sequence <= 4 * 50


# Replicas come and go.


@pytest.mark.parametrize("migration", [None, Made(LlumnixMigration, (0.5,))])
def test_a_drained_replica_ends_empty_and_nobody_fails(migration: Any) -> None:
    requests = [request(i, 0.25 * i, 60, 30) for i in range(40)]
    records = run(requests, slow(min_replicas=1), migration=migration, scaler=Made(Wanted, ((5.0, 1),)))
    assert (records.requests["outcome"] == Outcome.FINISHED).all()
    (gone,) = [replica for replica in records.replicas if replica.up[-1][1] < records.end_s]
    of = records.segments["replica"] == gone.id
    left_s = records.segments["end_s"][of].max()
    assert records.segments["enqueued_s"][of].max() <= 5.0, "it gets nobody new"
    if migration is None:
        assert gone.up[-1][1] == left_s, "it is given back when its last request has ended"
    else:
        away = records.moves["source"] == gone.id
        assert gone.up[-1][1] == max(left_s, records.moves["end_s"][away].max())
        assert left_s < 20.0 < records.end_s, "and that is sooner where they move away"


@pytest.mark.parametrize("start_s", [0.5, 7.25])
def test_a_replica_serves_when_it_has_started(start_s: float) -> None:
    requests = [request(i, 0.0, 4, 3) for i in range(40)]
    records = run(
        requests, slow(replicas=1, start_s=start_s, max_num_seqs=2), window=2, scaler=Made(Wanted, ((3.0, 2),))
    )
    new = records.replicas[1]
    assert new.up[0][0] == 3.0, "it is paid for from when it was asked for"
    assert new.down == ((3.0, 3.0 + start_s),)
    of = records.segments["replica"] == 1
    assert records.segments["admitted_s"][of].min() == 3.0 + start_s


def test_a_draining_replica_is_called_back_before_another_starts() -> None:
    requests = [*(request(i, 0.0, 4, 30) for i in range(8)), request(8, 40.0, 4, 5)]
    records = run(requests, slow(start_s=50.0), scaler=Made(Wanted, ((2.0, 1), (5.0, 2))))
    assert len(records.replicas) == 2
    assert all(replica.up == ((0.0, records.end_s),) for replica in records.replicas)


# Anything.


class RestlessButLive(Restless):
    """Nobody stops for a move."""

    def at_phase(self, request: RequestView, view: FleetView) -> None:
        return None


@st.composite
def _restless(draw: st.DrawFn) -> Scenario:
    """Several replicas, and requests that go to and fro among them, with crashes and clients that give up."""
    scenario = draw(scenarios().filter(lambda drawn: bool(drawn.pools) and drawn.cascade is None))
    pools = [msgspec.structs.replace(each, replicas=max(each.replicas, 2)) for each in scenario.pools]
    stages, share = draw(st.sampled_from((None, 1, 3, 50))), draw(st.sampled_from((0.05, 0.3, 0.8)))
    migration = Made(Restless, (draw(st.sampled_from((0.05, 0.25))), stages, share))
    scaler = draw(st.sampled_from((None, Breathing)))
    num = sum(each.replicas for each in pools)
    crashes = (fault for fault in scenario.faults if fault.streams is None)
    faults = tuple(msgspec.structs.replace(fault, replica=fault.replica % num) for fault in crashes)
    return replace(scenario, pools=tuple(pools), combos=(), faults=faults, roles=(), migration=migration, scaler=scaler)


fuzz = settings(
    max_examples=num_examples(30),
    derandomize="HEADWAY_FUZZ_EXAMPLES" not in os.environ,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # to shrink one takes minutes
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@fuzz
@given(_restless())
def test_no_token_is_lost_or_comes_twice_or_out_of_order(scenario: Scenario) -> None:
    records = scenario.play()
    requests = by_request(records.requests)
    for id, when in token_times(records, requests["request"].tolist()).items():
        assert len(when) == requests["generated_tokens"][id]
        assert (np.diff(when) > 0).all()
    finished = requests["outcome"] == Outcome.FINISHED
    assert (requests["generated_tokens"][finished] == records.workload["output_tokens"][finished]).all()
    # A copy is of KV that was there: no more tokens than prompt and answer have.
    longest = records.workload["prompt_tokens"] + records.workload["output_tokens"]
    moved = records.moves["request"]
    assert (records.moves["kv_tokens"] <= longest[moved]).all()
    assert (records.moves["num_bytes"] == records.moves["kv_tokens"] * BYTES_PER_TOKEN).all()
    assert (records.moves["start_s"] <= records.moves["end_s"]).all()


@fuzz
@given(_restless())
def test_whoever_has_moved_is_at_the_target(scenario: Scenario) -> None:
    records = scenario.play()
    requests, segments = by_request(records.requests), records.segments
    rows = moves(records)
    done = [row for row in rows if row["outcome"] == DONE]
    counted = np.bincount([row["request"] for row in done], minlength=len(requests["request"]))
    assert requests["moves"].tolist() == counted.tolist()
    for row in done:
        of = (segments["request"] == row["request"]) & (segments["replica"] == row["target"])
        stays = (segments["enqueued_s"][of] == row["end_s"]).any()
        others = [o for o in rows if o["request"] == row["request"] and o["source"] == row["target"]]
        moves_on = any(o["start_s"] >= row["end_s"] for o in others)
        ends_there = requests["replica"][row["request"]] == row["target"]
        lost = any(fault.replica == row["target"] and fault.at_s >= row["end_s"] for fault in scenario.faults)
        assert row["source"] != row["target"]
        assert stays or moves_on or ends_there or lost


@fuzz
@given(_restless())
def test_both_ends_keep_their_books(scenario: Scenario) -> None:
    cluster = watched(scenario.cluster("exact"), assert_sound)
    records = scenario.run(cluster)
    if scenario.until_s is not None:
        return
    for replica in replicas_of(cluster):
        assert_empty(replica)
    assert not (records.moves["outcome"] == MoveOutcome.UNFINISHED).any()
    # Nobody leaves its batch to move without a move that says so.
    paused = ~np.isnan(records.moves["paused_s"])
    left = records.segments["cause"] == Cause.MOVED
    assert left.sum() == paused.sum()


@fuzz
@given(_restless())
def test_a_live_copy_stands_still_for_no_more_than_a_stage(scenario: Scenario) -> None:
    """A stage, what grows until the boundary, and whoever shares the link: far less than a cache that stops."""
    stage_blocks = 3
    scenario = replace(
        scenario, migration=Made(RestlessButLive, (0.05, stage_blocks, 0.3)), line=seconds(0.02), faults=()
    )
    records = scenario.play()
    slowest = min(each.network_bytes_per_s for each in scenario.pools)
    largest = max(each.engine.block_size_tokens for each in scenario.pools)
    num = len(scenario.requests)
    for row in moves(records):
        if row["outcome"] == DONE and row["paused_s"] == row["paused_s"]:
            tokens = stage_blocks * largest + 2
            alone_s = tokens * BYTES_PER_TOKEN / slowest
            assert row["end_s"] - row["paused_s"] <= LATENCY_S + num * alone_s + 1e-9


def test_priority_is_kept_where_requests_arrive() -> None:
    """Who comes with its KV cache stands in line like anybody."""
    requests = [request(0, 0, 30, 20, tier=1), request(1, 0, 30, 40), request(2, 3.0, 30, 5)]
    plan = Made(Planned, ((2.5, Move(0, 1, None)),))
    records = run(
        requests, slow(max_num_seqs=1), migration=plan, router=Made(ById), ordering=Made(PriorityOrdering, (False,))
    )
    first = by_request(records.requests)["end_s"]
    assert first[0] > first[1]
