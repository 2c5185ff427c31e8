"""Combos in a simulation: caches handed over, roles covered for, combos that come and go. Worked out by hand."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.decision import Placement
from headway.core.fleet import Combo, Fault, Handover, Pool
from headway.core.record import MoveOutcome, Outcome, Records
from headway.core.view import FleetView, PoolsView, RequestView
from headway.perf import copies
from headway.policies.routing.cauchy import CauchyRouter
from headway.policies.routing.least_loaded import LeastLoadedRouter
from headway.policies.scaling.combos import CombosScaler
from simulated_combos import BYTES_PER_TOKEN, LATENCY_S, TOKENS_PER_S, combo, ended_at, run
from simulation import GPU, MODEL, Made, both_steps, by_request, moves, pool, request, times

DONE, ENDED, PREEMPTED, FULL, CRASHED, _, BROKEN = MoveOutcome


# Handing over.


@both_steps
@pytest.mark.parametrize(
    ("handover", "takes_s"),
    [
        (Handover(), 64 / 16),
        (Handover(degree=2, stream_bytes_per_s=4 * BYTES_PER_TOKEN), 64 / 8),
        (Handover(degree=8, stream_bytes_per_s=4 * BYTES_PER_TOKEN), 64 / 16),  # no more than the network carries
        (Handover(degree=4, stream_overhead_s=0.25), 4 * 0.25 + 64 / 16),
        # 16 of the 64 tokens are sent in the second that the prompt takes.
        (Handover("layerwise"), 48 / 16),
        (Handover("layerwise", 3, stream_bytes_per_s=4 * BYTES_PER_TOKEN, stream_overhead_s=0.5), 1.5 + 52 / 12),
    ],
)
def test_the_first_token_is_prefill_s_and_the_others_follow_the_cache(
    step: str, handover: Handover, takes_s: float
) -> None:
    records = run([request(0, 0, 64, 4)], combo(handover=handover), step=step)
    (move,) = moves(records)
    assert (move["source"], move["target"], move["outcome"]) == (0, 1, DONE)
    assert (move["paused_s"], move["kv_tokens"], move["num_bytes"]) == (1.0, 64, 64 * BYTES_PER_TOKEN)
    assert move["end_s"] == pytest.approx(1 + LATENCY_S + takes_s)
    assert times(records) == pytest.approx([1.0, *(move["end_s"] + k for k in (1, 2, 3))])


@both_steps
def test_where_the_decode_replica_says_the_first_token_it_computes_the_prompt_s_last_one_anew(step: str) -> None:
    """The way back by the gateway takes 0.5 s for the answer, and 64 times 1/128 s to read the prompt again."""
    slow = {"response_overhead_s": 0.5, "tokenize_s_per_token": 1 / 128}
    records = run([request(0, 0, 64, 4)], combo(handover=Handover(first_token="decode"), **slow), step=step)
    (move,) = moves(records)
    assert (move["paused_s"], move["kv_tokens"], move["outcome"]) == (1.5, 64, DONE)
    assert move["end_s"] == pytest.approx(1.5 + 0.5 + 0.5 + LATENCY_S + 4)
    assert times(records) == pytest.approx([move["end_s"] + k for k in (1, 2, 3, 4)])
    assert by_request(records.requests)["first_token_s"][0] == pytest.approx(times(records)[0] + 0.5)


@both_steps
@pytest.mark.parametrize("output_tokens", [1, 2, 4])
def test_a_first_token_that_is_sent_comes_with_the_cache(step: str, output_tokens: int) -> None:
    """And no other one of the decode replica's is later than after the prefill replica's own word; one alone stays."""
    requests = [request(0, 0, 64, output_tokens)]
    sent = run(requests, combo(handover=Handover(first_token="sent")), step=step)
    records = run(requests, combo(handover=Handover(first_token="prefill")), step=step)
    end_s = [move["end_s"] for move in moves(sent)] or [1.0]
    for name in ("first_token_s", "answer_s"):
        assert by_request(sent.requests)[name][0] == pytest.approx(end_s[0])
    assert by_request(sent.requests)["end_s"].tolist() == by_request(records.requests)["end_s"].tolist()
    assert len(moves(sent)) == (output_tokens > 1)


@both_steps
def test_where_nothing_can_be_handed_over_the_prefill_replica_says_the_first_token_after_all(step: str) -> None:
    requests = [request(0, 0, 64, 20), request(1, 6, 60, 6)]
    records = run(requests, combo(kv_capacity_tokens=96, handover=Handover(first_token="decode")), step=step)
    assert [move["outcome"] for move in moves(records)] == [DONE, FULL]
    assert times(records, 1) == [8, 9, 10, 11, 12, 13]
    assert by_request(records.requests)["first_token_s"][1] == 8


@both_steps
def test_layer_by_layer_all_but_the_last_layer_hides_behind_the_prompt(step: str) -> None:
    fast = {"network_bytes_per_s": 1000 * BYTES_PER_TOKEN}
    records = run([request(0, 0, 64, 2)], combo(handover=Handover("layerwise"), **fast), step=step)
    (move,) = moves(records)
    assert move["end_s"] == pytest.approx(1 + LATENCY_S + 64 / MODEL.num_layers / 1000)


@both_steps
def test_a_prompt_in_chunks_has_longer_to_send_ahead(step: str) -> None:
    """64 tokens by 16 are 4 s, in which the network carries all but the last layer."""
    combos = combo(handover=Handover("layerwise"), max_num_batched_tokens=16)
    records = run([request(0, 0, 64, 2)], combos, step=step)
    (move,) = moves(records)
    assert move["paused_s"] == 4.0
    assert move["end_s"] == pytest.approx(4 + LATENCY_S + 64 / MODEL.num_layers / TOKENS_PER_S)


@both_steps
@pytest.mark.parametrize("host_memory_bytes", [0.0, 1e12])
def test_a_cache_that_lands_in_host_memory_is_copied_from_there(step: str, host_memory_bytes: float) -> None:
    records = run(
        [request(0, 0, 64, 3)],
        combo(handover=Handover(landing="host"), host_memory_bytes=host_memory_bytes),
        step=step,
    )
    (move,) = moves(records)
    copy_s = copies.host_copy_s(64 * BYTES_PER_TOKEN, GPU, 1) if host_memory_bytes else 0.0
    assert move["end_s"] == pytest.approx(5 + LATENCY_S)
    assert times(records) == pytest.approx([1, move["end_s"] + copy_s + 1, move["end_s"] + copy_s + 2])


@both_steps
def test_two_prompts_at_a_time_share_the_way(step: str) -> None:
    records = run([request(0, 0, 64, 2), request(1, 0, 32, 2)], combo(1, 2), step=step)
    ends = {move["request"]: move["end_s"] - LATENCY_S for move in moves(records)}
    assert ends == pytest.approx({1: 1 + 32 / 8, 0: 1 + 32 / 8 + 32 / 16})


@both_steps
def test_one_token_is_all_and_nothing_is_handed_over(step: str) -> None:
    records = run([request(0, 0, 64, 1)], step=step)
    assert moves(records) == [] and times(records) == [1.0]


@both_steps
def test_a_full_target_leaves_it_to_decode_in_place(step: str) -> None:
    """The first needs 5 of the 6 blocks at the decode replica, the second 4."""
    requests = [request(0, 0, 64, 20), request(1, 6, 60, 6)]
    records = run(requests, combo(kv_capacity_tokens=96), step=step)
    assert [move["outcome"] for move in moves(records)] == [DONE, FULL]
    assert times(records, 1) == [7, 8, 9, 10, 11, 12]
    assert ended_at(records) == [1, 0]


@both_steps
def test_too_long_for_any_that_decodes_it_stays(step: str) -> None:
    records = run([request(0, 0, 90, 8)], combo(kv_capacity_tokens=96), step=step)
    assert moves(records) == [] and times(records) == list(range(1, 9))


@both_steps
def test_a_router_that_knows_no_pairs_prefills_and_the_least_loaded_decodes(step: str) -> None:
    requests = [request(i, 0, 16, 9) for i in range(4)]
    records = run(requests, combo(1, 2), router=LeastLoadedRouter, step=step)
    segments = records.segments
    firsts = segments["replica"][segments["enqueued_s"] == 0]
    assert set(firsts.tolist()) == {0} and sorted(ended_at(records)) == [1, 1, 2, 2]


# Opportunistic and strict.


@both_steps
@pytest.mark.parametrize("within", ["opportunistic", "strict"])
def test_in_place_where_idle(step: str, within: str) -> None:
    """1P2D, fig. 5b: while the first is prefilled, two come and find the decode replicas idle."""
    requests = [request(0, 0, 64, 30), request(1, 0.25, 64, 30), request(2, 0.5, 64, 30)]
    records = run(requests, combo(1, 2), router=Made(CauchyRouter, ("goodput", within)), step=step)
    first = [times(records, id)[0] for id in range(3)]
    handed = sorted(move["request"] for move in moves(records))
    if within == "opportunistic":
        assert handed == [0] and first == [1, 1.25, 1.5]
        assert ended_at(records)[1:] == [2, 1], "the first will decode at 1"
    else:
        assert handed == [0, 1, 2] and first == [1, 2, 2], "the prompts wait for one another"


@both_steps
def test_an_idle_prefill_replica_takes_all_of_one(step: str) -> None:
    requests = [request(0, 0, 16, 40), request(1, 10, 16, 5), request(2, 10.5, 16, 5)]
    records = run(requests, combo(), router=CauchyRouter, step=step)
    assert ended_at(records) == [1, 0, 1], "decode is busy, prefill idle; then both are busy"
    assert times(records, 1) == [11, 12, 13, 14, 15]


# Crashes.


class Seen(CauchyRouter):
    """Notes which roles it is shown, when."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[float, list[tuple[int, str]]]] = []

    def route(self, request: RequestView, view: FleetView) -> Placement:
        self.seen.append((view.now, [(replica.id, replica.role) for replica in view.replicas]))
        return super().route(request, view)


@both_steps
@pytest.mark.parametrize("crashes", [0, 1])
def test_the_other_covers_for_one_that_crashes_and_gives_its_part_back(step: str, crashes: int) -> None:
    router = Seen()
    requests = [request(i, 5.0 * i + 0.5, 16, 6) for i in range(8)]
    records = run(requests, router=lambda: router, faults=(Fault(11.25, crashes, 12.0),), step=step)
    for now, seen in router.seen:
        if now < 11.25 or now >= 23.25:
            assert seen == [(0, "prefill"), (1, "decode")], now
        else:
            assert seen == [(1 - crashes, "mixed")], now
    assert (records.requests["outcome"] == Outcome.FINISHED).all()
    segments = records.segments
    during = (segments["enqueued_s"] >= 11.25) & (segments["enqueued_s"] < 23.25)
    assert set(segments["replica"][during].tolist()) == {1 - crashes}


@both_steps
def test_with_two_that_decode_the_other_goes_on_and_no_role_changes(step: str) -> None:
    router = Seen()
    requests = [request(i, 2.0 * i + 0.5, 16, 20) for i in range(8)]
    records = run(requests, combo(1, 2), router=lambda: router, faults=(Fault(6.25, 1, None),), step=step)
    assert all(role == "decode" for now, seen in router.seen for id, role in seen if id == 2)
    assert (records.requests["outcome"] == Outcome.FINISHED).all()
    assert records.requests["attempts"].max() == 2


@both_steps
@pytest.mark.parametrize("crashes", [0, 1])
def test_a_crash_in_the_middle_of_a_transfer(step: str, crashes: int) -> None:
    """From 1 s to 5 s the cache is on its way; at 3.5 s one end is gone. No token is lost, none comes twice."""
    records = run([request(0, 0, 64, 4)], faults=(Fault(3.5, crashes, 50.0),), step=step)
    assert [move["outcome"] for move in moves(records)] == [CRASHED]
    assert ended_at(records) == [1 - crashes]
    # The source still has the cache; the target has to compute it.
    assert times(records) == pytest.approx([1, 4.5, 5.5, 6.5])
    assert records.requests["attempts"].tolist() == [2 if crashes == 0 else 1]


@both_steps
def test_who_is_prefilled_when_the_decode_replica_crashes_stays(step: str) -> None:
    """The prefill replica does both from 0.5 s on: it has nobody to hand over to, and not to itself either."""
    records = run([request(0, 0, 64, 4)], faults=(Fault(0.5, 1, 50.0),), step=step)
    assert moves(records) == [] and times(records) == [1, 2, 3, 4]


@both_steps
def test_who_starts_anew_where_both_phases_are_done_stays_there(step: str) -> None:
    """The prefill replica is gone for good; what was said of decoding when it had them is forgotten."""
    requests = [request(0, 0, 64, 4), request(1, 0, 64, 4)]
    records = run(requests, combo(1, 2), router=LeastLoadedRouter, faults=(Fault(0.5, 0, None),), step=step)
    assert moves(records) == [] and times(records) == times(records, 1) == [1.5, 2.5, 3.5, 4.5]
    assert ended_at(records) == [1, 2]


# Combos come and go.


class Wanted:
    """As many combos as a plan says, by the time from which on."""

    interval_s = 1.0

    def __init__(self, *plan: tuple[float, int]) -> None:
        self._plan = plan

    def scale(self, view: PoolsView) -> dict[str, int]:
        numbers = [number for at_s, number in self._plan if at_s <= view.now]
        return {view.pools[0].name: numbers[-1]} if numbers else {}


@both_steps
def test_a_combo_that_is_given_back_goes_as_a_whole_and_loses_nobody(step: str) -> None:
    requests = [request(i, 0.25 * i, 60, 30) for i in range(40)]
    scaler = Made(Wanted, ((5.0, 1),))
    records = run(requests, combo(1, 2, replicas=2, handover=Handover("layerwise")), scaler=scaler, step=step)
    assert (records.requests["outcome"] == Outcome.FINISHED).all()
    assert (records.requests["attempts"] == 1).all()
    gone = [replica for replica in records.replicas if replica.up[-1][1] < records.end_s]
    assert [replica.id for replica in gone] in ([0, 1, 2], [3, 4, 5])
    (end_s,) = {replica.up[-1][1] for replica in gone}
    there = np.isin(records.segments["replica"], [replica.id for replica in gone])
    assert end_s == records.segments["end_s"][there].max()
    # Whoever was prefilled there when it began to drain is decoded by it: they go on together.
    placed = records.segments["enqueued_s"][there & (records.segments["enqueued_s"] > 5.0)]
    moved_in = {move["end_s"] for move in moves(records) if move["target"] in {replica.id for replica in gone}}
    assert set(placed.tolist()) <= moved_in


@both_steps
@pytest.mark.parametrize("down_s", [40.0, None])
def test_one_that_crashes_while_its_combo_drains_goes_with_it(step: str, down_s: float | None) -> None:
    requests = [request(i, 1.0 * i, 16, 4) for i in range(90)]
    faults = (Fault(5.25, 1, down_s), Fault(5.25, 3, down_s))
    records = run(requests, combo(replicas=2), scaler=Made(Wanted, ((5.0, 1),)), faults=faults, step=step)
    gone = [replica for replica in records.replicas if replica.up[-1][1] < records.end_s]
    assert len(gone) == 2 and gone[0].id // 2 == gone[1].id // 2, "both of one combo"
    assert gone[0].up == gone[1].up and gone[0].up[0][1] < 40.0
    there = np.isin(records.segments["replica"], [replica.id for replica in gone])
    assert records.segments["enqueued_s"][there].max() <= gone[0].up[0][1]
    assert gone[1].down == ((5.25, gone[1].up[0][1]),)
    assert (records.requests["outcome"] == Outcome.FINISHED).all()


@both_steps
def test_a_combo_starts_as_a_whole(step: str) -> None:
    requests = [request(i, 0.5 * i, 60, 30) for i in range(40)]
    records = run(requests, combo(1, 1, start_s=7.5), scaler=Made(Wanted, ((3.0, 2),)), step=step)
    new = records.replicas[2:]
    assert [replica.up[0][0] for replica in new] == [3.0, 3.0]
    assert all(replica.down == ((3.0, 10.5),) for replica in new)
    there = np.isin(records.segments["replica"], [2, 3])
    assert there.any() and records.segments["enqueued_s"][there].min() >= 10.5


def test_a_kind_of_combo_may_go_to_none_and_come_back() -> None:
    requests = [request(i, 1.0 * i, 16, 4) for i in range(60)]
    kinds = combo(name="c", min_replicas=0), _other(combo(name="o"))
    records = run(requests, *kinds, scaler=Made(Wanted, ((5.0, 0), (30.0, 1))), router=CauchyRouter)
    assert (records.requests["outcome"] == Outcome.FINISHED).all()
    assert records.replicas[0].up[0][1] < 30.0 and [each.pool for each in records.replicas[4:]] == ["p", "d"]


def _other(like: Combo) -> Combo:
    """Its parts under other names."""
    parts = tuple(msgspec.structs.replace(part, name=f"o{part.name}") for part in like.parts)
    return msgspec.structs.replace(like, parts=parts)


# Autoscaled.

FAST = msgspec.structs.replace(GPU, name="fast", usd_per_hour=3.0)


def _with_gpus(like: Combo, prefill: Any, decode: Any) -> Combo:
    gpus = {"prefill": prefill, "decode": decode}
    parts = tuple(msgspec.structs.replace(part, gpu=gpus[part.role]) for part in like.parts)
    return msgspec.structs.replace(like, parts=parts)


def _most_gpus(records: Records, name: str) -> int:
    """The most GPUs of a type that were there at an instant."""
    changes = [
        (time, change * replica.num_gpus)
        for replica in records.replicas
        if replica.gpu == name
        for start, end in replica.up
        for time, change in ((start, 1), (end, -1))
    ]
    most = have = 0
    for _, change in sorted(changes):  # at the same instant, what goes goes first
        have += change
        most = max(most, have)
    return most


@settings(deadline=None, max_examples=8)
@given(seed=st.integers(0, 10**6))
def test_an_autoscaled_fleet_never_has_more_gpus_than_there_are(seed: int) -> None:
    rng = Random(seed)
    kinds: list[Combo] = [
        _with_gpus(combo(1, 1, goodput_rps=0.15, name="c", min_replicas=0, start_s=4.0), FAST, GPU),
        _other(_with_gpus(combo(1, 2, goodput_rps=0.25, name="o", min_replicas=0, start_s=9.0), GPU, GPU)),
    ]
    limits = {"fast": rng.randint(2, 3), "gpu": rng.randint(5, 9)}
    scaler = Made(CombosScaler, (0.2, 10.0, 30.0, 3.0, 1.0, limits))
    now, requests = 0.0, []
    for id in range(150):
        now += rng.expovariate(rng.choice((0.3, 3.0)))
        requests.append(request(id, now, rng.randint(1, 100), rng.randint(1, 40)))
    records = run(requests, *kinds, scaler=scaler, router=CauchyRouter)
    assert (records.requests["outcome"] == Outcome.FINISHED).all()
    for name, limit in limits.items():
        assert _most_gpus(records, name) <= limit
    assert len(records.replicas) > 5, "it did scale"


def test_the_scaler_sees_prices_and_gpus_of_whole_combos() -> None:
    seen: list[tuple[str, float, dict[str, int], float | None]] = []

    class Looks(Wanted):
        def scale(self, view: PoolsView) -> dict[str, int]:
            seen[:] = [(each.name, each.usd_per_hour, dict(each.gpus), each.goodput_rps) for each in view.pools]
            return {}

    kinds = _with_gpus(combo(2, 3, goodput_rps=4.0), FAST, GPU)
    run([request(0, 0, 9, 9)], kinds, pools=(pool(replicas=2),), scaler=Looks, router=CauchyRouter)
    assert seen == [
        ("main", GPU.usd_per_hour, {"gpu": 1}, None),
        ("c", 2 * 3.0 + 3 * GPU.usd_per_hour, {"fast": 2, "gpu": 3}, 4.0),
    ]


def test_goodput_sets_how_many_requests_each_combo_gets() -> None:
    kinds = combo(name="c", goodput_rps=3.0), _other(combo(name="o", goodput_rps=1.0, replicas=2))
    requests = [request(i, 0.1 * i, 8, 3) for i in range(100)]
    records = run(requests, *kinds)
    firsts = records.segments["replica"][np.unique(records.segments["request"], return_index=True)[1]]
    counts = np.bincount(firsts // 2)
    assert counts.tolist() == [60, 20, 20]


def test_pools_without_roles_are_combos_of_their_own() -> None:
    requests = [request(i, 0.1 * i, 8, 3) for i in range(40)]
    records = run(requests, combo(), pools=(Pool("main", MODEL, GPU, pool().engine),), router=CauchyRouter)
    at = np.bincount(by_request(records.requests)["replica"], minlength=3)
    assert at[0] == 20 and at[1:].sum() == 20
