"""Orderings of tiers: promotion while a request waits, and tiers together with phases."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import FakeRequest
from headway.core.errors import HeadwayError
from headway.core.policy import MovingOrdering, Ordering, QueuedOrdering, SteppedOrdering
from headway.core.request import Phase
from headway.policies import resolve
from headway.policies.ordering.phases import PascalOrdering, TiersAndPhasesOrdering
from headway.policies.ordering.tiers import PriorityOrdering, TierPromotionOrdering


def served(ordering: Ordering, requests: list[FakeRequest], now: float = 100.0) -> list[int]:
    return [r.id for r in sorted(requests, key=lambda r: (ordering.rank(r, now), r.id))]


# tier-promotion


def test_a_tier_for_each_quota() -> None:
    ordering, request = TierPromotionOrdering(quota_s=10.0), FakeRequest(arrival_s=5.0, tier=2)
    times = (5.0, 14.9, 15.0, 24.9, 25.0, 1e9)
    assert [ordering.rank(request, now)[0] for now in times] == [2, 2, 1, 1, 0, 0]
    assert [ordering.next_change(request, now) for now in times] == [15.0, 15.0, 25.0, 25.0, None, None]


def test_quotas_by_tier() -> None:
    ordering, request = TierPromotionOrdering(quota_s=(99.0, 1.0, 20.0)), FakeRequest(tier=4)
    changes, now = [], 0.0
    while (change := ordering.next_change(request, now)) is not None:
        changes.append(now := change)
    assert changes == [20.0, 40.0, 60.0, 61.0]  # out of tiers 4, 3, 2 and 1
    assert [ordering.rank(request, at)[0] for at in changes] == [3, 2, 1, 0]


def test_nobody_starves() -> None:
    """Tier 0 always comes, each a second apart; the request of tier 3 is first in the end."""
    late = FakeRequest(-1, arrival_s=0.0, tier=3)
    for now, first in ((29.0, False), (30.0, True)):
        urgent = [FakeRequest(i, arrival_s=float(i)) for i in range(1, int(now))]
        assert (served(TierPromotionOrdering(10.0), [late, *urgent], now)[0] == -1) is first
        assert served(PriorityOrdering(), [late, *urgent], now)[-1] == -1


@given(
    tier=st.integers(0, 9),
    arrival_s=st.floats(0, 1e6),
    quotas=st.lists(st.floats(0.001, 1e3), min_size=1, max_size=4),
    waits=st.lists(st.floats(0, 1e3), min_size=2, max_size=8),
)
def test_ranks_only_rise_and_only_when_said(
    tier: int, arrival_s: float, quotas: list[float], waits: list[float]
) -> None:
    ordering, request = TierPromotionOrdering(tuple(quotas)), FakeRequest(tier=tier, arrival_s=arrival_s)
    times = sorted(arrival_s + wait for wait in waits)
    for before, after in pairwise(times):
        was, now = ordering.rank(request, before), ordering.rank(request, after)
        change = ordering.next_change(request, before)
        assert now <= was and 0 <= now[0] <= tier
        assert (now < was) == (change is not None and change <= after)


@pytest.mark.parametrize("quota_s", [0.0, -1.0, (), (1.0, 0.0)])
def test_quotas_are_checked(quota_s: Any) -> None:
    with pytest.raises(HeadwayError, match="quota_s"):
        TierPromotionOrdering(quota_s)


# tiers-and-phases

REASONS, ANSWERS = Phase.REASONING, Phase.ANSWERING


def request(id: int, tier: int, phase: Phase, **others: Any) -> FakeRequest:
    return FakeRequest(id, tier=tier, phase=phase, **others)


def test_tiers_come_before_phases_or_after() -> None:
    every = [request(i, tier, phase) for i, (tier, phase) in enumerate(product(range(3), (REASONS, ANSWERS)))]
    assert served(TiersAndPhasesOrdering(3), every[::-1]) == [0, 1, 2, 3, 4, 5]
    assert served(TiersAndPhasesOrdering(3, phases_first=True), every[::-1]) == [0, 2, 4, 1, 3, 5]


def test_an_urgent_answer_and_a_later_tier_s_reasoning() -> None:
    both = [request(0, 1, REASONS), request(1, 0, ANSWERS)]
    assert served(TiersAndPhasesOrdering(), both) == [1, 0]
    assert served(TiersAndPhasesOrdering(phases_first=True), both) == [0, 1]


def test_long_reasoning_is_demoted_within_its_tier() -> None:
    ordering = TiersAndPhasesOrdering(2, demotion_tokens=1000)
    long = request(0, 0, REASONS, prompt_tokens=100, generated_tokens=900)
    assert (ordering.queue(long), ordering.next_change_tokens(long)) == (0, 1)
    long.generated_tokens += 1
    assert (ordering.queue(long), ordering.next_change_tokens(long)) == (1, None)
    assert ordering.queue(request(1, 1, REASONS)) == 2


def test_turns_then_arrival_within_a_queue() -> None:
    line = [request(0, 0, ANSWERS, turn=2), request(1, 0, ANSWERS, turn=1, arrival_s=9.0)]
    line.append(request(2, 0, ANSWERS, turn=1, arrival_s=8.0))
    assert served(TiersAndPhasesOrdering(), line) == [2, 1, 0]


@given(
    num_tiers=st.integers(1, 5),
    phases_first=st.booleans(),
    tier=st.integers(0, 8),
    phase=st.sampled_from(Phase),
    tokens=st.integers(0, 9000),
)
def test_queues_are_as_the_ranks_say(num_tiers: int, phases_first: bool, tier: int, phase: Phase, tokens: int) -> None:
    ordering = TiersAndPhasesOrdering(num_tiers, phases_first=phases_first)
    one = request(0, tier, phase, generated_tokens=tokens, turn=7, arrival_s=3.0)
    queue = ordering.queue(one)
    assert 0 <= queue < ordering.num_queues == 2 * num_tiers
    assert ordering.rank(one, 50.0) == (queue, 0, 7, 3.0)
    left = ordering.next_change_tokens(one)
    if left is None:
        assert ordering.queue(replace(one, generated_tokens=tokens + 9999)) == queue
    else:
        assert ordering.queue(replace(one, generated_tokens=tokens + left - 1)) == queue
        assert ordering.queue(replace(one, generated_tokens=tokens + left)) > queue


@given(tier=st.integers(0, 3), phase=st.sampled_from(Phase), tokens=st.integers(0, 9000))
def test_with_one_tier_it_is_pascal(tier: int, phase: Phase, tokens: int) -> None:
    one = request(0, tier, phase, generated_tokens=tokens, turn=3, arrival_s=1.0)
    for ordering in (TiersAndPhasesOrdering(1), TiersAndPhasesOrdering(1, phases_first=True)):
        assert ordering.rank(one, 9.0) == PascalOrdering().rank(one, 9.0)
        assert ordering.next_change_tokens(one) == PascalOrdering().next_change_tokens(one)


def test_what_they_tell_the_engine() -> None:
    rising, phased = TierPromotionOrdering(), TiersAndPhasesOrdering()
    assert (rising.quantum, rising.preemptive, TierPromotionOrdering(preemptive=True).preemptive) == (None, False, True)
    assert isinstance(rising, MovingOrdering) and not isinstance(rising, SteppedOrdering | QueuedOrdering)
    assert (phased.quantum, phased.preemptive, phased.num_queues) == (500, True, 8)
    assert isinstance(phased, SteppedOrdering) and isinstance(phased, QueuedOrdering)
    assert not isinstance(phased, MovingOrdering)
    with pytest.raises(HeadwayError, match="num_tiers"):
        TiersAndPhasesOrdering(0)


# As a scenario says them.


@pytest.mark.parametrize(
    ("spec", "shown"),
    [
        ({"name": "tier-promotion", "quota_s": 30}, "tier-promotion(quota_s=30)"),
        ({"name": "tier-promotion", "quota_s": [5, 10, 20.5]}, "tier-promotion(quota_s=(5.0, 10.0, 20.5))"),
        ({"name": "tiers-and-phases", "phases_first": True}, "tiers-and-phases(phases_first=true)"),
    ],
)
def test_orderings_in_a_scenario(spec: dict[str, Any], shown: str) -> None:
    assert str(resolve.ordering(spec)) == shown


@pytest.mark.parametrize(
    "spec",
    [
        "infaas",
        {"name": "freest", "decay": "auto", "headroom": "binary", "adaptive": True},
        {"name": "freest", "decay": 2, "num_tiers": 8},
    ],
)
def test_routers_in_a_scenario(spec: Any) -> None:
    assert resolve.router(spec)()


def test_a_wrong_kind_of_headroom_is_told() -> None:
    with pytest.raises(HeadwayError, match="freest: headroom"):
        resolve.router({"name": "freest", "headroom": "lots"})
    with pytest.raises(HeadwayError, match="freest: decay"):
        resolve.router({"name": "freest", "decay": "fast"})
