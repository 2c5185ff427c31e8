"""Which moves are asked for, and which of them are begun."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from headway.control.live import DECODING, WAITING, Live
from headway.control.observe import View
from headway.control.service import Service
from headway.core.decision import Move
from headway.core.errors import HeadwayError
from headway.core.policy import Migration
from headway.core.view import ReplicaView

Begin = Callable[[Live, int, "int | None", float], None]
"""The driver's: (request, target, blocks a stage, now)."""


class Migrations:
    """One service's migration policy, and its view."""

    def __init__(self, service: Service, policy: Migration, view: View, begin: Begin) -> None:
        self.service = service
        self.policy = policy
        self.interval_s = policy.interval_s
        self._view = view
        self._begin = begin

    def at_phase(self, live: Live, now: float) -> None:
        """A request's reasoning is over."""
        tokens = live.prompt_tokens + live.output_tokens
        able = [m.view for m in self.service.members if m.takes(tokens) or m.view.id == live.replica]
        move = self.policy.at_phase(live, self._seen(able, now))
        if move is not None and self._can(live, move, now):
            self._begin(live, move.target, move.stage_blocks, now)

    def tick(self, now: float) -> None:
        """Ask for moves."""
        up = [member.view for member in self.service.members if member.is_up]
        if len(up) < 2:
            return
        moves = self.policy.moves(self._seen(up, now))
        if not moves:
            return
        wanted = {move.request for move in moves}
        lives = {request.id: request for replica in up for request in replica.requests if request.id in wanted}
        for move in moves:
            live = cast(Live, lives.get(move.request))
            if self._can(live, move, now):
                self._begin(live, move.target, move.stage_blocks, now)

    def _seen(self, replicas: list[ReplicaView], now: float) -> View:
        view = self._view
        view.now, view.replicas = now, replicas
        return view

    def _can(self, live: Live | None, move: Move, now: float) -> bool:
        """Whether a move can be begun. HeadwayError for one to a replica that the service has not."""
        target = self.service.member(move.target)
        if target is None:
            name = type(self.policy).__name__
            raise HeadwayError(f"migration {name} chose replica {move.target!r}, which {self.service.model} has not")
        if live is None or live.move is not None or live.stage not in (DECODING, WAITING):
            return False
        return target.takes(live.prompt_tokens + live.output_tokens) and move.target != live.replica
