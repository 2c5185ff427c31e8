"""Fleets that a gateway may plan anew: several types of GPU, combos, and pools that are scaled."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from headway import scenario
from headway.config.strict_yaml import Places
from headway.serving.gateway import ServingPlan, plan

SMALL, LARGE = "qwen3-8b", "llama-3.1-8b"


def pool(model: str, port: int, gpu: str = "a100-80gb", **keys: Any) -> dict[str, Any]:
    command = [sys.executable, "-m", "http.server", "{port}", "{tp}"]
    processes = {"command": command, "ports": [port, port + 7]}
    return {"model": model, "gpu": gpu, "engine": "vllm-0.15", "replicas": 2, "processes": processes, **keys}


def planned(fleet: list[dict[str, Any]], **sections: Any) -> ServingPlan:
    document = {
        "fleet": fleet,
        "workload": {"arrivals": 1, "num_requests": 1, "prompt_tokens": 1, "output_tokens": 1},
        "cascade": {
            "models": [SMALL, LARGE],
            "policy": {"name": "thresholds", "thresholds": 70},
            "judge": {"by": "confidence"},
            "replan": {"quality": 75},
        },
        **sections,
    }
    made = plan(scenario.assemble(document, Places(), Path()))
    made.stop_planners()
    return made


def test_plans_divide_the_gpus_of_each_type() -> None:
    made = planned([pool(SMALL, 9000, name="small"), pool(LARGE, 9100, "h100-80gb-sxm", name="large")])
    assert made.policies.scaler.arguments["gpus"] == {"a100-80gb": 2, "h100-80gb-sxm": 2}  # type: ignore[union-attr]
    assert made.planned_gpus is None, "devices of one machine are of one type"
    assert {each.pool.name for each in made.pools} == {"small", "small-tp2", "large", "large-tp2"}


def test_combos_are_part_of_what_plans_start() -> None:
    sides = {"prefill": pool(LARGE, 9200, replicas=1), "decode": pool(LARGE, 9300, replicas=1)}
    made = planned([pool(SMALL, 9000, name="small")], combos=[{"name": "large", **sides}])
    assert made.planned_gpus == 4
    assert {"large-prefill", "large-decode"} < {each.pool.name for each in made.pools}


def test_scaling_keeps_the_pools_outside_the_cascade() -> None:
    fleet = [pool(SMALL, 9000, name="small"), pool(LARGE, 9100, name="large"), pool("qwen3-14b", 9200, name="chat")]
    made = planned(fleet, policies={"scaling": "reactive"})
    assert made.policies.scaler is not None and made.policies.scaler()._scaler is not None  # type: ignore[attr-defined]
