"""Calls policies that act at intervals."""

from __future__ import annotations

from headway.control.parts import Ticking
from headway.gateway.clock import Clock
from headway.gateway.scheduling.control import LiveControl


class PolicyTicks:
    """Calls control's periodic policies on the gateway's clock."""

    def __init__(self, clock: Clock, control: LiveControl) -> None:
        self._clock, self._control = clock, control
        self._ticking: list[Ticking] = []

    def start(self) -> None:
        """Call the current policies from now on. A later call switches to the policies that are then current."""
        ticking = self._control.parts.ticking()
        for policy in ticking:
            if policy.interval_s is not None and policy not in self._ticking:
                self._clock.at(self._clock.now + policy.interval_s, self._tick, policy)
        self._ticking = ticking

    def _tick(self, now: float, policy: Ticking) -> None:
        if policy not in self._ticking:
            return  # another policy has replaced it
        assert policy.interval_s is not None
        self._clock.at(now + policy.interval_s, self._tick, policy)
        policy.tick(self._clock.now)
