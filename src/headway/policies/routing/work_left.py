"""The remaining work of requests and replicas, with prefix caches taken into account; and the KV blocks it needs."""

from __future__ import annotations

from collections.abc import Sequence

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


class KvShare:
    """The share of a replica's KV blocks that are used, or that prompts yet to compute need."""

    def __init__(self, block_size_tokens: int = 16) -> None:
        self._blocks_per_token = 1.0 / block_size_tokens

    def of(self, replica: ReplicaView) -> float:
        total = replica.kv_blocks_total or 1
        return replica.prefill_tokens_left * self._blocks_per_token / total + replica.kv_blocks_used / total

    def of_each(self, replicas: Sequence[ReplicaView]) -> list[float]:
        return [self.of(replica) for replica in replicas]

    def rank(self, replica: ReplicaView) -> tuple[float, int]:
        """The share, then the requests in flight. It does not fall by ticks."""
        return self.of(replica), replica.num_in_flight
