"""Requests that an admission policy holds and releases."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from control_fakes import Fleet, fleet
from headway.control.live import ENDED, HELD, WAITING
from headway.core.decision import Release
from headway.core.errors import HeadwayError
from headway.core.record import Outcome
from headway.core.view import AdmissionView, RequestView


class BatchTier:
    """Holds tier 2 and releases what the test says."""

    interval_s = 1.0

    def __init__(self) -> None:
        self.releases: Sequence[Release] = ()
        self.held: list[int] = []

    def holds(self, request: RequestView) -> bool:
        return request.tier == 2

    def release(self, view: AdmissionView) -> Sequence[Release]:
        self.held = [request.id for request in view.held]
        return self.releases


def admitting() -> tuple[Fleet, BatchTier]:
    policy = BatchTier()
    return fleet("mixed", admission=lambda: policy, max_tokens=100), policy


def tick(run: Fleet) -> None:
    for ticking in run.control.parts.ticking():
        ticking.tick(1.0)


def test_a_held_request_is_placed_when_it_is_released() -> None:
    run, policy = admitting()
    urgent, batch = run.arrive(0, tier=0), run.arrive(1, tier=2)
    assert (urgent.stage, batch.stage) == (WAITING, HELD)
    assert [live.id for live in run.control.parts.held_requests()] == [1]
    policy.releases = [Release(1, tier=1, region="west")]
    tick(run)
    assert (batch.stage, batch.tier, batch.release_region, policy.held) == (WAITING, 1, "west", [1])


@pytest.mark.parametrize(("tier", "since_s"), [(0, 1.0), (2, 0.0), (None, 0.0)])
def test_a_request_has_another_tier_since_its_release(tier: int | None, since_s: float) -> None:
    """It stands among those that arrive then; a release without another tier keeps its place."""
    run, policy = admitting()
    live = run.arrive(0, tier=2)
    policy.releases = [Release(0, tier=tier)]
    tick(run)
    assert (live.arrival_s, live.tier_since_s) == (0.0, since_s)


def test_a_request_that_fits_no_replica_is_not_held() -> None:
    run, _ = admitting()
    assert run.arrive(0, tier=2, prompt=1000).stage is ENDED


def test_a_held_request_that_times_out_is_no_longer_held() -> None:
    run, _ = admitting()
    live = run.arrive(0, tier=2)
    run.control.on_timeout(1.0, live)
    assert run.effects.ended == [(0, Outcome.CANCELLED)] and run.control.parts.held_requests() == []


def test_only_held_requests_can_be_released() -> None:
    run, policy = admitting()
    run.arrive(0, tier=2)
    policy.releases = [Release(7)]
    with pytest.raises(HeadwayError, match="admission BatchTier released request 7, which it does not hold"):
        tick(run)
