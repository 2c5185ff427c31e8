"""Holds requests back, for example non-interactive ones, while the admission policy asks for it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from random import Random

from headway.control.decisions import DecisionObserver
from headway.control.live import HELD, Live
from headway.control.service import Service
from headway.core.decision import Release
from headway.core.errors import HeadwayError, unusable
from headway.core.policy import Admission
from headway.core.view import ReplicaView

_RELEASES = "a list of Releases, which may be empty"
Place = Callable[[Live, float], None]


class Admissions:
    """One service's admission policy and the requests it holds. Implements `core.view.AdmissionView`."""

    def __init__(
        self,
        service: Service,
        policy: Admission,
        random: Random,
        place: Place,
        observer: DecisionObserver | None = None,
    ) -> None:
        self.service = service
        self.policy = policy
        self.interval_s = policy.interval_s
        self.random = random
        self.now = 0.0
        self._place = place
        self._observer = observer
        self._held: dict[int, Live] = {}

    @property
    def replicas(self) -> Sequence[ReplicaView]:
        """The service's replicas that are up."""
        return self.service.up_views()

    @property
    def held(self) -> Collection[Live]:
        """The held requests, in order of arrival."""
        return self._held.values()

    def hold(self, live: Live) -> bool:
        """Hold an arriving request if the policy says so; returns whether it is held."""
        if not self.service.fits(live) or not self.policy.holds(live):
            return False
        live.stage = HELD
        self._held[live.id] = live
        if self._observer is not None:
            self._observer.note_hold(live, live.arrival_s, "kept by the admission policy")
        return True

    def discard(self, live: Live) -> None:
        """Stop holding a request that has ended."""
        self._held.pop(live.id, None)

    def tick(self, now: float) -> None:
        """Place the requests that the policy releases."""
        if not self._held:
            return
        self.now = now
        returned: object = self.policy.release(self)
        if not isinstance(returned, Iterable):
            raise unusable(self.policy, "release", returned, _RELEASES)
        for release in returned:
            if not isinstance(release, Release) or not isinstance(release.tier, int | None):
                raise unusable(self.policy, "release", release, _RELEASES)
            live = self._held.pop(release.request, None)
            if live is None:
                name = type(self.policy).__name__
                raise HeadwayError(f"admission {name} released request {release.request!r}, which it does not hold")
            if release.tier is not None and release.tier != live.tier:
                live.tier, live.tier_since_s = release.tier, now
            live.release_region = release.region
            self._place(live, now)
