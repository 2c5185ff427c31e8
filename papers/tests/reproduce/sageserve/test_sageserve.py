"""SageServe's evaluation made anew: scenarios hold together, runs are reduced to what records say, signs are right."""

from __future__ import annotations

import copy
import gzip
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway import scenario
from headway.config.strict_yaml import Places
from headway.planning import gpu_hours_bound
from headway.report.run import Run
from headway.workload.generate import generate
from headway.workload.series import DemandSeries, read_series
from headway_papers.reproduce import sageserve
from headway_papers.reproduce.claims import Between
from headway_papers.reproduce.findings import PaperTable
from headway_papers.reproduce.runner import Runner
from headway_papers.reproduce.sageserve import (
    bounds,
    measures,
    orderings,
    published,
    runs,
    scenes,
    smoothed,
    speed,
    weights,
)
from headway_papers.reproduce.sageserve.exhibits import exhibits
from headway_papers.reproduce.sageserve.outcomes import outcomes
from headway_papers.reproduce.sageserve.published import Day
from headway_papers.reproduce.sageserve.scenes import (
    LLAMA_2,
    LT_I,
    LT_U,
    LT_UA,
    MODELS,
    REACTIVE,
    REGIONS,
    SCOUT,
    Scene,
)
from headway_papers.reproduce.sageserve.table import SageServeRuns
from headway_papers.reproduce.tasks import Measurement, RecordsTask

SEEDS = (0, 1)
SERVED = {"tps": dict.fromkeys((*MODELS, SCOUT), 500.0), "most": dict.fromkeys((*MODELS, SCOUT), 1000.0)}
GPUS = (scenes.A100, scenes.H100)
LONE = Scene(theta=SERVED["tps"], models=(LLAMA_2,), hours=1.0)


def assembled(document: dict[str, Any]) -> scenario.Scenario:
    return scenario.assemble(copy.deepcopy(document), Places(), Path())


@pytest.mark.parametrize("strategy", scenes.STRATEGIES)
def test_every_strategy_starts_with_the_papers_twenty_instances_of_each_model_and_region(strategy: str) -> None:
    chosen = assembled(scenes.document(Scene(theta=SERVED["tps"]), strategy))
    held: dict[tuple[str, str], int] = {}
    for pool in chosen.fleet.pools:
        held[pool.model.name, pool.region] = held.get((pool.model.name, pool.region), 0) + pool.replicas
        assert pool.min_replicas == 2
    assert held == {(model, region): 20 for model in MODELS for region in REGIONS}
    assert scenario.policies_of(chosen).scaler is not None


def test_no_region_has_more_gpus_than_its_instances_at_the_start() -> None:
    chosen = assembled(scenes.document(Scene(theta=SERVED["tps"]), REACTIVE))
    for region, _, count in chosen.fleet.gpu_limits:
        assert count == sum(p.replicas * p.parallel.num_gpus for p in chosen.fleet.pools if p.region == region)


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5])
def test_mixes_differ_in_batch_requests_alone(share: float) -> None:
    whole = Day(theta=SERVED["tps"], has_series=False, builtin=scenes.NOVEMBER, from_hour=10.0, hours=2.0)
    counts = [tiers(published.document(replace(whole, batch_share=each), REACTIVE)) for each in (0.25, share)]
    assert counts[1][0] == pytest.approx(counts[0][0], rel=0.05)
    assert counts[1][1] / sum(counts[1]) == pytest.approx(
        share, rel=0.6
    )  # noise of an hour, cv 0.6, and the hour itself


def tiers(document: dict[str, Any]) -> tuple[int, int]:
    """Interactive and batch requests."""
    chosen = assembled(document)
    tier = generate(chosen.spec.workload, 0, Path()).column("tier")
    return int((tier < 2).sum()), int((tier >= 2).sum())


@pytest.mark.parametrize("ordering", scenes.ORDERINGS)
def test_orderings_are_compared_on_a_fleet_that_stays(ordering: str) -> None:
    assert scenario.policies_of(assembled(orderings.document(ordering, 1.5))).scaler is None


@pytest.fixture(scope="module")
def short() -> Run:
    return scenario.run(assembled(scenes.document(replace(LONE, load=0.3), REACTIVE)))


def measured(run: Run) -> Measurement:
    return measures.measure(run.records, run.summary.warmup_s)


def test_a_run_is_reduced_to_what_its_records_say(short: Run) -> None:
    found = measured(short)["models"][LLAMA_2]
    replicas, from_s = short.records.replicas, short.summary.warmup_s
    paid_s = sum(max(to - max(since, from_s), 0.0) for r in replicas for since, to in r.up)
    assert found["instance_hours"] == pytest.approx(paid_s / 3600) == pytest.approx(sum(found["regions"].values()))
    bins = found["instances"]
    whole_s = sum(max(min(to, len(bins) * measures.BIN_S) - since, 0.0) for r in replicas for since, to in r.up)
    assert sum(mean for _, mean in bins) * measures.BIN_S == pytest.approx(whole_s)
    assert found["ttft_p75_s"] <= found["ttft_p90_s"] <= found["ttft_p95_s"] <= found["ttft_p99_s"]


def test_of_one_model_waste_and_spot_hours_are_the_summarys(short: Run) -> None:
    found, summary = measured(short)["models"][LLAMA_2], short.summary
    assert summary.starting_gpu_hours is not None and summary.spot_gpu_hours
    for cause in measures.CAUSES:
        assert found["wasted"][cause] * 4 == pytest.approx(getattr(summary.starting_gpu_hours, cause))
    assert found["spot_hours"] * 4 == pytest.approx(summary.spot_gpu_hours)
    assert found["starts"] == summary.starts
    assert summary.kv_use is not None and found["kv_use"] == summary.kv_use.mean


def test_who_still_waits_has_waited_so_far(short: Run) -> None:
    records = short.records
    wait_s, limit_s = measures.waits(records, LLAMA_2, 0.0, records.end_s)
    interactive = records.workload["tier"][records.requests["request"]] < measures.BATCH
    assert len(wait_s) == len(limit_s) == interactive.sum()
    assert (wait_s >= 0).all() and set(np.unique(limit_s)) == {1.0, 60.0}


def test_batch_work_counts_by_its_deadline_and_age(short: Run) -> None:
    found, records = measured(short)["models"][LLAMA_2], short.records
    asked = records.requests["request"]
    late = records.workload["arrival_s"][asked] >= short.summary.warmup_s
    batch = (records.workload["tier"][asked] >= measures.BATCH) & late
    assert found["num_batch"] == batch.sum() > 0
    assert found["batch_in_time"] == (records.requests["outcome"][batch] == 0).sum()  # deadlines are a day away
    assert found["batch_done"] is None  # none is twelve hours old
    in_time = round(found["num_requests"] * (1 - found["late"]))
    spots = found["spot_hours"] * 4
    assert found["utility"] == pytest.approx(3 * in_time + found["batch_in_time"] + 1.5 * spots)


def test_no_run_goes_below_the_bound(short: Run) -> None:
    hours = measured(short)["models"][LLAMA_2]["instance_hours"]
    least = bounds.bound(scenes.document(replace(LONE, load=0.3), REACTIVE), 0)["instance_hours"]
    assert least * (1 + 1e-5) >= 3 * scenes.LEAST * 0.5 and least <= hours  # half an hour after the warm-up


def test_an_instance_serves_more_flat_out_than_in_time() -> None:
    served = measures.theta(scenes.document(LONE, REACTIVE))
    assert 0 < served["tps"][LLAMA_2] < served["most"][LLAMA_2]
    assert runs.theta(served, 0.5)[LLAMA_2] == pytest.approx(0.5 * served["most"][LLAMA_2])


TAUS = ("fcfs", "edf", *(f"{tau_s:g} s" for tau_s in scenes.TAUS_S), "pf")


def model(hours: float, **more: Any) -> dict[str, Any]:
    base = {"instance_hours": hours, "spot_hours": 10.0, "wasted_hours": 1.0, "starts": 5, "kv_use": 0.4, "late": 0.1}
    tails = {f"ttft_p{q}_s": 1.0 for q in (75, 90, 95, 99)} | {"e2e_p95_s": 20.0}
    rest = {"regions": dict.fromkeys(REGIONS, hours / 3), "num_requests": 1000, "instances": [[0.0, 3.0]]}
    rest |= {"batch_done": 1.0, "batch_p95_s": 3600.0, "utility": 1000.0}
    return {**base, **tails, **rest, "wasted": dict.fromkeys(measures.CAUSES, 0.3), **more}


def day(**more: Any) -> Measurement:
    whole = {"instance_hours": 400.0, "spot_hours": 40.0, "kv_use": 0.4, "utility": 4000.0}
    of_models = {key: value for key, value in more.items() if not key.startswith("all_")}
    return {
        "models": {name: model(100.0, **of_models) for name in (*MODELS, SCOUT)},
        **whole,
        **{key.removeprefix("all_"): value for key, value in more.items() if key.startswith("all_")},
    }


def days() -> dict[tuple[str, str], Any]:
    """The whole days."""
    documents = runs.thursdays(SERVED, True) | runs.other_days({gpu: SERVED for gpu in GPUS}, True)
    documents |= runs.scouts(SERVED) | runs.fleets(SERVED, True) | runs.fleets_without_bloom(SERVED, True)
    return documents | runs.with_artifacts_constants(SERVED, True)


def steps() -> Measurement:
    kinds = {"r2": 0.99, "error": 0.02, "r2_fitted": 0.99, "error_fitted": 0.02}
    both = {f"{kind}_{key}": value for kind in ("prefill", "decode") for key, value in kinds.items()}
    return both | {"num_prefill": 84, "num_decode": 84, "error_fitted": 0.02}


def made(kind: str = "", name: str = "", **more: Any) -> dict[tuple[Any, ...], Measurement]:
    """Runs in which all is alike, but for one strategy in one scene."""
    found: dict[tuple[Any, ...], Measurement] = {}
    for seed in SEEDS:
        for part in runs.parts(quick=False):
            for each in part.strategies:
                found[part.kind, each, seed] = day(**(more if (part.kind, each) == (kind, name) else {}))
        for kind_name in days():
            found[(*kind_name, seed)] = day(**(more if kind_name == (kind, name) else {}))
        for size in ("small", "large"):
            found[runs.SPEED, size, seed] = {"seconds": 1.0, "gap": 0.005}
        found[runs.SPEED, "arima", seed] = {"seconds": 0.5, "fitting_s": 1.0}
        found[runs.SPEED, "steps", seed] = steps()
        found[runs.BOUND, runs.DAY, seed] = {"instance_hours": 50.0}
        found[runs.KNOWS, runs.DAY, seed] = day()
        for each in (REACTIVE, LT_I):
            found[runs.SMOOTH, each, seed] = day(**(more if (runs.SMOOTH, each) == (kind, name) else {}))
            found[runs.LACKING, each, seed] = {"sources": {"new": 1, "reclaimed": 2}, "first_s": [7200.0, 155.0]}
        for each in runs.LONG_TERM:
            found[runs.BURST, each, seed] = {"ttft_p95_s": 8.0, "recovered_s": 60.0, "instances": [], "minutes": []}
        for each in (REACTIVE, LT_U, LT_UA):
            found[runs.WEEK, each, seed] = {"ttft_p95_s": 2.0, "bins": []}
        for i, each in enumerate(("fcfs", "edf", "dpa", "pf")):
            violations = {"0": 0.4 - 0.05 * i, "1": 0.2 + 0.1 * i}
            found[runs.ORDER, each, seed] = {"violations": violations, "q3_s": {"0": 4.0 - i, "1": 4.0 + i}}
        for i, each in enumerate(TAUS):
            found[runs.TAU, each, seed] = {"violations": {"0": 0.4 - 0.05 * i, "1": 0.2 + 0.1 * i}}
    return found


def judged(found: dict[tuple[Any, ...], Measurement]) -> dict[str, Any]:
    return {name: outcome.values for name, outcome in outcomes(SageServeRuns(found, SEEDS)).items()}


def test_a_value_for_every_claim_and_seed() -> None:
    values = judged(made())
    assert set(values) == {claim.id for claim in sageserve.CLAIMS}
    exact = {claim.id for claim in sageserve.CLAIMS if isinstance(claim.rule, Between) and claim.rule.exact}
    assert {name for name, each in values.items() if len(each) != len(SEEDS)} == exact


@pytest.mark.parametrize(
    ("kind", "name", "more", "claim", "value"),
    [
        (runs.PEAK, scenes.SILOED, {"all_instance_hours": 800.0}, "unified-hours", 0.5),
        (runs.PEAK, scenes.SILOED, {"all_kv_use": 0.2}, "unified-kv", 1.0),
        (runs.PEAK, scenes.SILOED, {"ttft_p95_s": 0.5}, "unified-tail", 1.0),
        (runs.PEAK, scenes.SILOED, {"e2e_p95_s": 10.0}, "unified-e2e", 1.0),
        (runs.PEAK, scenes.SILOED, {"all_spot_hours": 20.0}, "unified-spot", 1.0),
        (runs.DAY, scenes.CHIRON, {"instance_hours": 300.0}, "chiron-hours", 3.0),
        (runs.DAY, scenes.CHIRON, {"kv_use": 0.1}, "chiron-kv", 0.75),
        (runs.DAY, scenes.GUARDED, {"instance_hours": 125.0}, "guarded-hours", 0.2),
        (runs.FASTER, LT_I, {"instance_hours": 80.0}, "lt-i-hours-60", 0.2),
        (runs.SLOWER, LT_I, {"instance_hours": 80.0}, "lt-i-hours-600", 0.2),
        (runs.SLOWER, LT_I, {"instance_hours": 80.0}, "delay-order", 0.2),
        (runs.DAY, scenes.CHIRON, {"ttft_p95_s": 0.8}, "chiron-tail", 0.8),
        (runs.DAY, LT_I, {"kv_use": 0.8}, "lt-i-kv", 1.0),
        (runs.DAY, LT_UA, {"kv_use": 0.8}, "lt-ua-kv", 1.0),
        (runs.DAY, LT_I, {"instance_hours": 50.0}, "lt-i-utility", 1.0),
        (runs.DAY, scenes.EACH_REQUEST, {"instance_hours": 110.0}, "per-request", 0.1),
        (runs.DAY, LT_U, {"batch_done": 0.5}, "batch-done", 0.5),
        (runs.DAY, LT_I, {"batch_p95_s": 1800.0}, "batch-wait", -0.5),
        (runs.PEAK, scenes.SILOED, {"all_utility": 2000.0}, "unified-utility", 1.0),
        (runs.FLEET, LT_I, {"instance_hours": 80.0}, "fleet-hours", 0.2),
        (runs.FLEET, LT_I, {"all_instance_hours": 300.0}, "fleet-hours-all", 0.25),
        (runs.FLEET, scenes.GUARDED, {"all_instance_hours": 500.0}, "fleet-guarded", 0.2),
        (runs.FLEET, LT_I, {"wasted": {"new": 0.0, "reclaimed": 0.0, "redeployed": 0.15}}, "fleet-redeploys", 0.5),
        (runs.SMOOTH, LT_I, {"instance_hours": 80.0}, "fleet-hours-smooth", 0.2),
        (runs.SMOOTH, LT_I, {"all_instance_hours": 300.0}, "fleet-hours-all-smooth", 0.25),
        (runs.NO_BLOOM, LT_I, {"instance_hours": 80.0}, "fleet-hours-no-bloom", 0.2),
        (runs.NO_BLOOM, LT_I, {"all_instance_hours": 300.0}, "fleet-hours-all-no-bloom", 0.25),
        (runs.ARTIFACT, LT_I, {"wasted_hours": 0.2}, "lt-i-waste-artifact", 0.8),
        (runs.ARTIFACT, LT_UA, {"starts": 1}, "cold-starts-artifact-both", 0.8),
        (runs.ARTIFACT, REACTIVE, {"wasted_hours": 10.0}, "lt-ua-waste-artifact", 0.9),
        (runs.ARTIFACT, scenes.REACTIVE_50, {"wasted_hours": 2.0}, "lt-ua-waste-artifact-both", 0.5),
        (runs.DAY, scenes.LEAK, {"instance_hours": 90.0}, "leak-hours", -0.1),
        (runs.DAY, LT_U, {"instance_hours": 75.0}, "lt-u-hours", 0.25),
        (runs.DAY, LT_UA, {"wasted_hours": 0.2}, "lt-ua-waste", 0.8),
        (runs.DAY, LT_UA, {"starts": 1}, "cold-starts", 0.8),
        (runs.DAY, LT_I, {"ttft_p90_s": 6.0}, "lt-i-tail", 5.0),
        (runs.NOVEMBER, LT_I, {"instance_hours": 75.0}, "nov-lt-i-hours", 0.25),
        (runs.H100, LT_UA, {"instance_hours": 75.0}, "h100-hours", 0.25),
        (runs.MIX_9, LT_UA, {"instance_hours": 75.0}, "mix-order", 0.25),
        (runs.SCOUT, LT_UA, {"all_instance_hours": 300.0}, "scout-saved", 0.25),
    ],
)
def test_signs(kind: str, name: str, more: dict[str, float], claim: str, value: float) -> None:
    assert judged(made(kind, name, **more))[claim] == pytest.approx([value, value])


def test_a_smoothed_series_has_the_mean_of_its_hours_and_of_its_week(tmp_path: Path) -> None:
    values = np.random.default_rng(0).exponential(1.0, 7 * 24 * 60)
    smooth = smoothed.weekly_profile(values)
    assert smooth.sum() == pytest.approx(values.sum())
    hours, weekdays = smooth.reshape(7, 24, 60), values.reshape(7, 24, 60)[:5]
    assert hours[3, 20] == pytest.approx(weekdays[:, 20].mean()) and hours[5, 20, 0] != hours[4, 20, 0]
    known = [DemandSeries("A prod", 0.0, 60.0, values), DemandSeries("B prod", 0.0, 60.0, values)]
    smoothed.write(tmp_path / "series.csv.gz", "B prod", known)
    kept, changed = read_series(tmp_path / "series.csv.gz")
    assert (kept.name, changed.name, kept.step_s) == ("A prod", "B prod", 60.0)
    assert kept.values == pytest.approx(values) and changed.values == pytest.approx(smooth)


def test_the_artifacts_plans_leave_out_the_next_twenty_minutes() -> None:
    documents = runs.with_artifacts_constants(SERVED, False)
    scaling = {name: contents["policies"]["scaling"] for (_, name), contents in documents.items()}
    assert scaling[LT_I]["plan"]["lead_s"] == scaling[LT_UA]["plan"]["step_s"] == 1200.0
    assert "out_above" not in scaling[LT_I] and scaling[LT_UA]["out_above"] == 0.5
    assert scaling[scenes.REACTIVE_50]["out_above"] == 0.5 and "out_above" not in scaling[REACTIVE]
    assert not scaling[scenes.REACTIVE_50]["pending_guard"]


def late_plans(kind: str, late: dict[str, float], hours: dict[str, float]) -> dict[tuple[Any, ...], Measurement]:
    found = made()
    for seed in SEEDS:
        for name in late:
            found[kind, name, seed] = day(late=late[name], instance_hours=hours[name])
    return found


@pytest.mark.parametrize(
    ("kind", "name", "claim"),
    [
        (runs.DAY, LT_I, "equal-late-hours"),
        (runs.DAY, LT_U, "equal-late-lt-u"),
        (runs.DAY, LT_UA, "equal-late-lt-ua"),
        (runs.FASTER, LT_I, "equal-late-60"),
        (runs.SLOWER, LT_I, "equal-late-600"),
    ],
)
def test_instance_hours_are_compared_where_as_many_are_late(kind: str, name: str, claim: str) -> None:
    names = [runs.planned_at(name, share) for share in (0.5, 0.7, 0.9)]
    late = dict(zip(names, (0.02, 0.04, 0.08), strict=True)) | {REACTIVE: 0.04, scenes.GUARDED: 0.0566}
    hours = dict(zip(names, (100.0, 80.0, 60.0), strict=True)) | {REACTIVE: 100.0, scenes.GUARDED: 70.0}
    values = judged(late_plans(kind, late, hours))
    assert values[claim] == pytest.approx([0.2, 0.2])
    if name == LT_I:
        guarded = {runs.DAY: "", runs.FASTER: "-60", runs.SLOWER: "-600"}[kind]
        assert values[f"equal-late-guarded{guarded}"] == pytest.approx([0.0, 0.0], abs=1e-3)
    values = judged(late_plans(kind, late | {REACTIVE: 0.1}, hours))
    assert values[claim] == [None, None]


def test_the_published_thursday_needs_as_many_instances_as_the_artifact_plans() -> None:
    """Whatever an instance serves: demand and theta have the same scale."""
    data = Path(os.environ.get("HEADWAY_DATA", ""))
    if not published.has_series(data):
        pytest.skip("HEADWAY_DATA has no published series")
    half = {LLAMA_2: 500.0}
    day = published.Day(theta=half, half=half)
    contents = published.document(replace(day, from_hour=12.0, hours=3.0), LT_I)
    chosen = scenario.assemble(copy.deepcopy(contents), Places(), data)
    table = generate(chosen.spec.workload, 0, data)
    interactive = table.column("tier") == 0
    needed = table.prompt_tokens[interactive].sum() / half[LLAMA_2] / 3600
    assert needed == pytest.approx(6.6 + 8.0 + 10.8, rel=0.1)


@pytest.mark.parametrize("strategy", [REACTIVE, scenes.GUARDED, LT_I, LT_U, LT_UA])
def test_models_of_the_fleet_take_equal_gpus_and_starts_have_three_sources(strategy: str) -> None:
    fleet_day = replace(published.FLEET_DAY, theta=SERVED["tps"], has_series=False)
    assert (fleet_day.from_hour, fleet_day.hours) == (-2.0, 26.0)
    chosen = assembled(published.document(fleet_day, strategy))
    assert {pool.parallel.num_gpus for pool in chosen.fleet.pools} == {published.FLEET_GPUS}
    sources = chosen.fleet.provisioning
    assert sources is not None
    assert (sources.reclaim_s, sources.redeploy_s, sources.remote_s) == (155.0, 600.0, 7200.0)


@pytest.mark.ci
def test_weights_from_another_region_take_two_hours_once() -> None:
    """Where a region has the model from the beginning, no start takes them."""
    theta = {scenes.LLAMA_2: 400.0}
    day = replace(published.Day(theta=theta, half=theta, from_hour=12.0, hours=2.6), has_series=False, load=0.1)
    contents = published.document(day, REACTIVE)
    measured = weights.lacking(contents, REGIONS[-1], 0)
    assert measured["first_s"][0] == published.REMOTE_S and set(measured["sources"]) <= {"new", "reclaimed"}
    assert measured["first_s"][1] in (None, published.REDEPLOY_S, published.SPIN_UP_S)
    records = scenario.Simulator().records(assembled(contents))
    starts_s = [each.down[0][1] - each.up[0][0] for each in records.replicas if each.origin != "initial" and each.down]
    assert all(start_s < published.REMOTE_S for start_s in starts_s)


def test_every_day_begins_to_count_after_the_first_plan() -> None:
    for (kind, name), contents in days().items():
        chosen = assembled(contents)
        assert chosen.spec.simulation.warmup_s == published.WARMUP_S > published.STEP_S, (kind, name)


def test_short_runs_compare_no_hours_of_plans() -> None:
    for part in runs.parts(quick=True):
        assert part.kind != runs.PEAK or not set(part.strategies) & set(runs.LONG_TERM)


def test_profiles_are_read_and_predicted(tmp_path: Path) -> None:
    """Of a file that the model itself wrote, the error is none."""
    head = "model,hardware,prompt_size,batch_size,token_size,prompt_time,token_time,tensor_parallel"
    shapes = [(prompt, batch) for prompt in (128, 512, 2048, 4096) for batch in (1, 4, 16)]
    path = tmp_path / "profiles.csv.gz"

    def write(times: Any) -> None:
        rows = [
            f"llama2-70b,{gpu},{prompt},{batch},128,{times(i, prompt, batch)[0]},{times(i, prompt, batch)[1]},8"
            for gpu in speed.GPUS
            for i, (prompt, batch) in enumerate(shapes)
        ]
        with gzip.open(path, "wt") as file:
            file.write("\n".join([head, *rows]))

    write(lambda i, prompt, batch: (1000.0 + i, 10.0 + i))
    groups = speed._profiles(path)
    known = groups["llama-2-70b", speed.GPUS[0], "prefill"][1], groups["llama-2-70b", speed.GPUS[0], "decode"][1]
    write(lambda i, prompt, batch: (2e3 * known[0][i] + 5, 3e3 * known[1][i] + 1))
    found = speed.step_times(str(path))
    assert found["num_prefill"] == 2 * len(shapes) and found["prefill_r2"] < found["prefill_r2_fitted"]
    assert found["prefill_error"] > 0.4


def test_orderings_trade_the_tiers_as_the_paper_has_it() -> None:
    values = judged(made())
    assert values["pf-fast"] == pytest.approx([0.15, 0.15])
    assert values["pf-normal"] == pytest.approx([0.3, 0.3])
    assert values["pf-fast-q3"] == pytest.approx([0.75, 0.75]) == values["pf-normal-q3"]
    assert values["order-fast"] == values["order-normal"] == [True, True]
    assert [values[f"dpa-fast-tau{tau}"][0] for tau in (0, 1)] == pytest.approx([0.1, 0.15])
    assert [values[f"dpa-normal-tau{tau}"][0] for tau in (0, 1)] == pytest.approx([0.2, 0.3])
    assert {tuple(values[f"order-{tier}-tau{tau}"]) for tier in ("fast", "normal") for tau in (0, 1)} == {(True, True)}


def test_fewer_in_every_region_means_every_region() -> None:
    less = {region: 20.0 for region in REGIONS}
    found = made()
    for seed in SEEDS:
        for name in runs.LONG_TERM:
            found[runs.DAY, name, seed] = day(regions=less)
    assert judged(found)["lt-regions"] == [True, True]
    found[runs.DAY, LT_I, 1] = day(regions=less | {"us-west": 40.0})
    assert judged(found)["lt-regions"] == [True, False]


class Dry(Runner):
    """Runs nothing."""

    asked: list[Any]

    def run(self, tasks: Any) -> Any:
        self.asked = [*getattr(self, "asked", []), *tasks.items()]
        known: dict[Any, Measurement] = made() | {
            (runs.READING, name, SEEDS[0]): day() for name, *_ in runs.readings(SERVED)
        }
        known |= {gpu: SERVED for gpu in (*GPUS, runs.FLEET)} | {seed: {"factor": 1.5} for seed in SEEDS}
        return {key: known[key] for key in tasks}


def test_only_what_is_asked_for_is_run() -> None:
    dry = Dry(SEEDS, claims=frozenset({"pf-fast"}))
    assert "pf-fast" in sageserve.run(dry).outcomes
    assert [key[0] for key, task in dry.asked if isinstance(task, RecordsTask)] == [runs.ORDER] * 2 * len(SEEDS) * 2


@pytest.mark.parametrize("quick", [False, True])
def test_all_that_is_run_is_a_scenario(quick: bool) -> None:
    dry = Dry(SEEDS, quick, claims=runs.IN_QUICK if quick else None)
    findings = sageserve.run(dry)
    assert (runs.IN_QUICK if quick else {claim.id for claim in sageserve.CLAIMS}) <= set(findings.outcomes)
    assert len(findings.exhibits) > (7 if quick else 15)
    for (_, _, seed), task in ((key, task) for key, task in dry.asked if isinstance(task, RecordsTask)):
        if seed == SEEDS[0]:
            assembled(dict(task.document))


@pytest.mark.long
def test_the_best_plan_of_one_who_knows_the_trace_stands_above_the_bound() -> None:
    """Over a demand that a single headroom has to meet; where nothing serves in time, no row says that it does."""
    scene = scenes.Scene(models=(scenes.LLAMA_2,), from_hour=scenes.THURSDAY + 11, hours=1.25, load=0.15)
    document = scenes.document(scene, REACTIVE)
    tps = {scenes.LLAMA_2: 550.0}
    least = bounds.bound(document, 1)["instance_hours"]
    llama = bounds.best(document, 1, tps)["models"][scenes.LLAMA_2]
    assert least <= llama["instance_hours"] and llama["late"] <= gpu_hours_bound.ALLOWED
    found = made()
    shown = [row[0] for table in tables(found) for row in table.rows]
    assert shown.count("who knows the trace (one seed)") == shown.count("no plan goes below (one seed)") == 1
    found[runs.KNOWS, runs.DAY, SEEDS[0]] = {}
    shown = [row[0] for table in tables(found) for row in table.rows]
    assert "who knows the trace (one seed)" not in shown


def tables(found: dict[tuple[Any, ...], Measurement]) -> list[PaperTable]:
    known = found | {(runs.READING, name, SEEDS[0]): day() for name, *_ in runs.readings(SERVED)}
    return [
        each for each in exhibits(SageServeRuns(known, SEEDS), {scenes.A100: SERVED}) if isinstance(each, PaperTable)
    ]
