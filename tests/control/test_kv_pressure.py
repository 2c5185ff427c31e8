"""Room in KV caches for a quiet tenant, in simulation: who gives way, what it costs, and that nothing is lost."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from control_fakes import Fleet, fleet
from fakes import FakeReplica
from headway import scenario
from headway.config.strict_yaml import Places
from headway.control.live import HELD, Live
from headway.core.record import Outcome, Records
from headway.policies.ordering.fair import FairOrdering

pytestmark = pytest.mark.slow
SECONDS = 120


@cache
def ran(ordering: str = "fair", every_s: float | None = 0.1, step: str = "stretch", flood: float = 8) -> Records:
    """A replica whose KV cache, not its places, limits what runs: long answers of a model that fills the GPU."""
    policies: dict[str, Any] = {"ordering": ordering}
    if ordering != "fcfs":
        policies = {"ordering": {"name": ordering, "prompt_window": 512}, "ordering_at": "gateway"}
        if every_s is not None:
            policies["preempt_every_s"] = every_s
    lengths = {
        key: {"kind": "lognormal", "mean": mean, "cv": 0.7}
        for key, mean in (("prompt_tokens", 300), ("output_tokens", 800))
    }
    document = {
        "workload": {
            "arrivals": 0.5 * (1 + flood),
            "duration_s": SECONDS,
            "tenants": {"quiet": 1, "flood": flood},
            **lengths,
        },
        "fleet": [{"model": "qwen3-32b", "gpu": "h100", "engine": "simulated-0.15"}],
        "policies": policies,
        "simulation": {"step": step, "until_s": SECONDS},
    }
    return scenario.run(scenario.assemble(document, Places(), Path())).records


def longest_wait_s(records: Records) -> float:
    """The longest TTFT of the quiet tenant, of requests that came early enough to have one."""
    requests = records.requests["request"]
    arrival_s = records.workload["arrival_s"][requests]
    of = (records.workload["tenant"][requests] == records.tenants.index("quiet")) & (arrival_s < SECONDS - 5)
    waits = np.where(np.isnan(records.requests["first_token_s"]), np.inf, records.requests["first_token_s"] - arrival_s)
    return float(waits[of].max())


def tokens(records: Records) -> float:
    stretches = records.stretches
    return float((stretches["num_decode"] * stretches["iterations"] * stretches["advances"]).sum())


@pytest.mark.parametrize("ordering", ["fair", "vtc", "drr"])
def test_a_quiet_tenant_does_not_wait_for_the_kv_cache_of_a_flood(ordering: str) -> None:
    """And as many tokens are generated as in order of arrival."""
    shared, fcfs = ran(ordering), ran("fcfs")
    assert longest_wait_s(shared) < 0.5 < 2.0 < longest_wait_s(ran(ordering, every_s=None))
    assert longest_wait_s(fcfs) > 10
    assert tokens(shared) > 0.97 * tokens(fcfs)


def test_only_the_flood_gives_way_and_every_answer_is_complete() -> None:
    records = ran()
    rows, workload = records.requests, records.workload
    of_quiet = workload["tenant"][rows["request"]] == records.tenants.index("quiet")
    assert not rows["preemptions"][of_quiet].any() and rows["preemptions"][~of_quiet].sum() > 5
    finished = rows["outcome"] == Outcome.FINISHED
    wanted = workload["output_tokens"][rows["request"]]
    assert (rows["generated_tokens"][finished] == wanted[finished]).all() and finished.sum() > 50
    assert not {Outcome.REJECTED, Outcome.CANCELLED} & set(rows["outcome"])


def test_both_ways_to_step_agree() -> None:
    records, exact = ran("drr"), ran("drr", step="exact")
    for name, column in records.requests.items():
        assert np.allclose(column, exact.requests[name], rtol=0, atol=1e-9, equal_nan=True), name


def test_nothing_is_paused_while_the_cache_has_room() -> None:
    assert not ran(flood=1).requests["preemptions"].any()


# Behind control.


def test_room_that_is_kept_for_others_is_theirs_although_the_flood_ranks_first() -> None:
    """After its first requests a tenant may rank behind the flood, which has no room then."""

    class FloodFirst(FairOrdering):
        def rank(self, request: Any, now: float) -> Any:
            return 0, request.tenant != "flood", 0.0, request.arrival_s

    run = fleet("mixed", window=8, ordering=lambda: FloodFirst(headroom=0.25), ordering_at="gateway")
    flood = [run.arrive(i, tenant="flood") for i in range(20)]
    quiet = [run.arrive(100 + i, tenant="quiet") for i in range(3)]
    assert sum(live.stage is not HELD for live in flood) == 6
    assert [live.stage is HELD for live in quiet] == [False, False, True]
    run.finish(quiet[0], 1.0)
    assert quiet[2].stage is not HELD and len(run.service.hold_queue.requests()) == 14


def test_a_request_that_continues_needs_room_for_its_tokens_too() -> None:
    """Of 1,600 tokens, a sixteenth is for others."""
    replica = FakeReplica(0, model="llama", kv_blocks_total=100, kv_blocks_used=95)
    run = Fleet([replica], window=64, ordering=FairOrdering, ordering_at="gateway", prompt_window=1000)
    first = run.arrive(0, tenant="flood", prompt=700)
    run.control.on_prompt_computed(first, 0.5)
    new, resumed = (Live(i, 1.0, 400, 550, tenant="flood") for i in (1, 2))
    resumed.generated_tokens = 500
    assert run.service.has_room(new) and not run.service.has_room(resumed)
