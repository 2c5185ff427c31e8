"""The checks of migration policies and scalers: registered ones hold to them, and broken ones are caught."""

from __future__ import annotations

import time
from random import Random
from typing import Any

import pytest

from headway.core.decision import Move
from headway.testing.conformance_migration import check_migration, migration_reads
from headway.testing.conformance_scaler import check_scaler, scaler_reads
from headway.testing.strict_views import BrokenPolicyError

# Migration.


def elsewhere(request: Any, view: Any) -> int | None:
    return next((r.id for r in view.replicas if r.id != request.replica and not r.is_draining), None)


class Away:
    """Sound: each request elsewhere, when its reasoning ends and when asked."""

    interval_s: Any = 1.0

    def moves(self, view: Any) -> Any:
        placed = [one for replica in view.replicas for one in replica.requests if not one.is_moving]
        return [Move(one.id, to) for one in placed if (to := elsewhere(one, view)) is not None]

    def at_phase(self, request: Any, view: Any) -> Any:
        to = elsewhere(request, view)
        return None if to is None else Move(request.id, to, stage_blocks=8)


class NoInterval(Away):
    interval_s = 0


class MovesStrangers(Away):
    def at_phase(self, request: Any, view: Any) -> Any:
        return Move(request.id + 1, view.replicas[0].id)


class MovesGhosts(Away):
    def moves(self, view: Any) -> Any:
        return [Move(10**9, view.replicas[0].id)]


class StaysByMoving(Away):
    def at_phase(self, request: Any, view: Any) -> Any:
        return Move(request.id, request.replica)


class MovesTwice(Away):
    def moves(self, view: Any) -> Any:
        return [*super().moves(view), *super().moves(view)]


class MovesTheMoving(Away):
    def moves(self, view: Any) -> Any:
        placed = [one for replica in view.replicas for one in replica.requests]
        return [Move(one.id, to) for one in placed if (to := elsewhere(one, view)) is not None]


class FillsTheDraining(Away):
    def moves(self, view: Any) -> Any:
        draining = [r.id for r in view.replicas if r.is_draining]
        placed = [one for replica in view.replicas for one in replica.requests if not one.is_moving]
        return [Move(one.id, to) for one in placed[:1] for to in draining[:1] if to != one.replica]


class SaysAReplica(Away):
    def at_phase(self, request: Any, view: Any) -> Any:
        return elsewhere(request, view)


class StagesNothing(Away):
    def at_phase(self, request: Any, view: Any) -> Any:
        to = elsewhere(request, view)
        return None if to is None else Move(request.id, to, stage_blocks=0)


class KnowsLengths(Away):
    def at_phase(self, request: Any, view: Any) -> Any:
        return None if request.reasoning_tokens > 100 else super().at_phase(request, view)


class KnowsOthersLengths(Away):
    def moves(self, view: Any) -> Any:
        return [Move(one.id, -1) for r in view.replicas for one in r.requests if one.output_tokens < 0]


class KeepsARequest(Away):
    def moves(self, view: Any) -> Any:
        self.kept = [one for replica in view.replicas for one in replica.requests]
        return ()


class ShufflesInPlace(Away):
    def at_phase(self, request: Any, view: Any) -> Any:
        view.replicas.reverse()
        return None


class LooksAtTheClock(Away):
    def moves(self, view: Any) -> Any:
        return () if time.time() > 0 else None


class Dice(Away):
    def at_phase(self, request: Any, view: Any) -> Any:
        return None if Random().random() < 0.5 else super().at_phase(request, view)


def test_a_sound_migration_passes() -> None:
    check_migration(Away)
    assert {"placed.is_moving", "request.replica", "replica.is_draining"} <= migration_reads(Away)


@pytest.mark.parametrize(
    ("migration", "says"),
    [
        (NoInterval, "interval_s is 0"),
        (MovesStrangers, "not the one whose phase changed"),
        (MovesGhosts, "at no replica"),
        (StaysByMoving, "to its own replica"),
        (MovesTwice, "that is being moved"),
        (MovesTheMoving, "that is being moved"),
        (FillsTheDraining, "takes nothing"),
        (SaysAReplica, "returns a Move"),
        (StagesNothing, "stage_blocks is 0"),
        (KnowsLengths, "request.reasoning_tokens, which only"),
        (KnowsOthersLengths, "placed.output_tokens, which only"),
        (KeepsARequest, "may not keep a view|kept a view"),
        (ShufflesInPlace, "changed view.replicas"),
        (LooksAtTheClock, "used time.time"),
        (Dice, "without a seed|decided differently"),
    ],
)
def test_a_broken_migration_is_caught(migration: Any, says: str) -> None:
    with pytest.raises(BrokenPolicyError, match=says):
        check_migration(migration)


# Scalers.


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
        (DropsAReplica, "changed view.pools"),
        (Foresees, "replica.output_tokens_left, which only"),
    ],
)
def test_a_broken_scaler_is_caught(scaler: Any, says: str) -> None:
    with pytest.raises(BrokenPolicyError, match=says):
        check_scaler(scaler)
