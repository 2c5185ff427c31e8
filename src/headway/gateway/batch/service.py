"""Batches, as one gateway sees to them: the database, the runner, and requests like any other."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from headway.core.errors import HeadwayError
from headway.gateway.batch.runner import Answered, Order, Runner
from headway.gateway.batch.store import Store
from headway.gateway.errors import ApiError
from headway.gateway.relay.request import read_request
from headway.gateway.relay.writer import Headers
from headway.gateway.settings import Batches

if TYPE_CHECKING:
    from headway.gateway.gateway import Gateway

log = logging.getLogger("headway.gateway")
_NO_ROOM = frozenset(("no_capacity", "queue_full", "shutting_down"))


class BatchService:
    """One gateway's."""

    def __init__(self, gateway: Gateway, settings: Batches) -> None:
        self._gateway, self.settings = gateway, settings
        self.store = Store(settings.store)
        self.body_timeout_s = gateway.settings.body_timeout_s
        self._runner = Runner(self.store, settings, gateway.settings.max_body_bytes, self._answer)
        self.start, self.stop, self.wake = self._runner.start, self._runner.stop, self._runner.wake

    @property
    def num_open(self) -> int:
        """Lines that wait for their turn, or for their answer."""
        return self._runner.num_open

    async def _answer(self, order: Order, body: bytes, request_id: str, left_s: float) -> Answered:
        """A line goes the way of any request, though nobody waits for it."""
        kept = _Kept()
        try:
            asked = read_request(order.endpoint, body, {})
            if asked.stream:
                raise ApiError(400, "nobody reads a stream in a batch", "invalid_value", "stream")
            asked.tier = max(self.settings.tier, self._gateway.keys.tier(order.owner))
            exchange = self._gateway.exchange(asked, kept, request_id, left_s)
        except ApiError as error:
            return Answered(error.status, error.json(), error.code in _NO_ROOM)
        except HeadwayError as error:
            log.error("%s", error)
            return Answered(500, ApiError(500, "a policy failed", "policy_error").json())
        await exchange.run()
        self._gateway.end(asked, exchange)
        body = b"".join(kept.parts)
        return Answered(kept.status, body, kept.status == 503 and b'"no_capacity"' in body)


class _Kept:
    """An answer that nobody is sent. Satisfies `send.Reply`."""

    is_full = False

    def __init__(self) -> None:
        self.status = 0
        self.parts: list[bytes] = []

    def start(self, status: int, headers: Headers) -> None:
        """Keep the status."""
        self.status = status

    def write(self, body: bytes, more: bool = False) -> None:
        """Keep it."""
        self.parts.append(body)

    async def drain(self) -> None:
        """There is always room."""
