"""Scaling on requests, as KEDA does."""

from __future__ import annotations

from fakes import FakePool, FakePools, FakeReplica
from headway.policies.scaling.keda import KedaScaler


def pool(*in_flight: int, **given: int) -> FakePool:
    replicas = [FakeReplica(i, combo=i, num_in_flight=n, num_waiting=n // 2) for i, n in enumerate(in_flight)]
    return FakePool(replicas=replicas, **{"max_replicas": 20, **given})


def wanted(scaler: KedaScaler, each: FakePool, now: float = 0.0) -> int | None:
    return scaler.scale(FakePools([each], now)).get("main")


def test_as_many_as_the_requests_ask_for() -> None:
    assert wanted(KedaScaler(5), pool(10, 14)) == 5
    assert wanted(KedaScaler(5), pool(10, 14, num_queued=10)) == 7
    assert wanted(KedaScaler(5, metric="waiting"), pool(10, 14)) == 3
    assert wanted(KedaScaler(5), pool(10, 14, num_starting=3)) is None
    assert wanted(KedaScaler(5), pool(5, 5)) is None
    assert wanted(KedaScaler(10), pool(10, 11)) is None  # within the tolerance


def test_down_after_the_window_and_never_to_none() -> None:
    scaler = KedaScaler(5)
    assert wanted(scaler, pool(5, 5, 5, 5), 0.0) is None
    assert wanted(scaler, pool(0, 0, 0, 0), 30.0) is None
    assert wanted(scaler, pool(0, 0, 0, 0, min_replicas=0), 301.0) == 1
