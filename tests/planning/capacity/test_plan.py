"""Capacity plans with the simulator: brute force, bounds that rule out nothing feasible, the cache, the command."""

from __future__ import annotations

import json
import re
import subprocess
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from browser import chromium
from headway import catalog, scenario
from headway.cli import main
from headway.config.strict_yaml import Places
from headway.core.errors import HeadwayError
from headway.core.fleet import Parallel, Pool
from headway.planning.capacity import plan as capacity
from headway.planning.capacity.answer import report
from headway.planning.capacity.bounds import ArrivingRequests, lower_bounds
from headway.planning.capacity.plan import CapacityOptions, plan, scenario_yaml
from headway.planning.capacity.problem import (
    LATENCY_SLOS,
    CapacityCandidate,
    CapacityPlan,
    Situation,
    Targets,
    misses,
)
from headway.planning.capacity.rehearsal import CapacityRehearsal, fleet_document, with_load
from headway.planning.capacity.text import LEGEND, said
from headway.planning.rehearsals import Resources, Source
from headway.report.page import library_name, write_page
from headway.report.render import page
from headway.report.render import text as text_of
from headway.report.table import seconds
from headway.scenario.processes import processes
from headway.workload.generate import generate

MOST = 6
SMALL = "--rate 40 --num-requests 200 --prompt-tokens 1500 --output-tokens 150 --model llama-3.1-8b".split()
ASKED = "--gpus a100-80gb,h100 --tp 1,2 --ttft-p99 0.8 --tpot-p99 0.04 --max-replicas 6".split()


def document(**more: Any) -> dict[str, Any]:
    workload = {"arrivals": 12, "num_requests": 150, "prompt_tokens": 1500, "output_tokens": 150}
    return {"workload": workload, "fleet": [{"model": "llama-3.1-8b"}], **more}


def options_of(**more: Any) -> CapacityOptions:
    given: dict[str, Any] = {"gpus": ("a100-80gb", "h100"), "tps": (1, 2), "situations": (), "max_replicas": MOST}
    given["longer"] = 1
    return CapacityOptions(**{**given, "targets": Targets(ttft_p99_s=0.8, tpot_p99_s=0.04), **more})


def planned(
    options: CapacityOptions, made: dict[str, Any] | None = None, cache: Path | None = None
) -> tuple[CapacityPlan, CapacityRehearsal]:
    return plan(Source(made or document(), Places(), Path()), options, Resources(scenario.Simulator(), cache))


def test_keys_of_the_model_stay_on_every_candidate() -> None:
    first = {
        "model": "llama-3.1-8b",
        "gpu": "l4",
        "quantization": "fp8",
        "kv_cache_dtype": "fp8",
        "replicas": 3,
        "name": "chat",
        "served_name": "chat",
        "endpoints": ["http://a:1"],
        "kv_capacity_tokens": 9,
    }
    candidate = CapacityCandidate("h100-80gb-sxm", Parallel(2), "least-loaded", 4.0)
    made = fleet_document({"fleet": [first]}, candidate, 2)["fleet"]
    assert made == [
        {
            "name": "planned",
            "model": "llama-3.1-8b",
            "quantization": "fp8",
            "kv_cache_dtype": "fp8",
            "served_name": "chat",
            "gpu": "h100-80gb-sxm",
            "tp": 2,
            "replicas": 2,
        }
    ]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that the tests of this module fill."""
    return tmp_path_factory.mktemp("cache")


@pytest.mark.ci
@pytest.mark.parametrize("tpot_s", [0.025, 0.04])
@pytest.mark.parametrize("load", [6, 30])
def test_the_plan_is_what_brute_force_finds(tpot_s: float, load: float, small: Path) -> None:
    """Every candidate with every number of replicas, without bounds."""
    made = document()
    made["workload"]["arrivals"] = load
    options = options_of(targets=Targets(ttft_p99_s=0.8, tpot_p99_s=tpot_s), routings=("round-robin", "least-loaded"))
    found, rehearsal = planned(options, made, small)
    good = [
        n * option.candidate.usd_per_replica_hour
        for option in found.options
        for n in range(1, MOST + 1)
        if not misses(rehearsal(option.candidate, n, Situation()), options.targets)
    ]
    assert found.objective_usd_per_hour == (pytest.approx(min(good)) if good else None)
    assert found.monotone is not False


LENGTHS = st.tuples(st.integers(50, 4000), st.integers(2, 300))
ENGINES = st.sampled_from([each.name for each in catalog.engines()])


@settings(max_examples=25, deadline=None)
@given(LENGTHS, st.floats(1, 40), st.sampled_from(["l40s", "a100-80gb", "h100"]), ENGINES, st.integers(1, 3))
def test_bounds_hold_in_the_simulation(
    lengths: tuple[int, int], rate: float, gpu: str, engine: str, replicas: int
) -> None:
    """Simulated latencies are at least the bounds, and simulated fleets have at least the least replicas."""
    made = document(fleet=[{"model": "llama-3.1-8b", "engine": engine}])
    made["workload"] = {"arrivals": rate, "num_requests": 60, "prompt_tokens": lengths[0], "output_tokens": lengths[1]}
    options = options_of(gpus=(gpu,), tps=(1,), targets=Targets(ttft_p99_s=1e6), max_replicas=1)
    rehearsal = planned(options, made)[1]
    (candidate,) = capacity._candidates(_spec(rehearsal), options)
    pool = rehearsal.scenario(candidate, 1, Situation()).fleet.pools[0]
    spec = _spec(rehearsal)
    requests = capacity.arriving(spec, generate(spec.workload, spec.seed, Path()))[0]
    found = rehearsal(candidate, replicas, Situation())
    reached = Targets(ttft_p99_s=found.ttft_p99_s, tpot_p99_s=found.tpot_p99_s, e2e_p99_s=found.e2e_p99_s)
    for targets in (reached, Targets(ttft_p99_s=found.ttft_p99_s), Targets(e2e_p99_s=found.e2e_p99_s)):
        floor = lower_bounds(pool, requests, targets)
        assert floor.reason is None and floor.least_replicas <= replicas
    for name in ("ttft_p99_s", "tpot_p99_s", "e2e_p99_s"):
        assert getattr(floor, name) <= getattr(found, name) * (1 + 1e-9), name


def test_cost_rises_with_load_and_falls_with_looser_targets(small: Path) -> None:
    """With simulations."""
    costs: dict[tuple[float, float], float] = {}
    for load in (6.0, 20.0, 60.0):
        for tpot_s in (0.025, 0.04):
            made = document()
            made["workload"]["arrivals"] = load
            found, _ = planned(options_of(targets=Targets(ttft_p99_s=0.8, tpot_p99_s=tpot_s)), made, small)
            costs[load, tpot_s] = found.objective_usd_per_hour or float("inf")
    for (load, tpot_s), usd in costs.items():
        assert all(usd <= dear for (more, tight), dear in costs.items() if more >= load and tight <= tpot_s)
    assert len(set(costs.values())) > 1


@pytest.mark.ci
def test_worker_processes_and_early_ends_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same plan from whole runs one by one, from runs that end early, and from two processes."""
    made = document()
    made["workload"]["arrivals"] = 30
    options = options_of(situations=(Situation(load=3.0), Situation(lost_replicas=1)), longer=4)
    found, rehearsal = planned(options, made)
    with processes(2) as pool:
        shared, _ = plan(Source(made, Places(), Path()), options, Resources(scenario.Simulator(), pool=pool))
    monkeypatch.setattr("headway.planning.capacity.rehearsal.watched", lambda source, *_: source)
    whole, entirely = planned(options, made)
    assert found == shared == whole
    assert rehearsal.rehearsals.num_simulated == entirely.rehearsals.num_simulated
    assert any(each.replicas_needed for each in found.what_ifs)


def _spec(rehearsal: CapacityRehearsal) -> scenario.Spec:
    return rehearsal.scenario(CapacityCandidate("h100-80gb-sxm", Parallel(), "least-loaded", 1.0), 1, Situation()).spec


@pytest.mark.ci
def test_a_plan_survives_a_longer_run() -> None:
    """500 requests are four seconds, in which two replicas too few build up no queue that matters."""
    made = document(fleet=[{"model": "llama-3.1-8b", "engine": "simulated-0.15"}])
    made["workload"].update(arrivals=120, num_requests=500)
    asked: dict[str, Any] = {"gpus": ("h100",), "tps": (1,), "targets": Targets(ttft_p99_s=0.5), "max_replicas": 12}
    short, rehearsal = planned(options_of(**asked), made)
    assert short.choice and short.choice.replicas and short.longer is None
    much_longer = rehearsal.longer(16)
    late = much_longer(short.choice.candidate, short.choice.replicas, Situation())
    assert late.ttft_p99_s is None or late.ttft_p99_s > 10
    assert any("waits still grow" in note for note in short.notes)

    found, _ = planned(options_of(longer=4, **asked), made)
    assert found.choice and found.choice.replicas and found.longer
    assert found.choice.replicas > short.choice.replicas
    assert not found.longer.misses
    assert found.longer.measured.num_requests >= 2000
    (likely,) = found.likely
    text = " ".join(text_of(said(found), 100).split())
    predicted, num = seconds(likely.predicted_s), found.longer.measured.num_requests
    assert f"predicted {predicted} over {num:,} requests, with the error of" in text, "policies beside it are shorter"
    held = much_longer(found.choice.candidate, found.choice.replicas, Situation())
    assert not misses(held, found.targets)


def test_a_plan_that_no_length_settles_says_so() -> None:
    made = document()
    made["workload"].update(arrivals=120, num_requests=500)
    asked: dict[str, Any] = {"gpus": ("h100",), "tps": (1,), "targets": Targets(ttft_p99_s=0.5), "max_replicas": 12}
    found, _ = planned(options_of(longer=4, most_requests=2000, **asked), made)
    assert found.longer and found.longer.misses == ("ttft_p99_s",)
    assert "with 2,000 requests the plan misses ttft_p99_s: take a replica more" in found.notes


def test_a_trace_has_no_longer_run(tmp_path: Path) -> None:
    rows = "\n".join(f"{i / 20},800,60" for i in range(60))
    (tmp_path / "t.csv").write_text(f"arrival_s,prompt_tokens,output_tokens\n{rows}\n")
    made = document(workload={"trace": str(tmp_path / "t.csv")})
    found, rehearsal = planned(options_of(gpus=("h100",), tps=(1,), longer=4), made)
    assert rehearsal.num_requests is None and found.longer is None
    assert found.measured and found.measured.wait_growth == pytest.approx(1, abs=0.5)


def test_more_work_needs_more_replicas_by_the_bound_alone() -> None:
    shape, gpu = catalog.model("llama-3.1-8b"), catalog.gpu("a100-80gb")
    pool = Pool("main", shape, gpu, catalog.engine("simulated"), Parallel())
    least = []
    for num in (100, 10_000):
        lengths = np.full(num, 1000.0)
        requests = ArrivingRequests(lengths, lengths, lengths / 10, span_s=30.0)
        least.append(lower_bounds(pool, requests, Targets(ttft_p99_s=5.0)).least_replicas)
    assert least[0] == 1 and 5 < least[1] < 40
    assert (
        lower_bounds(pool, ArrivingRequests(lengths, lengths, lengths, None), Targets(ttft_p99_s=5.0)).least_replicas
        == 1
    )


def test_impossible_shapes_are_ruled_out_with_a_reason() -> None:
    made = document(fleet=[{"model": "llama-3.1-70b"}])
    targets = Targets(ttft_p99_s=20.0, tpot_p99_s=0.0005)
    found, rehearsal = planned(options_of(gpus=("h100",), tps=(1, 3, 4, 16), targets=targets), made)
    why = {option.candidate.parallel.tp: option.reason for option in found.options}
    assert "GiB" in why[1] and "does not divide" in why[3]
    assert "TPOT p99 is" in why[4] and "unloaded" in why[4]
    assert rehearsal.rehearsals.num_simulated == 0 and found.status == "infeasible"
    assert {each.slo: each.best is not None for each in found.reach} == {"ttft_p99_s": True, "tpot_p99_s": True}


def test_a_second_search_simulates_nothing(tmp_path: Path) -> None:
    first, made = planned(options_of(situations=(Situation(load=2.0),)), cache=tmp_path)
    again, found = planned(options_of(situations=(Situation(load=2.0),)), cache=tmp_path)
    assert again == first and made.rehearsals.num_simulated > 0
    done = found.rehearsals
    assert (done.num_simulated, done.num_found) == (0, made.rehearsals.num_simulated)
    for file in tmp_path.iterdir():
        file.write_text("{broken")
    assert planned(options_of(situations=(Situation(load=2.0),)), cache=tmp_path)[0] == first


def test_another_seed_is_another_rehearsal(tmp_path: Path) -> None:
    planned(options_of(), cache=tmp_path)
    _, found = planned(options_of(), document(seed=1), tmp_path)
    assert found.rehearsals.num_found == 0


def test_a_changed_trace_is_simulated_again(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    for tokens in (100, 900):
        rows = "".join(f"{i / 10},{tokens},20\n" for i in range(50))
        trace.write_text("arrival_s,prompt_tokens,output_tokens\n" + rows)
        made = document(workload={"trace": {"path": "trace.csv"}})
        resources = Resources(scenario.Simulator(), tmp_path / "cache")
        found, rehearsal = plan(Source(made, Places(), tmp_path), options_of(), resources)
        assert rehearsal.rehearsals.num_found == 0 and found.choice is not None
    text = scenario_yaml(found, rehearsal)
    assert yaml.safe_load(text)["workload"]["trace"]["path"] == str(trace)


def test_load_scales_every_kind_of_arrivals() -> None:
    kinds: list[Any] = [
        5.0,
        {"kind": "gamma", "rate": 5.0, "cv": 2.0},
        {"kind": "curve", "rates": [4.0, 6.0], "step_s": 5.0},
    ]
    for arrivals in kinds:
        made = document()
        made["workload"]["arrivals"] = arrivals
        (each,) = planned(options_of(situations=(Situation(load=3.0),)), made)[0].what_ifs
        assert each.measured.num_requests == 450
    looped = document(workload={"concurrency": 4, "num_requests": 60, "prompt_tokens": 500, "output_tokens": 50})
    found, _ = planned(options_of(situations=(Situation(load=2.0),)), looped)
    assert found.what_ifs[0].measured.num_requests == 120


def test_a_lost_region_loses_its_replicas() -> None:
    pools = [{"model": "llama-3.1-8b", "gpu": "h100", "region": at} for at in ("east", "west")]
    found, rehearsal = planned(options_of(gpus=()), document(fleet=pools))
    assert found.choice is not None and found.choice.replicas is not None and found.choice.replicas >= 2
    assert [each.situation.label for each in found.what_ifs] == ["1 region lost"]
    chosen = rehearsal.scenario(found.choice.candidate, 5, Situation(lost_regions=1))
    assert [(pool.region, pool.replicas) for pool in chosen.fleet.pools] == [("east", 3), ("west", 2)]
    assert [fault.replica for fault in chosen.spec.faults] == [0, 1, 2]
    assert [p["region"] for p in yaml.safe_load(scenario_yaml(found, rehearsal))["fleet"]] == ["east", "west"]


def test_own_slos_are_the_default_target() -> None:
    made = document(workload={"builtin": "chat", "num_requests": 200})
    found, _ = planned(options_of(targets=Targets()), made)
    assert found.targets == Targets(attainment=0.99)
    assert found.measured is not None and (found.measured.attainment or 0) >= 0.99


# The command.


def run(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    code = main(["plan", "capacity", *map(str, args)])
    return code, *capsys.readouterr()


@pytest.mark.ci
def test_the_command_writes_a_scenario_that_meets_the_targets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], small: Path
) -> None:
    out, html = tmp_path / "plan.yaml", tmp_path / "plan.html"
    code, text, _ = run(capsys, *SMALL, *ASKED, "--cache", small, "--out", out, "--html", html)
    assert html.with_name(library_name()).exists()
    assert code == 0 and "an hour" in text.splitlines()[0] and "With one replica less" in text
    code, text, err = run(capsys, *SMALL, *ASKED, "--cache", small, "--json")
    document = json.loads(text)
    assert code == 0 and document["status"] == "optimal" and "0 simulated" in err
    assert main(["simulate", str(out), "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert result["metrics"]["ttft_s.p99"] == pytest.approx(document["measured"]["ttft_p99_s"])
    assert result["metrics"]["tpot_s.p99"] == pytest.approx(document["measured"]["tpot_p99_s"])
    shown = html.read_text()
    assert "the plan" in shown and "http://" not in shown.split("<script>")[0]


def test_a_scenario_file_gives_workload_model_and_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "chat.yaml"
    engine = {"name": "vllm-0.15", "max_num_seqs": 64}
    pool = {"model": "llama-3.1-8b", "gpu": "h100", "engine": engine, "usd_per_gpu_hour": 1.5}
    policies = {"routing": ["round-robin", "least-loaded"], "ordering": ["fcfs"]}
    file.write_text(yaml.safe_dump({**document(fleet=[pool], policies=policies), "slo": {"ttft_s": 1.0}}))
    out = tmp_path / "plan.yaml"
    code, _, _ = run(capsys, file, "--tp", 1, "--attainment", 0.9, "--what-if", "", "--no-cache", "--out", out)
    written = yaml.safe_load(out.read_text())
    assert code == 0
    assert written["fleet"][0]["engine"] == engine and written["fleet"][0]["usd_per_gpu_hour"] == 1.5
    assert written["policies"]["routing"] in policies["routing"] and written["slo"] == {"ttft_s": 1.0}


@pytest.mark.ci
def test_routers_are_compared_at_the_plans_cost(capsys: pytest.CaptureFixture[str], small: Path) -> None:
    """The first one listed is not the answer if another does better on the same replicas."""
    routings = "--routing", "random,round-robin,jsq-tokens"
    code, text, _ = run(capsys, *SMALL, *ASKED, *routings, "--what-if", "", "--cache", small)
    assert code == 0 and "At this cost, " in text
    _, text, _ = run(capsys, *SMALL, *ASKED, *routings, "--what-if", "", "--cache", small, "--json")
    document = json.loads(text)
    compared = {each["policy"]: each["measured"] for each in document["policies"]}
    assert set(compared) == {"random", "round-robin", "jsq-tokens"}
    chosen = document["choice"]["candidate"]["routing"]
    assert document["measured"] == compared[chosen] and document["policies"][0]["policy"] == chosen != "random"
    worst = {name: max(each["ttft_p99_s"] / 0.8, each["tpot_p99_s"] / 0.04) for name, each in compared.items()}
    ties = {each["policy"] for each in document["policies"] if each["ties"]}
    assert min(worst, key=lambda name: worst[name]) in ties and chosen in ties


def test_uncalibrated_options_are_marked(capsys: pytest.CaptureFixture[str]) -> None:
    small = (
        "--rate 2 --num-requests 60 --prompt-tokens 300 --output-tokens 60 --model llama-3.1-8b "
        "--engine vllm-0.15 --gpus h100,l4 --tp 1 --ttft-p99 5 --no-cache --what-if"
    ).split()
    code, text, _ = run(capsys, *small, "")
    marked = [line for line in text.splitlines() if line.startswith(("h100", "l4"))]
    assert code == 0 and ["not calibrated: kernels of l40s" in line for line in marked] == [
        line.startswith("l4") for line in marked
    ]
    chosen = marked[0].split()[0]
    assert (f"Step times of {chosen} are not calibrated (kernels of l40s, generic" in text) == chosen.startswith("l4")


def test_policies_that_do_the_same_tie(capsys: pytest.CaptureFixture[str]) -> None:
    """On one replica, every router is the same."""
    small = (
        "--rate 2 --num-requests 60 --prompt-tokens 300 --output-tokens 60 --model llama-3.1-8b "
        "--gpus h100 --tp 1 --ttft-p99 5 --no-cache --what-if"
    ).split()
    code, text, _ = run(capsys, *small, "", "--routing", "jsq-tokens,round-robin")
    assert code == 0 and "At this cost, these policies tie, and the first is taken: jsq-tokens (TTFT p99" in text


def test_targets_out_of_reach_are_reported_and_no_file_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.yaml"
    options = "--gpus l40s --tp 1 --ttft-p99 0.001 --no-cache".split()
    code, text, _ = run(capsys, *SMALL, *options, "--out", out)
    assert code == 3 and not out.exists()
    assert text.startswith("No candidate meets TTFT p99 ≤ 1 ms.") and "the best is" in text


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ("--routing ,", "--routing: nothing is listed"),
        ("--gpus h1000", "--gpus: unknown GPU 'h1000'; did you mean"),
        ("--ttft-p99 0", "--ttft-p99"),
        ("--attainment 1.1", "--attainment"),
        ("--tp 0", "--tp: '0'; expected whole numbers"),
        ("--tp two", "--tp: 'two'; expected whole numbers"),
        ("--routing least-loadd", "--routing: unknown router 'least-loadd'; did you mean"),
        ("--model llama-9", "unknown model 'llama-9'"),
        ("--what-if load=0", "--what-if load=0: expected a number above 0"),
        ("--what-if lose=x", "--what-if lose: 'x'"),
        ("--what-if quake=1", "expected load=N, lose=N or lose-region=N"),
        ("--what-if lose-region=1", "not in several regions"),
        ("--max-replicas 0", "--max-replicas"),
        ("--ordering fcfs,edg", "--ordering: unknown ordering 'edg'; did you mean"),
        ("--engine vlm-v1", "unknown engine 'vlm-v1'"),
    ],
)
def test_mistakes(arguments: str, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *SMALL, *ASKED, "--no-cache", *arguments.split())
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert what in err


def test_a_list_of_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *SMALL, "--ttft-p99", "0.8", "--no-cache", "--gpus", ",")
    assert (code, out) == (2, "") and "--gpus: nothing is listed" in err


def test_without_a_target_or_a_workload(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no SLO: give --ttft-p99" in run(capsys, *SMALL, "--gpus", "h100", "--no-cache")[2]
    assert "no workload" in run(capsys, "--model", "llama-3.1-8b", "--ttft-p99", 1)[2]
    assert "--model or --model-config is missing" in run(capsys, "--workload", "chat", "--ttft-p99", 1)[2]
    assert "no such file" in run(capsys, "nowhere.yaml", "--ttft-p99", 1)[2]
    with pytest.raises(HeadwayError, match="no plan meets"):
        scenario_yaml(*planned(options_of(targets=Targets(ttft_p99_s=1e-6))))


# The report.


def test_text_and_page_of_every_kind_of_plan(small: Path) -> None:
    good, _ = planned(options_of(situations=(Situation(load=3.0), Situation(lost_replicas=1))), cache=small)
    bad, _ = planned(options_of(targets=Targets(ttft_p99_s=0.001)), cache=small)
    for found, num_charts in ((good, 2), (bad, 0)):
        assert max(map(len, text_of(said(found), 120).splitlines())) <= 120
        shown = page(report(found, "a <plan>"), "headway plan capacity")
        assert "a &lt;plan&gt;" in shown and shown.count('class="chart"') == num_charts
    text = text_of(said(good), 160)
    for each in good.likely:
        assert each.band.low < each.predicted_s < each.band.high
        assert f"is {int(10 * each.chance)} of 10 likely: predicted {seconds(each.predicted_s)}" in text
    asked = [name for name in LATENCY_SLOS if getattr(good.targets, name) is not None]
    assert [each.slo for each in good.likely] == asked and asked and not bad.likely
    measured = good.measured if good.longer is None else good.longer.measured
    assert measured is not None and measured.attainment is not None and measured.attainment_if_longest is not None
    assert measured.attainment_if_longest <= measured.attainment and min(measured.longest.values()) > 1
    assert ("if all were so much longer" in text) == (good.targets.attainment is not None)
    assert LEGEND in text and LEGEND in page(report(good, "small"), "headway plan capacity")
    assert "load x3" in text and "1 replica lost" in text and "the plan" in text


def test_the_page_draws_its_charts_in_a_browser(tmp_path: Path, small: Path) -> None:
    browser = chromium()
    file = tmp_path / "plan.html"
    write_page(file, page(report(planned(options_of(), cache=small)[0], "small"), "headway plan capacity"))
    command = [
        browser,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--virtual-time-budget=5000",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--window-size=1280,1600",
        "--dump-dom",
        file.as_uri(),
    ]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    dom = re.sub(r"<script>.*?</script>", "", dom, flags=re.DOTALL)
    drawn = re.findall(r'<div class="chart[^"]*js-plotly-plot[^"]*" id="([^"]+)"', dom)
    assert drawn == ["attainment", "goodput"]
    assert dom.count('class="point"') >= 4


def test_own_coefficients_apply_to_their_gpu_alone() -> None:
    made = document(fleet=[{"model": "llama-3.1-8b", "gpu": "h100", "coefficients": "own.json"}])
    own, other = (
        fleet_document(made, CapacityCandidate(gpu, Parallel(), "least-loaded", 1.0), 2)["fleet"][0]
        for gpu in ("h100-80gb-sxm", "l40s")
    )
    assert own["coefficients"] == "own.json" and "coefficients" not in other


def test_own_coefficients_change_bounds_and_rehearsals(tmp_path: Path, small: Path) -> None:
    """An engine with steps of a second meets no target, which the bounds show without a rehearsal."""
    shipped = Path(str(resources.files("headway.catalog") / "data" / "coefficients" / "h100-80gb-sxm.json"))
    slow = json.loads(shipped.read_text())
    for overhead in slow["engines"].values():
        overhead["step_s"] = 1.0
    for name, data in (("same", json.loads(shipped.read_text())), ("slow", slow)):
        (tmp_path / f"{name}.json").write_text(json.dumps(data))
    plans = {}
    for name in ("same", "slow"):
        made = document(fleet=[{"model": "llama-3.1-8b", "gpu": "h100", "coefficients": f"{name}.json"}])
        source, used = Source(made, Places(), tmp_path), Resources(scenario.Simulator(), small)
        plans[name], _ = plan(source, options_of(gpus=("h100",)), used)
    assert (
        plans["same"].objective_usd_per_hour
        == planned(options_of(gpus=("h100",)), cache=small)[0].objective_usd_per_hour
    )
    assert plans["slow"].num_rehearsals == 0 and "TTFT p99 is 1." in plans["slow"].options[0].reason


DRAFTS = {"method": "eagle", "num_speculative_tokens": 3, "acceptance": 0.7, "model": "acme/head"}


def test_plans_with_and_without_speculative_decoding() -> None:
    """A TPOT of 6.2 ms is out of reach for one H100 without drafts."""
    made = document(fleet=[{"model": "llama-3.1-8b", "gpu": "h100", "engine": "simulated-0.15", "speculative": DRAFTS}])
    made["workload"].update(arrivals=1, num_requests=60)
    asked: dict[str, Any] = {"gpus": (), "tps": (1,), "targets": Targets(tpot_p99_s=0.0062)}
    both, rehearsal = planned(options_of(**asked, speculative="both"), made)
    assert both.choice is not None and both.choice.candidate.speculates is True
    assert both.choice.candidate.policy == "least-loaded + speculative"
    assert {each.candidate.speculates: each.status for each in both.options} == {True: "feasible", False: "infeasible"}
    written = yaml.safe_load(scenario_yaml(both, rehearsal))
    assert written["fleet"][0]["speculative"] == DRAFTS
    alone, _ = planned(options_of(**asked), made)
    assert alone.objective_usd_per_hour == both.objective_usd_per_hour
    without, rehearsal = planned(options_of(**{**asked, "targets": Targets(tpot_p99_s=0.03)}, speculative="off"), made)
    assert (
        without.choice is not None
        and "speculative" not in yaml.safe_load(scenario_yaml(without, rehearsal))["fleet"][0]
    )
    with pytest.raises(HeadwayError, match="--speculative: the scenario's first pool has no `speculative`"):
        planned(options_of(speculative="both"))


def test_a_plan_keeps_the_weights_that_were_asked_for() -> None:
    made = document(fleet=[{"model": "llama-3.1-8b", "gpu": "h100", "quantization": "fp8", "kv_cache_dtype": "fp8"}])
    candidate = CapacityCandidate("h100-80gb-sxm", Parallel(), "least-loaded", 1.0)
    pool = fleet_document(made, candidate, 2)["fleet"][0]
    assert (pool["quantization"], pool["kv_cache_dtype"], pool["replicas"]) == ("fp8", "fp8", 2)


@pytest.mark.parametrize("regions", [(), ("east", "west")])
def test_a_scenario_changed_by_value_is_what_its_document_reads_as(regions: tuple[str, ...]) -> None:
    pools = [{"model": "llama-3.1-8b", "gpu": "h100", "region": each} for each in regions or ("",)]
    _, rehearsal = planned(options_of(gpus=("h100",), tps=(1,), max_replicas=2), document(fleet=pools))
    candidate = CapacityCandidate("l40s", Parallel(2), "round-robin", 2.0, "edf")
    for situation in (Situation(), Situation(load=1.5, lost_replicas=1)):
        for replicas in (3, 2):
            chosen = rehearsal.scenario(candidate, replicas, situation)
            made = fleet_document(rehearsal.document, candidate, replicas, rehearsal.regions)
            at_s = rehearsal.span_s / 2
            made["workload"] = with_load(made["workload"], situation.load)
            made["faults"] = [{"at_s": at_s, "replica": i} for i in range(situation.lost_replicas)]
            read = scenario.assemble(made, Places(), Path())
            assert (chosen.spec, chosen.fleet) == (read.spec, read.fleet)
