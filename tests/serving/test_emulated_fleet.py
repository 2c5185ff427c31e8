"""Emulated fleets: the processes, ports and options of each pool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from headway import serving
from headway.config.scenario import Scenario, variant, variants
from headway.core.errors import HeadwayError
from headway.emulator import tokens
from headway.emulator.completion import SurfaceConfig
from headway.gateway.fleet.specs import Processes
from headway.scenario.presets import builtin
from headway.serving.emulated_fleet import emulated, pool_of

POOL = {"model": "llama-3.1-8b", "gpu": "a100-80gb", "engine": "vllm-0.15"}


def _read(folder: Path, **sections: Any) -> tuple[Scenario, Path]:
    path = folder / "scenario.yaml"
    path.write_text(yaml.safe_dump({"workload": {"builtin": "chat"}, **sections}))
    return serving.read(path), path


def _ports(chosen: Scenario, path: Path) -> list[int]:
    """The number of ports of each pool; no two pools share one."""
    plan = serving.plan(emulated(chosen, path))
    starts = [served.start for served in plan.pools]
    assert all(isinstance(start, Processes) for start in starts)
    ranges = [range(start.ports[0], start.ports[1] + 1) for start in starts if isinstance(start, Processes)]
    assert len({port for each in ranges for port in each}) == sum(map(len, ranges))
    return [len(each) for each in ranges]


@pytest.mark.parametrize("name", ["headway", "ktier", "chat"])
def test_presets_can_be_served(name: str) -> None:
    path = builtin(name)
    chosen = variants(serving.read(path))[0]
    plan = serving.plan(emulated(chosen, path))
    assert [each.pool.name for each in plan.pools] == [pool.name for pool in chosen.fleet.all_pools]
    assert plan.policies.router.name == chosen.spec.policies.routing


def test_there_are_ports_for_the_most_replicas(tmp_path: Path) -> None:
    scaled = {"policies": {"scaling": "target-utilization"}}
    assert _ports(*_read(tmp_path, fleet=[{**POOL, "replicas": 3}])) == [3]
    assert _ports(*_read(tmp_path, fleet=[{**POOL, "replicas": 2, "max_replicas": 5}], **scaled)) == [5]
    limits = {"gpu_limits": [{"region": "us", "gpu": "a100-80gb", "count": 7}]}
    assert _ports(*_read(tmp_path, fleet=[{**POOL, "tp": 2, "region": "us"}], **limits, **scaled)) == [3]
    assert _ports(*_read(tmp_path, fleet=[POOL], **scaled)) == [9]


def test_combos_have_ports_for_all_of_their_parts(tmp_path: Path) -> None:
    combo = {"name": "pair", "prefill": POOL, "decode": {**POOL, "replicas": 2}, "replicas": 2, "max_replicas": 3}
    assert _ports(*_read(tmp_path, combos=[combo], policies={"scaling": "combos"})) == [3, 6]


def test_endpoints_of_the_file_are_replaced(tmp_path: Path) -> None:
    fleet = [{**POOL, "endpoints": ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]}]
    assert _ports(*_read(tmp_path, fleet=fleet)) == [2]


def test_an_engine_gets_the_options_of_its_pool(tmp_path: Path) -> None:
    chosen, path = _read(tmp_path, fleet=[{**POOL, "name": "one"}], policies={"ordering": "priority"})
    start = serving.plan(emulated(chosen, path, ("--speed", "2"))).pools[0].start
    assert isinstance(start, Processes)
    arguments = " ".join(start.command[3:])
    assert arguments == f"emulate --scenario {path} --pool one --scheduling-policy priority --speed 2 --port {{port}}"


def test_a_pool_is_found_by_its_name(tmp_path: Path) -> None:
    chosen, _ = _read(tmp_path, fleet=[{**POOL, "name": "one", "tp": 2}])
    assert pool_of(chosen, None).parallel.tp == 2
    with pytest.raises(HeadwayError, match=r"'ones'.*one"):
        pool_of(chosen, "ones")
    chosen, _ = _read(tmp_path, fleet=[{**POOL, "name": "one"}, {**POOL, "name": "two"}])
    with pytest.raises(HeadwayError, match="--pool is missing; expected one of one, two"):
        pool_of(chosen, None)


def test_engines_need_no_secrets_of_the_gateway(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(
        "fleet: [{name: a, model: qwen3-8b, gpu: h100, endpoints: ['http://h:1'], api_key: '${ENGINE_KEY}'}]\n"
        "gateway: {api_keys: ['${NO_SUCH_SUM}']}\n"
    )
    chosen = serving.read_engines(path)
    assert pool_of(chosen, "a").name == "a"
    (pool,) = emulated(chosen, path).spec.fleet
    assert pool.processes is not None and pool.api_key == ""


def test_variants_have_names() -> None:
    chosen = serving.read(builtin("headway"))
    assert variant(chosen, "least loaded").spec.policies.routing == "least-loaded"
    with pytest.raises(HeadwayError, match=r"least laden.*least loaded"):
        variant(chosen, "least laden")


def test_the_confidence_of_a_prompt_does_not_change_during_its_answer() -> None:
    config = SurfaceConfig("m", confidence=(0.2, 0.6))
    seen = set()
    for i in range(200):
        prompt = tokens.chat([{"role": "user", "content": f"Question {i}"}], False, False)
        seen.add(config.confidence_in(prompt))
        assert config.confidence_in([*prompt, 77, 78]) == config.confidence_in(prompt)
    assert 0.2 < min(seen) < 0.25 and 0.55 < max(seen) <= 0.6 and len(seen) == 200
