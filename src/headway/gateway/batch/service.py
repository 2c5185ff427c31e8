"""Answers the lines of batches: reads them from the database, relays them like other requests, and writes the answers.

Lines that are in flight when the gateway dies have no answer in the database, so the next gateway sends them again.
An answer is written only if the line has no answer, so that each line has one answer.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable
from contextlib import suppress

from headway.core.errors import HeadwayError
from headway.gateway.auth.keys import Caller
from headway.gateway.batch import queue
from headway.gateway.batch.queue import ActiveBatch, Line, LineResult
from headway.gateway.batch.store import BatchStore
from headway.gateway.batch.validate import validate
from headway.gateway.database import UNAVAILABLE
from headway.gateway.errors import ApiError, internal_error, line_of, logged, policy_error
from headway.gateway.relay.json_body import LONG_BYTES
from headway.gateway.relay.relay import Relay
from headway.gateway.relay.request import ClientRequest
from headway.gateway.relay.request_reader import read_request
from headway.gateway.relay.writer import Headers, ResponseWriter
from headway.gateway.scheduling.in_flight import InFlightRequest
from headway.gateway.settings import Settings

log = logging.getLogger("headway.gateway")
_PASS_S, _IDLE_S = 0.05, 1.0
"""(shortest time, longest time) between two passes over the database."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_NO_CAPACITY = frozenset(
    (
        "no_capacity",
        "queue_full",
        "shed",
        "shutting_down",
        "rate_limit_exceeded",
        "insufficient_quota",
        "key_store_unavailable",
    )
)


class _CollectedAnswer:
    """The answer to a line, collected in memory. Implements `ResponseWriter`."""

    is_full = False

    def __init__(self) -> None:
        self.status = 0
        self.body = b""
        self.lacked_capacity = False
        """Whether the request ended before any engine was tried."""
        self.retry_after_s = 0.0
        """Shortest wait before another attempt."""

    def start(self, status: int, headers: Headers) -> None:
        self.status = status

    def write(self, body: bytes, more: bool = False) -> None:
        self.body += body

    async def drain(self) -> None:
        """Return at once: the buffer has no limit."""

    def fail(self, error: ApiError) -> None:
        self.status, self.body = error.status, error.json()
        self.lacked_capacity, self.retry_after_s = error.code in _NO_CAPACITY, float(error.retry_after_s or 0)

    @property
    def is_retryable(self) -> bool:
        return self.status >= 500 or self.status in (408, 429)


class BatchService:
    """Runs the batches of one database. Only the gateway that holds the database's lock runs them."""

    def __init__(
        self,
        settings: Settings,
        relay: Callable[[ClientRequest, Caller, ResponseWriter, str, float], Relay],
        end: Callable[[InFlightRequest], None],
        caller_of: Callable[[str], Caller],
    ) -> None:
        """`relay` and `end` come from the gateway. `caller_of(owner)` returns the caller."""
        assert settings.batches is not None
        self.settings, self._max_line_bytes = settings.batches, settings.max_body_bytes
        self.body_timeout_s = settings.body_timeout_s
        self._relay, self._end, self._caller_of = relay, end, caller_of
        self.store = BatchStore(self.settings.store)
        self._open: dict[tuple[str, int], asyncio.Task[None]] = {}
        """Tasks that answer a line, by batch and line number."""
        self._last_started: dict[str, int] = {}
        """Maps each batch to the number of the last line that was started."""
        self._deadlines: dict[tuple[str, int], float] = {}
        """Deadlines on the monotonic clock, by batch and expiry time."""
        self._results: list[LineResult] = []
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_unavailable = False

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Stop. Another gateway answers the lines that are still open."""
        assert self._task is not None
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        await self._drop_lines()
        with suppress(*UNAVAILABLE):
            await self._write_results()
            await self.store.close()

    def wake(self) -> None:
        """Read the database soon, because a batch has changed."""
        self._changed.set()

    @property
    def num_open(self) -> int:
        """Lines that wait in the gateway or run at an engine."""
        return len(self._open)

    async def _run(self) -> None:
        while True:
            try:
                await self.store.open()
                if await self.store.acquire_lock():
                    await self._pass()
                    self._is_unavailable = False
                else:
                    await self._drop_lines()
            except UNAVAILABLE as error:
                if not self._is_unavailable:
                    log.warning("batches wait for their database: %s", line_of(error))
                self._is_unavailable = True
                with suppress(*UNAVAILABLE):
                    await self.store.release_lock()
                await asyncio.sleep(_IDLE_S)
            except Exception:  # a defect in one batch must not stop the other batches
                log.exception("batches")
                await asyncio.sleep(_IDLE_S)
            await asyncio.sleep(_PASS_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(_IDLE_S):
                    await self._changed.wait()
            self._changed.clear()

    def _seconds_left(self, batch: ActiveBatch) -> float:
        """Seconds until the batch expires. Later changes of the wall clock do not change the expiry."""
        key, now_s = (batch.id, batch.expires_at), time.monotonic()
        return self._deadlines.setdefault(key, now_s + batch.expires_at - time.time()) - now_s

    async def _pass(self) -> None:
        """Advance every active batch by one step."""
        await self._write_results()
        batches = await queue.active_batches(self.store)
        known = {(batch.id, batch.expires_at) for batch in batches}
        self._deadlines = {key: deadline_s for key, deadline_s in self._deadlines.items() if key in known}
        for ended in self._last_started.keys() - {batch.id for batch in batches}:
            await self._drop_lines(ended)
        share = max(self.settings.max_open // max(len(batches), 1), 1)
        for batch in batches:
            if batch.status == "cancelling":
                await self._finish(batch, "cancelled")
            elif self._seconds_left(batch) <= 0:
                await self._finish(batch, "expired")
            elif batch.status == "validating":
                await validate(self.store, batch, self.settings.max_lines, self._max_line_bytes)
                self.wake()
            elif batch.num_ended == batch.num_total:
                await self._finish(batch, "completed")
            else:
                await self._start_lines(batch, share)

    async def _finish(self, batch: ActiveBatch, status: str) -> None:
        await self._drop_lines(batch.id)
        await self._write_results()
        await queue.finish_batch(self.store, batch, status)

    async def _start_lines(self, batch: ActiveBatch, share: int) -> None:
        """Start lines of a batch, no more than the batch's share, so that a long batch does not delay a short one."""
        num_of_batch = sum(id == batch.id for id, _ in self._open)
        room = min(share - num_of_batch, self.settings.max_open - len(self._open))
        if room <= 0:
            return
        for line in await queue.open_lines(self.store, batch.id, self._last_started.get(batch.id, 0), room):
            self._last_started[batch.id] = line.line
            self._open[batch.id, line.line] = asyncio.create_task(self._process(batch, line))

    async def _process(self, batch: ActiveBatch, line: Line) -> None:
        """Answer a line, with further attempts after temporary errors."""
        request_id = uuid.uuid4().hex
        num_attempts, pause_s = 0, _FIRST_PAUSE_S
        while True:
            answer = await self._send(batch, line, request_id)
            num_attempts += not answer.lacked_capacity
            if not answer.is_retryable or num_attempts >= self.settings.max_attempts:
                break
            await asyncio.sleep(max(pause_s, min(answer.retry_after_s, _LONGEST_PAUSE_S)))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        entry = queue.encode_entry(line.custom_id, answer.status, request_id, answer.body)
        self._results.append(LineResult(line.batch, line.line, answer.status < 300, entry))
        del self._open[line.batch, line.line]
        self.wake()

    async def _send(self, batch: ActiveBatch, line: Line, request_id: str) -> _CollectedAnswer:
        answer = _CollectedAnswer()
        try:
            if len(line.body) <= LONG_BYTES:
                request = read_request(batch.endpoint, line.body, {})
            else:
                request = await asyncio.to_thread(read_request, batch.endpoint, line.body, {})
            if request.stream:
                raise ApiError(400, "a batch cannot stream", "invalid_value", "stream")
            caller = self._caller_of(batch.owner)
            request.tier = max(self.settings.tier, caller.tier)
            seconds_left = max(self._seconds_left(batch), 0.001)
            relay = self._relay(request, caller, answer, request_id, seconds_left)
            try:
                await relay.run()
            finally:  # a batch that is cancelled pays for the tokens so far
                with logged("a line's settlement failed"):  # an error here would undo the cancellation
                    self._end(relay.in_flight)
            lacked = any(code in answer.body for code in (b'"no_capacity"', b'"shed"'))
            answer.lacked_capacity = answer.status in (429, 503) and lacked
        except ApiError as error:
            answer.fail(error)
        except HeadwayError as error:
            log.error("%s", error)
            answer.fail(policy_error())
        except Exception:  # a defect in one line must not block its batch
            log.exception("line %d of %s", line.line, line.batch)
            answer.fail(internal_error())
        return answer

    async def _write_results(self) -> None:
        num_written = len(self._results)
        if num_written:
            await queue.write_results(self.store, self._results[:num_written])
            del self._results[:num_written]

    async def _drop_lines(self, batch: str | None = None) -> None:
        """Stop answering the lines of one batch, or of all batches."""
        dropped = [key for key in self._open if batch in (None, key[0])]
        tasks = [self._open.pop(key) for key in dropped]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for id in [id for id in self._last_started if batch in (None, id)]:
            del self._last_started[id]
