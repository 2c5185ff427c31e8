"""The remaining work of requests and replicas, with prefix caches taken into account."""

from __future__ import annotations

from headway.core.record import Ended, Outcome
from headway.core.view import ReplicaView, RequestView


def uncached_tokens(request: RequestView, replica: ReplicaView) -> int:
    """Tokens of a request that the replica would have to compute."""
    return request.prompt_tokens + request.generated_tokens - replica.cached_tokens(request)


def pending_tokens(replica: ReplicaView) -> int:
    """Prompt tokens that the replica has yet to compute, except tokens that will be found in its prefix cache."""
    return max(0, replica.prefill_tokens_left - replica.expected_cached_tokens)


class MeanOutput:
    """Mean output tokens of finished requests. `prior_tokens` counts as 16 requests."""

    def __init__(self, prior_tokens: float = 256.0) -> None:
        self.tokens = prior_tokens
        self._num = 16

    def learn(self, record: Ended) -> None:
        """Count a request if it has finished."""
        if record.outcome is Outcome.FINISHED:
            self._num += 1
            self.tokens += (record.generated_tokens - self.tokens) / self._num
