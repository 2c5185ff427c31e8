"""The number of replicas for a rate, from rehearsals of the busiest hours alone, and the number to reserve.

Sets and parameters
    n in 1..N   replicas
    k           steps of a fixed grid of rates: b s^k, where b is the recorded rate and s is `STEP`
    ok(n, k)    whether n replicas meet every target at that rate with the wanted chance, by a rehearsal
Result          K(n) = the largest k for which ok(n, k);  need(r) = the least n for which b s^K(n) >= r
Assumed         ok(n, k + 1) implies ok(n, k): each K(n) is found by bisection.

K does not depend on the forecast, so a higher rate never needs fewer replicas in any forecast. K is rehearsed for 1, 2,
4, ... and for every number that a week needs. Between them, log K is interpolated linearly in log n.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import ceil, exp, floor, log

from headway.planning.together import Together, in_turn

STEP = 1.05
LEAP = 8
"""Grid steps of the search's first move."""
LOWEST, HIGHEST = -160, 120
"""Grid steps: a load from 1/2500 to 350 times the recorded one."""
CLOSE = 1e-9
IsMet = Callable[[int, float], bool]
"""Whether a number of replicas meets all targets at a multiple of the recorded rate."""


class ServedRates:
    """The highest rate that each number of replicas serves, rehearsed on demand."""

    def __init__(
        self, is_met: IsMet, recorded_rps: float, replicas_at_recorded: int, most: int, together: Together = in_turn
    ) -> None:
        """`replicas_at_recorded` serve the recorded rate, where the search begins. `most`: largest number of replicas.

        The rates do not depend on the order in which `together` makes calls.
        """
        self._is_met, self._recorded_rps, self.most = is_met, recorded_rps, most
        self._together = together
        self._met: dict[tuple[int, int], bool] = {}
        self._first = -log(max(replicas_at_recorded, 1)) / log(STEP)
        self._highest: dict[int, int | None] = {}

    @property
    def known(self) -> dict[int, float]:
        """Requests per second by number of replicas, for the rehearsed numbers."""
        return {n: self._rate(k) for n, k in sorted(self._highest.items())}

    @property
    def num_rehearsals(self) -> int:
        return len(self._met)

    def rate(self, n: int) -> float:
        """The highest rate that n replicas serve; 0 if they serve no rate of the grid."""
        if n not in self._highest:
            self._highest[n] = self._search(n)
        return self._rate(self._highest[n])

    def need(self, rps: float) -> int | None:
        """The smallest sufficient number of replicas, confirmed by rehearsal; None if it exceeds `most`."""
        n = self.roughly(rps)
        while n is not None and n <= self.most and self.rate(n) < rps * (1 - CLOSE):
            n += 1
        if n is None or n > self.most:
            return None
        while n > 1 and self.rate(n - 1) >= rps * (1 - CLOSE):
            n -= 1
        return n

    def roughly(self, rps: float) -> int | None:
        """Like `need`, with interpolation between the rehearsed numbers; None if it exceeds `most`."""
        self._reach(rps)
        known = [(n, rate) for n, rate in self.known.items() if rate > 0]
        above = next((pair for pair in known if pair[1] >= rps * (1 - CLOSE)), None)
        if above is None:
            return None
        below = max((pair for pair in known if pair[0] < above[0]), default=None)
        if below is None:
            return above[0]
        share = (log(rps) - log(below[1])) / (log(above[1]) - log(below[1]))
        between = exp(log(below[0]) + share * (log(above[0]) - log(below[0])))
        return min(max(ceil(between - 1e-6), below[0] + 1), above[0])

    def _reach(self, rps: float) -> None:
        """Rehearse 1, 2, 4, ... replicas up to the first number that serves the rate."""
        n = 1
        while self.rate(n) < rps * (1 - CLOSE) and n < self.most:
            n = min(2 * n, self.most)

    def _rate(self, k: int | None) -> float:
        return 0.0 if k is None else self._recorded_rps * STEP**k

    def _ok(self, n: int, k: int) -> bool:
        if (n, k) not in self._met:
            self._met[n, k] = self._is_met(n, STEP**k)
        return self._met[n, k]

    def _ahead(self, n: int, steps: Sequence[int]) -> None:
        """Rehearse in parallel the steps that the search may need, if calls can run in parallel."""
        if self._together is not in_turn:
            wanted = [k for k in dict.fromkeys(steps) if (n, k) not in self._met and LOWEST <= k <= HIGHEST]
            self._together([partial(self._ok, n, k) for k in wanted])

    def _search(self, n: int) -> int | None:
        at = floor(min(max(self._first + log(n) / log(STEP), LOWEST), HIGHEST))
        self._ahead(n, [at, at + LEAP, at - LEAP])
        low: int | None = at if self._ok(n, at) else None
        high: int | None = None if low is not None else at
        while high is None:
            assert low is not None
            if low >= HIGHEST:
                return low
            ahead = min(low + LEAP, HIGHEST)
            low, high = (ahead, None) if self._ok(n, ahead) else (low, ahead)
        while low is None:
            if high <= LOWEST:
                return None
            behind = max(high - LEAP, LOWEST)
            low, high = (behind, high) if self._ok(n, behind) else (None, behind)
        while high - low > 1:
            middle = (low + high) // 2
            self._ahead(n, [middle, (low + middle) // 2, (middle + high) // 2])
            low, high = (middle, high) if self._ok(n, middle) else (low, middle)
        return low


def used_share(needs: Sequence[int]) -> tuple[float, ...]:
    """Holds, for each replica from the first one, the share of the hours that need it."""
    return tuple(sum(need >= n for need in needs) / len(needs) for n in range(1, max(needs) + 1))


def to_reserve(needs: Sequence[int], reserved_usd: float | None, rented_usd: float) -> int:
    """The cheapest number of replicas to reserve, if each hour's other replicas are rented. Prices are for one replica
    and hour.

    A replica is reserved if the share of hours that need it exceeds the ratio of the prices. Without a reserved price:
    the number that every hour needs.
    """
    if reserved_usd is None:
        return min(needs)
    return sum(share * rented_usd > reserved_usd for share in used_share(needs))


def hours_of_day(needs: Sequence[int], hour: Sequence[int]) -> dict[int, int]:
    """Returns, for each hour of the day, the largest number of replicas on any day."""
    most: dict[int, int] = {}
    for need, at in zip(needs, hour, strict=True):
        most[at] = max(most.get(at, 0), need)
    return most


def runs(by_hour: Mapping[int, int], base: int) -> list[tuple[int, int, int]]:
    """(first hour, hours, replicas) of the times of day with a constant number above the base. A time may contain
    midnight."""
    raised = {hour: n for hour, n in by_hour.items() if n > base}
    if len(raised) == 24 and len(set(raised.values())) == 1:
        return [(0, 24, raised[0])]
    found = []
    for hour, n in sorted(raised.items()):
        if raised.get((hour - 1) % 24) == n:
            continue
        length = 1
        while raised.get((hour + length) % 24) == n:
            length += 1
        found.append((hour, length, n))
    return found
