"""Routing by KV cache use."""

from __future__ import annotations

from operator import attrgetter

from headway.core.decision import Placement
from headway.core.view import FleetView, ReplicaView, RequestView
from headway.policies.arguments import require_at_least
from headway.policies.endpoints import footprint
from headway.policies.routing.work_left import KvShare


class LeastKvRouter:
    """The replica with the smallest share of KV blocks used or needed by prompts yet to compute.

    Counting waiting prompts (`block_size_tokens` per block) distinguishes two full caches, and spreads a burst before
    the caches show it. Among equals, the fewest requests in flight win, then the first in the view.
    """

    def __init__(self, block_size_tokens: int = 16) -> None:
        require_at_least(1, block_size_tokens=block_size_tokens)
        self._share = KvShare(block_size_tokens)

    def route(self, request: RequestView, view: FleetView) -> Placement:
        found = view.find_least(self._share.rank, grows=True)
        if found is not None:
            return Placement(found.id)
        replicas = view.replicas
        shares = self._share.of_each(replicas)
        least = min(shares)
        if shares.count(least) == 1:
            return Placement(replicas[shares.index(least)].id)
        equals = [replica for replica, share in zip(replicas, shares, strict=True) if share == least]
        return Placement(min(equals, key=attrgetter("num_in_flight")).id)


class LeastFootprintRouter:
    """The replica with the smallest KV footprint: blocks on the GPU, and blocks of preempted requests.

    Blocks of preempted requests are in host memory, or must be computed again by paused requests that are held. Among
    equals, the lowest id wins. This is the placement of the PASCAL paper's baselines (section V-A). Unlike `least-kv`,
    it counts held blocks, not shares of the capacity, and no waiting prompts.
    """

    def route(self, request: RequestView, view: FleetView) -> Placement:
        found = view.find_least(_footprint_and_id, grows=True)
        if found is None:
            found = min(view.replicas, key=_footprint_and_id)
        return Placement(found.id)


def _footprint_and_id(replica: ReplicaView) -> tuple[int, int]:
    return footprint(replica), replica.id


class PascalRouter:
    """The replica with the smallest KV footprint, GPU and host, among replicas whose answers keep their pace.

    If no replica's answers keep their pace, all replicas are eligible. Among equals, the lowest id wins. The policy
    places new requests, which begin to reason; the migration policy of the same name decides where they answer. Source:
    PASCAL, Algorithm 1.
    """

    def route(self, request: RequestView, view: FleetView) -> Placement:
        found = view.find_least(_pace_and_footprint)
        if found is None:
            found = min(view.replicas, key=_pace_and_footprint)
        return Placement(found.id)


def _pace_and_footprint(replica: ReplicaView) -> tuple[bool, int, int]:
    return not replica.answers_on_pace, *_footprint_and_id(replica)
