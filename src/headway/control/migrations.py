"""Moves of requests between replicas: calls the migration policy and begins the possible moves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import cast

from headway.control.decisions import DecisionObserver
from headway.control.live import DECODING, WAITING, Live
from headway.control.observe import MutableFleetView
from headway.control.service import Service
from headway.core.decision import Move
from headway.core.errors import HeadwayError, unusable
from headway.core.policy import Migration
from headway.core.view import ReplicaView

BeginMove = Callable[[Live, int, "int | None", float], None]
"""`Effects.move`: (request, target, blocks per stage, now)."""


class Migrations:
    """One service's migration policy and its view."""

    def __init__(
        self,
        service: Service,
        policy: Migration,
        view: MutableFleetView,
        begin: BeginMove,
        observer: DecisionObserver | None = None,
    ) -> None:
        self.service = service
        self.policy = policy
        self.interval_s = policy.interval_s
        self._view = view
        self._begin = begin
        self._observer = observer

    def at_phase(self, live: Live, now: float) -> None:
        """Ask whether a request that has just finished its reasoning should move; if so, begin the move."""
        tokens = live.prompt_tokens + live.output_tokens
        able = [m.view for m in self.service.members if m.can_serve(tokens, live.lora) or m.view.id == live.replica]
        move = self.policy.at_phase(live, self._fill_view(able, now))
        if move is not None:
            self._try_move(live, self._checked("at_phase", move, "a Move, or None"), now)

    def tick(self, now: float) -> None:
        """Ask the policy for moves and begin them."""
        up = self.service.up_views()
        if len(up) < 2:
            return
        returned: object = self.policy.moves(self._fill_view(up, now))
        if not returned:
            return
        expected = "a list of Moves, which may be empty"
        if not isinstance(returned, Iterable):
            raise unusable(self.policy, "moves", returned, expected)
        moves = [self._checked("moves", each, expected) for each in returned]
        ids = {move.request for move in moves}
        lives = {request.id: request for replica in up for request in replica.requests if request.id in ids}
        for move in moves:
            self._try_move(cast(Live, lives.get(move.request)), move, now)

    def _fill_view(self, replicas: list[ReplicaView], now: float) -> MutableFleetView:
        view = self._view
        view.now, view.replicas = now, replicas
        return view

    def _checked(self, method: str, move: object, expected: str) -> Move:
        if not isinstance(move, Move):
            raise unusable(self.policy, method, move, expected)
        return move

    def _try_move(self, live: Live | None, move: Move, now: float) -> None:
        """Begin a move if it is possible. Raises HeadwayError if the service has no such target."""
        target = self.service.member(move.target)
        if target is None:
            name = type(self.policy).__name__
            raise HeadwayError(f"migration {name} chose replica {move.target!r}, which {self.service.model} has not")
        if live is None or live.move is not None or live.stage not in (DECODING, WAITING):
            return
        if not target.can_serve(live.prompt_tokens + live.output_tokens, live.lora) or move.target == live.replica:
            return
        if self._observer is not None:
            self._observer.record_migration(live, move, self.service.up_views(), now)
        self._begin(live, move.target, move.stage_blocks, now)
