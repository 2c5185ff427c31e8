"""SageServe's routing over regions, endpoints and instances (section 6.1)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter

from headway.core.decision import Placement
from headway.core.record import Ended
from headway.core.view import FleetView, ReplicaView, RequestView
from headway.policies.arguments import require_between
from headway.policies.endpoints import Silos, effective_use, grouped, is_below
from headway.policies.routing.jsq_tokens import JsqTokensRouter


class SageServeRouter:
    """Selects a region below `threshold`, its least utilised pool, and the pool's replica with the fewest tokens left.

    Utilisation is effective memory utilisation: KV blocks in use over KV blocks. An interactive request goes to the
    first region below `threshold` in order of preference: its own, then `preference`, then the order of the view; if no
    region is below it, to the least utilised one. A batch request, of tier `batch_tier` and above, goes to the least
    utilised region, unless the queue manager has released it to another. The replica is the one with the fewest tokens
    left, estimated as by `jsq-tokens` with the same arguments.

    Pools whose names end in `interactive_suffix` get no batch requests, and pools whose names end in `batch_suffix` no
    interactive ones. If every pool has one of the suffixes, they are silos; pools without one are Chiron's mixed
    instances. If the view has no replica that may serve a request, any replica may.
    """

    def __init__(
        self,
        threshold: float = 0.7,
        preference: tuple[str, ...] = (),
        batch_tier: int = 2,
        interactive_suffix: str = "",
        batch_suffix: str = "",
        prior_output_tokens: float = 256.0,
        prior_num_requests: float = 16.0,
    ) -> None:
        require_between(0, 1, threshold=threshold)
        self._threshold = threshold
        self._preference = tuple(preference)
        self._silos = Silos(batch_tier, interactive_suffix, batch_suffix)
        self._instances = JsqTokensRouter(prior_output_tokens, prior_num_requests)

    def route(self, request: RequestView, view: FleetView) -> Placement:
        is_batch = self._silos.is_batch(request)
        replicas = self._silos.serving(view.replicas, is_batch) or view.replicas
        replicas = self._in_region(request, replicas, is_batch)
        return Placement(self._instances.shortest(_least_full_pool(replicas)))

    def learn(self, record: Ended) -> None:
        self._instances.learn(record)

    def _in_region(
        self, request: RequestView, replicas: Sequence[ReplicaView], is_batch: bool
    ) -> Sequence[ReplicaView]:
        own = [replica for replica in replicas if replica.region == request.region]
        if own and not is_batch and is_below(self._threshold, own):
            return own  # the usual case; the other regions need not be read
        regions = grouped(replicas, attrgetter("region"))
        uses: dict[str, float] = {}
        for region in self._in_order(request, regions):
            uses[region] = effective_use(regions[region])
            if not is_batch and uses[region] < self._threshold:
                return regions[region]
        return regions[min(uses, key=lambda region: uses[region])]

    def _in_order(self, request: RequestView, regions: Iterable[str]) -> Iterable[str]:
        there = dict.fromkeys(regions)
        return dict.fromkeys([one for one in (request.region, *self._preference, *there) if one in there])


def _least_full_pool(replicas: Sequence[ReplicaView]) -> Sequence[ReplicaView]:
    if len({replica.pool for replica in replicas}) == 1:
        return replicas
    return min(grouped(replicas, attrgetter("pool")).values(), key=effective_use)
