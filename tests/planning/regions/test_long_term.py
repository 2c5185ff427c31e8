"""What long-term scalers are handed: demand series, forecasters that know a past, theta, planners, refusals."""

from __future__ import annotations

import copy
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fakes import FakePool, FakePools, FakeReplica
from headway import scenario
from headway.config.strict_yaml import Places
from headway.core.errors import HeadwayError
from headway.core.policy import Floats
from headway.forecast.naive import LastValue
from headway.planning.regions import long_term as long_term_module
from headway.policies.endpoints import fewest_and_most
from headway.policies.scaling.hourly_plan import Planning
from headway.policies.scaling.long_term import LongTermImmediateScaler
from headway.workload.generate import generate

REGIONS = ("us-east", "us-central", "us-west")
STEP_S = 1800.0


def document(scaling: Any, **workload: Any) -> dict[str, Any]:
    pool = {"model": "llama-2-70b", "gpu": "a100-80gb", "tp": 4, "kv_capacity_tokens": 14_000, "replicas": 3}
    pools = [{**pool, "name": region, "region": region, "min_replicas": 2, "max_replicas": 6} for region in REGIONS]
    base = {"builtin": "sageserve-july-2025", "models": {"llama-2-70b": 1}, "start_hour": 58, "duration_s": 4500}
    return {
        "workload": {**base, "scale": 0.1, **workload},
        "fleet": pools,
        "policies": {"routing": "sageserve", "admission": "queue-manager", "scaling": scaling},
        "simulation": {"until_s": 4500.0},
    }


def assembled(made: dict[str, Any]) -> scenario.Scenario:
    return scenario.assemble(copy.deepcopy(made), Places(), Path())


def demand_of(chosen: scenario.Scenario) -> long_term_module.ScenarioDemand:
    return long_term_module.ScenarioDemand(chosen, scenario.StepTimes(chosen))


def long_term(name: str = "lt-i", method: str = "seasonal-naive", **more: Any) -> dict[str, Any]:
    plan = {"step_s": STEP_S, "tps": {"llama-2-70b": 500.0}}
    return {"name": name, "plan": plan, "forecaster": {"name": method, "past_hours": 48}, "planner": "ilp", **more}


def refused(made: dict[str, Any]) -> str:
    with pytest.raises(HeadwayError) as error:
        assembled(made)
    return str(error.value)


def test_demand_is_what_the_workload_holds() -> None:
    """Summed over cells and steps, the series are the interactive prompts, no more and no less."""
    chosen = assembled(document("reactive"))
    found = demand_of(chosen).own(Planning(step_s=STEP_S))
    table = generate(chosen.spec.workload, 0)
    tokens = table.prompt_tokens[table.column("tier") < 2].sum()
    assert sum(float(series.sum()) for series in found.values()) * STEP_S == pytest.approx(float(tokens))
    assert set(found) == {("llama-2-70b", region) for region in REGIONS}


def test_demand_of_an_hour_is_its_largest_quarter() -> None:
    demand = demand_of(assembled(document("reactive", duration_s=7200)))
    quarters, hours = (demand.own(each) for each in (Planning(step_s=900.0), Planning(step_s=3600.0, peak_s=900.0)))
    for cell, series in hours.items():
        assert series.tolist() == quarters[cell].reshape(-1, 4).max(axis=1).tolist()


def test_the_past_is_of_the_hours_before() -> None:
    """As busy as the week's shape has it, and another draw than the run's own."""
    early, late = (demand_of(assembled(document("reactive", start_hour=hour))) for hour in (48, 62))
    night, noon = (each.past(2.0, Planning(step_s=STEP_S)) for each in (early, late))
    assert sum(map(np.sum, noon.values())) > 3 * sum(map(np.sum, night.values()))
    own = demand_of(assembled(document("reactive", start_hour=60, duration_s=7200))).own(Planning(step_s=STEP_S))
    cell = ("llama-2-70b", "us-east")
    assert noon[cell] == pytest.approx(own[cell], rel=0.5)
    assert not np.allclose(noon[cell], own[cell])


class Last:
    """Says how much it was told."""

    cheats = False

    def forecast(self, history: Floats, steps: int, quantiles: Any) -> Floats:
        return np.full((len(quantiles), steps), float(len(history)))


def test_a_forecaster_knows_past_and_history() -> None:
    after = long_term_module.ForecasterWithPast(np.ones(5), Last())
    assert after.forecast(np.ones(3), 2, (0.5,)).tolist() == [[8.0, 8.0]]


def test_a_leak_ends_with_its_series() -> None:
    until = long_term_module.ForecasterWithPast(np.zeros(0), Last(), 6)
    assert until.forecast(np.ones(4), 2, (0.5,))[0, 0] == 4.0
    history = np.arange(5.0)
    assert until.forecast(history, 2, (0.5,)).tolist() == LastValue().forecast(history, 2, (0.5,)).tolist()


def test_honest_forecasters_never_look_at_the_runs_own_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is to come is poisoned; all that they hear of the run is what the scaler has seen."""

    def poisoned(*_: object) -> None:
        raise AssertionError("the future was looked at")

    monkeypatch.setattr(long_term_module.ScenarioDemand, "own", poisoned)
    monkeypatch.setattr(long_term_module.ScenarioDemand, "table", property(poisoned))
    run = scenario.run(assembled(document(long_term())))
    assert run.summary.starts is not None
    with pytest.raises(AssertionError, match="future"):
        scenario.run(assembled(document(long_term(method="arima:1-0-0-leak"))))


@pytest.mark.ci
def test_a_leak_is_noted_as_cheating() -> None:
    honest = scenario.run(assembled(document(long_term())))
    leaked = scenario.run(assembled(document(long_term(method="arima:1-0-0-leak"))))
    assert not any("cheating" in note for note in honest.notes)
    assert any("cheating" in note for note in leaked.notes)


@pytest.mark.ci
def test_ilp_and_greedy_agree() -> None:
    """One pool to a region, no limits: the greedy cover is an optimum, and both plans come to as many instances."""
    hours = []
    for planner in ("ilp", "greedy"):
        run = scenario.run(assembled(document(long_term(planner=planner))))
        hours.append(run.summary.gpu_hours)
    assert hours[0] == pytest.approx(hours[1], rel=0.02)


@pytest.mark.parametrize("rate_scale", [1.0, 2.0])
def test_the_past_of_a_trace_is_its_hours_before_the_run(tmp_path: Path, rate_scale: float) -> None:
    """Past and run together are the trace, in the run's own time."""
    rows = [f"{60 * i},{100 + i},5" for i in range(240)]
    (tmp_path / "day.csv").write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *rows]) + "\n")
    trace = {"path": "day.csv", "from_s": 7200, "rate_scale": rate_scale}
    made = {"workload": {"trace": trace}, "fleet": [{"model": "llama-2-70b", "gpu": "a100-80gb", "tp": 4}]}
    demand = demand_of(scenario.assemble(made, Places(), tmp_path))
    hours, config = 2 / rate_scale, Planning()
    demand.check_past(hours)
    (past,), (own,) = demand.past(hours, config).values(), demand.own(config).values()
    assert len(past) * config.step_s == hours * 3600
    assert past.sum() * config.step_s == pytest.approx(sum(100 + i for i in range(120)))
    assert own.sum() * config.step_s == pytest.approx(sum(100 + i for i in range(120, 240)))
    with pytest.raises(HeadwayError, match=rf"past_hours: 4, but the run begins {hours:g} hours after"):
        demand.check_past(4)


def test_theta_is_what_an_instance_serves() -> None:
    """At theta it is in time; with half again as much, it is not."""
    chosen = assembled(document("reactive"))
    demand = demand_of(chosen)
    pool = chosen.fleet.pools[0]
    tps = demand.served_tps(pool)
    assert demand.served_tps(chosen.fleet.pools[1]) == tps  # regions do not matter
    late = []
    for factor in (0.8, 2.0):
        rows = demand._trial(pool)
        rate = factor * tps / float(rows.prompt_tokens.mean())
        made = {
            "workload": {
                "prompt_tokens": {"kind": "lognormal", "p50": 1500, "p99": 6000, "max": 3072},
                "output_tokens": {"kind": "lognormal", "p50": 180, "p99": 1400, "max": 1000},
                "arrivals": rate,
                "num_requests": 800,
            },
            "fleet": [document("reactive")["fleet"][0]],
            "slo": {"ttft_s": 1.0},
        }
        made["fleet"][0] |= {"replicas": 1, "min_replicas": 1}
        late.append(1 - (scenario.run(assembled(made)).summary.slo_attainment or 0.0))
    assert late[0] <= 0.1 < late[1]


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        ({"name": "reactive", "forecaster": "arima"}, ("reactive", "takes no forecaster", "lt-u")),
        (long_term(method="arma"), ("arma", "arima")),
        (long_term(planner="lp"), ("planner", "lp")),
        ({**long_term(), "forecaster": {"name": "arima", "past": 3}}, ("forecaster", "past")),
        ({**long_term(), "forecaster": {"name": "arima", "past_hours": 100}}, ("past_hours", "58")),
    ],
)
def test_what_cannot_be_is_refused(scaling: Any, words: tuple[str, ...]) -> None:
    message = refused(document(scaling))
    assert all(word in message for word in words), message


def test_one_number_for_a_model_and_a_gpu_type() -> None:
    made = document(long_term())
    made["fleet"].append({**made["fleet"][0], "name": "us-east-2", "tp": 8})
    assert "4 GPUs a replica in us-east, 8 GPUs a replica in us-east-2; expected the same" in refused(made)
    made["policies"]["scaling"]["planner"] = "greedy"
    assembled(made)
    made = document(long_term(plan={"step_s": STEP_S, "tps": {"us-east": 500.0, "us-west": 400.0}}))
    assert "500 tokens/s a replica in us-east, no tps in us-central" in refused(made)


def test_pools_for_batch_work_alone_are_not_planned_for_interactive_work() -> None:
    made = document(long_term())
    made["fleet"].append({**made["fleet"][0], "name": "us-east-niw"})
    made["policies"]["routing"] = {"name": "sageserve", "batch_suffix": "-niw"}
    assert "scaler lt-i: plans instances for interactive work, but router sageserve keeps us-east-niw" in refused(made)
    made["policies"]["scaling"]["plan"]["tps"] = dict.fromkeys(REGIONS, 500.0)
    made["policies"]["scaling"]["planner"] = "greedy"
    assembled(made)


def views(chosen: scenario.Scenario) -> list[FakePool]:
    """Pools as the planner sees them at the start."""
    return [
        FakePool(
            pool.name,
            [FakeReplica(i, combo=i) for i in range(pool.replicas)],
            model=pool.model.name,
            region=pool.region,
            gpu=pool.gpu.name,
            gpus={pool.gpu.name: 4},
            min_replicas=pool.min_replicas,
            max_replicas=20,
        )
        for pool in chosen.fleet.pools
    ]


def test_each_pool_has_its_own_least() -> None:
    """Two here, one there: no pool keeps another pool's minimum."""
    made = document(long_term())
    made["fleet"][1]["min_replicas"] = 1
    made["fleet"][2]["min_replicas"] = 3
    chosen = assembled(made)
    planner = long_term_module.ScenarioPlanner("ilp", Planning(tps={"llama-2-70b": 500.0}), demand_of(chosen))
    found = planner.instances({("llama-2-70b", region): (1.0,) for region in REGIONS}, views(chosen))
    assert found == dict(zip(REGIONS, (2, 1, 3), strict=True))


def test_what_is_not_planned_for_keeps_its_gpus() -> None:
    """Of 24 GPUs in the east, a pool of another model has 12; what is planned gets the others, and no more."""
    made = document(long_term())
    made["fleet"] += [{**pool, "name": f"{pool['name']}-8b", "model": "llama-3.1-8b"} for pool in made["fleet"]]
    made["gpu_limits"] = [
        {"region": "us-east", "gpu": "a100-80gb", "count": 24},
        {"region": "us-west", "gpu": "a100-80gb", "count": 80},
    ]
    chosen = assembled(made)
    planner = long_term_module.ScenarioPlanner("ilp", Planning(tps={"llama-2-70b": 500.0}), demand_of(chosen))
    asked = {("llama-2-70b", region): (500.0 * (9 if region == "us-east" else 1),) for region in REGIONS}
    found = planner.instances(asked, views(chosen))
    assert set(found) == set(REGIONS) and found["us-east"] == 3


def combo_pool(**plan: Any) -> dict[str, Any]:
    """Pairs of a prefill and a decode replica, which start and stop together."""
    side = {"model": "llama-2-70b", "gpu": "a100-80gb", "tp": 4, "kv_capacity_tokens": 14_000}
    made = document(long_term(planner="greedy", plan={"step_s": STEP_S, **plan}))
    pair = {"name": "pair", "prefill": side, "decode": side, "replicas": 1, "min_replicas": 1, "max_replicas": 6}
    made["combos"], made["policies"]["routing"] = [pair], "least-loaded"
    del made["fleet"], made["policies"]["admission"]
    return made


def test_combos_are_planned_like_pools() -> None:
    chosen = assembled(combo_pool(tps={"llama-2-70b": 100.0}))
    scaler = scenario.policies_of(chosen).scaler
    assert scaler is not None
    planner: Any = scaler.arguments["planner"]  # type: ignore[attr-defined]
    [combo] = chosen.fleet.combos
    pool = FakePool("pair", [FakeReplica(0)], model="llama-2-70b", max_replicas=6)
    counts = planner.instances({("llama-2-70b", ""): [350.0]}, [pool])
    assert counts == {combo.name: 4}
    run = scenario.run(chosen)
    assert run.summary.starts and max(len(run.records.replicas), 0) > 2


@pytest.mark.ci
def test_what_a_combo_serves_is_simulated_whole() -> None:
    chosen = assembled(combo_pool(tps={"llama-2-70b": 100.0}))
    [combo] = chosen.fleet.combos
    demand = demand_of(chosen)
    assert 0 < demand.served_tps(combo) == demand.served_tps(combo)
    assert demand.served_tps(combo.parts[0]) > 0


def test_ilp_is_for_pools_alone() -> None:
    made = combo_pool(tps={"llama-2-70b": 100.0})
    made["policies"]["scaling"]["planner"] = "ilp"
    assert "pair has GPUs of several replicas" in refused(made)


# Bounds.


class Planned:
    """A fleet and its pools, as `ScenarioPlanner` and `GreedyCover` see them."""

    def __init__(self, pools: list[FakePool], limits: tuple[tuple[str, str, int], ...] = ()) -> None:
        self.pools = pools
        kind = SimpleNamespace(num_gpus=2)
        fleet = [
            SimpleNamespace(
                name=p.name,
                model=SimpleNamespace(name=p.model),
                gpu=SimpleNamespace(name=p.gpu),
                region=p.region,
                parallel=kind,
            )
            for p in pools
        ]
        whole = SimpleNamespace(pools=tuple(fleet), combos=(), gpu_limits=limits)
        self.demand: Any = SimpleNamespace(scenario=SimpleNamespace(fleet=whole))

    def plan(self, planner: str, demand: Any, epsilon: float, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
        monkeypatch.setattr(long_term_module, "unit_of", lambda unit: (unit,))
        config = Planning(tps={"m": 100.0, "n": 50.0}, epsilon=epsilon)
        made = long_term_module.ScenarioPlanner(planner, config, self.demand)
        return dict(made.instances(demand, self.pools))


def endpoint(name: str, region: str, fewest: int, most: int, num: int = 0, model: str = "m") -> FakePool:
    return FakePool(
        name,
        [FakeReplica(i, combo=i) for i in range(num)],
        min_replicas=fewest,
        max_replicas=most,
        model=model,
        region=region,
        gpu="a100",
        gpus={"a100": 2},
    )


@pytest.mark.parametrize("planner", ["ilp", "greedy"])
def test_what_one_region_may_not_have_another_one_gets(planner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: demand 400 + 100, 100 of it an instance: 5 are needed. A may have 2, its epsilon of a half; B the rest.

    A plan of {4, 1} that is cut to {2, 1} afterwards serves 300 of the 500.
    """
    planned = Planned([endpoint("A", "a", 1, 2, 1), endpoint("B", "b", 1, 8, 1)])
    demand = {("m", "a"): (400.0,), ("m", "b"): (100.0,)}
    assert planned.plan(planner, demand, 0.5, monkeypatch) == {"A": 2, "B": 3}


def test_deployments_of_two_to_three_instances_share_an_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the paper's fleet (7.1): in each deployment 2 to 3. By hand: 750 tokens/s need 8 of the 9 in the east."""
    pools = [endpoint(f"e{i}", "e", 2, 3, num) for i, num in enumerate((3, 3, 2))] + [endpoint("w0", "w", 2, 3, 2)]
    demand = {("m", "e"): (750.0,), ("m", "w"): (10.0,)}
    planned = Planned(pools)
    assert planned.plan("ilp", demand, 1.0, monkeypatch) == {"e0": 3, "e1": 3, "e2": 2, "w0": 2}
    none = {("m", "e"): (0.0,)}
    assert planned.plan("ilp", none, 1.0, monkeypatch) == {"e0": 2, "e1": 2, "e2": 2, "w0": 2}
    most = {("m", "e"): (5000.0,)}
    assert planned.plan("ilp", most, 1.0, monkeypatch) == {"e0": 3, "e1": 3, "e2": 3, "w0": 3}


pools_of = st.lists(
    st.tuples(st.sampled_from("ab"), st.sampled_from("mn"), st.integers(0, 2), st.integers(0, 3), st.integers(0, 6)),
    min_size=1,
    max_size=5,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pools_of, st.lists(st.integers(0, 12), min_size=4, max_size=4), st.sampled_from([0.5, 1.0]), st.booleans())
def test_every_plan_keeps_to_bounds_and_limits_and_none_is_cut(
    monkeypatch: pytest.MonkeyPatch, given_: Any, demand: list[int], epsilon: float, is_limited: bool
) -> None:
    """ILP and greedy, and LT-I, which follows them: what they return is within bounds, and covers what can be covered.

    The oracle is the capacity that bounds leave: without GPU limits, a model gets the instances that its demand needs,
    or all that it may have.
    """
    pools = [
        endpoint(f"p{i}", region, fewest, max(fewest, 1) + more, num, model)
        for i, (region, model, fewest, more, num) in enumerate(given_)
    ]
    limits = (("a", "a100", 8),) if is_limited else ()
    tps = {"m": 100.0, "n": 50.0}
    cells = {cell: (50.0 * value,) for cell, value in zip(product("mn", "ab"), demand, strict=True)}
    held = sum(2 * fewest_and_most(p)[0] for p in pools if p.region == "a")
    for planner in ("ilp", "greedy"):
        found = Planned(pools, limits).plan(planner, cells, epsilon, monkeypatch)
        for pool in pools:
            fewest, most = fewest_and_most(pool)
            assert fewest <= found[pool.name] <= most
        if planner == "ilp" and is_limited:
            assert sum(2 * found[p.name] for p in pools if p.region == "a") <= max(8, held)
            continue
        for model in {pool.model for pool in pools}:
            own = [pool for pool in pools if pool.model == model]
            needed = cells[model, "a"][0] + cells[model, "b"][0]
            served = sum(tps[model] * found[pool.name] for pool in own)
            assert served >= needed or all(found[pool.name] == pool.max_replicas for pool in own)

        class Fixed:
            def instances(self, demand_tps: Any, pools: Any, found: dict[str, int] = found) -> dict[str, int]:
                return found

        scaler = LongTermImmediateScaler(Planning(tps=tps, step_s=60.0), planner=Fixed())
        for now, tokens in ((0.0, 0), (60.0, 60)):
            wanted = scaler.scale(FakePools(pools, now, {("m", "a", 0): (1, tokens)}))
        assert wanted == found
