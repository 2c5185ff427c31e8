"""What is counted as in flight is what is open towards engines: at every step of the loop, whatever fails or leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("httptools")

import asgi
import serving
from asgi import Engine, Inside, Reply, whole
from headway.gateway import client, watch

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNK = b'data: {"id":"c","created":1,"model":"m","choices":[{"index":0,"delta":{"content":"so"}}]}\n\n'
NUM_ENGINES = 3


def _framed(body: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(body), body)


class Held(Engine):
    """Answers a completion word by word, as it is told to; or at once, when it `hurries`."""

    def __init__(self) -> None:
        super().__init__()
        self.hurries = False
        self._told: list[asyncio.Queue[str]] = []

    def tell(self, what: str) -> None:
        """All of its completions that are open."""
        for queue in self._told:
            queue.put_nowait(what)

    async def _answer(self, body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        queue: asyncio.Queue[str] = asyncio.Queue()
        self._told.append(queue)
        self.num_open += 1
        left = asyncio.create_task(reader.read())
        try:
            if self.hurries:
                queue.put_nowait("end")
            while True:
                told = asyncio.create_task(queue.get())
                await asyncio.wait({told, left}, return_when=asyncio.FIRST_COMPLETED)
                if left.done() or self._says(told.result(), b'"stream":true' in body, writer):
                    told.cancel()
                    return True
        finally:
            left.cancel()
            self._told.remove(queue)
            self.num_open -= 1

    def _says(self, what: str, streams: bool, writer: asyncio.StreamWriter) -> bool:
        """True: that was all."""
        if what == "word":
            if streams:
                writer.write((b"" if getattr(writer, "has_begun", False) else HEAD) + _framed(CHUNK))
                writer.has_begun = True  # type: ignore[attr-defined]
            return False
        if what == "end":
            last = _framed(CHUNK) + _framed(b"data: [DONE]\n\n") + b"0\r\n\r\n"
            writer.write((b"" if getattr(writer, "has_begun", False) else HEAD) + last if streams else whole())
        elif what == "refuse":
            writer.write(b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n")
        elif what == "reset":
            writer.transport.abort()
        return True


@pytest.fixture(scope="module")
def inside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inside]:
    """Before engines that are held; and the connections on which completions are under way are known."""
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
        yield made
        made.close()


OPEN: set[client.Connection] = set()


def _is_open(connection: client.Connection) -> bool:
    transport = connection._transport
    return not (connection.is_complete or connection.is_lost or transport is None or transport.is_closing())


class Checked:
    """Looks at all counts at every step of the loop."""

    def __init__(self, inside: Inside) -> None:
        self._inside, self._loop = inside, asyncio.get_running_loop()
        self.wrong: list[str] = []
        self.num_looks = 0
        self.is_over = False
        self._look()

    def _look(self) -> None:
        self.num_looks += 1
        OPEN.difference_update([each for each in OPEN if not _is_open(each)])
        tickets = list(self._inside.gateway.driver.tickets.values())
        for replica in self._inside.gateway.replicas:
            here = [each for each in OPEN if each._transport.get_extra_info("peername")[1] == replica.client._port]
            known = {ticket.connection for ticket in tickets if ticket.replica is replica and ticket.seat is not None}
            seated = sum(ticket.seat is not None and ticket.replica is replica for ticket in tickets)
            if not set(here) <= known or replica.num_in_flight < len(here) or replica.num_in_flight < seated:
                self.wrong.append(f"{replica.name}: {len(here)} open, {seated} seated, {replica.num_in_flight} counted")
        if not self.is_over:
            self._loop.call_soon(self._look)


_STEP = st.one_of(
    st.tuples(st.just("ask"), st.booleans()),
    st.tuples(st.just("leave"), st.integers(0, 30)),
    st.tuples(st.sampled_from(["word", "word", "end", "refuse", "reset", "close"]), st.integers(0, NUM_ENGINES - 1)),
    st.tuples(st.just("settle"), st.just(0)),
)


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
                body = {"model": serving.MODEL, "messages": messages, "stream": which}
                asked.append((asyncio.create_task(inside.post(body, gone=gone)), gone))
            elif what == "leave" and asked:
                asked[which % len(asked)][1].set()
            elif what == "settle":
                await inside.until(lambda: inside.num_in_flight == sum(engine.num_open for engine in engines))
                for replica, engine in zip(inside.gateway.replicas, engines, strict=True):
                    assert replica.num_in_flight == engine.num_open
            elif what != "leave":
                engines[which].tell(what)
            for _ in range(4):
                await asyncio.sleep(0)
    finally:
        for engine in engines:
            engine.hurries = True
            engine.tell("end")
        replies = await asyncio.gather(*(task for task, _ in asked))
        await inside.until(lambda: not any(engine.num_open for engine in engines))
        checked.is_over = True
        for engine in engines:
            engine.hurries = False
    assert not checked.wrong and checked.num_looks > len(steps)
    return [None if gone.is_set() else reply for (_, gone), reply in zip(asked, replies, strict=True)]


@given(st.lists(_STEP, max_size=40))
@settings(
    max_examples=60, deadline=None, database=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
def test_at_every_step_what_is_open_is_counted(inside: Inside, steps: list[tuple[str, Any]]) -> None:
    """Nothing is sent before it is counted, and nothing is forgotten before it is closed; in the end, all is nought."""
    for reply in inside.run(_live(inside, steps)):
        if reply is not None:
            assert reply.is_whole and reply.status in (200, 502, 503)
    gateway = inside.gateway
    assert inside.num_in_flight == 0 and not gateway.driver.tickets and not inside.faults and not OPEN
    for replica in gateway.replicas:
        assert (replica.prefill_tokens_left, replica.tokens_generated, replica.num_arriving) == (0, 0, 0)
        assert not any(replica.num_by_tier.values()) and not any(replica.queue_lengths)
    inside.run(inside.until(lambda: gateway.num_up == NUM_ENGINES))
