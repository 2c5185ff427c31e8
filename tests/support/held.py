"""A gateway in this process before engines that answer word by word, as they are told, and a look at all its counts at
every step of the loop while clients ask and leave."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import asgi
import serving
from asgi import Engine, Inside, Reply, whole
from headway.gateway.fleet.replica import LiveReplica
from headway.gateway.upstream import client, health
from scripted import CHUNK, OK, framed
from serving import MODEL

OPEN: set[client.Connection] = set()
"""Connections on which completions are under way."""
Check = Callable[[LiveReplica, Sequence[client.Connection]], str]
"""What is wrong with a replica that has these open; "": nothing."""
Step = tuple[str, Any]


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
                writer.write((b"" if getattr(writer, "has_begun", False) else OK) + framed(CHUNK))
                writer.has_begun = True  # type: ignore[attr-defined]
            return False
        if what == "end":
            last = framed(CHUNK) + framed(b"data: [DONE]\n\n") + b"0\r\n\r\n"
            writer.write((b"" if getattr(writer, "has_begun", False) else OK) + last if streams else whole())
        elif what == "refuse":
            writer.write(b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n")
        elif what == "reset":
            writer.transport.abort()
        return True


@contextmanager
def gateway_before_held(
    folder: Path, num_engines: int, write: Callable[..., Path] = serving.fleet_file
) -> Iterator[Inside]:
    """Whose completions under way are in `OPEN`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asgi, "Engine", Held)
        patch.setattr(health, "MAX_FAILURES", 1 << 30)
        sent = client.Connection.send

        def send(self: client.Connection, head: bytes, body: bytes) -> None:
            sent(self, head, body)
            if head.startswith(b"POST"):
                OPEN.add(self)

        patch.setattr(client.Connection, "send", send)
        made = Inside(folder, num_engines, write, gateway={"scrape_period_s": 3600.0, "hold_s": 5.0})
        yield made
        made.close()


def _is_open(connection: client.Connection) -> bool:
    transport = connection._transport
    return not (connection.is_complete or connection.is_lost or transport is None or transport.is_closing())


class _Looks:
    """At all counts, at every step of the loop."""

    def __init__(self, inside: Inside, check: Check) -> None:
        self._inside, self._check, self._loop = inside, check, asyncio.get_running_loop()
        self.wrong: list[str] = []
        self.num = 0
        self.is_over = False
        self._look()

    def _look(self) -> None:
        self.num += 1
        OPEN.difference_update([each for each in OPEN if not _is_open(each)])
        for replica in self._inside.gateway.replicas:
            here = [
                each for each in OPEN if each._transport.get_extra_info("peername")[1] == replica.client._transport.port
            ]
            if wrong := self._check(replica, here):
                self.wrong.append(f"{replica.name}: {len(here)} open, {replica.num_in_flight} counted: {wrong}")
        if not self.is_over:
            self._loop.call_soon(self._look)


async def live(
    inside: Inside, steps: list[Step], check: Check, does: Callable[[str, int], bool] = lambda what, which: False
) -> list[Reply | None]:
    """All steps, and then everything ends well; None for clients that left. `does` may take a step upon itself."""
    engines: list[Held] = inside.engines  # type: ignore[assignment]
    looks = _Looks(inside, check)
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
            elif not does(what, which) and what != "leave":
                engines[which].tell(what)
            for _ in range(6):
                await asyncio.sleep(0)
    finally:
        for engine in engines:
            engine.hurries = True
            engine.tell("end")
        replies = await asyncio.gather(*(task for task, _ in asked))
        await inside.until(lambda: not any(engine.num_open for engine in engines))
        await inside.until(lambda: not inside.num_in_flight and not inside.gateway.driver.requests)
        looks.is_over = True
        for engine in engines:
            engine.hurries = False
    assert not looks.wrong and looks.num > len(steps)
    return [None if gone.is_set() else reply for (_, gone), reply in zip(asked, replies, strict=True)]


def check_all_is_nought(inside: Inside) -> None:
    """Nothing is left at any replica, and all are well."""
    gateway = inside.gateway
    assert inside.num_in_flight == 0 and not gateway.driver.requests and not inside.faults and not OPEN
    for replica in gateway.replicas:
        assert (replica.prefill_tokens_left, replica.tokens_generated, replica.num_arriving) == (0, 0, 0)
        assert not any(replica.num_by_tier.values()) and not any(replica.queue_lengths)
    inside.run(inside.until(lambda: gateway.num_up == len(gateway.replicas)))
