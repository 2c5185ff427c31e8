"""Two workers and their scheduler in one event loop: no stream is open that the scheduler does not count."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("httptools")

import asgi
from asgi import Inside, Reply
from headway.gateway import client, watch
from headway.gateway.api import Completions
from headway.gateway.desk import Desk
from headway.gateway.wire import Welcome, batch, read_welcome
from headway.gateway.worker import Worker
from serving import MODEL
from test_gateway_accounting import Held

NUM_ENGINES = 2
OPEN: set[client.Connection] = set()


@pytest.fixture(scope="module")
def inside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inside]:
    """Whose requests come in by workers, one after the other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asgi, "Engine", Held)
        patch.setattr(watch, "MOST_FAILURES", 1 << 30)
        sent = client.Connection.send

        def send(self: client.Connection, head: bytes, body: bytes) -> None:
            sent(self, head, body)
            if head.startswith(b"POST"):
                OPEN.add(self)

        patch.setattr(client.Connection, "send", send)
        made = Inside(tmp_path_factory.mktemp("fleet"), NUM_ENGINES, gateway={"scrape_period_s": 3600.0, "hold_s": 5.0})
        workers = [made.run(_hired(made)) for _ in range(2)]
        apps = [Completions(lambda worker=worker: worker) for worker in workers]  # type: ignore[misc]
        turns = iter(range(1 << 30))

        async def app(*message: Any) -> None:
            await apps[next(turns) % 2](*message)

        made.app = app  # type: ignore[assignment]
        made.workers = workers  # type: ignore[attr-defined]
        yield made
        for worker in workers:
            made.run(worker.stop())
        made.close()


async def _hired(inside: Inside) -> Worker:
    ours, theirs = socket.socketpair()
    gateway = inside.gateway
    ours.sendall(batch(Welcome(gateway.settings, None, False, gateway.clock.start_s, "", None, None)))
    worker = Worker(read_welcome(theirs), lambda: None)
    loop = asyncio.get_running_loop()
    desk = Desk(gateway, lambda: None)
    for link, end in ((desk.link, ours), (worker.scheduler.link, theirs)):
        end.setblocking(False)
        await loop.create_unix_connection(lambda link=link: link, sock=end)  # type: ignore[misc]
    return worker


def _is_open(connection: client.Connection) -> bool:
    transport = connection._transport
    return not (connection.is_complete or connection.is_lost or transport is None or transport.is_closing())


class Checked:
    """Looks at all counts at every step of the loop."""

    def __init__(self, inside: Inside) -> None:
        self._inside, self._loop = inside, asyncio.get_running_loop()
        self.wrong: list[str] = []
        self.is_over = False
        self._look()

    def _look(self) -> None:
        OPEN.difference_update([each for each in OPEN if not _is_open(each)])
        for replica in self._inside.gateway.replicas:
            here = [each for each in OPEN if each._transport.get_extra_info("peername")[1] == replica.client._port]
            if replica.num_in_flight < len(here):
                self.wrong.append(f"{replica.name}: {len(here)} open, {replica.num_in_flight} counted")
        if not self.is_over:
            self._loop.call_soon(self._look)


_STEP = st.one_of(
    st.tuples(st.just("ask"), st.booleans()),
    st.tuples(st.sampled_from(["leave", "expire"]), st.integers(0, 30)),
    st.tuples(st.sampled_from(["abandon", "drain"]), st.integers(0, NUM_ENGINES - 1)),
    st.tuples(st.sampled_from(["word", "word", "end", "refuse", "reset"]), st.integers(0, NUM_ENGINES - 1)),
    st.tuples(st.just("settle"), st.just(0)),
)


def _scheduler_does(inside: Inside, what: str, which: int) -> None:
    """What requests hear of by their workers only."""
    gateway, driver = inside.gateway, inside.gateway.driver
    replica = gateway.replicas[which % NUM_ENGINES]
    if what == "expire" and driver.tickets:
        driver.gave_up(list(driver.tickets.values())[which % len(driver.tickets)])
    elif what == "abandon":
        driver.abandon(replica)
    elif what == "drain":
        driver.drain(replica, True)
        driver.drain(replica, False)


async def _live(inside: Inside, steps: list[tuple[str, Any]]) -> list[Reply | None]:
    """All steps, and then everything ends well."""
    engines: list[Held] = inside.engines  # type: ignore[assignment]
    checked = Checked(inside)
    asked: list[tuple[asyncio.Task[Reply], asyncio.Event]] = []
    try:
        for what, which in steps:
            if what == "ask":
                gone = asyncio.Event()
                messages = [{"role": "user", "content": "hello"}]
                body = {"model": MODEL, "messages": messages, "stream": which}
                asked.append((asyncio.create_task(inside.post(body, gone=gone)), gone))
            elif what == "leave" and asked:
                asked[which % len(asked)][1].set()
            elif what == "settle":
                pairs = list(zip(inside.gateway.replicas, engines, strict=True))
                await inside.until(lambda pairs=pairs: all(r.num_in_flight == e.num_open for r, e in pairs))
            elif what in ("expire", "abandon", "drain"):
                _scheduler_does(inside, what, which)
            elif what != "leave":
                engines[which].tell(what)
            for _ in range(6):
                await asyncio.sleep(0)
    finally:
        for engine in engines:
            engine.hurries = True
            engine.tell("end")
        replies = await asyncio.gather(*(task for task, _ in asked))
        await inside.until(lambda: not any(engine.num_open for engine in engines))
        await inside.until(lambda: not inside.num_in_flight and not inside.gateway.driver.tickets)
        checked.is_over = True
        for engine in engines:
            engine.hurries = False
    assert not checked.wrong
    return [None if gone.is_set() else reply for (_, gone), reply in zip(asked, replies, strict=True)]


@given(st.lists(_STEP, max_size=40))
@settings(
    max_examples=60, deadline=None, database=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
def test_at_every_step_what_workers_have_open_is_counted(inside: Inside, steps: list[tuple[str, Any]]) -> None:
    for reply in inside.run(_live(inside, steps)):
        if reply is not None:
            assert reply.is_whole and reply.status in (200, 502, 503, 504)
    gateway = inside.gateway
    assert not inside.faults and not OPEN
    assert not any(worker.scheduler.errands for worker in inside.workers)  # type: ignore[attr-defined]
    for replica in gateway.replicas:
        assert (replica.prefill_tokens_left, replica.tokens_generated, replica.num_arriving) == (0, 0, 0)
        assert not any(replica.num_by_tier.values()) and not any(replica.queue_lengths)
    inside.run(inside.until(lambda: gateway.num_up == NUM_ENGINES))
