"""headway plan cascade --combos: what the plan written of it keeps, and who can serve it."""

from __future__ import annotations

import copy
import csv
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from headway import catalog, scenario, serving
from headway.cli import main
from headway.config.strict_yaml import Places
from headway.core.errors import HeadwayError
from headway.planning.cascade.plan import plan as make_plan
from headway.planning.cascade.plan import scenario_yaml
from headway.planning.cascade.problem import QualityFloor
from headway.planning.cascade.rehearsal import planned_document
from headway.planning.cascade.replan import replanner_of
from headway.planning.cascade.replanning import setup_of
from headway.planning.cascade.request import CascadeOptions, make_request
from headway.planning.combos.problem import Offer
from headway.planning.rehearsals import Resources, Source
from headway.scenario import Simulator
from headway.workload.quality_traces import generate_scores

H800, H20 = "h800-80gb-sxm", "h20-96gb"
GPUS = {H800: 4, H20: 8}
REPLAN = {"quality": 70}
SCENARIO: dict[str, Any] = {
    "workload": {
        "arrivals": 3,
        "num_requests": 150,
        "quality": {
            "path": "scores.csv",
            "layout": {"prompt": "prompt_tokens", "prompt_scale": 20},
            "models": {"llama-3-8b": "llama-3.1-8b", "llama-3-70b": "llama-3.1-70b"},
        },
    },
    "fleet": [{"model": "llama-3.1-8b", "gpu": "h800", "engine": "vllm-0.15", "replicas": 4}],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table whose prompts are long."""
    made, drawn = tmp_path_factory.mktemp("combos"), generate_scores(1, 100, cascade="llama")
    with (made / "scores.csv").open("w") as file:
        rows = csv.writer(file)
        rows.writerow(["request", "model", "score", "prompt_tokens", "output_tokens"])
        for i in range(len(drawn)):
            for j, name in enumerate(drawn.models):
                rows.writerow([i, name, drawn.scores[i, j], drawn.prompt_tokens[i], drawn.output_tokens[i, j]])
    (made / "long.yaml").write_text(yaml.safe_dump(SCENARIO))
    return made


def plan(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, Any, str]:
    code = main(["plan", "cascade", *map(str, arguments), "--json", "--no-progress", "--no-alternatives"])
    printed = capsys.readouterr()
    return code, json.loads(printed.out) if code in (0, 3) else None, printed.err


def parts_of(answer: Any) -> list[Any]:
    return [part for stage in answer["chosen"]["plan"]["stages"] for part in stage["replicas"]]


@pytest.mark.ci
def test_a_plan_with_combos_keeps_its_promise_and_is_no_worse_than_one_without(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, html = folder / "plan.yaml", folder / "plan.html"
    asked = [folder / "long.yaml", "--quality", 75, "--gpus", "h800:4,h20:8", "--cache", folder / "cache"]
    code, answer, err = plan(capsys, *asked, "--combos", "-o", out, "--html", html)
    assert code == 0, err
    chosen, parts = answer["chosen"], parts_of(answer)
    assert {"prefill", "decode"} <= {part.get("role") for part in parts}
    taken = {name: sum(p["tp"] * p["pp"] * p["count"] for p in parts if p["gpu"] == name) for name in GPUS}
    assert all(num <= GPUS[name] for name, num in taken.items())
    # What was written is what was rehearsed.
    done = scenario.run(scenario.load(out)).summary
    assert done.e2e_s is not None and done.e2e_s.p95 == pytest.approx(chosen["rehearsed"]["p95_s"])
    assert done.quality == pytest.approx(chosen["rehearsed"]["quality"]) and done.quality >= 75
    usd = (done.usd + done.judge_usd) / done.num_completed
    assert usd == pytest.approx(chosen["rehearsed"]["usd_per_request"])
    written = yaml.safe_load(out.read_text())
    assert all(combo["handover"] == {"mode": "layerwise", "degree": 8} for combo in written["combos"])
    # The plan without them stands beside it, and is what it is without the flag.
    code, plain, _ = plan(capsys, *asked)
    (beside,) = answer["alternatives"]
    assert code == 0 and beside["plan"]["planner"] == "cascadia without combos"
    assert beside["plan"]["stages"] == plain["chosen"]["plan"]["stages"]
    assert beside["rehearsed"] == plain["chosen"]["rehearsed"] and plain["alternatives"] == []
    assert {part.get("role", "mixed") for part in parts_of(plain)} == {"mixed"}
    assert chosen["rehearsed"]["p95_s"] < plain["chosen"]["rehearsed"]["p95_s"]
    # Table and page name them.
    assert main(["plan", "cascade", *map(str, asked), "--combos", "--no-progress", "--no-alternatives"]) == 0
    printed = capsys.readouterr().out
    for part in (part for part in parts if "role" in part):
        label = f"{part['count']} x {part['gpu']} tp {part['tp']} {part['role']}"
        assert label in printed and label in html.read_text()


@pytest.mark.ci
def test_a_plan_with_combos_is_planned_again_with_all_of_its_gpus(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a fleet's combos the parts count, and how they hand over stays; the plan has none unless they are offered."""
    side = {"model": "llama-3.1-8b", "engine": "vllm-0.15"}
    combo = {
        "name": "c",
        "prefill": {**side, "gpu": "h800", "replicas": 2, "network_bytes_per_s": 5e9},
        "decode": {**side, "gpu": "h20", "tp": 2},
        "replicas": 2,
        "handover": {"first_token": "decode"},
    }
    document = {**SCENARIO, "fleet": [], "combos": [combo]}
    options = CascadeOptions(target=QualityFloor(60.0), alternatives=False, fresh_draws=0)
    asked = make_request(Source(document, Places(), folder), options, Simulator())
    assert [(offer.gpu.name, offer.limit) for offer in asked.problem.offers] == [(H800, 4), (H20, 4)]
    assert not asked.problem.combo_kinds and asked.handover_settings.network_bytes_per_s == 5e9
    found = planned_document(asked, make_plan(asked, Resources(Simulator())).chosen.plan)
    assert "combos" not in found and found["fleet"]
    again = make_request(
        Source(document, Places(), folder), CascadeOptions(target=QualityFloor(60.0), combos=True), Simulator()
    )
    splits = again.problem.combo_kinds["llama-3.1-8b"]
    assert {each.prefill_gpu for each in splits} == {
        H800,
        H20,
    } and again.handover_settings.handover.first_token == "decode"


def test_mixed_replicas_and_a_combo_of_one_model_are_written_side_by_side(folder: Path) -> None:
    options = CascadeOptions(target=QualityFloor(10.0), combos=True, alternatives=False, fresh_draws=0)
    asked = make_request(Source(SCENARIO, Places(), folder), options, Simulator())
    chosen = make_plan(asked, Resources(Simulator())).chosen.plan
    part = chosen.stages[0].replicas[0]
    three = tuple(type(part)(1, 1, count, "", role) for count, role in ((1, "mixed"), (1, "prefill"), (2, "decode")))
    stages = (type(chosen.stages[0])(**{**_fields(chosen.stages[0]), "replicas": three}), *chosen.stages[1:])
    found = planned_document(asked, type(chosen)(**{**_fields(chosen), "stages": stages}))
    assert [pool["replicas"] for pool in found["fleet"]] == [1]
    (combo,) = found["combos"]
    assert (combo["prefill"]["replicas"], combo["decode"]["replicas"]) == (1, 2)
    assert "network_bytes_per_s" not in combo["prefill"] and combo["prefill"]["engine"] == "vllm-0.15"
    fleet = scenario.assemble(found, Places(), folder).fleet
    assert sum(pool.replicas * pool.parallel.num_gpus for pool in fleet.all_pools) == 4


@pytest.mark.ci
def test_a_plan_with_combos_is_planned_anew_while_it_serves(folder: Path, written: dict[str, Any]) -> None:
    """`replan` stays in the plan's file, and new plans have a number of the file's combos."""
    assert written["cascade"]["replan"] == REPLAN
    replanner = replanner_of(scenario.policies_of(scenario.assemble(written, Places(), folder)))
    names = {combo["name"] for combo in written["combos"]}
    assert replanner is not None and names <= set(replanner.pools.values()) and names <= set(replanner.first.replicas)
    assert replanner.expected is not None
    anew = replanner.task._function(replanner.expected.scores, 0.5)  # type: ignore[attr-defined]
    assert set(setup_of(anew, replanner.pools).replicas) == set(replanner.first.replicas)


def _fields(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__struct_fields__}


def test_what_combos_cannot_be_planned_for_is_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = plan(capsys, folder / "long.yaml", "--quality", 60, "--gpus", "1", "--combos", "--no-cache")
    assert code == 2 and "--combos: on 1 x h800-80gb-sxm no model has room for two replicas" in err


# Serving.


@pytest.fixture(scope="module")
def written(folder: Path) -> dict[str, Any]:
    """The plan's file, of a scenario with `replan`."""
    offers = tuple(Offer(catalog.gpu(name), num) for name, num in GPUS.items())
    (small,) = SCENARIO["fleet"]
    document = {
        **SCENARIO,
        "fleet": [small, small | {"model": "llama-3.1-70b", "tp": 4, "replicas": 1}],
        "cascade": {"models": ["llama-3.1-8b", "llama-3.1-70b"], "replan": REPLAN},
    }
    asked = make_request(
        Source(document, Places(), folder),
        CascadeOptions(target=QualityFloor(75.0), gpus=offers, combos=True, alternatives=False, fresh_draws=0),
        Simulator(),
    )
    made: dict[str, Any] = yaml.safe_load(scenario_yaml(make_plan(asked, Resources(Simulator())), asked))
    return made


@pytest.fixture(scope="module")
def served(written: dict[str, Any]) -> dict[str, Any]:
    """The plan's file, as somebody writes endpoints and a judge into it."""
    written = copy.deepcopy(written)
    del written["cascade"]["replan"]
    ports = iter(range(9001, 9100))
    for part in [*written["fleet"], *(combo[role] for combo in written["combos"] for role in ("prefill", "decode"))]:
        part["endpoints"] = [f"http://127.0.0.1:{next(ports)}" for _ in range(part["replicas"])]
    written["cascade"]["judge"] = {"by": "confidence"}
    return written


@pytest.mark.ci
def test_a_plan_with_combos_can_be_served(folder: Path, served: dict[str, Any]) -> None:
    path = folder / "served.yaml"
    path.write_text(yaml.safe_dump(served))
    _, found = serving.load(path)
    assert {"prefill", "decode"} <= {each.pool.role for each in found.pools} and found.judge is not None
    assert found.policies.cascade is not None
    assert {name for names in found.names.values() for name in names} >= set(found.policies.cascade.models)


@pytest.mark.ci
def test_engines_that_hand_nothing_over_are_refused_with_the_reason(folder: Path, served: dict[str, Any]) -> None:
    path = folder / "refused.yaml"
    path.write_text(yaml.safe_dump(served).replace("vllm-0.15", "llama.cpp"))
    with pytest.raises(HeadwayError, match=r"combos\[0\].*cannot transfer its KV cache; expected vLLM"):
        serving.load(path)
