"""Requests move from full replicas to free ones (K-tier Llumnix, section 3.5)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heappop
from typing import Literal

from headway.core.decision import Move
from headway.core.record import Ended
from headway.core.view import FleetView, PlacedRequestView, ReplicaView, RequestView
from headway.policies.arguments import require_above, require_at_least
from headway.policies.freeness import Headroom, headroom_of


class LlumnixMigration:
    """Every `interval_s`, the least free replica sends a request to the freest, the second least free to the second
    freest, and so on.

    Freeness is that of `freest`, with headroom. Two replicas form a pair if their freeness differs by at least
    `threshold`, in blocks per running request, and each replica is in one pair at most. The source sends one request. A
    waiting request without a KV cache goes first, as its move costs nothing: the most urgent tier, then the earliest
    arrival. Next come decoding requests: the least urgent tier, then the smallest KV cache. Last come waiting requests
    with a KV cache.

    With thousands of blocks in a cache, freeness nearly always differs by the paper's 0.3, and requests would move back
    and forth. A request therefore moves only if the destination's freeness with it exceeds the source's freeness and 0,
    and only while no other move from that source or to that destination is running. A draining replica receives no
    requests and sends up to `evacuations` requests a tick, each to the freest replica that stays above 0. A decoding
    request is copied live, `stage_blocks` at a time; 16 is the most for which Llumnix stops one.
    """

    def __init__(
        self,
        interval_s: float = 0.05,
        threshold: float = 0.3,
        stage_blocks: int | None = 16,
        evacuations: int = 4,
        num_tiers: int = 4,
        h_max: float = 0.2,
        decay: float | Literal["auto"] = 1.0,
        headroom: Literal["exponential", "binary", "none"] = "exponential",
        adaptive: bool = False,
    ) -> None:
        require_above(0, interval_s=interval_s)
        require_at_least(0, threshold=threshold)
        require_at_least(1, evacuations=evacuations)
        if stage_blocks is not None:
            require_at_least(1, stage_blocks=stage_blocks)
        self.interval_s: float | None = interval_s
        self._threshold = threshold
        self._stage_blocks = stage_blocks
        self._evacuations = evacuations
        self._headroom = headroom_of(num_tiers, h_max, decay, headroom, adaptive)

    def moves(self, view: FleetView) -> Sequence[Move]:
        draining = [replica for replica in view.replicas if replica.is_draining]
        sites = [_Destination(replica, self._headroom) for replica in view.replicas if not replica.is_draining]
        moves = [move for replica in draining for move in self._evacuate(replica, sites)]
        sites = sorted((site for site in sites if not site.has_arrivals), key=_Destination.sort_key)
        for source, target in zip(sites[: len(sites) // 2], reversed(sites), strict=False):
            if target.freeness - source.freeness < self._threshold:
                break
            moves += self._relieve(source, target)
        return moves

    def at_phase(self, request: RequestView, view: FleetView) -> Move | None:
        return None

    def learn(self, record: Ended) -> None:
        self._headroom.learn(record)

    def _evacuate(self, source: ReplicaView, sites: list[_Destination]) -> list[Move]:
        moves: list[Move] = []
        for request in movable(source.requests):
            if len(moves) == self._evacuations:
                break
            for target in sorted(sites, key=_Destination.sort_key, reverse=True):
                if target.freeness_with(request) > 0.0:
                    target.add_arrival(request)
                    moves.append(self._move(request, target))
                    break
        return moves

    def _relieve(self, source: _Destination, target: _Destination) -> list[Move]:
        """The move of one request between the replicas of a pair, if a move helps."""
        if target.replica.num_arriving or target.best_case <= max(source.freeness, 0.0):
            return []
        if any(request.is_moving for request in source.replica.requests):
            return []
        for request in movable(self._leaving(source.replica, target.replica)):
            if target.freeness_with(request) > max(source.freeness, 0.0):
                return [self._move(request, target)]
        return []

    def _leaving(self, source: ReplicaView, target: ReplicaView) -> Iterable[PlacedRequestView]:
        """The requests of a source that may move to the other replica of its pair."""
        return source.requests

    def _move(self, request: PlacedRequestView, target: _Destination) -> Move:
        return Move(request.id, target.replica.id, self._stage_blocks if request.is_running else None)


def movable(requests: Iterable[PlacedRequestView]) -> Iterator[PlacedRequestView]:
    """Requests that may move, in the order of preference. Requests in prefill and moving requests may not."""
    heap = [(_reluctance(r), r) for r in requests if (r.is_running or r.is_waiting) and not r.is_moving]
    heapify(heap)
    while heap:
        yield heappop(heap)[1]


def _reluctance(request: PlacedRequestView) -> tuple[int, int, float, int]:
    if not request.has_kv:
        return 0, request.tier, request.tier_since_s, request.id
    return 2 - request.is_running, -request.tier, request.prompt_tokens + request.generated_tokens, request.id


class _Destination:
    """A replica that may receive requests, with the load of the moves that this tick has already sent to it."""

    __slots__ = ("_free_blocks", "_headroom", "_num_running", "_tiers", "freeness", "has_arrivals", "replica")

    def __init__(self, replica: ReplicaView, headroom: Headroom) -> None:
        self.replica = replica
        self.has_arrivals = False
        self._headroom = headroom
        self._tiers = {tier for tier, num in replica.num_by_tier.items() if num > 0}
        self._free_blocks = replica.kv_blocks_total - replica.kv_blocks_used - replica.head_demand_blocks
        self._num_running = replica.num_running
        self.freeness = self._freeness(self._free_blocks, max(self._num_running, 1), self._tiers)

    def sort_key(self) -> tuple[float, int, int]:
        """Sort key, from the fullest to the freest."""
        return self.freeness, -self.replica.num_in_flight, -self.replica.id

    @property
    def best_case(self) -> float:
        """The freeness with one more request that needs no KV blocks and adds no tier: an upper bound."""
        return self._freeness(self._free_blocks, self._num_running + 1, self._tiers)

    def freeness_with(self, request: PlacedRequestView) -> float:
        return self._freeness(
            self._free_blocks - self._blocks(request), self._num_running + 1, self._tiers | {request.tier}
        )

    def add_arrival(self, request: PlacedRequestView) -> None:
        self.freeness = self.freeness_with(request)
        self._free_blocks -= self._blocks(request)
        self._num_running += 1
        self._tiers.add(request.tier)
        self.has_arrivals = True

    def _blocks(self, request: PlacedRequestView) -> int:
        return -(-(request.prompt_tokens + request.generated_tokens) // self.replica.block_size_tokens)

    def _freeness(self, free_blocks: int, num_running: int, tiers: set[int]) -> float:
        """As `full_freeness`, for a replica that is about to change."""
        return (free_blocks - self.replica.kv_blocks_total * self._headroom.share(tiers)) / num_running
