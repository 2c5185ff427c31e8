"""Stretches against stepping every iteration: the same decisions, tokens and times, to the last bit."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from headway import catalog
from headway.control.observe import Scrape
from headway.core.fleet import Engine, Fault, Pool
from headway.core.request import Segment
from simulation import (
    ORDERING_MAKERS,
    ROUTER_MAKERS,
    ByAge,
    Demoting,
    Scenario,
    assert_agree,
    num_examples,
    pairs,
    pool,
    request,
    scenarios,
    seconds,
)


@pytest.mark.ci
@settings(
    max_examples=num_examples(200),
    derandomize="HEADWAY_FUZZ_EXAMPLES" not in os.environ,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # to shrink one takes minutes
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(scenarios())
def test_stretches_change_nothing(scenario: Scenario) -> None:
    assert_agree(scenario)


# Every policy, under pressure.


def busy(num_requests: int = 70, **given: Any) -> Scenario:
    """Two replicas with too little memory, one of which crashes; requests of every kind."""
    rng = np.random.default_rng(5)
    arrivals_s = np.cumsum(rng.exponential(0.04, num_requests))
    requests = tuple(
        request(
            i,
            float(arrivals_s[i]),
            int(rng.integers(1, 200)),
            int(rng.integers(1, 120)),
            tier=int(rng.integers(0, 3)),
            reasoning_tokens=0,
            session_id=int(rng.integers(0, 6)),
            timeout_s=4.0 if i % 9 == 0 else None,
        )
        for i in range(num_requests)
    )
    engine = {"max_num_seqs": 12, "max_num_batched_tokens": 128, "kv_capacity_tokens": 1000}
    faults = (Fault(1.5, 1, 1.0),)
    return Scenario(requests, (pool(replicas=2, **engine),), faults=faults, **given)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("router", "ordering"),
    pairs(ROUTER_MAKERS, ORDERING_MAKERS, lambda maker: getattr(maker, "__name__", str(maker))),
)
def test_every_pair_of_policies(router: Callable[[], Any], ordering: Callable[[], Any]) -> None:
    records = assert_agree(busy(router=router, ordering=ordering))
    assert records.requests["preemptions"].sum() > 0
    assert (records.requests["attempts"] > 1).any()
    assert (records.stretches["iterations"] > 1).any()


@pytest.mark.parametrize("ordering", [ByAge, Demoting])
@pytest.mark.parametrize("at", ["gateway", "both"])
def test_moving_ranks_in_front_of_the_replicas(ordering: Callable[[], Any], at: str) -> None:
    assert_agree(busy(ordering=ordering, ordering_at=at, window=8))


def test_views_that_are_stale() -> None:
    assert_agree(busy(router=ROUTER_MAKERS[-3], scrape=Scrape(0.1, 0.03, 0.3)))


@pytest.mark.parametrize("model", ["llama-3.1-8b", "gpt-oss-20b", "mixtral-8x7b"])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_measured_step_times(model: str, preemption: Any) -> None:
    engine = Engine("vllm-0.15", max_num_seqs=20, preemption=preemption, host_memory_bytes=1e9)
    fleet = (Pool("main", catalog.model(model), catalog.gpu("h200"), engine, kv_capacity_tokens=1500),)
    scenario = busy(line=None)
    records = assert_agree(Scenario(scenario.requests, fleet, ordering=Demoting, line=None))
    assert records.requests["preemptions"].sum() > 0


# Cases that once told the two apart.


def test_the_cached_prefix_of_who_waits_is_evicted() -> None:
    # 20 blocks. Request 0 leaves 10 cached ones behind. Request 1 decodes and, once request 2 has left 3 free
    # blocks, takes a cached one every 16 ticks. Request 3 hits what is cached, and wants 3 blocks more: with
    # each block evicted it wants one less, so that it may fit after a tick that found no room for it.
    requests = (
        request(0, 0.0, 160, 1, prefix=(Segment(1, 160),)),
        request(1, 4.0, 96, 100),
        request(2, 15.0, 40, 7),
        request(3, 16.0, 260, 5, prefix=(Segment(1, 160), Segment(7, 100))),
    )
    small = pool(prefix_caching=True, max_num_batched_tokens=40, kv_capacity_tokens=320)
    records = assert_agree(Scenario(requests, (small,), line=seconds(1.0)))
    assert (records.requests["outcome"] == 0).all()
