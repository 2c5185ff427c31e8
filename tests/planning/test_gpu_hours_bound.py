"""The bound on GPU-hours against runs that serve their trace in time, and against other ways of counting."""

from __future__ import annotations

from itertools import product
from math import inf

import numpy as np
import pytest
from msgspec import structs

from headway import catalog
from headway.control.policies import Policies
from headway.core.errors import HeadwayError
from headway.core.fleet import Fleet, Parallel, Pool
from headway.core.record import Outcome, Records
from headway.metrics.summary import summarize
from headway.perf.step import StepModel
from headway.planning import gpu_hours_bound as bound_module
from headway.planning.gpu_hours_bound import (
    ALLOWED,
    DueWork,
    FluidPool,
    PaidSpan,
    PeakRates,
    gpu_hours_bound,
    least_gpu_hours,
)
from headway.policies import resolve
from headway.sim.cluster import simulate
from headway.workload.sources import TraceSource
from headway.workload.table import Workload

scipy = pytest.importorskip("scipy.optimize")
MODELS, REGIONS = ("llama-3.1-8b", "llama-3.2-3b"), ("east", "west")


def steps(pool: Pool) -> StepModel:
    return StepModel(pool.model, pool.gpu, pool.engine, pool.parallel)


def fleet(rng: np.random.Generator, least: int = 0) -> Fleet:
    """One or two models in one or two regions."""
    engine = structs.replace(
        catalog.engine("simulated"),
        max_num_seqs=int(rng.choice([8, 64])),
        max_num_batched_tokens=int(rng.choice([512, 4096])),
    )
    kv_tokens = [None, 8_000, 40_000][rng.integers(3)]
    cells = list(product(MODELS[: rng.integers(1, 3)], REGIONS[: rng.integers(1, 3)]))
    return Fleet(
        tuple(
            Pool(
                name=f"{model}-{region}",
                model=catalog.model(model),
                gpu=catalog.gpu("a100-80gb"),
                engine=engine,
                parallel=Parallel(tp=int(rng.choice([1, 2]))),
                region=region,
                replicas=int(rng.integers(1, 4)),
                min_replicas=least,
                kv_capacity_tokens=kv_tokens,
                start_s=20.0,
            )
            for model, region in cells
        )
    )


def trace(rng: np.random.Generator, models: int, rate_rps: float, until_s: float) -> Workload:
    """Two interactive tiers and a batch tier with deadlines, in waves."""
    num = int(rate_rps * until_s)
    at_s = np.sort(rng.uniform(0, until_s, num))
    at_s = at_s[rng.random(num) < 0.6 + 0.4 * np.sin(at_s / until_s * 12)]
    num = len(at_s)
    tier = rng.integers(0, 3, num)
    return Workload(
        {
            "arrival_s": at_s,
            "prompt_tokens": rng.integers(50, 3000, num),
            "output_tokens": rng.integers(1, 300, num),
            "tier": tier,
            "region": rng.integers(0, 2, num),
            "model": rng.integers(0, models, num),
            "slo_ttft_s": np.where(tier == 2, np.nan, np.where(tier == 0, 2.0, 60.0)),
            "deadline_s": np.where(tier == 2, at_s + rng.uniform(200, 900), np.nan),
        },
        models=MODELS[:models],
        regions=REGIONS,
    )


def serves(records: Records, warmup_s: float) -> bool:
    """The module's definition, counted from the records."""
    ended, came = records.requests, records.workload
    request = ended["request"]
    at_s, tier = came["arrival_s"][request], came["tier"][request]
    finished = ended["outcome"] == Outcome.FINISHED
    due_s = at_s + came["slo_ttft_s"][request]
    for one in np.unique(tier[~np.isnan(due_s)]):
        mine = (tier == one) & (due_s <= records.end_s)
        late = ~(ended["first_token_s"] <= due_s) & mine & (at_s >= warmup_s)
        if late.sum() > ALLOWED * (mine & (at_s >= warmup_s)).sum() or (~finished & mine).sum() > ALLOWED * mine.sum():
            return False
    deadline_s = came["deadline_s"][request]
    missed = (deadline_s <= records.end_s) & ~(finished & (ended["end_s"] <= deadline_s))
    return not missed.any()


@pytest.mark.sampled(14)
@pytest.mark.parametrize("seed", range(14))
def test_no_run_that_serves_in_time_takes_less(seed: int) -> None:
    """Over fleets, traces, scalers and ends of runs; a bound that is too high would exceed an idle fleet's use."""
    rng = np.random.default_rng(seed)
    some = fleet(rng, least=seed % 2)
    num_models = len({pool.model.name for pool in some.pools})
    until_s = None if seed % 3 else 700.0
    rate_rps = float(rng.choice([0.5, 2.0, 6.0]))
    scaling = ["reactive", None, {"name": "reactive", "out_above": 0.95, "in_below": 0.5}][seed % 3]
    policies = Policies(
        resolve.router("sageserve"),
        resolve.ordering("edf"),
        scaler=None if scaling is None else resolve.scaler(scaling),
    )
    source = TraceSource(trace(rng, num_models, rate_rps, 600.0))
    records = simulate(some, source, policies, seed=seed, until_s=until_s)
    warmup_s = 60.0 * (seed % 2)
    bound = gpu_hours_bound(some, records, steps, warmup_s=warmup_s, to_the_end=until_s is None)
    assert bound is not None
    in_time = serves(records, warmup_s)
    assert in_time == bound_module.serves(some, records, warmup_s=warmup_s, to_the_end=until_s is None)
    if in_time:
        assert 0 < bound <= summarize(records, warmup_s=warmup_s).gpu_hours


def test_the_bound_of_a_busy_fleet_is_close_to_its_use() -> None:
    rng = np.random.default_rng(1)
    pool = structs.replace(fleet(rng).pools[0], replicas=1, parallel=Parallel(tp=1), kv_capacity_tokens=8_000)
    num = 1500
    table = {
        "arrival_s": np.linspace(0, 1, num),
        "prompt_tokens": np.full(num, 600),
        "output_tokens": np.full(num, 100),
        "tier": np.zeros(num, int),
        "slo_ttft_s": np.full(num, 1e6),
        "deadline_s": np.full(num, np.nan),
    }
    policies = Policies(resolve.router("round-robin"), resolve.ordering("fcfs"))
    records = simulate(Fleet((pool,)), TraceSource(Workload(table)), policies, seed=0)
    assert serves(records, 0.0)
    bound = gpu_hours_bound(Fleet((pool,)), records, steps)
    used = summarize(records).gpu_hours
    assert bound is not None and 0.6 * used < bound <= used


ONE = PeakRates(token_s=1.0, context_s=0.0, tick_s=0.0, kv_tokens=inf, seats=1.0)


def jobs(came: list[float], due: list[float], tokens: list[float], group: int = -1) -> DueWork:
    """Prompts of so many seconds."""
    num = len(came)
    groups = np.full(num, group)
    by_s = np.array(due, float)
    return DueWork(np.array(came, float), by_s, by_s, np.array(tokens, float), np.ones(num), groups, groups)


def place(least: float = 0.0, region: str = "", gpus: int = 1, best: PeakRates = ONE) -> FluidPool:
    return FluidPool("m", region, "gpu", gpus, least, best)


@pytest.mark.parametrize("seed", range(12))
def test_brute_force_over_whole_jobs(seed: int) -> None:
    """Jobs of 10 s in slots of 10 s, one at a time on an instance.

    A plan with whole instances and undivided jobs costs no less. By Hall's theorem, the relaxation equals another
    program: for every interval, the instances in it cover the jobs that arrive and are due within it.
    """
    rng = np.random.default_rng(seed)
    num_slots, least = 4, int(rng.integers(0, 2))
    came = rng.integers(0, num_slots, 5)
    due = np.minimum(came + rng.integers(0, 3, 5), num_slots - 1)
    work = jobs(list(10.0 * came + 1), list(10.0 * due + 9), [10.0] * 5)
    span = PaidSpan(0.0, 10.0 * num_slots, num_slots)
    limit = float(rng.integers(2, 6))
    best = inf
    for chosen in product(*(range(a, b + 1) for a, b in zip(came, due, strict=True))):
        load = np.bincount(chosen, minlength=num_slots)
        if load.max() <= limit:
            best = min(best, float(np.maximum(load, least).sum()) * 10 / 3600)
    try:
        bound = least_gpu_hours({"m": work}, [place(least)], {("", "gpu"): limit}, span, 0.0)
    except HeadwayError:
        assert best == inf
        return
    rows, low = [], []
    for a in range(num_slots):
        for b in range(a, num_slots):
            rows.append([-float(a <= s <= b) for s in range(num_slots)])
            low.append(-float(((came >= a) & (due <= b)).sum()))
    hall = scipy.linprog(np.full(num_slots, 10 / 3600), A_ub=rows, b_ub=low, bounds=[(least, limit)] * num_slots)
    assert bound == pytest.approx(hall.fun, rel=1e-5)
    assert bound <= best + 1e-9
    assert best == pytest.approx(bound, rel=1e-5)  # whole jobs on whole slots: a network, whose corners are whole


def test_the_largest_are_left_late() -> None:
    """One of ten may miss its SLO: the largest."""
    work = jobs([1.0] * 10, [9.0] * 10, [10.0] * 9 + [100.0], group=0)
    span = PaidSpan(0.0, 10.0, 1)
    hours = [least_gpu_hours({"m": work}, [place()], {}, span, allowed) * 3600 for allowed in (0.0, 0.1)]
    assert hours[0] == pytest.approx(190, rel=1e-4)
    assert 40 <= hours[1] <= 90.01


def test_least_instances_and_time_before_the_warm_up() -> None:
    """Two regions keep one instance each, of two GPUs; only the time after the warm-up is paid for."""
    work = jobs([1.0], [99.0], [10.0])
    places = [place(1.0, region, gpus=2) for region in ("a", "b")]
    assert least_gpu_hours({"m": work}, places, {}, PaidSpan(40.0, 100.0), 0.0) * 3600 == pytest.approx(240, rel=1e-4)


def test_memory_and_seats_bound_too() -> None:
    """100 tokens of 1 s each, over a context of 50 and more, with room for 60 KV tokens."""
    work = DueWork(*(np.array([value]) for value in (0.0, inf, 1000.0, 50.0, 101.0)), np.array([-1]), np.array([-1]))
    span = PaidSpan(0.0, 1000.0, 4)
    narrow = structs.replace(ONE, token_s=0.0, tick_s=1.0, kv_tokens=60.0, seats=8.0)
    by_memory = least_gpu_hours({"m": work}, [place(best=narrow)], {}, span, 0.0)
    assert by_memory * 3600 == pytest.approx((100 * 50 + 99 * 100 / 2) / 60, rel=1e-4)
    seats = structs.replace(narrow, kv_tokens=inf, seats=0.5)
    assert least_gpu_hours({"m": work}, [place(best=seats)], {}, span, 0.0) * 3600 == pytest.approx(200, rel=1e-4)


def test_no_plan_within_the_limits() -> None:
    work = jobs([1.0], [9.0], [100.0])
    with pytest.raises(HeadwayError, match="no plan serves this trace in time"):
        least_gpu_hours({"m": work}, [place()], {("", "gpu"): 2.0}, PaidSpan(0.0, 10.0, 1), 0.0)


@pytest.mark.parametrize("seed", range(3))
def test_late_requests_are_noticed(seed: int) -> None:
    """One small replica for too much work: late first tokens, late ends, or missed deadlines."""
    rng = np.random.default_rng(seed)
    pool = structs.replace(fleet(rng).pools[0], replicas=1, kv_capacity_tokens=8_000)
    policies = Policies(resolve.router("round-robin"), resolve.ordering("fcfs"))
    records = simulate(Fleet((pool,)), TraceSource(trace(rng, 1, 12.0, 600.0)), policies, seed=0, until_s=700.0)
    assert not serves(records, 0.0)
    assert not bound_module.serves(Fleet((pool,)), records, to_the_end=False)
