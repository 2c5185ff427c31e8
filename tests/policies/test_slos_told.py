"""What a router may do with an SLO that it is told. The relations hold for every registered router, on a small day."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from fakes import FakeFleet, FakeReplica, FakeRequest
from headway.config.strict_yaml import Places
from headway.core.record import Records
from headway.metrics.interval import interval
from headway.metrics.latency import DefaultSlo, sample, slo_masks
from headway.policies import ROUTERS
from headway.policies.resolve import router
from headway.scenario import Simulator, assemble
from headway.testing.stories import LinearTimes

UNLOADED_S = 0.285
"""TTFT of the long prompts on an idle L40S."""
FACTORS = (1.1, 1.5, 2.0, 4.0)
"""SLOs, as multiples of that."""
SEEDS = range(6)
DAY_S, WARMUP_S = 16.0, 2.0
routers = pytest.mark.parametrize("name", ROUTERS)


@cache
def day(
    name: str,
    seed: int,
    rate: float,
    replicas: int,
    factor: float = 0.0,
    by: str = "file",
    gpus: tuple[str, ...] = ("l40s",),
) -> Records:
    """A day of short prompts, one in ten of them long. `factor`: the SLO that is told; 0 = none."""
    slo = {"ttft_s": factor * UNLOADED_S}
    document: dict[str, Any] = {
        "workload": {
            "arrivals": rate,
            "duration_s": DAY_S,
            "mix": [
                {"share": 0.9, "prompt_tokens": 300, "output_tokens": 40},
                {"share": 0.1, "prompt_tokens": 3000, "output_tokens": 40},
            ],
        },
        "fleet": [
            {"name": gpu, "model": "llama-3.1-8b", "gpu": gpu, "replicas": replicas, "engine": "vllm-0.15"}
            for gpu in gpus
        ],
        "policies": {"routing": name},
        "seed": seed,
    }
    if factor and by == "file":
        document["slo"] = slo
    elif factor:
        document["workload"]["tiers"] = [{"tier": 0, "share": 1.0, **slo}]
    return Simulator().records(assemble(document, Places(), Path()))


def attainment(records: Records, factor: float) -> float:
    """The share of the requests whose first token comes in time, whether the router knew the SLO or not."""
    last_s = float(records.workload["arrival_s"].max())
    has, met = slo_masks(sample(records, WARMUP_S, DefaultSlo(ttft_s=factor * UNLOADED_S), until_s=last_s))["all"]
    return float(met[has].mean())


def is_worse(before: list[float], after: list[float]) -> bool:
    """Whether it is certain by the seeds that the second is less."""
    gains = [b - a for a, b in zip(before, after, strict=True)]
    found = interval(gains)
    return fmean(gains) < 0 and (found is None or found[1] < 0)


@routers
def test_telling_an_slo_never_makes_it_worse(name: str) -> None:
    first, told = (day(name, 0, 14, 4, factor).requests["replica"] for factor in (0.0, 1.5))
    if (first == told).all():
        return  # it does not look at SLOs
    untold = [day(name, seed, 14, 4) for seed in SEEDS]
    for factor in FACTORS:
        known = [day(name, seed, 14, 4, factor) for seed in SEEDS]
        before, after = ([attainment(each, factor) for each in some] for some in (untold, known))
        assert not is_worse(before, after), (factor, before, after)


@pytest.mark.parametrize("factor", FACTORS)
def test_an_slo_of_the_file_is_that_of_the_header(factor: float) -> None:
    by_file, by_header = (day("headway", 0, 14, 2, factor, by) for by in ("file", "header"))
    assert (by_file.requests["replica"] == by_header.requests["replica"]).all()


@pytest.mark.sampled(2)
@routers
def test_one_more_replica_never_makes_it_worse(name: str) -> None:
    two, four = ([attainment(day(name, seed, 14, num, 1.5), 1.5) for seed in SEEDS[:3]] for num in (2, 4))
    assert not is_worse(two, four), (two, four)


def test_one_more_replica_of_a_slower_kind_never_makes_it_worse() -> None:
    """Only a router that knows how fast replicas are can do that: on an L40S, long prompts are late."""
    alone, both = (
        [attainment(day("headway", seed, 20, 1, 0.7, "file", gpus), 0.7) for seed in SEEDS]
        for gpus in (("h100-80gb-sxm",), ("h100-80gb-sxm", "l40s"))
    )
    assert not is_worse(alone, both), (alone, both)


TIMES = LinearTimes(5e-5, 0.004, 2e-5, 4e-8)
LONG_TOKENS = 3000
LOAD_BLIND = {
    "round-robin": "takes turns",
    "random": "draws",
    "preble": "counts what it has placed itself, and not what is left of it",
}
"""Routers that do not look at the load of a replica, and why."""


@routers
@pytest.mark.parametrize("factor", FACTORS)
def test_an_idle_replica_that_meets_the_slo_is_preferred(name: str, factor: float) -> None:
    """After ten seconds in which short prompts went to either replica; one of them is twice the SLO behind now."""
    slo_s = factor * (0.004 + 5e-5 * LONG_TOKENS)
    late = FakeReplica(
        0,
        times=TIMES,
        num_in_flight=12,
        num_running=4,
        num_waiting=8,
        kv_blocks_used=800,
        kv_blocks_total=20_000,
        prefill_tokens_left=int(2 * slo_s / 5e-5),
    )
    idle = FakeReplica(1, times=TIMES, kv_blocks_total=20_000)

    def choice(slo_ttft_s: float | None) -> int:
        one = router(name)()
        for i in range(80):
            empty = FakeReplica(i % 2, times=TIMES, kv_blocks_total=20_000)
            short = FakeRequest(id=i, prompt_tokens=300, slo_ttft_s=slo_ttft_s)
            one.route(short, FakeFleet([empty], now=i / 8))
        request = FakeRequest(id=80, prompt_tokens=LONG_TOKENS, slo_ttft_s=slo_ttft_s)
        return one.route(request, FakeFleet([late, idle], now=10.0)).replica

    if name in LOAD_BLIND:
        assert choice(slo_s) == choice(None)
    else:
        assert choice(slo_s) == 1
