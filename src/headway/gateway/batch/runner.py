"""Who works batches off: reads lines from the database, has them answered, and writes the answers back.

What is in flight when the gateway dies has no answer in the database, and is asked again by the next one. Answers are
written only where there is none, so that each line has one.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from msgspec import Struct

from headway.gateway.batch import queue
from headway.gateway.batch.queue import Line, Result
from headway.gateway.batch.store import UNAVAILABLE, Store
from headway.gateway.batch.validate import validate
from headway.gateway.errors import ApiError
from headway.gateway.settings import Batches

log = logging.getLogger("headway.gateway")
Answer = Callable[["Order", bytes, str, float], Awaitable["Answered"]]
"""(whose and where to, body, request id, seconds left) -> what came of it."""
_PASS_S, _IDLE_S = 0.05, 1.0
"""Answers are written so often at most; the database is looked at so often at least."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0


class Answered:
    """What came of a request."""

    def __init__(self, status: int, body: bytes, is_for_now: bool = False) -> None:
        self.status, self.body = status, body
        self.is_for_now = is_for_now
        """Nobody was asked: there was no room, or nobody there."""


class Order(Struct, frozen=True):
    """What all requests of a batch have in common."""

    owner: str
    endpoint: str
    expires_at: float


class Runner:
    """One gateway's. Of several with one database, one runs batches, until it is gone."""

    def __init__(self, store: Store, settings: Batches, max_line_bytes: int, answer: Answer) -> None:
        self._store, self._settings, self._answer = store, settings, answer
        self._max_line_bytes = max_line_bytes
        self._open: dict[tuple[str, int], asyncio.Task[None]] = {}
        """Lines that are being answered."""
        self._read: dict[str, int] = {}
        """The last line of each batch that was begun."""
        self._results: list[Result] = []
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._has_trouble = False

    def start(self) -> None:
        """From now on."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """What is being answered is left to the next gateway."""
        assert self._task is not None
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        await self._drop()
        with suppress(*UNAVAILABLE):
            await self._write()
            await self._store.close()

    def wake(self) -> None:
        """Something has changed."""
        self._changed.set()

    @property
    def num_open(self) -> int:
        """Lines that wait for their turn, or for their answer."""
        return len(self._open)

    async def _run(self) -> None:
        while True:
            try:
                await self._store.open()
                if await self._store.lead():
                    await self._pass()
                    self._has_trouble = False
                else:
                    await self._drop()
            except UNAVAILABLE as error:
                if not self._has_trouble:
                    log.warning("batches wait for their database: %s", str(error).splitlines()[0])
                self._has_trouble = True
                with suppress(*UNAVAILABLE):
                    await self._store.resign()
                await asyncio.sleep(_IDLE_S)
            except Exception:  # a batch that brings out a mistake of ours must not be the last one
                log.exception("batches")
                await asyncio.sleep(_IDLE_S)
            await asyncio.sleep(_PASS_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(_IDLE_S):
                    await self._changed.wait()
            self._changed.clear()

    async def _pass(self) -> None:
        """Look at every batch once."""
        await self._write()
        batches = await queue.active(self._store)
        for gone in self._read.keys() - {batch["id"] for batch in batches}:
            await self._drop(gone)
        share = self._settings.max_open // max(len(batches), 1)
        for batch in batches:
            if batch["status"] == "cancelling":
                await self._end(batch, "cancelled")
            elif time.time() >= batch["expires_at"]:
                await self._end(batch, "expired")
            elif batch["status"] == "validating":
                await validate(self._store, batch, self._settings.max_lines, self._max_line_bytes)
                self.wake()
            elif batch["num_completed"] + batch["num_failed"] == batch["num_total"]:
                await self._end(batch, "completed")
            else:
                await self._fill(batch, max(share, 1))

    async def _end(self, batch: dict[str, Any], status: str) -> None:
        await self._drop(batch["id"])
        await self._write()
        await queue.end(self._store, batch, status)

    async def _fill(self, batch: dict[str, Any], share: int) -> None:
        """Begin lines, as long as there is room; each batch has its share, so that a long one keeps none waiting."""
        id = batch["id"]
        room = min(share - sum(key[0] == id for key in self._open), self._settings.max_open - len(self._open))
        if room <= 0:
            return
        for line in await queue.waiting(self._store, id, self._read.get(id, 0), room):
            self._read[id] = line.line
            order = Order(batch["owner"], batch["endpoint"], batch["expires_at"])
            task = asyncio.create_task(self._see_to(line, order))
            self._open[id, line.line] = task

    async def _see_to(self, line: Line, order: Order) -> None:
        """Until it has an answer. What is not the request's own fault is tried again, for some time."""
        request_id = uuid.uuid4().hex
        num_tries, pause_s = 0, _FIRST_PAUSE_S
        while True:
            got = await self._asked(order, line, request_id)
            num_tries += not got.is_for_now
            if not _is_passing(got.status) or num_tries >= self._settings.max_attempts:
                break
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        answer = queue.told_answer(line.custom_id, got.status, request_id, got.body)
        self._results.append(Result(line.batch, line.line, got.status < 300, answer))
        del self._open[line.batch, line.line]
        self.wake()

    async def _asked(self, order: Order, line: Line, request_id: str) -> Answered:
        try:
            return await self._answer(order, line.body, request_id, max(order.expires_at - time.time(), 0.001))
        except Exception:  # a line that brings out a mistake of ours must not hold up its batch
            log.exception("line %d of %s", line.line, line.batch)
            return Answered(500, ApiError(500, "the gateway failed", "internal_error").json())

    async def _write(self) -> None:
        """Keep the answers that have come."""
        written = len(self._results)
        if written:
            await queue.write(self._store, self._results[:written])
            del self._results[:written]

    async def _drop(self, batch: str | None = None) -> None:
        """Stop answering the lines of a batch, or of all."""
        dropped = [key for key in self._open if batch in (None, key[0])]
        tasks = [self._open.pop(key) for key in dropped]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for id in [id for id in self._read if batch in (None, id)]:
            del self._read[id]


def _is_passing(status: int) -> bool:
    """Another try may do better."""
    return status >= 500 or status in (408, 429)
