"""Moves: which of those that a policy asks for begin."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from control_fakes import Fleet, fleet
from headway.control.live import DECODING, PAUSED, Live
from headway.core.decision import Move
from headway.core.errors import HeadwayError
from headway.core.view import FleetView, RequestView


class Asking:
    """A migration policy that asks for what the test says."""

    interval_s = 1.0
    wanted: Sequence[Move] = ()
    offered: Sequence[int] = ()

    def moves(self, view: FleetView) -> Sequence[Move]:
        return self.wanted

    def at_phase(self, request: RequestView, view: FleetView) -> Move | None:
        self.offered = [replica.id for replica in view.replicas]
        return next(iter(self.wanted), None)


def asking(*wanted: Move) -> tuple[Fleet, Asking, Live]:
    """Three replicas, and a request that decodes at replica 0."""
    policy = Asking()
    policy.wanted = wanted
    run = fleet("mixed", "mixed", "mixed", migration=lambda: policy)
    live = run.arrive(0)
    live.stage = DECODING
    run.effects.replicas[0].requests = [live]  # type: ignore[list-item]
    return run, policy, live


def tick(run: Fleet) -> None:
    for ticking in run.control.parts.ticking():
        ticking.tick(1.0)


def test_a_move_begins_on_a_tick() -> None:
    run, _, _ = asking(Move(0, 2, stage_blocks=8))
    tick(run)
    assert run.effects.moved == [(0, 2, 8)]


@pytest.mark.parametrize("move", [Move(5, 1), Move(0, 0)])
def test_moves_of_unknown_requests_and_to_the_same_replica_do_not_begin(move: Move) -> None:
    run, _, _ = asking(move)
    tick(run)
    assert run.effects.moved == []


def test_a_request_moves_once_at_a_time() -> None:
    run, _, live = asking(Move(0, 1))
    live.move = object()
    tick(run)
    live.move = None
    live.stage = PAUSED
    tick(run)
    assert run.effects.moved == []


def test_no_request_moves_to_a_draining_replica() -> None:
    run, _, _ = asking(Move(0, 1))
    run.service.members[1].is_draining = True
    tick(run)
    assert run.effects.moved == []


def test_a_target_must_belong_to_the_service() -> None:
    run, _, _ = asking(Move(0, 9))
    with pytest.raises(HeadwayError, match="migration Asking chose replica 9, which llama has not"):
        tick(run)


def test_the_end_of_reasoning_offers_the_replicas_with_room_and_its_own() -> None:
    run, policy, live = asking(Move(0, 2))
    run.service.members[0].is_draining = True
    run.service.members[1].max_tokens = 3
    run.control.on_phase_changed(live, 1.0)
    assert policy.offered == [0, 2] and run.effects.moved == [(0, 2, None)]


def test_a_completed_move_is_counted() -> None:
    run, _, live = asking()
    run.control.on_moved(live, 2.0)
    assert live.moves == 1
