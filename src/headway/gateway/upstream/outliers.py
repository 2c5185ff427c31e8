"""Detects outliers: replicas that pass their health checks but serve worse than their peers are ejected for a while.

A replica's peers are those of its pool and role. A replica is an outlier if it fails several requests in a row, fails a
larger share of its requests than its peers, or is slower than its peers. Latencies are compared as ratios to the step
model's expectation. The rules follow Envoy's outlier detection (consecutive errors, success rate, a bounded share,
ejection times that grow), with one difference: fleets of engines are small, so a replica is compared with its peers'
total, where Envoy compares with the mean and deviation over many hosts.

Failures to connect are not counted here, because a probe shows whether such a replica exists. If an engine ends, all
its streams break, and the breaks count as one failure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Literal

from msgspec import Struct

from headway.gateway.settings import Outliers

_NUM_BUCKETS = 30
_MIN_LATENCIES = 5
"""Minimum number of observations for a comparison of latencies, of the replica and of its peers."""
_MIN_SLOW_S = 2.0
"""Minimum total time of the replica's observations, in seconds."""
_MIN_SLOW_BUCKETS = 2
"""Number of the window's buckets in which the replica must be slow. One pause of an engine delays all of its streams,
so one bucket is not enough."""
Latency = Literal["first token", "between tokens"]
Reason = Literal["failures in a row", "failures", "latency"]


_PHRASES: dict[Latency, str] = {"first token": "to first token", "between tokens": "between tokens"}


class Ejection(Struct, frozen=True):
    """The ejection of a replica, or its return."""

    replica: int
    reason: Reason | None
    """Reason for the ejection; None if the replica returns."""
    why: str = ""
    """The reason with numbers, for logs."""


class _Window:
    """Sums of two quantities over the last seconds."""

    __slots__ = ("_bucket_s", "_buckets")

    def __init__(self, keep_s: float) -> None:
        self._bucket_s = keep_s / _NUM_BUCKETS
        self._buckets: deque[list[float]] = deque()
        """(number of the bucket, number of observations, first sum, second sum) of each bucket."""

    def add(self, now: float, first: float, second: float, num: int = 1) -> None:
        """Add `num` observations, given as sums."""
        number = now // self._bucket_s
        if not self._buckets or self._buckets[-1][0] < number:
            self._buckets.append([number, 0, 0.0, 0.0])
        bucket = self._buckets[-1]
        bucket[1] += num
        bucket[2] += first
        bucket[3] += second

    def sums(self, now: float) -> Sums:
        """(number of observations, first sum, second sum) over the window."""
        oldest = now // self._bucket_s - _NUM_BUCKETS
        while self._buckets and self._buckets[0][0] <= oldest:
            self._buckets.popleft()
        num = sum(int(bucket[1]) for bucket in self._buckets)
        return num, sum(bucket[2] for bucket in self._buckets), sum(bucket[3] for bucket in self._buckets)

    def num_above(self, ratio: float) -> int:
        """Number of buckets in which the first sum is at least `ratio` times the second."""
        return sum(bucket[2] >= ratio * bucket[3] for bucket in self._buckets)

    @property
    def num_buckets(self) -> int:
        return len(self._buckets)

    def clear(self) -> None:
        self._buckets.clear()


Sums = tuple[int, float, float]
_NOTHING: Sums = (0, 0.0, 0.0)


def _plus(one: Sums, other: Sums, sign: int = 1) -> Sums:
    return one[0] + sign * other[0], one[1] + sign * other[1], one[2] + sign * other[2]


class _Host:
    """Observations of one replica."""

    def __init__(self, group: Hashable, window_s: float) -> None:
        self.group = group
        self.num_in_row = 0
        """Number of failures since the last success."""
        self.num_answered = 0
        """Number of answered requests that are not in the window yet. Most requests are answered, and a counter takes
        little time."""
        self.outcomes = _Window(window_s)
        """Failures, and requests."""
        self.latencies: dict[Latency, _Window] = {"first token": _Window(window_s), "between tokens": _Window(window_s)}
        """Maps each kind to its seconds and expected seconds."""
        self.until_s: float | None = None
        """The end of the current ejection; None if the replica is not ejected."""
        self.num_ejections = 0
        self.returned_s = float("-inf")

    def is_quiet(self) -> bool:
        """Whether nothing was observed of late: such a replica is no outlier, and changes no group's usual values."""
        windows = (self.outcomes, *self.latencies.values())
        return not (self.num_in_row or self.num_answered or any(window.num_buckets for window in windows))

    def sums(self, now: float) -> list[Sums]:
        """Sums of the outcomes, and of the latencies by kind."""
        if self.num_answered:
            self.outcomes.add(now, 0.0, self.num_answered, self.num_answered)
            self.num_answered = 0
        return [self.outcomes.sums(now), *(window.sums(now) for window in self.latencies.values())]

    def clear(self) -> None:
        self.num_in_row = self.num_answered = 0
        for window in (self.outcomes, *self.latencies.values()):
            window.clear()


class OutlierDetector:
    """Decides which replicas are ejected, and for how long. Time is an argument; there is no other input or effect."""

    def __init__(self, settings: Outliers) -> None:
        self.settings = settings
        self._hosts: dict[int, _Host] = {}

    def add(self, replica: int, group: Hashable) -> None:
        """Start to observe a replica. Its peers are the other replicas of its group."""
        self._hosts[replica] = _Host(group, self.settings.window_s)

    def remove(self, replica: int) -> None:
        self._hosts.pop(replica, None)

    def is_ejected(self, replica: int) -> bool:
        host = self._hosts.get(replica)
        return host is not None and host.until_s is not None

    # Observations.

    def succeeded(self, replica: int) -> None:
        """Record that a replica has answered a request. The answer counts from the next `check` on."""
        if (host := self._hosts.get(replica)) is not None:
            host.num_in_row = 0
            host.num_answered += 1

    def failed(self, replica: int, now: float) -> bool:
        """Record that a replica has failed a request, or refused a request that a peer has answered. True if `check` is
        due."""
        host = self._hosts.get(replica)
        if host is None:
            return False
        host.num_in_row += 1
        host.outcomes.add(now, 1.0, 1.0)
        return host.num_in_row >= self.settings.failures

    def observe(self, replica: int, kind: Latency, seconds: float, expected_s: float, now: float) -> None:
        """Record the duration of an operation that was expected to take `expected_s`."""
        if (host := self._hosts.get(replica)) is not None:
            host.latencies[kind].add(now, seconds, expected_s)

    # Decisions.

    def check(self, now: float, is_up: Callable[[int], bool]) -> list[Ejection]:
        """End expired ejections, and eject outliers. `is_up`: whether the replica passes its health checks."""
        changes: list[Ejection] = []
        for replica, host in self._hosts.items():
            if host.until_s is None:
                continue
            others = self._serving(host.group, is_up)
            if now >= host.until_s or (not others and is_up(replica)):
                host.until_s, host.returned_s = None, now
                host.clear()
                changes.append(Ejection(replica, None, "" if others else "none of its peers serves"))
        watched = [(replica, host) for replica, host in self._hosts.items() if host.until_s is None]
        sums = {replica: host.sums(now) for replica, host in watched if not host.is_quiet()}
        totals: dict[Hashable, list[Sums]] = {}
        for replica, own in sums.items():
            group = self._hosts[replica].group
            totals[group] = [_plus(*pair) for pair in zip(totals.get(group, [_NOTHING] * len(own)), own, strict=True)]
        for replica, own in sums.items():
            host = self._hosts[replica]
            peers = [_plus(total, each, -1) for total, each in zip(totals[host.group], own, strict=True)]
            reason, why = self._outlier(replica, host, own, peers)
            if reason is not None and is_up(replica) and self._may_eject(replica, is_up):
                changes.append(self._eject(host, replica, reason, why, now))
        return changes

    def _group(self, group: Hashable) -> list[int]:
        return [replica for replica, host in self._hosts.items() if host.group == group]

    def _serving(self, group: Hashable, is_up: Callable[[int], bool]) -> list[int]:
        return [replica for replica in self._group(group) if self._hosts[replica].until_s is None and is_up(replica)]

    def _may_eject(self, replica: int, is_up: Callable[[int], bool]) -> bool:
        """Whether one more replica of the group may be ejected. One replica of the group always remains."""
        share, group = self.settings.max_ejected_share, self._hosts[replica].group
        hosts = self._group(group)
        num_ejected = sum(self._hosts[each].until_s is not None for each in hosts)
        has_room = share > 0 and num_ejected < max(int(share * len(hosts)), 1)
        return has_room and any(each != replica for each in self._serving(group, is_up))

    def _eject(self, host: _Host, replica: int, reason: Reason, why: str, now: float) -> Ejection:
        settings = self.settings
        is_again = now - host.returned_s <= settings.max_ejection_s
        host.num_ejections = host.num_ejections + 1 if is_again else 1
        seconds = min(settings.ejection_s * host.num_ejections, settings.max_ejection_s)
        host.until_s = now + seconds
        return Ejection(replica, reason, f"{why}; for {seconds:g} s")

    def _outlier(
        self, replica: int, host: _Host, own: Sequence[Sums], peers: Sequence[Sums]
    ) -> tuple[Reason | None, str]:
        """The reason why a replica is an outlier, by its own sums and its peers' total; None if it is no outlier."""
        settings = self.settings
        if host.num_in_row >= settings.failures and self._has_good_peer(replica, host):
            return "failures in a row", f"{host.num_in_row} failures in a row"
        (num, failed, _), (num_peers, failed_peers, _) = own[0], peers[0]
        if num >= settings.min_requests and num_peers >= settings.min_requests:
            share, usual = failed / num, failed_peers / num_peers
            if share - usual >= settings.failure_share:
                return "failures", f"{share:.0%} of {num} requests failed, and {usual:.0%} of its peers'"
        for (kind, window), (num, seconds, expected_s), peer in zip(
            host.latencies.items(), own[1:], peers[1:], strict=True
        ):
            num_peers, peer_s, peer_expected_s = peer
            if min(num, num_peers) < _MIN_LATENCIES or seconds < _MIN_SLOW_S or not expected_s * peer_expected_s:
                continue
            usual = max(peer_s / peer_expected_s, 1e-9)
            factor = seconds / expected_s / usual
            if factor >= settings.slow_factor and window.num_above(settings.slow_factor * usual) >= _MIN_SLOW_BUCKETS:
                return "latency", f"its time {_PHRASES[kind]} is {factor:.1f} times that of its peers"
        return None, ""

    def _has_good_peer(self, replica: int, host: _Host) -> bool:
        """Whether another replica of the group has fewer failures in a row."""
        return any(
            each.group == host.group and each.until_s is None and each.num_in_row < self.settings.failures
            for other, each in self._hosts.items()
            if other != replica
        )
