"""The timetable with the trace known, between real scalers and the bound on GPU-hours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headway import scenario
from headway.config.strict_yaml import Places
from headway.planning.gpu_hours_bound import serves
from headway.planning.scaling import timetable

MODEL = "llama-3.1-8b"
pytest.importorskip("highspy")


def two_regions(scaling: Any) -> scenario.Scenario:
    """Two regions for half an hour of varying load."""
    fleet = [
        {
            "name": region,
            "region": region,
            "model": MODEL,
            "gpu": "a100-80gb",
            "replicas": 4,
            "min_replicas": 1,
            "max_replicas": 8,
            "kv_capacity_tokens": 60_000,
        }
        for region in ("us-east", "us-west")
    ]
    demand = {"builtin": "sageserve-july-2025", "start_hour": 205, "duration_s": 1800, "scale": 0.2}
    document = {
        "workload": demand | {"models": {MODEL: 1}},
        "fleet": fleet,
        "policies": {"routing": "sageserve", "admission": "queue-manager", "scaling": scaling},
        "provisioning": {"reclaim_s": 60, "acquire_s": 120},
        "gpu_limits": [{"region": "us-east", "gpu": "a100-80gb", "count": 8}],
        "simulation": {"until_s": 1800},
    }
    return scenario.assemble(document, Places(), Path())


@pytest.mark.ci
def test_the_timetable_serves_in_time_and_takes_no_less_than_the_bound() -> None:
    it = two_regions("reactive")
    found = timetable.best_timetable(it, scenario.Simulator(), tps={MODEL: 3000.0})
    assert found is not None
    again = scenario.run(two_regions(found.scaler), with_bound=True)
    assert serves(it.fleet, again.records, to_the_end=False)
    assert again.summary.gpu_hours == found.gpu_hours
    bound = again.summary.gpu_hours_bound
    assert bound is not None and 2 * 1800 / 3600 * 0.999 <= bound <= found.gpu_hours


@pytest.mark.ci
def test_a_run_without_a_bound_has_a_note() -> None:
    """All first tokens are due before any engine can compute them."""
    document = two_regions("reactive").document
    document["gpu_limits"] = [{"region": region, "gpu": "a100-80gb", "count": 4} for region in ("us-east", "us-west")]
    document["workload"] |= {"scale": 60.0, "duration_s": 60}
    document["simulation"] = {"until_s": 60}
    done = scenario.run(scenario.assemble(document, Places(), Path()), with_bound=True)
    assert done.summary.gpu_hours_bound is None
    assert any("no bound on GPU hours: no plan serves this trace in time" in note for note in done.notes)
