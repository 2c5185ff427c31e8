"""What a worker and the scheduler say to each other: messages, in batches, over one socket.

A batch is four bytes of length and an array in MessagePack; what is said within one turn of the event loop goes
together. Requests have the worker's numbers.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, cast

import msgspec
from msgspec import Struct

from headway.core.record import Outcome
from headway.core.request import Phase
from headway.gateway.relay.request import Features
from headway.gateway.settings import Api, Judge, Settings
from headway.gateway.telemetry.metrics import HistogramCounts

_LENGTH = 4


class Welcome(Struct):
    """The first that a worker hears."""

    settings: Settings
    judge: Judge | None
    """Of cascades."""
    tell_priority: bool
    start_s: float
    """Of the gateway, on the clock that all processes of a machine share."""
    http: str
    """The socket at which the scheduler answers what workers do not."""
    certfile: str | None
    keyfile: str | None


# From a worker.


class Heard(Struct, array_like=True, gc=False):
    """What has come from an engine so far, of the model that answers at present."""

    generated_tokens: int
    prompt_tokens: int
    """As the engine counted them, or as control thought; 0: the worker does not know."""
    reasoning_tokens: int
    phase: Phase
    first_token_s: float
    answer_s: float
    reasoning_end_s: float


class Arrived(Struct, array_like=True, tag=0, gc=False):
    """A request comes in."""

    number: int
    request_id: str
    owner: str
    """The key's, "" without one."""
    can_move: bool
    """Its answer can be continued elsewhere."""
    asked: Features


class Progress(Struct, array_like=True, tag=1, gc=False):
    """Of a stream."""

    number: int
    heard: Heard


class Released(Struct, array_like=True, tag=2, gc=False):
    """A request is at no replica any more: its connection there is closed, or free for another."""

    number: int
    why: int
    is_whole: bool
    heard: Heard


FINISHED, FAILED, FAILED_UNTOUCHED, REFUSED, GAVE_UP, LANDED, PREFILLED, NOT_KEPT, UNPREFILLED, CLOSED = range(10)
HALF_FAILED = 10
"""Why: as `scheduler.Scheduler` has them; CLOSED is the answer to `Over`."""
GOES_ON = frozenset((FAILED, FAILED_UNTOUCHED, LANDED, PREFILLED, NOT_KEPT, UNPREFILLED, HALF_FAILED))
"""The worker then waits to hear where to."""


class Judged(Struct, array_like=True, tag=3, gc=False):
    """A cascade's answer has its score, or there is none."""

    number: int
    score: float | None


class Trouble(Struct, array_like=True, tag=4, gc=False):
    """A request failed at a replica."""

    replica: int
    said: str
    status: int
    """0: it was no answer."""
    is_unreachable: bool
    is_broken_off: bool


class RequestSucceeded(Struct, array_like=True, tag=5, gc=False):
    """A request was answered by a replica."""

    replica: int


class Counted(Struct, array_like=True, tag=6, gc=False):
    """Times between tokens, and what the gateway itself took, since this was last said."""

    counts: list[HistogramCounts]


class Leaving(Struct, array_like=True, tag=7, gc=False):
    """The worker takes no more connections."""


class Beat(Struct, array_like=True, tag=8, gc=False):
    """Whoever says it, either end, does not hang."""


class Computed(Struct, array_like=True, tag=9, gc=False):
    """Who computed a request's prompt at the same time as another waited for it is done."""

    number: int


FromWorker = Arrived | Progress | Released | Judged | Trouble | RequestSucceeded | Counted | Leaving | Beat | Computed


# From the scheduler.


class RequestState(Struct, array_like=True, gc=False):
    """A request, as control has it."""

    arrival_s: float
    prompt_tokens: int
    model: str
    tier: int
    phase: Phase
    stage_index: int
    is_judged: bool
    """The present model's answer will be."""
    is_split: bool
    is_kept: bool
    attempt: int
    moves: int
    placed_s: float
    enqueued_s: float


class Assigned(Struct, array_like=True, tag=0, gc=False):
    """A request is taken, and goes to a replica; or it waits."""

    number: int
    replica: int
    """-1: it waits."""
    standing: RequestState
    slot: int | None = None
    """Of its engine's."""
    half: int = -1
    """Who computes its prompt at the same time; -1: nobody else."""


class Refused(Struct, array_like=True, tag=1, gc=False):
    """A request is not taken: what its client is told."""

    number: int
    status: int
    message: str
    code: str
    param: str | None
    retry_after_s: int | None


class Over(Struct, array_like=True, tag=2, gc=False):
    """A request has ended, as control sees it."""

    number: int
    outcome: Outcome
    retry_after_s: int = 1


class Stop(Struct, array_like=True, tag=3, gc=False):
    """A request is to leave its replica."""

    number: int
    why: str
    target: int
    """Where it moves to; -1: nowhere yet."""
    is_single_phase: bool = False
    """Only who computes its prompt at the same time does not answer any more."""


class ReplicaInfo(Struct, array_like=True, tag=4, gc=False):
    """A replica that requests may be sent to, as it is now."""

    id: int
    pool: str
    model: str
    url: str
    api: Api
    served: str | None
    max_context_tokens: int
    kv_folder: str | None
    """Through which it hands over KV caches."""
    bootstrap_port: int = 0
    """Where it is asked for KV caches."""


class Gone(Struct, array_like=True, tag=5, gc=False):
    """A replica that does not come back."""

    id: int


FromScheduler = Assigned | Refused | Over | Stop | ReplicaInfo | Gone | Beat


def batch(message: object) -> bytes:
    """One message or a list of them, framed."""
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(_LENGTH) + data


def read_welcome(link: socket.socket) -> Welcome:
    """Wait for it, before there is an event loop."""
    size = int.from_bytes(_exactly(link, _LENGTH))
    return msgspec.msgpack.decode(_exactly(link, size), type=Welcome)


def _exactly(link: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = link.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return data


class Link(asyncio.Protocol):
    """One end. `hear` is called with each batch, `lost` when the other end is gone, unless this one was closed."""

    def __init__(self, kind: Any, hear: Callable[[list[Any]], None], lost: Callable[[], None]) -> None:
        self._decode = msgspec.msgpack.Decoder(list[kind]).decode
        self._hear, self._lost = hear, lost
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._data = b""
        self._said: list[Any] = []
        self.is_heard = False
        """Something has come, since this was last taken note of."""
        self.is_choked = False
        """The other end does not read, and what is said piles up."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._transport is not None:
            self._transport = None
            self._lost()

    def pause_writing(self) -> None:
        self.is_choked = True

    def resume_writing(self) -> None:
        self.is_choked = False

    def data_received(self, data: bytes) -> None:
        self.is_heard = True
        self._data = data = self._data + data if self._data else data
        at, end = 0, len(data)
        while end - at >= _LENGTH:
            after = at + _LENGTH + int.from_bytes(data[at : at + _LENGTH])
            if after > end:
                break
            self._hear(self._decode(memoryview(data)[at + _LENGTH : after]))
            at = after
        self._data = data[at:]

    def say(self, message: Any) -> None:
        """In this turn of the event loop. To nobody, if the other end is gone."""
        if not self._said:
            self._loop.call_soon(self.flush)
        self._said.append(message)

    def flush(self) -> None:
        """All that was said goes before anything that is written from now on."""
        said, self._said = self._said, []
        if said and self._transport is not None:
            self._transport.write(batch(said))

    def close(self) -> None:
        """Say no more."""
        if self._transport is not None:
            self.flush()
            self._transport.close()
            self._transport = None

    def lose(self) -> None:
        """The other end is as good as gone: nothing more is heard of it."""
        if self._transport is not None:
            self._transport.abort()
            self._transport = None
            self._lost()
