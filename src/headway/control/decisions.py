"""Why this replica: what control's policies were shown and what they chose, for whoever wants to know.

A driver that nobody asks builds plain services, and pays nothing. One that is asked builds those of `Decisions`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Literal

from msgspec import Struct

from headway.control.admissions import Admissions, Serve
from headway.control.live import HELD, Live
from headway.control.migrations import Begin, Migrations
from headway.control.observe import View
from headway.control.service import Member, Service
from headway.core.decision import Move, Placement
from headway.core.policy import Admission, Migration, Ordering, Router
from headway.core.view import FleetView, ReplicaView, RequestView


class Offered(Struct, frozen=True, gc=False):
    """A replica that could be chosen, as the policy saw it."""

    replica: int
    in_flight: int
    waiting: int
    kv_share: float
    """Of its KV cache, in use; 0 to 1."""
    age_s: float | None
    """Since its metrics were read; None: never, what is said of it is Headway's own counts."""


class Decision(Struct, frozen=True, omit_defaults=True, gc=False):
    """One line of the log. Fields that say nothing are left out."""

    time_s: float
    """Since the run began; of a gateway, since 1970."""
    what: Literal["placed", "moved", "refused"]
    request: str
    model: str
    tier: int
    phase: str
    choice: int | None = None
    """The replica."""
    source: int | None = None
    """Where a request that moves is."""
    decode: int | None = None
    """Who decodes what this replica prefills."""
    attempt: int = 0
    """0: the first. More: its replica had failed it."""
    moves: int = 0
    """Made before."""
    held_s: float = 0.0
    """It waited for this so long."""
    why: str = ""
    """Why it waited, moves or was refused."""
    scores: tuple[tuple[int, float], ...] = ()
    """The policy's, as (replica, score)."""
    replicas: tuple[Offered, ...] = ()
    """Who could have been chosen."""


class Decisions:
    """Builds what control works with, such that decisions are told to `listeners`; while there are none, few steps
    are added."""

    def __init__(self, name: Callable[[Live], str] | None = None, start_s: float = 0.0) -> None:
        self.listeners: list[Callable[[Decision], None]] = []
        self.start_s = start_s
        """Added to every time."""
        self._name = name or (lambda live: str(live.id))
        self._held: dict[int, tuple[float, str]] = {}
        """Since when a request waits, and why."""

    def service(
        self,
        model: str,
        members: Sequence[Member],
        router: Router,
        hold_ordering: Ordering,
        window: int | None,
        view: View,
    ) -> Service:
        """A service whose decisions are told."""
        return _Service(self, model, members, router, hold_ordering, window, view)

    def migrations(self, service: Service, policy: Migration, view: View, begin: Begin) -> Migrations:
        """The same, of moves."""
        return _Migrations(self, service, policy, view, begin)

    def admissions(self, service: Service, policy: Admission, random: Random, serve: Serve) -> Admissions:
        """The same, of requests that are kept for later."""
        return _Admissions(self, service, policy, random, serve)

    def holds(self, live: Live, now: float, why: str) -> None:
        """A request waits from now on."""
        self._held[live.id] = now, why

    def forget(self, live: Live) -> None:
        """It has ended."""
        self._held.pop(live.id, None)

    def turned_away(self, live: Live, now: float, name: str) -> None:
        """It has ended, and nobody would have it: told of one that waited, with what it waited for."""
        if live.id in self._held:
            self.tell("refused", live, now, request=name)

    def tell(self, what: Literal["placed", "moved", "refused"], live: Live, now: float, **more: Any) -> None:
        """Something was decided."""
        since_s, why = self._held.pop(live.id, (now, "")) if what != "moved" else (now, "")
        if self.listeners:
            name = more.pop("request", "") or self._name(live)
            decision = Decision(
                time_s=self.start_s + now, what=what, request=name, model=live.model, tier=live.tier,
                phase=live.phase.name.lower(), attempt=live.attempt, moves=live.moves,
                held_s=now - since_s, **{"why": why, **more},
            )  # fmt: skip
            for listener in self.listeners:
                listener(decision)


class _Asked:
    """A router that is overheard."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self.placement: Placement | None = None
        self.offered: Sequence[ReplicaView] = ()

    def route(self, request: RequestView, view: FleetView) -> Placement:
        """The router's own answer."""
        self.placement, self.offered = self._router.route(request, view), view.replicas
        return self.placement


class _Service(Service):
    def __init__(self, decisions: Decisions, model: str, members: Sequence[Member], router: Router, *more: Any) -> None:
        super().__init__(model, members, router, *more)
        self._decisions = decisions
        self.router = self._asked = _Asked(router)
        self._now = 0.0

    def choose(self, live: Live, now: float) -> int | None:
        self._now = now
        replica = super().choose(live, now)
        if replica is None:
            return None
        told = self._decisions
        placement = self._asked.placement
        source = None if live.stage is HELD else self.member(live.replica)
        leaves = source is not None and source.is_draining
        chosen: dict[str, Any] = {"choice": replica}
        if told.listeners and placement is not None:
            chosen |= {
                "decode": None if live.decode < 0 else live.decode,
                "scores": placement.scores,
                "replicas": offered(self._asked.offered, now),
            }
        if leaves:
            told.tell("moved", live, now, source=live.replica, why="its replica is drained", **chosen)
        else:
            told.tell("placed", live, now, **chosen)
        return replica

    def hold(self, live: Live, now: float) -> None:
        why = "no replica is up" if not self._up else "others come first" if self.line else "no replica has room"
        self._decisions.holds(live, now, why)
        super().hold(live, now)

    def refuses(self, live: Live) -> bool:
        refuses = super().refuses(live)
        if refuses:
            why = "all queues are full" if self.fits(live) else "it is longer than any replica can hold"
            self._decisions.tell("refused", live, self._now, why=why)
        return refuses


class _Migrations(Migrations):
    def __init__(self, decisions: Decisions, *more: Any) -> None:
        super().__init__(*more)
        self._decisions = decisions

    def _can(self, live: Live | None, move: Move, now: float) -> bool:
        can = super()._can(live, move, now)
        if can and live is not None:
            views = (
                [member.view for member in self.service.members if member.is_up] if self._decisions.listeners else []
            )
            self._decisions.tell(
                "moved", live, now, source=live.replica, choice=move.target, scores=move.scores,
                why="asked for by the migration policy", replicas=offered(views, now),
            )  # fmt: skip
        return can


class _Admissions(Admissions):
    def __init__(self, decisions: Decisions, *more: Any) -> None:
        super().__init__(*more)
        self._decisions = decisions

    def keeps(self, live: Live) -> bool:
        keeps = super().keeps(live)
        if keeps:
            self._decisions.holds(live, live.arrival_s, "kept by the admission policy")
        return keeps


def offered(replicas: Sequence[ReplicaView], now: float) -> tuple[Offered, ...]:
    """Replicas as a policy sees them now."""
    return tuple(
        Offered(
            replica.id, replica.num_in_flight, replica.num_waiting,
            round(replica.kv_blocks_used / max(replica.kv_blocks_total, 1), 4), _age_s(replica, now),
        )
        for replica in replicas
    )  # fmt: skip


def _age_s(replica: ReplicaView, now: float) -> float | None:
    seen_s = float(getattr(replica, "seen_s", now))
    return None if seen_s == float("-inf") else now - seen_s


def parts(
    decisions: Decisions | None,
) -> tuple[Callable[..., Service], Callable[..., Migrations], Callable[..., Admissions]]:
    """What a driver makes its services, migrations and admissions with."""
    if decisions is None:
        return Service, Migrations, Admissions
    return decisions.service, decisions.migrations, decisions.admissions
