"""Days behind a real Envoy equal those at the gateway and the simulated ones: decisions and times.

`bench/behind_envoy.py` does the same for every policy, with thousands of requests.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc")
pytest.importorskip("httptools")
pytest.importorskip("uvicorn")

import envoys
from headway.core.record import Outcome
from picker_days import day_of, decide_alike, largest_difference_s
from stepped_envoy import SteppedEnvoy
from virtual_time import lived, simulated

HELD = {"ordering": "vtc", "ordering_at": "gateway", "window": 2}


@pytest.mark.parametrize(
    ("policies", "unstreamed"), [({"routing": "headway"}, range(0)), (HELD, range(0, 12, 2))], ids=["streams", "mixed"]
)
def test_a_day_behind_envoy_is_that_at_the_gateway_and_the_simulated_one(
    policies: dict[str, Any], unstreamed: range, tmp_path: Path
) -> None:
    envoys.binary()
    with closing(SteppedEnvoy(2, tmp_path)) as envoy:
        day = day_of(policies, envoy.urls, num_requests=12)
        ran, chosen = lived(day, tmp_path, envoy, unstreamed)
    assert (ran.requests["outcome"] == Outcome.FINISHED).all() and len(set(ran.requests["replica"].tolist())) == 2
    served, by_gateway = lived(day, tmp_path, unstreamed=unstreamed)
    assert decide_alike(chosen, by_gateway) and largest_difference_s(ran, served) < 1e-9
    if not unstreamed:  # a simulation streams all
        foreseen, by_simulation = simulated(day, tmp_path)
        assert decide_alike(chosen, by_simulation) and largest_difference_s(ran, foreseen) < 1e-9
