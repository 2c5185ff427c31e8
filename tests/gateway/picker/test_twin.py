"""Days behind a proxy equal the simulated ones: decisions, places and times. (../test_twin.py has the gateway.)"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("grpc")
pytest.importorskip("httptools")
pytest.importorskip("uvicorn")

from ext_proc import Proxy
from headway.control.decisions import Decision
from headway.core.record import Outcome, Records
from keys import digest
from serving import MODEL
from virtual_time import both

URLS = [f"http://127.0.0.1:{port}" for port in range(10_001, 10_004)]
ENGINE = {"name": "vllm-0.15", "response_overhead_s": 0, "tokenize_s_per_token": 0}
LENGTHS = {
    "prompt_tokens": {"kind": "uniform", "min": 50, "max": 2000},
    "output_tokens": {"kind": "uniform", "min": 2, "max": 60},
    "tiers": [{"tier": 0, "share": 3}, {"tier": 1, "share": 2}, {"tier": 2, "share": 1}],
}


def day(rate: float = 16.0, **policies: Any) -> dict[str, Any]:
    """Three replicas, busy enough that which of them is chosen matters."""
    pool = {
        "name": "pool",
        "model": MODEL,
        "gpu": "h100",
        "engine": ENGINE,
        "endpoints": URLS,
        "kv_capacity_tokens": 100_000,
    }
    return {
        "fleet": [pool],
        "policies": policies,
        "workload": {"arrivals": rate, "num_requests": 60, **LENGTHS},
        "gateway": {"scrape_period_s": 0.2},
        "observe": {"period_s": 0.2},
    }


def shared() -> dict[str, Any]:
    """Tenants, one of which sends many more than the replicas can serve."""
    made = day(200.0, routing="least-loaded", ordering="fair", ordering_at="gateway", window=2)
    keys = [{"sha256": digest(tenant), "name": tenant} for tenant in ("flood", "quiet")]
    made["gateway"]["api_keys"], made["workload"]["tenants"] = keys, {"flood": 10, "quiet": 1}
    return made


DAYS = {
    "least loaded": day(routing="least-loaded"),
    "by time": day(routing="headway"),
    "held": day(routing="least-loaded", ordering="priority", ordering_at="gateway", window=2),
    "patient": day(routing="least-kv", admission={"name": "queue-manager", "interval_s": 0.05}),
    "shared": shared(),
}


def _choice(decision: Decision) -> Any:
    return decision.what, decision.request, decision.tier, decision.choice, decision.why, decision.scores


def _rows(ran: Records, name: str) -> Any:
    return ran.requests[name][np.argsort(ran.requests["request"])]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", DAYS)
def test_a_day_behind_a_proxy_equals_the_simulated_day(name: str, tmp_path: Path) -> None:
    lived, chosen, simulated, foreseen = both(DAYS[name], tmp_path, Proxy())
    assert [_choice(each) for each in chosen] == [_choice(each) for each in foreseen]
    assert (lived.requests["outcome"] == Outcome.FINISHED).all() and len(set(lived.requests["replica"].tolist())) > 1
    for column in ("request", "outcome", "attempts", "replica", "generated_tokens"):
        np.testing.assert_array_equal(_rows(lived, column), _rows(simulated, column), err_msg=column)
    for column in ("first_token_s", "end_s"):
        ours = _rows(lived, column) - lived.workload["arrival_s"]
        theirs = _rows(simulated, column) - simulated.workload["arrival_s"]
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-9, err_msg=column)
