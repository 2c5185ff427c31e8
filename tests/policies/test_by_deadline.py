"""Requests that may wait: which are held, and when they are released."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

from fakes import FakeReplica, FakeRequest
from headway.policies.admission.by_deadline import ByDeadlineAdmission
from headway.testing.stories import LinearTimes

TIMES = LinearTimes(2e-5, 0.010, 2e-4, 1e-8)


@dataclass
class View:
    """`core.view.AdmissionView`."""

    replicas: list[FakeReplica]
    held: list[Any]
    now: float = 0.0
    random: Random = field(default_factory=Random)


def replica(num: int = 0, **given: Any) -> FakeReplica:
    return FakeReplica(0, **{"num_in_flight": num, "times": TIMES, "kv_blocks_total": 1 << 20, **given})


def may_wait(id: int = 0, **given: Any) -> FakeRequest:
    return FakeRequest(id=id, **{"prompt_tokens": 100, "deadline_s": 3600.0, **given})


def released(view: View, policy: ByDeadlineAdmission | None = None) -> list[int]:
    return [each.request for each in (policy or ByDeadlineAdmission()).release(view)]


def test_what_has_a_late_deadline_and_no_slo_is_held_whatever_its_tier() -> None:
    policy = ByDeadlineAdmission()
    assert policy.holds(may_wait(tier=0)) and policy.holds(may_wait(tier=3))
    assert not policy.holds(FakeRequest(tier=3))
    assert not policy.holds(may_wait(deadline_s=30.0))
    assert not policy.holds(may_wait(slo_ttft_s=5.0))


def test_held_requests_are_released_as_long_as_they_delay_nobody() -> None:
    held = [may_wait(id) for id in range(200)]
    fast = len(released(View([replica()], held)))
    # An iteration of half of 50 ms has 75 sequences; prompts to compute are within half a second all along.
    assert 70 <= fast <= 76
    assert released(View([replica(80)], held)) == []
    assert released(View([replica(10, num_waiting=1)], held)) == []
    assert released(View([replica(10, prefill_tokens_left=30_000)], held)) == []
    assert released(View([replica(10, kv_blocks_used=900, kv_blocks_total=1000)], held)) == []
    assert released(View([replica(10, is_draining=True)], held)) == []


def test_the_tightest_slos_of_the_others_set_the_room() -> None:
    policy = ByDeadlineAdmission()
    policy.holds(FakeRequest(slo_tpot_s=0.03))
    held = [may_wait(id) for id in range(200)]
    assert 20 <= len(released(View([replica()], held), policy)) <= 26
    policy = ByDeadlineAdmission()
    policy.holds(FakeRequest(slo_ttft_s=0.1))
    assert 23 <= len(released(View([replica()], held), policy)) <= 25  # 100 tokens take 2 ms


def test_the_earliest_deadline_is_first_and_is_kept() -> None:
    full = replica(80)
    early, late = may_wait(1, deadline_s=1000.0), may_wait(0, deadline_s=9000.0)
    assert released(View([replica()], [late, early])) == [1, 0]
    assert released(View([full], [late, early], now=870.0)) == []
    assert released(View([full], [late, early], now=880.0)) == [1]
    assert released(View([full], [may_wait(2, deadline_s=100.0)], now=60.0)) == [2]
