"""The scheduler's side of a worker: its requests are control's like any other, though their streams are elsewhere.

A request counts at its replica from before the worker is told to send it until the worker has said that its connection
there is closed, or is gone itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from headway.control.live import DECODING, Live
from headway.core.errors import HeadwayError
from headway.core.record import Outcome
from headway.gateway.errors import ApiError, logged
from headway.gateway.fleet.replica import LiveReplica
from headway.gateway.gateway import Gateway
from headway.gateway.scheduling.driver import Driver
from headway.gateway.scheduling.in_flight import InFlightRequest
from headway.gateway.upstream.engine import EngineEndpoint
from headway.gateway.upstream.errors import BrokenOffError, EngineError, RefusedError, UnreachableError
from headway.gateway.workers import protocol
from headway.gateway.workers.protocol import Assigned, Heard, Link, Over, Refused, Released, RequestState, Stop

log = logging.getLogger("headway.gateway")
_POLICY = ApiError(500, "a policy failed", "policy_error")


class RemoteRequest(InFlightRequest):
    """A ticket whose connection is a worker's."""

    def __init__(self, desk: WorkerSession, arrived: protocol.Arrived, live: Live) -> None:
        super().__init__(live, arrived.request_id)
        self._desk = desk
        self.number, self.num_chars = arrived.number, arrived.asked.num_chars
        self.may_move = arrived.can_move
        self.is_open = self.is_judged = self.is_known = False
        """The worker has it at a replica; the present answer will be judged; the worker waits to hear of its end."""
        self.read_tokens = 0
        """Of the prompt, by an engine's count."""
        self.spent_tokens = 0
        """On a cascade's answers that would not do."""

    @property
    def is_streaming(self) -> bool:
        """A replica has been sent it, or is about to be."""
        return self.is_open

    def stop(self, why: str) -> None:
        """Have the worker abort it."""
        if self.is_open:
            if self.moving_to is not None:
                self._desk.know(self.moving_to)
            self._desk.link.say(Stop(self.number, why, -1 if self.moving_to is None else self.moving_to.id))

    def stop_half(self, why: str) -> None:
        """Have the worker do so."""
        if self.is_open:
            self._desk.link.say(Stop(self.number, why, -1, is_single_phase=True))

    def wake(self) -> None:
        """Control has placed it, or has ended it."""
        if self.outcome is not None:
            if self.is_known:
                self._desk.over(self)
        elif self.seat is not None and not self.seat.waits:
            self.is_open, self.can_move = True, False
            self._desk.place(self)

    def leave(self) -> None:
        """The seat is kept until the worker has closed its connection."""
        if not self.is_open:
            super().leave()


class WorkerSession:
    """One worker's. `gone` is called when it takes no more connections, for whatever reason."""

    def __init__(self, gateway: Gateway, gone: Callable[[], None]) -> None:
        self._gateway, self._driver, self._gone = gateway, gateway.driver, gone
        self.link = Link(protocol.FromWorker, self._hear, self._lost)
        self._tickets: dict[int, RemoteRequest] = {}
        self._known: dict[int, tuple[str | None, int, int]] = {}
        """Of replicas, what the worker knows of them that may change."""
        gateway.on_gone.append(self._forget)

    # To the worker.

    def place(self, ticket: RemoteRequest) -> None:
        """It goes to its replica."""
        assert ticket.replica is not None and ticket.seat is not None
        self.know(ticket.replica)
        half = -1
        if ticket.half is not None:
            self.know(ticket.half.replica)
            half = ticket.half.replica.id
        self.link.say(Assigned(ticket.number, ticket.replica.id, self._standing(ticket), ticket.seat.slot, half))

    def over(self, ticket: RemoteRequest) -> None:
        """It has ended, as control sees it."""
        assert ticket.outcome is not None
        is_rejected = ticket.outcome is Outcome.REJECTED
        retry_after_s = self._gateway.scaling.expected_s(ticket.live.model) if is_rejected else 1
        self.link.say(Over(ticket.number, ticket.outcome, retry_after_s))

    def know(self, replica: EngineEndpoint) -> None:
        """The worker is told what is new of a replica."""
        state = replica.reported_model, replica.max_context_tokens, replica.bootstrap_port
        if self._known.get(replica.id) != state:
            self._known[replica.id] = state
            self.link.say(protocol.ReplicaInfo(
                replica.id, replica.pool, replica.model, replica.url, replica.adapter.api, *state[:2],
                None if replica.kv_folder is None else str(replica.kv_folder), replica.bootstrap_port,
            ))  # fmt: skip

    def _forget(self, replica: LiveReplica) -> None:
        if self._known.pop(replica.id, None) is not None:
            self.link.say(protocol.Gone(replica.id))

    def _standing(self, ticket: RemoteRequest) -> RequestState:
        live = ticket.live
        ticket.is_judged = self._driver.judges(live)
        return RequestState(
            live.arrival_s, live.prompt_tokens, live.model, live.tier, live.phase, live.stage_index, ticket.is_judged,
            ticket.is_split, ticket.is_kept, live.attempt, live.moves, live.placed_s, live.enqueued_s,
        )  # fmt: skip

    def _waits(self, ticket: RemoteRequest) -> None:
        """If it is neither placed nor over, the worker has not heard of it."""
        if ticket.outcome is None and (ticket.seat is None or ticket.seat.waits):
            self.link.say(Assigned(ticket.number, -1, self._standing(ticket)))

    # From the worker.

    def _hear(self, messages: list[protocol.FromWorker]) -> None:
        for message in messages:
            with logged(f"a worker's {type(message).__name__} could not be dealt with"):
                _HEARD[type(message)](self, message)

    def _arrived(self, arrived: protocol.Arrived) -> None:
        number = arrived.number

        def made(live: Live) -> RemoteRequest:
            self._tickets[number] = ticket = RemoteRequest(self, arrived, live)
            return ticket

        try:
            self._gateway.admit(arrived.asked, made, self._gateway.keys.of(arrived.owner))
        except (ApiError, HeadwayError) as error:
            self._tickets.pop(number, None)
            told = error if isinstance(error, ApiError) else _POLICY
            self.link.say(Refused(number, told.status, told.message, told.code, told.param, told.retry_after_s))
            if told is _POLICY:
                raise
        else:
            ticket = self._tickets[number]
            ticket.is_known = True
            if ticket.outcome is not None:
                ticket.wake()
            self._waits(ticket)

    def _progress(self, progress: protocol.Progress) -> None:
        ticket = self._tickets.get(progress.number)
        if ticket is not None:
            self._take(ticket, progress.heard)

    def _take(self, ticket: RemoteRequest, heard: Heard) -> None:
        """What has come so far. Nothing counts of a request that has ended, or is nowhere."""
        live, seat = ticket.live, ticket.seat
        if ticket.outcome is not None or seat is None:
            return
        if heard.prompt_tokens not in (0, live.prompt_tokens):
            ticket.read_tokens = live.prompt_tokens = heard.prompt_tokens  # type: ignore[misc]  # thawed, as below
        tokens = heard.generated_tokens - live.generated_tokens
        live.first_token_s = heard.first_token_s
        if tokens:
            live.generated_tokens += tokens
            seat.produced(tokens)
            live.stage, ticket.can_move = DECODING, ticket.may_move
        live.reasoning_tokens = heard.reasoning_tokens  # type: ignore[misc]
        live.phase, live.answer_s = heard.phase, heard.answer_s
        seat.requeue()
        if heard.reasoning_end_s == heard.reasoning_end_s and live.reasoning_end_s != live.reasoning_end_s:
            live.reasoning_end_s = heard.reasoning_end_s
            self._driver.phase_changed(live)

    def _computed(self, computed: protocol.Computed) -> None:
        if (ticket := self._tickets.get(computed.number)) is not None:
            self._driver.computed(ticket)

    def _left(self, left: Released) -> None:
        ticket = self._tickets.get(left.number)
        if ticket is None:
            return
        ticket.is_whole |= left.is_whole
        self._take(ticket, left.heard)
        ticket.is_open = False
        is_judged = left.why == protocol.FINISHED and ticket.is_judged and ticket.outcome is None
        ticket.is_known = is_judged or left.why in protocol.GOES_ON
        try:
            self._let_go(ticket, left.why)
            if ticket.seat is not None and not ticket.is_open:
                ticket.wake()  # it goes on where it is
        finally:
            if not ticket.is_known:
                del self._tickets[left.number]
                self._end(ticket)

    def _let_go(self, ticket: RemoteRequest, why: int) -> None:
        driver: Driver = self._driver
        if ticket.outcome is not None:
            driver.emptied(ticket)
            self._gateway.fleet.ended()
        elif why == protocol.FINISHED:
            driver.finished(ticket)
        elif why == protocol.REFUSED:
            driver.refused(ticket)
        elif ticket.moving_to is not None and why in protocol.GOES_ON:
            driver.landed(ticket)
        elif why in (protocol.FAILED, protocol.FAILED_UNTOUCHED):
            driver.failed(ticket, again=True, untouched=why == protocol.FAILED_UNTOUCHED)
        elif why in (protocol.PREFILLED, protocol.NOT_KEPT):
            driver.prefilled(ticket, kept=why == protocol.PREFILLED)
        elif why == protocol.UNPREFILLED:
            driver.unprefilled(ticket)
        elif why == protocol.HALF_FAILED:
            driver.half_failed(ticket)
        else:
            driver.gave_up(ticket)

    def _end(self, ticket: RemoteRequest) -> None:
        """Nobody at the worker waits for it any more, whatever went wrong."""
        try:
            self._driver.forget(ticket)
        finally:
            live = ticket.live
            used_tokens = ticket.spent_tokens + live.prompt_tokens + live.generated_tokens
            self._gateway.settle(ticket, ticket.num_chars, ticket.read_tokens or None, used_tokens)

    def _judged(self, judged: protocol.Judged) -> None:
        ticket = self._tickets.get(judged.number)
        if ticket is None or ticket.outcome is not None:
            return
        live = ticket.live
        used_tokens, stage = live.prompt_tokens + live.generated_tokens, live.stage_index
        self._driver.scored(ticket, judged.score)
        if live.stage_index != stage:
            ticket.spent_tokens += used_tokens
        self._waits(ticket)

    def _trouble(self, trouble: protocol.Trouble) -> None:
        error: EngineError = UnreachableError() if trouble.is_unreachable else EngineError()
        if trouble.is_broken_off:
            error = BrokenOffError()
        if trouble.status:
            error = RefusedError(trouble.status, b"")
        error.args = (trouble.said,)
        self._gateway.watch.failed(self._gateway.replicas[trouble.replica], error)

    def _well(self, well: protocol.RequestSucceeded) -> None:
        self._gateway.watch.succeeded(self._gateway.replicas[well.replica])

    def _counted(self, counted: protocol.Counted) -> None:
        self._gateway.telemetry.merge(counted.counts)

    def _leaving(self, leaving: protocol.Leaving) -> None:
        self._gone()

    def _lost(self) -> None:
        """The worker is gone, and with it all connections that it had: its clients have given up."""
        self._gateway.on_gone.remove(self._forget)
        # Those that wait go first, so that none of them is given the room that the others leave.
        tickets = sorted(self._tickets.values(), key=lambda ticket: ticket.seat is not None)
        self._tickets = {}
        for ticket in tickets:
            ticket.is_open = ticket.is_known = False
            has_ended = ticket.outcome is not None
            with logged("a request whose worker is gone could not be given up"):
                self._end(ticket)
                if has_ended:
                    self._let_go(ticket, protocol.CLOSED)
        self._gone()


_HEARD: dict[type[Any], Callable[[WorkerSession, Any], None]] = {
    protocol.Arrived: WorkerSession._arrived,
    protocol.Progress: WorkerSession._progress,
    protocol.Released: WorkerSession._left,
    protocol.Judged: WorkerSession._judged,
    protocol.Trouble: WorkerSession._trouble,
    protocol.RequestSucceeded: WorkerSession._well,
    protocol.Counted: WorkerSession._counted,
    protocol.Leaving: WorkerSession._leaving,
    protocol.Beat: lambda desk, beat: None,
    protocol.Computed: WorkerSession._computed,
}
