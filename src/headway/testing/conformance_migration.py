"""What every migration policy must hold to, your own as well: `check_migration(MyMigration)`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import Any

from headway.core.decision import Move
from headway.core.policy import Migration
from headway.testing.purity import nothing_outside
from headway.testing.stories import Step, draw_migration_story
from headway.testing.strict_views import BrokenPolicyError, Visit, fleet_view, request_view
from headway.testing.trial import SEEDS, check_let_go, is_oracle, learn, pickled, wrong_interval

MakeMigration = Callable[[], Migration]
Decisions = tuple[Sequence[Move], Move | None]
"""At one moment: of `moves`, and of `at_phase`."""


def check_migration(make: MakeMigration, seeds: Iterable[int] = SEEDS) -> None:
    """Every check of a migration policy, over stories drawn from these seeds."""
    for seed in seeds:
        for check in MIGRATION_CHECKS:
            check(make, seed)


def migration_reads(make: MakeMigration, seeds: Iterable[int] = range(20)) -> set[str]:
    """What a migration policy was seen to read, such as `placed.is_running` of one of `replica.requests`."""
    reads: set[str] = set()
    for seed in seeds:
        _play(make(), draw_migration_story(seed), Random(seed), reads)
    return reads


def says_how_often_to_ask(make: MakeMigration, seed: int) -> None:
    """`interval_s` is seconds, or None."""
    interval_s = getattr(make(), "interval_s", "")
    if interval_s is not None and wrong_interval(interval_s):
        raise BrokenPolicyError(f"interval_s is {interval_s!r}; it must be seconds, more than 0, or None")


def moves_what_can_move(make: MakeMigration, seed: int) -> None:
    """Requests that are there and not on the move, to other replicas that take requests."""
    steps = draw_migration_story(seed)
    for step, (begun, turned) in zip(steps, _play(make(), steps, Random(seed)), strict=True):
        seen: set[int] = set()
        for move in begun:
            _check_move(move, step, seen)
        if turned is not None:
            if turned.request != step.request["id"]:
                raise BrokenPolicyError(f"at_phase moves request {turned.request}, not the one whose phase changed")
            _check_move(turned, step, set())


def decides_the_same_again(make: MakeMigration, seed: int) -> None:
    """The same views and the same random stream lead to the same decisions."""
    steps = draw_migration_story(seed)
    first, second = (_play(make(), steps, Random(seed)) for _ in range(2))
    if first != second:
        raise BrokenPolicyError("decided differently on the same views with the same random stream")


def survives_pickling(make: MakeMigration, seed: int) -> None:
    """A copy of it, made when fresh or in mid-run, goes on as the original does."""
    steps = draw_migration_story(seed)
    middle = len(steps) // 2
    migration = pickled(make())
    _play(migration, steps[:middle], Random(seed))
    copy = pickled(migration)
    if _play(migration, steps[middle:], Random(1)) != _play(copy, steps[middle:], Random(1)):
        raise BrokenPolicyError("decides differently once it was pickled and unpickled: some of its state was lost")


def leaves_views_alone(make: MakeMigration, seed: int) -> None:
    """It neither changes what it is shown nor keeps it."""
    migration, random = make(), Random(seed)
    for step in draw_migration_story(seed, num_steps=12):
        learn(migration, step.ended)
        visit = Visit(is_oracle(migration))
        view = fleet_view(step.now, random, list(step.replicas), visit)
        request = request_view(step.request, visit, placed=True)
        shown: list[Any] = list(view.replicas)
        if migration.interval_s is not None:
            migration.moves(view)
        migration.at_phase(request, view)
        if list(map(id, view.replicas)) != list(map(id, shown)):
            raise BrokenPolicyError("changed view.replicas: sort a copy instead")
        shown += [one for replica in view.replicas for one in replica.requests]
        kept = [weakref.ref(one) for one in (view, request, *shown)]
        del view, request, shown
        check_let_go(kept)


def reaches_for_nothing_else(make: MakeMigration, seed: int) -> None:
    """No clock, no environment, no I/O, no randomness but `view.random`."""
    migration, random = make(), Random(seed)
    for step in draw_migration_story(seed, num_steps=20):
        visit = Visit(is_oracle(migration))
        view = fleet_view(step.now, random, list(step.replicas), visit)
        request = request_view(step.request, visit, placed=True)
        with nothing_outside():
            learn(migration, step.ended)
            if migration.interval_s is not None:
                migration.moves(view)
            migration.at_phase(request, view)


MIGRATION_CHECKS: tuple[Callable[[MakeMigration, int], None], ...] = (
    says_how_often_to_ask,
    moves_what_can_move,
    decides_the_same_again,
    survives_pickling,
    leaves_views_alone,
    reaches_for_nothing_else,
)


def _play(
    migration: Migration, steps: Sequence[Step], random: Random, reads: set[str] | None = None
) -> list[Decisions]:
    """The moves that a policy begins; for `at_phase`, of replicas that drain only the request's own is offered."""
    decisions = []
    for step in steps:
        learn(migration, step.ended)
        visit = Visit(is_oracle(migration))
        begun: Sequence[Move] = ()
        if migration.interval_s is not None:
            begun = list(migration.moves(fleet_view(step.now, random, list(step.replicas), visit)))
        view = fleet_view(step.now, random, _offered(step), visit)
        turned = migration.at_phase(request_view(step.request, visit, placed=True), view)
        visit.is_over = True
        if reads is not None:
            reads |= visit.reads
        for move in (*begun, turned):
            if not isinstance(move, Move | None):
                raise BrokenPolicyError(f"returned {move!r}; a migration policy returns a Move")
        decisions.append((begun, turned))
    return decisions


def _offered(step: Step) -> list[Any]:
    own = step.request["replica"]
    return [replica for replica in step.replicas if replica["id"] == own or not replica["is_draining"]]


def _check_move(move: Move, step: Step, seen: set[int]) -> None:
    placed = {one["id"]: one for replica in step.replicas for one in replica["requests"]}
    if move is None or move.request not in placed:
        raise BrokenPolicyError(f"{move!r} moves a request that is at no replica")
    request = placed[move.request]
    if move.request in seen or request["is_moving"]:
        raise BrokenPolicyError(f"{move!r} moves a request that is being moved")
    seen.add(move.request)
    if move.target == request["replica"]:
        raise BrokenPolicyError(f"{move!r} moves a request to its own replica")
    open_to = [replica["id"] for replica in step.replicas if not replica["is_draining"]]
    if move.target not in open_to:
        raise BrokenPolicyError(f"{move!r} has a target that takes nothing; those that do are {open_to}")
    stage = move.stage_blocks
    if stage is not None and (type(stage) is not int or stage < 1):
        raise BrokenPolicyError(f"stage_blocks is {stage!r}; it must be a number of KV blocks, or None")
