"""One request between its client and control: where it is placed, and how it ended."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import IntEnum, auto
from typing import TYPE_CHECKING, Protocol

from mypy_extensions import mypyc_attr

from headway.control.live import Live
from headway.core.record import Outcome
from headway.gateway.scheduling.stream_copy import StreamCopy, StreamPart
from headway.gateway.upstream.client import Connection
from headway.gateway.upstream.engine import EngineEndpoint

if TYPE_CHECKING:
    from headway.gateway.accounts.budgets import BudgetHold, Charge
    from headway.gateway.auth.keys import RateHold


class ReleaseReason(IntEnum):
    """Why a request leaves its replica, or ends without one (`scheduler.Scheduler.release`)."""

    FINISHED = auto()
    """The answer is complete."""
    REFUSED = auto()
    """The engine rejected the request, or no attempt is left."""
    CANCELLED = auto()
    """The client closed its connection."""
    FAILED = auto()
    """The replica failed; the request is placed again."""
    FAILED_BEFORE_FETCH = auto()
    """The decode replica failed before it fetched the KV cache, which can be offered to another one."""
    MOVED = auto()
    """The connection that a move had aborted is closed."""
    PREFILLED = auto()
    """The prefill replica has computed the prompt, and stores its KV cache for the decode replica."""
    PREFILL_NOT_STORED = auto()
    """The prefill replica has answered without storing a KV cache; the decode replica computes the prompt."""
    PREFILL_FAILED = auto()
    """The prefill replica failed; the decode replica computes the prompt."""
    PREFILL_LEG_FAILED = auto()
    """The prefill replica of a dual dispatch failed; the request is placed again."""
    ACKNOWLEDGED = auto()
    """The request had ended before; only now has it left its replica."""
    EXHAUSTED = auto()
    """No attempt is left at the present model; a fallback of it may answer."""


RESUMES = frozenset(
    {
        ReleaseReason.FAILED,
        ReleaseReason.FAILED_BEFORE_FETCH,
        ReleaseReason.MOVED,
        ReleaseReason.PREFILLED,
        ReleaseReason.PREFILL_NOT_STORED,
        ReleaseReason.PREFILL_FAILED,
        ReleaseReason.PREFILL_LEG_FAILED,
        ReleaseReason.EXHAUSTED,
    }
)
"""Reasons after which the request continues at some replica."""


class State(IntEnum):
    """Where a request is on its way through engines (`InFlightRequest.state`)."""

    HELD = auto()
    """At no replica: it waits for one, or has been paused."""
    PLACED = auto()
    """A replica counts it, and it has not been sent yet."""
    PREFILLING = auto()
    """Sent to a replica that computes its prompt for another one, or to both of a pair."""
    SENT = auto()
    """Sent to the replica that answers."""
    MOVING = auto()
    """Its connection was aborted, so that it continues at another replica."""
    PAUSING = auto()
    """The same, so that it is held."""
    SCORED = auto()
    """A model of a cascade has answered, and the answer is neither accepted nor escalated."""
    ENDED = auto()


TRANSITIONS: dict[State, frozenset[State]] = {
    State.HELD: frozenset({State.PLACED, State.ENDED}),
    State.PLACED: frozenset({State.HELD, State.PREFILLING, State.SENT, State.ENDED}),
    State.PREFILLING: frozenset({State.HELD, State.PLACED, State.SENT, State.ENDED}),
    State.SENT: frozenset({State.HELD, State.PLACED, State.MOVING, State.PAUSING, State.SCORED, State.ENDED}),
    State.MOVING: frozenset({State.HELD, State.PLACED, State.ENDED}),
    State.PAUSING: frozenset({State.HELD, State.PLACED, State.ENDED}),
    State.SCORED: frozenset({State.HELD, State.PLACED, State.ENDED}),
    State.ENDED: frozenset(),
}
"""The states that may follow each state. One that is placed anew before it was sent stays PLACED."""


class Reservation(Protocol):
    """A request's share of a replica's counts."""

    @property
    def slot(self) -> int | None:
        """The request's slot at the engine, where the gateway assigns slots."""

    @property
    def waits_for_slot(self) -> bool:
        """The request must not be sent yet, as no slot is free."""

    def count_tokens(self, tokens: int) -> None:
        """Add generated tokens, after the request's own count and phase have changed.

        The first call, also with 0 tokens, marks the prompt as computed.
        """

    def free(self) -> None:
        """Remove the request from the replica's counts. Later calls do nothing."""


class RequestEndedError(Exception):
    """Control has ended the request."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.name)
        self.outcome = outcome


@dataclass(eq=False)
class PrefillLeg:
    """A dual dispatch's request to the prefill replica, while the decode replica waits for the KV cache."""

    replica: EngineEndpoint
    reservation: Reservation | None = None
    """None: held in the scheduler's process."""
    generated_tokens: int = 0
    """Tokens that the request had when it was placed here."""
    connection: Connection | None = None
    is_stopped: bool = False
    """The prefill replica's answer is not needed any more."""

    def stop(self, why: str) -> None:
        """Abort, and ignore whatever the prefill replica answers."""
        self.is_stopped = True
        self.abort(why)

    def abort(self, why: str) -> None:
        if self.connection is not None:
            self.connection.abort(why)

    def close(self, live: Live) -> None:
        """Return the connection, then free the reservation."""
        self.is_stopped = True
        connection, self.connection = self.connection, None
        if connection is not None:
            self.replica.client.release(connection)
        reservation, self.reservation = self.reservation, None
        if reservation is not None:
            reservation.count_tokens(live.generated_tokens - self.generated_tokens)
            reservation.free()


@mypyc_attr(allow_interpreted_subclasses=True)
class InFlightRequest:
    """One request between its client and control."""

    # What a request starts with is set in the class: most requests leave most of it as it is.
    replica: EngineEndpoint | None = None
    connection: Connection | None = None
    abort_reason: str | None = None
    """The replica was given up before a connection to it was open."""
    outcome: Outcome | None = None
    """None: control has not ended the request."""
    move_target: EngineEndpoint | None = None
    """The replica to continue at, while a move is under way."""
    is_paused: bool = False
    """The request leaves its replica for a held one."""
    can_move: bool = False
    """Another replica can continue the answer."""
    is_prefill_only: bool = False
    """The present replica computes the prompt only, and another one decodes."""
    has_stored_kv: bool = False
    """The prefill replica stores the KV cache for the decode replica."""
    prefilled_by: EngineEndpoint | None = None
    prefill_leg: PrefillLeg | None = None
    """Set while a dual dispatch's prefill replica computes the prompt."""
    has_alternative: bool = False
    """The model has other replicas, which may confirm the present one's refusal."""
    has_fallback: bool = False
    """Another model may answer if the present one's replicas cannot."""
    waits_for_client: bool = False
    """The client reads slowly, and the engine's answer is not read meanwhile."""
    is_unstreamed: bool = False
    """All tokens came at once."""
    continued_tokens: tuple[int, int] = (0, 0)
    """Tokens of prompt and answer with which engines began that continue the answer: computed anew, and found in
    their KV caches or loaded."""
    owner: str = ""
    """Of the request's key; empty: it has none."""
    response_id: str | None = None
    """Of an answer of /v1/responses, which its engine may keep."""
    unread: dict[str, int] | None = None
    """Events and answers that were passed on without being read, by what they were."""
    longest_gap_s: float = 0.0
    """The longest time between two reads of one replica's stream that brought tokens."""
    resumed_s: float | None = None
    """The first token from the present replica of an answer that another one had begun; None: there is none."""
    has_left: bool = False
    """The request has left a replica before its end, and its stays are recorded."""
    is_away: bool = False
    """It has left its last one, and is at none."""
    needs_score: bool = False
    """The answer of the present model decides whether the cascade escalates."""
    awaits_score: bool = False
    """A model of a cascade has answered, and the answer is neither accepted nor escalated."""
    scoring: asyncio.Task[float] | None = None
    retry_after_s: int = 1
    """The wait that a rejected client is advised."""
    is_shed: bool = False
    """Rejected, as its first token was expected too late."""
    rate_hold: RateHold | None = None
    """What is reserved in the rates of the caller's key."""
    budget_hold: BudgetHold | None = None
    """What is reserved in the budgets of the caller's key."""
    earlier_charges: tuple[Charge, ...] = ()
    """For the answers of a cascade's models that were not accepted."""
    hold_timeout: asyncio.TimerHandle | None = None
    hold_end_s: float = 0.0
    """When a request that waits while no replica is up is rejected at the latest."""
    _changed: asyncio.Future[None] | None = None

    def __init__(
        self,
        live: Live,
        request_id: str = "",
        is_streamed: bool = True,
        copy: StreamCopy | None = None,
        restored: StreamPart | None = None,
    ) -> None:
        """`request_id`: the client's id for the request. `is_streamed`: the client gets the answer token by token.
        `copy`: copies the stream for a retry of its client. `restored`: what the client was sent before it retried."""
        self.live, self.request_id, self.is_streamed = live, request_id, is_streamed
        self.copy, self.restored = copy, restored
        self.reservation: Reservation | None = None

    @property
    def state(self) -> State:
        """Where the request is; computed when asked for."""
        if self.outcome is not None:
            return State.ENDED
        if self.awaits_score:
            return State.SCORED
        if self.reservation is None:
            return State.HELD
        if self.move_target is not None:
            return State.PAUSING if self.is_paused else State.MOVING
        if not self.is_streaming:
            return State.PLACED
        return State.PREFILLING if self.is_prefill_only or self.prefill_leg is not None else State.SENT

    @property
    def is_moving(self) -> bool:
        """A move to another replica is under way."""
        return self.move_target is not None

    @property
    def is_streaming(self) -> bool:
        """The request has been sent to its replica."""
        return self.connection is not None

    def abort(self, why: str) -> None:
        """Break off the connections, on which engines abort. A connection that is not open yet is aborted later."""
        if self.connection is not None:
            self.connection.abort(why)
        elif self.reservation is not None:
            self.abort_reason = why
        if self.prefill_leg is not None:
            self.prefill_leg.stop(why)

    def abort_prefill_leg(self, why: str) -> None:
        """Break off the connection to a dual dispatch's prefill replica."""
        if self.prefill_leg is not None:
            self.prefill_leg.abort(why)

    async def wait_for_replica(self) -> EngineEndpoint:
        """Wait until the request is placed. RequestEndedError if it ends instead."""
        while True:
            if self.outcome is not None:
                raise RequestEndedError(self.outcome)
            if self.reservation is not None and not self.reservation.waits_for_slot:
                break
            self._changed = asyncio.get_running_loop().create_future()
            await self._changed
        assert self.replica is not None
        return self.replica

    def raise_if_ended(self) -> None:
        """RequestEndedError if control has ended the request. Apart from what waits, so that the type checker, by
        whose types the compiled code goes, does not take the outcome to be None from here on."""
        if self.outcome is not None:
            raise RequestEndedError(self.outcome)

    def wake(self) -> None:
        """Have `wait_for_replica` check the state again."""
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)

    def return_connection(self) -> None:
        """Return the connection to the replica's client, which closes it if the answer is not complete."""
        connection, self.connection, self.abort_reason = self.connection, None, None
        if connection is not None and self.replica is not None:
            self.replica.client.release(connection)

    def detach(self) -> None:
        """Leave the replica: return the connection, then free the reservation."""
        if self.reservation is None and self.connection is None and self.prefill_leg is None:
            self.abort_reason = None
            return
        self.return_connection()
        reservation, self.reservation = self.reservation, None
        if reservation is not None:
            reservation.free()
        leg, self.prefill_leg = self.prefill_leg, None
        if leg is not None:
            leg.close(self.live)
