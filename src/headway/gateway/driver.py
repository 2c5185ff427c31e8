"""The gateway's driver: control's clock is the wall's, its effects are requests to engines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from headway.control.admissions import Admissions
from headway.control.control import Control
from headway.control.live import ENDED, HELD, WAITING, Live
from headway.control.migrations import Migrations
from headway.control.policies import Policies
from headway.control.recorder import Recorder
from headway.control.service import Member, Service
from headway.core.fleet import Role
from headway.core.record import Outcome
from headway.gateway.client import Connection
from headway.gateway.clock import Clock
from headway.gateway.replica import LiveReplica, Seat
from headway.observe import View
from headway.policies.ordering.fcfs import Fcfs


class LiveControl(Control):
    """Control, told besides of what goes wrong with one request only."""

    def failed(self, live: Live, now: float) -> None:
        """Its replica would not have it, or lost it: it is placed anew, elsewhere, with the tokens already out kept.

        Where there is no other, it is rejected.
        """
        service = self._service(live)
        member = service.member(live.replica)
        live.attempt += 1
        live.stage = HELD
        if member is None or not member.is_up:
            self._place_or_hold(service, live, now)
            return
        member.is_up = False
        service.refresh()
        try:
            if any(other.is_up for other in service.members):
                self._place_or_hold(service, live, now)
            else:
                self._end(live, now, Outcome.REJECTED)
        finally:
            member.is_up = True
            service.refresh()

    def refused(self, live: Live, now: float) -> None:
        """Nobody will have it."""
        if live.stage is not ENDED:
            self._end(live, now, Outcome.REJECTED)

    def gave_up(self, live: Live, now: float) -> None:
        """Its client is gone."""
        self._time_out(now, live)


class OverError(Exception):
    """A request has ended as control sees it."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.name)
        self.outcome = outcome


@dataclass(eq=False)
class Ticket:
    """One request between its client and control: where it is placed, and how it ended."""

    live: Live
    service: Service
    replica: LiveReplica | None = None
    seat: Seat | None = None
    connection: Connection | None = None
    outcome: Outcome | None = None
    moving_to: LiveReplica | None = None
    can_move: bool = False
    """Its answer can be continued elsewhere."""
    timers: list[asyncio.TimerHandle] = field(default_factory=list, repr=False)
    _turn: asyncio.Future[None] | None = field(default=None, repr=False)

    async def turn(self) -> LiveReplica:
        """Until it is placed. OverError if it ends instead."""
        while self.seat is None and self.outcome is None:
            self._turn = asyncio.get_running_loop().create_future()
            await self._turn
        if self.outcome is not None:
            raise OverError(self.outcome)
        assert self.replica is not None
        return self.replica

    def wake(self) -> None:
        """Something has changed."""
        if self._turn is not None and not self._turn.done():
            self._turn.set_result(None)

    def leave(self) -> None:
        """It is at no replica any more: its connection is closed first, then its seat given up."""
        connection, self.connection = self.connection, None
        if connection is not None and self.replica is not None:
            self.replica.client.give_back(connection)
        seat, self.seat = self.seat, None
        if seat is not None:
            seat.give_up()


class Driver:
    """Control's effects, and what it is told, in real time. Belongs to one event loop."""

    def __init__(
        self,
        clock: Clock,
        replicas: Sequence[LiveReplica],
        names: dict[str, tuple[str, ...]],
        policies: Policies,
        seed: int,
        recorder: Recorder,
        max_tokens: Callable[[LiveReplica], int],
        hold_s: float,
    ) -> None:
        self._clock, self._hold_s = clock, hold_s
        self.replicas = list(replicas)
        self.tickets: dict[int, Ticket] = {}
        """Requests that have not ended."""
        self.on_ended: Callable[[Live, Outcome, float], None] = lambda live, outcome, now: None
        self.control = LiveControl(self, recorder, notify=True)
        self.services: dict[str, Service] = {}
        self._migrations: list[Migrations] = []
        self._admissions: list[Admissions] = []
        hold = policies.ordering if policies.ordering_at != "replica" else Fcfs
        for model in dict.fromkeys(replica.model for replica in self.replicas):
            members = [Member(r, max_tokens(r), None, r.pool) for r in self.replicas if r.model == model]
            for member in members:
                member.is_up = False
            view = View(Random(f"{seed}/router/{model}"))
            service = Service(model, members, policies.router(), hold(), policies.window, view)
            for name in names[model]:
                self.services.setdefault(name, service)
            if policies.migration is not None:
                seen = View(Random(f"{seed}/migration/{model}"))
                self._migrations.append(Migrations(service, policies.migration(), seen, self.move))
            if policies.admission is not None:
                random = Random(f"{seed}/admission/{model}")
                self._admissions.append(Admissions(service, policies.admission(), random, self.control.place))
        self.control.serve(self.services, self._migrations, admissions=self._admissions)

    @property
    def now(self) -> float:
        """Seconds since the start."""
        return self._clock.now

    def start_ticking(self) -> None:
        """Let policies that want to be asked now and then be asked."""
        policies: list[Migrations | Admissions] = [*self._migrations, *self._admissions]
        for policy in policies:
            if policy.interval_s is not None:
                self._clock.at(self.now + policy.interval_s, self._tick, policy)

    def _tick(self, now: float, policy: Migrations | Admissions) -> None:
        assert policy.interval_s is not None
        self._clock.at(now + policy.interval_s, self._tick, policy)
        policy.tick(self.now)

    # What requests do.

    def arrived(self, ticket: Ticket) -> None:
        """A request comes in."""
        self.tickets[ticket.live.id] = ticket
        try:
            self.control.arrived(ticket.live, self.now)
        except BaseException:  # a policy failed, and nobody waits for this request
            self.control.refused(ticket.live, self.now)
            raise
        self._hope(ticket)

    def _hope(self, ticket: Ticket) -> None:
        """A request that no replica is up for waits for one, but not for ever."""
        if ticket.live.stage is HELD and ticket.outcome is None and not _any_up(ticket.service):
            ticket.timers.append(self._clock.at(self.now + self._hold_s, self._despair, ticket))

    def _despair(self, now: float, ticket: Ticket) -> None:
        if ticket.live.stage is HELD and not _any_up(ticket.service):
            self.control.refused(ticket.live, now)

    def finished(self, ticket: Ticket) -> None:
        """Its answer is out, or its client has been told why there is none."""
        ticket.leave()
        if ticket.outcome is None:
            self.control.finished(ticket.live, self.now)

    def failed(self, ticket: Ticket, again: bool) -> None:
        """Its replica failed it: it is placed anew, or turned away."""
        ticket.leave()
        if ticket.outcome is None and again:
            self.control.failed(ticket.live, self.now)
            self._hope(ticket)
        elif ticket.outcome is None:
            self.control.refused(ticket.live, self.now)

    def refused(self, ticket: Ticket) -> None:
        """Nobody will have it."""
        ticket.leave()
        self.control.refused(ticket.live, self.now)

    def gave_up(self, ticket: Ticket) -> None:
        """Its client is gone, or it has run out of time."""
        if ticket.outcome is None:
            self.control.gave_up(ticket.live, self.now)

    def forget(self, ticket: Ticket) -> None:
        """Nobody waits for it any more, even if a policy failed where its end should have been told."""
        ticket.leave()
        self.gave_up(ticket)
        self.tickets.pop(ticket.live.id, None)
        for timer in ticket.timers:
            timer.cancel()

    def landed(self, ticket: Ticket) -> None:
        """A request that is to move has left its replica: it goes on at the other one, or where it was if that is
        gone."""
        source, target, live = ticket.replica, ticket.moving_to, ticket.live
        assert source is not None and target is not None
        ticket.leave()
        self._end_move(ticket)
        member = ticket.service.member(target.id)
        if ticket.outcome is not None:
            return
        if member is not None and member.takes(live.prompt_tokens + live.output_tokens):
            self.start(live, target.id, self.now)
            self.control.moved(live, source.id, self.now)
        else:
            self.start(live, source.id, self.now)

    def _end_move(self, ticket: Ticket) -> None:
        if ticket.moving_to is not None:
            ticket.moving_to.num_arriving -= 1
            ticket.moving_to = None
            ticket.live.move = None

    # What replicas do.

    def up(self, replica: LiveReplica) -> None:
        """A replica is there, or there again."""
        self.control.recovered(replica.id, self.now)

    def down(self, replica: LiveReplica) -> None:
        """A replica is to be given nothing. Its streams go on, as long as they do."""
        self.control.crashed(replica.id, [], self.now)

    def abandon(self, replica: LiveReplica) -> None:
        """A replica is gone, or hangs: what it streams goes on elsewhere, if it can."""
        for ticket in list(self.tickets.values()):
            if ticket.replica is replica and ticket.connection is not None:
                ticket.connection.abort("does not answer any more")

    # Control's effects.

    def start(self, live: Live, replica: int, now: float) -> None:
        """Count the request at its replica at once; its own task sends it."""
        ticket = self.tickets[live.id]
        ticket.replica = self.replicas[replica]
        live.replica, live.stage, live.enqueued_s = replica, WAITING, now
        ticket.seat = ticket.replica.take(live)
        ticket.wake()

    def cancel(self, live: Live, now: float) -> None:
        """Close the connection, on which engines abort."""
        ticket = self.tickets[live.id]
        if ticket.connection is not None:
            ticket.connection.abort("the request was cancelled")
        ticket.leave()
        self.control.cancelled(live, now)

    def move(self, live: Live, target: int, stage_blocks: int | None, now: float) -> None:
        """Have the request leave its replica; it is continued at the other one by what it has said so far."""
        ticket = self.tickets.get(live.id)
        if ticket is None or not ticket.can_move or ticket.connection is None:
            return
        live.move = ticket
        ticket.moving_to = self.replicas[target]
        ticket.moving_to.num_arriving += 1
        ticket.connection.abort("the request moves")

    def hand_over(self, live: Live, target: int, now: float) -> None:
        """Live replicas have no roles."""
        raise AssertionError("a live replica prefills for no other")

    def judge(self, live: Live, now: float) -> None:
        """There are no live cascades."""
        raise AssertionError("no live cascade has a judge")

    def set_role(self, replica: int, role: Role) -> None:
        """Live replicas have no roles."""
        self.replicas[replica].role = role

    def at(self, time_s: float, action: Callable[[float, Any], None], argument: Any) -> None:
        """Call `action(time_s, argument)` then."""
        self.tickets[argument.id].timers.append(self._clock.at(time_s, action, argument))

    def ended(self, live: Live, now: float, outcome: Outcome) -> None:
        """Tell the task that answers the client."""
        ticket = self.tickets.pop(live.id)
        ticket.outcome = outcome
        for timer in ticket.timers:
            timer.cancel()
        self._end_move(ticket)
        ticket.wake()
        self.on_ended(live, outcome, now)


def _any_up(service: Service) -> bool:
    return any(member.is_up for member in service.members)
