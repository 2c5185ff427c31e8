"""DualMap: two hashes of a prompt select two replicas, and the better one gets the request."""

from __future__ import annotations

from headway.core.decision import Placement
from headway.core.record import Ended
from headway.core.view import FleetView, ReplicaView, RequestView
from headway.policies.arguments import require_above, require_at_least
from headway.policies.routing.affinity import scrambled
from headway.policies.routing.least_loaded import least_loaded
from headway.policies.routing.work_left import pending_tokens, uncached_tokens

_MAX_PREDICTED = 10_000
"""Maximum number of requests in flight whose prediction is kept."""


class DualMapRouter:
    """Hashes a prompt to two replicas; prefers the one with more of it cached, unless that would miss the TTFT SLO.

    The two replicas rank first and second in rendezvous hashing over the segments that begin in the prompt's first
    `prefix_tokens`. Requests with a common prefix therefore meet at two replicas, and different prefixes spread as by
    the power of two choices. If the expected TTFT at the replica with more cached tokens exceeds the request's TTFT SLO
    (`slo_ttft_s` without one), the replica with the lower expected TTFT is chosen.

    The expected TTFT is the time for the replica's prompt tokens yet to compute and the request's uncached tokens. The
    time per token is measured on the last requests, and is `1 / prior_tokens_per_s` at first. A request without a
    prefix goes to the least loaded replica. Source: DualMap (ICLR 2026, arXiv 2602.06502), whose migration of waiting
    requests between the two replicas is not part of a router.
    """

    def __init__(self, slo_ttft_s: float = 5.0, prefix_tokens: int = 512, prior_tokens_per_s: float = 10_000.0) -> None:
        require_above(0, slo_ttft_s=slo_ttft_s, prior_tokens_per_s=prior_tokens_per_s)
        require_at_least(1, prefix_tokens=prefix_tokens)
        self._slo_ttft_s, self._prefix_tokens = slo_ttft_s, prefix_tokens
        self._s_per_token = 1 / prior_tokens_per_s
        self._predicted: dict[int, tuple[float, int]] = {}
        """Holds, for each request in flight, when it was placed, and the tokens to compute before its first token."""

    def route(self, request: RequestView, view: FleetView) -> Placement:
        if not request.prefix:
            return Placement(least_loaded(view.replicas))
        pair = self._pair(request, view)
        uncached = [uncached_tokens(request, replica) for replica in pair]
        tokens = [pending_tokens(replica) + own for replica, own in zip(pair, uncached, strict=True)]
        chosen = 1 if (uncached[-1], tokens[-1]) < (uncached[0], tokens[0]) else 0
        slo_s = self._slo_ttft_s if request.slo_ttft_s is None else request.slo_ttft_s
        if tokens[chosen] * self._s_per_token > slo_s:
            chosen = tokens.index(min(tokens))
        if len(self._predicted) < _MAX_PREDICTED:
            self._predicted[request.id] = view.now, tokens[chosen]
        return Placement(pair[chosen].id)

    def _pair(self, request: RequestView, view: FleetView) -> list[ReplicaView]:
        start, key = 0, 0
        for segment in request.prefix:
            key, start = segment.id, start + segment.tokens
            if start >= self._prefix_tokens:
                break
        return sorted(view.replicas, key=lambda replica: (scrambled(scrambled(key) ^ replica.id), replica.id))[:2]

    def learn(self, record: Ended) -> None:
        placed_s, tokens = self._predicted.pop(record.id, (0.0, 0))
        if record.first_token_s is not None and tokens:
            seconds = max(record.first_token_s - placed_s, 0.0) / tokens
            self._s_per_token += (seconds - self._s_per_token) / 32
