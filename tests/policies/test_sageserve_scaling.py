"""SageServe's scalers: when each takes a step, what the plan is, and how it is worked to."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import FakePool, FakePools, FakeReplica
from headway.core.errors import HeadwayError
from headway.core.policy import Floats
from headway.policies import resolve
from headway.policies.scaling.chiron import ChironScaler
from headway.policies.scaling.cover import GreedyCover
from headway.policies.scaling.demand import StepRates
from headway.policies.scaling.hourly_plan import Planning, SameTimeYesterday
from headway.policies.scaling.long_term import LongTermGapScaler, LongTermImmediateScaler, LongTermUtilizationScaler
from headway.policies.scaling.reactive import ReactiveScaler
from headway.policies.scaling.timetable import TimetableScaler
from headway.testing import check_scaler

HOUR_S = 3600.0
MINUTE_S = 60.0


def pool(use: float = 0.5, num: int = 4, name: str = "main", **given: Any) -> FakePool:
    """Replicas that use this share of their KV caches."""
    replicas = [FakeReplica(i, combo=i, kv_blocks_used=round(1000 * use)) for i in range(num)]
    return FakePool(name, replicas, **{"max_replicas": 20, **given})


def wanted(scaler: Any, one: FakePool, now: float = 0.0) -> int | None:
    return scaler.scale(FakePools([one], now)).get(one.name)


# Reactive.


@pytest.mark.parametrize(
    ("use", "number"), [(0.9, 5), (0.701, 5), (0.7, None), (0.5, None), (0.3, None), (0.299, 3), (0.0, 3)]
)
def test_out_above_70_and_in_below_30_per_cent(use: float, number: int | None) -> None:
    assert wanted(ReactiveScaler(), pool(use)) == number


def test_steps_are_a_cool_down_apart_pool_by_pool() -> None:
    scaler = ReactiveScaler()
    assert scaler.scale(FakePools([pool(0.9), pool(0.5, name="b")], 100.0)) == {"main": 5}
    assert scaler.scale(FakePools([pool(0.9, 5), pool(0.9, name="b")], 110.0)) == {"b": 5}
    assert wanted(scaler, pool(0.9, 5), 114.9) is None
    assert wanted(scaler, pool(0.9, 5), 115.0) == 6


def test_what_starts_counts_as_if_it_were_up() -> None:
    assert wanted(ReactiveScaler(), pool(0.8, 4, num_starting=1)) is None  # 0.8 * 4 / 5 = 0.64
    assert wanted(ReactiveScaler(), pool(0.9, 4, num_starting=1)) == 6  # 0.72
    assert wanted(ReactiveScaler(pending_guard=False), pool(0.8, 4, num_starting=1)) == 6
    assert wanted(ReactiveScaler(), pool(0.1, 4, num_starting=1)) is None
    assert wanted(ReactiveScaler(pending_guard=False), pool(0.1, 4, num_starting=1)) == 4


def test_reactive_keeps_to_the_bounds_and_leaves_one() -> None:
    assert wanted(ReactiveScaler(), pool(0.9, 4, max_replicas=4)) is None
    assert wanted(ReactiveScaler(), pool(0.1, 2, min_replicas=2)) is None
    assert wanted(ReactiveScaler(), pool(0.1, 1, min_replicas=0)) is None
    assert wanted(ReactiveScaler(), pool(0.1, 0, min_replicas=2)) == 2  # they have crashed


def test_what_drains_does_not_count() -> None:
    one = pool(0.9)
    one.replicas[0].is_draining = True
    one.replicas[0].kv_blocks_used = 0
    assert wanted(ReactiveScaler(), one) == 4


# The plan.


def test_steps_are_told_from_counts_seen_now_and_then() -> None:
    steps = StepRates(10.0)
    for now, count in ((5.0, 50), (10.0, 100), (15.0, 100), (35.0, 300), (40.0, 300)):
        steps.push(now, count)
    assert steps.rates == pytest.approx([10.0, 5.0, 10.0, 5.0])  # from 15 s to 35 s: 200, evenly
    late = StepRates(10.0, nothing_until_s=25.0)
    late.push(30.0, 100)
    assert late.rates == pytest.approx([0.0, 0.0, 10.0])


def test_last_day_is_the_day_before() -> None:
    history = np.array([1.0, 2.0, 3.0, 4.0, 2.0, 3.0, 4.0, 9.0])
    forecast = SameTimeYesterday(4).forecast(history, 6, (0.5, 1.0, 0.0))
    assert forecast[0].tolist() == [2.0, 3.0, 4.0, 9.0, 2.0, 3.0]
    assert (forecast[1] - forecast[0]).tolist() == [4.0] * 6  # it rose by 1, 1, 1 and 5
    assert (forecast[2] - forecast[0]).tolist() == [0.0] * 6
    assert SameTimeYesterday(9).forecast(history, 2, (0.5,)).tolist() == [[9.0, 9.0]]
    assert SameTimeYesterday(4).forecast(np.array([5.0]), 2, (0.1, 0.9)).tolist() == [[5.0, 5.0]] * 2


def cost_of(num: Mapping[str, int], pools: Sequence[FakePool], startup_s: float) -> float:
    """gamma + mu of section 5, each pool's price for an hour."""
    total = 0.0
    for one in pools:
        delta = num[one.name] - one.num_serving
        total += one.usd_per_hour * (delta + startup_s / HOUR_S * max(delta, 0))
    return total


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 2), st.integers(2, 5), st.sampled_from([1.0, 2.0, 3.5])),
        min_size=1,
        max_size=3,
    ),
    st.lists(st.tuples(*[st.integers(0, 160).map(lambda quarters: quarters / 4)] * 3), min_size=2, max_size=2),
    st.sampled_from([1.0, 0.7, 0.3]),
    st.sampled_from([0.0, 600.0, 7200.0]),
)
def test_cover_is_the_optimum(
    given_: list[tuple[int, int, int, float]], windows: list[tuple[float, ...]], epsilon: float, startup_s: float
) -> None:
    pools = [
        pool(
            0.5,
            min(num, most),
            f"p{i}",
            region=f"r{i}",
            model="m",
            min_replicas=fewest,
            max_replicas=most,
            usd_per_hour=usd,
        )
        for i, (num, fewest, most, usd) in enumerate(given_)
    ]
    demand = {("m", f"r{i}"): [window[i] for window in windows] for i in range(3)}
    found = GreedyCover({"m": 10.0}, epsilon, startup_s).instances(demand, pools)

    def meets(counts: Sequence[int]) -> bool:
        own = all(10.0 * n >= epsilon * max(demand["m", f"r{i}"]) - 1e-6 for i, n in enumerate(counts))
        return own and 10.0 * sum(counts) >= max(map(sum, windows)) - 1e-6

    allowed = product(*[range(max(one.min_replicas, 1), one.max_replicas + 1) for one in pools])
    plans = [dict(zip(found, counts, strict=True)) for counts in allowed if meets(counts)]
    if plans:
        assert meets(list(found.values()))
        assert cost_of(found, pools, startup_s) == pytest.approx(min(cost_of(p, pools, startup_s) for p in plans))
    else:  # what falls short has all that it may have
        short = [one for one in pools if 10.0 * found[one.name] < epsilon * max(demand["m", one.region]) - 1e-6]
        short = short or pools
        assert [found[one.name] for one in short] == [one.max_replicas for one in short]


def test_cover_leaves_alone_what_it_knows_nothing_of() -> None:
    pools = [pool(name="a", model="m"), pool(name="b", model="n")]
    demand = {("m", ""): [25.0], ("n", ""): [99.0]}
    assert GreedyCover({"m": 10.0}, 1.0, 60.0).instances(demand, pools) == {"a": 3}
    assert GreedyCover({"m": 10.0, "b": 50.0}, 1.0, 60.0).instances(demand, pools) == {"a": 3, "b": 2}
    with pytest.raises(HeadwayError, match="tps: unknown pool or model 'mm'; did you mean 'm'"):
        GreedyCover({"mm": 10.0}, 1.0, 60.0).instances(demand, pools)


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        ({"tps": {"m": 0}}, "tps: m: 0"),
        ({"epsilon": 0}, "epsilon: 0"),
        ({"step_s": 7}, "step_s: 7.0; expected seconds that fill the period of 3600"),
        ({"peak_s": 7}, "peak_s: 7.0; expected seconds that fill the step of 300"),
        ({"lead_s": 400}, "lead_s: 400.0; expected whole steps of 300"),
        ({"lead_s": 3600}, "lead_s: 3600.0; expected whole steps of 300, below the period"),
        ({"miss_to_idle": -1}, "miss_to_idle: -1"),
        ({"buffers": 1}, "unknown field buffers"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(plan: dict[str, Any], says: str) -> None:
    with pytest.raises(HeadwayError, match=f"scaler lt-u: plan: .*{says}"):
        resolve.scaler({"name": "lt-u", "plan": plan})


def test_forecaster_and_planner_are_checked() -> None:
    with pytest.raises(HeadwayError, match="forecaster: expected a callable"):
        LongTermImmediateScaler(forecaster="arima")  # type: ignore[arg-type]
    with pytest.raises(HeadwayError, match="planner: expected an object with a method `instances`"):
        LongTermGapScaler(planner=3)  # type: ignore[arg-type]


# Long-term scaling.


class Knows:
    """A forecaster that says the same of every step; what it was shown is noted."""

    cheats = False

    def __init__(self, tps: float, spread: float = 0.0) -> None:
        self.tps, self.spread = tps, spread
        self.shown: list[list[float]] = []

    def __call__(self, model: str, region: str) -> Knows:
        return self

    def forecast(self, history: Floats, steps: int, quantiles: Sequence[float]) -> Floats:
        self.shown.append(history.tolist())
        return np.array([[self.tps + self.spread * (q - 0.5)] * steps for q in quantiles])


@dataclass
class World:
    """One pool whose scaler is obeyed at once, and demand in input tokens per second."""

    scaler: Any
    use: float = 0.5
    num: int = 4
    interactive_tps: float = 0.0
    batch_tps: float = 0.0
    now: float = 0.0
    interactive: float = 0.0
    batch: float = 0.0

    def step(self, **given: Any) -> None:
        arrived = {("m", "", 0): (1, round(self.interactive)), ("m", "", 2): (1, round(self.batch))}
        one = pool(self.use, self.num, model="m", min_replicas=2, **given)
        self.num = self.scaler.scale(FakePools([one], self.now, arrived)).get("main", self.num)

    def until(self, end_s: float) -> None:
        while self.now < end_s:
            self.now += 5.0
            self.interactive += 5.0 * self.interactive_tps
            self.batch += 5.0 * self.batch_tps
            self.step()


PLAN = Planning(tps={"m": 100.0})


def test_lt_i_goes_to_the_plan_at_once() -> None:
    forecaster = Knows(750.0)
    world = World(LongTermImmediateScaler(PLAN, forecaster=forecaster), interactive_tps=400.0)
    world.until(295.0)
    assert world.num == 4 and not forecaster.shown
    world.until(300.0)
    assert world.num == 8
    forecaster.tps = 310.0
    world.until(HOUR_S - 5.0)
    assert world.num == 8
    world.until(HOUR_S)
    assert world.num == 4
    assert [len(history) for history in forecaster.shown] == [1, 12]
    assert forecaster.shown[1] == pytest.approx([400.0] * 12)


def test_beta_is_a_tenth_of_the_last_hour_s_batch_load() -> None:
    world = World(LongTermImmediateScaler(PLAN, forecaster=Knows(390.0)), interactive_tps=9.0, batch_tps=1000.0)
    world.until(HOUR_S)
    assert world.num == 5  # 390 + 100
    world.batch_tps = 0.0
    world.until(1.5 * HOUR_S)
    assert world.num == 5
    world.until(2 * HOUR_S)
    assert world.num == 4
    world = World(
        LongTermImmediateScaler(Planning({"m": 100.0}, buffer=0.0), forecaster=Knows(390.0)), batch_tps=1000.0
    )
    world.until(HOUR_S)
    assert world.num == 4


def test_the_forecast_is_of_an_hour_s_maximum() -> None:
    """Section 6.3: "We take the maximum TPS expected in the next hour"; in windows of 15 minutes (5)."""
    forecaster = Knows(300.0)
    plan = Planning(tps={"m": 100.0}, step_s=HOUR_S, peak_s=900.0)
    world = World(LongTermImmediateScaler(plan, forecaster=forecaster), interactive_tps=100.0)
    world.until(1800.0)
    world.interactive_tps = 700.0
    world.until(2700.0)
    world.interactive_tps = 200.0
    world.until(HOUR_S)
    assert forecaster.shown == [pytest.approx([700.0])]
    assert world.num == 3
    world.until(2 * HOUR_S)
    assert forecaster.shown[1] == pytest.approx([700.0, 200.0])


@pytest.mark.parametrize(("lead_s", "number"), [(0.0, 7), (1200.0, 4), (2400.0, 2)])
def test_a_plan_is_for_the_time_after_its_lead(lead_s: float, number: int) -> None:
    class Falling(Knows):
        def forecast(self, history: Floats, steps: int, quantiles: Sequence[float]) -> Floats:
            assert steps == 3
            return np.tile([650.0, 350.0, 150.0], (len(quantiles), 1))

    plan = Planning(tps={"m": 100.0}, step_s=1200.0, lead_s=lead_s)
    world = World(LongTermImmediateScaler(plan, forecaster=Falling(0.0)), interactive_tps=1.0)
    world.until(1200.0)
    assert world.num == number


def test_the_quantile_follows_what_missing_costs() -> None:
    assert Planning().quantile == 0.5
    for miss_to_idle, number in ((1.0, 4), (3.0, 5), (9.0, 6), (1 / 3, 3)):
        planning = Planning({"m": 100.0}, miss_to_idle=miss_to_idle)
        world = World(LongTermImmediateScaler(planning, forecaster=Knows(400.0, spread=400.0)), interactive_tps=1.0)
        world.until(300.0)
        assert world.num == number, miss_to_idle  # 400 + 400 * (m / (m + 1) - 0.5)


def test_without_forecaster_and_planner_it_is_the_day_before() -> None:
    world = World(LongTermImmediateScaler(PLAN), interactive_tps=650.0)
    world.until(HOUR_S)
    assert world.num == 7
    world.interactive_tps = 250.0
    world.until(25 * HOUR_S - 5.0)
    assert world.num == 7  # yesterday's first hour
    world.until(25 * HOUR_S)
    assert world.num == 3


def test_lt_u_waits_until_memory_asks_for_it_and_stops_at_the_plan() -> None:
    world = World(LongTermUtilizationScaler(PLAN, forecaster=Knows(600.0)), interactive_tps=100.0)
    world.until(600.0)
    assert world.num == 4
    world.use = 0.71
    world.until(605.0)
    assert world.num == 5
    world.until(615.0)
    assert world.num == 5
    world.until(620.0)
    assert world.num == 6
    world.until(HOUR_S - 5.0)
    assert world.num == 6
    world.use = 0.2  # above the plan it would shrink, at it it does not
    world.until(2 * HOUR_S)
    assert world.num == 6


def test_lt_u_shrinks_to_the_plan() -> None:
    world = World(LongTermUtilizationScaler(PLAN, forecaster=Knows(600.0)), use=0.31, num=9, interactive_tps=100.0)
    world.until(600.0)
    assert world.num == 9
    world.use = 0.29
    world.until(HOUR_S)
    assert world.num == 6


def gap(demand: float, num: int, forecast_tps: float = 400.0, **config: Any) -> World:
    """LT-UA at its plan of 4 (unless it has another number) while demand is so many times the forecast."""
    scaler = LongTermGapScaler(PLAN, forecaster=Knows(forecast_tps), **config)
    return World(scaler, num=num, interactive_tps=demand * forecast_tps)


@pytest.mark.parametrize("demand", [5.0, 8.0])
def test_lt_ua_grows_on_in_the_last_20_minutes_of_a_burst(demand: float) -> None:
    world = gap(demand, 4)
    world.until(HOUR_S + 40 * MINUTE_S - 5.0)
    world.num = 4  # the first hour had a burst, too
    world.until(HOUR_S + 40 * MINUTE_S)
    assert world.num == 5
    world.until(HOUR_S + 41 * MINUTE_S)
    assert world.num == 9  # one each 15 s
    world.num = 5
    world.until(2 * HOUR_S - 5.0)
    assert world.num == 20


def test_lt_ua_does_nothing_of_the_kind_before() -> None:
    world = gap(8.0, 4)
    world.until(40 * MINUTE_S - 5.0)
    assert world.num == 4
    world = gap(8.0, 4, last_s=600.0)
    world.until(50 * MINUTE_S - 5.0)
    assert world.num == 4
    world.until(50 * MINUTE_S)
    assert world.num == 5


def test_lt_ua_needs_a_large_gap() -> None:
    for demand in (4.99, 1.0, 0.51):
        world = gap(demand, 4)
        world.until(HOUR_S - 5.0)
        assert world.num == 4, demand
    world = gap(2.0, 4, burst=2.0)
    world.until(HOUR_S - 5.0)
    assert world.num > 4


def test_lt_ua_needs_to_have_reached_the_plan() -> None:
    world = gap(8.0, 3)  # at 50% memory it does not ask for the fourth
    world.until(HOUR_S - 5.0)
    assert world.num == 3
    world = gap(0.1, 5)
    world.until(HOUR_S - 5.0)
    assert world.num == 5


def test_lt_ua_shrinks_on_where_little_came() -> None:
    world = gap(0.5, 4)
    world.use = 0.4
    world.until(40 * MINUTE_S - 5.0)
    assert world.num == 4
    world.until(40 * MINUTE_S)
    assert world.num == 3
    world.until(HOUR_S - 5.0)
    assert world.num == 2  # the least
    full = gap(0.5, 4)
    full.use = 0.55  # three would be 73% full
    full.until(HOUR_S - 5.0)
    assert full.num == 4


def test_lt_ua_adds_nothing_that_memory_would_undo() -> None:
    world = gap(8.0, 4)
    world.use = 0.374  # five would be 29.92% full
    world.until(HOUR_S - 5.0)
    assert world.num == 4
    world.use = 0.376
    world.until(HOUR_S + 40 * MINUTE_S)
    assert world.num == 5
    world.use = 0.1  # the burst goes on, so it stays, though it is above the plan
    world.until(2 * HOUR_S - 5.0)
    assert world.num == 5
    world.until(2 * HOUR_S)
    assert world.num == 4


def test_lt_ua_guards_against_what_is_pending() -> None:
    for guard, number in ((True, 4), (False, 6)):
        world = gap(8.0, 4, pending_guard=guard)
        world.until(40 * MINUTE_S - 15.0)
        world.now += 15.0
        world.interactive += 15.0 * world.interactive_tps
        world.step(num_starting=1)
        assert world.num == number
    calm = gap(0.1, 4)
    calm.until(40 * MINUTE_S - 15.0)
    calm.now += 15.0
    calm.num = 3
    calm.step(num_starting=1)
    assert calm.num == 3


def test_demand_is_looked_at_by_model_and_region() -> None:
    scaler = LongTermImmediateScaler(Planning({"m": 100.0, "n": 100.0}))
    pools = [
        pool(name=f"{model}-{region}", model=model, region=region)
        for model in ("m", "n")
        for region in ("east", "west")
    ]
    for i in range(1, 3):
        now = 300.0 * i
        arrived = {
            ("m", "east", 0): (1, round(120 * now)),
            ("m", "east", 1): (1, round(100 * now)),
            ("m", "west", 1): (1, round(410 * now)),
            ("n", "west", 0): (1, round(50 * now)),
            ("n", "west", 2): (1, round(1000 * now)),
        }
        wanted_ = scaler.scale(FakePools(pools, now, arrived))
    assert wanted_ == {"m-east": 3, "m-west": 5, "n-east": 1, "n-west": 2}  # 50 and a tenth of 1000


@pytest.mark.parametrize("name", ["lt-i", "lt-u", "lt-ua"])
def test_scalers_with_a_plan_pass_the_conformance_checks(name: str) -> None:
    choice = resolve.scaler({"name": name, "plan": {"tps": {"m": 50.0, "n": 2.0}, "epsilon": 0.8, "recent_s": 600}})

    def make() -> Any:
        scaler = choice()
        scaler._hourly._task._function._planner._check = _anything  # stories need not have both models
        return scaler

    check_scaler(make, range(4))


def _anything(pools: object) -> None:
    pass


def test_a_plan_survives_pickling_in_mid_hour() -> None:
    world = gap(8.0, 4)
    world.until(35 * MINUTE_S)
    copy = pickle.loads(pickle.dumps(world))
    world.until(HOUR_S + 500.0)
    copy.until(HOUR_S + 500.0)
    assert copy.num == world.num > 4


# Chiron.


def endpoint(busy: tuple[int, int], batch: int = 0, num: tuple[int, int, int] = (10, 5, 5), **given: Any) -> FakePools:
    """Interactive, mixed and batch pools; so many of the first two kinds have an interactive request."""
    pools = []
    for kind, has, count in zip(("-interactive", "", "-batch"), (*busy, 0), num, strict=True):
        replicas = [FakeReplica(i, num_by_tier={0: int(i < has), 1: 0, 2: 0}) for i in range(count)]
        pools.append(FakePool(f"m{kind}", replicas, min_replicas=0, max_replicas=40, **given))
    if batch:
        pools[2].replicas[0].num_by_tier = {2: batch}
    return FakePools(pools)


def test_chiron_grows_above_theta_and_shrinks_where_that_stays_below() -> None:
    assert ChironScaler().scale(endpoint((9, 0), batch=1)) == {}  # 9 of 15 are 0.6, of 14 more
    assert ChironScaler().scale(endpoint((9, 1), batch=1)) == {"m-interactive": 11}
    assert ChironScaler().scale(endpoint((8, 0), batch=1)) == {"m-interactive": 9}  # 8 of 14 are 0.57
    assert ChironScaler(theta=0.8).scale(endpoint((9, 3), batch=1)) == {}


def test_chiron_counts_what_starts_and_waits_for_it() -> None:
    assert ChironScaler().scale(endpoint((10, 0), batch=1, num_starting=1)) == {}  # 10 of 17
    assert ChironScaler().scale(endpoint((0, 0), batch=1, num_starting=1)) == {}
    scaler = ChironScaler()
    assert scaler.scale(endpoint((10, 5), batch=1)) == {"m-interactive": 11}
    later = endpoint((10, 5), batch=1)
    later.now = 14.0
    assert scaler.scale(later) == {}
    later.now = 15.0
    assert scaler.scale(later) == {"m-interactive": 11}


def test_chiron_takes_mixed_ones_when_there_are_no_interactive_ones_left() -> None:
    assert ChironScaler().scale(endpoint((1, 0), batch=1, num=(1, 5, 5))) == {"m": 4}
    full = endpoint((10, 5), batch=1)
    full.pools[0].max_replicas = 10
    assert ChironScaler().scale(full) == {"m": 6}


def test_chiron_has_as_many_batch_replicas_as_the_queue_needs() -> None:
    calm = (9, 0)
    assert ChironScaler().scale(endpoint(calm, batch=5 * 8640)) == {}
    assert ChironScaler().scale(endpoint(calm, batch=5 * 8640 + 1)) == {"m-batch": 6}
    assert ChironScaler().scale(endpoint(calm, batch=10**6)) == {"m-batch": 40}
    assert ChironScaler().scale(endpoint(calm)) == {"m-batch": 0}
    none_left = endpoint(calm, num=(10, 5, 0))
    none_left.pools[1].replicas[4].num_by_tier = {2: 3}  # mixed ones do the batch work
    assert ChironScaler().scale(none_left) == {"m-batch": 1}


def test_chiron_looks_at_each_endpoint_by_itself() -> None:
    fleet = endpoint((9, 0), batch=1)
    other = endpoint((10, 5), batch=1)
    for one in other.pools:
        one.name, one.region = f"west-{one.name}", "west"
    fleet.pools = [*fleet.pools, *other.pools]
    assert ChironScaler().scale(fleet) == {"west-m-interactive": 11}


@pytest.mark.parametrize(
    ("forecast_tps", "tps", "num"), [(0.0, 200.0, 5), (100.0, 499.0, 4), (100.0, 500.0, 5), (0.0, 0.0, 4)]
)
def test_lt_ua_takes_demand_of_which_none_was_forecast_for_a_burst(forecast_tps: float, tps: float, num: int) -> None:
    """The plan is 4 instances. In the last 20 minutes of the hour, one more at five times the forecast, as in 6.4."""
    plan = Planning(tps={"m": 100.0}, buffer=0.0)

    class Four:
        def instances(self, demand_tps: Any, pools: Any) -> dict[str, int]:
            return {"main": 4}

    scaler = LongTermGapScaler(plan, cooldown_s=1e6, forecaster=Knows(forecast_tps), planner=Four())
    world = World(scaler, use=0.6, interactive_tps=1.0)
    world.until(HOUR_S - 1300.0)
    world.interactive_tps = tps
    world.until(HOUR_S - 900.0)
    assert world.num == num


# A timetable.


def test_each_step_has_its_number() -> None:
    """More is asked for ahead of its step, less at its step; the last step goes on."""
    scaler = TimetableScaler({"main": [2, 5, 3]}, step_s=100.0, ahead_s=30.0)
    numbers = [wanted(scaler, pool(), now) for now in (0.0, 69.0, 70.0, 100.0, 170.0, 199.0, 200.0, 900.0)]
    assert numbers == [2, 2, 5, 5, 5, 5, 3, 3]


def test_a_timetable_beyond_the_bounds_is_refused_before_it_begins() -> None:
    scaler = TimetableScaler({"main": [2, 50]}, step_s=100.0)
    with pytest.raises(HeadwayError, match="counts: main: step 1 has 50; expected 1 to 20"):
        wanted(scaler, pool())
    with pytest.raises(HeadwayError, match="counts: main: step 0 has 2; expected 3 to 20"):
        wanted(TimetableScaler({"main": [2]}), pool(min_replicas=3))
    assert wanted(TimetableScaler({"main": [0, 5]}), pool(min_replicas=0)) == 0


def test_a_timetable_scales_the_pools_that_it_names() -> None:
    scaler = TimetableScaler({"main": [1, 5]}, step_s=100.0)
    assert scaler.scale(FakePools([pool(), pool(name="b")], 0.0)) == {"main": 1}
    with pytest.raises(HeadwayError, match="counts: unknown pool 'main'"):
        TimetableScaler({"main": [1]}).scale(FakePools([pool(name="b")], 0.0))
    with pytest.raises(HeadwayError, match="counts"):
        TimetableScaler({"main": []})


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        ({"main": 9}, "plans 9 of main; expected 2 to 8"),
        ({"main": 1}, "plans 1 of main; expected 2 to 8"),
        ({"mian": 3}, "unknown pool 'mian'"),
    ],
)
def test_a_plan_beyond_the_bounds_is_refused_and_not_cut(plan: dict[str, int], says: str) -> None:
    class Planner:
        def instances(self, demand_tps: Any, pools: Any) -> dict[str, int]:
            return plan

    scaler = LongTermImmediateScaler(Planning(tps={"m": 1.0}, step_s=60.0), planner=Planner())
    with pytest.raises(HeadwayError, match=says):
        for now, tokens in ((0.0, 0), (60.0, 600)):
            one = pool(model="m", min_replicas=2, max_replicas=8)
            scaler.scale(FakePools([one], now, {("m", "", 0): (1, tokens)}))
