"""Headway's own router, ordering and migration, on fleets made by hand."""

from __future__ import annotations

from collections import Counter
from typing import Any

from fakes import FakeFleet, FakePlaced, FakeReplica, FakeRequest
from headway.core.request import Phase, Segment
from headway.policies.migration.headway import HeadwayMigration
from headway.policies.ordering.phases import PascalOrdering, TiersAndPhasesOrdering
from headway.policies.routing.headway import HeadwayRouter
from headway.testing.stories import LinearTimes


def chosen(*replicas: FakeReplica, **request: Any) -> int:
    return HeadwayRouter().route(FakeRequest(**request), FakeFleet(list(replicas))).replica


FAST, SLOW = LinearTimes(2e-5, 0.008, 5e-5, 4e-8), LinearTimes(1e-4, 0.02, 2e-4, 2e-7)
"""Times of engines: prompt token, iteration, sequence, KV token."""


def one(id: int, **given: Any) -> FakeReplica:
    """A replica on its own, with room for all that the tests place."""
    return FakeReplica(id, **{"combo": id, "times": FAST, "kv_blocks_total": 1 << 20, **given})


def busy(id: int, num: int, **given: Any) -> FakeReplica:
    """A replica that decodes so many requests of 500 KV tokens."""
    load = {"num_in_flight": num, "num_running": num, "kv_blocks_used": 32 * num}
    return one(id, **{**load, **given})


def test_a_request_goes_where_it_adds_the_least_time() -> None:
    assert chosen(busy(0, 20), busy(1, 19)) == 1
    assert chosen(busy(0, 20, prefill_tokens_left=100), busy(1, 20)) == 1
    assert chosen(busy(0, 20, kv_blocks_used=2000), busy(1, 20)) == 1
    # A slow engine is worth it once the fast one has several times as many requests.
    assert chosen(busy(0, 40), busy(1, 10, times=SLOW, pool="slow")) == 0
    assert chosen(busy(0, 240), busy(1, 2, times=SLOW, pool="slow")) == 1
    # A long prompt holds up those that decode, so it goes where few do.
    there = [busy(0, 60), busy(1, 20, prefill_tokens_left=10_000)]
    assert [chosen(*there, prompt_tokens=tokens) for tokens in (10, 30_000)] == [0, 1]


class KeptFleet(FakeFleet):
    """A view whose replicas have not changed since the first request: what was mapped then is kept."""

    def map(self, key: Any) -> Any:
        if not hasattr(self, "kept"):
            self.kept = [key(replica) for replica in self.replicas]
        return self.kept


READ = {"num_in_flight", "kv_blocks_used", "prefill_tokens_left", "tokens_generated", "times", "id", "role"}


class CountedReplica(FakeReplica):
    num_reads = 0

    def __getattribute__(self, name: str) -> Any:
        if name in READ:
            CountedReplica.num_reads += 1
        return super().__getattribute__(name)


def test_of_many_replicas_only_those_that_change_are_read() -> None:
    router, fleet = HeadwayRouter(), KeptFleet([CountedReplica(i, combo=i, times=FAST) for i in range(100)])
    router.route(FakeRequest(), fleet)
    CountedReplica.num_reads = 0
    assert router.route(FakeRequest(), fleet) == router.route(FakeRequest(), FakeFleet(fleet.replicas))
    own = CountedReplica.num_reads
    router.route(FakeRequest(), fleet)
    assert CountedReplica.num_reads - own < 20 < own


def test_without_a_seat_or_blocks_a_request_waits() -> None:
    assert chosen(busy(0, 20, max_num_seqs=20), busy(1, 25)) == 1
    assert chosen(busy(0, 20, kv_blocks_total=645), busy(1, 25), prompt_tokens=600) == 1


def test_a_miss_of_the_slo_counts_more_than_seconds() -> None:
    prompts = {"prompt_tokens": 1000, "slo_ttft_s": 1.0}
    late, crowded = busy(0, 1, prefill_tokens_left=60_000), busy(1, 80)
    assert chosen(late, crowded, prompt_tokens=1000) == chosen(late, crowded, **prompts) == 1
    near = busy(0, 1, prefill_tokens_left=40_000)
    full = busy(1, 250)
    assert chosen(near, full, prompt_tokens=1000) == 0
    assert chosen(near, full, **prompts) == 1
    assert chosen(busy(0, 9, prefill_tokens_left=200_000), busy(1, 9, prefill_tokens_left=44_000), **prompts) == 1


def test_who_is_late_anyway_goes_where_others_are_late_only_beyond_the_capacity_of_the_fleet() -> None:
    """Else the queue there would end, and more would be late for one more prompt."""
    late = FakeRequest(id=1, prompt_tokens=40_000, slo_ttft_s=1.0)
    there = [busy(0, 9, prefill_tokens_left=90_000), busy(1, 9, prefill_tokens_left=20_000)]
    for tokens, replica in ((10, 1), (5_000, 0)):  # prompts take 0.4% or 200% of the time
        router = sent({0: 200, 1: 200}, tokens)
        assert router.route(late, FakeFleet(there, now=10.0)).replica == replica
        in_time = FakeRequest(id=2, prompt_tokens=1000, slo_ttft_s=1.0)
        assert router.route(in_time, FakeFleet(there, now=10.0)).replica == 1


def sent(numbers: dict[int, int], tokens: int = 10) -> HeadwayRouter:
    """A router that has sent each replica so many requests in ten seconds."""
    router = HeadwayRouter()
    placed = sorted((10.0 * i / num, id) for id, num in numbers.items() for i in range(num))
    for i, (now, id) in enumerate(placed):
        request = FakeRequest(id=1000 + i, prompt_tokens=tokens, slo_ttft_s=1.0)
        router.route(request, FakeFleet([one(id)], now=now))
    return router


def test_beyond_capacity_the_replica_is_late_to_which_fewer_requests_come() -> None:
    prompt = FakeRequest(id=1, prompt_tokens=10_000, slo_ttft_s=1.0)
    for numbers in ({0: 60, 1: 10}, {0: 10, 1: 60}):
        there = [one(0, prefill_tokens_left=33_000), one(1, prefill_tokens_left=33_000)]
        router = sent(numbers)
        assert router.route(prompt, FakeFleet(there, now=10.0)).replica == min(numbers, key=lambda id: numbers[id])


def test_all_decoding_requests_count_that_would_miss_their_time_per_token() -> None:
    """One more sequence spoils 200 times per token; one late first token is the smaller loss."""
    slow = LinearTimes(2e-5, 0.008, 4.6e-4, 4e-8)
    full, late = busy(0, 200, times=slow), busy(1, 9, times=slow, prefill_tokens_left=100_000)
    assert chosen(full, late, slo_ttft_s=1.0, slo_tpot_s=0.1) == 1


def test_a_prefix_that_several_requests_share_is_read_for_each_of_them() -> None:
    shared, own = busy(0, 40, kv_blocks_used=100), busy(1, 40, kv_blocks_used=1000)
    router = HeadwayRouter()
    for id in range(80):
        tokens = 5000 if id % 2 == 0 else 500
        router.route(FakeRequest(id=id, prompt_tokens=tokens), FakeFleet([(shared, own)[id % 2]]))
    assert router.route(FakeRequest(id=100), FakeFleet([shared, own])).replica == 1
    assert chosen(shared, own) == 0, "a router that knows of no request believes the blocks"


def test_a_prompt_goes_where_it_is_cached_until_that_holds_up_more() -> None:
    prompt = {"prompt_tokens": 20_000, "prefix": (Segment(1, 20_000),)}
    cached = {0: 19_000}
    assert chosen(busy(0, 12, cached=cached), busy(1, 10), **prompt) == 0
    assert chosen(busy(0, 12, cached=cached, prefill_tokens_left=60_000), busy(1, 10), **prompt) == 1
    waiting = {"prefill_tokens_left": 60_000, "expected_cached_tokens": 59_000, "cached": cached}
    assert chosen(busy(0, 12, **waiting), busy(1, 10), **prompt) == 0
    # What can be loaded is nearly as good, if loading is fast.
    assert chosen(busy(0, 12, loadable=cached), busy(1, 10), **prompt) == 0


def test_another_region_is_chosen_when_the_way_is_shorter_than_the_wait() -> None:
    near, far = one(0, region="near"), one(1, region="far")
    assert chosen(near, far, region="near") == 0
    assert chosen(near, far, region="far") == chosen(near, far, region="far") == 1
    near.prefill_tokens_left = 4000  # 0.08 s, and the way takes 0.1 s
    assert chosen(near, far, region="near") == 0
    near.prefill_tokens_left = 6000
    assert chosen(near, far, region="near") == 1


def pair(**given: Any) -> list[FakeReplica]:
    return [one(id, role=role, **{"combo": 9, **given}) for id, role in ((0, "prefill"), (1, "decode"))]


def test_a_pair_shares_a_request_or_one_of_it_does_all() -> None:
    first, last = halves = pair()
    last.times, last.pool = (
        LinearTimes(1e-4, 0.004, 2e-5, 1e-8),
        "last",
    )  # four times the bandwidth, a fifth of the FLOPs
    fleet = FakeFleet(halves)
    placed = HeadwayRouter().route(FakeRequest(prompt_tokens=8000), fleet)
    assert (placed.replica, placed.decode) == (0, 1)
    first.prefill_tokens_left = 90_000
    placed = HeadwayRouter().route(FakeRequest(prompt_tokens=8000), fleet)
    assert (placed.replica, placed.decode) == (1, None)
    first.prefill_tokens_left, last.num_in_flight, last.kv_blocks_used = 0, 400, 400_000
    placed = HeadwayRouter().route(FakeRequest(prompt_tokens=8000), fleet)
    assert (placed.replica, placed.decode) == (0, None)


def test_requests_on_their_way_to_a_decode_replica_count_there() -> None:
    halves = [*pair(), one(2, role="decode", combo=9)]
    halves[0].times, halves[0].pool = SLOW, "slow"
    router, fleet = HeadwayRouter(), FakeFleet(halves)
    placed = [router.route(FakeRequest(id=id, prompt_tokens=3000), fleet) for id in range(8)]
    decoding = Counter(each.replica if each.decode is None else each.decode for each in placed)
    assert decoding[1] == decoding[2] == 4


def test_engines_for_one_phase_only_get_that_phase() -> None:
    fleet = FakeFleet(pair(is_single_phase=True))
    placed = HeadwayRouter().route(FakeRequest(), fleet)
    assert (placed.replica, placed.decode) == (0, 1)
    alone = HeadwayRouter().route(FakeRequest(), FakeFleet(fleet.replicas[:1]))
    assert (alone.replica, alone.decode) == (0, None)


def played(router: HeadwayRouter, replicas: list[FakeReplica], pace: dict[int, float], seconds: float) -> Counter[int]:
    """Twenty decisions a second for replicas that keep ten requests each, at iterations of these seconds."""
    shares: Counter[int] = Counter()
    for i in range(int(seconds * 20)):
        for replica in replicas:
            replica.tokens_generated = round(10 * i / 20 / pace[replica.id])
        shares[router.route(FakeRequest(id=i), FakeFleet(replicas, now=i / 20)).replica] += 1
    return shares


def test_a_replica_that_is_slower_than_its_model_is_found_out() -> None:
    expected_s = FAST.step_s(10, 5000)
    replicas = [busy(0, 10), busy(1, 11)]
    assert played(HeadwayRouter(), replicas, {0: expected_s, 1: expected_s}, 5)[1] == 0
    replicas = [busy(0, 10), busy(1, 11)]
    router = HeadwayRouter()
    shares = played(router, replicas, {0: 2 * expected_s, 1: expected_s}, 10)
    assert shares[1] > 100
    for replica in replicas:  # at rest, it is tried again after a while
        replica.num_running = 0
    late = FakeFleet(replicas, now=200.0)
    assert [router.route(FakeRequest(id=1000 + i), late).replica for i in range(4)][-1] == 0


def test_tokens_that_other_gateways_have_no_more_are_not_taken_for_a_slow_replica() -> None:
    """The counts of a shared replica fall when requests end elsewhere, of which the router does not hear."""
    expected_s = FAST.step_s(10, 5000)
    replicas = [busy(0, 10, is_shared=True), busy(1, 11, is_shared=True)]
    assert played(HeadwayRouter(), replicas, {0: 5 * expected_s, 1: expected_s}, 10)[1] == 0


def test_engines_without_a_model_are_told_apart_by_what_they_do() -> None:
    replicas = [busy(0, 10, times=None), busy(1, 10, times=None)]
    shares = played(HeadwayRouter(), replicas, {0: 0.060, 1: 0.015}, 10)
    assert shares[1] > 150


def test_the_scores_are_seconds_and_are_only_given_when_wanted() -> None:
    replicas = [busy(0, 20), busy(1, 19)]
    placed = HeadwayRouter().route(FakeRequest(), FakeFleet(replicas))
    assert [id for id, _ in placed.scores] == [0, 1] and 0 < placed.scores[1][1] < placed.scores[0][1]
    assert HeadwayRouter().route(FakeRequest(), FakeFleet(replicas, wants_scores=False)).scores == ()


def test_what_is_remembered_is_bounded() -> None:
    router = HeadwayRouter()
    for i in range(1000):
        router.route(FakeRequest(id=i), FakeFleet([one(2 * i), one(2 * i + 1)], now=10.0 * i))
    assert len(router._states) < 1000 == len(router._decoding)
    router._decoding.update({i: (0, 1) for i in range(1000, 100_000)})
    for i in range(100):
        router.route(FakeRequest(id=200_000 + i), FakeFleet(pair(), now=10_000.0))
    assert len(router._decoding) <= 100_000


def full(id: int, requests: list[FakePlaced], **given: Any) -> FakeReplica:
    return FakeReplica(
        id,
        combo=id,
        kv_blocks_used=1000,
        num_waiting=1,
        num_running=4,
        head_demand_blocks=7,
        requests=requests,
        **given,
    )


def moved(*replicas: FakeReplica) -> list[tuple[int, int]]:
    return [(move.request, move.target) for move in HeadwayMigration().moves(FakeFleet(list(replicas)))]


def test_only_replicas_without_room_or_about_to_stop_send_requests_away() -> None:
    decoding = FakePlaced(5, replica=0)
    free = one(1, num_running=1)
    assert moved(full(0, [decoding]), free) == [(5, 1)]
    has_room = one(0, kv_blocks_used=900, num_waiting=1, num_running=4, head_demand_blocks=7, requests=[decoding])
    assert not moved(has_room, free)
    has_room.max_num_seqs = 4
    assert moved(has_room, free) == [(5, 1)]
    free.num_waiting = 1
    assert not moved(has_room, free), "nothing is gained where others wait"
    leaving = one(0, num_running=1, is_draining=True, requests=[FakePlaced(6, replica=0)])
    assert moved(leaving, free) == [(6, 1)]


def test_what_waits_stays_where_the_router_put_it_unless_its_replica_stops() -> None:
    waiting = FakePlaced(5, is_running=False, is_waiting=True, has_kv=False, replica=0)
    free = one(1, num_running=1)
    assert not moved(full(0, [waiting]), free)
    assert moved(full(0, [waiting, FakePlaced(6, replica=0)]), free) == [(6, 1)]
    assert moved(full(0, [waiting], is_draining=True), free) == [(5, 1)]


def test_an_answer_begins_at_a_replica_like_the_one_that_reasoned() -> None:
    request = FakePlaced(5, replica=0, phase=Phase.ANSWERING)
    here = one(0, role="decode", queue_lengths=(9,))
    slow = one(1, role="decode", times=SLOW)
    prefill = one(2, role="prefill")
    alike = one(3, role="decode", queue_lengths=(4,))
    migration = HeadwayMigration()
    assert migration.at_phase(request, FakeFleet([here, slow, prefill])) is None
    move = migration.at_phase(request, FakeFleet([here, slow, prefill, alike]))
    assert move is not None and move.target == 3


def test_turns_by_quanta_are_pascals_within_each_tier() -> None:
    both, phases = TiersAndPhasesOrdering(by_quanta=True), PascalOrdering(by_quanta=True)
    assert both.quantum is None
    for tier in (0, 2):
        for done in (0, 499, 500, 1200):
            request = FakeRequest(tier=tier, generated_tokens=done, phase=Phase.REASONING)
            assert both.rank(request, 0.0)[1:] == phases.rank(request, 0.0)[1:]
            assert both.next_change_tokens(request) == phases.next_change_tokens(request)
