"""`headway plan combos`: profiles by simulation, their cache, the plan as a fleet that keeps what it promises."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from headway.cli import main
from headway.config.strict_yaml import Places
from headway.core.errors import HeadwayError
from headway.planning.combos.plan import service_scenario
from headway.planning.combos.problem import GpuCombo, Group
from headway.planning.combos.rehearsal import PRECISION, GoodputProfiler, fleet_sections
from headway.planning.rehearsals import Rehearsals, Resources, Source
from headway.report.page import library_name
from headway.scenario import Simulator
from headway.scenario.run import assemble, load, run

SCENARIO = {
    "name": "chat",
    "workload": {"prompt_tokens": 300, "output_tokens": 60, "arrivals": 20, "num_requests": 200},
    "slo": {"ttft_s": 2, "tpot_s": 0.05},
    "fleet": [{"model": "llama-3.1-8b", "gpu": "h800-80gb-sxm", "engine": "vllm-0.15"}],
}
GPUS = "h800:2:2.8,h20:3:1.5"


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    file = tmp_path / "chat.yaml"
    file.write_text(yaml.safe_dump(SCENARIO))
    return file


def plan(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    code = main(["plan", "combos", *map(str, arguments), "--no-progress"])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


@pytest.mark.ci
def test_a_plan_is_a_fleet_that_serves_its_demand(
    scenario: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache, out, page = tmp_path / "cache", tmp_path / "plan.yaml", tmp_path / "plan.html"
    asked = [scenario, "--gpus", GPUS, "--rps", 90, "--sizes", 1, "--cache", cache, "--profile-requests", 150]
    code, text, err = plan(capsys, *asked, "--json", "-o", out, "--html", page)
    assert code == 0, err
    answer = json.loads(text)
    found = answer["plan"]
    assert found["status"] == "optimal" and found["gap"] == pytest.approx(0, abs=1e-9)
    assert found["services"][0]["goodput_rps"] >= 90
    assert all(found["gpus"].get(name, 0) <= most for name, most in (("h800-80gb-sxm", 2), ("h20-96gb", 3)))
    assert set(answer["others"]) == {"mc", "mce"}
    assert answer["others"]["mc"]["usd_per_hour"] <= found["usd_per_hour"] + 1e-9
    # What is planned does what it was profiled to do, at the rate that was asked for.
    document = yaml.safe_load(out.read_text())
    document["workload"] |= {"arrivals": 90, "num_requests": 600}
    out.write_text(yaml.safe_dump(document))
    done = run(load(out)).summary
    assert done.slo_attainment is not None and done.slo_attainment >= 0.85
    assert "<1 x" in page.read_text() and "goodput" in page.read_text()
    assert page.with_name(library_name()).exists()
    # The same again costs no simulation.
    again = plan(capsys, *asked, "--json")
    assert json.loads(again[1])["plan"] == found
    assert "0 simulations" in again[2]


@pytest.mark.ci
def test_a_saved_plan_runs_from_its_own_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The trace and the model are files beside the scenario, not beside the plan."""
    asked, saved = tmp_path / "asked", tmp_path / "saved"
    for folder in (asked, saved):
        folder.mkdir()
    rows = "".join(f"{0.05 * i},300,60\n" for i in range(100))
    (asked / "trace.csv").write_text(f"arrival_s,prompt_tokens,output_tokens\n{rows}")
    (asked / "config.json").write_text(
        json.dumps(
            {
                "num_hidden_layers": 32,
                "hidden_size": 4096,
                "intermediate_size": 14336,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "vocab_size": 128256,
                "max_position_embeddings": 8192,
            }
        )
    )
    fleet = [{**SCENARIO["fleet"][0], "model": {"config": "config.json"}}]  # type: ignore[index]
    workload = {"trace": "trace.csv", "arrivals": {"kind": "replay", "path": "trace.csv"}}
    file = asked / "chat.yaml"
    file.write_text(yaml.safe_dump({**SCENARIO, "workload": workload, "fleet": fleet}))
    out = saved / "plan.yaml"
    options = ["--gpus", "h800:2:2.8", "--sizes", 1, "--no-cache", "--profile-requests", 60, "-o", out]
    assert plan(capsys, file, *options)[0] == 0
    assert main(["simulate", str(out), "--no-progress"]) == 0


def test_a_demand_beyond_the_gpus_is_reported(
    scenario: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [scenario, "--gpus", "h20:1", "--rps", 5000, "--sizes", 1, "--no-cache", "--profile-requests", 60]
    code, text, _ = plan(capsys, *asked)
    assert code == 3
    assert "at most" in text and "needs 5000" in text


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        ({"slo": {}}, (), "slo: expected ttft_s, tpot_s, or both"),
        ({"fleet": [], "combos": []}, (), "no replicas"),
        ({}, ("--gpus", "h900:1"), "--gpus: .*h900"),
        ({}, ("--gpus", "h20:many"), "expected type:count:price"),
        ({}, ("--rps", "1,2"), "expected a number, above 0"),
    ],
)
def test_scenarios_that_cannot_be_planned_are_refused(
    change: dict[str, object],
    arguments: tuple[str, ...],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "asked.yaml"
    file.write_text(yaml.safe_dump({**SCENARIO, **change}))
    options = arguments if "--gpus" in arguments else ("--gpus", "h20:1", *arguments)
    code, _, err = plan(capsys, file, "--no-cache", *options)
    assert code == 1 or code == 2
    assert re.search(message, err), err


def test_a_profile_lasts_until_the_number_in_flight_is_that_of_the_long_term() -> None:
    """Answers take 20 s: 300 requests would all be in flight at once at any rate, without queues."""
    document = {
        "name": "pages",
        "workload": {"prompt_tokens": 100, "output_tokens": 600, "arrivals": 5, "num_requests": 100},
        "slo": {"ttft_s": 1, "tpot_s": 0.03},
        "fleet": [{"model": "llama-3.1-8b", "gpu": "h20-96gb", "engine": "vllm-0.15"}],
    }
    service = service_scenario(Source(document, Places(), Path()), Simulator())
    combo = GpuCombo("llama-3.1-8b", 1.5, aggregated=Group("h20-96gb"))
    rate = GoodputProfiler({"pages": service}, Rehearsals(Resources(Simulator()), remembers=True)).goodput_rps(
        combo, service.service.pattern, service.service.slo
    )
    lengths = {"prompt_tokens": 100, "output_tokens": 600}
    attained = []
    for share in (0.9, 1.2):
        workload = {**lengths, "arrivals": share * rate, "num_requests": round(200 * share * rate)}
        attained.append(run(assemble({**document, "workload": workload}, Places(), Path())).summary.slo_attainment)
    assert attained[0] >= 0.9, "in the long term, to a tenth"
    assert attained[1] < 0.5, "and not much less than what can be served"


LONG = {
    **SCENARIO,
    "workload": {
        "prompt_tokens": {"kind": "lognormal", "mean": 300, "cv": 1.2},
        "output_tokens": {"kind": "lognormal", "mean": 60, "cv": 1.0},
        "arrivals": 22.5,
        "num_requests": 200,
    },
    "fleet": [{"model": "llama-3.1-8b", "gpu": "h20-96gb", "engine": "vllm-0.15"}],
}
"""300 requests are 13 s: one H20 serves them in time, and falls behind over the next thousands."""
SHORT_REQUESTS = 300


@pytest.mark.ci
def test_a_plan_lasts_longer_than_its_profiles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "chat.yaml", tmp_path / "plan.yaml"
    file.write_text(yaml.safe_dump(LONG))
    asked = [file, "--gpus", "h20:4", "--aggregated-only", "--sizes", 1, "--profile-requests", SHORT_REQUESTS]
    code, text, err = plan(capsys, *asked, "--no-cache", "--json", "-o", out)
    assert code == 0, err
    answer = json.loads(text)
    found = answer["rehearsals"]["chat"]
    assert found["is_met"] and found["runs"][-1]["num_requests"] >= 4 * SHORT_REQUESTS
    assert all(each["is_lasting"] for each in answer["selection"]["candidates"] if each["combo"]["aggregated"])
    document = yaml.safe_load(out.read_text())
    document["workload"]["num_requests"] = 20 * SHORT_REQUESTS
    out.write_text(yaml.safe_dump(document))
    done = run(load(out)).summary
    assert done.slo_attainment is not None and done.slo_attainment >= 0.9


MINE = {"name": "mine", "like": "h20", "usd_per_hour": 0.5}


@pytest.mark.ci
@pytest.mark.parametrize("where", ["scenario", "file"])
def test_own_gpus_are_planned_with_and_marked(where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, gpus, out, page = (tmp_path / name for name in ("chat.yaml", "gpu.yaml", "plan.yaml", "plan.html"))
    file.write_text(yaml.safe_dump({**SCENARIO, "gpus": [MINE]} if where == "scenario" else SCENARIO))
    gpus.write_text(yaml.safe_dump(MINE))
    asked = [file, "--gpus", "mine:4,h20:4", "--sizes", 1, "--no-cache", "--profile-requests", 60]
    asked += ["--gpu-file", gpus] if where == "file" else []
    code, text, err = plan(capsys, *asked, "--json", "-o", out, "--html", page)
    assert code == 0, err
    answer = json.loads(text)
    chosen = answer["plan"]["combos"]
    assert set(answer["plan"]["gpus"]) == {"mine"}, "the same GPU at a third of the price"
    assert all(not each["calibrated"] and "kernels of h20-96gb" in each["uncalibrated"][0] for each in chosen)
    candidates = answer["selection"]["candidates"]
    assert any("mine: kernels of h20-96gb" in note for each in candidates for note in each["uncalibrated"])
    assert "are not calibrated (mine: kernels of h20-96gb" in page.read_text()
    assert run(load(out)).summary.num_completed == 200
    code, text, _ = plan(capsys, *asked)
    assert code == 0 and "not calibrated" in text


def test_combos_of_measured_gpus_are_calibrated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "chat.yaml"
    file.write_text(yaml.safe_dump(SCENARIO))
    code, text, _ = plan(
        capsys, file, "--gpus", "h100:4", "--sizes", 1, "--no-cache", "--profile-requests", 60, "--json"
    )
    assert code == 0 and all(each["calibrated"] for each in json.loads(text)["plan"]["combos"])


def test_quantized_weights_stay_quantized(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "chat.yaml", tmp_path / "plan.yaml"
    fleet = [{**SCENARIO["fleet"][0], "quantization": "fp8"}]  # type: ignore[index]
    file.write_text(yaml.safe_dump({**SCENARIO, "fleet": fleet}))
    asked = [file, "--gpus", "h100:4", "--aggregated-only", "--sizes", 1, "--no-cache", "--profile-requests", 60]
    assert plan(capsys, *asked, "-o", out)[0] == 0
    assert yaml.safe_load(out.read_text())["fleet"][0]["quantization"] == "fp8"


def test_a_long_profile_is_no_higher_than_a_short_one() -> None:
    service = service_scenario(Source(LONG, Places(), Path()), Simulator())
    combo = GpuCombo("llama-3.1-8b", 1.5, aggregated=Group("h20-96gb"))
    profiler = GoodputProfiler(
        {"chat": service}, Rehearsals(Resources(Simulator()), remembers=True), num_requests=SHORT_REQUESTS
    )
    asked = (combo, service.service.pattern, service.service.slo)
    assert 0 < profiler.lasting_rps(*asked) < 0.9 * profiler.goodput_rps(*asked)


@pytest.mark.parametrize(
    "combo",
    [
        GpuCombo("llama-3.1-8b", 1.5, aggregated=Group("h20-96gb")),
        GpuCombo("llama-3.1-8b", 3.0, prefill=Group("h20-96gb"), decode=Group("h20-96gb")),
    ],
    ids=lambda combo: combo.label,
)
def test_the_goodput_is_that_of_a_search_step_by_step(combo: GpuCombo) -> None:
    """The first of rates 2% apart that is not served, with the same requests; found in no more than 5 trials."""
    service = service_scenario(Source(LONG, Places(), Path()), Simulator())
    profiler = GoodputProfiler(
        {"chat": service}, Rehearsals(Resources(Simulator()), remembers=True), num_requests=SHORT_REQUESTS
    )
    found = profiler.goodput_rps(combo, service.service.pattern, service.service.slo)
    assert profiler.rehearsals.num_simulated <= 5
    rate, step = found / 1.2, 1.02
    while max(profiler.strains(service, combo, rate)) <= 0:
        rate *= step
    assert rate / step / PRECISION <= found <= rate * PRECISION


@pytest.mark.ci
def test_routers_are_compared_at_the_plans_cost(
    scenario: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, page = tmp_path / "plan.yaml", tmp_path / "plan.html"
    asked = [scenario, "--gpus", "h20:3", "--sizes", 1, "--no-cache", "--profile-requests", 60, "-o", out]
    code, text, err = plan(capsys, *asked, "--routing", "least-loaded,round-robin", "--html", page)
    assert code == 0, err
    assert re.search(r"chat: .*% of [\d,]+ requests are in time with (least-loaded|round-robin)", text)
    assert yaml.safe_load(out.read_text())["policies"]["routing"] in ("least-loaded", "round-robin")
    assert "The plan rehearsed, by router" in page.read_text()
    code, _, err = plan(capsys, *asked, "--routing", "least-loadde")
    assert code == 2 and "least-loaded" in err


def test_a_written_plan_has_the_rate_that_was_asked_for(
    scenario: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.yaml"
    asked = [scenario, "--gpus", "h20:3", "--rps", 25, "--sizes", 1, "--no-cache", "--profile-requests", 60, "-o", out]
    assert plan(capsys, *asked)[0] == 0
    assert yaml.safe_load(out.read_text())["workload"]["arrivals"] == 25


@pytest.mark.ci
def test_profiles_of_a_trace_are_kept_by_its_content(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another trace of the same name is another workload."""
    file, goodputs = tmp_path / "chat.yaml", []
    replay = {"kind": "replay", "path": "trace.csv"}
    file.write_text(yaml.safe_dump({**SCENARIO, "workload": {"trace": "trace.csv", "arrivals": replay}}))
    for tokens in (60, 240):
        rows = "".join(f"{0.1 * i},300,{tokens}\n" for i in range(100))
        (tmp_path / "trace.csv").write_text(f"arrival_s,prompt_tokens,output_tokens\n{rows}")
        asked = [file, "--gpus", "h20:2", "--aggregated-only", "--sizes", 1, "--cache", tmp_path / "cache"]
        code, text, err = plan(capsys, *asked, "--json")
        assert code == 0, err
        goodputs.append(json.loads(text)["selection"]["candidates"][0]["goodput_rps"])
    assert goodputs[0] != goodputs[1]


def test_aggregated_combos_beside_split_ones_have_a_goodput() -> None:
    document = {**SCENARIO, "handover": {"mode": "layerwise", "degree": 8}}
    service = service_scenario(Source(document, Places(), Path()), Simulator())
    one = GpuCombo("llama-3.1-8b", 1.5, aggregated=Group("h20-96gb", 2, 2))
    two = GpuCombo("llama-3.1-8b", 3.0, prefill=Group("h20-96gb"), decode=Group("h20-96gb"))
    fleet = fleet_sections(service, [(one, 2, 12.5, "one"), (two, 1, 20.0, "two")])
    assert [each.get("goodput_rps") for each in fleet["combos"]] == [12.5, 20.0] and fleet["fleet"] == []
    chosen = assemble({**service.document, **fleet}, Places(), Path())
    both = chosen.fleet.combos[0]
    assert [part.role for part in both.parts] == ["mixed"] and both.replicas == 2 and both.parts[0].replicas == 2
    assert run(chosen).summary.num_completed == 200
    assert fleet_sections(service, [(one, 2, 12.5, "one")])["combos"] == [], "alone, it can be served live"


def test_a_combo_is_split_or_aggregated() -> None:
    half = {"model": "llama-3.1-8b", "gpu": "h20-96gb"}
    for parts in ({"prefill": half}, {"aggregated": half, "decode": half}, {}):
        with pytest.raises(HeadwayError, match="expected `prefill` and `decode`, or `aggregated`"):
            assemble({**SCENARIO, "fleet": [], "combos": [{"name": "a", **parts}]}, Places(), Path())
