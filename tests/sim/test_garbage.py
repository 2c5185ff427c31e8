"""A run's replicas and requests are freed with it: the garbage collector takes longer to find thousands of them than
they take to be freed."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from headway.control.observe import Scrape
from headway.control.policies import Policies
from headway.core.fleet import Fault, Fleet
from headway.policies import ROUTERS
from headway.policies.ordering.fcfs import FcfsOrdering
from headway.sim.cluster import simulate
from headway.workload.sources import TraceSource
from reference_cycles import left_over
from simulation import Breathing, Patient, Restless, Scenario, pool, request, sloped, workload

FREED = {"Replica", "Batch", "KvCache", "PrefixCache", "Timeline", "SimulatedView", "ScrapedReplica", "Member", "Live"}

REQUESTS = tuple(request(i, 0.01 * i, 30, 10) for i in range(60))


def test_no_part_of_a_replica_waits_for_the_garbage_collector() -> None:
    given: list[dict[str, Any]] = [
        *({"router": ROUTERS[name]} for name in ("least-kv", "headway", "lmetric", "pascal")),
        {"scrape": Scrape(0.125, 0.0625, 0.2)},
        {"until_s": 0.3},
        {"migration": Restless},
        {"admission": Patient},
        {"scaler": Breathing},
        {"concurrency": 4},
        {"faults": (Fault(0.1, 0, 0.2), Fault(0.3, 1))},
    ]
    left_over()
    gc.disable()
    try:
        for changes in given:
            cluster = (scenario := Scenario(REQUESTS, (pool(replicas=30),), **changes)).cluster()
            scenario.run(cluster)
            cluster.close()
            del cluster
            found = left_over()
            assert not found.keys() & FREED, (changes, found)
    finally:
        gc.enable()


def test_nor_does_it_where_a_run_ends_early() -> None:
    """As rehearsals do whose verdict is certain."""

    def end(now_s: float, num: int) -> None:
        raise EndError

    fleet, policies = Fleet((pool(replicas=30),)), Policies(ROUTERS["headway"], FcfsOrdering)
    left_over()
    gc.disable()
    try:
        with pytest.raises(EndError):
            simulate(fleet, TraceSource(workload(REQUESTS)), policies, seed=0, progress=end, line=sloped)
        assert not (found := left_over()).keys() & FREED, found
    finally:
        gc.enable()


class EndError(Exception):
    pass
