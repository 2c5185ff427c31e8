"""Every scaler, over random fleets and bursts: GPU limits and least replicas hold at any instant; no GPU is lost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from random import Random
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from headway import catalog
from headway.control.policies import Policies
from headway.core.fleet import Combo, Engine, Fault, Fleet, Parallel, Pool, Provisioning
from headway.core.policy import Scaler
from headway.core.record import Outcome, Records, ReplicaRecord
from headway.core.view import PoolsView
from headway.metrics.usage import provisioning_metrics
from headway.policies import SCALERS, resolve
from headway.sim.cluster import simulate
from headway.workload.sources import TraceSource
from headway.workload.table import Workload

REGIONS, MODELS = ("east", "west"), ("llama-3.1-8b", "llama-3.2-3b")
GPU, GPUS = "a100-80gb", 2
END_S = 1500.0
EAGER: dict[str, Mapping[str, Any]] = {
    "reactive": {"cooldown_s": 5.0},
    "chiron": {"cooldown_s": 5.0},
    "lt-i": {"plan": {"tps": dict.fromkeys(MODELS, 15.0), "step_s": 120.0}},
    "lt-u": {"plan": {"tps": dict.fromkeys(MODELS, 15.0), "step_s": 120.0}, "cooldown_s": 5.0},
    "lt-ua": {"plan": {"tps": dict.fromkeys(MODELS, 15.0), "step_s": 120.0}, "cooldown_s": 5.0},
    "timetable": {"counts": {"east-llama-3.1-8b": [1, 4, 2], "west-llama-3.2-3b": [4, 1]}, "step_s": 300.0},
    "freeness": {},
    "target-utilization": {},
}


class Whims:
    """Any numbers within bounds, at every tick."""

    interval_s = 20.0

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def scale(self, view: PoolsView) -> Mapping[str, int]:
        return {
            pool.name: self._random.randint(max(pool.min_replicas, 1), min(pool.max_replicas, 8))
            for pool in view.pools
            if self._random.random() < 0.7
        }


def workload(rng: np.random.Generator) -> Workload:
    """Bursts, of any model from any region."""
    num = 2500
    at_s = np.sort(np.concatenate([rng.uniform(0, END_S * 0.9, num // 2), rng.normal(500, 60, num - num // 2)]))
    tier = rng.integers(0, 3, num)
    return Workload(
        {
            "arrival_s": np.maximum(at_s, 0.0),
            "prompt_tokens": rng.integers(50, 900, num),
            "output_tokens": rng.integers(5, 150, num),
            "tier": tier,
            "region": rng.integers(0, 2, num),
            "model": rng.integers(0, 2, num),
            "slo_ttft_s": np.where(tier == 2, np.nan, 1.0),
        },
        models=MODELS,
        regions=REGIONS,
    )


def fleet(rng: np.random.Generator, limits: Mapping[str, int]) -> Fleet:
    engine = Engine("simulated", max_num_seqs=16, max_num_batched_tokens=2048)
    pools = tuple(
        Pool(
            f"{region}-{model}",
            catalog.model(model),
            catalog.gpu(GPU),
            engine,
            region=region,
            parallel=Parallel(tp=GPUS),
            replicas=int(rng.integers(1, 4)),
            min_replicas=1,
            max_replicas=int(rng.integers(4, 9)),
            kv_capacity_tokens=6_000,
            start_s=90.0,
        )
        for region in REGIONS
        for model in MODELS
    )
    provisioning = Provisioning(reclaim_s=30.0, redeploy_s=60.0, acquire_s=90.0)
    return Fleet(pools, provisioning=provisioning, gpu_limits=tuple((r, GPU, n) for r, n in limits.items()))


def line(num_decode: int, context: int, chunks: Any = (), *window: int) -> tuple[float, float, None]:
    """An engine that is soon busy."""
    return 0.03 + 1e-3 * num_decode + 1e-4 * sum(tokens for tokens, _ in chunks), 0.0, None


def run(make: Callable[[], Scaler], seed: int, faults: tuple[Fault, ...] = ()) -> tuple[Fleet, Records]:
    rng = np.random.default_rng(seed)
    fleet_ = fleet(rng, {"east": 2 * GPUS * int(rng.integers(3, 6)), "west": 2 * GPUS * 5})
    policies = Policies(
        resolve.router("sageserve"),
        resolve.ordering("edf"),
        admission=resolve.admission("queue-manager"),
        scaler=make,
    )
    source = TraceSource(workload(rng))
    return fleet_, simulate(fleet_, source, policies, seed=seed, faults=faults, line=lambda pool: line)


def instants(records: Records) -> list[float]:
    """The start, and right after every change."""
    return sorted(
        {0.0, *(at_s for each in records.replicas for at_s in (*each.up[0], *each.up[-1]) if at_s < records.end_s)}
    )


def paid(replica: ReplicaRecord, at_s: float) -> bool:
    return any(since <= at_s < to for since, to in replica.up)


def check(fleet: Fleet, records: Records) -> None:
    """Limits, least replicas, and that what is taken back was given before, once, and by its own region."""
    limits = {region: count for region, _, count in fleet.gpu_limits}
    for at_s in instants(records):
        for region, limit in limits.items():
            used = sum(each.num_gpus for each in records.replicas if each.region == region and paid(each, at_s))
            assert used <= limit, (region, at_s)
        for pool in fleet.pools:
            assert sum(each.pool == pool.name and paid(each, at_s) for each in records.replicas) >= pool.min_replicas
    by_id = {each.id: each for each in records.replicas}
    taken = [each for each in records.replicas if each.replaces >= 0]
    assert len({each.replaces for each in taken}) == len(taken)
    for each in taken:
        spot = by_id[each.replaces]
        assert spot.up[-1][1] <= each.up[0][0] and (spot.region, spot.num_gpus) == (each.region, each.num_gpus)
        assert (spot.model == each.model) == (each.origin == "reclaimed")


def conserved(records: Records) -> None:
    """GPUs in use and GPUs on the spot market are all that were ever acquired, from when they were."""
    assert all(since <= to <= records.end_s for each in records.replicas for since, to in each.up)
    used = sum(each.num_gpus * (to - since) for each in records.replicas for since, to in each.up)
    acquired = [each for each in records.replicas if each.origin in ("initial", "new")]
    ever = sum(each.num_gpus * (records.end_s - each.up[0][0]) for each in acquired)
    found = provisioning_metrics(records, 0.0)
    spot = 0.0 if found is None else 3600 * found.spot_gpu_hours
    assert used + spot == pytest.approx(ever)


@pytest.mark.parametrize("name", sorted(SCALERS.keys() - {"combos"}))
def test_every_scaler(name: str) -> None:
    spec = {"name": name, **EAGER.get(name, {})}
    fleet_, records = run(resolve.scaler(spec), 1)
    check(fleet_, records)
    conserved(records)
    assert (records.requests["outcome"] == Outcome.FINISHED).all()
    if name in EAGER and name != "target-utilization":
        assert any(each.origin != "initial" for each in records.replicas), "nothing was ever started"


@pytest.mark.parametrize("seed", range(4))
def test_whims_and_crashes(seed: int) -> None:
    """Numbers that make no sense, on replicas that crash and some of which come back."""
    faults = tuple(Fault(100.0 * i + 7, i % 4, 50.0 if i % 2 else None) for i in range(4)) if seed % 2 else ()
    fleet_, records = run(partial(Whims, seed), seed, faults)
    check(fleet_, records)
    conserved(records)
    assert {"reclaimed", "new"} <= {each.origin for each in records.replicas}


class Restless:
    """Asks for ever more, whatever there is to do."""

    interval_s = 20.0

    def __init__(self) -> None:
        self.asked_s: list[float] = []

    def scale(self, view: PoolsView) -> Mapping[str, int]:
        self.asked_s.append(view.now)
        return {pool.name: min(pool.max_replicas, 1 + len(self.asked_s)) for pool in view.pools}


@pytest.mark.parametrize("until_s", [None, 900.0])
def test_nobody_is_asked_once_nothing_can_happen(until_s: float | None) -> None:
    """Replicas that start keep no run going that has ended, and none begins after its end."""
    scaler = Restless()
    engine = Engine("simulated", max_num_seqs=16, max_num_batched_tokens=2048)
    pool = Pool(
        "one",
        catalog.model(MODELS[0]),
        catalog.gpu(GPU),
        engine,
        replicas=1,
        max_replicas=100,
        kv_capacity_tokens=6_000,
        start_s=150.0,
    )
    few = Workload({"arrival_s": np.arange(50.0), "prompt_tokens": np.full(50, 99), "output_tokens": np.full(50, 9)})
    policies = Policies(resolve.router("round-robin"), resolve.ordering("fcfs"), scaler=lambda: scaler)
    records = simulate(Fleet((pool,)), TraceSource(few), policies, seed=0, line=lambda pool: line, until_s=until_s)
    assert all(since <= to <= records.end_s for each in records.replicas for since, to in each.up)
    assert max(scaler.asked_s) <= records.end_s
    if until_s is None:
        assert records.end_s == records.requests["end_s"].max()


class Notes:
    """Changes nothing, and keeps what it sees of units that are up and down."""

    interval_s = 50.0

    def __init__(self) -> None:
        self.seen: dict[float, tuple[int, int, int]] = {}

    def scale(self, view: PoolsView) -> Mapping[str, int]:
        (pool,) = view.pools
        self.seen[view.now] = (pool.num_serving, pool.num_down, len(pool.replicas))
        return {}


@pytest.mark.parametrize("is_combo", [False, True])
def test_a_unit_of_which_nothing_is_up_shows_as_down_until_it_is_back(is_combo: bool) -> None:
    """Of a combo, one part may be down, and the rest serves; when both are, it is a unit that is down."""
    engine = Engine("simulated", max_num_seqs=16, max_num_batched_tokens=2048)
    part = Pool("one", catalog.model(MODELS[1]), catalog.gpu(GPU), engine, replicas=1 if is_combo else 2)
    other = structs.replace(part, name="other", role="decode")
    combo = Combo("pair", (structs.replace(part, role="prefill"), other), replicas=2)
    fleet = Fleet((), (combo,)) if is_combo else Fleet((part,))
    faults = (Fault(60.0, 0, 200.0), Fault(160.0, 1, 100.0)) if is_combo else (Fault(160.0, 0, 100.0),)
    rows = Workload(
        {"arrival_s": np.arange(40) * 10.0, "prompt_tokens": np.full(40, 50), "output_tokens": np.full(40, 5)}
    )
    notes = Notes()
    policies = Policies(resolve.router("least-loaded"), resolve.ordering("fcfs"), scaler=lambda: notes)
    simulate(fleet, TraceSource(rows), policies, seed=0, faults=faults)
    whole = 4 if is_combo else 2
    assert notes.seen[50.0] == (2, 0, whole) and notes.seen[300.0] == (2, 0, whole)
    assert notes.seen[100.0] == ((2, 0, 3) if is_combo else (2, 0, 2))
    assert notes.seen[200.0] == notes.seen[250.0] == (1, 1, whole // 2)
