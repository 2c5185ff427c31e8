"""SageServe's policies together in a simulation of two regions: nobody is lost, late for no reason, or above limits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from headway import catalog
from headway.control.policies import Policies
from headway.core.decision import Release
from headway.core.fleet import Engine, Fault, Fleet, Pool, Provisioning
from headway.core.record import Outcome, Records
from headway.core.view import AdmissionView, RequestView
from headway.policies import resolve
from headway.sim.cluster import simulate
from headway.workload.sources import TraceSource
from headway.workload.table import Workload

REGIONS = ("east", "west")
HOURS = 3.0
RATE_RPS = 2.0
BATCH_DEADLINE_S = 5400.0
MOST_GPUS = 8
PLAN = {"tps": {"llama-3.1-8b": 250.0}, "epsilon": 0.6, "step_s": 300}


def line(num_decode: int, context: int, chunks: Sequence[tuple[int, int]], *window: int) -> tuple[float, float, None]:
    """An engine that is busy with a few requests a second."""
    return 0.04 + 1e-3 * num_decode + 1e-4 * sum(tokens for tokens, _ in chunks), 0.0, None


def workload() -> Workload:
    """Interactive requests that swing every two hours, more of them in the east, and an even fifth of batch work."""
    rng = np.random.default_rng(0)
    num = round(2 * RATE_RPS * HOURS * 3600)
    at_s = np.sort(rng.uniform(0, HOURS * 3600, num))
    tier = np.where(rng.random(num) < 0.2, 2, rng.integers(0, 2, num))
    quiet = rng.random(num) > 0.5 - 0.5 * np.cos(2 * np.pi * at_s / 7200)
    kept = (tier == 2) | ~quiet
    at_s, tier, num = at_s[kept], tier[kept], int(kept.sum())
    return Workload(
        {
            "arrival_s": at_s,
            "prompt_tokens": rng.integers(100, 900, num),
            "output_tokens": rng.integers(20, 200, num),
            "tier": tier,
            "region": (rng.random(num) < 0.3).astype(int),
            "slo_ttft_s": np.where(tier == 2, np.nan, np.where(tier == 0, 1.0, 60.0)),
            "deadline_s": np.where(tier == 2, at_s + BATCH_DEADLINE_S, np.nan),
        },
        regions=REGIONS,
    )


def run(
    scaling: Any, admission: Any, ordering: Any = "deadline-priority", suffixes: tuple[str, ...] = ("",)
) -> Records:
    engine = Engine("simulated", max_num_seqs=16, max_num_batched_tokens=2048)
    pools = tuple(
        Pool(
            f"{region}{suffix}",
            catalog.model("llama-3.1-8b"),
            catalog.gpu("a100-80gb"),
            engine,
            replicas=4 // len(suffixes),
            region=region,
            kv_capacity_tokens=4_000,
            start_s=120.0,
            min_replicas=2 if len(suffixes) == 1 else 1,
            max_replicas=6,
        )
        for region in REGIONS
        for suffix in suffixes
    )
    router = {"name": "sageserve", "interactive_suffix": "-interactive", "batch_suffix": "-batch"}
    policies = Policies(
        resolve.router(router),
        resolve.ordering(ordering),
        scaler=resolve.scaler(scaling),
        admission=None if admission is None else resolve.admission(admission),
    )
    limits = tuple((region, "a100-80gb", MOST_GPUS) for region in REGIONS)
    fleet = Fleet(pools, provisioning=Provisioning(), gpu_limits=limits)
    return simulate(fleet, TraceSource(workload()), policies, seed=1, line=lambda pool: line)


def counts(records: Records, region: str) -> list[int]:
    """How many GPUs a region has paid for, at the start and after each change."""
    up = [interval for replica in records.replicas if replica.region == region for interval in replica.up]
    times = {0.0, *(at_s for interval in up for at_s in interval if at_s < records.end_s)}
    return [sum(start_s <= at_s < end_s for start_s, end_s in up) for at_s in times]


def instance_hours(records: Records) -> float:
    return sum(min(end, records.end_s) - start for replica in records.replicas for start, end in replica.up) / 3600


@pytest.mark.ci
@pytest.mark.parametrize(
    "scaling",
    ["reactive", *({"name": name, "plan": PLAN} for name in ("lt-i", "lt-u", "lt-ua"))],
    ids=lambda each: each if isinstance(each, str) else each["name"],
)
def test_unified_pools(scaling: Any) -> None:
    records = run(scaling, {"name": "queue-manager", "urgent_after_s": 3600.0, "margin_s": 600.0})
    requests, asked = records.requests, records.workload
    assert (requests["outcome"] == Outcome.FINISHED).all()
    batch = asked["tier"][requests["request"]] == 2
    waited_s = (requests["placed_s"] - asked["arrival_s"][requests["request"]])[batch]
    assert waited_s.max() <= 3601.0
    assert (waited_s > 0).all() and (requests["end_s"] <= asked["deadline_s"][requests["request"]])[batch].all()
    assert instance_hours(records) < 8 * HOURS  # it started with eight
    for region in REGIONS:
        assert 2 <= min(counts(records, region)) < max(counts(records, region)) <= MOST_GPUS


@pytest.mark.ci
def test_silos_and_chiron() -> None:
    silos = run("reactive", None, "priority-first", ("-interactive", "-batch"))
    kinds = {replica.id: replica.pool.split("-")[1] for replica in silos.replicas}
    by_tier = silos.workload["tier"][silos.requests["request"]]
    for tier, kind in ((0, "interactive"), (1, "interactive"), (2, "batch")):
        assert {kinds[id] for id in silos.requests["replica"][by_tier == tier]} == {kind}
    chiron = run("chiron", None, "priority-first", ("-interactive", "", "-batch", "-batch2"))
    assert (chiron.requests["outcome"] == Outcome.FINISHED).all()
    pools = {replica.id: replica.pool for replica in chiron.replicas}
    by_tier = chiron.workload["tier"][chiron.requests["request"]]
    assert not any(pools[id].endswith("-batch") for id in chiron.requests["replica"][by_tier < 2])
    assert not any(pools[id].endswith("-interactive") for id in chiron.requests["replica"][by_tier == 2])


class ToTheWest:
    """Lets batch requests go, one a second, all for one region."""

    interval_s = 1.0

    def holds(self, request: RequestView) -> bool:
        return request.tier == 2

    def release(self, view: AdmissionView) -> list[Release]:
        return [Release(request.id, region="west") for request in list(view.held)[:1]]


def test_who_is_let_go_for_a_region_goes_there_whatever_the_router_and_elsewhere_once_it_is_gone() -> None:
    engine = Engine("simulated", max_num_seqs=16, max_num_batched_tokens=2048)
    pools = tuple(
        Pool(region, catalog.model("llama-3.1-8b"), catalog.gpu("a100-80gb"), engine, region=region)
        for region in REGIONS
    )
    crash = Fault(100.0, replica=1)
    policies = Policies(resolve.router("round-robin"), resolve.ordering("fcfs"), admission=ToTheWest)
    num = 300
    table = Workload(
        {
            "arrival_s": np.arange(num) * 0.5,
            "prompt_tokens": np.full(num, 100),
            "output_tokens": np.full(num, 5),
            "tier": np.where(np.arange(num) % 2, 2, 0),
        }
    )
    source = TraceSource(table)
    records = simulate(Fleet(pools), source, policies, seed=1, line=lambda pool: line, faults=(crash,))
    requests = records.requests
    batch = table.columns["tier"][requests["request"]] == 2
    is_west = np.array([records.replicas[id].region == "west" for id in requests["replica"]])
    early = requests["end_s"] < 100.0
    assert is_west[batch & early].all() and not is_west[requests["placed_s"] > 100.0].any()
    assert 0 < is_west[~batch & early].sum() < (~batch & early).sum()
    assert (requests["outcome"] == Outcome.FINISHED).all()
