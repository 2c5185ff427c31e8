"""A request in flight: waiting for its replica, and leaving it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("httptools")

from headway.control.live import Live
from headway.core.record import Outcome
from headway.gateway.scheduling.in_flight import InFlightRequest, PrefillLeg, RequestEndedError


class _Reservation:
    slot = None

    def __init__(self, events: list[str], name: str) -> None:
        self._events, self._name = events, name
        self.waits_for_slot = False

    def count_tokens(self, tokens: int) -> None:
        self._events.append(f"{self._name} has {tokens} tokens")

    def free(self) -> None:
        self._events.append(f"{self._name} is free")


class _Replica:
    """An endpoint that is its own client, and a connection."""

    def __init__(self, events: list[str], name: str) -> None:
        self._events, self._name = events, name
        self.client = self

    def release(self, connection: object) -> None:
        self._events.append(f"{self._name} has its connection back")

    def abort(self, why: str) -> None:
        self._events.append(f"{self._name} is aborted: {why}")


def _placed(events: list[str]) -> tuple[InFlightRequest, Any]:
    request, replica = InFlightRequest(Live(0, 0.0, 1, 1)), _Replica(events, "decode")
    request.replica = request.connection = replica  # type: ignore[assignment]
    request.reservation = _Reservation(events, "decode")
    leg = _Replica(events, "prefill")
    request.prefill_leg = PrefillLeg(leg, _Reservation(events, "prefill"), 2, leg)  # type: ignore[arg-type]
    return request, replica


def test_a_request_leaves_by_its_connection_first_and_its_reservation_second() -> None:
    events: list[str] = []
    request, _ = _placed(events)
    request.live.generated_tokens = 5
    request.detach()
    assert events == [
        "decode has its connection back",
        "decode is free",
        "prefill has its connection back",
        "prefill has 3 tokens",
        "prefill is free",
    ]
    request.detach()
    assert len(events) == 5 and request.connection is None


def test_an_aborted_request_has_both_of_its_connections_broken_off() -> None:
    events: list[str] = []
    request, _ = _placed(events)
    leg = request.prefill_leg
    request.abort_prefill_leg("it hangs")
    assert leg is not None and not leg.is_stopped
    request.abort("it moves")
    assert events == ["prefill is aborted: it hangs", "decode is aborted: it moves", "prefill is aborted: it moves"]
    assert leg.is_stopped


def test_a_request_waits_until_it_is_placed_and_has_a_slot_or_has_ended() -> None:
    async def story() -> None:
        request, replica = _placed([])
        reservation, request.reservation = request.reservation, None
        waiting = asyncio.create_task(request.wait_for_replica())
        await asyncio.sleep(0)
        assert isinstance(reservation, _Reservation)
        reservation.waits_for_slot = True
        request.reservation = reservation
        request.wake()
        await asyncio.sleep(0)
        assert not waiting.done()
        reservation.waits_for_slot = False
        request.wake()
        assert await waiting is replica
        request.end(Outcome.REJECTED)
        with pytest.raises(RequestEndedError) as ended:
            await request.wait_for_replica()
        assert ended.value.outcome is Outcome.REJECTED

    asyncio.run(story())
