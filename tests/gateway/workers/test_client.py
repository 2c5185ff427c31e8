"""A worker's client of the scheduler: what it sends, and what becomes of requests when the scheduler fails."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

pytest.importorskip("httptools")

from headway.core.record import Outcome
from headway.core.request import Phase
from headway.gateway.clock import Clock
from headway.gateway.errors import ApiError
from headway.gateway.relay.request import CHAT
from headway.gateway.relay.request_reader import read_request
from headway.gateway.scheduling.in_flight import ReleaseReason, RequestEndedError, State
from headway.gateway.scheduling.request_state import Assignment
from headway.gateway.scheduling.stream_copy import StreamCopy, StreamPart
from headway.gateway.upstream.errors import RefusedError, UnreachableError
from headway.gateway.workers import client, protocol
from headway.gateway.workers.client import PendingRequest, RemoteHealth, RemoteScheduler
from headway.gateway.workers.protocol import Assigned, Released

BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}).encode()
REPLICA = protocol.ReplicaInfo(0, "pool", "m", "http://h:1", "", False, protocol.EngineState("name", 4096), "vllm")


class _Scheduler:
    """The other end: keeps the messages, and sends some."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.lost: list[str] = []
        self.client = RemoteScheduler(Clock(asyncio.get_running_loop()), None, lambda: self.lost.append("lost"))
        self.client.link.send = self.sent.append  # type: ignore[method-assign]

    def of(self, kind: type[Any]) -> list[Any]:
        return [message for message in self.sent if isinstance(message, kind)]

    def assign(self, number: int, replica: int | None = 0, needs_score: bool = False) -> None:
        schedule = protocol.Schedule(0.5, 7, "m", 0, Phase.ANSWERING, -1, 0, 0, 1.0, 1.0, "", None)
        self.client._receive([REPLICA, Assigned(number, replica, schedule, Assignment(), needs_score)])

    async def submit(self, number: int = 0, **assigned: Any) -> PendingRequest:
        """A request that is accepted and assigned."""
        submitted = asyncio.create_task(self.client.submit(read_request(CHAT, BODY, {}), "", f"id-{number}"))
        await asyncio.sleep(0)
        self.assign(number, **assigned)
        return await submitted


def _run(story: Callable[[_Scheduler], Awaitable[None]]) -> None:
    async def run() -> None:
        await story(_Scheduler())

    asyncio.run(run())


def test_a_submitted_request_gets_the_schedulers_state_and_replica() -> None:
    async def story(other: _Scheduler) -> None:
        request = await other.submit()
        (arrived,) = other.of(protocol.RequestArrived)
        assert (arrived.number, arrived.request_id, arrived.can_move) == (0, "id-0", True)
        replica = await request.wait_for_replica()
        assert (replica.name, replica.reported_model, request.live.prompt_tokens) == ("pool/0", "name", 7)

    _run(story)


def test_a_refused_request_raises_the_error_for_its_client() -> None:
    async def story(other: _Scheduler) -> None:
        submitted = asyncio.create_task(other.client.submit(read_request(CHAT, BODY, {}), "", "id"))
        await asyncio.sleep(0)
        other.client._receive(
            [protocol.RequestRefused(0, protocol.ClientError(429, "too many", "queue_full", None, 3))]
        )
        with pytest.raises(ApiError) as refused:
            await submitted
        assert (refused.value.status, refused.value.retry_after_s) == (429, 3) and not other.client.requests

    _run(story)


@pytest.mark.parametrize(
    ("reason", "outcome"),
    [
        (ReleaseReason.FINISHED, Outcome.FINISHED),
        (ReleaseReason.REFUSED, Outcome.REJECTED),
        (ReleaseReason.CANCELLED, Outcome.CANCELLED),
        (ReleaseReason.FAILED, None),
        (ReleaseReason.PREFILLED, None),
    ],
)
def test_a_release_is_sent_with_its_reason(reason: ReleaseReason, outcome: Outcome | None) -> None:
    async def story(other: _Scheduler) -> None:
        request = await other.submit()
        request.live.generated_tokens = 5
        other.client.release(request, reason)
        (released,) = other.of(Released)
        assert (released.reason, released.progress.generated_tokens) == (reason, 5)
        assert request.outcome is outcome and request.reservation is None
        assert bool(other.client.requests) == (outcome is None)

    _run(story)


def test_a_finished_answer_that_needs_a_score_awaits_it() -> None:
    async def story(other: _Scheduler) -> None:
        request = await other.submit(needs_score=True)
        other.client.release(request, ReleaseReason.FINISHED)
        assert request.outcome is None and request.state is State.SCORED
        accepted = asyncio.create_task(other.client.accept_or_escalate(request, 80.0))
        await asyncio.sleep(0)
        assert other.of(protocol.AnswerScored) == [protocol.AnswerScored(0, 80.0)]
        other.client._receive([protocol.RequestEnded(0, Outcome.FINISHED)])
        await accepted
        assert request.outcome is Outcome.FINISHED
        assert other.of(Released)[-1].reason is ReleaseReason.ACKNOWLEDGED

    _run(story)


def test_a_silent_scheduler_rejects_new_and_held_requests_and_lets_streams_go_on() -> None:
    async def story(other: _Scheduler) -> None:
        streaming, held = await other.submit(), await other.submit(1, replica=None)
        other.client.set_silent()
        assert streaming.outcome is None and held.outcome is Outcome.REJECTED
        with pytest.raises(RequestEndedError):
            await held.wait_for_replica()
        with pytest.raises(ApiError, match="does not answer"):
            await other.client.submit(read_request(CHAT, BODY, {}), "", "id")
        other.client.release(streaming, ReleaseReason.FAILED)
        assert streaming.outcome is Outcome.REJECTED
        other.client.set_responsive()
        assert (await other.submit(2)).outcome is None

    _run(story)


def test_a_request_is_not_sent_to_a_scheduler_that_fell_silent_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler would place the request once it reads again, and no one would release it."""

    async def story(other: _Scheduler) -> None:
        async def count(*arguments: Any) -> None:
            other.client.set_silent()

        monkeypatch.setattr(client, "count_prompt", count)
        with pytest.raises(ApiError, match="does not answer"):
            await other.client.submit(read_request(CHAT, BODY, {}), "", "id")
        assert not other.of(protocol.RequestArrived) and not other.client.requests

    _run(story)


def test_progress_of_all_streams_is_reported_together() -> None:
    async def story(other: _Scheduler) -> None:
        requests = [await other.submit(number) for number in range(3)]
        for _ in range(2):
            for request in requests:
                request.live.generated_tokens += 1
                request.count_tokens(1)
        assert not other.of(protocol.ProgressReport)
        async with asyncio.timeout(10):
            while len(other.of(protocol.ProgressReport)) < 3:
                await asyncio.sleep(0.001)
        assert [report.progress.generated_tokens for report in other.of(protocol.ProgressReport)] == [2, 2, 2]

    _run(story)


def test_a_report_brings_all_that_a_stream_has_sent() -> None:
    """A retry continues from the last report if its worker is killed."""

    async def story(other: _Scheduler) -> None:
        request = await other.submit()
        request.copy = StreamCopy()
        for num_reports in (1, 2):
            for part in (b"a", b"b"):
                request.live.generated_tokens += 1
                request.copy.extend(StreamPart(part, request.live.generated_tokens, None, None))
                request.count_tokens(1)
            async with asyncio.timeout(10):
                while len(other.of(protocol.StreamSent)) < num_reports:
                    await asyncio.sleep(0.001)
        assert [(sent.part.data, sent.part.tokens) for sent in other.of(protocol.StreamSent)] == [
            (b"ab", 2),
            (b"ab", 4),
        ]
        assert [report.progress.generated_tokens for report in other.of(protocol.ProgressReport)] == [2, 4]

    _run(story)


def test_successes_are_reported_once_for_many_and_failures_one_by_one() -> None:
    async def story(other: _Scheduler) -> None:
        replica: Any = (await other.submit()).replica
        other.sent.clear()
        health = RemoteHealth(other.client.link)
        for _ in range(3):
            health.succeeded(replica)
        health.failed(replica, RefusedError(503, b"busy"))
        health.failed(replica, UnreachableError("nobody listens"))
        health.succeeded(replica)
        kinds = [type(message).__name__ for message in other.sent]
        assert kinds == ["RequestSucceeded", "RequestFailed", "RequestFailed", "RequestSucceeded"]
        reported = [each.error.error() for each in other.of(protocol.RequestFailed)]
        assert [type(each) for each in reported] == [RefusedError, UnreachableError]
        assert isinstance(reported[0], RefusedError) and reported[0].status == 503

    _run(story)
