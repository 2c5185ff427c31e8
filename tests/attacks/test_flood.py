"""One key floods the gateway: what another one notices, served by emulated engines in virtual time.

The emulated engines, the gateway and the requests are real; only time passes when nobody has anything to do. So the
latencies are those of a machine that is never too busy for the test.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("httptools")
pytest.importorskip("uvicorn")

from headway.core.record import Records
from keys import digest
from lived import lived
from serving import MODEL

URL = "http://127.0.0.1:10001"
QUIET_RPS, FLOOD = 2.5, 20
PROMPT, ANSWER = {"kind": "lognormal", "mean": 40, "cv": 0.5}, {"kind": "lognormal", "mean": 100, "cv": 0.7}


def served(folder: Path, seconds: float, tenants: dict[str, int]) -> Records:
    """A replica that runs 32 requests at a time, some 40 a second."""
    engine = {"name": "vllm-v1", "max_num_seqs": 32}
    data = {
        "fleet": [{"name": "pool", "model": MODEL, "gpu": "h100", "engine": engine, "endpoints": [URL]}],
        "gateway": {"api_keys": [{"sha256": digest(tenant), "name": tenant} for tenant in ("quiet", "flood")]},
        "workload": {
            "arrivals": QUIET_RPS * sum(tenants.values()), "duration_s": seconds, "prompt_tokens": PROMPT,
            "output_tokens": ANSWER, "tenants": tenants,
        },
    }  # fmt: skip
    return lived(data, folder)


def ttft_s(ran: Records, tenant: str) -> np.ndarray[Any, Any]:
    is_of = ran.workload["tenant"] == ran.tenants.index(tenant)
    order = np.argsort(ran.requests["request"])
    waits = ran.requests["first_token_s"][order] - ran.workload["arrival_s"]
    return np.asarray(waits[is_of])


def test_a_flood_of_one_key_leaves_the_latency_of_another(tmp_path: Path) -> None:
    """The default with keys: TTFT p99 of the quiet key stays within 1.5 times that without a flood."""
    alone = ttft_s(served(tmp_path, 20, {"quiet": 1}), "quiet")
    ran = served(tmp_path, 8, {"quiet": 1, "flood": FLOOD})
    shared, flood = ttft_s(ran, "quiet"), ttft_s(ran, "flood")
    assert len(shared) > 10 and np.max(flood) > 1.0
    assert np.quantile(shared, 0.99) < 1.5 * np.quantile(alone, 0.99), (shared, alone)
