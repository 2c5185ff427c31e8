"""Join the shortest queue, in tokens still to compute."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import cast

from headway.core.decision import Placement
from headway.core.record import Ended, Outcome
from headway.core.view import Bounds, FleetView, OracleReplicaView, ReplicaView, RequestView
from headway.policies.arguments import require_above, require_at_least


class JsqTokensRouter:
    """The replica with the fewest tokens left; output lengths are estimated by the mean of finished requests.

    Tokens left are the prompt tokens yet to compute, plus `num_in_flight * mean - tokens_generated`, but at least one
    output token for each request in flight. The mean starts at `prior_output_tokens`, which has the weight of
    `prior_num_requests` finished requests. Among equals, the lowest id wins.
    """

    def __init__(self, prior_output_tokens: float = 256.0, prior_num_requests: float = 16.0) -> None:
        require_at_least(1, prior_output_tokens=prior_output_tokens)
        require_above(0, prior_num_requests=prior_num_requests)
        self._mean = prior_output_tokens
        self._count = prior_num_requests

    def route(self, request: RequestView, view: FleetView) -> Placement:
        found = view.find_least_score(self._bounds, (self._mean, 0.0, 0.0), self._left, falls=True)
        return Placement(self.shortest(view.replicas) if found is None else found.id)

    def _bounds(self, replica: ReplicaView) -> Bounds:
        """The tokens left as a function of the mean. Both bounds hold for any mean, as do the kinds."""
        num, prefill, generated = replica.num_in_flight, replica.prefill_tokens_left, replica.tokens_generated
        kind = prefill, num, generated
        if num * self._mean <= generated + num:
            return float(prefill + num), 0.0, 0.0, 0.0, kind
        return float(prefill - generated), float(num), 0.0, 0.0, kind

    def _left(self, replica: ReplicaView) -> float:
        num = replica.num_in_flight
        return replica.prefill_tokens_left + max(num * self._mean - replica.tokens_generated, num)

    def shortest(self, replicas: Sequence[ReplicaView]) -> int:
        mean = self._mean
        chosen = replicas[0].id
        least = inf
        for replica in replicas:
            in_flight = replica.num_in_flight
            prefill = replica.prefill_tokens_left
            if prefill + in_flight <= least:
                expected = in_flight * mean - replica.tokens_generated
                left = prefill + (expected if expected > in_flight else in_flight)
                if left < least or (left == least and replica.id < chosen):
                    least = left
                    chosen = replica.id
        return chosen

    def learn(self, record: Ended) -> None:
        if record.outcome is Outcome.FINISHED:
            self._count += 1
            self._mean += (record.generated_tokens - self._mean) / self._count


class JsqTokensOracleRouter:
    """The replica with the fewest tokens left, prompt and output, which only an oracle knows.

    This is `jsq-tokens` with perfect estimates: the bound on what length prediction can gain. Among equals, the first
    in the view wins.
    """

    oracle = True

    def route(self, request: RequestView, view: FleetView) -> Placement:
        found = view.find_least(_tokens_left)
        if found is not None:
            return Placement(found.id)
        replicas = cast("Sequence[OracleReplicaView]", view.replicas)
        chosen = replicas[0].id
        least = inf
        for replica in replicas:
            left = replica.prefill_tokens_left
            if left < least:
                left += replica.output_tokens_left
                if left < least:
                    least = left
                    chosen = replica.id
        return Placement(chosen)


def _tokens_left(replica: ReplicaView) -> int:
    return replica.prefill_tokens_left + cast("OracleReplicaView", replica).output_tokens_left
