"""Checks of migration policies: `check_migration(MyMigration)`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random

from headway.core.decision import Move
from headway.core.policy import Migration
from headway.testing.stories import FleetStep, draw_migration_story
from headway.testing.strict_views import BrokenPolicyError, PolicyCall, fleet_view, request_view
from headway.testing.trial import SEEDS, Check, Make, Trial, check_interval, common_checks, reads_of, run_checks

NUM_STEPS = 60


def check_migration(make: Make, seeds: Iterable[int] = SEEDS) -> None:
    """Run every check of a migration policy on stories drawn with these seeds. Raises BrokenPolicyError."""
    run_checks(MIGRATION_CHECKS, make, seeds)


def migration_reads(make: Make, seeds: Iterable[int] = range(20)) -> set[str]:
    """The attributes that a migration policy reads, such as `placed.is_running` of one of `replica.requests`."""
    return reads_of(MigrationTrial, make, seeds, NUM_STEPS)


class MigrationTrial(Trial[Migration, FleetStep]):
    """A migration policy, called at each step with a tick (unless its interval is None) and with a phase change."""

    @staticmethod
    def draw_story(seed: int, num_steps: int) -> Sequence[FleetStep]:
        return draw_migration_story(seed, num_steps)

    def decide(self, step: FleetStep, call: PolicyCall) -> tuple[Sequence[Move], Move | None]:
        on_tick: Sequence[Move] = ()
        if self.policy.interval_s is not None:
            on_tick = list(self.policy.moves(fleet_view(step.now, self.random, step.replicas, call)))
        # A phase change offers no draining replica but the request's own.
        own = step.request["replica"]
        offered = [replica for replica in step.replicas if replica["id"] == own or not replica["is_draining"]]
        request = request_view(step.request, call, placed=True)
        at_phase = self.policy.at_phase(request, fleet_view(step.now, self.random, offered, call))
        for move in (*on_tick, at_phase):
            if not isinstance(move, Move | None):
                raise BrokenPolicyError(f"returned {move!r}; a migration policy returns a Move")
        return on_tick, at_phase


def states_its_interval_or_none(make: Make, seed: int) -> None:
    """`interval_s` is a number of seconds above 0, or None."""
    interval_s = getattr(make(), "interval_s", "")
    if interval_s is not None:
        check_interval(interval_s, ", or None")


def moves_what_can_move(make: Make, seed: int) -> None:
    """A move is of a placed request that is not moving yet, to another replica that accepts requests."""
    trial = MigrationTrial(make(), Random(seed))
    for step in draw_migration_story(seed, NUM_STEPS):
        on_tick, at_phase = trial.play(step)
        moved: set[int] = set()
        for move in on_tick:
            _check_move(move, step, moved)
        if at_phase is not None:
            if at_phase.request != step.request["id"]:
                raise BrokenPolicyError(f"at_phase moves request {at_phase.request}, not the one whose phase changed")
            _check_move(at_phase, step, set())


MIGRATION_CHECKS: tuple[Check, ...] = (
    states_its_interval_or_none, moves_what_can_move, *common_checks(MigrationTrial, NUM_STEPS),
)  # fmt: skip


def _check_move(move: Move | None, step: FleetStep, moved: set[int]) -> None:
    """Raise BrokenPolicyError if the move cannot be made; `moved` are the requests of the tick's earlier moves."""
    placed = {one["id"]: one for replica in step.replicas for one in replica["requests"]}
    if move is None or move.request not in placed:
        raise BrokenPolicyError(f"{move!r} moves a request that is at no replica")
    request = placed[move.request]
    if move.request in moved or request["is_moving"]:
        raise BrokenPolicyError(f"{move!r} moves a request that is already being moved")
    moved.add(move.request)
    if move.target == request["replica"]:
        raise BrokenPolicyError(f"{move!r} moves a request to its own replica")
    accepting = [replica["id"] for replica in step.replicas if not replica["is_draining"]]
    if move.target not in accepting:
        raise BrokenPolicyError(f"{move!r} has a target that accepts no requests; these do: {accepting}")
    stage = move.stage_blocks
    if stage is not None and (type(stage) is not int or stage < 1):
        raise BrokenPolicyError(f"stage_blocks is {stage!r}; it must be a number of KV blocks, or None")
