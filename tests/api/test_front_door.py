"""`import headway as hw`: public names, values in place of names, results as tables, frames and figures."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import msgspec
import pytest

import headway as hw
from headway import catalog
from headway.api.figures import Figure
from headway.config import strict_yaml
from headway.core.decision import Placement
from headway.report.page import library_name

DOCUMENT: dict[str, Any] = {
    "workload": {"builtin": "chat", "num_requests": 80, "arrivals": 20},
    "fleet": [{"model": "llama-3.1-8b", "gpu": "h100", "engine": "vllm-0.15", "replicas": 2}],
}
SERVICE: dict[str, Any] = {
    "workload": {"prompt_tokens": 100, "output_tokens": 10, "arrivals": 5, "num_requests": 20},
    "fleet": DOCUMENT["fleet"],
    "slo": {"ttft_s": 2.0},
}


class Nearest:
    """A router of one's own."""

    def __init__(self, bias: int = 0) -> None:
        self.bias, self.num_routed = bias, 0

    def route(self, request: Any, view: Any) -> Placement:
        self.num_routed += 1
        return Placement(min(view.replicas, key=lambda each: each.num_in_flight).id)


class Bad:
    def route(self, request: Any, view: Any) -> None:
        return None


@pytest.fixture(scope="module")
def comparison() -> hw.Comparison:
    return hw.compare(DOCUMENT, routing=["round-robin", Nearest], seeds=3)


def test_the_public_names() -> None:
    """A name is never taken away; a new one is added here."""
    assert hw.__all__ == [
        "Comparison", "Demand", "Engine", "Figure", "Gpu", "HeadwayError", "Model", "Plan", "Result", "Scenario",
        "Sweep", "advise", "compare", "forecast_demand", "load", "plan_capacity", "plan_cascade", "plan_combos",
        "plan_fleet", "plan_goodput", "plan_scaling", "plan_tiers", "serve", "simulate", "sweep", "why",
    ]  # fmt: skip
    stub = (Path(hw.__file__).with_suffix(".pyi")).read_text()
    for name in hw.__all__:
        value = getattr(hw, name)
        assert f" {name} as {name}" in stub and inspect.getdoc(value)
        if inspect.isfunction(value):
            assert "return" in inspect.get_annotations(value) or hasattr(value, "__wrapped__")
    assert set(hw.__all__) <= set(dir(hw))
    with pytest.raises(AttributeError, match="no attribute 'simulated'"):
        hw.simulated  # type: ignore[attr-defined]  # noqa: B018


def test_importing_headway_imports_nothing_else() -> None:
    code = (
        "import sys, headway; print([name for name in sys.modules if name.startswith('headway.') or name == 'numpy'])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_load_takes_files_dictionaries_and_changes(tmp_path: Path) -> None:
    path = tmp_path / "chat.yaml"
    path.write_text(json.dumps(DOCUMENT))
    for source in (path, str(path), DOCUMENT, hw.load(DOCUMENT)):
        made = hw.load(source, {"fleet.0.replicas": 5, "workload.arrivals": 7})
        assert made.fleet.pools[0].replicas == 5 and made.spec.workload.arrivals == 7
    assert len(hw.load(builtin="chat").fleet.pools) == 2
    assert DOCUMENT["fleet"][0]["replicas"] == 2, "the dictionary stays as it is"
    for source, changes, words in (
        (None, {}, "expected a scenario"),
        ("no.yaml", {}, "no.yaml: no such file"),
        ({**DOCUMENT, "flet": 1}, {}, "did you mean 'fleet'"),
        (DOCUMENT, {"workload.rate": 1}, "unknown key 'rate'"),
    ):
        with pytest.raises(hw.HeadwayError, match=words):
            hw.load(source, changes)  # type: ignore[arg-type]


def test_values_in_place_of_names() -> None:
    gpu = msgspec.structs.replace(catalog.gpu("h100"), name="h100-half", memory_bytes=40e9, aliases=())
    model = msgspec.structs.replace(catalog.model("llama-3.1-8b"), name="wide", intermediate_size=16384, aliases=())
    engine = msgspec.structs.replace(catalog.engine("vllm-0.15"), max_num_seqs=16)
    made = hw.load({**DOCUMENT, "fleet": [{"model": model, "gpu": gpu, "engine": {"name": "vllm-0.15"}}]})
    (pool,) = made.fleet.pools
    assert (pool.gpu, pool.model.intermediate_size) == (gpu, 16384)
    assert hw.load({**DOCUMENT, "fleet": [{**DOCUMENT["fleet"][0], "engine": engine}]}).fleet.pools[0].engine == engine


def test_policies_as_classes_and_instances() -> None:
    own = Nearest(3)
    found = [hw.simulate(DOCUMENT, routing=each) for each in (Nearest, own, {"name": Nearest, "bias": 1})]
    assert [each.policies["routing"] for each in found] == ["Nearest", "Nearest(bias=3)", "Nearest(bias=1)"]
    assert own.num_routed == 0, "a run has its own copy"
    assert found[0].metrics == found[1].metrics != hw.simulate(DOCUMENT, routing="random").metrics
    with pytest.raises(hw.HeadwayError, match=r"policy Bad: `route` returned None; expected a Placement"):
        hw.simulate(DOCUMENT, routing=Bad)
    with pytest.raises(hw.HeadwayError, match=r"policies.routing: expected string"):
        hw.simulate(DOCUMENT, routing=3)


def test_a_result_is_a_table_a_frame_and_a_figure(tmp_path: Path) -> None:
    result = hw.simulate(DOCUMENT)
    frame = result.to_pandas()
    assert len(frame) == result.to_arrow().num_rows == 80 and {"arrival_s", "first_token_s"} <= set(frame)
    assert "TTFT p99" in result.table() and "<pre>" in result._repr_html_() and "80 requests" in repr(result)
    assert isinstance(result.plot("e2e"), Figure) and result.save(tmp_path / "r.html").exists()
    with pytest.raises(hw.HeadwayError, match="unknown distribution 'tft'"):
        result.plot("tft")
    with pytest.raises(hw.HeadwayError, match=r"expected a name that ends in \.html"):
        result.save(tmp_path / "r.txt")


def test_frames_are_those_of_polars_where_it_is_installed(comparison: hw.Comparison) -> None:
    polars = pytest.importorskip("polars")
    frame = comparison.to_polars()
    assert isinstance(frame, polars.DataFrame) and frame.height == 6 and set(frame["seed"]) == {0, 1, 2}
    assert frame.columns == list(comparison.to_pandas().columns)
    result = hw.simulate(DOCUMENT).to_polars()
    assert result.height == 80 and result["arrival_s"].dtype == polars.Float64


@pytest.mark.parametrize(("method", "library"), [("to_polars", "polars"), ("to_pandas", "pandas")])
def test_frames_without_their_library_are_one_line(
    method: str, library: str, comparison: hw.Comparison, monkeypatch: pytest.MonkeyPatch
) -> None:
    comparison.to_arrow()  # pyarrow looks for pandas once, at its first table
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(hw.HeadwayError, match=f"{method}: {library} is not installed; pip install {library}"):
        getattr(comparison, method)()


def test_a_comparison_has_intervals(comparison: hw.Comparison, tmp_path: Path) -> None:
    assert len(comparison) == 2 and comparison.names == ["round-robin", "Nearest"]
    assert [each.policies["routing"] for each in comparison] == comparison.names
    estimate = comparison.estimate("Nearest", "ttft_s.p99")
    assert estimate is not None and estimate.low <= estimate.mean <= estimate.high
    assert comparison.difference(0, 1, "e2e_s.mean") is not None
    frame = comparison.to_pandas()
    assert len(frame) == 6 and sorted(set(frame["seed"])) == [0, 1, 2] and "replica.0.usd" not in frame
    assert "replica.0.usd" in comparison.to_arrow(breakdowns=True).column_names
    assert "±" in comparison.table() and "TTFT p99" in comparison.verdict and "3 seeds" in comparison.verdict
    figure = comparison.plot("ttft_s.p99", "slo_attainment")
    assert len(figure.data) == 4 and figure.data[0].error_x.array[0] >= 0
    figure.save(tmp_path / "dots.html")
    figure.save(tmp_path / "dots.json")
    assert {path.name for path in tmp_path.iterdir()} == {"dots.html", "dots.json", library_name()}
    assert "http" not in (tmp_path / "dots.html").read_text(), "a page needs no network"
    with pytest.raises(hw.HeadwayError, match="unknown run 'nearest'; did you mean 'Nearest'"):
        comparison.estimate("nearest", "ttft_s.p99")
    with pytest.raises(hw.HeadwayError, match=r"expected \.html, \.json, \.svg"):
        figure.save(tmp_path / "dots.gif")


def test_pictures(comparison: hw.Comparison, tmp_path: Path) -> None:
    """Every figure is a picture, names of runs included, without a browser."""
    comparison.plot().save(tmp_path / "dots.svg")
    comparison.plot("ttft").save(tmp_path / "lines.svg")
    for name in ("dots.svg", "lines.svg"):
        text = (tmp_path / name).read_text()
        assert text.count(">Nearest<") == 1 and "<svg" in text and "TTFT" in text
    pie = Figure({"data": [{"type": "pie", "values": [1]}]})
    with pytest.raises(hw.HeadwayError, match="no traces of the type 'pie'"):
        pie.save(tmp_path / "pie.svg")


def test_one_seed_has_no_intervals() -> None:
    alone = hw.compare(DOCUMENT, routing=["round-robin", "random"], seeds=1)
    assert "±" not in alone.table() and "with one seed" in alone.verdict
    assert alone.estimate(0, "ttft_s.p99") is None and len(alone.plot().data) == 4


def test_a_sweep_over_a_grid() -> None:
    grid = {"workload.arrivals": [5, 20], "fleet.0.replicas": [1, 2]}
    found = hw.sweep(DOCUMENT, grid, seeds=2, routing=["round-robin", "jsq-tokens"])
    frame = found.to_pandas()
    assert len(frame) == 4 * 2 * 2 and found.names == ("round-robin", "jsq-tokens")
    by_load = frame[frame["fleet.0.replicas"] == 1].groupby("workload.arrivals")["e2e_s.mean"].mean()
    assert by_load[20] > by_load[5]
    same = frame[(frame["fleet.0.replicas"] == 1) & (frame["seed"] == 0) & (frame["workload.arrivals"] == 5)]
    alone = hw.compare(DOCUMENT, {"workload.arrivals": 5, "fleet.0.replicas": 1}, seeds=1)
    assert set(same["e2e_s.mean"]) == {alone[0].metrics["e2e_s.mean"]}
    assert len(found.table().splitlines()) == 6 and len(found.plot("e2e_s.mean").data) == 8
    with pytest.raises(hw.HeadwayError, match="unknown key of the grid"):
        found.plot(x="fleet.0.tp")
    with pytest.raises(hw.HeadwayError, match="grid: expected keys"):
        hw.sweep(DOCUMENT, {})
    with pytest.raises(hw.HeadwayError, match="seeds: 0; expected"):
        hw.compare(DOCUMENT, seeds=0)


def test_processes_and_classes_of_functions() -> None:
    class Local(Nearest):
        pass

    with pytest.warns(UserWarning, match="Local is not in a module"):
        hw.compare(DOCUMENT, routing=["random", Local], seeds=1, jobs=2)


def test_a_capacity_plan_is_a_scenario(tmp_path: Path) -> None:
    asked = {**DOCUMENT, "fleet": [{"model": "llama-3.1-8b", "engine": "vllm-0.15"}]}
    plan = hw.plan_capacity(asked, gpus=["h100", "l4"], tps=[1], ttft_p99_s=2.0, routings=["round-robin", "jsq-tokens"])
    assert plan.is_met and "At this cost" in plan.table()
    assert set(plan.to_pandas()["gpu"]) == {"h100-80gb-sxm", "l4"}
    result = hw.simulate(plan.scenario())
    assert result.metrics["ttft_s.p99"] == pytest.approx(plan.answer.measured.ttft_p99_s)
    for name in ("plan.yaml", "plan.html", "plan.json"):
        assert plan.save(tmp_path / name).stat().st_size > 100
    assert (tmp_path / library_name()).exists()
    with pytest.raises(hw.HeadwayError, match="unknown GPU 'h1000'"):
        hw.plan_capacity(asked, gpus=["h1000"], ttft_p99_s=2.0)


def test_combos_are_planned_for_a_service() -> None:
    asked = {
        **DOCUMENT,
        "workload": {"prompt_tokens": 300, "output_tokens": 60, "arrivals": 20, "num_requests": 100},
        "slo": {"ttft_s": 2, "tpot_s": 0.05},
    }
    plan = hw.plan_combos(asked, ["h800:2:2.8"], rps=10, sizes=1, profile_requests=60)
    assert plan.is_met and plan.to_arrow().num_rows and hw.simulate(plan.scenario()).metrics["num_completed"] == 100


def test_scalers_are_compared_for_start_times(tmp_path: Path) -> None:
    asked = {**DOCUMENT, "slo": {"ttft_s": 2}}
    asked["fleet"] = [{**DOCUMENT["fleet"][0], "replicas": 1, "max_replicas": 3}]
    plan = hw.plan_scaling(asked, scalers=["hpa"], startup_s=["30s", 60], max_late=0.9, clairvoyant=False)
    assert plan.is_met and {row["startup_s"] for row in plan.rows} == {30.0, 60.0}
    assert list(plan.files) == ["startup-30s.yaml", "startup-60s.yaml"] and "HPA" in plan.table()
    with pytest.raises(hw.HeadwayError, match="several plans: startup-30s"):
        plan.yaml()
    one = hw.plan_scaling(asked, scalers=["hpa"], startup_s=[30], max_late=0.9, clairvoyant=False)
    assert one.scenario().spec.policies.scaling is not None and one.save(tmp_path / "plan.html").exists()


def test_services_share_gpus_and_goodputs_are_measured_anew(tmp_path: Path) -> None:
    services = [{**SERVICE, "name": name} for name in ("chat", "search")]
    plan = hw.plan_combos(services, ["h800:2:2.8"], rps=[2.0, 1.0], sizes=1, profile_requests=60)
    assert list(plan.files) == ["chat.yaml", "search.yaml"] and plan.is_met
    with pytest.raises(hw.HeadwayError, match="2 services; expected 1"):
        hw.plan_combos(services, ["h800:2:2.8"], curve=True)
    combo = {"name": "one", "aggregated": {**SERVICE["fleet"][0], "gpu": "h800"}}
    fleet, requests = tmp_path / "fleet.yaml", tmp_path / "day.csv"
    fleet.write_text(strict_yaml.dump({"name": "served", "slo": SERVICE["slo"], "workload": SERVICE["workload"],
                                       "combos": [combo]}))  # fmt: skip
    rows = "".join(f"{0.5 * i},400,40\n" for i in range(40))
    requests.write_text(f"arrival_s,prompt_tokens,output_tokens\n{rows}")
    found = hw.plan_goodput(fleet, requests, profile_requests=60)
    assert found.is_met and f"goodput_rps: {found.rows[0]['goodput_rps']:.4g}" in found.yaml()


def test_a_fleet_is_planned_for_two_models(tmp_path: Path) -> None:
    rows = "".join(f"{0.05 * i},300,40,{'llama-3.1-8b' if i % 3 else 'small'}\n" for i in range(120))
    trace = tmp_path / "day.csv"
    trace.write_text(f"arrival_s,prompt_tokens,output_tokens,model\n{rows}")
    plan = hw.plan_fleet(
        trace,
        ["h100:4", "a100:4:1.5"],
        slo={"ttft_s": 2, "tpot_s": 0.05},
        models={"small": "qwen3-8b"},
        tps=[1],
        routings=["least-loaded", "round-robin"],
        seeds=2,
    )
    assert plan.is_met and len(plan.answer.sentences) == 3
    assert plan.sentences == plan.answer.sentences and set(plan.to_pandas()["kind"]) >= {"plan", "router"}
    assert hw.simulate(plan.scenario()).metrics["slo_attainment"] >= 0.99
    for name in ("plan.yaml", "plan.html", "plan.json"):
        assert plan.save(tmp_path / name).stat().st_size > 100
    with pytest.raises(hw.HeadwayError, match="go with a trace"):
        hw.plan_fleet(DOCUMENT, ["h100:1"], models=["qwen3-8b"])


@pytest.mark.slow
def test_a_fleet_is_served() -> None:
    with hw.serve(hw.load(DOCUMENT)) as fleet:
        assert fleet.num_replicas == 2
        body = {"model": "llama-3.1-8b", "max_tokens": 3, "messages": [{"role": "user", "content": "Hello."}]}
        asked = urllib.request.Request(f"{fleet.url}/v1/chat/completions", json.dumps(body).encode())
        with urllib.request.urlopen(asked, timeout=20) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 3
    with (
        pytest.raises(hw.HeadwayError, match=r"the fleet did not start: .*endpoints: missing"),
        hw.serve(DOCUMENT, emulated=False),
    ):
        pass


def test_unknown_metrics_are_named_with_the_nearest_one(comparison: hw.Comparison) -> None:
    sweep = hw.sweep(DOCUMENT, {"workload.arrivals": [5]})
    calls: list[Any] = [
        lambda: comparison.plot("ttft_p99"),
        lambda: comparison.plot("ttft_s.p99", "ttft_p99"),
        lambda: comparison.estimate(0, "ttft_p99"),
        lambda: comparison.difference(0, 1, "ttft_p99"),
        lambda: sweep.table("ttft_p99"),
        lambda: sweep.plot("ttft_p99"),
        lambda: comparison[0].metrics["ttft_p99"],
    ]
    for call in calls:
        with pytest.raises(hw.HeadwayError, match=r"unknown metric 'ttft_p99'; did you mean 'ttft_s.p99'\?"):
            call()
    with pytest.raises(hw.HeadwayError, match=r"unknown metric 'replica.0.ttf_s.p99'; did you mean 'replica.0.ttft_s"):
        comparison.estimate(0, "replica.0.ttf_s.p99")
    with pytest.raises(hw.HeadwayError, match="run: 7; expected 0 to 1"):
        comparison.estimate(7, "ttft_s.p99")
    assert comparison[0].metrics.get("ttft_p99") is None


def test_requests_have_their_latencies_and_the_name_of_their_end() -> None:
    workload = {"arrivals": 5.0, "num_requests": 20, "prompt_tokens": 50, "output_tokens": 5, "timeout_s": 0.03}
    found = hw.simulate({"workload": workload, "fleet": [{"model": "llama-3.1-8b", "gpu": "l4"}]}).to_arrow()
    for row in found.to_pylist():
        assert row["outcome"] in ("finished", "cancelled")
        assert (row["e2e_s"] is None) == (row["outcome"] == "cancelled")
        if row["e2e_s"] is not None:
            assert row["ttft_s"] + 4 * row["tpot_s"] == pytest.approx(row["e2e_s"])
    assert {"finished", "cancelled"} >= set(found["outcome"].to_pylist())


def test_demand_is_shown_drawn_and_saved(tmp_path: Path) -> None:
    rows = "".join(f"{i * 864},10,5\n" for i in range(100))
    (tmp_path / "day.csv").write_text("arrival_s,prompt_tokens,output_tokens\n" + rows)
    found = hw.forecast_demand(tmp_path / "day.csv", growth=1.4, begins="2026-03-02")
    assert found.table().splitlines()[0] in found._repr_html_() and "ASSUMED" in found._repr_html_()
    assert len(found.to_arrow()) == 730 and len(found.plot().data) == 3
    assert found.save(tmp_path / "d.parquet").exists() and "2026-03-03" in repr(found)
    with pytest.raises(hw.HeadwayError, match="days: 5"):
        hw.forecast_demand(5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: hw.plan_cascade(DOCUMENT, quality=101.0), "quality: 101.0; expected a mean score from 0 to 100"),
        (lambda: hw.plan_cascade(DOCUMENT, quality=-1.0, latency_s=5), "quality: -1.0; expected a mean score"),
        (lambda: hw.plan_cascade(DOCUMENT, quality=50.0, gpus=0), "gpus: 0; expected a whole number of 1 or more"),
        (lambda: hw.plan_cascade(DOCUMENT, quality=50.0, gpus_per_server=0), "gpus_per_server: 0; expected"),
        (lambda: hw.plan_capacity(DOCUMENT, ttft_p99_s=1, jobs=0), "jobs: 0; expected a whole number of 1 or more"),
        (lambda: hw.plan_capacity(DOCUMENT, demand=3), "demand: 3; expected a forecast, or the path of its file"),  # type: ignore[arg-type]
        (lambda: hw.advise(DOCUMENT, ["day"], jobs=0), "jobs: 0; expected a whole number of 1 or more"),
        (lambda: hw.plan_combos(SERVICE, ["h100:1"], rps=0.0), "rps: 0; expected more than 0 requests per second"),
        (lambda: hw.plan_combos(SERVICE, ["h100:1"], rps=1e300), "rps: 1e+300; expected more than 0 requests per"),
        (lambda: hw.plan_combos(SERVICE, ["h100:1"], attainment=2.0), "attainment: 2; expected more than 0, 1 at"),
        (lambda: hw.plan_combos(SERVICE, ["h100:1"], routings=[]), "routings: expected one or more"),
        (
            lambda: hw.plan_capacity(DOCUMENT, ttft_p99_s=1, speculative="x"),
            "speculative: 'x'; expected on",
        ),  # type: ignore[arg-type]
        (lambda: hw.plan_capacity(DOCUMENT, ttft_p99_s=1, demand="d", chance=0.1), "chance: 0.1; expected 0.5 or more"),
        (lambda: hw.plan_scaling(DOCUMENT, max_late=1.0), "max_late: 1; expected a share of requests, less than 1"),
        (lambda: hw.plan_scaling(DOCUMENT, past_hours=1.0), "past_hours: goes with forecaster"),
        (lambda: hw.plan_cascade(DOCUMENT, quality=1.0, prefix_hit_rate=1.0), "prefix_hit_rate: 1; expected a share"),
        (lambda: hw.plan_tiers(DOCUMENT, tolerance=-0.1), "tolerance: -0.1; expected a loss of attainment, from 0"),
        (lambda: hw.plan_tiers(DOCUMENT, seeds=0), "seeds: 0; expected a whole number of 1 or more"),
    ],
)
def test_arguments_outside_their_range_are_named(call: Any, message: str) -> None:
    with pytest.raises(hw.HeadwayError, match=f"^{re.escape(message)}"):
        call()


def test_methods_of_results_check_their_arguments(comparison: hw.Comparison) -> None:
    for call, message in (
        (lambda: comparison.estimate("ttft_s.p99", 0), "metric: 0; expected a text"),
        (lambda: comparison.difference(0, 1.5, "ttft_s.p99"), "other: 1.5; expected a position or a name"),
        (lambda: comparison.estimate(0, "ttft_p99"), "unknown metric 'ttft_p99'; did you mean 'ttft_s.p99'?"),
        (lambda: comparison.plot("ttft_s.p99", 3), "metrics: ('ttft_s.p99', 3); expected a text"),
        (lambda: comparison[0].plot(3), "metric: 3; expected a text"),
    ):
        with pytest.raises(hw.HeadwayError, match=f"^{re.escape(message)}"):
            call()
