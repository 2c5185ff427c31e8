"""Disaggregated prefill with SGLang: one attempt as two requests at the same time (dual dispatch).

Source: SGLang's documentation of PD disaggregation, and its routers. Each engine is started for one phase. Both engines
get the same request, with the prefill replica's address (`bootstrap_host`, `bootstrap_port`) and a number under which
the two engines find each other (`bootstrap_room`). The prefill replica's answer is read and dropped; it ends when the
KV cache has been sent. The client gets the decode replica's answer, whose first token comes with the cache. An engine
waits for minutes for a missing partner, so when one request fails, the other request is aborted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import SystemRandom
from typing import Any
from urllib.parse import urlsplit

import msgspec

from headway.gateway.scheduling.in_flight import InFlightRequest, PrefillLeg
from headway.gateway.upstream import loose_json, sse
from headway.gateway.upstream.client import Connection
from headway.gateway.upstream.engine import EngineEndpoint
from headway.gateway.upstream.errors import EngineError, RefusedError, is_retryable, without_frames

_MAX_ANSWER_BYTES = 64 << 20
_GRACE_S = 0.1
"""When one engine fails, its request and the other engine's request may fail in any order. After this time, the engine
that failed first is known."""
_TRANSFER_GRACE_S = 5.0
"""The decode replica reports every broken KV transfer. If the prefill replica broke the transfer, the prefill replica's
own answer ends soon."""
_ROOMS = SystemRandom()
Send = Callable[[EngineEndpoint, str, bytes], Awaitable[None]]


class PrefillLegError(EngineError):
    """The prefill replica of a dual dispatch failed."""

    def __init__(self, replica: EngineEndpoint, cause: EngineError) -> None:
        super().__init__(*cause.args)
        self.replica, self.cause = replica, cause


class PrefillRejectedError(Exception):
    """The prefill replica refused the request. Any other replica would refuse it, too."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(status, body)
        self.status, self.body = status, body


def with_bootstrap(body: dict[str, Any], replica: EngineEndpoint) -> dict[str, Any]:
    """The body for both replicas of a pair. With several prompts, each has its own room."""
    host, port = urlsplit(replica.url).hostname or "", replica.bootstrap_port
    host = f"[{host}]" if ":" in host else host
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        num = len(prompt)
        return {
            **body,
            "bootstrap_host": [host] * num,
            "bootstrap_port": [port] * num,
            "bootstrap_room": [_ROOMS.getrandbits(63) for _ in prompt],
        }
    return {**body, "bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": _ROOMS.getrandbits(63)}


class DualDispatch:
    """A request at both replicas of a pair. Reads the prefill replica's answer while the decode replica's answer is
    relayed."""

    def __init__(
        self,
        request: InFlightRequest,
        leg: PrefillLeg,
        has_begun: Callable[[], bool],
        on_done: Callable[[InFlightRequest], None],
        may_resend: Callable[[], bool],
    ) -> None:
        """`has_begun()`: whether the decode replica has answered, so that it has the KV cache. `on_done(request)` is
        called when the prefill replica's answer has ended and the decode replica has the KV cache. `may_resend`: see
        `Client.request`."""
        self._request, self._leg, self._has_begun, self._on_done = request, leg, has_begun, on_done
        self._may_resend = may_resend
        self._error: EngineError | None = None
        """The prefill replica's failure that made the gateway abort the decode replica."""
        self._rejection: tuple[int, bytes] | None = None
        """Status and body with which the prefill replica refused the request."""
        self._task: asyncio.Task[None] | None = None

    async def send(self, send: Send, replica: EngineEndpoint, path: str, headers: str, body: dict[str, Any]) -> None:
        """Send to both replicas, to the decode replica by `send`, and wait for the decode replica's end.

        Raises EngineError if the decode replica fails, PrefillLegError if the prefill replica fails,
        PrefillRejectedError if it refuses the request.
        """
        data = msgspec.json.encode(with_bootstrap(body, self._leg.replica))
        self._task = asyncio.create_task(self._prefill(path, headers, data))
        try:
            await send(replica, path, data)
        except EngineError as error:
            if not (self.has_failed or self._leg.is_stopped or self._has_begun()):
                # the prefill replica's failure may be the cause
                await self.wait_for_prefill(_TRANSFER_GRACE_S if "transfer" in str(error).lower() else _GRACE_S)
            if self._rejection is not None:
                raise PrefillRejectedError(*self._rejection) from None
            if self._error is not None:
                raise PrefillLegError(self._leg.replica, self._error) from self._error
            raise
        finally:
            self._leg.stop("given up")
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _prefill(self, path: str, headers: str, data: bytes) -> None:
        leg = self._leg
        try:
            connection = await leg.replica.client.request("POST", path, headers, data, self._opened, self._may_resend)
            answer = await connection.read(_MAX_ANSWER_BYTES)
            if is_retryable(connection.status):
                raise RefusedError(connection.status, answer)
            if connection.status != 200:
                self._rejection = connection.status, answer
                self._abort_decode("the prefill replica rejected the request")
                return
            check_answer(answer, connection.headers.get("content-type", ""))
        except EngineError as error:
            if not leg.is_stopped and not self._has_begun():
                self._error = without_frames(error)
                self._abort_decode("the prefill replica failed")
                return
        if not leg.is_stopped:  # after a failure, too, if the decode replica has answered: it has the KV cache
            self._on_done(self._request)

    def _opened(self, connection: Connection) -> None:
        if self._leg.is_stopped:
            connection.abort("the request is over")
        else:
            self._leg.connection = connection

    def _abort_decode(self, why: str) -> None:
        """Abort the decode replica's request, which would otherwise wait for minutes."""
        if self._request.connection is not None:
            self._request.connection.abort(why)

    @property
    def is_pending(self) -> bool:
        """Whether the prefill replica's answer has not ended."""
        return self._task is not None and not self._task.done()

    @property
    def has_failed(self) -> bool:
        """Whether the prefill replica failed or refused the request, so that waiting for the decode replica is
        useless."""
        return self._error is not None or self._rejection is not None

    async def wait_for_prefill(self, timeout_s: float) -> None:
        """Wait until the prefill replica's answer has ended, at most `timeout_s`."""
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=timeout_s)


def check_answer(answer: bytes, content_type: str) -> None:
    """Raises EngineError if an answer with status 200 reports an error or an abort, or is not a JSON object.

    After such an answer, the prompt may not be computed, and the decode replica would wait for minutes.
    """
    if "event-stream" not in content_type:
        _, unread = sse.read_chunk(answer)
        if unread in (loose_json.NOT_JSON, loose_json.NOT_OBJECT):
            raise EngineError(f"answered a prefill with what is no completion ({unread})")
        return
    for payload in map(sse.payload, sse.EventSplitter().split(answer)):
        if payload is not None and not sse.is_done(payload):
            sse.read_chunk(payload)
