"""Where replicas come from and what lies between regions, as distributions: SageServe's sections 2.3 and 7.1."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from msgspec import ValidationError, convert

from headway import catalog
from headway.core.fleet import Fleet, Network, Pool, Provisioning
from headway.sim.provisioning import InstanceSources

PAPER = Provisioning(reclaim_s=60.0, redeploy_s=600.0, acquire_s=600.0, reclaim_max_s=300.0, remote_s=7200.0)


def pool(region: str, model: str, replicas: int) -> Pool:
    gpu, engine = catalog.gpu("h100-80gb"), catalog.engine("simulated")
    return Pool(f"{region} {model}", catalog.model(model), gpu, engine, replicas=replicas, region=region)


HERE, THERE, OTHER = pool("east", "llama-3.1-8b", 1), pool("west", "llama-3.1-8b", 0), pool("west", "llama-3.2-3b", 1)


def sources(provisioning: Provisioning = PAPER, seed: int = 0) -> InstanceSources:
    return InstanceSources(Fleet((HERE, THERE, OTHER), provisioning=provisioning), seed)


def reclaimed(seed: int = 0, config: Provisioning = PAPER) -> list[float]:
    found = sources(config, seed)
    for replica in range(1000):
        found.give_back(replica, HERE)
    return [found.acquire(1000 + i, HERE, 0.0) for i in range(1000)]


def test_a_spot_instance_takes_a_minute_in_the_median_and_five_at_most() -> None:
    taken_s = reclaimed()
    assert np.median(taken_s) == pytest.approx(60, rel=0.1)
    assert 150 < max(taken_s) <= 300 and min(taken_s) > 0


def test_reclaim_times_belong_to_seeds_and_replicas() -> None:
    assert reclaimed(1) == reclaimed(1) != reclaimed(2)
    assert set(reclaimed(config=Provisioning())) == {60.0}


def test_the_first_of_a_model_in_a_region_waits_for_its_weights_and_so_do_others() -> None:
    found = sources()
    assert found.acquire(10, HERE, 0.0) == 600.0
    assert found.acquire(11, THERE, 100.0) == 7200.0
    assert found.acquire(12, THERE, 5100.0) == 2200.0
    assert found.acquire(13, THERE, 7000.0) == 600.0  # weights are there before the machine is
    assert found.acquire(14, THERE, 9000.0) == 600.0
    assert sources(Provisioning(acquire_s=600.0)).acquire(11, THERE, 100.0) == 600.0


def test_latencies_are_the_papers() -> None:
    network = Network(p90_to_median=10.0)
    seconds = np.array([network.varied_s(0.05, Random(i).gauss(0.0, 1.0)) for i in range(20_000)])
    assert np.median(seconds) == pytest.approx(0.05, rel=0.05)
    assert np.mean(seconds < 0.5) == pytest.approx(0.9, abs=0.01)
    assert 0 < np.mean(seconds >= 2.5) < 0.02 and seconds.max() == 2.5


def test_without_a_spread_all_are_alike() -> None:
    assert Network().varied_s(0.05, 2.0) == 0.05
    assert Network(longest_s=1.0).varied_s(3.0, -1.0) == 3.0  # a pair that is farther is no shorter for it


@pytest.mark.parametrize("changes", [{"p90_to_median": 0.5}, {"longest_s": 0}])
def test_no_such_network(changes: dict[str, float]) -> None:
    with pytest.raises(ValidationError, match="p90_to_median, longest_s"):
        convert(changes, Network)


@pytest.mark.parametrize("changes", [{"reclaim_max_s": 30}, {"remote_s": -1}])
def test_no_such_provisioning(changes: dict[str, float]) -> None:
    with pytest.raises(ValidationError, match="expected"):
        convert(changes, Provisioning)
