"""A gateway in this process, engines that are told each word to send, and a check of all counts at every step of the
event loop while clients send requests and disconnect."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import serving
from gateway_in_process import Inside, Reply
from headway.gateway.scheduling.replica import LiveReplica
from headway.gateway.upstream import client, health
from scripted import CHUNK, DONE, OK, Exchange, ScriptedEngine, framed, whole
from serving import MODEL

OPEN: set[client.Connection] = set()
"""Connections with a completion in progress."""
Check = Callable[[LiveReplica, Sequence[client.Connection]], str]
"""Describes the error in the counts of a replica that has these connections open; "" if there is none."""
Step = tuple[str, Any]


class Held(ScriptedEngine):
    """Answers completions word by word as told, or at once if `is_immediate`."""

    def __init__(self) -> None:
        super().__init__()
        self.is_immediate = False
        self._commands: list[asyncio.Queue[str]] = []

    def tell(self, command: str) -> None:
        """Give a command to all open completions."""
        for queue in self._commands:
            queue.put_nowait(command)

    async def complete(self, exchange: Exchange) -> None:
        queue: asyncio.Queue[str] = asyncio.Queue()
        self._commands.append(queue)
        left, streams, has_begun = asyncio.create_task(exchange.left()), b'"stream":true' in exchange.body, False
        try:
            if self.is_immediate:
                queue.put_nowait("end")
            while not exchange.is_closed:
                command = asyncio.create_task(queue.get())
                await asyncio.wait({command, left}, return_when=asyncio.FIRST_COMPLETED)
                if left.done():
                    command.cancel()
                    return exchange.close()
                if streams and not has_begun and command.result() in ("word", "end"):
                    exchange.send(OK)
                    has_begun = True
                _obey(command.result(), streams, exchange)
        finally:
            left.cancel()
            self._commands.remove(queue)


def _obey(command: str, streams: bool, exchange: Exchange) -> None:
    """Carry out a command."""
    if command == "word":
        if streams:
            exchange.send(framed(CHUNK))
        return
    if command == "end":
        exchange.send(framed(CHUNK) + DONE if streams else whole())
    elif command == "refuse":
        exchange.send(b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n")
    elif command == "reset":
        exchange.abort()
    exchange.close()


@contextmanager
def gateway_before_held(
    folder: Path, num_engines: int, write: Callable[..., Path] = serving.fleet_file
) -> Iterator[Inside]:
    """A gateway whose completions in progress are in `OPEN`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(health, "MAX_FAILURES", 1 << 30)
        sent = client.Connection.send

        def send(self: client.Connection, head: bytes, body: bytes) -> None:
            sent(self, head, body)
            if head.startswith(b"POST"):
                OPEN.add(self)

        patch.setattr(client.Connection, "send", send)
        gateway = {"scrape_period_s": 3600.0, "hold_s": 5.0, "outliers": {"max_ejected_share": 0}}
        made = Inside(folder, num_engines, write, Held, gateway=gateway)
        yield made
        made.close()


def _is_open(connection: client.Connection) -> bool:
    transport = connection._transport
    return not (connection.is_complete or connection.is_lost or transport is None or transport.is_closing())


class _CountChecker:
    """Checks all counts at every step of the event loop."""

    def __init__(self, inside: Inside, check: Check) -> None:
        self._inside, self._check, self._loop = inside, check, asyncio.get_running_loop()
        self.wrong: list[str] = []
        self.num = 0
        self.is_over = False
        self._step()

    def _step(self) -> None:
        self.num += 1
        OPEN.difference_update([each for each in OPEN if not _is_open(each)])
        for replica in self._inside.gateway.replicas:
            here = [
                each for each in OPEN if each._transport.get_extra_info("peername")[1] == replica.client._transport.port
            ]
            if wrong := self._check(replica, here):
                self.wrong.append(f"{replica.name}: {len(here)} open, {replica.num_in_flight} counted: {wrong}")
        if not self.is_over:
            self._loop.call_soon(self._step)


async def run_steps(
    inside: Inside, steps: list[Step], check: Check, take_step: Callable[[str, int], bool] = lambda what, which: False
) -> list[Reply | None]:
    """Take all steps, then end all completions. Returns the replies, None for clients that disconnected.

    `take_step` is called with the steps that are not of clients, and returns True for those that it takes.
    """
    engines: list[Held] = inside.engines
    checker = _CountChecker(inside, check)
    sent: list[tuple[asyncio.Task[Reply], asyncio.Event]] = []
    try:
        for what, which in steps:
            if what == "ask":
                gone = asyncio.Event()
                messages = [{"role": "user", "content": "hello"}]
                body = {"model": MODEL, "messages": messages, "stream": which}
                sent.append((asyncio.create_task(inside.post(body, gone=gone)), gone))
            elif what == "leave" and sent:
                sent[which % len(sent)][1].set()
            elif what == "settle":
                pairs = list(zip(inside.gateway.replicas, engines, strict=True))
                await inside.until(lambda pairs=pairs: all(r.num_in_flight == e.num_open for r, e in pairs))
            elif not take_step(what, which) and what != "leave":
                engines[which].tell(what)
            for _ in range(6):
                await asyncio.sleep(0)
    finally:
        for engine in engines:
            engine.is_immediate = True
            engine.tell("end")
        replies = await asyncio.gather(*(task for task, _ in sent))
        await inside.until(lambda: not any(engine.num_open for engine in engines))
        await inside.until(lambda: not inside.num_in_flight and not inside.gateway.driver.requests)
        checker.is_over = True
        for engine in engines:
            engine.is_immediate = False
    assert not checker.wrong and checker.num > len(steps)
    return [None if gone.is_set() else reply for (_, gone), reply in zip(sent, replies, strict=True)]


def check_idle(inside: Inside) -> None:
    """All counts are zero, and all replicas come up."""
    gateway = inside.gateway
    assert inside.num_in_flight == 0 and not gateway.driver.requests and not inside.faults and not OPEN
    for replica in gateway.replicas:
        assert (replica.prefill_tokens_left, replica.tokens_generated, replica.num_arriving) == (0, 0, 0)
        assert not any(replica.num_by_tier.values()) and not any(replica.queue_lengths)
    inside.run(inside.until(lambda: gateway.num_up == len(gateway.replicas)))
