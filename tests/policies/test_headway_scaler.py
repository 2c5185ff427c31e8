"""Headway's scaler: limits, the forecast as floor, reaction to a flood, steadiness, start times, and mixed fleets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import FakePool, FakePools, FakeReplica
from headway.core.policy import Floats
from headway.policies.scaling.demand import ArrivalCounts
from headway.policies.scaling.growth import RecentGrowth
from headway.policies.scaling.headway import HeadwayScaler
from headway.policies.scaling.start_times import StartTimes

PROMPT_TOKENS = 100
SERVED_RPS = 2.0
"""What a replica of the fluid fleet serves when full."""
START_S = 60.0


class FluidFleet:
    """A fleet of one model whose replicas use as much of their caches as requests come."""

    def __init__(self, scaler: HeadwayScaler, *pools: FakePool, start_s: float = START_S, limit: int = 1000) -> None:
        self.scaler, self.pools, self.start_s, self.limit = scaler, pools, start_s, limit
        self.now, self.requests, self.backlog = 0.0, 0.0, 0.0
        self.starting: list[tuple[float, FakePool]] = []
        self.speed = {pool.name: SERVED_RPS for pool in pools}
        self.counts: list[int] = []

    def run(self, rate_rps: float, duration_s: float) -> None:
        until_s = self.now + duration_s
        while self.now < until_s:
            self.step(rate_rps)

    def step(self, rate_rps: float) -> Mapping[str, int]:
        self.now += self.scaler.interval_s
        self._start()
        self.requests += rate_rps * self.scaler.interval_s
        full_rps = sum(self.speed[pool.name] * pool.num_serving for pool in self.pools)
        waiting = self.backlog + rate_rps * self.scaler.interval_s
        self.backlog = max(waiting - full_rps * self.scaler.interval_s, 0.0)
        use = min(waiting / self.scaler.interval_s / full_rps, 1.0)
        replicas = [replica for pool in self.pools for replica in pool.replicas]
        for replica in replicas:
            replica.kv_blocks_used = round(1000 * use)
            replica.prefill_tokens_left = round(self.backlog * PROMPT_TOKENS / len(replicas))
        arrived = {("", "", 0): (round(self.requests), round(self.requests * PROMPT_TOKENS))}
        wanted = self.scaler.scale(FakePools(self.pools, self.now, arrived))
        for pool in self.pools:
            self._follow(pool, wanted.get(pool.name, self.number(pool)))
        self.counts.append(sum(self.number(pool) for pool in self.pools))
        return wanted

    @staticmethod
    def number(pool: FakePool) -> int:
        return pool.num_serving + pool.num_starting

    def _start(self) -> None:
        for at_s, pool in self.starting[:]:
            if at_s <= self.now:
                self.starting.remove((at_s, pool))
                pool.num_starting -= 1
                pool.replicas = [*pool.replicas, FakeReplica(len(pool.replicas), combo=len(pool.replicas))]

    def _follow(self, pool: FakePool, wanted: int) -> None:
        assert pool.min_replicas <= wanted <= pool.max_replicas
        while self.number(pool) < wanted and sum(map(self.number, self.pools)) < self.limit:
            pool.num_starting += 1
            self.starting.append((self.now + self.start_s - 1.0, pool))
        if self.number(pool) > wanted:
            pool.replicas = pool.replicas[: max(wanted - pool.num_starting, 1)]


def pool(num: int = 4, **given: Any) -> FakePool:
    return FakePool(replicas=[FakeReplica(i, combo=i) for i in range(num)], **{"max_replicas": 100, **given})


def test_a_constant_load_is_covered_at_the_targeted_use_without_changes() -> None:
    fleet = FluidFleet(HeadwayScaler(use=0.5), pool(4))
    fleet.run(rate_rps=8.0, duration_s=1800)
    assert set(fleet.counts[-240:]) == {8}  # 8 requests/s at half of 2


def test_a_flood_is_answered_within_one_interval() -> None:
    fleet = FluidFleet(HeadwayScaler(use=0.5), pool(4))
    fleet.run(4.0, 900)
    before = fleet.counts[-1]
    assert fleet.step(100.0)["main"] > before
    fleet.run(100.0, 300)
    assert 90 <= fleet.counts[-1] <= 100  # 100 at the targeted use


def test_what_starts_counts() -> None:
    """Until the first replica is up, the load does not fall; what is asked for does not grow with it."""
    fleet = FluidFleet(HeadwayScaler(use=0.5), pool(4), start_s=600)
    fleet.run(4.0, 900)
    fleet.run(8.0, 500)
    assert fleet.counts[-1] <= 13  # 8 and what works off the backlog


def test_no_replica_goes_while_the_floor_needs_it() -> None:
    class Hump:
        cheats = False

        def forecast(self, history: Floats, steps: int, quantiles: Any) -> Floats:
            return np.full((1, steps), 900.0)  # input tokens per second

    fleet = FluidFleet(
        HeadwayScaler(use=0.5, interval_s=15, step_s=60, forecaster=lambda model, region: Hump()), pool(12)
    )
    fleet.run(2.0, 3600)
    assert min(fleet.counts) == 9  # 900 tokens/s at 100 for each replica

    unforecast = FluidFleet(HeadwayScaler(use=0.5), pool(12))
    unforecast.run(2.0, 3600)
    assert unforecast.counts[-1] == 2


def test_a_peak_is_kept_for_a_start_time() -> None:
    fleet = FluidFleet(HeadwayScaler(use=0.5, hold_s=600), pool(4))
    fleet.run(4.0, 900)
    fleet.run(8.0, 300)
    fleet.run(4.0, 500)
    assert fleet.counts[-1] >= 8
    fleet.run(4.0, 700)
    assert fleet.counts[-1] <= 5


def test_growth_that_was_seen_before_is_expected_within_the_start_time() -> None:
    """Demand that doubles every hour within ten minutes: slow starts ask for more at the bottom than quick ones."""

    def least(start_s: float) -> int:
        fleet = FluidFleet(
            HeadwayScaler(use=0.5, hold_s=120, startup_s=start_s, interval_s=15), pool(8), start_s=start_s
        )
        for _ in range(4):
            fleet.run(4.0, 1200)
            fleet.run(8.0, 600)
        return min(fleet.counts[-240:])

    assert least(600.0) > least(30.0)


def test_the_cheapest_capacity_grows_and_the_dearest_goes() -> None:
    dear, cheap = pool(3, name="dear", usd_per_hour=4.0), pool(2, name="cheap", usd_per_hour=1.0)
    fleet = FluidFleet(HeadwayScaler(use=0.5), dear, cheap)
    fleet.run(10.0, 1200)
    assert (fleet.number(dear), fleet.number(cheap)) == (1, 9) or fleet.number(cheap) >= 7
    fleet.run(1.0, 2400)
    assert (fleet.number(dear), fleet.number(cheap)) == (1, 1)  # the least of each


def test_a_pool_without_room_is_passed_over() -> None:
    """Views show no GPU limits: a pool that did not start what was asked for counts as full for a minute."""
    scaler = HeadwayScaler(use=0.5, tps={"": 100.0})
    stuck, other = pool(2, name="stuck", usd_per_hour=1.0), pool(2, name="other", usd_per_hour=2.0)
    for replica in (*stuck.replicas, *other.replicas):
        replica.kv_blocks_used = 1000
    asked = scaler.scale(FakePools([stuck, other], 5.0, {("", "", 0): (30, 3000)}))
    assert set(asked) == {"stuck"}
    assert set(scaler.scale(FakePools([stuck, other], 10.0, {("", "", 0): (60, 6000)}))) == {"other"}


def test_pools_that_fail_to_start_are_passed_over() -> None:
    scaler = HeadwayScaler(use=0.5, tps={"": 100.0})
    failing, other = pool(2, name="a", num_failed=1), pool(2, name="b", usd_per_hour=2.0)
    assert set(scaler.scale(FakePools([failing, other], 5.0, {("", "", 0): (30, 3000)}))) == {"b"}


@given(st.floats(2, 200), st.floats(0, 1))
def test_a_rate_that_has_risen_is_seen_at_once_and_a_constant_one_is_left_alone(rate: float, phase: float) -> None:
    steady, risen = ArrivalCounts(60.0), ArrivalCounts(60.0)
    for i in range(40):
        at_s = 5.0 * i
        steady.push(at_s, int(rate * at_s + phase))
        risen.push(at_s, int(rate * at_s + phase + 4 * rate * max(at_s - 185, 0)))
    assert steady.present_rps(60.0) == steady.rate_rps(60.0)
    assert risen.present_rps(60.0) == pytest.approx(5 * rate, rel=0.15) and risen.rate_rps(60.0) < 2 * rate


def test_a_step_is_answered_within_two_intervals_and_what_clears_the_backlog_is_not_kept() -> None:
    fleet = FluidFleet(HeadwayScaler(), pool(2, max_replicas=30))
    fleet.run(2.0, 1800)
    before = fleet.number(fleet.pools[0])
    fleet.run(20.0, 15)
    demand = 20.0 / SERVED_RPS / 0.7
    assert fleet.number(fleet.pools[0]) >= min(2 * before + 4, 8)
    fleet.run(20.0, 180)
    most = max(fleet.counts)
    assert most > demand and fleet.backlog == 0
    fleet.run(20.0, 900)
    assert demand - 1 <= fleet.number(fleet.pools[0]) < most


def test_combos_are_scaled_by_their_goodput() -> None:
    roles = [FakeReplica(0, role="prefill"), FakeReplica(1, role="decode")]

    class Combos(FakePool):
        num_serving = 1

    combos = Combos(name="pair", replicas=roles, goodput_rps=2.0, max_replicas=20)
    scaler = HeadwayScaler(hold_s=120)
    scaler.scale(FakePools([combos], 0.0, {("", "", 0): (0, 0)}))
    wanted = scaler.scale(FakePools([combos], 20.0, {("", "", 0): (200, 20_000)}))
    assert wanted["pair"] == 6  # 10 requests/s, 2 for each, and what waits until they serve; no step adds more
    combos.replicas = [FakeReplica(i, combo=i // 2, role=("prefill", "decode")[i % 2]) for i in range(12)]
    Combos.num_serving = 6
    for i in range(2, 20):
        wanted = scaler.scale(FakePools([combos], 20.0 * i, {("", "", 0): (200 * i, 20_000 * i)}))
    assert 1 <= wanted["pair"] < 6


def test_regions_share_what_none_needs_whole() -> None:
    """Half a replica in each of three regions: two replicas, where regions need not cover all of their own."""
    pools = [pool(2, name=region, region=region, min_replicas=1) for region in ("a", "b", "c")]

    def total(epsilon: float) -> int:
        scaler = HeadwayScaler(use=0.5, tps={"": 100.0}, epsilon=epsilon, hold_s=0, startup_s=0)
        for i in range(1, 10):
            tokens = {("", region, 0): (i * 11, i * 1100) for region in "abc"}  # 110 tokens/s in each
            wanted = scaler.scale(FakePools(pools, 10.0 * i, tokens))
        return sum(wanted.get(each.name, 2) for each in pools)

    assert total(1.0) == 6
    assert total(0.5) == 4


def test_batch_work_is_no_demand() -> None:
    def counts(batch_tier: int | None) -> int:
        scaler, each = HeadwayScaler(use=0.5, tps={"": 100.0}, batch_tier=batch_tier), pool(2)
        return scaler.scale(FakePools([each], 60.0, {("", "", 2): (300, 60_000)})).get("main", 2)

    assert counts(None) > 2
    assert counts(2) == 2


def test_start_times_are_those_that_were_seen() -> None:
    starts, each = StartTimes(60.0), pool(1)
    starts.update([each], 0.0)
    assert starts.lead_s(each, 0.0) == 60.0
    each.num_starting = 2
    starts.update([each], 10.0)  # requested at 0
    assert starts.lead_s(each, 100.0) == 100.0  # lasts longer than expected
    each.num_starting = 0
    starts.update([each], 155.0)
    assert starts.lead_s(each, 155.0) == 155.0
    assert starts.lead_s(each, 500.0) == 155.0


def test_a_failed_start_is_no_start_time() -> None:
    starts, each = StartTimes(60.0), pool(1, num_starting=1)
    starts.update([each], 0.0)
    each.num_starting, each.num_failed = 0, 1
    starts.update([each], 900.0)
    assert starts.lead_s(each, 900.0) == 60.0


def test_growth_of_an_earlier_day_is_expected_at_its_time() -> None:
    day = np.concatenate([np.full(720, 100.0), np.full(720, 300.0)])  # a step at noon
    history = np.concatenate([day, day, day[:715]])
    found = RecentGrowth().forecast(history, 10, (0.5, 0.95))
    assert found[1].max() > 250
    assert RecentGrowth().forecast(history[:-360], 10, (0.95,)).max() < 110


@settings(max_examples=25, deadline=None)
@given(
    rates=st.lists(st.floats(0, 500), min_size=3, max_size=12),
    low=st.integers(0, 3),
    more=st.integers(0, 12),
    use=st.floats(0.1, 1),
)
def test_counts_stay_within_limits_whatever_comes(rates: list[float], low: int, more: int, use: float) -> None:
    fleet = FluidFleet(
        HeadwayScaler(use=use, interval_s=15), pool(max(low, 1), min_replicas=low, max_replicas=max(low, 1) + more)
    )
    for rate in rates:
        fleet.run(rate, 120.0)  # `_follow` checks the limits


@settings(max_examples=15, deadline=None)
@given(rate=st.floats(1.0, 60.0), start_s=st.sampled_from([10.0, 60.0, 300.0]), use=st.floats(0.3, 0.9))
def test_no_oscillation_under_constant_load(rate: float, start_s: float, use: float) -> None:
    scaler = HeadwayScaler(use=use, startup_s=start_s, interval_s=15)
    fleet = FluidFleet(scaler, pool(3, max_replicas=400), start_s=start_s)
    fleet.run(rate, 2400.0 + 4 * start_s)
    settled = fleet.counts[-40:]
    assert sorted(settled) in (settled, settled[::-1])  # what a replica serves may still be learnt
    assert settled[-1] * SERVED_RPS >= rate


@pytest.mark.parametrize("argument", ["hold_s", "batch_tier"])
def test_bad_optional_numbers_are_refused(argument: str) -> None:
    from headway.core.errors import HeadwayError

    with pytest.raises(HeadwayError, match=argument):
        HeadwayScaler(**{argument: -1})
