"""The checks of migration policies pass a sound policy and catch broken ones."""

from __future__ import annotations

import time
from random import Random
from typing import Any

import pytest

from headway.core.decision import Move
from headway.testing import BrokenPolicyError, check_migration, migration_reads


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


@pytest.mark.ci
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
        (MovesTwice, "already being moved"),
        (MovesTheMoving, "already being moved"),
        (FillsTheDraining, "accepts no requests"),
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
