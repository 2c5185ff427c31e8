"""Join the shortest queue, counted in tokens still to compute."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from headway.core.decision import Placement
from headway.core.record import Ended, Outcome
from headway.core.view import FleetView, ReplicaView, RequestView
from headway.policies.arguments import require_above, require_at_least


class JsqTokensRouter:
    """The replica with the fewest tokens left, output lengths estimated by the mean of those that finished.

    Tokens left are the prompt tokens not yet computed, plus `num_in_flight * mean - tokens_generated`, but
    one output token at least for each request in flight. The mean starts at `prior_output_tokens`, which
    counts for as much as `prior_num_requests` finished requests. Of equals, the first in the view's order.
    """

    def __init__(self, prior_output_tokens: float = 256.0, prior_num_requests: float = 16.0) -> None:
        require_at_least("prior_output_tokens", prior_output_tokens, 1)
        require_above("prior_num_requests", prior_num_requests, 0)
        self._mean = prior_output_tokens
        self._count = prior_num_requests

    def route(self, request: RequestView, view: FleetView) -> Placement:
        return Placement(self.shortest(view.replicas))

    def shortest(self, replicas: Sequence[ReplicaView]) -> int:
        """Which of these replicas."""
        mean = self._mean
        chosen = replicas[0].id
        least = inf
        for replica in replicas:
            in_flight = replica.num_in_flight
            prefill = replica.prefill_tokens_left
            if prefill + in_flight < least:
                expected = in_flight * mean - replica.tokens_generated
                left = prefill + (expected if expected > in_flight else in_flight)
                if left < least:
                    least = left
                    chosen = replica.id
        return chosen

    def learn(self, record: Ended) -> None:
        """Only requests that finished say how long outputs are."""
        if record.outcome is Outcome.FINISHED:
            self._count += 1
            self._mean += (record.generated_tokens - self._mean) / self._count
