"""Load counts of several schedulers of one fleet: a scheduler's own counts, and the counts that other schedulers
report.

Each scheduler places requests by its own router and counts its placements at each replica. Own counts are exact;
another scheduler's counts are as old as its last message. A scheduler that sends no message for the time of a lease
is taken as gone, and its counts are ignored. Simulator and gateway use the same classes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, Protocol

from msgspec import Struct, field

from headway.control.observe import View, passing_on
from headway.core.policy import PeerOrdering
from headway.core.view import ReplicaView


class Load(Struct, array_like=True, gc=False):
    """One scheduler's load at one replica."""

    num_in_flight: int = 0
    prefill_tokens_left: int = 0
    tokens_generated: int = 0
    expected_cached_tokens: int = 0
    prompt_tokens: int = 0
    """Prompt tokens of all requests of the scheduler at the replica."""
    num_by_tier: dict[int, int] = field(default_factory=dict)
    queue_lengths: list[int] = field(default_factory=list)

    def add(self, other: Load, sign: int = 1) -> None:
        """Add another load, or subtract it."""
        self.num_in_flight += sign * other.num_in_flight
        self.prefill_tokens_left += sign * other.prefill_tokens_left
        self.tokens_generated += sign * other.tokens_generated
        self.expected_cached_tokens += sign * other.expected_cached_tokens
        self.prompt_tokens += sign * other.prompt_tokens
        for tier, num in other.num_by_tier.items():
            self.num_by_tier[tier] = self.num_by_tier.get(tier, 0) + sign * num
        if len(self.queue_lengths) < len(other.queue_lengths):
            self.queue_lengths += [0] * (len(other.queue_lengths) - len(self.queue_lengths))
        for queue, num in enumerate(other.queue_lengths):
            self.queue_lengths[queue] += sign * num


class OwnCounts(Protocol):
    """One scheduler's own counts at a replica, with the names of `core.view.ReplicaView`."""

    @property
    def num_in_flight(self) -> int: ...
    @property
    def prefill_tokens_left(self) -> int: ...
    @property
    def tokens_generated(self) -> int: ...
    @property
    def expected_cached_tokens(self) -> int: ...
    @property
    def num_by_tier(self) -> Mapping[int, int]: ...
    @property
    def queue_lengths(self) -> Sequence[int]: ...
    @property
    def requests(self) -> Sequence[Any]: ...


def load_of(own: OwnCounts) -> Load:
    """A scheduler's own load at a replica, as reported to the other schedulers."""
    return Load(
        own.num_in_flight,
        own.prefill_tokens_left,
        own.tokens_generated,
        own.expected_cached_tokens,
        sum(live.prompt_tokens for live in own.requests),
        {tier: num for tier, num in own.num_by_tier.items() if num},
        list(own.queue_lengths),
    )


class PeerLoads:
    """The last reported loads of the other schedulers, and their sums by replica."""

    def __init__(self, on_change: Callable[[int, Load], None] | None = None) -> None:
        """`on_change(replica, sum)` is called after the other schedulers' load at a replica has changed."""
        self._reported: dict[Hashable, dict[int, Load]] = {}
        """Maps each scheduler to its load by replica."""
        self._seen_s: dict[Hashable, float] = {}
        self._sums: dict[int, Load] = {}
        self._on_change = on_change

    @property
    def peers(self) -> Collection[Hashable]:
        """The schedulers whose load counts here."""
        return self._seen_s.keys()

    def at(self, replica: int) -> Load:
        """The other schedulers' load at a replica. Always the same object; do not change it."""
        found = self._sums.get(replica)
        if found is None:
            found = self._sums[replica] = Load()
        return found

    def mark_alive(self, peer: Hashable, now: float) -> None:
        """Note that a scheduler reported at `now`."""
        self._seen_s[peer] = now

    def update(self, peer: Hashable, loads: Mapping[int, Load], now: float) -> None:
        """Replace a scheduler's loads; it has none at replicas that are missing here."""
        self.mark_alive(peer, now)
        before = self._reported.get(peer, {})
        self._reported[peer] = dict(loads)
        self._replace(before, loads)

    def _replace(self, before: Mapping[int, Load], after: Mapping[int, Load]) -> None:
        for replica in sorted({*before, *after}):
            total = self.at(replica)
            if replica in before:
                total.add(before[replica], -1)
            if replica in after:
                total.add(after[replica])
            if self._on_change is not None:
                self._on_change(replica, total)

    def forget(self, peer: Hashable) -> None:
        """Remove a scheduler and its load."""
        self._seen_s.pop(peer, None)
        self._replace(self._reported.pop(peer, {}), {})

    def forget_silent(self, now: float, lease_s: float) -> list[Hashable]:
        """Remove and return the schedulers that were silent for longer than their lease."""
        silent = [peer for peer, seen_s in self._seen_s.items() if now - seen_s > lease_s]
        for peer in silent:
            self.forget(peer)
        return silent


class GivenElsewhere:
    """The service sums that other schedulers report. Orderings receive the increases."""

    def __init__(self) -> None:
        self._sums: dict[tuple[Hashable, str, tuple[int, str]], float] = {}
        """By (scheduler, model, share)."""

    def report(self, peer: Hashable, model: str, share: tuple[int, str], service: float, ordering: object) -> None:
        """Record the service of a model that a scheduler has given a share since it started. `ordering` belongs to the
        model's hold queue."""
        key = peer, model, share
        before = self._sums.get(key, 0.0)
        self._sums[key] = service
        if isinstance(ordering, PeerOrdering):
            ordering.given_elsewhere(share, service - before)

    def forget(self, peer: Hashable) -> None:
        """Forget the sums of a scheduler that has restarted."""
        self._sums = {key: service for key, service in self._sums.items() if key[0] != peer}


_CONSTANT = ("id", "pool", "model", "gpu", "combo", "goodput_rps")
"""Attributes that never change, copied because they are read often."""


@passing_on(without=(*_CONSTANT, "is_shared"))
class SharedReplica(View):  # type: ignore[misc]  # of Any
    """A replica as one of several schedulers sees it: with this scheduler's counts plus the counts that the others
    reported last.

    Implements `core.view.OracleReplicaView` if the replica does. `requests` are this scheduler's own. Fields that are
    not defined here are read from the replica: engine metrics, `answers_on_pace`, `num_arriving` and `paused`. The
    last three cover this gateway's requests only; in a simulation they cover the requests of all schedulers.
    """

    def __init__(self, replica: ReplicaView, own: OwnCounts, others: Load, is_shared: bool = True) -> None:
        """`others`: the sum that `PeerLoads.at` returns for the replica. The sum changes in place. `is_shared`: False
        if no other scheduler ever reports."""
        self.is_shared = is_shared
        self._replica, self._own, self._others = replica, own, others
        for name in _CONSTANT:
            setattr(self, name, getattr(replica, name))

    # The sums.

    @property
    def num_in_flight(self) -> int:
        return self._own.num_in_flight + self._others.num_in_flight

    @property
    def prefill_tokens_left(self) -> int:
        return self._own.prefill_tokens_left + self._others.prefill_tokens_left

    @property
    def tokens_generated(self) -> int:
        return self._own.tokens_generated + self._others.tokens_generated

    @property
    def expected_cached_tokens(self) -> int:
        return self._own.expected_cached_tokens + self._others.expected_cached_tokens

    @property
    def num_by_tier(self) -> Mapping[int, int]:
        own, others = self._own.num_by_tier, self._others.num_by_tier
        return {tier: own.get(tier, 0) + others.get(tier, 0) for tier in {**own, **others}}

    @property
    def queue_lengths(self) -> Sequence[int]:
        own, others = self._own.queue_lengths, self._others.queue_lengths
        return [num + (others[queue] if queue < len(others) else 0) for queue, num in enumerate(own)]

    @property
    def requests(self) -> Sequence[Any]:
        return self._own.requests
