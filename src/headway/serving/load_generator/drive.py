"""Sends the requests of a source in real time and collects the answers."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from time import perf_counter
from typing import cast

from msgspec import Struct

from headway.core.record import Outcome
from headway.core.request import Request
from headway.core.view import RequestView
from headway.serving.load_generator.answer import STOPPED, TIMEOUT, Answer
from headway.workload.sources import RequestSource

Ask = Callable[[Request, Callable[[], float]], Awaitable[Answer]]
"""Sends a request. The clock gives seconds since the start of the load."""
Report = Callable[[float], None]
"""Takes the completed share."""


class Sent(Struct, frozen=True):
    """A request and its answer."""

    request: Request
    answer: Answer

    @property
    def outcome(self) -> Outcome:
        if self.answer.is_whole:
            return Outcome.FINISHED
        return {STOPPED: Outcome.UNFINISHED, TIMEOUT: Outcome.CANCELLED}.get(self.answer.kind, Outcome.REJECTED)


class Driver:
    """One load. `is_stopped`: set by `stop` or by Ctrl-C."""

    def __init__(
        self, source: RequestSource, ask: Ask, duration_s: float | None = None, report: Report | None = None
    ) -> None:
        """`duration_s`: no request is sent after this time, and requests in flight end."""
        self._source, self._ask, self._duration_s, self._report = source, ask, duration_s, report
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._begun_s = 0.0
        self.sent: list[Sent] = []
        """Requests with their answers, in order of the answers' ends."""
        self.is_stopped = False
        self.end_s = 0.0

    def now(self) -> float:
        return perf_counter() - self._begun_s

    def stop(self) -> None:
        """Send no more requests, and abort those in flight."""
        self.is_stopped = True
        self._changed.set()

    async def run(self) -> list[Sent]:
        """All requests with their answers, in order of the answers' ends."""
        self._begun_s = perf_counter()
        with _on_interrupt(self.stop):
            while not self.is_stopped and (self._tasks or self._next_s() is not None):
                await self._step()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks)
        self.end_s = self.now()
        return self.sent

    def _next_s(self) -> float | None:
        """Time at which the next request is due; None if no request is due, or its time is not known yet."""
        at_s = self._source.peek_s()
        is_late = at_s is not None and self._duration_s is not None and at_s >= self._duration_s
        return None if is_late else at_s

    async def _step(self) -> None:
        """Send the next request if it is due. Otherwise wait until it is due or another request ends."""
        at_s = self._next_s()
        if at_s is not None and at_s <= self.now():
            request = self._source.pop(Request)
            task = asyncio.create_task(self._one(request))
            self._tasks.add(task)
            task.add_done_callback(self._ended)
            await asyncio.sleep(0)
            return
        self._changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(None if at_s is None else at_s - self.now()):
                await self._changed.wait()

    async def _one(self, request: Request) -> None:
        sent = Sent(request, await self._ask(request, self.now))
        self.sent.append(sent)
        self._source.ended(cast(RequestView, request), self.now(), sent.outcome)  # sources read only the request's id
        if self._report is not None:
            self._report(self._share())

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._changed.set()

    def _share(self) -> float:
        num, duration_s = self._source.num_requests, self._duration_s
        shares = [len(self.sent) / num if num else 0.0, self.now() / duration_s if duration_s else 0.0]
        return min(max(shares), 1.0)


@contextmanager
def _on_interrupt(stop: Callable[[], None]) -> Iterator[None]:
    """Let the first Ctrl-C stop the load; a second one ends the process as usual."""
    loop = asyncio.get_running_loop()

    def interrupted() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        stop()

    is_set = False
    with suppress(NotImplementedError, RuntimeError, ValueError):  # not in a thread, not on Windows
        loop.add_signal_handler(signal.SIGINT, interrupted)
        is_set = True
    try:
        yield
    finally:
        if is_set:
            loop.remove_signal_handler(signal.SIGINT)
