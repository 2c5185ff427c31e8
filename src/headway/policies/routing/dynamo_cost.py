"""The cost function of Dynamo's KV router."""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from math import exp

from headway.core.decision import Placement
from headway.core.view import Bounds, FleetView, ReplicaView, RequestView
from headway.policies.arguments import require_at_least
from headway.policies.routing.work_left import pending_tokens, uncached_tokens


class DynamoCostRouter:
    """The replica with the lowest cost: `overlap_weight` times blocks to prefill, plus active decode blocks.

    Blocks to prefill are the uncached blocks of the request and of the prompts that the replica has yet to compute.
    Active blocks are the blocks in use and the request's uncached blocks. With a `temperature`, the replica is drawn:
    costs are divided by their range, and a replica has a weight of exp(-cost / temperature). At 0, the lowest cost
    wins, and the lowest id among equals. Source: the router of NVIDIA Dynamo (its documentation: "KV Router"), whose
    defaults are these.
    """

    def __init__(self, overlap_weight: float = 1.0, temperature: float = 0.0) -> None:
        require_at_least(0, overlap_weight=overlap_weight, temperature=temperature)
        self._overlap_weight, self._temperature = overlap_weight, temperature

    def route(self, request: RequestView, view: FleetView) -> Placement:
        if not (self._temperature or request.prefix or view.wants_scores):
            tokens = request.prompt_tokens + request.generated_tokens
            found = view.find_least_score(self._bounds, (tokens, 0.0, 0.0), partial(self._cost, request))
            if found is not None:
                return Placement(found.id)
        costs = [self._cost(request, replica) for replica in view.replicas]
        scores = tuple((replica.id, cost) for replica, cost in zip(view.replicas, costs, strict=True))
        lowest = min(costs)
        spread = max(costs) - lowest
        if not self._temperature or not spread:
            return Placement(min((cost, id) for id, cost in scores)[1], scores=scores)
        weights = list(accumulate(exp((lowest - cost) / spread / self._temperature) for cost in costs))
        drawn = view.random.random() * weights[-1]
        chosen = next((i for i, weight in enumerate(weights) if drawn < weight), len(weights) - 1)
        return Placement(scores[chosen][0], scores=scores)

    def _cost(self, request: RequestView, replica: ReplicaView) -> float:
        new = uncached_tokens(request, replica) / replica.block_size_tokens
        prefill = pending_tokens(replica) / replica.block_size_tokens + new
        return self._overlap_weight * prefill + replica.kv_blocks_used + new

    def _bounds(self, replica: ReplicaView) -> Bounds:
        """The cost of a request without a prefix as a function of its tokens. Blocks in use only grow between ticks."""
        pending, used, block = pending_tokens(replica), replica.kv_blocks_used, replica.block_size_tokens
        first = self._overlap_weight * pending / block + used
        return first, (self._overlap_weight + 1.0) / block, 0.0, 0.0, (pending, used, block)
