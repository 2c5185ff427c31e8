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
    """Every `interval_s`, the least free replica gives a request to the freest, the next to the next, and so on.

    Freeness is as in `freest`, headroom included. Two replicas pair while theirs differ by `threshold`, in blocks
    per running request; each is in one pair at most. The source gives one request: first who waits without a KV
    cache, as it moves for nothing (the most urgent of them, then the earliest: it gains most from a freer
    replica), then who decodes (of the least urgent tier, the one with the least KV), then who waits with one.
    With thousands of blocks to a cache, freeness differs by the paper's 0.3 nearly always, and requests would be
    sent back and forth. So a request goes only if it leaves the destination freer than the source was, and
    above 0, and not while a move from that source or to that destination is under way. A draining replica
    receives nothing and sends away up to `evacuations` requests a tick, each to the freest replica that stays
    above 0. A decoding request is copied live, `stage_blocks` at a time (16 is the most for which Llumnix stops one).
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
        require_above("interval_s", interval_s, 0)
        require_at_least("threshold", threshold, 0)
        require_at_least("evacuations", evacuations, 1)
        if stage_blocks is not None:
            require_at_least("stage_blocks", stage_blocks, 1)
        self.interval_s: float | None = interval_s
        self._threshold = threshold
        self._stage_blocks = stage_blocks
        self._evacuations = evacuations
        self._headroom = headroom_of(num_tiers, h_max, decay, headroom, adaptive)

    def moves(self, view: FleetView) -> Sequence[Move]:
        draining = [replica for replica in view.replicas if replica.is_draining]
        sites = [_Site(replica, self._headroom) for replica in view.replicas if not replica.is_draining]
        moves = [move for replica in draining for move in self._evacuate(replica, sites)]
        sites = sorted((site for site in sites if not site.receives), key=_Site.order)
        for source, target in zip(sites[: len(sites) // 2], reversed(sites), strict=False):
            if target.freeness - source.freeness < self._threshold:
                break
            moves += self._relieve(source, target)
        return moves

    def at_phase(self, request: RequestView, view: FleetView) -> Move | None:
        """Phases are nothing to it."""
        return None

    def learn(self, record: Ended) -> None:
        """What adaptive headroom goes by."""
        self._headroom.learn(record)

    def _evacuate(self, source: ReplicaView, sites: list[_Site]) -> list[Move]:
        """Requests leave a draining replica."""
        moves: list[Move] = []
        for request in movable(source.requests):
            if len(moves) == self._evacuations:
                break
            for target in sorted(sites, key=_Site.order, reverse=True):
                if target.freeness_with(request) > 0.0:
                    target.expect(request)
                    moves.append(self._move(request, target))
                    break
        return moves

    def _relieve(self, source: _Site, target: _Site) -> list[Move]:
        """The move of one request from one replica to the other, if there is any."""
        if target.replica.num_arriving or target.best_case <= max(source.freeness, 0.0):
            return []
        requests = source.replica.requests
        if any(request.is_moving for request in requests):
            return []
        for request in movable(requests):
            if target.freeness_with(request) > max(source.freeness, 0.0):
                return [self._move(request, target)]
        return []

    def _move(self, request: PlacedRequestView, target: _Site) -> Move:
        return Move(request.id, target.replica.id, self._stage_blocks if request.is_running else None)


def movable(requests: Iterable[PlacedRequestView]) -> Iterator[PlacedRequestView]:
    """Those that may move, the first to go first. One that prefills may not, nor one that moves already."""
    heap = [(_reluctance(r), r) for r in requests if (r.is_running or r.is_waiting) and not r.is_moving]
    heapify(heap)
    while heap:
        yield heappop(heap)[1]


def _reluctance(request: PlacedRequestView) -> tuple[int, int, float, int]:
    if not request.has_kv:
        return 0, request.tier, request.arrival_s, request.id
    return 2 - request.is_running, -request.tier, request.prompt_tokens + request.generated_tokens, request.id


class _Site:
    """A replica that stays, with what this tick has already sent there."""

    __slots__ = ("_free_blocks", "_headroom", "_num_running", "_tiers", "freeness", "receives", "replica")

    def __init__(self, replica: ReplicaView, headroom: Headroom) -> None:
        self.replica = replica
        self.receives = False
        self._headroom = headroom
        self._tiers = {tier for tier, num in replica.num_by_tier.items() if num > 0}
        self._free_blocks = replica.kv_blocks_total - replica.kv_blocks_used - replica.head_demand_blocks
        self._num_running = replica.num_running
        self.freeness = self._freeness(self._free_blocks, max(self._num_running, 1), self._tiers)

    def order(self) -> tuple[float, int, int]:
        """From the fullest to the freest."""
        return self.freeness, -self.replica.num_in_flight, -self.replica.id

    @property
    def best_case(self) -> float:
        """Its freeness with one request more that needs no KV and brings no headroom."""
        return self._freeness(self._free_blocks, self._num_running + 1, self._tiers)

    def freeness_with(self, request: PlacedRequestView) -> float:
        """Its freeness once the request runs there."""
        return self._freeness(
            self._free_blocks - self._blocks(request), self._num_running + 1, self._tiers | {request.tier}
        )

    def expect(self, request: PlacedRequestView) -> None:
        """The request is sent there."""
        self.freeness = self.freeness_with(request)
        self._free_blocks -= self._blocks(request)
        self._num_running += 1
        self._tiers.add(request.tier)
        self.receives = True

    def _blocks(self, request: PlacedRequestView) -> int:
        return -(-(request.prompt_tokens + request.generated_tokens) // self.replica.block_size_tokens)

    def _freeness(self, free_blocks: int, num_running: int, tiers: set[int]) -> float:
        """`headway.policies.freeness.full_freeness` of a replica that may be about to change."""
        return (free_blocks - self.replica.kv_blocks_total * self._headroom.share(tiers)) / num_running
