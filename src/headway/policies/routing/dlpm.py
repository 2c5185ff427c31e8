"""Deficit longest prefix match between tenants and replicas."""

from __future__ import annotations

from collections import OrderedDict

from headway.core.decision import Placement
from headway.core.record import Ended
from headway.core.view import FleetView, RequestView
from headway.policies.arguments import require_at_least, require_between
from headway.policies.routing.work_left import uncached_tokens

_MAX_IN_FLIGHT = 100_000
_MAX_COUNTERS = 100_000
"""Maximum number of pairs of tenant and replica whose deficit is kept."""


class DlpmRouter:
    """The replica with the longest cached prefix among replicas at which the request's tenant has service left.

    A tenant has a counter for each replica. A request takes its uncached prompt tokens from it, and at its end
    `output_weight` for each output token. While the counter is positive, the tenant may use the replica. When no
    counter is positive, each gets `quantum_tokens`. A tenant therefore follows its prefixes for about a quantum at a
    time, and then its load spreads over the replicas. A smaller quantum spreads more; a larger one keeps prefixes
    together. Among equals, the fewest requests in flight win, then the lowest id.

    This is the dispatcher of D2LPM, the distributed form of deficit longest prefix match (Cao et al., 2025, arXiv
    2501.14312). D2LPM's scheduler at a replica, where requests of a tenant without service left wait, is replaced by
    the ordering of the hold queue: `drr`, which completes D2LPM, `vtc` or `fair`.
    """

    def __init__(self, quantum_tokens: float = 32_768.0, output_weight: float = 2.0) -> None:
        require_at_least(1, quantum_tokens=quantum_tokens)
        require_between(0, 1e6, output_weight=output_weight)  # beyond it, rounding loses a quantum
        self._quantum_tokens, self._output_weight = quantum_tokens, output_weight
        self._left: OrderedDict[tuple[str, int], float] = OrderedDict()
        self._placed: dict[int, tuple[str, int]] = {}
        """Tenant and replica of each request in flight."""

    def route(self, request: RequestView, view: FleetView) -> Placement:
        tenant, replicas, left = request.tenant, view.replicas, self._left
        able = [one for one in replicas if left.get((tenant, one.id), self._quantum_tokens) > 0]
        if not able:
            # Add as many rounds as needed to make one counter positive.
            most = max(left[tenant, one.id] for one in replicas)
            rounds = int(-most // self._quantum_tokens) + 1
            for one in replicas:
                left[tenant, one.id] += rounds * self._quantum_tokens
            able = [one for one in replicas if left[tenant, one.id] > 0]
        uncached, _, id = min((uncached_tokens(request, one), one.num_in_flight, one.id) for one in able)
        self._take(tenant, id, uncached)
        if len(self._placed) < _MAX_IN_FLIGHT:
            self._placed[request.id] = tenant, id
        return Placement(id)

    def _take(self, tenant: str, replica: int, tokens: float) -> None:
        left = self._left
        left[tenant, replica] = left.get((tenant, replica), self._quantum_tokens) - tokens
        left.move_to_end((tenant, replica))
        if len(left) > _MAX_COUNTERS:
            left.popitem(last=False)

    def learn(self, record: Ended) -> None:
        placed = self._placed.pop(record.id, None)
        if placed is not None:
            self._take(*placed, self._output_weight * record.generated_tokens)
