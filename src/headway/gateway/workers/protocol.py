"""The protocol between a worker and the scheduler: messages over one socket.

A frame consists of four bytes of length and a MessagePack array of messages. Messages sent within one turn of the event
loop share a frame. `number` is the worker's number for a request.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from operator import attrgetter
from typing import Any, TypeVar, cast

import msgspec
from msgspec import Struct

from headway.control.policies import FallbackReason
from headway.core.record import Outcome
from headway.core.request import Phase
from headway.gateway.relay.features import Features
from headway.gateway.scheduling.in_flight import ReleaseReason
from headway.gateway.scheduling.request_state import AnswerState, Assignment
from headway.gateway.scheduling.stream_copy import StreamKey, StreamPart
from headway.gateway.settings import Api, Judge, Key, Settings
from headway.gateway.telemetry.logs import LogOptions
from headway.gateway.telemetry.loop_delay import Delay
from headway.gateway.telemetry.metrics import HistogramCounts, ResponseCount
from headway.gateway.upstream import errors
from headway.gateway.upstream.errors import EngineError, RefusedError
from headway.limits.rates import RateLimit

_Kind = TypeVar("_Kind", bound=Struct)
_LENGTH = 4
MAX_MISSED = 5
"""Number of periods without a message after which the other end counts as hanging."""
_START_FACTOR = 5
"""Factor on the time to the first message, because a process must start first."""


class WorkerConfig(Struct):
    """The first message to a worker."""

    settings: Settings
    judge: Judge | None
    sends_priority: bool
    start_s: float
    """The gateway's start on the machine's monotonic clock, which all its processes share."""
    http: str
    """Path of the socket at which the scheduler serves all other HTTP endpoints."""
    certfile: str | None
    keyfile: str | None
    log: LogOptions = LogOptions()
    access_log: str | None = None
    stored_keys: tuple[Key, ...] | None = None


def _copier(kind: type[_Kind]) -> Callable[[object], _Kind]:
    """Makes a struct of an object's attributes that have the names of the struct's fields."""
    values = attrgetter(*kind.__struct_fields__)
    return lambda source: kind(*values(source))


def apply(state: Struct, target: object) -> None:
    """Set the attributes of `target` that have the names of the struct's fields."""
    for name in state.__struct_fields__:
        setattr(target, name, getattr(state, name))


# Messages from a worker.


class Progress(Struct, array_like=True, gc=False):
    """Progress of the current model's answer: fields of `Live`, by their names there."""

    generated_tokens: int
    prompt_tokens: int
    """Prompt tokens by the engine's count, otherwise by control's estimate; 0: unknown."""
    reasoning_tokens: int
    phase: Phase
    first_token_s: float
    answer_s: float
    reasoning_end_s: float
    keeps_model: bool = False
    cached_tokens: int = 0
    """Prompt tokens found in a prefix cache, by the engine's count."""


progress_of = _copier(Progress)
"""The progress of a `Live`."""


class RequestArrived(Struct, array_like=True, tag=0, gc=False):
    """A client has sent a request."""

    number: int
    request_id: str
    owner: str
    """Owner of the API key; "" without a key."""
    can_move: bool
    """Whether another replica can continue the answer."""
    features: Features
    is_streamed: bool = True
    stream_key: StreamKey | None = None
    """The key under which a retry can continue the stream; None if no retry can."""


class ProgressReport(Struct, array_like=True, tag=1, gc=False):
    number: int
    progress: Progress
    answer: AnswerState


class Released(Struct, array_like=True, tag=2, gc=False):
    """A request has left its replica: its connection is closed, or free for another request."""

    number: int
    reason: ReleaseReason
    progress: Progress
    answer: AnswerState


class AnswerScored(Struct, array_like=True, tag=3, gc=False):
    """A cascade's answer has a score, or scoring failed (None)."""

    number: int
    score: float | None


_KINDS: dict[str, type[EngineError]] = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, EngineError)
}


class ReportedError(Struct, array_like=True, gc=False):
    """An `EngineError`, without the body of a refusal."""

    kind: str
    """Name of the error's class, or of the nearest base class in `upstream.errors`."""
    message: str
    status: int = 0
    """HTTP status; 0 without an answer."""
    after_tokens: int = 0

    @classmethod
    def of(cls, error: EngineError) -> ReportedError:
        kind = next(each.__name__ for each in type(error).__mro__ if each.__name__ in _KINDS)
        return cls(kind, str(error), error.status if isinstance(error, RefusedError) else 0, error.after_tokens)

    def error(self) -> EngineError:
        kind = _KINDS[self.kind]
        error = kind(self.status, b"") if issubclass(kind, RefusedError) else kind()
        error.args, error.after_tokens = (self.message,), self.after_tokens
        return error


class RequestFailed(Struct, array_like=True, tag=4, gc=False):
    replica: int
    error: ReportedError


class RequestSucceeded(Struct, array_like=True, tag=5, gc=False):
    replica: int


class MetricsReport(Struct, array_like=True, tag=6, gc=False):
    """Inter-token latencies, gateway overheads, answers and delays of the loop since the last report."""

    counts: list[HistogramCounts]
    responses: list[ResponseCount] = []
    delays: list[Delay] = []


class WorkerLeaving(Struct, array_like=True, tag=7, gc=False):
    """The worker accepts no more connections."""


class Heartbeat(Struct, array_like=True, tag=8, gc=False):
    """Sent by both ends to show that the sender does not hang."""


class PrefillLegDone(Struct, array_like=True, tag=9, gc=False):
    """The prefill replica of a dual dispatch has sent the KV cache."""

    number: int


class BodyQuarantined(Struct, array_like=True, tag=20, gc=False):
    """Bars copies of a request that broke engines. Sent by the process that found the request, and passed on to the
    other processes."""

    digest: bytes
    until_s: float
    """Time until which the copies are barred, on the gateway's clock."""


class StreamSent(Struct, array_like=True, tag=10, gc=False):
    """Data sent to a stream's client since the last such message."""

    number: int
    part: StreamPart


class StartFailed(Struct, array_like=True, tag=11, gc=False):
    """The worker cannot start, and ends."""

    why: str


class WorkerIdle(Struct, array_like=True, tag=12, gc=False):
    """The gateway drains, and this worker has no requests left."""


class ChangeApplied(Struct, array_like=True, tag=13, gc=False):
    """This worker now applies the first unconfirmed `Reconfigured`."""


FromWorker = (
    RequestArrived | ProgressReport | Released | AnswerScored | RequestFailed | RequestSucceeded | MetricsReport
    | WorkerLeaving | Heartbeat | PrefillLegDone | StreamSent | StartFailed | BodyQuarantined
    | WorkerIdle | ChangeApplied
)  # fmt: skip


# Messages from the scheduler.


class Schedule(Struct, array_like=True, gc=False):
    """What control knows of a request: fields of `Live`, by their names there."""

    arrival_s: float
    prompt_tokens: int
    model: str
    tier: int
    phase: Phase
    stage_index: int
    attempt: int
    moves: int
    placed_s: float
    enqueued_s: float
    lora: str
    deadline_s: float | None


schedule_of = _copier(Schedule)
"""The schedule of a `Live`."""


class Assigned(Struct, array_like=True, tag=0, gc=False):
    """A request is accepted, and placed at a replica or held."""

    number: int
    replica: int | None
    """The replica; None if the request is held."""
    schedule: Schedule
    assignment: Assignment
    needs_score: bool = False
    slot: int | None = None
    prefill_replica: int | None = None
    """The prefill replica of a dual dispatch."""
    fallback: tuple[str, FallbackReason] | None = None
    """(requested model, reason why another model answers); None if the requested model answers."""


class ClientError(Struct, array_like=True, gc=False):
    """The error for a client: arguments of `ApiError`, by their names there."""

    status: int
    message: str
    code: str
    param: str | None = None
    retry_after_s: int | None = None
    reason: str = ""


client_error_of = _copier(ClientError)
"""The arguments of an `ApiError`."""


class RequestRefused(Struct, array_like=True, tag=1, gc=False):
    """A request is not accepted."""

    number: int
    error: ClientError


class RequestEnded(Struct, array_like=True, tag=2, gc=False):
    number: int
    outcome: Outcome
    retry_after_s: int = 1
    is_shed: bool = False


class AbortRequest(Struct, array_like=True, tag=3, gc=False):
    """A request must leave its replica."""

    number: int
    why: str
    target: int | None
    """The replica to which the request moves; None: not chosen yet, or no move."""
    is_prefill_leg_only: bool = False
    """Whether to abort only the request to the prefill replica of a dual dispatch."""


class EngineState(Struct, array_like=True, gc=False):
    """What is known of a replica's engine: attributes of `EngineEndpoint`, by their names there."""

    reported_model: str | None
    max_context_tokens: int
    bootstrap_port: int = 0
    event_block_tokens: int = 0
    engine_ordering: str = ""
    tokenizer: str = ""


engine_state_of = _copier(EngineState)
"""The engine's state of an `EngineEndpoint`."""


class ReplicaInfo(Struct, array_like=True, tag=4, gc=False):
    """A new or changed replica at which requests may be placed."""

    id: int
    pool: str
    model: str
    url: str
    api_key: str
    is_hosted: bool
    state: EngineState
    api: Api
    kv_folder: str | None = None
    loras: tuple[str, ...] = ()
    """The LoRA adapters that the engine lists, if the events of its KV cache are read."""


class ReplicaRemoved(Struct, array_like=True, tag=5, gc=False):
    """No more requests will be placed at a replica."""

    id: int


class StreamRestored(Struct, array_like=True, tag=6, gc=False):
    """Data that a request's client received before it retried. Sent before the request is assigned."""

    number: int
    part: StreamPart


class KeyLimits(Struct, array_like=True, tag=7, gc=False):
    """The remaining amounts of a key's limits. Sent before a request with the key is assigned or refused."""

    owner: str
    limits: tuple[RateLimit, ...]


class Reconfigured(Struct, array_like=True, tag=9, gc=False):
    """The settings and keys that apply from now on, because the fleet file was reloaded or the gateway drains."""

    settings: Settings
    sends_priority: bool
    is_closing: bool
    stored_keys: tuple[Key, ...] | None
    """Keys of the database; None if not known yet."""


class AllIdle(Struct, array_like=True, tag=10, gc=False):
    """No worker of the draining gateway has requests left. Until then, workers refuse new requests on their
    connections."""


FromScheduler = (
    Assigned | RequestRefused | RequestEnded | AbortRequest | ReplicaInfo | ReplicaRemoved | Heartbeat | StreamRestored
    | KeyLimits | Reconfigured | BodyQuarantined | AllIdle
)  # fmt: skip


def frame(message: object) -> bytes:
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(_LENGTH) + data


def receive_config(link: socket.socket) -> WorkerConfig:
    """Read the first message, before there is an event loop. Raises EOFError if the scheduler is gone."""
    size = int.from_bytes(_receive_exactly(link, _LENGTH))
    return msgspec.msgpack.decode(_receive_exactly(link, size), type=WorkerConfig)


def _receive_exactly(link: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = link.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return data


class Link(asyncio.Protocol):
    def __init__(
        self,
        kind: Any,
        on_messages: Callable[[list[Any]], None],
        on_lost: Callable[[], None],
        first_message: object = None,
    ) -> None:
        """`kind` is the union of the received messages. `on_messages` is called with each frame's messages, and
        `on_lost` when the other end is gone, unless this end was closed. `first_message` is sent in its own frame,
        before all others."""
        self._decode = msgspec.msgpack.Decoder(list[kind]).decode
        self._on_messages, self._on_lost = on_messages, on_lost
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._first_message = first_message
        self._has_connected = False
        self._received = b""
        self._unsent: list[Any] = []
        self.has_received = False
        """Whether a message has come since this attribute was last reset."""
        self.is_backed_up = False
        """Whether the other end does not read, so that the write buffer grows."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._has_connected = True
        if self._first_message is not None:
            self._transport.write(frame(self._first_message))
        self.flush()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._transport is not None:
            self._transport = None
            self._on_lost()

    def pause_writing(self) -> None:
        self.is_backed_up = True

    def resume_writing(self) -> None:
        self.is_backed_up = False

    def data_received(self, data: bytes) -> None:
        self.has_received = True
        data = self._received + data if self._received else data
        self._received = b""
        start, end = 0, len(data)
        while end - start >= _LENGTH:
            after = start + _LENGTH + int.from_bytes(data[start : start + _LENGTH])
            if after > end:
                break
            self._on_messages(self._decode(memoryview(data)[start + _LENGTH : after]))
            start = after
        self._received = data[start:]

    def send(self, message: Any) -> None:
        """Send within this turn of the event loop, or once connected. Does nothing if the other end is gone."""
        if not self._unsent:
            self._loop.call_soon(self.flush)
        self._unsent.append(message)

    def flush(self) -> None:
        if not self._has_connected:
            return
        unsent, self._unsent = self._unsent, []
        if unsent and self._transport is not None:
            self._transport.write(frame(unsent))

    def close(self) -> None:
        """Send the remaining messages, and close."""
        if self._transport is not None:
            self.flush()
            self._transport.close()
            self._transport = None

    def abort(self) -> None:
        """Treat the other end as gone."""
        if self._transport is not None:
            self._transport.abort()
            self._transport = None
            self._on_lost()


class HeartbeatMonitor:
    """One end's heartbeats. Periods are counted rather than timed, so that after a pause of the whole machine the other
    end does not seem to hang."""

    def __init__(
        self,
        link: Link,
        hang_s: float,
        on_silent: Callable[[], None],
        on_responsive: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_silent` is called after `hang_s` without a message, `on_responsive` at the first message after it."""
        self._link, self._period_s = link, hang_s / MAX_MISSED
        self._on_silent, self._on_responsive = on_silent, on_responsive
        self._num_missed = -_START_FACTOR * MAX_MISSED
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._period_s, self._beat)
        self._link.send(Heartbeat())

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _beat(self) -> None:
        self.start()
        has_received, self._link.has_received = self._link.has_received, False
        was_silent = self._num_missed >= MAX_MISSED
        self._num_missed = 0 if has_received else self._num_missed + 1
        if has_received and was_silent:
            self._on_responsive()
        elif self._num_missed == MAX_MISSED:
            self._on_silent()
