"""Replicas by target utilisation: what the load asks for, and when it is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fakes import FakePool, FakePools, FakeReplica
from headway import scenario
from headway.config.strict_yaml import Places
from headway.core.errors import HeadwayError
from headway.policies.scaling.target_utilization import TargetUtilizationScaler


def pool(*uses: float, **given: Any) -> FakePool:
    """Replicas that use these shares of their KV caches, and have 10 requests for each 10%."""
    replicas = [
        FakeReplica(i, combo=i, kv_blocks_used=round(1000 * use), num_in_flight=round(100 * use))
        for i, use in enumerate(uses)
    ]
    return FakePool(replicas=replicas, **{"max_replicas": 20, **given})


def wanted(scaler: TargetUtilizationScaler, pool: FakePool, now: float = 0.0) -> int | None:
    return scaler.scale(FakePools([pool], now)).get("main")


def test_out_in_proportion_to_the_load() -> None:
    scaler = TargetUtilizationScaler(kv_use=0.5)
    assert wanted(scaler, pool(0.9, 0.9, 0.6)) == 5  # 3 * 0.8 / 0.5 = 4.8
    assert wanted(scaler, pool(0.9, 0.9, max_replicas=3)) == 3


def test_the_most_that_any_target_asks_for() -> None:
    assert wanted(TargetUtilizationScaler(kv_use=0.5, in_flight=20), pool(0.6, 0.6)) == 6  # 60 requests each
    assert wanted(TargetUtilizationScaler(kv_use=None, in_flight=40), pool(0.6, 0.6)) == 3


def test_who_waits_in_front_counts_as_if_it_were_there() -> None:
    """KV cache in use does not tell: with a window of few requests to a replica it is never full."""
    assert wanted(TargetUtilizationScaler(kv_use=0.5), pool(0.1, 0.1)) == 1
    assert wanted(TargetUtilizationScaler(kv_use=0.5), pool(0.1, 0.1, num_queued=1)) == 5  # full, and a little more
    assert wanted(TargetUtilizationScaler(kv_use=0.5), pool(0.1, 0.1, num_queued=20)) == 8
    assert wanted(TargetUtilizationScaler(kv_use=None, in_flight=10), pool(0.1, 0.1, num_queued=20)) == 4
    assert wanted(TargetUtilizationScaler(kv_use=None, in_flight=10), pool(0.0, 0.0, num_queued=20)) is None
    assert wanted(TargetUtilizationScaler(kv_use=0.5), pool(0.0, 0.0, num_queued=20)) == 4
    pools = [pool(0.1, name="a", num_queued=20), pool(0.1, name="b", num_queued=20)]
    assert TargetUtilizationScaler(kv_use=None, in_flight=10).scale(FakePools(pools, 0.0)) == {"a": 2, "b": 2}


def test_nothing_within_the_tolerance() -> None:
    assert wanted(TargetUtilizationScaler(kv_use=0.5), pool(0.54, 0.55)) is None
    assert wanted(TargetUtilizationScaler(kv_use=0.5, tolerance=0.0), pool(0.54, 0.55)) == 3


def test_what_starts_is_not_asked_for_twice() -> None:
    assert wanted(TargetUtilizationScaler(kv_use=0.5), pool(1.0, 1.0, num_starting=2)) is None
    assert wanted(TargetUtilizationScaler(kv_use=0.5), pool(1.0, 1.0, num_starting=1)) == 4


def test_down_to_the_highest_of_the_window() -> None:
    scaler = TargetUtilizationScaler(kv_use=0.5, stabilization_s=60.0)
    assert wanted(scaler, pool(0.5, 0.5, 0.5, 0.5), 0.0) is None  # asks for 4
    assert wanted(scaler, pool(0.3, 0.3, 0.3, 0.3), 30.0) is None  # asks for 3, but 4 were lately
    assert wanted(scaler, pool(0.1, 0.1, 0.1, 0.1), 59.0) is None
    assert wanted(scaler, pool(0.1, 0.1, 0.1, 0.1), 61.0) == 3
    assert wanted(scaler, pool(0.1, 0.1, 0.1), 121.0) == 1


def test_the_last_one_stays() -> None:
    scaler = TargetUtilizationScaler(stabilization_s=0.0)
    assert wanted(scaler, pool(0.0, 0.0, min_replicas=0)) == 1
    assert wanted(scaler, pool(0.0, 0.0, 0.0, min_replicas=2)) == 2


def test_a_cooldown_after_each_step() -> None:
    scaler = TargetUtilizationScaler(kv_use=0.5, cooldown_s=100.0)
    assert wanted(scaler, pool(1.0), 0.0) == 2
    assert wanted(scaler, pool(1.0, 1.0), 99.0) is None
    assert wanted(scaler, pool(1.0, 1.0), 100.0) == 4


def test_who_drains_does_not_count() -> None:
    busy = pool(0.5, 1.0)
    busy.replicas[1].is_draining = True
    assert wanted(TargetUtilizationScaler(kv_use=0.5), busy) is None


def test_combos_count_as_one_and_by_the_role_that_uses_more() -> None:
    parts = [FakeReplica(0, role="prefill"), FakeReplica(1, role="decode", kv_blocks_used=900, num_in_flight=30)]
    combo = Combos(replicas=parts)
    assert wanted(TargetUtilizationScaler(kv_use=0.5), combo) == 2
    assert wanted(TargetUtilizationScaler(kv_use=None, in_flight=10), combo) == 3


class Combos(FakePool):
    num_serving = 1


def test_needs_a_target() -> None:
    with pytest.raises(HeadwayError, match="a target for at least one"):
        TargetUtilizationScaler(kv_use=None)


def test_a_queue_in_front_of_replicas_that_are_never_full_is_seen() -> None:
    """Four requests to a replica use next to none of its KV cache, and more come than four at a time can serve."""
    document = {
        "workload": {
            "arrivals": {"kind": "poisson", "rate": 4.0},
            "num_requests": 800,
            "prompt_tokens": 200,
            "output_tokens": 200,
        },
        "fleet": [{"model": "llama-3.1-8b", "gpu": "a100-80gb", "replicas": 1, "max_replicas": 6, "start_s": 5}],
        "policies": {
            "ordering_at": "gateway",
            "window": 4,
            "scaling": {"name": "target-utilization", "kv_use": 0.5, "interval_s": 5},
        },
    }
    done = scenario.run(scenario.assemble(document, Places(), Path()))
    assert 2 < len(done.records.replicas) <= 6
    assert done.summary.kv_use is not None and done.summary.kv_use.mean < 0.1
