"""The checks of scalers pass a sound scaler and catch broken ones."""

from __future__ import annotations

from typing import Any

import pytest

from headway.testing import BrokenPolicyError, check_scaler, scaler_reads


class AsManyAsBusy:
    """Sound: a replica for each one that is not idle."""

    interval_s: Any = 60

    def scale(self, view: Any) -> Any:
        return {
            pool.name: min(max(sum(r.num_in_flight > 0 for r in pool.replicas), pool.min_replicas), pool.max_replicas)
            for pool in view.pools
        }


class Never(AsManyAsBusy):
    interval_s = None


class TooMany(AsManyAsBusy):
    def scale(self, view: Any) -> Any:
        return {pool.name: pool.max_replicas + 1 for pool in view.pools}


class HalfAReplica(AsManyAsBusy):
    def scale(self, view: Any) -> Any:
        return {pool.name: pool.min_replicas + 0.0 for pool in view.pools}


class NamesNoPool(AsManyAsBusy):
    def scale(self, view: Any) -> Any:
        return {"nowhere": 1}


class SaysACount(AsManyAsBusy):
    def scale(self, view: Any) -> Any:
        return 3


class Drifts(AsManyAsBusy):
    calls: list[int] = []  # noqa: RUF012 - the mistake that the check is for

    def scale(self, view: Any) -> Any:
        self.calls.append(1)
        return {p.name: min(p.min_replicas + len(self.calls) // 7 % 2, p.max_replicas) for p in view.pools}


class Forgets(AsManyAsBusy):
    count = 0

    def __getstate__(self) -> dict[str, Any]:
        return {"count": 0}

    def scale(self, view: Any) -> Any:
        self.count += 1
        return {p.name: min(p.min_replicas + self.count // 5 % 2, p.max_replicas) for p in view.pools}


class KeepsAPool(AsManyAsBusy):
    def scale(self, view: Any) -> Any:
        self.pools = list(view.pools)
        return {}


class DropsAReplica(AsManyAsBusy):
    def scale(self, view: Any) -> Any:
        for pool in view.pools:
            pool.replicas.reverse()
        return {}


class Foresees(AsManyAsBusy):
    def scale(self, view: Any) -> Any:
        return {p.name: p.min_replicas for p in view.pools if sum(r.output_tokens_left for r in p.replicas) > 0}


@pytest.mark.ci
def test_a_sound_scaler_passes() -> None:
    check_scaler(AsManyAsBusy)
    assert {"pool.min_replicas", "replica.num_in_flight"} <= scaler_reads(AsManyAsBusy)


@pytest.mark.parametrize(
    ("scaler", "says"),
    [
        (Never, "interval_s is None"),
        (TooMany, "it may have"),
        (HalfAReplica, "it may have"),
        (NamesNoPool, "scales pool 'nowhere'"),
        (SaysACount, "returns counts by pool"),
        (Drifts, "decided differently"),
        (Forgets, "some of its state was lost"),
        (KeepsAPool, "may not keep a view|kept a view"),
        (DropsAReplica, "changed pool.replicas"),
        (Foresees, "replica.output_tokens_left, which only"),
    ],
)
def test_a_broken_scaler_is_caught(scaler: Any, says: str) -> None:
    with pytest.raises(BrokenPolicyError, match=says):
        check_scaler(scaler)
