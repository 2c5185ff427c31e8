"""Requests that are kept for later, such as those that nobody waits for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from random import Random

from headway.control.live import HELD, Live
from headway.control.service import Service
from headway.core.errors import HeadwayError
from headway.core.policy import Admission
from headway.core.view import ReplicaView, RequestView

Serve = Callable[[Live, float], None]


class Admissions:
    """One service's admission policy, and who it keeps. Also `core.view.AdmissionView`."""

    def __init__(self, service: Service, policy: Admission, random: Random, serve: Serve) -> None:
        self.service = service
        self.policy = policy
        self.interval_s = policy.interval_s
        self.random = random
        self.now = 0.0
        self._serve = serve
        self._held: dict[int, Live] = {}

    @property
    def replicas(self) -> Sequence[ReplicaView]:
        """Those that are up."""
        return [member.view for member in self.service.members if member.is_up]

    @property
    def held(self) -> Collection[RequestView]:
        """Who is kept, in order of arrival."""
        return self._held.values()

    def lives(self) -> list[Live]:
        """The same, for control."""
        return list(self._held.values())

    def keeps(self, live: Live) -> bool:
        """Keep a request back, if the policy says so."""
        if not self.service.fits(live) or not self.policy.holds(live):
            return False
        live.stage = HELD
        self._held[live.id] = live
        return True

    def forget(self, live: Live) -> None:
        """It has ended."""
        self._held.pop(live.id, None)

    def tick(self, now: float) -> None:
        """Let go who may."""
        if not self._held:
            return
        self.now = now
        for release in self.policy.release(self):
            live = self._held.pop(release.request, None)
            if live is None:
                name = type(self.policy).__name__
                raise HeadwayError(f"admission {name} let request {release.request!r} go, which it does not keep")
            if release.tier is not None:
                live.tier = release.tier  # type: ignore[misc]  # of a frozen base, thawed here
            live.sent_to = release.region
            self._serve(live, now)
