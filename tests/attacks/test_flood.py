"""One key floods the gateway: what another one notices, served by emulated engines in virtual time.

The emulated engines, the gateway and the requests are real; only time passes when nobody has anything to do. So the
latencies are those of a machine that is never too busy for the test.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

pytest.importorskip("httptools")
pytest.importorskip("uvicorn")

from headway import scenario
from headway.core.record import Records
from keys import digest
from serving import MODEL
from virtual_time import both, lived

URL = "http://127.0.0.1:10001"
FLOOD = 20
SMALL = {"name": "vllm-0.15", "max_num_seqs": 32}
"""An engine that runs 32 requests at a time, some 40 a second."""


def day(
    tenants: dict[str, int],
    quiet_rps: float,
    seconds: float,
    tokens: tuple[int, int],
    cv: float = 0.5,
    engine: Any = "vllm-0.15",
    model: str = MODEL,
    room_tokens: int | None = None,
    **policies: Any,
) -> dict[str, Any]:
    """A replica with requests of these mean prompts and answers."""
    prompts, answers = ({"kind": "lognormal", "mean": mean, "cv": cv} for mean in tokens)
    room = {} if room_tokens is None else {"kv_capacity_tokens": room_tokens}
    return {
        "fleet": [{"name": "pool", "model": model, "gpu": "h100", "engine": engine, "endpoints": [URL], **room}],
        "gateway": {"api_keys": [{"sha256": digest(tenant), "name": tenant} for tenant in ("quiet", "flood")]},
        "workload": {
            "arrivals": quiet_rps * sum(tenants.values()),
            "duration_s": seconds,
            "prompt_tokens": prompts,
            "output_tokens": answers,
            "tenants": tenants,
        },
        "policies": policies,
    }


def served(folder: Path, *args: Any, **given: Any) -> Records:
    """The day as the gateway served it."""
    return lived(day(*args, **given), folder)[0]


def ttft_s(ran: Records, tenant: str) -> np.ndarray[Any, Any]:
    is_of = ran.workload["tenant"] == ran.tenants.index(tenant)
    order = np.argsort(ran.requests["request"])
    waits = ran.requests["first_token_s"][order] - ran.workload["arrival_s"]
    return np.asarray(waits[is_of])


FEW_PROMPTS = {"ordering": {"name": "fair", "prompt_window": 512}, "ordering_at": "gateway"}


@pytest.mark.ci
@pytest.mark.parametrize(
    ("quiet_rps", "tokens", "seconds", "most", "setting"),
    [
        pytest.param(2.5, (40, 100), (20, 8), 1.5, {"engine": SMALL, "cv": 0.7}, id="few at a time"),
        pytest.param(2.5, (200, 100), (16, 8), 1.5, {}, id="an engine with room"),
        pytest.param(1.5, (2000, 100), (30, 15), 2.0, {}, id="long prompts"),
        pytest.param(7.5, (200, 100), (10, 3), 1.5, FEW_PROMPTS, id="short iterations"),
    ],
)
def test_a_flood_of_one_key_leaves_the_latency_of_another(
    quiet_rps: float,
    tokens: tuple[int, int],
    seconds: tuple[int, int],
    most: float,
    setting: dict[str, Any],
    tmp_path: Path,
) -> None:
    """TTFT p99 of the quiet key stays within a multiple of that without a flood, by default but for the last case."""
    alone = ttft_s(served(tmp_path, {"quiet": 1}, quiet_rps, seconds[0], tokens, **setting), "quiet")
    ran = served(tmp_path, {"quiet": 1, "flood": FLOOD}, quiet_rps, seconds[1], tokens, **setting)
    shared, flood = ttft_s(ran, "quiet"), ttft_s(ran, "flood")
    assert len(shared) > 10 and (np.max(flood) > 1.0 or tokens == (200, 100))
    assert np.quantile(shared, 0.99) < most * np.quantile(alone, 0.99), (shared, alone)


LITTLE_ROOM = {
    "model": "qwen3-32b",
    "room_tokens": 16_000,
    "ordering": {"name": "vtc", "prompt_window": 512},
    "ordering_at": "gateway",
    "preempt_every_s": 0.1,
}
"""A model that leaves room for some 80 requests, whose iterations take little longer with them than alone."""


@pytest.mark.ci
def test_a_flood_does_not_fill_the_kv_cache_of_others(tmp_path: Path) -> None:
    """The quiet key waits for iterations only, and the gateway's figures are the simulator's."""

    def lately(tenants: dict[str, int]) -> dict[str, Any]:
        plain = day(tenants, 1.5, 5, (100, 200), **LITTLE_ROOM)
        return {**plain, "gateway": {**plain["gateway"], "scrape_period_s": 0.2}, "observe": {"period_s": 0.2}}

    path = tmp_path / "alone.yaml"
    path.write_text(yaml.safe_dump(lately({"quiet": 1})))
    alone = np.max(ttft_s(scenario.run(scenario.load(path)).records, "quiet"))
    ran, _, simulated, _ = both(lately({"quiet": 1, "flood": FLOOD}), tmp_path)
    waits, foreseen = ttft_s(ran, "quiet"), ttft_s(simulated, "quiet")
    assert len(waits) > 4 and np.max(waits) < 1.4 * alone
    np.testing.assert_allclose(waits, foreseen, rtol=0.05)
    assert ran.requests["end_s"].max() == pytest.approx(simulated.requests["end_s"].max(), rel=0.03)
    assert ran.requests["preemptions"].sum() > 5
