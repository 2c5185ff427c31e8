"""A relay without a gateway: a scheduler with a fixed order of replicas, and a writer that keeps the response."""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from headway.control.live import Live
from headway.core.record import Outcome
from headway.gateway.errors import ApiError
from headway.gateway.relay.quarantine import Quarantine
from headway.gateway.relay.relay import Relay
from headway.gateway.relay.request import CHAT, ClientRequest
from headway.gateway.relay.request_reader import read_request
from headway.gateway.scheduling.in_flight import InFlightRequest, ReleaseReason, State
from headway.gateway.scheduling.scorer import ConfidenceMeter
from headway.gateway.settings import Api
from headway.gateway.telemetry.metrics import PrometheusMetrics
from headway.gateway.upstream.client import Client
from headway.gateway.upstream.dialects import ADAPTERS
from headway.gateway.upstream.engine import EngineEndpoint
from headway.gateway.upstream.errors import EngineError
from headway.gateway.upstream.health import Refusals
from in_memory import InMemoryTransport, Serve

ENDS = {
    ReleaseReason.FINISHED: Outcome.FINISHED,
    ReleaseReason.REFUSED: Outcome.REJECTED,
    ReleaseReason.CANCELLED: Outcome.CANCELLED,
}


class Reservation:
    """A request's share of a replica's counts."""

    slot: int | None = None
    waits_for_slot = False

    def __init__(self) -> None:
        self.tokens = 0
        self.is_free = False

    def count_tokens(self, tokens: int) -> None:
        self.tokens += tokens

    def free(self) -> None:
        self.is_free = True


class OrderedScheduler:
    """Places a request at its replicas in turn, and rejects it after the last. Satisfies `Scheduler`.

    `scores` are the scores of a cascade's answers but the last one's; 50 and more are accepted.
    """

    now = 1.0
    clock = SimpleNamespace(now=now)

    def __init__(self, replicas: Sequence[EngineEndpoint], scores: Sequence[float] = ()) -> None:
        self._replicas, self._scores = list(replicas), list(scores)
        self.reasons: list[ReleaseReason] = []
        self.scored: list[str] = []
        self.reservations: list[Reservation] = []
        self.phase_changes = 0
        self.metrics = PrometheusMetrics()
        self.scorer: Any = SimpleNamespace(confidence_meter=lambda: None, score=self._score)

    def place(self, request: InFlightRequest) -> None:
        """Place the request at the next replica."""
        request.needs_score = bool(self._scores)
        if not self._replicas:
            request.end(Outcome.REJECTED)
            return
        request.enter(State.PLACED)
        request.replica = self._replicas.pop(0)
        request.reservation = reservation = Reservation()
        self.reservations.append(reservation)

    def release(self, request: InFlightRequest, reason: ReleaseReason) -> None:
        self.reasons.append(reason)
        if reason is ReleaseReason.CANCELLED:
            request.abort("the client has left")
        request.detach()
        if reason is ReleaseReason.FINISHED and self._scores:
            request.enter(State.SCORED)
        elif reason in ENDS:
            if request.outcome is None:
                request.end(ENDS[reason])
        else:
            request.leave()
            request.move_target = None
            self.place(request)

    async def _score(
        self, request: InFlightRequest, question: str, answer: str, confidence: ConfidenceMeter | None
    ) -> float | None:
        self.scored.append(answer)
        return self._scores.pop(0)

    async def accept_or_escalate(self, request: InFlightRequest, score: float | None) -> None:
        request.enter(State.HELD)
        if score is not None and score >= 50:
            request.end(Outcome.FINISHED)
        else:
            request.escalated_tokens = request.used_tokens
            self.place(request)

    def phase_changed(self, live: Live) -> None:
        self.phase_changes += 1

    def prefill_leg_done(self, request: InFlightRequest) -> None:
        return

    def drop(self, request: InFlightRequest) -> None:
        request.detach()


class Health:
    """Keeps the reports about replicas."""

    def __init__(self) -> None:
        self.reports: list[tuple[str, str]] = []
        self._refusals = Refusals()

    def needs_confirmation(self, replica: EngineEndpoint, status: int) -> bool:
        return self._refusals.needs_confirmation(replica, status)

    def refusal_confirmed(self, replica: EngineEndpoint) -> None:
        self._refusals.confirmed(replica)

    def has_other(self, replica: EngineEndpoint) -> bool:
        return False

    def failed(self, replica: EngineEndpoint, error: EngineError) -> None:
        self.reports.append((replica.name, str(error)))

    def succeeded(self, replica: EngineEndpoint) -> None:
        self.reports.append((replica.name, "succeeded"))


class KeepingWriter:
    """Keeps a response. Satisfies `ResponseWriter`."""

    is_full = False

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.pieces: list[bytes] = []
        self.is_complete = False

    def start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        assert not self.status
        self.status = status
        self.headers = {name.decode(): value.decode() for name, value in headers}

    def write(self, body: bytes, more: bool = False) -> None:
        assert self.status and not self.is_complete
        self.pieces.append(body)
        self.is_complete = not more

    async def drain(self) -> None:
        return

    @property
    def body(self) -> bytes:
        return b"".join(self.pieces)

    def events(self) -> list[Any]:
        """The data of each event; "[DONE]" as such."""
        parts = [part.split(b"data: ", 1)[1] for part in self.body.split(b"\n\n") if b"data: " in part]
        return ["[DONE]" if part == b"[DONE]" else json.loads(part) for part in parts]

    def text(self) -> str:
        """The content of all chat chunks."""
        chunks = [event for event in self.events() if event != "[DONE]" and "choices" in event]
        return "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])


def chat_request(headers: dict[str, str] | None = None, path: str = CHAT, **fields: Any) -> ClientRequest:
    """A client's request."""
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 10, **fields}
    try:
        return read_request(path, json.dumps(body).encode(), headers or {})
    except ApiError as error:
        raise AssertionError(error.message) from error


def engine(id: int, serve: Serve, api: Api = "vllm") -> EngineEndpoint:
    """An engine in memory."""
    client = Client("http://engine", transport=InMemoryTransport(serve))
    return EngineEndpoint(id, "pool", "m", "http://engine", ADAPTERS[api], 4096, client)


def relay_of(
    request: ClientRequest, scheduler: OrderedScheduler, max_attempts: int = 3, quarantine: Quarantine | None = None
) -> tuple[Relay, KeepingWriter, Health]:
    """A relay whose request is placed."""
    in_flight = InFlightRequest(Live(0, 0.0, 5, request.max_tokens or 1, model=request.model), "r1")
    scheduler.place(in_flight)
    writer, health = KeepingWriter(), Health()
    relay = Relay(request, in_flight, scheduler, health, writer, max_attempts, True, quarantine or Quarantine(60.0))
    return relay, writer, health
