"""Heartbeats: a hanging worker is replaced, and a hanging scheduler is not waited for."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import serving
from serving import MODEL, chat, eventually, metric, send, until
from worker_fleet import (
    gateway_with_workers,
    is_alive,
    num_in_flight,
    started_stream,
    wait_until_counts_agree,
    worker_pids,
)

pytest.importorskip("httptools")
from headway.gateway.workers.protocol import FromScheduler, FromWorker, Heartbeat, HeartbeatMonitor, Link, WorkerLeaving

HANG_S = 1.0


@pytest.fixture(scope="module")
def engines() -> Iterator[list[serving.Process]]:
    made = [serving.emulator()]
    with serving.closing(*made):
        yield made


@pytest.fixture
def front(engines: list[serving.Process], tmp_path: Path) -> Iterator[serving.Process]:
    path = serving.fleet_file(tmp_path, [each.url for each in engines], gateway={"hang_s": HANG_S, "batches": {}})
    made = gateway_with_workers(path, 2)
    with serving.closing(made):
        serving.all_up(made, 1)
        yield made


class End:
    """Of a link: what it has received, and what became of the other end."""

    def __init__(self, kind: Any, hang_s: float) -> None:
        self.received: list[Any] = []
        self.events: list[str] = []
        self.link = Link(kind, self.received.extend, lambda: self.events.append("lost"))
        self.monitor = HeartbeatMonitor(
            self.link, hang_s, lambda: self.events.append("hangs"), lambda: self.events.append("is back")
        )


async def _linked(hang_s: float = 0.1) -> tuple[End, End]:
    ends = End(FromWorker, hang_s), End(FromScheduler, hang_s)
    for end, link in zip(ends, socket.socketpair(), strict=True):
        link.setblocking(False)
        await asyncio.get_running_loop().create_unix_connection(lambda end=end: end.link, sock=link)  # type: ignore[misc]
    return ends


def test_a_hanging_end_is_noticed_but_a_pause_of_both_is_not_taken_for_one() -> None:
    async def story() -> None:
        one, other = await _linked()
        for end in (one, other):
            end.monitor.start()
        await eventually(lambda: other.received.count(Heartbeat()) > 9)
        time.sleep(0.5)  # both of them, five times as long as one that hangs is waited for
        for _ in range(20):
            before = len(other.received)
            await eventually(lambda: len(other.received) > before)  # noqa: B023
        assert one.events == other.events == []
        other.monitor.stop()
        await eventually(lambda: one.events == ["hangs"])
        other.monitor.start()
        await eventually(lambda: one.events == ["hangs", "is back"])
        for end in (one, other):
            end.monitor.stop()
            end.link.close()

    asyncio.run(story())


def test_an_aborted_link_receives_nothing() -> None:
    async def story() -> None:
        one, other = await _linked()
        other.link.send(Heartbeat())
        await eventually(lambda: one.received == [Heartbeat()])
        other.link.send(WorkerLeaving())
        other.link.flush()  # it is on its way
        one.link.abort()
        await eventually(lambda: other.events)
        assert one.received == [Heartbeat()] and one.events == other.events == ["lost"]
        other.link.send(WorkerLeaving())
        other.link.flush()

    asyncio.run(story())


def _finish(streams: list[Any]) -> list[bool]:
    """Read all of them at once; which came to their ends."""
    whole = [False] * len(streams)

    def finish(i: int) -> None:
        last = None
        try:
            for last in streams[i][1]:  # noqa: B007
                pass
        except OSError:
            return
        whole[i] = last == "[DONE]"

    threads = [threading.Thread(target=finish, args=(i,)) for i in range(len(streams))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return whole


def test_a_hanging_worker_is_replaced(front: serving.Process, engines: list[serving.Process]) -> None:
    """What it had counts no more, and its engines have aborted it; the others' streams go on."""
    streams = [started_stream(front, max_tokens=400) for _ in range(10)]
    wait_until_counts_agree(front, engines, 10)
    hung, other = worker_pids(front)
    os.kill(hung, signal.SIGSTOP)
    until(lambda: len(worker_pids(front)) == 2 and hung not in worker_pids(front))
    assert other in worker_pids(front) and not is_alive(hung)
    for _ in range(10):  # also those that had come to its socket
        assert chat(front, max_tokens=2).json()["choices"]
    assert any(_finish(streams))
    for reply, _ in streams:
        reply.close()
    wait_until_counts_agree(front, engines, 0)
    assert f"(process {hung}) has sent nothing for 1 s: it is killed" in front.stop()


def test_requests_are_rejected_while_the_scheduler_hangs_and_streams_continue(
    front: serving.Process, engines: list[serving.Process]
) -> None:
    """When it goes on, all is as it was: nobody takes the time that it has slept for anybody else's."""
    streams = [started_stream(front, max_tokens=300) for _ in range(4)]
    workers = worker_pids(front)
    os.kill(front.process.pid, signal.SIGSTOP)
    try:
        for path in ("/v1/chat/completions", "/health", "/v1/files"):
            body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]} if "chat" in path else None
            reply = send(front, path, body)
            assert (reply.status, reply.headers["retry-after"]) == (503, "5")
            assert reply.json()["error"]["code"] == "unavailable"
        assert all(_finish(streams))
    finally:
        os.kill(front.process.pid, signal.SIGCONT)
    until(lambda: all(send(front, "/health").json().get("up") == 1 for _ in range(10)))  # by both workers
    assert chat(front, max_tokens=2).json()["choices"]
    wait_until_counts_agree(front, engines, 0)
    assert worker_pids(front) == workers and num_in_flight(front) == 0
    assert metric(front, "headway_requests_total") >= 5
    written = front.stop()
    assert "the scheduler answers again" in written and "has sent nothing" not in written
