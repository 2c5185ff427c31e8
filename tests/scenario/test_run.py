"""Scenarios: read strictly, assembled, run and compared."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import yaml

from headway.config.scenario import Scenario, variants
from headway.config.strict_yaml import Places
from headway.core.errors import HeadwayError
from headway.metrics.summary import flatten
from headway.report.model_error import ENERGY
from headway.scenario.policies import policies_of
from headway.scenario.presets import builtin
from headway.scenario.processes import processes
from headway.scenario.run import assemble, compare, load, provenance, replicate, run
from headway.workload.generate import generate

SMALL: dict[str, Any] = {
    "workload": {"builtin": "chat", "num_requests": 60},
    "fleet": [{"model": "llama-3.1-8b", "gpu": "a100-80gb", "replicas": 2}],
}


def scenario(**changes: Any) -> Scenario:
    return assemble({**SMALL, **changes}, Places(), Path())


def pool(**changes: Any) -> list[dict[str, Any]]:
    return [{**SMALL["fleet"][0], **changes}]


def combo(**changes: Any) -> dict[str, Any]:
    part = {"model": "llama-3.1-8b", "gpu": "h800"}
    return {"name": "pair", "prefill": part, "decode": {**part, "gpu": "h20"}, "goodput_rps": 5.0, **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"roles": [{"at_s": 1, "replica": 2, "role": "decoed"}]},
            "roles[0].role: unknown value 'decoed'; did you mean",
        ),
        ({"roles": [{"at_s": 1, "replica": 2, "rolle": "decode"}]}, "unknown key 'rolle'; did you mean 'role'?"),
        ({"roles": [{"at_s": 1, "replica": 4, "role": "decode"}]}, "roles[0].replica: 4; expected 0 to 3"),
        (
            {"roles": [{"at_s": 1, "replica": 1, "role": "decode"}]},
            "roles[0].replica: 1 is alone and does both phases; expected one of a combo of several (2, 3)",
        ),
        (
            {"roles": [{"at_s": -1, "replica": 2, "role": "decode"}]},
            "roles[0]: expected at_s and switch_s of 0 or more",
        ),
        ({"faults": [{"at_s": 1, "replica": 2, "streams": 0}]}, "faults[0].streams: 0; expected 1 or more"),
        ({"faults": [{"at_s": 1, "replica": 2, "slowdown": 0}]}, "faults[0].slowdown: 0.0; expected more than 0"),
    ],
)
def test_changes_of_role_and_broken_streams_that_make_no_sense(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(HeadwayError) as error:
        scenario(fleet=pool(replicas=2), combos=[combo()], **changes)
    assert message in str(error.value)


def test_combos_that_are_not_there_at_first_come_when_they_are_wanted() -> None:
    done = run(
        scenario(
            workload={"builtin": "sharegpt", "num_requests": 3000, "arrivals": 15},
            fleet=[],
            combos=[combo(), combo(name="other", replicas=0, min_replicas=0, goodput_rps=12.0)],
            policies={"routing": "cauchy", "scaling": {"name": "combos", "local_window_s": 30}},
        )
    )
    started = [replica.pool for replica in done.records.replicas if replica.up[0][0] > 0]
    assert started == ["other-prefill", "other-decode"]
    assert done.summary.num_completed == 3000


def test_every_request_is_accounted_for() -> None:
    done = run(scenario())
    assert done.summary.num_requests == done.summary.num_completed == 60
    assert done.policies == {"routing": "least-loaded", "ordering": "fcfs"}
    assert 0 < done.simulate_s <= done.total_s


def test_variants_are_the_product_in_order() -> None:
    policies = {
        "routing": ["random", "round-robin"],
        "ordering": ["fcfs", {"name": "edf", "preemptive": True}],
    }
    runs = compare(scenario(policies=policies))
    assert [tuple(each.policies.values()) for each in runs] == [
        ("random", "fcfs"),
        ("random", "edf(preemptive=true)"),
        ("round-robin", "fcfs"),
        ("round-robin", "edf(preemptive=true)"),
    ]
    arrivals = [each.records.workload["arrival_s"] for each in runs]
    assert all(np.array_equal(arrivals[0], each) for each in arrivals)


def test_the_seed_is_the_result() -> None:
    def numbers(seed: int) -> dict[str, Any]:
        return flatten(run(scenario(seed=seed, policies={"routing": "random"})).summary)

    assert numbers(3) == numbers(3)
    assert numbers(3) != numbers(4)


@pytest.mark.ci
def test_processes_do_not_change_the_result() -> None:
    chosen = scenario(policies={"routing": ["random", "power-of-two", "least-kv"]})
    alone, spread = compare(chosen), compare(chosen, jobs=2)
    assert [flatten(each.summary) for each in alone] == [flatten(each.summary) for each in spread]
    assert [each.policies for each in alone] == [each.policies for each in spread]


def test_seeds_without_metrics_of_replicas() -> None:
    """They are left out where other metrics tell the seeds apart."""
    chosen = scenario(policies={"routing": ["random", "least-loaded"]})
    runs = compare(chosen)
    whole, found = replicate(chosen, runs, 3), replicate(chosen, runs, 3, by_replica=False)
    for all_of_them, few in zip(whole.flat, found.flat, strict=True):
        expected = [{key: one[key] for key in one if not key.startswith("replica.")} for one in all_of_them]
        assert [*few] == expected
    assert whole.varies and found.varies


@pytest.mark.parametrize(("routing", "varies"), [("random", True), ("round-robin", False)])
def test_seeds_that_change_replicas_alone(routing: str, varies: bool, tmp_path: Path) -> None:
    """Each of two prompts is alone wherever it comes, so that only the replicas' metrics tell random places apart."""
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,300,1\n64,300,1\n")
    plain = pool(engine="simulated-0.15")  # whose times have no last bits that depend on the time of arrival
    chosen = scenario(workload={"trace": str(trace)}, policies={"routing": routing}, fleet=plain)
    runs = compare(chosen)
    whole, found = replicate(chosen, runs, 4), replicate(chosen, runs, 4, by_replica=False)
    assert whole.varies == found.varies == varies
    assert found == whole
    overall = [{key: one[key] for key in one if not key.startswith("replica.")} for one in whole.flat[0]]
    assert all(each == overall[0] for each in overall)


@pytest.mark.ci
def test_long_comparisons_take_one_process_for_each_core(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    chosen = scenario(policies={"routing": ["random", "power-of-two", "least-kv"]})

    def results() -> Any:
        runs = compare(chosen, jobs=None)
        return [flatten(each.summary) for each in runs], replicate(chosen, runs, 2, jobs=None)

    def counted(jobs: int, num_tasks: int | None = None) -> Any:
        asked.append(jobs)
        return processes(jobs, num_tasks)

    module = sys.modules[compare.__module__]
    monkeypatch.setattr(module, "available_cores", lambda: 2)
    monkeypatch.setattr(module, "processes", counted)
    monkeypatch.setattr(module, "_WORTH_PROCESSES_S", math.inf)
    alone = results()
    monkeypatch.setattr(module, "_WORTH_PROCESSES_S", 0.0)
    assert results() == alone
    assert asked == [1, 1, 2, 2]


def test_progress_rises_to_the_end() -> None:
    shares: list[float] = []
    compare(scenario(policies={"routing": ["random", "round-robin"]}), progress=shares.append)
    assert shares == sorted(shares)
    assert all(0 <= share <= 1 for share in shares)


def test_provenance_makes_the_run_again() -> None:
    first = scenario(seed=5, policies={"routing": ["round-robin", "least-kv"], "ordering": "edf"})
    again = assemble(yaml.safe_load(provenance(variants(first)[1]).scenario_yaml), Places(), Path())
    assert flatten(run(again).summary) == flatten(compare(first)[1].summary)


def test_exact_steps_agree() -> None:
    stretch, exact = (run(scenario(simulation={"step": step})) for step in ("stretch", "exact"))
    for key, value in flatten(stretch.summary).items():
        other = flatten(exact.summary)[key]
        same = value == other or (value is not None and other is not None and math.isclose(value, other, rel_tol=1e-6))
        assert same, key


def test_an_engine_with_changes() -> None:
    engine = scenario(fleet=pool(engine={"name": "vllm", "max_num_seqs": 7})).fleet.pools[0].engine
    assert (engine.name, engine.max_num_seqs, engine.prefix_caching) == ("vllm-0.25", 7, True)


def test_a_capped_cache_preempts() -> None:
    cramped = scenario(fleet=pool(replicas=1, kv_capacity_tokens=8192))
    assert run(cramped).summary.preemptions > run(scenario(fleet=pool(replicas=1))).summary.preemptions == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fleet": []}, "no replicas; expected `fleet`, `combos`, or both"),
        ({"fleet": pool(replicas=0)}, "fleet[0].replicas: expected integer >= 1"),
        (
            {"fleet": [], "combos": [combo(replicas=0, min_replicas=0)]},
            "combos[0].replicas: 0, and nothing else serves llama-3.1-8b; expected at least 1",
        ),
        (
            {"fleet": pool(gpu="a1000-80gb")},
            "fleet[0].gpu: unknown GPU 'a1000-80gb'; did you mean 'a100-80gb'?",
        ),
        ({"fleet": pool(model="lama-3.1-8b")}, "did you mean 'llama-3.1-8b'?"),
        ({"fleet": pool(model={"config": "no.json"})}, "fleet[0].model: no.json: "),
        ({"fleet": pool(model="llama-3.1-405b")}, "fleet[0]: llama-3.1-405b (tp 1, pp 1) needs"),
        ({"fleet": pool(engine="vlm")}, "fleet[0].engine: unknown engine 'vlm'; did you mean 'vllm'?"),
        (
            {"fleet": pool(engine={"max_num_sequences": 3})},
            "engine.max_num_sequences: unknown key 'max_num_sequences'; did you mean 'max_num_seqs'?",
        ),
        ({"fleet": pool(engine={"max_num_seqs": 0})}, "fleet[0].engine.max_num_seqs: 0; expected 1 or more"),
        ({"fleet": pool(engine={"watermark": 1.5})}, "fleet[0].engine.watermark: 1.5; expected 1 at most"),
        ({"fleet": pool(usd_per_gpu_hour=-1)}, "fleet[0].usd_per_gpu_hour: expected number >= 0.0"),
        ({"fleet": pool(name="a") * 2}, "fleet[1].name: 'a' is the name of another pool, too"),
        ({"workload": {"builtin": "chatt"}}, "did you mean 'chat'?"),
        ({"workload": {"builtin": "chat", "arrivals": 0}}, "rate: 0"),
        ({"workload": {"trace": "no.csv"}}, "workload: no.csv: no such file"),
        ({"policies": {"routing": "robin"}}, "did you mean 'round-robin'?"),
        ({"policies": {"routing": []}}, "policies: expected at least one routing and one ordering"),
        (
            {"policies": {"ordering": {"name": "edf", "defualt_deadline_s": 3}}},
            "did you mean 'default_deadline_s'?",
        ),
        ({"policies": {"window": 0}}, "policies.window: expected integer >= 1"),
        ({"slo": {"ttft_s": 0}}, "slo.ttft_s: 0.0; expected more than 0"),
        ({"faults": [{"at_s": 1, "replica": 2}]}, "faults[0].replica: 2; expected 0 to 1"),
        ({"faults": [{"at_s": -1, "replica": 0}]}, "faults[0]: expected at_s of 0 or more"),
        ({"observe": {"loss": 1.0}}, "loss in [0, 1)"),
        ({"simulation": {"step": "exat"}}, "simulation.step: unknown value 'exat'; did you mean 'exact'?"),
        ({"simulation": {"until_s": 0}}, "simulation.until_s: expected number > 0.0"),
    ],
)
def test_what_cannot_be_run_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(HeadwayError) as caught:
        run(scenario(**changes))
    assert message in str(caught.value)


def test_an_ordering_that_the_engine_cannot_act_out() -> None:
    changes = {"fleet": pool(engine="vllm"), "policies": {"ordering": "edf"}}
    with pytest.raises(HeadwayError, match=r"policies\.ordering: vllm-0.25 .* cannot order by edf .* gateway"):
        scenario(**changes)
    changes["policies"]["ordering_at"] = "gateway"
    assert run(scenario(**changes)).summary.num_completed == 60


def test_order_in_front_of_replicas_is_kept_by_holding_back_what_they_cannot_run() -> None:
    at_gateway = {"ordering": "priority", "ordering_at": "gateway"}
    assert policies_of(scenario(policies=at_gateway)).window == 256
    small = pool(engine={"name": "vllm", "max_num_seqs": 8})
    assert policies_of(scenario(fleet=small, policies=at_gateway)).window == 8
    assert policies_of(scenario(policies={**at_gateway, "window": 3})).window == 3
    assert policies_of(scenario(policies={"ordering": "priority"})).window is None


def test_several_policies_are_for_compare() -> None:
    with pytest.raises(HeadwayError, match=r"policies\.routing: several are for headway compare"):
        run(scenario(policies={"routing": ["random", "round-robin"]}))


def test_paths_start_at_the_file(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "t.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,10,5\n1,10,5\n")
    file = tmp_path / "deep" / "mine.yaml"
    file.write_text(yaml.safe_dump({**SMALL, "workload": {"trace": "t.csv"}}))
    loaded = load(file)
    assert loaded.spec.name == "mine"
    assert run(loaded).summary.num_completed == 2


def test_a_policy_of_ones_own_lies_beside_the_scenario(tmp_path: Path) -> None:
    (tmp_path / "always_first.py").write_text(
        "from headway.core.decision import Placement\n"
        "class AlwaysFirst:\n"
        "    def route(self, request, view):\n"
        "        return Placement(view.replicas[0].id)\n"
    )
    file = tmp_path / "own.yaml"
    file.write_text(yaml.safe_dump({**SMALL, "policies": {"routing": "always_first:AlwaysFirst"}}))
    for done in (run(load(file)), *compare(load(file), jobs=2)):
        assert set(done.records.requests["replica"].tolist()) == {0}


def test_the_builtin_scenario_holds_together() -> None:
    chosen = load(builtin("chat"), {("workload", "num_requests"): ("--num-requests", 50)})
    assert len(compare(chosen)) == 10
    with pytest.raises(HeadwayError, match=r"unknown built-in scenario 'chart'; did you mean 'chat'\?"):
        builtin("chart")


def test_a_spec_can_be_sent_to_another_process() -> None:
    spec = scenario().spec
    assert msgspec.convert(msgspec.to_builtins(spec), type(spec)) == spec


def test_a_fault_loses_nobody() -> None:
    crashed = run(scenario(faults=[{"at_s": 2.0, "replica": 0, "down_s": 3.0}]))
    assert crashed.summary.num_completed == 60
    assert crashed.summary.retries > 0
    assert crashed.records.replicas[0].down == ((2.0, 5.0),)


def test_stale_loads_change_what_routers_do() -> None:
    workload = {"builtin": "chat", "num_requests": 400, "arrivals": 40}
    fresh, stale = (
        run(scenario(workload=workload, policies={"routing": "least-kv"}, observe=observe))
        for observe in ({}, {"period_s": 5.0, "delay_s": 1.0})
    )
    assert stale.summary.num_completed == fresh.summary.num_completed == 400
    assert stale.summary.ttft_s != fresh.summary.ttft_s


def test_a_run_that_is_stopped_counts_what_is_left() -> None:
    stopped = run(scenario(simulation={"until_s": 3.0})).summary
    assert stopped.num_unfinished > 0
    assert stopped.num_completed + stopped.num_unfinished == stopped.num_requests < 60


def test_slos_of_the_scenario_hold_for_requests_without_their_own() -> None:
    workload = {"arrivals": 5, "num_requests": 50, "prompt_tokens": 100, "output_tokens": 20}
    strict, lax = (run(scenario(workload=workload, slo={"ttft_s": s})).summary for s in (1e-6, 100.0))
    assert (strict.slo_attainment, lax.slo_attainment) == (0.0, 1.0)


def test_uncalibrated_pools_are_named() -> None:
    fleet = [*pool(name="known", gpu="h100", engine="vllm-0.15"), *pool(name="small", gpu="l4", engine="vllm-0.15")]
    (note,) = run(scenario(fleet=fleet)).uncalibrated
    assert note.startswith("small (l4: kernels of l40s, generic overhead of vllm-0.15)")


def test_latencies_have_bands_of_the_least_known_pool() -> None:
    known, other = pool(name="known", gpu="h100", engine="vllm-0.15"), pool(name="small", gpu="l4", engine="vllm-0.15")
    measured, mixed = (run(scenario(fleet=fleet)) for fleet in (known, [*known, *other]))
    flat = flatten(measured.summary)
    assert {"ttft_s.p50", "ttft_s.p99", "tpot_s.mean", "tpot_s.p99", "e2e_s.mean"} <= measured.bands.keys()
    assert not any(key.startswith(("itl_s.p", "ttft_s.max", "usd")) for key in measured.bands)
    assert all(band.low < flat[key] < band.high for key, band in measured.bands.items())
    assert {band.basis.known for key, band in measured.bands.items() if key not in ENERGY} == {"GPU and version"}
    assert {measured.bands[key].basis.known for key in ENERGY} == {"GPU"}  # power is the GPU's, whatever the engine
    assert {mixed.bands[key].basis.known for key in ENERGY} == {"neither"}
    for key, band in mixed.bands.items():
        assert band.high / band.low >= measured.bands[key].high / measured.bands[key].low * (1 - 1e-9)


def test_windowed_layers_keep_a_part_of_long_sequences() -> None:
    """Half of the layers of gpt-oss keep 128 tokens, so that a replica holds nearly twice as many of long sequences."""

    def capacity(prompt_tokens: int, **pool: float) -> int:
        workload = {"arrivals": 5, "num_requests": 20, "prompt_tokens": prompt_tokens, "output_tokens": 20}
        fleet = [{"model": "gpt-oss-20b", "gpu": "h100", **pool}]
        made = run(assemble({"name": "windows", "workload": workload, "fleet": fleet}, Places(), Path()))
        return made.records.replicas[0].kv_capacity_tokens

    full = capacity(100)
    assert capacity(8000) == pytest.approx(full / (0.5 + 0.5 * 128 / 8010), rel=0.01)
    assert capacity(100, mean_sequence_tokens=8010) == capacity(8000)


@pytest.mark.skipif("HEADWAY_DATA" not in os.environ, reason="the series is in the data folder")
def test_the_published_thursday_is_read_where_its_series_lies(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "thursday.yaml"
    (tmp_path / "thursday.yaml").write_text(example.read_text())
    name = "o365_prompt_tokens_per_minute.csv.gz"
    (tmp_path / name).symlink_to(Path(os.environ["HEADWAY_DATA"]) / "demand" / name)
    chosen = load(tmp_path / "thursday.yaml")
    assert len(generate(chosen.spec.workload, 0, chosen.base_dir)) > 40_000


SLO_ROUTER = """
from headway.core.decision import Placement

class SloRouter:
    def route(self, request, view):
        has = (request.slo_ttft_s, request.slo_tpot_s, request.slo_e2e_s) == (2.0, 0.1, None)
        return Placement(view.replicas[-1 if has else 0].id)
"""


def test_policies_see_the_slos_of_the_fleet_as_those_of_the_workload(tmp_path: Path) -> None:
    (tmp_path / "by_slo.py").write_text(SLO_ROUTER)
    both, first = {"ttft_s": 2.0, "tpot_s": 0.1}, {"ttft_s": 1.0}
    for of_fleet, own, replica in ((both, None, 1), (None, both, 1), (both, first, 0)):
        workload = {
            "num_requests": 4,
            "arrivals": 1,
            "prompt_tokens": 9,
            "output_tokens": 2,
            **({"slo": own} if own else {}),
        }
        document = {**SMALL, "workload": workload, "policies": {"routing": "by_slo:SloRouter"}}
        used = run(assemble({**document, **({"slo": of_fleet} if of_fleet else {})}, Places(), tmp_path))
        assert set(used.records.requests["replica"].tolist()) == {replica}
