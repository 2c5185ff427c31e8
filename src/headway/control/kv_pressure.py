"""Keeps KV cache room for shares below their fair part: requests of other shares are paused before a cache is full.

An engine with a full KV cache preempts its latest request, of any tenant, and puts that request at the front of the
engine's queue. A request of a quiet tenant then waits behind the preempted requests of a flooding tenant, even if the
quiet tenant's hold queue was short. Headway instead pauses requests of the flooding tenant. A paused request is held,
and later continues from its tokens with a recomputed KV cache. A pause costs as much as the engine's own preemption,
but no other request waits for the paused one.
"""

from __future__ import annotations

from typing import cast

from headway.control.live import DECODING, Live
from headway.control.preemptions import Pause
from headway.control.service import Service
from headway.core.view import ReplicaView


class KvPressure:
    """One service's KV pauses. It checks every `interval_s`, and when a request of a share below its fair part starts.

    A replica is under pressure while its free KV cache is less than half of the ordering's headroom. Only decoding
    requests of shares that have their fair part are paused. The latest arrivals are paused first, so that the oldest
    requests always proceed.
    """

    def __init__(self, service: Service, interval_s: float, pause: Pause) -> None:
        self.service, self.interval_s, self._pause = service, interval_s, pause
        self._pausing: dict[int, int] = {}
        """Maps each request that is being paused to its replica."""

    def enter(self, live: Live, now: float) -> None:
        """Count a request that enters the hold queue."""

    def paused(self, live: Live) -> None:
        """A request has left its replica."""
        self._pausing.pop(live.id, None)

    def tick(self, now: float) -> None:
        for view in self.service.up_views():
            self._relieve(view, now)

    def started(self, live: Live, replica: int, now: float) -> None:
        """A request is sent to a replica, which may be short of KV cache."""
        service = self.service
        member = service.member(replica)
        if member is not None and service.sharing is not None and service.sharing.is_below_share(live):
            self._relieve(member.view, now)

    def _relieve(self, view: ReplicaView, now: float) -> None:
        """Pause requests until the replica is no longer under pressure."""
        service = self.service
        sent, sharing = service.sent, service.sharing
        if sent is None or sharing is None:
            return
        excess = sent.kv_excess(view)
        if excess <= 0:
            return
        present = cast("list[Live]", list(view.requests))
        ids = {live.id for live in present}
        self._pausing = {id: at for id, at in self._pausing.items() if at != view.id or id in ids}
        excess -= sum(_tokens(live) for live in present if live.id in self._pausing)
        able = [live for live in present if live.stage is DECODING and live.move is None]
        able = [live for live in able if live.id not in self._pausing and not sharing.is_below_share(live)]
        for live in sorted(able, key=_arrival, reverse=True):
            if excess <= 0:
                break
            excess -= _tokens(live)
            self._pausing[live.id] = view.id
            self._pause(live, now)


def _tokens(live: Live) -> int:
    """The request's tokens in the KV cache."""
    return live.prompt_tokens + live.generated_tokens


def _arrival(live: Live) -> tuple[float, int]:
    return live.arrival_s, live.id
