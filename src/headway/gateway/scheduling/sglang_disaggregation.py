"""Prefill here, decode there, at the same time: one attempt in two requests, in SGLang's words.

Source: SGLang's documentation of PD disaggregation, and its routers. Each engine is started for one phase. Both are
sent the same request, with where the prefill replica can be found (`bootstrap_host`, `bootstrap_port`) and a number
under which the two find each other (`bootstrap_room`). The prefill replica's answer is read and dropped; it ends when
the KV cache has been sent. The decode replica's is the client's, from the first token on, which comes with the cache.
An engine waits minutes for another one that never comes, so when a half fails, the other is aborted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from random import SystemRandom
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from headway.control.live import WAITING, Live
from headway.core.record import Cause
from headway.gateway.fleet.replica import LiveReplica
from headway.gateway.upstream import sse
from headway.gateway.upstream.client import Connection
from headway.gateway.upstream.engine import EngineEndpoint
from headway.gateway.upstream.errors import EngineError, RefusedError, is_retryable

if TYPE_CHECKING:
    from headway.gateway.fleet.replica import Reservation
    from headway.gateway.scheduling.driver import Driver
    from headway.gateway.scheduling.in_flight import InFlightRequest

_LONGEST_ANSWER_BYTES = 64 << 20
_GRACE_S = 0.1
"""What happens to one of two engines is heard of from both, in any order; after that one knows from whom it came."""
_ROOMS = SystemRandom()


class HalfError(EngineError):
    """The replica that was to compute the prompt failed."""

    def __init__(self, replica: EngineEndpoint, cause: EngineError) -> None:
        super().__init__(*cause.args)
        self.replica, self.cause = replica, cause


class TurnedAwayError(Exception):
    """It would not have the request, and neither would another one."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(status, body)
        self.status, self.body = status, body


@dataclass(eq=False)
class PrefillLeg:
    """The replica that computes a request's prompt, while another one waits to answer."""

    replica: EngineEndpoint
    seat: Reservation | None = None
    """None: the scheduler's process has it."""
    generated_tokens: int = 0
    """That the request had when it came here."""
    connection: Connection | None = None
    is_stopped: bool = False
    """Its answer is not wanted any more."""

    def stop(self, why: str) -> None:
        """Have it abort."""
        self.is_stopped = True
        self.abort(why)

    def abort(self, why: str) -> None:
        """It does not answer any more."""
        if self.connection is not None:
            self.connection.abort(why)

    def leave(self, live: Live) -> None:
        """Its connection is closed first, then its seat given up."""
        self.is_stopped = True
        connection, self.connection = self.connection, None
        if connection is not None:
            self.replica.client.release(connection)
        seat, self.seat = self.seat, None
        if seat is not None:
            seat.produced(live.generated_tokens - self.generated_tokens)
            seat.give_up()


# What control's word becomes.


def begin(driver: Driver, live: Live, prefill: int, now: float) -> None:
    """Count the request at both of its replicas at once; its own task sends it to them."""
    ticket, first, answers = driver.tickets[live.id], driver.replicas[prefill], driver.replicas[live.decode_replica]
    ticket.is_split = ticket.is_kept = False
    ticket.half = PrefillLeg(first, first.take(live), live.generated_tokens)
    live.replica, live.decode_replica, live.enqueued_s = answers.id, -1, now
    live.enter(WAITING)
    ticket.replica = answers
    ticket.seat = seat = answers.take(live)
    seat.produced(0)  # no prompt is computed there
    seat.called = ticket.wake
    ticket.wake()


def computed(driver: Driver, ticket: InFlightRequest) -> None:
    """Its prompt is, and its KV cache where it is decoded: it is at one replica only."""
    live, half = ticket.live, ticket.half
    if half is None or ticket.outcome is not None:
        return
    ticket.half, ticket.prefilled_by = None, half.replica
    half.leave(live)
    driver.on_prefilled(live.model, "handed over")
    driver.wrote(live, driver.now, Cause.MOVED, half.replica.id)
    driver.control.on_moved(live, driver.now)


def failed(driver: Driver, ticket: InFlightRequest) -> None:
    """The replica that was to compute its prompt failed it: it is placed anew, with another one if there is one."""
    live, half = ticket.live, ticket.half
    ticket.leave()
    if ticket.outcome is not None or half is None:
        return
    driver.on_prefilled(live.model, "failed")
    driver.control.failed(live, driver.now, half.replica.id)
    driver.hope(ticket)


def able(replicas: Sequence[LiveReplica]) -> bool:
    """Some of these can do requests: not halves alone."""
    phases = {(replica.combo, replica.role) for replica in replicas if replica.is_single_phase}
    whole = any(role == "prefill" and (combo, "decode") in phases for combo, role in phases)
    return whole or any(not replica.is_single_phase for replica in replicas)


# What is sent, and what comes.


def addressed(body: dict[str, Any], half: PrefillLeg) -> dict[str, Any]:
    """The request to both. Several prompts have a number each."""
    host, port = urlsplit(half.replica.url).hostname or "", half.replica.bootstrap_port
    host = f"[{host}]" if ":" in host else host
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        num = len(prompt)
        return {**body, "bootstrap_host": [host] * num, "bootstrap_port": [port] * num,
                "bootstrap_room": [_ROOMS.getrandbits(63) for _ in prompt]}  # fmt: skip
    return {**body, "bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": _ROOMS.getrandbits(63)}


class Prefilling:
    """A prefill replica's answer, which is read to its end while the other one's is passed on."""

    def __init__(
        self,
        ticket: InFlightRequest,
        half: PrefillLeg,
        begun: Callable[[], bool],
        done: Callable[[InFlightRequest], None],
    ) -> None:
        """`begun`: the other replica has answered, so it has the cache. `done`: told when this one has ended well."""
        self._ticket, self.half, self._begun, self._done = ticket, half, begun, done
        self.error: EngineError | None = None
        """It failed before the other replica had begun, which was stopped."""
        self.refusal: tuple[int, bytes] | None = None
        """It would not have the request, whose fault that is."""
        self._task: asyncio.Task[None] | None = None

    async def send(
        self, answer: Callable[[EngineEndpoint, str, bytes], Awaitable[None]], replica: EngineEndpoint, path: str,
        headers: str, body: dict[str, Any],
    ) -> None:  # fmt: skip
        """Ask both, the other one by `answer`, which is followed to its end. EngineError where one of the two fails,
        TurnedAwayError where this one would not have the request."""
        data = msgspec.json.encode(addressed(body, self.half))
        self._task = asyncio.create_task(self._run(path, headers, data))
        try:
            await answer(replica, path, data)
        except EngineError:
            await self._says_why()
            if self.refusal is not None:
                raise TurnedAwayError(*self.refusal) from None
            if self.error is not None:
                raise HalfError(self.half.replica, self.error) from self.error
            raise
        finally:
            await self._close()

    async def _run(self, path: str, headers: str, data: bytes) -> None:
        half = self.half
        try:
            connection = await half.replica.client.request("POST", path, headers, data, self._opened)
            answer = await connection.read(_LONGEST_ANSWER_BYTES)
            if is_retryable(connection.status):
                raise RefusedError(connection.status, answer)
            if connection.status != 200:
                self.refusal = connection.status, answer
                self._stop("the other half was refused")
                return
            check(answer, connection.headers.get("content-type", ""))
        except EngineError as error:
            if not half.is_stopped and not self._begun():
                self.error = error
                self._stop("its prompt could not be computed")
        else:
            if not half.is_stopped:
                self._done(self._ticket)

    def _opened(self, connection: Connection) -> None:
        if self.half.is_stopped:
            connection.abort("the request is over")
        else:
            self.half.connection = connection

    def _stop(self, why: str) -> None:
        """Have the other replica abort, which would wait."""
        if self._ticket.connection is not None:
            self._ticket.connection.abort(why)

    @property
    def is_pending(self) -> bool:
        """Its answer has not ended."""
        return self._task is not None and not self._task.done()

    @property
    def is_over(self) -> bool:
        """The other replica is not to answer."""
        return self.error is not None or self.refusal is not None

    async def _says_why(self) -> None:
        """The other replica failed: it may be that this one did, and will be known to have in a moment."""
        if not (self.is_over or self.half.is_stopped or self._begun()):
            await self.ended(_GRACE_S)

    async def ended(self, timeout_s: float) -> None:
        """Its end is near."""
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=timeout_s)

    async def _close(self) -> None:
        """Nobody waits for it any more."""
        self.half.stop("given up")
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})


async def ended(both: Prefilling | None, timeout_s: float) -> None:
    """Who computed the prompt, if another one did, has a moment to say that it has."""
    if both is not None:
        await both.ended(timeout_s)


def check(answer: bytes, kind: str) -> None:
    """EngineError where an answer with a status of 200 says that it is none."""
    payloads = map(sse.payload, sse.EventSplitter().split(answer)) if "event-stream" in kind else [answer]
    for payload in payloads:
        if payload is None or payload == b"[DONE]":
            continue
        sse.decode_chunk(payload).check()
