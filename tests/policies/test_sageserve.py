"""SageServe's routing, queue manager and orderings: every rule and threshold, on views made by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import FakeFleet, FakeReplica, FakeRequest, finished
from headway.core.decision import Release
from headway.core.errors import HeadwayError
from headway.core.view import RequestView
from headway.policies.admission.queue_manager import QueueManagerAdmission
from headway.policies.endpoints import effective_use, fullest_use, is_below
from headway.policies.ordering.attained import LeastAttainedServiceOrdering, VtcOrdering
from headway.policies.ordering.deadlines import DeadlinePriorityOrdering, EdfOrdering
from headway.policies.ordering.deficit import DeficitRoundRobinOrdering
from headway.policies.ordering.fair import FairOrdering
from headway.policies.ordering.fcfs import FcfsOrdering
from headway.policies.ordering.phases import PascalOrdering, TiersAndPhasesOrdering
from headway.policies.ordering.tiers import PriorityFirstOrdering, PriorityOrdering, TierPromotionOrdering
from headway.policies.routing.sageserve import SageServeRouter

HOUR_S = 3600.0


def regions(**uses: float | tuple[float, ...]) -> list[FakeReplica]:
    """A replica of 1000 blocks for each share that is in use."""
    replicas: list[FakeReplica] = []
    for region, given_uses in uses.items():
        for use in given_uses if isinstance(given_uses, tuple) else (given_uses,):
            id = len(replicas)
            replicas.append(FakeReplica(id, region=region, combo=id, kv_blocks_used=round(1000 * use)))
    return replicas


def routed(replicas: list[FakeReplica], request: FakeRequest | None = None, **config: Any) -> FakeReplica:
    chosen = SageServeRouter(**config).route(request or FakeRequest(), FakeFleet(replicas)).replica
    return next(replica for replica in replicas if replica.id == chosen)


# Routing.


def test_its_own_region_first_if_that_is_below_the_threshold() -> None:
    fleet = regions(east=0.1, west=0.69, central=0.0)
    assert routed(fleet, FakeRequest(region="west")).region == "west"
    fleet[1].kv_blocks_used = 700
    assert routed(fleet, FakeRequest(region="west")).region == "east"
    assert routed(fleet, FakeRequest(region="west"), threshold=0.71).region == "west"


def test_then_the_given_order_and_then_that_of_the_view() -> None:
    fleet = regions(east=0.2, west=0.9, central=0.6)
    request = FakeRequest(region="west")
    assert routed(fleet, request, preference=("north", "central", "east")).region == "central"
    assert routed(fleet, request).region == "east"
    assert routed(fleet, FakeRequest(region="nowhere"), preference=("west", "central")).region == "central"


def test_the_least_full_region_if_all_are_full() -> None:
    fleet = regions(east=0.9, west=0.8, central=0.85)
    assert routed(fleet, FakeRequest(region="east"), preference=("central",)).region == "west"
    assert routed(regions(east=0.9, west=0.9), FakeRequest(region="west")).region == "west"


def test_a_region_is_as_full_as_its_instances_together() -> None:
    # The mean of the shares is 0.6; together 1,300 of 1,600 blocks are in use.
    fleet = regions(east=(0.8, 0.2), west=0.5)
    fleet[0].kv_blocks_total, fleet[0].kv_blocks_used = 1600, 1280
    fleet[1].kv_blocks_total, fleet[1].kv_blocks_used = 100, 20
    assert routed(fleet, FakeRequest(region="east")).region == "west"


def test_within_a_region_the_instance_with_the_fewest_tokens_left() -> None:
    fleet = regions(east=(0.1, 0.6, 0.3), west=0.0)
    for replica, left in zip(fleet, (900, 100, 500, 0), strict=True):
        replica.prefill_tokens_left = left
    assert routed(fleet, FakeRequest(region="east")).id == 1
    router = SageServeRouter()
    fleet[1].num_in_flight, fleet[1].tokens_generated = 3, 0
    assert router.route(FakeRequest(region="east"), FakeFleet(fleet)).replica == 2  # 3 * 256 tokens are to come
    for _ in range(1000):
        router.learn(finished(10))
    assert router.route(FakeRequest(region="east"), FakeFleet(fleet)).replica == 1  # outputs turned out short


def test_of_a_region_s_endpoints_the_least_full_one() -> None:
    fleet = regions(east=(0.5, 0.3, 0.1))
    for replica, pool in zip(fleet, ("a", "b", "b"), strict=True):
        replica.pool = pool
    fleet[0].prefill_tokens_left, fleet[2].prefill_tokens_left = 0, 10
    assert routed(fleet).id == 1


def test_batch_requests_go_where_most_room_is() -> None:
    fleet = regions(east=0.5, west=0.4, central=0.45)
    assert routed(fleet, FakeRequest(region="east", tier=2)).region == "west"
    assert routed(fleet, FakeRequest(region="east", tier=1)).region == "east"
    assert routed(fleet, FakeRequest(region="east", tier=1), batch_tier=1).region == "west"


def test_silos_and_mixed_pools() -> None:
    fleet = regions(east=(0.8, 0.0, 0.2))
    for replica, pool in zip(fleet, ("a-iw", "a-niw", "a"), strict=True):
        replica.pool = pool
    suffixes = {"interactive_suffix": "-iw", "batch_suffix": "-niw"}
    interactive, batch = FakeRequest(tier=0), FakeRequest(tier=2)
    assert routed(fleet[:2], interactive, **suffixes).pool == "a-iw"
    assert routed(fleet[:2], batch, **suffixes).pool == "a-niw"
    assert routed(fleet, interactive, **suffixes).pool == "a"
    assert routed(fleet, batch, **suffixes).pool == "a-niw"
    fleet[1].kv_blocks_used = 999
    assert routed(fleet, batch, **suffixes).pool == "a"
    assert routed(fleet[:1], batch, **suffixes).pool == "a-iw"  # nothing else is offered
    assert routed(fleet, interactive).pool == "a"  # no silos


def test_silos_count_only_what_may_serve() -> None:
    fleet = regions(east=(0.9, 0.0), west=(0.5, 0.9))
    for replica, pool in zip(fleet, ("e-iw", "e-niw", "w-iw", "w-niw"), strict=True):
        replica.pool = pool
    request = FakeRequest(region="east")
    assert routed(fleet, request).region == "east"  # together, 45% are in use
    assert routed(fleet, request, interactive_suffix="-iw", batch_suffix="-niw").pool == "w-iw"


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 10), st.integers(1, 10)), min_size=1, max_size=9),
    st.sampled_from("abcd"),
    st.permutations("abc"),
    st.integers(0, 2),
)
def test_the_region_is_the_paper_s(given_: list[tuple[str, int, int]], own: str, order: list[str], tier: int) -> None:
    fleet = [
        FakeReplica(id, region=region, kv_blocks_used=min(used, total), kv_blocks_total=total)
        for id, (region, used, total) in enumerate(given_)
    ]

    def use(region: str) -> float:
        here = [replica for replica in fleet if replica.region == region]
        return sum(r.kv_blocks_used for r in here) / sum(r.kv_blocks_total for r in here)

    there = {replica.region for replica in fleet}
    choices = [region for region in (own, *order) if region in there]
    below = [region for region in choices if use(region) < 0.7]
    expected = below[0] if below and tier < 2 else min(choices, key=use)
    assert routed(fleet, FakeRequest(region=own, tier=tier), preference=tuple(order)).region == expected


# The queue manager.


def batch(id: int = 0, arrival_s: float = 0.0, **given: Any) -> FakeRequest:
    return FakeRequest(id, arrival_s, **{"tier": 2, **given})


def released(
    manager: QueueManagerAdmission, replicas: list[FakeReplica], held: list[FakeRequest], now: float
) -> list[Release]:
    assert all(manager.holds(request) for request in held)

    class View(FakeFleet):
        held: list[RequestView]

    view = View(replicas, now)
    view.held = list(held)
    return list(manager.release(view))


def one_signal(**config: Any) -> QueueManagerAdmission:
    """Endpoints that send one signal an interval, as their free memory takes long to fill."""
    return QueueManagerAdmission(fill_s=1e6, **config)


def asking(manager: QueueManagerAdmission, replicas: list[FakeReplica], held: list[FakeRequest]) -> list[str]:
    return [release.region for release in released(manager, replicas, held, 10.0)]


def test_only_batch_requests_are_kept() -> None:
    assert [QueueManagerAdmission().holds(FakeRequest(tier=tier)) for tier in range(4)] == [False, False, True, True]
    assert QueueManagerAdmission(batch_tier=1).holds(FakeRequest(tier=1))


@pytest.mark.parametrize(
    ("use", "num"), [(0.9, 0), (0.6, 0), (0.599, 1), (0.55, 1), (0.5, 1), (0.499, 2), (0.1, 2), (0.0, 2)]
)
def test_one_below_60_and_two_below_50_per_cent(use: float, num: int) -> None:
    held = [batch(i, float(i)) for i in range(9)]
    assert released(one_signal(), regions(east=use), held, 10.0) == [Release(i, region="east") for i in range(num)]


def test_signals_are_as_many_as_free_memory_is_large() -> None:
    """By hand: 64 tokens of prompt and 256 of output make 50 requests of 16,000 tokens; a tenth of the free ones an
    interval, of each signal one request between 50 and 60%, two below 50%."""

    def num(use: float | tuple[float, ...], **replica: int) -> int:
        fleet = regions(east=use)
        for one in fleet:
            vars(one).update(replica)
        return len(released(QueueManagerAdmission(), fleet, [batch(i, prompt_tokens=64) for i in range(99)], 10.0))

    assert num(0.0) == 2 * 3  # room for 30 up to 60%
    assert num((0.0,) * 4) == 2 * 12
    assert num((0.2,) * 4) == 2 * 8
    assert num((0.55,) * 8) == 1 * 2
    assert num((0.55,) * 4) == 1  # a tenth of 10
    assert num((0.0,) * 4, prefill_tokens_left=6400) == 2 * 4  # prompts to come take 40% of the memory
    assert num((0.0,) * 4, prefill_tokens_left=9600) == 2  # the first signal goes by what is in use
    assert num((0.0,) * 4, max_num_seqs=5, num_in_flight=3) == 8  # free seats


def test_an_interval_never_asks_for_more_than_there_is_room_for() -> None:
    manager = QueueManagerAdmission(interval_s=60.0)
    fleet = regions(east=(0.3, 0.3))
    room = 0.3 * 32_000 / 356
    assert len(released(manager, fleet, [batch(i) for i in range(99)], 10.0)) == int(room)


def test_each_endpoint_asks_for_its_own() -> None:
    held = [batch(i, float(i)) for i in range(9)]
    fleet = regions(east=(0.9, 0.2), west=0.1, central=0.7)  # one for east at 55%, two for west
    assert asking(one_signal(), fleet, held) == ["west", "west", "east"]
    assert asking(one_signal(), fleet, held[:1]) == ["west"]
    fleet[2].is_draining = True
    assert asking(one_signal(), fleet, held) == ["east"]
    assert released(QueueManagerAdmission(), [], held, 10.0) == []


def test_interactive_pools_have_no_room_for_batch_work() -> None:
    fleet = regions(east=0.1, west=0.55)
    fleet[0].pool = "east-iw"
    held = [batch(i) for i in range(9)]
    assert asking(one_signal(interactive_suffix="-iw"), fleet, held) == ["west"]


def test_after_ten_hours_it_is_as_urgent_as_interactive_work() -> None:
    full = regions(east=0.99)
    held = [batch(0, 0.0), batch(1, 0.5), batch(2, HOUR_S)]
    assert released(QueueManagerAdmission(), full, held, 10 * HOUR_S - 1.0) == []
    assert released(QueueManagerAdmission(), full, held, 10 * HOUR_S) == [Release(0, 0)]
    assert released(QueueManagerAdmission(), full, held, 10 * HOUR_S + 0.5) == [Release(0, 0), Release(1, 0)]
    assert released(QueueManagerAdmission(urgent_tier=1), [], held, 11 * HOUR_S) == [Release(i, 1) for i in range(3)]


def test_who_is_urgent_takes_nobody_s_place() -> None:
    held = [batch(i, 0.0 if i < 2 else 9 * HOUR_S) for i in range(6)]
    expected = [Release(0, 0), Release(1, 0), Release(2, region="east"), Release(3, region="east")]
    assert released(one_signal(), regions(east=0.2), held, 10 * HOUR_S) == expected


def test_a_deadline_that_comes_sooner_counts() -> None:
    full = regions(east=0.99)
    held = [batch(0, 0.0), batch(1, 0.0, deadline_s=3 * HOUR_S), batch(2, 0.0, deadline_s=5 * HOUR_S)]
    assert released(QueueManagerAdmission(), full, held, 2 * HOUR_S - 1.0) == []
    assert released(QueueManagerAdmission(), full, held, 2 * HOUR_S) == [Release(1, 0)]
    assert released(QueueManagerAdmission(margin_s=0.0), full, held, 2 * HOUR_S) == []
    late = QueueManagerAdmission(urgent_after_s=1e9)  # then only deadlines count, a day unless said
    assert released(late, full, held[:1], 23 * HOUR_S - 1.0) == []
    assert released(late, full, held[:1], 23 * HOUR_S) == [Release(0, 0)]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"threshold": 0.4}, "low_threshold: "),
        ({"urgent_tier": 3}, "urgent_tier: "),
        ({"batch_tier": 0}, "batch_tier: "),
    ],
)
def test_the_queue_manager_refuses(config: dict[str, Any], says: str) -> None:
    with pytest.raises(HeadwayError, match=says):
        QueueManagerAdmission(**config)


# Orderings.


def served(ordering: Any, requests: list[FakeRequest], now: float) -> list[int]:
    """Ids in order of rank; ties go to the lower id."""
    return [r.id for r in sorted(requests, key=lambda r: (ordering.rank(r, now), r.id))]


def test_dpa_serves_its_six_categories_in_order() -> None:
    # At 100 s, with tau_n = 10 and tau_p = 2; deadlines as (id, tier, arrival, TTFT SLO).
    now = 100.0
    given_ = [
        (0, 1, 80.0, 5.0),  # d = -15: severely expired
        (1, 0, 81.0, 5.0),  # d = -14: severely expired, later
        (2, 0, 99.5, 1.0),  # d = 0.5: urgent, fast
        (3, 1, 42.0, 60.0),  # d = 2: urgent, normal
        (4, 0, 99.0, 5.0),  # d = 4: not urgent, fast
        (5, 1, 50.0, 60.0),  # d = 10: not urgent, normal
        (6, 1, 50.0, 45.0),  # d = -5: recently expired
        (7, 0, 98.0, 1.0),  # d = -1: recently expired, later
        (8, 2, 10.0, None),  # batch
    ]
    requests = [FakeRequest(id, arrival, tier=tier, slo_ttft_s=slo) for id, tier, arrival, slo in given_]
    dpa = DeadlinePriorityOrdering(tau_n_s=10.0, tau_p_s=2.0)
    assert served(dpa, requests[::-1], now) == list(range(9))


@pytest.mark.parametrize(
    ("left_s", "category"),
    [
        (2.001, "not urgent"),
        (2.0, "urgent"),
        (0.0, "urgent"),
        (-0.001, "recent"),
        (-10.0, "recent"),
        (-10.001, "severe"),
    ],
)
def test_dpa_at_its_bounds(left_s: float, category: str) -> None:
    dpa = DeadlinePriorityOrdering(tau_n_s=10.0, tau_p_s=2.0)
    like = {"not urgent": 50.0, "urgent": 1.0, "recent": -5.0, "severe": -50.0}
    ranks = {name: dpa.rank(FakeRequest(deadline_s=64.0 + each), 64.0) for name, each in like.items()}
    assert dpa.rank(FakeRequest(deadline_s=64.0 + left_s), 64.0) == ranks[category]
    assert len(set(ranks.values())) == 4


def test_dpa_says_when_a_category_ends() -> None:
    dpa = DeadlinePriorityOrdering(tau_n_s=10.0, tau_p_s=2.0)
    request, now, ranks = FakeRequest(arrival_s=3.0, slo_ttft_s=5.0), 3.0, []
    changes = []
    while (change_s := dpa.next_change(request, now)) is not None:
        ranks.append(dpa.rank(request, now))
        changes.append(change_s)
        now = change_s
    assert changes == pytest.approx([6.0, 8.0, 18.0])
    assert dpa.rank(request, now) < ranks[1] < ranks[0] < ranks[2]
    assert dpa.next_change(FakeRequest(generated_tokens=1), 3.0) is None


def test_dpa_leaves_alone_who_has_begun() -> None:
    dpa = DeadlinePriorityOrdering()
    begun = FakeRequest(arrival_s=90.0, tier=1, slo_ttft_s=1.0, generated_tokens=1)  # it expired recently
    assert dpa.rank(begun, 100.0) < dpa.rank(FakeRequest(arrival_s=0.0, slo_ttft_s=1.0), 100.0)
    assert not dpa.preemptive


def test_dpa_without_a_ttft_slo_takes_the_deadline() -> None:
    dpa = DeadlinePriorityOrdering(tau_p_s=2.0, default_deadline_s=60.0)
    changes = [
        dpa.next_change(request, 0.0)
        for request in (
            FakeRequest(slo_ttft_s=5.0, deadline_s=90.0),
            FakeRequest(deadline_s=90.0),
            FakeRequest(),
        )
    ]
    assert changes == [3.0, 88.0, 58.0]


PROMOTED_AT_S = 10 * HOUR_S
ON_A_PAR = [
    PriorityFirstOrdering(), PriorityFirstOrdering(classes=(2,)), EdfOrdering(), DeadlinePriorityOrdering(),
    PriorityOrdering(), TierPromotionOrdering(), FcfsOrdering(), FairOrdering(), VtcOrdering(),
    DeficitRoundRobinOrdering(), LeastAttainedServiceOrdering(), PascalOrdering(), TiersAndPhasesOrdering(),
]  # fmt: skip


@pytest.mark.parametrize("ordering", ON_A_PAR, ids=lambda ordering: type(ordering).__name__)
@pytest.mark.parametrize("deadline_s", [None, 86_400.0])
def test_promoted_work_is_on_a_par_with_interactive_work(ordering: Any, deadline_s: float | None) -> None:
    """Between the interactive requests that have arrived before its promotion and those that arrive after it (6.2)."""
    before = [FakeRequest(1, PROMOTED_AT_S - 0.2), FakeRequest(2, PROMOTED_AT_S - 0.1)]
    promoted = FakeRequest(0, 0.0, promoted_s=PROMOTED_AT_S, deadline_s=deadline_s)
    after = [FakeRequest(3, PROMOTED_AT_S + 0.1), FakeRequest(4, PROMOTED_AT_S + 0.2)]
    assert served(ordering, [*after, promoted, *before], PROMOTED_AT_S + 0.3) == [1, 2, 0, 3, 4]


def test_promoted_work_is_due_as_interactive_work_that_arrives_then() -> None:
    """By hand, 60 s without a TTFT SLO: after fast requests (1 s) until 59 s later, then before them."""
    promoted = FakeRequest(0, 0.0, promoted_s=PROMOTED_AT_S, deadline_s=86_400.0)
    fast = [FakeRequest(i + 1, PROMOTED_AT_S + i * 10.0, slo_ttft_s=1.0) for i in range(8)]
    normal = FakeRequest(9, PROMOTED_AT_S - 1.0, tier=1, slo_ttft_s=60.0)
    assert served(EdfOrdering(), [promoted, normal, *fast], 0.0) == [1, 2, 3, 4, 5, 6, 9, 0, 7, 8]
    soon = FakeRequest(0, 0.0, promoted_s=PROMOTED_AT_S, deadline_s=PROMOTED_AT_S + 5.0)
    assert EdfOrdering().rank(soon, 0.0)[0] == PROMOTED_AT_S + 5.0, "its own deadline, where that is nearer"


def test_edf_goes_by_the_deadline_of_the_first_token() -> None:
    """Section 6.5: d_r is the time left until the TTFT deadline, whatever the request's other targets are."""
    first = FakeRequest(0, 0.0, slo_ttft_s=1.0, slo_e2e_s=90.0, deadline_s=500.0)
    second = FakeRequest(1, 0.0, slo_ttft_s=2.0, slo_e2e_s=10.0)
    third = FakeRequest(2, 0.0, slo_e2e_s=20.0)
    assert served(EdfOrdering(), [third, second, first], 0.0) == [0, 1, 2]
    assert [EdfOrdering().rank(each, 0.0)[0] for each in (first, second, third)] == [1.0, 2.0, 20.0]


def test_pf_goes_by_class_and_then_by_arrival() -> None:
    requests = [FakeRequest(i, float(9 - i), tier=tier) for i, tier in enumerate((0, 2, 1, 0, 3, 1))]
    assert served(PriorityFirstOrdering(), requests, 10.0) == [3, 0, 5, 2, 4, 1]
    assert served(PriorityFirstOrdering(classes=(2,)), requests, 10.0) == [5, 3, 2, 0, 4, 1]
    assert not PriorityFirstOrdering().preemptive
    with pytest.raises(HeadwayError, match="classes: expected tiers from low to high"):
        PriorityFirstOrdering(classes=(2, 1))


def test_edf_serves_expired_requests_first() -> None:
    # As section 6.5 has it: by the time left until the deadline, which is below 0 for those that have expired.
    requests = [
        FakeRequest(0, 99.0, tier=0, slo_ttft_s=1.0),
        FakeRequest(1, 99.0, tier=1, slo_ttft_s=60.0),
        FakeRequest(2, 39.0, tier=1, slo_ttft_s=60.0),
        FakeRequest(3, 98.5, tier=0, slo_ttft_s=1.0),
        FakeRequest(4, 10.0, tier=2, deadline_s=86_410.0),
    ]
    assert served(EdfOrdering(), requests, 99.7) == [2, 3, 0, 1, 4]


endpoints = st.lists(
    st.integers(0, 1000).flatmap(
        lambda total: st.builds(FakeReplica, kv_blocks_total=st.just(total), kv_blocks_used=st.integers(0, total))
    ),
    max_size=6,
)


@pytest.mark.ci
@given(endpoints, st.sampled_from([0.0, 0.3, 0.5, 0.6, 0.7, 1.0]))
def test_a_look_at_some_replicas_says_what_a_look_at_all_says(replicas: list[FakeReplica], threshold: float) -> None:
    """To the bit: also where utilisation is just the threshold, and where there is nothing."""
    assert is_below(threshold, replicas) == (effective_use(replicas) < threshold)
    if sum(each.kv_blocks_total for each in replicas):
        just = effective_use(replicas)
        assert not is_below(just, replicas)


@pytest.mark.ci
@given(endpoints, endpoints)
def test_a_combo_is_as_full_as_the_role_that_uses_more(some: list[FakeReplica], others: list[FakeReplica]) -> None:
    prefill, decode = (
        [replace(each, role=role) for each in them] for role, them in (("prefill", some), ("decode", others))
    )
    uses = [effective_use(them) for them in (prefill, decode) if them]
    assert fullest_use(prefill + decode) == max(uses, default=1.0)
    assert fullest_use(some) == effective_use(some), "whose replicas are all alike"


@pytest.mark.ci
@given(st.lists(endpoints.filter(bool), min_size=1, max_size=3), st.integers(0, 8))
def test_the_queue_manager_lets_go_as_many_as_all_endpoints_ask_for(
    regions: list[list[FakeReplica]], held: int
) -> None:
    """One below 60%, two below 50%, as far as there are so many, whatever was read to find out."""
    replicas = [replace(each, region=str(i)) for i, some in enumerate(regions) for each in some]
    requests = [FakeRequest(id=i, tier=2, arrival_s=0.0) for i in range(held)]
    uses = [effective_use(some) for some in regions]
    asked = sum((use < 0.6) + (use < 0.5) for use in uses)
    assert len(released(one_signal(), replicas, requests, 1.0)) == min(asked, held)
    assert len(released(QueueManagerAdmission(), replicas, requests, 1.0)) >= min(asked, held)
