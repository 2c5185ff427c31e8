"""The preset of policies: its parts, and what fleets leave of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headway.config.policy_preset import explained
from headway.config.scenario import Scenario, assemble, variant
from headway.config.strict_yaml import Places
from headway.scenario.policies import policies_of

IN_ORDER = {"name": "priority", "preemptive": False}
POOL = {"model": "llama-3.1-8b", "gpu": "a100-80gb", "engine": "vllm-0.15"}


def assembled(*pools: dict[str, Any], **document: Any) -> Scenario:
    workload = {"builtin": "chat", "num_requests": 20}
    fleet = [{**POOL, "name": f"p{i}", **each} for i, each in enumerate(pools)]
    return assemble(
        {"workload": workload, "policies": {"preset": "headway"}, "fleet": fleet, **document}, Places(), Path()
    )


def parts(chosen: Scenario) -> tuple[Any, ...]:
    used = chosen.spec.policies
    return used.routing, used.ordering, used.ordering_at, used.migration, used.admission, used.scaling


def test_the_preset_is_one_set_and_its_policies_exist() -> None:
    chosen = assembled({"replicas": 2, "max_replicas": 4})
    assert parts(chosen) == ("headway", IN_ORDER, "replica", "headway", "by-deadline", "headway")
    assert policies_of(chosen).migration is not None
    (line,) = explained(chosen.spec.policies, chosen.fleet)
    assert line.endswith("; migration and scaling")


def test_what_a_fleet_cannot_use_is_left_out_and_said() -> None:
    chosen = assembled({"engine": "llama.cpp"})
    assert parts(chosen) == ("headway", IN_ORDER, "gateway", None, "by-deadline", None)
    _, left_out = explained(chosen.spec.policies, chosen.fleet)
    for reason in ("no model has two replicas", "max_replicas", "llama.cpp: first come, first served"):
        assert reason in left_out
    pair = {"name": "pair", "prefill": {**POOL, "engine": "sglang"}, "decode": {**POOL, "engine": "sglang"}}
    assert assembled({"replicas": 2}, combos=[pair]).spec.policies.migration is None


def test_keys_beside_the_preset_replace_its_parts() -> None:
    chosen = assembled({"replicas": 2}, policies={"preset": "headway", "routing": "least-kv", "window": 8})
    assert parts(chosen)[:4] == ("least-kv", IN_ORDER, "replica", "headway")
    assert chosen.spec.policies.window == 8
    named = [{"name": "plain"}, {"name": "all of it", "preset": "headway"}]
    chosen = assembled({"replicas": 2}, policies={"routing": "random"}, variants=named)
    assert (
        variant(chosen, "plain").spec.policies.routing == variant(chosen, "all of it").spec.policies.routing == "random"
    )
    assert variant(chosen, "all of it").spec.policies.migration == "headway"
    assert explained(variant(chosen, "plain").spec.policies, chosen.fleet) == []


def test_where_engines_take_any_ordering_the_order_preempts() -> None:
    chosen = assembled({"replicas": 2, "engine": "simulated"})
    assert chosen.spec.policies.ordering == "priority"
    assert "by tier at the engines" in explained(chosen.spec.policies, chosen.fleet)[0]


def test_where_the_gateway_pauses_requests_the_order_preempts() -> None:
    pausing = {"preset": "headway", "ordering_at": "gateway", "preempt_every_s": 0.5}
    chosen = assembled({"replicas": 2}, policies=pausing)
    assert chosen.spec.policies.ordering == "priority"
    assert policies_of(chosen).ordering().preemptive


def test_null_leaves_a_part_out_and_a_default_beside_the_preset_is_kept() -> None:
    pool = {"replicas": 2, "max_replicas": 4}
    policies = {"preset": "headway", "routing": "least-loaded", "migration": None, "scaling": None}
    chosen = assembled(pool, policies=policies)
    assert parts(chosen) == ("least-loaded", IN_ORDER, "replica", None, "by-deadline", None)
    used, left_out = explained(chosen.spec.policies, chosen.fleet)
    assert "routing: least-loaded" in used and "placed by" not in used
    assert "no migration (switched off)" in left_out and "no scaling (switched off)" in left_out
    named = [{"name": "all"}, {"name": "none", "admission": None}, {"name": "plain", "ordering": "fcfs"}]
    chosen = assembled(pool, variants=named)
    assert parts(variant(chosen, "all")) == ("headway", IN_ORDER, "replica", "headway", "by-deadline", "headway")
    assert parts(variant(chosen, "none")) == ("headway", IN_ORDER, "replica", "headway", None, "headway")
    assert parts(variant(chosen, "plain"))[:2] == ("headway", "fcfs")
    again = variant(variant(chosen, "none"), "none")
    assert parts(again) == parts(variant(chosen, "none"))


def test_null_in_a_variant_switches_off_what_policies_have() -> None:
    policies = {"admission": "by-deadline", "window": 4}
    named = [{"name": "with"}, {"name": "without", "admission": None, "window": None}]
    chosen = assembled({"replicas": 2}, policies=policies, variants=named)
    used = variant(chosen, "without").spec.policies
    assert (used.admission, used.window) == (None, None)
    assert variant(chosen, "with").spec.policies.admission == "by-deadline"
