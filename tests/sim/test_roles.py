"""Replicas that change roles at run time, and hand-overs that lose their streams. Worked out by hand, and at random."""

from __future__ import annotations

import os
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from headway.core.decision import Placement
from headway.core.errors import HeadwayError
from headway.core.fleet import Combo, Fault, Handover, RoleChange
from headway.core.record import Cause, MoveOutcome, Outcome, Records
from headway.core.view import FleetView, PoolsView, RequestView
from headway.metrics.tokens import token_times
from headway.perf import memory
from headway.policies.routing.cauchy import CauchyRouter
from headway.policies.routing.least_loaded import LeastLoadedRouter
from simulated_combos import BYTES_PER_TOKEN, LATENCY_S, TOKENS_PER_S, combo, ended_at, run
from simulation import (
    MODEL,
    Made,
    Scenario,
    assert_agree,
    both_steps,
    by_request,
    moves,
    num_examples,
    pool,
    request,
    scenarios,
    times,
)

DONE, BROKEN = MoveOutcome.DONE, MoveOutcome.BROKEN
STRICT = Made(CauchyRouter, ("goodput", "strict"))


def finished(records: Records) -> bool:
    """All of them, each at the first attempt."""
    return bool((records.requests["outcome"] == Outcome.FINISHED).all() and (records.requests["attempts"] == 1).all())


def began_at(records: Records) -> list[int]:
    """Where each request's prompt was computed."""
    segments = records.segments
    first = np.unique(segments["request"], return_index=True)[1]
    return segments["replica"][first].tolist()  # type: ignore[no-any-return]


def spans(records: Records) -> list[tuple[Any, Any]]:
    """Of each replica, when it was for prefill and when for decode."""
    return [(replica.for_prefill, replica.for_decode) for replica in records.replicas]


# Roles.


@both_steps
def test_two_for_prefill_become_one_and_two_for_decode(step: str) -> None:
    """2P1D: from 10 s on replica 1 decodes what replica 0 prefills. 16 tokens are a second on the network."""
    requests = [request(i, 4.0 * i, 16, 3) for i in range(6)]
    records = run(requests, combo(2, 1), roles=(RoleChange(10.0, 1, "decode"),), step=step)
    assert finished(records)
    assert began_at(records) == [0, 1, 0, 0, 0, 0]
    assert ended_at(records) == [2, 2, 2, 1, 2, 1], "in turn: after 2 comes 1"
    end_s = records.end_s
    assert spans(records) == [(((0.0, end_s),), ()), (((0.0, 10.0),), ((10.0, end_s),)), ((), ((0.0, end_s),))]


@both_steps
def test_what_runs_goes_on_and_what_waits_is_prefilled_elsewhere(step: str) -> None:
    """Seats for one. Replica 1 prefills request 1 until 4 s; 3 waits for it. At 2.5 s it is for decode."""
    requests = [request(0, 0, 32, 2), request(1, 0, 64, 4), request(2, 0, 32, 2), request(3, 0, 16, 2)]
    like = combo(2, 2, max_num_seqs=1, max_num_batched_tokens=16)
    records = run(requests, like, roles=(RoleChange(2.5, 1, "decode"),), step=step)
    assert finished(records)
    assert began_at(records) == [0, 1, 0, 0]
    assert times(records, 1) == [4, 5, 6, 7], "decoded in place: there is nobody to give it to any more"
    again = [move for move in moves(records) if move["num_bytes"] == 0]
    assert [(move["request"], move["source"], move["target"], move["end_s"]) for move in again] == [(3, 1, 0, 2.5)]
    assert times(records, 3)[0] == 5.0, "2 s each for 0 and 2, then 1 s"


@both_steps
def test_who_waits_where_a_prefill_replica_now_does_both_stays(step: str) -> None:
    """Seats for one: request 1 waits, and is then decoded where it was prefilled. Request 0 had begun: it is, too."""
    requests = [request(0, 0, 48, 3), request(1, 0, 16, 3)]
    like = combo(1, 2, max_num_seqs=1, max_num_batched_tokens=16)
    records = run(requests, like, roles=(RoleChange(1.5, 0, "mixed"),), step=step)
    assert finished(records) and moves(records) == []
    assert times(records, 0) == [3, 4, 5] and times(records, 1) == [6, 7, 8]


@both_steps
def test_who_waits_at_a_decode_replica_that_now_prefills_is_handed_over(step: str) -> None:
    """1P2D, requests in place at 1; at 0.5 s that one prefills, and 2 decodes the one which had not begun."""

    class InPlace(CauchyRouter):
        def route(self, request: RequestView, view: FleetView) -> Placement:
            return Placement(1)

    requests = [request(0, 0, 16, 4), request(1, 0, 16, 4)]
    like = combo(1, 2, max_num_seqs=1)
    records = run(requests, like, router=InPlace, roles=(RoleChange(0.5, 1, "prefill"),), step=step)
    assert finished(records)
    assert times(records, 0) == [1, 2, 3, 4]
    (move,) = moves(records)
    assert (move["request"], move["source"], move["target"], move["paused_s"]) == (1, 1, 2, 5.0)


@both_steps
def test_back_to_aggregated_nothing_is_handed_over(step: str) -> None:
    roles = (RoleChange(10.0, 0, "mixed"), RoleChange(10.0, 1, "mixed"))
    requests = [request(i, 5.0 * i + 0.5, 16, 3) for i in range(6)]
    records = run(requests, roles=roles, router=LeastLoadedRouter, step=step)
    assert finished(records)
    assert {move["request"] for move in moves(records)} == {0, 1}
    assert spans(records) == [(((0.0, 10.0),), ()), ((), ((0.0, 10.0),))]


@both_steps
def test_aggregated_replicas_can_be_made_a_pair_and_taken_apart(step: str) -> None:
    parts = (pool("a", replicas=2, network_bytes_per_s=TOKENS_PER_S * BYTES_PER_TOKEN),)
    roles = (
        RoleChange(10.0, 0, "prefill"),
        RoleChange(10.0, 1, "decode"),
        RoleChange(20.0, 0, "mixed"),
        RoleChange(20.0, 1, "mixed"),
    )
    requests = [request(i, 2.0 * i + 0.5, 16, 3) for i in range(15)]
    records = run(requests, Combo("c", parts), roles=roles, router=STRICT, step=step)
    assert finished(records)
    assert [move["request"] for move in moves(records)] == [5, 6, 7, 8, 9]
    assert spans(records) == [(((10.0, 20.0),), ()), ((), ((10.0, 20.0),))]


@both_steps
@pytest.mark.parametrize("changes", [0, 1])
def test_a_combo_left_without_a_role_is_covered_for(step: str, changes: int) -> None:
    """1P1D: both prefill, or both decode, so both do both. When the other is changed too, they are a pair again."""
    roles = (RoleChange(10.0, changes, ("decode", "prefill")[changes]), RoleChange(20.0, 1 - changes, "mixed"))
    requests = [request(i, 2.0 * i + 0.5, 16, 3) for i in range(15)]
    records = run(requests, roles=roles, step=step)
    assert finished(records)
    assert {move["request"] for move in moves(records)}.isdisjoint(range(5, 10)), "from 10 s to 20 s in place"
    of_changed = spans(records)[changes]
    assert (of_changed[changes], of_changed[1 - changes]) == (((0.0, 10.0),), ((20.0, records.end_s),))


@both_steps
def test_nothing_new_while_it_switches(step: str) -> None:
    """2P1D: replica 1 is changed at 5 s and takes 6 s. What it had it ends."""
    requests = [request(i, 1.0 * i + 0.25, 16, 4) for i in range(20)]
    records = run(requests, combo(2, 1), roles=(RoleChange(5.0, 1, "decode", 6.0),), step=step)
    assert finished(records)
    segments = records.segments
    there = segments["replica"] == 1
    assert not (there & (segments["enqueued_s"] >= 5.0) & (segments["enqueued_s"] < 11.0)).any()
    assert (there & (segments["enqueued_s"] >= 11.0)).any()
    assert 1 not in [move["target"] for move in moves(records) if move["start_s"] < 11.0]


@both_steps
def test_all_switch_at_once_and_requests_wait_in_front(step: str) -> None:
    roles = (RoleChange(1.0, 0, "decode", 4.0), RoleChange(1.0, 1, "prefill", 6.0))
    requests = [request(0, 0, 16, 2), request(1, 2.0, 16, 2), request(2, 8.0, 16, 2)]
    records = run(requests, roles=roles, step=step)
    assert finished(records)
    assert by_request(records.requests)["placed_s"].tolist() == [0.0, 5.0, 8.0]
    assert began_at(records) == [0, 0, 1], "alone from 5 s to 7 s, replica 0 does both"
    assert spans(records)[0] == (((0.0, 1.0),), ((7.0, records.end_s),))


@both_steps
def test_a_role_that_changes_while_the_replica_is_down_counts_when_it_is_back(step: str) -> None:
    requests = [request(i, 2.0 * i + 0.5, 16, 3) for i in range(15)]
    like = combo(2, 1)
    records = run(requests, like, faults=(Fault(5.0, 1, 10.0),), roles=(RoleChange(8.0, 1, "decode"),), step=step)
    assert (records.requests["outcome"] == Outcome.FINISHED).all()
    assert spans(records)[1][1] == ((15.0, records.end_s),)


@both_steps
def test_nobody_is_turned_away_for_a_switch(step: str) -> None:
    """Queues of two, all full: who waits at the one that is for decode now stays and is served there."""
    requests = [request(i, 0.25 * (i > 1), 16, 3) for i in range(6)]
    like = combo(2, 1, max_num_seqs=1, max_num_waiting=2)
    records = run(requests, like, router=LeastLoadedRouter, roles=(RoleChange(0.5, 1, "decode"),), step=step)
    assert finished(records)
    began = began_at(records)
    assert sorted(began) == [0, 0, 0, 1, 1, 1]
    handed = {move["request"] for move in moves(records)}
    assert handed == {id for id, replica in enumerate(began) if replica == 0}, "what replica 1 prefills it decodes"


def test_the_fleet_has_no_such_replica() -> None:
    with pytest.raises(HeadwayError, match=r"roles\[0\].replica: 2; the fleet has 0 to 1"):
        run([request(0, 0, 16, 3)], roles=(RoleChange(1.0, 2, "mixed"),))


# Never more GPUs than there are.


class Wavering:
    """One combo or two, by turns."""

    interval_s = 3.0

    def scale(self, view: PoolsView) -> dict[str, int]:
        return {pool.name: view.random.randint(1, 3) for pool in view.pools}


@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 10**6))
def test_gpus_stay_within_limits_while_roles_change_and_combos_come_and_go(seed: int) -> None:
    """A replica that changes its role holds its GPU on both sides of the change."""
    rng = Random(seed)
    now, requests = 0.0, []
    for id in range(80):
        now += rng.expovariate(0.8)
        requests.append(request(id, now, rng.randint(1, 80), rng.randint(1, 30)))
    roles = tuple(
        RoleChange(
            rng.uniform(0.0, now), rng.randrange(3), rng.choice(("mixed", "prefill", "decode")), rng.choice((0, 4))
        )
        for _ in range(8)
    )
    like = combo(1, 2, start_s=4.0, min_replicas=1)
    limit = rng.choice((6, 7, 9))
    records = run(requests, like, scaler=Wavering, roles=roles, gpu_limits=(("", "gpu", limit),), router=CauchyRouter)
    assert (records.requests["outcome"] == Outcome.FINISHED).all()
    assert len(records.replicas) > 3, "it did scale"
    for at_s in {edge for replica in records.replicas for edge in replica.up[0]}:
        there = [replica for replica in records.replicas if replica.up[0][0] <= at_s < replica.up[0][1]]
        assert sum(replica.num_gpus for replica in there) <= limit
    for replica in records.replicas:
        roles_s = sorted((*replica.for_prefill, *replica.for_decode))
        assert all(end <= start for (_, end), (start, _) in pairwise(roles_s))
        assert all(replica.up[0][0] <= start < end <= replica.up[0][1] for start, end in roles_s)


# Streams.

ONE_STREAM = 4.0
"""Tokens per second of one stream."""


def streamed(mode: Any = "bulk", num_decode: int = 1, **given: Any) -> Combo:
    """A network that carries all, so that streams do not share."""
    handover = Handover(mode, stream_bytes_per_s=ONE_STREAM * BYTES_PER_TOKEN)
    return combo(1, num_decode, handover=handover, network_bytes_per_s=1e6 * BYTES_PER_TOKEN, **given)


@both_steps
def test_a_bulk_hand_over_begins_again(step: str) -> None:
    """32 tokens by 4 a second take from 1 s to 9 s. At 5 s they break, and begin anew half a second later."""
    records = run([request(0, 0, 32, 3)], streamed(), faults=(Fault(5.0, 0, 0.5, streams=1),), step=step)
    broken, done = moves(records)
    assert (broken["outcome"], broken["start_s"], broken["end_s"]) == (BROKEN, 1.0, 5.0)
    assert (done["outcome"], done["start_s"]) == (DONE, 1.0)
    assert done["end_s"] == pytest.approx(5.5 + LATENCY_S + 32 / ONE_STREAM)
    assert times(records) == pytest.approx([1, done["end_s"] + 1, done["end_s"] + 2])
    assert finished(records)


@both_steps
@pytest.mark.parametrize("crashed_end", [0, 1])
def test_layers_that_have_arrived_whole_are_not_sent_again(step: str, crashed_end: int) -> None:
    """A layer of 32 is a token's worth of bytes. 4 went ahead in the second of the prompt; by 5.3 s, 21 have come."""
    faults = (Fault(5.3, crashed_end, 0.5, streams=1),)
    records = run([request(0, 0, 32, 3)], streamed("layerwise"), faults=faults, step=step)
    arrived = 4 + (5.3 - 1 - LATENCY_S) * ONE_STREAM
    assert MODEL.num_layers == 32 and int(arrived) == 21
    _, done = moves(records)
    assert done["end_s"] == pytest.approx(5.8 + LATENCY_S + (32 - 21) / ONE_STREAM)


@both_steps
def test_without_another_try_the_prefill_replica_decodes(step: str) -> None:
    records = run([request(0, 0, 32, 3)], streamed(), faults=(Fault(5.0, 1, None, streams=1),), step=step)
    (broken,) = moves(records)
    assert broken["outcome"] == BROKEN and ended_at(records) == [0] and finished(records)
    assert times(records) == [1, 6, 7], "its cache is still there: nothing is computed again"


@both_steps
@pytest.mark.parametrize("down_s", [0.5, None])
@pytest.mark.parametrize("mode", ["bulk", "layerwise"])
def test_the_other_streams_do_not_notice(step: str, mode: str, down_s: float | None) -> None:
    """Three on the way at once; the oldest breaks."""
    requests = [request(i, 0.0, 16 * (i + 1), 3) for i in range(3)]
    like = streamed(mode, 3)
    calm = run(requests, like, step=step)
    hit = run(requests, like, faults=(Fault(2.5, 0, down_s, streams=1),), step=step)
    assert [move["request"] for move in moves(hit) if move["outcome"] == BROKEN] == [0]
    for id in (1, 2):
        assert times(hit, id) == times(calm, id)
        at = [move for move in moves(hit) if move["request"] == id]
        assert at == [move for move in moves(calm) if move["request"] == id]
    assert times(hit, 0)[1] != times(calm, 0)[1]
    assert finished(hit)


@both_steps
def test_so_many_break_and_no_more_and_only_of_this_replica(step: str) -> None:
    requests = [request(i, 0.0, 32, 3) for i in range(4)]
    like = streamed("bulk", 2)
    faults = (Fault(5.0, 1, 0.5, streams=9),)
    records = run(requests, like, faults=faults, step=step)
    target = {move["request"]: move["target"] for move in moves(records) if move["outcome"] == DONE}
    broken = [move["request"] for move in moves(records) if move["outcome"] == BROKEN]
    assert sorted(broken) == [id for id, replica in target.items() if replica == 1] == [0, 2]
    two = run(requests, like, faults=(Fault(5.0, 0, 0.5, streams=2),), step=step)
    assert sorted(move["request"] for move in moves(two) if move["outcome"] == BROKEN) == [0, 1]


@both_steps
def test_where_nothing_is_on_the_way_nothing_breaks(step: str) -> None:
    requests = [request(0, 0, 32, 30)]
    calm = run(requests, streamed(), step=step)
    faults = (Fault(0.5, 0, 0.5, streams=1), Fault(20.0, 0, None, streams=1), Fault(20.0, 1, None, streams=1))
    hit = run(requests, streamed(), faults=faults, step=step)
    assert times(hit) == times(calm) and moves(hit) == moves(calm)


@both_steps
@pytest.mark.parametrize("crashes", [0, 1])
def test_a_crash_while_streams_are_set_up_again(step: str, crashes: int) -> None:
    faults = (Fault(3.0, 0, 4.0, streams=1), Fault(5.0, crashes, 50.0))
    records = run([request(0, 0, 32, 3)], streamed(), faults=faults, step=step)
    outcomes = [move["outcome"] for move in moves(records)]
    assert outcomes == [BROKEN, MoveOutcome.CRASHED]
    assert ended_at(records) == [1 - crashes]
    assert times(records) == pytest.approx([1, 6, 7])


@both_steps
def test_one_that_breaks_twice_and_one_that_gives_up_meanwhile(step: str) -> None:
    requests = [request(0, 0, 32, 3), request(1, 0, 32, 3, timeout_s=4.5)]
    faults = (Fault(3.0, 0, 2.0, streams=2), Fault(4.0, 0, 2.0, streams=2))
    records = run(requests, streamed("bulk", 2), faults=faults, step=step)
    of_first = [move for move in moves(records) if move["request"] == 0]
    assert [move["outcome"] for move in of_first] == [BROKEN, BROKEN, DONE]
    assert of_first[-1]["end_s"] == pytest.approx(6.0 + LATENCY_S + 32 / ONE_STREAM)
    assert by_request(records.requests)["outcome"].tolist() == [Outcome.FINISHED, Outcome.CANCELLED]


# At random.

fuzz = settings(
    max_examples=num_examples(20),
    derandomize="HEADWAY_FUZZ_EXAMPLES" not in os.environ,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # to shrink one takes minutes
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
changing = scenarios().filter(lambda drawn: bool(drawn.combos) and bool(drawn.roles or drawn.faults))


@pytest.mark.ci
@fuzz
@given(changing)
def test_stretches_agree_with_steps_and_nobody_is_lost(scenario: Scenario) -> None:
    records = assert_agree(scenario)
    assert sorted(records.requests["request"].tolist()) == list(range(len(records.workload["arrival_s"])))
    if all(fault.streams is not None for fault in scenario.faults):
        assert (records.requests["attempts"] == 1).all()
        unfinished = records.requests["outcome"] == Outcome.UNFINISHED
        assert scenario.until_s is not None or not unfinished.any()
    for replica in records.replicas:
        ((start_s, end_s),) = replica.up
        edges = sorted((*replica.for_prefill, *replica.for_decode))
        assert all(start_s <= low < high <= end_s for low, high in edges)
        assert all(high <= low for (_, high), (low, _) in pairwise(edges)), "one role at a time"


@pytest.mark.ci
@fuzz
@given(changing)
def test_every_token_comes_once_and_every_hand_over_is_accounted_for(scenario: Scenario) -> None:
    assume(scenario.cascade is None)
    records = scenario.play()
    requests = by_request(records.requests)
    for id, when in token_times(records, requests["request"].tolist()).items():
        assert len(when) == requests["generated_tokens"][id]
        assert (np.diff(when) > 0).all()
    rows = moves(records)
    for row in rows:
        assert row["num_bytes"] == row["kv_tokens"] * memory.kv_bytes_per_token(MODEL, 2)
    # One that broke was taken up again, from the same start, or its request went on where it was.
    for at, row in enumerate(rows):
        later = [other for other in rows[at + 1 :] if other["request"] == row["request"]]
        if row["outcome"] == BROKEN and later and later[0]["start_s"] == row["start_s"]:
            assert (later[0]["source"], later[0]["target"]) == (row["source"], row["target"])
            assert later[0]["end_s"] >= row["end_s"]
    # Who is out of its batch for a move is so once, however often its streams break.
    once = {(row["request"], row["paused_s"]) for row in rows if not np.isnan(row["paused_s"])}
    assert (records.segments["cause"] == Cause.MOVED).sum() == len(once)
    assert not (records.moves["outcome"] == BROKEN).any() or any(fault.streams for fault in scenario.faults)
