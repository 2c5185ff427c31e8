"""When a replica was there, when it was out of order, and what it was for."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from headway.core.fleet import Role

Intervals = tuple[tuple[float, float], ...]


class Lifetime:
    """Of one replica, which is paid for from `start_s` to `end_s`."""

    __slots__ = ("_downs", "_roles", "end_s", "start_s")

    def __init__(self, role: Role, now: float) -> None:
        self.start_s, self.end_s = now, inf
        self._downs: list[tuple[float, float]] = []
        self._roles: list[tuple[float, Role]] = [(now, role)]

    def out(self, now: float, until_s: float = inf) -> None:
        """It does not serve."""
        self._downs.append((now, until_s))

    def back(self, now: float) -> None:
        """It serves again."""
        self._downs[-1] = self._downs[-1][0], now

    def ends(self, now: float) -> None:
        """It is given back."""
        self.end_s = now
        if self._downs and self._downs[-1][1] > now:
            self.back(now)

    def becomes(self, role: Role, now: float) -> None:
        """It is for something else."""
        self._roles.append((now, role))

    # Up to the end of the run.

    def up(self, end_s: float) -> Intervals:
        """When it was there."""
        return ((self.start_s, min(self.end_s, end_s)),)

    def down(self, end_s: float) -> Intervals:
        """When it did not serve."""
        return tuple((start, min(end, end_s)) for start, end in self._downs if start < end_s)

    def was(self, role: Role, end_s: float) -> Intervals:
        """When it was for this."""
        return was(self._roles, role, min(end_s, self.end_s))


def was(roles: Sequence[tuple[float, Role]], role: Role, end_s: float) -> Intervals:
    """When, up to then, a replica was for this; `roles` are what it was for, each from when on."""
    until = [time_s for time_s, _ in roles[1:]]
    spans = zip(roles, [*until, end_s], strict=True)
    return tuple((start, min(end, end_s)) for (start, each), end in spans if each == role and start < min(end, end_s))
