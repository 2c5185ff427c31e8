"""LMetric: new prefill tokens times batch size."""

from __future__ import annotations

from functools import partial

from headway.core.decision import Placement
from headway.core.subclasses import mypyc_attr
from headway.core.view import Bounds, FleetView, ReplicaView, RequestView
from headway.policies.routing.work_left import pending_tokens, uncached_tokens


@mypyc_attr(allow_interpreted_subclasses=True)
class LmetricRouter:
    """The replica with the smallest product of new prefill tokens and batch size, both with the request.

    New prefill tokens are the uncached tokens of the request and of the requests that wait there. The batch size is the
    number of requests in flight. A product needs no weights, as factors cancel in comparisons; counting the request
    itself keeps it above 0. Among equals, the lowest id wins. Source: LMetric (Zhang et al., 2026, arXiv 2603.15202).
    """

    def route(self, request: RequestView, view: FleetView) -> Placement:
        if not (request.prefix or view.wants_scores):
            tokens = request.prompt_tokens + request.generated_tokens
            found = view.find_least_score(_bounds, (tokens, 0.0, 0.0), partial(_score, request))
            if found is not None:
                return Placement(found.id)
        scores = [(_score(request, replica), replica.id) for replica in view.replicas]
        return Placement(min(scores)[1], scores=tuple((id, float(score)) for score, id in scores))


def _score(request: RequestView, replica: ReplicaView) -> int:
    return (pending_tokens(replica) + uncached_tokens(request, replica)) * (replica.num_in_flight + 1)


def _bounds(replica: ReplicaView) -> Bounds:
    """The product for a request without a prefix, as a function of its tokens."""
    pending, num = pending_tokens(replica), replica.num_in_flight + 1
    return float(pending * num), float(num), 0.0, 0.0, (pending, num)
