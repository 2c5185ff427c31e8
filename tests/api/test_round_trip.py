"""A scenario that is written to a file and read again is the same one, whichever way it was made."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import headway as hw
from headway import scenario
from headway.api.scenarios import source_of
from headway.config import strict_yaml
from headway.config.scenario import Scenario, variants, with_absolute_paths, with_policies, with_seed, written
from headway.core.errors import HeadwayError
from headway.scenario.presets import BUILTINS

ROOT = Path(__file__).parents[2]
DOCUMENT: dict[str, Any] = {
    "workload": {"builtin": "chat", "num_requests": 30, "arrivals": 20},
    "fleet": [{"model": "llama-3.1-8b", "gpu": "h100", "engine": "vllm-0.15", "replicas": 1}],
}
POLICIES: dict[str, list[Any]] = {
    "preset": [None, "headway"],
    "routing": ["least-loaded", "random", {"name": "cache-aware"}, ["random", "round-robin"]],
    "ordering": ["fcfs", "priority", {"name": "priority", "preemptive": False}],
    "migration": [None, "llumnix", "headway"],
    "admission": [None, "by-deadline", {"name": "queue-manager", "interval_s": 0.5}],
    "scaling": [None, "headway", {"name": "hpa"}],
    "ordering_at": ["replica", "gateway", "both"],
    "window": [None, 8],
    "max_hold_s": [None, 2.5],
    "fallback": [{}, {"when": []}, {"when": ["slow"], "ttft_s": 2.0}],
}


@pytest.fixture(scope="module", autouse=True)
def _policies_are_not_checked() -> Iterator[None]:
    """Forecasts of days are built to check a policy; what is read does not depend on it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["headway.scenario.run"], "check", lambda made: None)
        yield


def reread(made: Scenario, folder: Path) -> Scenario:
    """The scenario of the file that a scenario is written to, in another folder."""
    path = folder / "deeper" / "again.yaml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(strict_yaml.dump(with_absolute_paths(written(made), made.base_dir)), encoding="utf-8")
    return hw.load(path)


def values(made: Scenario) -> str:
    """All values of a scenario; files by their paths from its folder."""
    text = json.dumps([msgspec.to_builtins(made.spec, enc_hook=str), msgspec.to_builtins(made.fleet)])
    return text.replace(f"{made.base_dir.absolute()}/", "").replace("./", "")


def assert_survives(made: Scenario, folder: Path) -> None:
    again = reread(made, folder)
    moved = dataclasses.replace(again, base_dir=made.base_dir)
    assert values(moved) == values(made)
    assert [values(each) for each in variants(moved)] == [values(each) for each in variants(made)]


def documented() -> Iterator[tuple[str, dict[str, Any]]]:
    """The scenarios of the pages; a fleet file gets a workload, a part of a scenario the rest of one."""
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for i, text in enumerate(re.findall(r"^```yaml\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)):
            try:
                parsed, _ = strict_yaml.parse(text, page.name)
            except HeadwayError:
                continue
            yield f"{page.name}-{i}", {**DOCUMENT, **parsed}


def test_built_in_scenarios_survive_and_so_does_each_variant(tmp_path: Path) -> None:
    for name in BUILTINS:
        made = hw.load(builtin=name)
        for each in (made, *variants(made), with_seed(made, 77)):
            assert_survives(each, tmp_path)


def test_examples_and_the_scenarios_of_pages_survive(tmp_path: Path) -> None:
    for path in (ROOT / "examples").glob("*.yaml"):
        assert_survives(hw.load(path), tmp_path)
    survived = []
    for name, document in documented():
        try:
            made = hw.load(document)
        except (HeadwayError, ModuleNotFoundError):  # a file or a policy that the reader is to write
            continue
        assert_survives(made, tmp_path)
        survived.append(name)
    assert len(survived) > 40


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    first=st.fixed_dictionaries({}, optional={key: st.sampled_from(each) for key, each in POLICIES.items()}),
    second=st.fixed_dictionaries({}, optional={key: st.sampled_from(each) for key, each in POLICIES.items()}),
    seed=st.integers(0, 3),
    replicas=st.integers(1, 3),
    is_named=st.booleans(),
)
def test_any_policies_survive(
    first: dict[str, Any], second: dict[str, Any], seed: int, replicas: int, is_named: bool, tmp_path: Path
) -> None:
    """Also where a program sets other policies, or a seed, than the document's."""
    fleet = [{**DOCUMENT["fleet"][0], "replicas": replicas, "max_replicas": 4}]
    document = {**DOCUMENT, "fleet": fleet, "policies": first, "seed": seed}
    if is_named:
        named = {key: each for key, each in second.items() if not isinstance(each, list)}
        document["variants"] = [{"name": "one"}, {"name": "two", **named}]
    try:
        made = hw.load(document)
        other = hw.load({**document, "policies": second})
    except HeadwayError:  # policies that do not go together
        return
    mixed = with_seed(with_policies(made, other.spec.policies), seed + 1)
    for each in (made, mixed, *variants(made)):
        assert_survives(each, tmp_path)
        keys, places, base_dir = source_of(each)
        assert values(scenario.assemble(keys, places, base_dir)) == values(each)


def test_files_and_own_modules_are_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "t.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,9,9\n1,9,9\n")
    (home / "own_there.py").write_text((Path(__file__).parent / "own_for_round_trip.py").read_text())
    gateway = {"batches": {}, "key_store": {"store": "k.sqlite"}, "demand_history": {"records": "r"}}
    document = {
        **DOCUMENT,
        "workload": {"trace": "t.csv"},
        "policies": {"routing": {"name": "own_there:Nearest", "bias": 2}},
        "gateway": gateway,
    }
    (home / "s.yaml").write_text(json.dumps(document))
    made = hw.load(home / "s.yaml")
    again = reread(made, tmp_path)
    monkeypatch.chdir(tmp_path)
    assert hw.simulate(again).metrics == hw.simulate(made).metrics
    settings = again.spec.gateway
    assert settings.batches is not None and settings.batches.store == f"{home}/batches.sqlite"
    assert settings.key_store is not None and settings.key_store.store == f"{home}/k.sqlite"
    assert settings.demand_history is not None and settings.demand_history.records == f"{home}/r"
    assert (
        hw.simulate(again).policies
        == hw.simulate(made).policies
        == {
            "routing": "own_there:Nearest(bias=2)",
            "ordering": "fcfs",
        }
    )


def _module(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / "own_for_round_trip.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_classes_and_instances_are_written_by_name_and_arguments(tmp_path: Path) -> None:
    own = _module("own_for_round_trip").Nearest
    for given_policy, bias in ((own, 0), (own(3), 3), ({"name": own, "bias": 4}, 4)):
        made = hw.load(DOCUMENT, {"policies.routing": given_policy})
        routing: Any = scenario.policies_of(reread(made, tmp_path)).router()
        assert type(routing).__name__ == "Nearest" and routing.bias == bias

    class Local(own):  # type: ignore[misc, valid-type]
        pass

    with pytest.raises(HeadwayError, match="Local: is defined in a function, so no other process can import it"):
        reread(hw.load(DOCUMENT, {"policies.routing": Local}), tmp_path)


def test_every_function_takes_a_loaded_scenario(tmp_path: Path) -> None:
    made = hw.load(DOCUMENT)
    assert hw.simulate(made).metrics == hw.simulate(DOCUMENT).metrics
    grid = {"workload.arrivals": [5, 10]}
    assert hw.sweep(made, grid).points == hw.sweep(DOCUMENT, grid).points
    comparison = hw.compare(made, routing=["random", "round-robin"], seeds=1)
    assert [each.scenario.spec.policies.routing for each in comparison] == ["random", "round-robin"]
    plans = [
        hw.plan_capacity(each, gpus=["h100"], tps=[1], ttft_p99_s=2.0, cache=tmp_path) for each in (made, DOCUMENT)
    ]
    assert plans[0].rows == plans[1].rows
    planned = plans[0].scenario()
    assert_survives(planned, tmp_path)
    assert hw.load(plans[0].save(tmp_path / "plan.yaml")).spec == planned.spec
    assert hw.plan_capacity(planned, gpus=["h100"], tps=[1], ttft_p99_s=2.0, cache=tmp_path).is_met
