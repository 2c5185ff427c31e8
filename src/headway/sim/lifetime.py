"""When a replica was billed, when it did not serve, and its roles over time."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from headway.core.fleet import Role

Intervals = tuple[tuple[float, float], ...]


class Lifetime:
    """The lifetime of one replica, which is billed from `start_s` to `end_s`."""

    __slots__ = ("_downs", "_roles", "end_s", "start_s")

    def __init__(self, role: Role, now: float) -> None:
        self.start_s, self.end_s = now, inf
        self._downs: list[tuple[float, float]] = []
        self._roles: list[tuple[float, Role]] = [(now, role)]

    @property
    def is_unchanged(self) -> bool:
        """Whether the replica has served in one role since `start_s`."""
        return not self._downs and len(self._roles) == 1 and self.end_s == inf

    def start_down(self, now: float, until_s: float = inf) -> None:
        """Begin an interval in which the replica does not serve."""
        self._downs.append((now, until_s))

    def end_down(self, now: float) -> None:
        """End the current interval in which the replica does not serve."""
        self._downs[-1] = self._downs[-1][0], now

    def end(self, now: float) -> None:
        """End the lifetime, as the replica is released."""
        self.end_s = now
        if self._downs and self._downs[-1][1] > now:
            self.end_down(now)

    def set_role(self, role: Role, now: float) -> None:
        """Change the role from `now` on."""
        self._roles.append((now, role))

    # Intervals up to the end of the run.

    def up(self, end_s: float) -> Intervals:
        """The billed interval."""
        return ((self.start_s, min(self.end_s, end_s)),)

    def down(self, end_s: float) -> Intervals:
        """Intervals in which the replica did not serve."""
        return tuple((start, min(end, end_s)) for start, end in self._downs if start < end_s)

    def with_role(self, role: Role, end_s: float) -> Intervals:
        """Intervals in which the replica had this role."""
        if len(self._roles) == 1 and self._roles[0][1] != role:
            return ()
        return role_intervals(self._roles, role, min(end_s, self.end_s))


def role_intervals(roles: Sequence[tuple[float, Role]], role: Role, end_s: float) -> Intervals:
    """Intervals until `end_s` with this role; `roles` are (start, role) in order of time."""
    until = [time_s for time_s, _ in roles[1:]]
    spans = zip(roles, [*until, end_s], strict=True)
    return tuple((start, min(end, end_s)) for (start, each), end in spans if each == role and start < min(end, end_s))
