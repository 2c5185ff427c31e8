"""One request between its client and control."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from headway.control.live import Live
from headway.core.record import Outcome
from headway.gateway.scheduling.sglang_disaggregation import PrefillLeg
from headway.gateway.upstream.client import Connection
from headway.gateway.upstream.engine import EngineEndpoint


class Reservation(Protocol):
    """A request's place in a replica's counts."""

    @property
    def slot(self) -> int | None:
        """Which of its engine's slots it has, where that is for the gateway to say."""

    @property
    def waits(self) -> bool:
        """Until one is free."""

    def produced(self, tokens: int) -> None:
        """Tokens have come."""

    def requeue(self) -> None:
        """Its phase or its tokens may have changed which queue it is in."""

    def give_up(self) -> None:
        """The stream is closed."""


class OverError(Exception):
    """A request has ended as control sees it."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.name)
        self.outcome = outcome


@dataclass(eq=False)
class InFlightRequest:
    """One request between its client and control: where it is placed, and how it ended."""

    live: Live
    request_id: str = ""
    """As its client knows it."""
    replica: EngineEndpoint | None = None
    seat: Reservation | None = None
    connection: Connection | None = None
    outcome: Outcome | None = None
    moving_to: EngineEndpoint | None = None
    can_move: bool = False
    """Its answer can be continued elsewhere."""
    is_split: bool = False
    """It is where its prompt is computed, and another replica is to decode."""
    is_kept: bool = False
    """Its KV cache is, for the replica that decodes, where its prompt was computed."""
    prefilled_by: EngineEndpoint | None = None
    """Who computed its prompt for another replica."""
    half: PrefillLeg | None = None
    """Who computes its prompt at the same time as `replica` waits to answer."""
    is_whole: bool = False
    """All its tokens came at once."""
    is_unjudged: bool = False
    """A model of a cascade has answered, and nobody has said yet whether the answer will do."""
    judgement: asyncio.Task[float] | None = None
    retry_after_s: int = 1
    """When it may be asked for again, if nobody would have it."""
    pay: Callable[[int], None] | None = None
    """Told at the end how many tokens it took, where its caller has limits."""
    despair: asyncio.TimerHandle | None = None
    """When it has waited long enough for a replica to be up."""
    timers: list[asyncio.TimerHandle] = field(default_factory=list, repr=False)
    _turn: asyncio.Future[None] | None = field(default=None, repr=False)

    @property
    def is_streaming(self) -> bool:
        """A replica has been sent it."""
        return self.connection is not None

    def stop(self, why: str) -> None:
        """Have its replica abort it."""
        if self.connection is not None:
            self.connection.abort(why)
        if self.half is not None:
            self.half.stop(why)

    def stop_half(self, why: str) -> None:
        """Who computes its prompt at the same time does not answer any more."""
        if self.half is not None:
            self.half.abort(why)

    async def turn(self) -> EngineEndpoint:
        """Until it is placed. OverError if it ends instead."""
        while (self.seat is None or self.seat.waits) and self.outcome is None:
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

    def hang_up(self) -> None:
        """Its replica's answer is not needed any more, or is over."""
        connection, self.connection = self.connection, None
        if connection is not None and self.replica is not None:
            self.replica.client.release(connection)

    def leave(self) -> None:
        """It is at no replica any more: its connection is closed first, then its seat given up."""
        self.hang_up()
        seat, self.seat = self.seat, None
        if seat is not None:
            seat.give_up()
        half, self.half = self.half, None
        if half is not None:
            half.leave(self.live)
