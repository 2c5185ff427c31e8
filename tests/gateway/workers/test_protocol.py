"""Frames between a worker and the scheduler, and the ends of a link."""

from __future__ import annotations

import asyncio
import socket
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

pytest.importorskip("httptools")

from headway.control.live import Live
from headway.core.record import Outcome
from headway.core.request import Phase
from headway.gateway.errors import ApiError
from headway.gateway.scheduling.in_flight import RESUMES, ReleaseReason
from headway.gateway.scheduling.request_state import AnswerState, Assignment
from headway.gateway.settings import Settings
from headway.gateway.upstream import errors
from headway.gateway.upstream.client import Client
from headway.gateway.upstream.dialects import ADAPTERS
from headway.gateway.upstream.engine import EngineEndpoint
from headway.gateway.upstream.errors import EngineError, RefusedError, UnreachableError
from headway.gateway.workers import protocol
from headway.gateway.workers.protocol import Link, WorkerConfig, frame, receive_config

PROGRESS = protocol.Progress(3, 100, 1, Phase.ANSWERING, 1.0, 2.0, 1.5)
ANSWER = AnswerState(unread={"JSON": 1}, longest_gap_s=0.5)
STATE = protocol.Schedule(0.5, 100, "m", 1, Phase.REASONING, -1, 0, 2, 1.0, 1.5, "lora", 9.0), Assignment(True)
FROM_WORKER: list[Any] = [
    protocol.ProgressReport(1, PROGRESS, ANSWER),
    protocol.Released(1, ReleaseReason.PREFILLED, PROGRESS, ANSWER),
    protocol.AnswerScored(1, None),
    protocol.RequestFailed(0, protocol.ReportedError("BrokenOffError", "reset", after_tokens=3)),
    protocol.RequestSucceeded(2),
    protocol.MetricsReport([("m", "p", 0, "", {1: 2}, 0.5)]),
    protocol.WorkerLeaving(),
    protocol.Heartbeat(),
    protocol.PrefillLegDone(1),
    protocol.ChangeApplied(),
]
FROM_SCHEDULER: list[Any] = [
    protocol.Assigned(1, None, *STATE),
    protocol.Assigned(1, 0, *STATE, slot=3, prefill_replica=2),
    protocol.RequestRefused(1, protocol.ClientError(429, "too many", "queue_full", None, 1)),
    protocol.RequestEnded(1, Outcome.REJECTED, 7),
    protocol.AbortRequest(1, "it moves", 2),
    protocol.ReplicaInfo(0, "p", "m", "http://h:1", "key", True, protocol.EngineState(None, 4096), "vllm"),
    protocol.ReplicaRemoved(0),
]


class _Transport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.is_closed = False

    def write(self, data: Any) -> None:
        self.written.append(bytes(data))

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = True


def _link(kind: Any) -> tuple[Link, _Transport, list[Any], list[str]]:
    received: list[Any] = []
    lost: list[str] = []
    link, transport = Link(kind, received.extend, lambda: lost.append("lost")), _Transport()
    link.connection_made(transport)
    return link, transport, received, lost


@pytest.mark.parametrize("size", [1, 2, 7, 1 << 20])
def test_messages_arrive_however_their_frames_are_cut(size: int) -> None:
    async def story() -> None:
        for kind, messages in ((protocol.FromWorker, FROM_WORKER), (protocol.FromScheduler, FROM_SCHEDULER)):
            link, _, received, _ = _link(kind)
            data = frame(messages[:2]) + frame(messages[2:])
            for start in range(0, len(data), size):
                link.data_received(data[start : start + size])
            assert received == messages and link.has_received

    asyncio.run(story())


class _OwnError(UnreachableError):
    """A kind of one process, which others know by its base class."""


KINDS = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, EngineError)]


@pytest.mark.parametrize("kind", [*KINDS, _OwnError], ids=lambda kind: kind.__name__)
def test_an_engines_error_is_the_same_at_the_scheduler(kind: type[EngineError]) -> None:
    error = kind(503, b"busy") if issubclass(kind, RefusedError) else kind("reset")
    error.after_tokens = 7
    message = protocol.RequestFailed(0, protocol.ReportedError.of(error))
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=protocol.RequestFailed).error.error()
    assert type(received) is (UnreachableError if kind is _OwnError else kind)
    assert str(received) == str(error) and received.after_tokens == 7
    assert received.is_untouched == error.is_untouched
    assert getattr(received, "status", None) == getattr(error, "status", None)


def test_the_error_of_a_refused_request_is_the_same_at_the_worker() -> None:
    error = ApiError(429, "too many", "rate_limited", "model", 3, "tokens")
    message = protocol.RequestRefused(1, protocol.client_error_of(error))
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=protocol.RequestRefused).error
    assert vars(ApiError(*msgspec.structs.astuple(received))) == vars(error)


def test_messages_of_one_turn_of_the_loop_share_a_frame() -> None:
    async def story() -> None:
        link, transport, _, _ = _link(protocol.FromWorker)
        link.send(protocol.Heartbeat())
        link.send(protocol.RequestSucceeded(1))
        assert not transport.written
        await asyncio.sleep(0)
        assert transport.written == [frame([protocol.Heartbeat(), protocol.RequestSucceeded(1)])]
        link.send(protocol.Heartbeat())
        link.close()
        assert transport.written[1:] == [frame([protocol.Heartbeat()])] and transport.is_closed
        link.send(protocol.Heartbeat())
        await asyncio.sleep(0)
        assert len(transport.written) == 2, "a closed link sends nothing"

    asyncio.run(story())


def test_the_loss_of_the_other_end_is_reported_once_and_not_after_close() -> None:
    async def story() -> None:
        link, transport, _, lost = _link(protocol.FromWorker)
        link.abort()
        link.connection_lost(None)
        assert lost == ["lost"] and transport.is_closed
        link, _, _, lost = _link(protocol.FromWorker)
        link.close()
        link.connection_lost(None)
        assert not lost

    asyncio.run(story())


def test_a_full_buffer_is_seen() -> None:
    async def story() -> None:
        link, _, _, _ = _link(protocol.FromWorker)
        link.pause_writing()
        assert link.is_backed_up
        link.resume_writing()
        assert not link.is_backed_up

    asyncio.run(story())


def test_the_configuration_comes_before_what_was_sent_while_the_link_was_connecting() -> None:
    config = WorkerConfig(Settings(), None, True, 12.5, "/tmp/http", None, None)

    async def story() -> None:
        link, transport = Link(protocol.FromScheduler, lambda messages: None, lambda: None, config), _Transport()
        link.send(protocol.AllIdle())
        await asyncio.sleep(0.01)
        link.connection_made(transport)
        assert transport.written == [frame(config), frame([protocol.AllIdle()])]

    asyncio.run(story())


def test_a_worker_reads_its_configuration_and_notices_that_the_scheduler_is_gone() -> None:
    config = WorkerConfig(Settings(hold_s=3.0), None, True, 12.5, "/tmp/http", None, None)
    ours, theirs = socket.socketpair()
    with theirs:
        with ours:
            ours.sendall(frame(config) + frame([protocol.Heartbeat()]))
            assert receive_config(theirs) == config
        theirs.recv(1 << 10)
        with pytest.raises(EOFError):
            receive_config(theirs)


def test_reasons_after_which_a_request_resumes() -> None:
    ends = {ReleaseReason.FINISHED, ReleaseReason.REFUSED, ReleaseReason.CANCELLED, ReleaseReason.ACKNOWLEDGED}
    assert set(ReleaseReason) - RESUMES == ends


def test_the_fields_of_a_request_and_of_an_engine_arrive_under_their_own_names() -> None:
    client = Client("http://h:1", transport=SimpleNamespace())  # type: ignore[arg-type]
    engines = [EngineEndpoint(0, "p", "m", "http://h:1", ADAPTERS["vllm"], 4096, client) for _ in range(2)]
    lives = [Live(0, 0.0, 1, 1), Live(1, 0.0, 1, 1)]
    kinds = (
        (protocol.Progress, protocol.progress_of, lives),
        (protocol.Schedule, protocol.schedule_of, lives),
        (protocol.EngineState, protocol.engine_state_of, engines),
    )
    for kind, state_of, (sender, receiver) in kinds:
        names = kind.__struct_fields__
        for value, name in enumerate(names, start=10):
            setattr(sender, name, value)
        protocol.apply(state_of(sender), receiver)
        assert [getattr(receiver, name) for name in names] == list(range(10, 10 + len(names)))
