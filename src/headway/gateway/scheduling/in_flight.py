"""One request at its engines: its state, replica and connection, from its arrival to its end."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import IntEnum, auto
from typing import TYPE_CHECKING, Final, Protocol

from mypy_extensions import mypyc_attr

from headway.control.live import Live
from headway.core.record import Outcome
from headway.gateway.scheduling.request_state import AnswerState, Assignment
from headway.gateway.scheduling.stream_copy import StreamCopy, StreamKey, StreamPart
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
    """The engine refused the request, or no attempt is left."""
    CANCELLED = auto()
    """The client closed its connection."""
    FAILED = auto()
    """The replica failed, and the request is placed again."""
    FAILED_BEFORE_FETCH = auto()
    """The decode replica failed before it fetched the KV cache. Another replica can still fetch the cache."""
    MOVED = auto()
    """The connection aborted by a move is closed."""
    PREFILLED = auto()
    """The prefill replica has computed the prompt, and stores its KV cache for the decode replica."""
    PREFILL_NOT_STORED = auto()
    """The prefill replica has answered without storing a KV cache, so the decode replica computes the prompt."""
    PREFILL_FAILED = auto()
    """The prefill replica failed, so the decode replica computes the prompt."""
    PREFILL_LEG_FAILED = auto()
    """The prefill replica of a dual dispatch failed, so the request is placed again."""
    ACKNOWLEDGED = auto()
    """The request had ended before, and has now left its replica."""
    EXHAUSTED = auto()
    """No attempt is left at the current model; a fallback may answer."""


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
    """The state of a request on its way through engines."""

    HELD = 0
    """The request is at no replica."""
    PLACED = auto()
    """Counted at a replica, but not sent yet."""
    HANDING_OVER = auto()
    """Sent to a replica that only computes the prompt, or to both replicas of a pair."""
    SENT = auto()
    """Sent to the replica that answers."""
    STREAMING = auto()
    """The replica has sent tokens of the answer."""
    MOVING = auto()
    """The connection was aborted, so that the request continues at another replica."""
    PAUSED = auto()
    """The connection was aborted, so that the request is held."""
    SCORED = auto()
    """A model of a cascade has answered, and the answer is neither accepted nor escalated yet."""
    ENDED = auto()


TRANSITIONS: dict[State, frozenset[State]] = {
    State.HELD: frozenset({State.PLACED, State.ENDED}),
    State.PLACED: frozenset({State.HELD, State.HANDING_OVER, State.SENT, State.SCORED, State.ENDED}),
    State.HANDING_OVER: frozenset({State.HELD, State.PLACED, State.SENT, State.STREAMING, State.SCORED, State.ENDED}),
    State.SENT: frozenset({State.HELD, State.STREAMING, State.SCORED, State.ENDED}),
    State.STREAMING: frozenset({State.HELD, State.MOVING, State.PAUSED, State.SCORED, State.ENDED}),
    State.MOVING: frozenset({State.HELD, State.SCORED, State.ENDED}),
    State.PAUSED: frozenset({State.HELD, State.SCORED, State.ENDED}),
    State.SCORED: frozenset({State.HELD, State.ENDED}),
    State.ENDED: frozenset(),
}
"""The allowed next states of each state."""
_MASKS: Final = [sum(1 << after for after in TRANSITIONS[state]) for state in State]
"""The table as bits, because an enum's hash is computed in Python."""
_NOWHERE: Final = Assignment()
"""Of a request that was never placed."""
# Module-level names: reading a member from its enum class takes as long as a dozen other steps.
_HELD: Final = State.HELD
_HANDING_OVER: Final = State.HANDING_OVER
_SENT: Final = State.SENT
_STREAMING: Final = State.STREAMING
_ENDED: Final = State.ENDED


class IllegalTransitionError(Exception):
    """A state does not follow the current one."""


class Reservation(Protocol):
    """A request's share of a replica's counts."""

    @property
    def slot(self) -> int | None:
        """The request's slot at the engine, if the gateway assigns slots."""

    @property
    def waits_for_slot(self) -> bool:
        """Whether the request must not be sent yet, because no slot is free."""

    def count_tokens(self, tokens: int) -> None:
        """Add generated tokens. Call it after the request's own count and phase have changed. The first call, even with
        0 tokens, marks the prompt as computed.
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
    """The reservation at the prefill replica; None if it is in the scheduler's process."""
    generated_tokens: int = 0
    """Number of the request's generated tokens when it was placed at the prefill replica."""
    connection: Connection | None = None
    is_stopped: bool = False
    """Whether the prefill replica's answer is no longer needed."""

    def stop(self, why: str) -> None:
        """Abort, and ignore the prefill replica's answer."""
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
    """One request at its engines. Control decides on `live`; a relay, a worker or a proxy carries the decisions out."""

    # Initial values are set in the class, because most requests keep most of them.
    replica: EngineEndpoint | None = None
    connection: Connection | None = None
    state: State = State.HELD
    """Changed by `enter` only."""
    abort_reason: str | None = None
    """The reason for giving up the replica before its connection was open."""
    outcome: Outcome | None = None
    """The end of the request, as control decided; None: control has not ended the request."""
    move_target: EngineEndpoint | None = None
    """The replica at which to continue, during a move; the current one, during a pause."""
    prefilled_by: EngineEndpoint | None = None
    prefill_leg: PrefillLeg | None = None
    """Set while a dual dispatch's prefill replica computes the prompt."""
    owner: str = ""
    """Owner of the request's key; empty without a key."""
    has_left: bool = False
    """Whether the request has left a replica before its end. The stays of such a request are recorded."""
    needs_score: bool = False
    """Whether a score of the current model's answer decides on escalation."""
    scoring: asyncio.Task[float] | None = None
    retry_after_s: int = 1
    """Seconds that the client of a rejected request is advised to wait."""
    is_shed: bool = False
    """Whether the request was rejected because its expected TTFT was too long."""
    rate_hold: RateHold | None = None
    """The request's reservation in the rates of the caller's key."""
    budget_hold: BudgetHold | None = None
    """The request's reservation in the budgets of the caller's key."""
    num_chars: int = 0
    """Characters of a prompt that is text alone. With the engine's count they tell the tokens of a character."""
    counted_prompt_tokens: int = 0
    """Prompt tokens by the engine's count; 0: not reported."""
    escalated_tokens: int = 0
    """Tokens of answers that a cascade did not accept, with their prompts."""
    stream_key: StreamKey | None = None
    """The key of `copy`."""
    earlier_charges: tuple[Charge, ...] = ()
    """Charges for answers of a cascade's models that were not accepted."""
    hold_timeout: asyncio.TimerHandle | None = None
    hold_end_s: float = 0.0
    """Latest time at which a request that is held while no replica is up is rejected."""
    _changed: asyncio.Future[None] | None = None

    def __init__(
        self,
        live: Live,
        request_id: str = "",
        is_streamed: bool = True,
        copy: StreamCopy | None = None,
        restored: StreamPart | None = None,
        is_movable: bool = False,
    ) -> None:
        """`request_id`: the client's id for the request. `is_streamed`: the client gets the answer token by token.
        `copy`: copies the stream for a retry of its client. `restored`: the data that the client received before it
        retried. `is_movable`: another replica can continue the answer."""
        self.live, self.request_id, self.is_movable = live, request_id, is_movable
        live.is_streamed = is_streamed
        self.copy, self.restored = copy, restored
        self.assignment, self.answer = _NOWHERE, AnswerState()
        self.reservation: Reservation | None = None

    # The state.

    def enter(self, state: State) -> None:
        """Change the state. IllegalTransitionError if the table does not allow the change."""
        after: int = state
        if not _MASKS[self.state] >> after & 1:
            raise IllegalTransitionError(f"{state.name} does not follow {self.state.name}")
        self.state = state

    def send(self) -> None:
        """The replica has the request, or a proxy sends it there."""
        is_shared = self.assignment.is_prefill_only or self.prefill_leg is not None
        self.enter(_HANDING_OVER if is_shared else _SENT)

    def begin_answer(self) -> None:
        """Tokens of the answer have come."""
        if self.state is _SENT or self.state is _HANDING_OVER:
            self.enter(_STREAMING)

    def end_prefill_leg(self) -> PrefillLeg | None:
        """The prefill replica of a dual dispatch has sent the KV cache: only the decode replica still runs the
        request."""
        leg, self.prefill_leg = self.prefill_leg, None
        if leg is not None:
            leg.close(self.live)
            if self.state is _HANDING_OVER:
                self.enter(_SENT)
        return leg

    def leave(self) -> None:
        """Leave the replica, so that control places the request again."""
        self.detach()
        if self.outcome is None and self.state is not _HELD:
            self.enter(_HELD)

    def end(self, outcome: Outcome) -> None:
        """Control has ended the request: wake its task, which answers the client."""
        self.enter(_ENDED)
        self.outcome = outcome
        if self.scoring is not None:
            self.scoring.cancel()
        self.wake()

    @property
    def can_move(self) -> bool:
        """Whether another replica can continue the answer now."""
        return self.state is State.STREAMING and self.is_movable

    @property
    def used_tokens(self) -> int:
        """Prompt and output tokens at all models that answered."""
        return self.escalated_tokens + self.live.prompt_tokens + self.live.generated_tokens

    @property
    def engine_slot(self) -> int | None:
        """The request's slot at the engine, if the gateway assigns slots."""
        return None if self.reservation is None else self.reservation.slot

    # The connections.

    def abort(self, why: str) -> None:
        """Abort the connections, at which engines abort the request. A connection that is not open yet is aborted
        later."""
        if self.connection is not None:
            self.connection.abort(why)
        elif self.reservation is not None:
            self.abort_reason = why
        if self.prefill_leg is not None:
            self.prefill_leg.stop(why)

    def abort_prefill_leg(self, why: str) -> None:
        """Abort the connection to a dual dispatch's prefill replica."""
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
        """RequestEndedError if control has ended the request. A separate method, so that the type checker, whose types
        the compiler uses, does not narrow the outcome to None."""
        if self.outcome is not None:
            raise RequestEndedError(self.outcome)

    def wake(self) -> None:
        """Have `wait_for_replica` check the state again."""
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)

    def return_connection(self) -> None:
        """Return the connection to the replica's client. The client closes the connection if the answer is
        incomplete."""
        connection, self.connection, self.abort_reason = self.connection, None, None
        if connection is not None and self.replica is not None:
            self.replica.client.release(connection)

    def detach(self) -> None:
        """Leave the replica: return the connection, then free the reservation."""
        connection, reservation, leg = self.connection, self.reservation, self.prefill_leg
        self.connection = self.reservation = self.prefill_leg = self.abort_reason = None
        if connection is not None and self.replica is not None:
            self.replica.client.release(connection)
        if reservation is not None:
            reservation.free()
        if leg is not None:
            leg.close(self.live)
