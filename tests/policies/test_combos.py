"""Algorithm 1 of Cauchy branch by branch, in a small world of pools; the cheapest combos against brute force."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import product
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import FakePool, FakePools, FakeReplica
from headway.core.errors import HeadwayError
from headway.policies import resolve
from headway.policies.scaling.cheapest_combos import ComboKind, cheapest
from headway.policies.scaling.combos import ComboCounts, CombosScaler, surplus
from headway.policies.scaling.demand import ArrivalCounts

# The paper's: a prefill GPU and a decode GPU each, prices of table 1.
H800_H20: dict[str, Any] = {"goodput_rps": 3.0, "usd_per_hour": 4.19, "gpus": {"h800": 1, "h20": 1}}
A800_H20: dict[str, Any] = {"goodput_rps": 2.0, "usd_per_hour": 2.69, "gpus": {"a800": 1, "h20": 1}}
A800_A800: dict[str, Any] = {"goodput_rps": 1.0, "usd_per_hour": 2.38, "gpus": {"a800": 2}}
KINDS: dict[str, dict[str, Any]] = {"fast": H800_H20, "middle": A800_H20, "slow": A800_A800}


@dataclass
class World:
    """Combos start after `start_s` and drain for `drain_s`; requests come at `rate(now)` per second."""

    scaler: Any
    serving: dict[str, int]
    rate: Callable[[float], float]
    limits: dict[str, tuple[int, int]] = field(default_factory=dict)
    start_s: float = 90.0
    drain_s: float = 20.0
    now: float = 0.0
    arrived: float = 0.0
    most_gpus: dict[str, int] = field(default_factory=dict)
    model: str = ""

    def __post_init__(self) -> None:
        self.starting: dict[str, list[float]] = {name: [] for name in KINDS}
        self.draining: dict[str, list[float]] = {name: [] for name in KINDS}
        self.scaled: list[tuple[float, dict[str, int]]] = []

    def pool(self, name: str) -> FakePool:
        up = [(False, i) for i in range(self.serving.get(name, 0))]
        up += [(True, 100 + i) for i in range(len(self.draining[name]))]
        replicas = [
            FakeReplica(10 * unit + part, combo=unit, is_draining=drains) for drains, unit in up for part in (0, 1)
        ]
        fewest, most = self.limits.get(name, (0, 10**9))
        starting = len(self.starting[name])
        pool = Pool(name, replicas, starting, fewest, most, self.model, **KINDS[name])
        pool.serving = self.serving.get(name, 0)
        return pool

    def tick(self) -> dict[str, int]:
        step_s = self.scaler.interval_s
        self.arrived += self.rate(self.now) * step_s
        self.now += step_s
        for name in KINDS:
            ready = sum(time <= self.now for time in self.starting[name])
            self.serving[name] = self.serving.get(name, 0) + ready
            self.starting[name] = [time for time in self.starting[name] if time > self.now]
            self.draining[name] = [time for time in self.draining[name] if time > self.now]
        view = FakePools([self.pool(name) for name in KINDS], self.now, {("", "", 0): (int(self.arrived), 0)})
        wanted = dict(self.scaler.scale(view))
        for name, count in wanted.items():
            self.to(name, count - self.serving[name] - len(self.starting[name]))
        if wanted:
            self.scaled.append((self.now, wanted))
        for gpu in ("h800", "h20", "a800"):
            self.most_gpus[gpu] = max(self.most_gpus.get(gpu, 0), self.gpus(gpu))
        return wanted

    def to(self, name: str, more: int) -> None:
        while more > 0 and self.draining[name]:
            self.draining[name].pop()
            self.serving[name] += 1
            more -= 1
        self.starting[name] += [self.now + self.start_s] * max(more, 0)
        for _ in range(-more):
            self.serving[name] -= 1
            self.draining[name].append(self.now + self.drain_s)

    def gpus(self, gpu: str) -> int:
        """GPUs of the type that are paid for."""
        return sum(
            (self.serving[name] + len(self.starting[name]) + len(self.draining[name])) * kind["gpus"].get(gpu, 0)
            for name, kind in KINDS.items()
        )

    def run(self, seconds: float) -> list[tuple[float, dict[str, int]]]:
        """What the scaler says, and when."""
        self.scaled = []
        for _ in range(round(seconds / self.scaler.interval_s)):
            self.tick()
        return self.scaled


@dataclass
class Pool(FakePool):
    serving: int = 0

    @property
    def num_serving(self) -> int:
        return self.serving


def world(serving: dict[str, int], rate: float | Callable[[float], float], **given: Any) -> World:
    of_world = {key: given.pop(key) for key in ("limits", "start_s", "drain_s") if key in given}
    constant = rate if callable(rate) else lambda now: rate
    return World(CombosScaler(**given), dict(serving), constant, **of_world)


# Reactive scaling.


def test_within_the_ratio_nothing_happens() -> None:
    assert world({"fast": 2}, 7.0).run(1500) == []
    assert world({"fast": 2}, 4.9).run(1500) == []


def test_out_after_the_window_by_the_cheapest_for_the_deficit() -> None:
    """10 rps to 6: of 4 rps to cover, two of `middle` cost 5.38, `fast` and another of them 8.38 or more."""
    assert world({"fast": 2}, 10.0).run(300) == [(125.0, {"middle": 2})]


def test_the_deviation_has_to_last() -> None:
    """A burst of half the window does not lift its mean above the threshold."""
    assert world({"fast": 2}, lambda now: 8.0 if 60 <= now < 120 else 6.0).run(600) == []


def test_what_starts_counts_so_that_it_is_asked_for_once() -> None:
    assert len(world({"fast": 1}, 5.0, start_s=1000.0).run(900)) == 1


def test_in_after_the_grace_by_the_closest_excess() -> None:
    """5 rps too many: `fast` (3) is closest below, then `middle` (2) takes up the rest."""
    assert world({"fast": 2, "middle": 2, "slow": 1}, 6.0).run(200) == [(155.0, {"fast": 1, "middle": 1})]


def test_in_never_goes_below_the_demand() -> None:
    """1.5 rps too many: only `slow` can go, though `middle` is closer."""
    assert world({"middle": 2, "slow": 1}, 3.5).run(200) == [(155.0, {"slow": 0})]
    assert world({"fast": 2}, 4.0).run(1500) == []


def test_an_excess_that_passes_within_the_grace_stays() -> None:
    assert world({"fast": 3}, lambda now: 5.9 if now < 125 else 30.0, grace_s=60.0, local_window_s=120.0).run(190) == []


def test_the_last_one_stays() -> None:
    assert world({"fast": 2}, 0.0).run(600) == [(155.0, {"fast": 1})]
    assert world({"fast": 1, "middle": 1}, 0.0).run(600)[-1][1] == {"fast": 0}


def test_the_fewest_and_the_most_are_kept() -> None:
    out = world({"fast": 1}, 50.0, limits={"fast": (1, 2), "middle": (0, 3), "slow": (0, 0)})
    assert out.run(300) == [(125.0, {"fast": 2, "middle": 3})], "as much as there is room for"
    assert world({"fast": 4}, 1.0, limits={"fast": (3, 9)}).run(600) == [(155.0, {"fast": 3})]


def test_out_takes_back_what_drains() -> None:
    """While `middle` drains, a surge brings it back instead of starting another."""
    it = world({"fast": 1, "middle": 1}, lambda now: 2.9 if now < 160 else 6.0, drain_s=1000.0, local_window_s=60.0)
    assert it.run(160) == [(95.0, {"middle": 0})]
    assert it.run(60) == [(175.0, {"middle": 1})] and it.starting["middle"] == []


def test_gpu_limits_bound_what_is_added() -> None:
    it = world({"fast": 1}, 20.0, gpu_limits={"h800": 2, "h20": 4, "a800": 3})
    # Most goodput of 1 H800, 3 H20 and 3 A800 that are left: fast and two of middle use up the H20s.
    assert it.run(130) == [(125.0, {"fast": 2, "middle": 2})]
    it = world({"fast": 1}, 20.0, gpu_limits={"h800": 1, "h20": 1})
    assert it.run(130) == [(125.0, {"slow": 17})], "types without a limit are not limited"


def test_gpus_of_those_that_drain_are_not_free() -> None:
    it = world({"fast": 2}, 20.0, gpu_limits={"h800": 3, "h20": 3, "a800": 0}, limits={"fast": (0, 3)})
    it.draining["middle"] = [1000.0]
    assert it.run(300) == [(125.0, {"middle": 1})], "it is taken back; its H20 is not given twice"


@pytest.mark.ci
@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10**6))
def test_gpu_limits_are_never_exceeded(seed: int) -> None:
    """Demand that jumps about, slow starts and slow drains; a planner that ignores all limits, too."""

    class Greedy:
        def best(self, demand_rps: float, most: Mapping[str, int], gpus: Mapping[str, int]) -> Mapping[str, int]:
            return dict.fromkeys(most, 3)

    rng = Random(seed)
    levels = [rng.choice((0.0, 1.0, 5.0, 12.0, 40.0)) for _ in range(40)]
    limits = {gpu: rng.randint(2, 8) for gpu in ("h800", "h20", "a800")}
    arguments: dict[str, Any] = {"local_window_s": 30.0, "global_window_s": 90.0, "gpu_limits": limits, "grace_s": 10.0}
    if rng.random() < 0.3:
        arguments["planner"] = Greedy()
    it = world({"fast": 1, "slow": 1}, lambda now: levels[int(now / 150)], **arguments)
    it.start_s, it.drain_s = rng.choice((0.0, 20.0, 90.0)), rng.choice((0.0, 60.0, 400.0))
    it.run(5900)
    assert all(it.most_gpus[gpu] <= limit for gpu, limit in limits.items())
    assert sum(it.serving.values()) >= 1


# Global refinement.


def test_refined_once_stable_new_before_old() -> None:
    """3 of `slow` serve 3 rps for 7.14; `fast` does for 4.19."""
    it = world({"slow": 3}, 3.0)
    assert it.run(1900) == [(1805.0, {"fast": 1}), (1895.0, {"slow": 0})]
    assert it.run(4000) == [] and it.serving == {"slow": 0, "fast": 1, "middle": 0}


def test_a_refinement_counts_the_fewest_of_each_kind() -> None:
    """3 of `slow` stay and serve 3 of the 6 rps: one `fast` serves the rest. Three of `middle` would serve all 6."""
    it = world({"slow": 6}, 6.0, limits={"slow": (3, 9)})
    assert it.run(1900) == [(1805.0, {"fast": 1}), (1895.0, {"slow": 3})]


def test_refinement_waits_for_the_new_ones_however_long_they_take() -> None:
    it = world({"slow": 3}, 3.0, start_s=600.0)
    assert it.run(2500) == [(1805.0, {"fast": 1}), (2405.0, {"slow": 0})]


def test_a_step_puts_refinement_off() -> None:
    it = world({"slow": 3}, lambda now: 3.0 if now < 1000 else 4.0)
    steps = it.run(3500)
    assert steps[0][1] == {"slow": 4} or steps[0][0] < 1130
    assert steps[1][0] == steps[0][0] + 1800.0


def test_refinement_without_room_for_both_goes_by_turns() -> None:
    """Four A800 serve 2 of `slow`; two `middle` need A800s of theirs. Demand is 1 rps: one can go first."""
    it = world({"slow": 2}, 1.95, ratio=0.2, gpu_limits={"a800": 4, "h20": 2, "h800": 0})
    assert it.run(3000) == [], "none can be done without"
    it = world({"slow": 2}, 1.0, ratio=1.0, gpu_limits={"a800": 4, "h20": 2, "h800": 0}, limits={"slow": (0, 9)})
    it.run(2400)
    assert it.serving == {"slow": 1, "middle": 0, "fast": 0}, "one of slow is the cheapest for 1 rps"


def test_refinement_by_turns_never_serves_less_than_the_demand() -> None:
    lowest = []
    it = world({"slow": 3}, 2.0, ratio=0.9, gpu_limits={"a800": 6, "h20": 1, "h800": 0}, drain_s=40.0)
    for _ in range(600):
        it.tick()
        lowest.append(sum(KINDS[name]["goodput_rps"] * num for name, num in it.serving.items()))
    assert it.serving == {"slow": 0, "middle": 1, "fast": 0} and min(lowest) >= 2.0
    assert it.most_gpus["a800"] <= 6


def test_a_surge_breaks_a_refinement_off() -> None:
    it = world({"slow": 3}, lambda now: 3.0 if now < 1810 else 30.0, start_s=300.0)
    steps = it.run(2300)
    assert steps[0] == (1805.0, {"fast": 1}) and steps[1][0] < 2100
    assert "slow" not in steps[1][1], "nothing is removed"


# Who decides, and on what.


def test_cost_efficiency_weighs_prices_as_in_equation_16() -> None:
    """By price `middle` wins for 2 rps; with three times its tokens per USD, `fast` does."""
    efficiency = {"fast": 3e6, "middle": 1e6, "slow": 1e6}
    assert world({"slow": 2}, 4.0).run(130) == [(125.0, {"middle": 1})]
    assert world({"slow": 2}, 4.0, cost_efficiency=efficiency).run(130) == [(125.0, {"fast": 1})]


def test_a_planner_decides_if_there_is_one() -> None:
    class Slow:
        def __init__(self) -> None:
            self.asked: list[Any] = []

        def best(self, *asked: Any) -> Mapping[str, int]:
            self.asked.append(asked)
            return {"slow": 2}

    planner = Slow()
    it = world({"fast": 1}, 5.0, planner=planner, gpu_limits={"h20": 3}, limits={"fast": (0, 4)})
    assert it.run(130) == [(125.0, {"slow": 2})]
    ((demand_rps, most, gpus),) = planner.asked
    assert demand_rps == pytest.approx(2.0) and gpus == {"h20": 2}
    assert most["fast"] == 3 and set(most) == set(KINDS)


class FailingTask:
    """A task that fails until it is well, and keeps what it was asked."""

    is_busy = False

    def __init__(self, work: Callable[..., Any]) -> None:
        self._work = work
        self.is_well = False
        self.started: list[tuple[Any, ...]] = []

    def start(self, *arguments: Any) -> None:
        self.started.append(arguments)

    def result(self) -> Any:
        return self._work(*self.started[-1]) if self.is_well else None


@pytest.mark.parametrize(("rate", "window_s"), [(9.0, 120.0), (3.0, 600.0)], ids=["out", "anew"])
def test_a_failed_plan_is_repeated_a_window_later(
    rate: float, window_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at every tick; and at once when demand, or what there is, has changed."""
    made: list[FailingTask] = []

    def make_task(work: Callable[..., Any]) -> FailingTask:
        made.append(FailingTask(work))
        return made[-1]

    rates = [rate]
    here = world({"slow": 3}, lambda now: rates[-1], tasks=make_task, global_window_s=600.0)
    (task,) = made
    while not task.started:
        here.tick()
    assert not here.run(window_s - 2 * here.scaler.interval_s) and len(task.started) == 1
    here.run(2 * here.scaler.interval_s)
    assert len(task.started) == 2, "another window, another chance"
    monkeypatch.setitem(KINDS, "fast", {**H800_H20, "usd_per_hour": 4.0})
    here.run(3 * here.scaler.interval_s)
    assert len(task.started) == 3, "prices are others"
    rates.append(rate * 1.5)
    while len(task.started) == 3:
        here.tick()
    assert here.now < 2 * window_s + 300, "demand is another"
    task.is_well = True
    here.run(window_s + 200)
    assert here.scaled


def test_pools_without_a_profile_stay() -> None:
    scaler = CombosScaler(local_window_s=60.0)
    pools = [FakePool("a", [FakeReplica()], gpus={"h20": 1}), FakePool("b", goodput_rps=0.0, gpus={"h20": 1})]
    for i in range(50):
        assert scaler.scale(FakePools(pools, 5.0 * i, {("", "", 0): (100 * i, 0)})) == {}


def test_models_have_demands_of_their_own() -> None:
    scaler = CombosScaler(local_window_s=60.0)
    pools = [
        FakePool(name, [FakeReplica(i)], model=name, goodput_rps=1.0, gpus={"h20": 1})
        for i, name in enumerate(("big", "small"))
    ]
    decisions = [
        scaler.scale(FakePools(pools, 5.0 * i, {("big", "east", 0): (10 * i, 0), ("big", "west", 1): (5 * i, 0)}))
        for i in range(14)
    ]
    assert [wanted for wanted in decisions if wanted] == [{"big": 3}]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"gpu_limits": {"h2o": 3}}, "gpu_limits: unknown GPU 'h2o'; did you mean 'h20'"),
        ({"cost_efficiency": {"fats": 3.0}}, "cost_efficiency: unknown combo 'fats'; did you mean 'fast'"),
        ({"cost_efficiency": {"fast": 3.0}}, "cost_efficiency: no value for middle"),
    ],
)
def test_names_that_do_not_exist(given: dict[str, Any], says: str) -> None:
    with pytest.raises(HeadwayError, match=says):
        world({"fast": 1}, 1.0, **given).run(10)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"gpu_limits": {"h20": -1}}, "gpu_limits: h20: expected"),
        ({"cost_efficiency": {"a": 0.0}}, "cost_efficiency: a: expected"),
        ({"global_window_s": 60}, "global_window_s: expected a number of at least 120"),
        ({"planner": "ilp"}, "planner: expected an object with a method `best`"),
    ],
)
def test_nonsense_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(HeadwayError, match=says):
        resolve.scaler({"name": "combos", **given})


def test_a_pickled_scaler_goes_on() -> None:
    it = world({"slow": 3}, 3.0)
    it.run(1850)
    copy: World = World(pickle.loads(pickle.dumps(it.scaler)), dict(it.serving), it.rate, {}, it.start_s, it.drain_s)
    copy.now, copy.arrived, copy.starting, copy.draining = it.now, it.arrived, dict(it.starting), dict(it.draining)
    assert it.run(2000) == copy.run(2000) != []


# What it is made of.


def _brute_force(demand_rps: float, kinds: list[ComboKind], gpus: dict[str, int]) -> tuple[float, float]:
    """The least shortfall, and the least cost at it."""
    found = []
    for counts in product(*(range(kind.most + 1) for kind in kinds)):
        pairs = list(zip(kinds, counts, strict=True))
        if all(sum(n * kind.gpus.get(gpu, 0) for kind, n in pairs) <= have for gpu, have in gpus.items()):
            served = sum(kind.goodput_rps * n for kind, n in pairs)
            found.append((round(max(demand_rps - served, 0.0), 6), sum(kind.cost * n for kind, n in pairs)))
    return min(found)


@st.composite
def _kinds(draw: st.DrawFn) -> list[ComboKind]:
    kinds = []
    for i in range(draw(st.integers(1, 4))):
        gpus = draw(st.dictionaries(st.sampled_from(("x", "y", "z")), st.integers(1, 3), max_size=3))
        goodput = draw(st.sampled_from((0.0, 0.5, 1.0, 1.7, 2.0, 3.3)))
        kinds.append(
            ComboKind(
                f"k{i}", goodput, draw(st.sampled_from((0.0, 1.0, 1.5, 2.69, 4.0))), gpus, draw(st.integers(0, 4))
            )
        )
    return kinds


@pytest.mark.ci
@settings(deadline=None, max_examples=300)
@given(kinds=_kinds(), demand=st.one_of(st.sampled_from((0.0, 1.0, 4.0)), st.floats(0.01, 25)), seed=st.integers(0, 99))
def test_the_cheapest_against_brute_force(kinds: list[ComboKind], demand: float, seed: int) -> None:
    rng = Random(seed)
    gpus = {gpu: rng.randint(0, 9) for gpu in ("x", "y") if rng.random() < 0.7}
    found = cheapest(demand, kinds, gpus)
    pairs = [(kind, found.get(kind.name, 0)) for kind in kinds]
    assert all(0 <= n <= kind.most for kind, n in pairs)
    assert all(sum(n * kind.gpus.get(gpu, 0) for kind, n in pairs) <= have for gpu, have in gpus.items())
    short = max(demand - sum(kind.goodput_rps * n for kind, n in pairs), 0.0)
    best_short, best_cost = _brute_force(demand, kinds, gpus)
    assert short == pytest.approx(best_short, abs=2e-6)
    assert sum(kind.cost * n for kind, n in pairs) <= best_cost * (1 + 1e-5) + 1e-9


def test_the_paper_s_example_of_a_residual_demand() -> None:
    """Section 3.3.2: for 0.80 rps A800 (0.82 rps, $1.09) rather than H20 (1.23 rps, $1.50, and more efficient)."""
    kinds = [ComboKind("h20", 1.23, 1.50, {}, 9), ComboKind("a800", 0.82, 1.09, {}, 9)]
    assert cheapest(0.80, kinds, {}) == {"a800": 1}


def test_of_equal_cost_the_most_goodput() -> None:
    kinds = [ComboKind("less", 1.0, 2.0, {}, 9), ComboKind("more", 1.5, 2.0, {}, 9)]
    assert cheapest(0.9, kinds, {}) == {"more": 1}


def test_many_kinds_and_a_large_demand_are_still_exact() -> None:
    """Twelve kinds without limits, the paper's number: a multiple of the best ratio is the lower bound."""
    kinds = [ComboKind(str(i), 1.0 + 0.37 * i, 1.0 + 0.41 * i, {}, 10**9) for i in range(12)]
    found = cheapest(1000.0, kinds, {})
    cost = sum(kinds[int(name)].cost * num for name, num in found.items())
    ratio = min(kind.cost / kind.goodput_rps for kind in kinds)
    assert 1000 * ratio <= cost <= 1000 * ratio + min(kind.cost for kind in kinds)


def test_a_surplus_is_the_closest_again_and_again() -> None:
    def stock(name: str, goodput_rps: float, num: int, cost: float = 1.0) -> ComboCounts:
        return ComboCounts(name, goodput_rps, cost, {}, num, 0, 0, 0, 99)

    stocks = [stock("a", 3.0, 2), stock("b", 2.0, 1), stock("c", 0.5, 5), stock("d", 2.0, 1, 2.0)]
    assert surplus(stocks, 8.9) == {"a": 2, "d": 1, "c": 1}
    assert surplus(stocks, 2.9, {"a": 2, "b": 1}) == {"b": 1}
    assert surplus(stocks, 0.4) == {}
    assert surplus([stock("a", 1.0, 1)], 5.0) == {}


def test_rates_over_windows() -> None:
    arrivals = ArrivalCounts(100.0)
    arrivals.push(0.0, 7)
    assert arrivals.rate_rps(50.0) == 0.0
    arrivals.push(10.0, 27)
    assert arrivals.rate_rps(50.0) == 2.0, "as far back as can be seen"
    for i in range(2, 200):
        arrivals.push(10.0 * i, 27 + 5 * i)
    assert arrivals.rate_rps(100.0) == arrivals.rate_rps(5.0) == 0.5
