"""Chooses the replica with the least work left."""

from __future__ import annotations

from functools import partial
from typing import cast

from headway.core.decision import Placement
from headway.core.record import Ended
from headway.core.view import Bounds, FleetView, OracleReplicaView, OracleRequestView, ReplicaView, RequestView
from headway.policies.arguments import require_above, require_at_least
from headway.policies.routing.work_left import MeanOutput, pending_tokens, uncached_tokens


class RemainingWorkRouter:
    """The replica with the least work left, the request's own included: tokens to prefill and to generate.

    Work is the uncached prompt tokens of the request and of waiting requests, plus `decode_weight` for each output
    token still expected, divided by the replica's capacity: its profiled goodput, or its KV blocks if no replica has
    one. Output lengths are the mean of finished requests, which begins at `prior_output_tokens` with the weight of 16
    requests. This is `jsq-tokens` extended to prefix caches and to replicas of different capacity. Among equals, the
    lowest id wins.
    """

    def __init__(self, decode_weight: float = 1.0, prior_output_tokens: float = 256.0) -> None:
        require_at_least(0, decode_weight=decode_weight)
        require_above(0, prior_output_tokens=prior_output_tokens)
        self._decode_weight = decode_weight
        self._output = MeanOutput(prior_output_tokens)

    def route(self, request: RequestView, view: FleetView) -> Placement:
        unprofiled = view.find_least(_is_profiled)
        is_profiled = all(map(_is_profiled, view.replicas)) if unprofiled is None else _is_profiled(unprofiled)
        if not (request.prefix or view.wants_scores):
            tokens = request.prompt_tokens + request.generated_tokens
            bounds = self._bounds_by_goodput if is_profiled else self._bounds_by_blocks
            score = partial(self._work, request, is_profiled=is_profiled)
            found = view.find_least_score(bounds, (tokens, self._own_tokens(request), 0.0), score, falls=True)
            if found is not None:
                return Placement(found.id)
        scores = [(self._work(request, replica, is_profiled), replica.id) for replica in view.replicas]
        return Placement(min(scores)[1], scores=tuple((id, work) for work, id in scores))

    def _work(self, request: RequestView, replica: ReplicaView, is_profiled: bool) -> float:
        prefill = pending_tokens(replica) + uncached_tokens(request, replica)
        work = prefill + self._decode_weight * self._to_generate(request, replica)
        return work / _capacity(replica, is_profiled)

    def _bounds_by_goodput(self, replica: ReplicaView) -> Bounds:
        return self._bounds(replica, _capacity(replica, is_profiled=True))

    def _bounds_by_blocks(self, replica: ReplicaView) -> Bounds:
        return self._bounds(replica, _capacity(replica, is_profiled=False))

    def _bounds(self, replica: ReplicaView, capacity: float) -> Bounds:
        """The work as a function of the request's tokens to prefill and of `_own_tokens`. Bounds and kinds hold for any
        mean output."""
        weight, pending = self._decode_weight, pending_tokens(replica)
        num, generated = replica.num_in_flight, replica.tokens_generated
        num_expected, known = num + 1, -generated
        if num * self._output.tokens <= generated + num:
            num_expected, known = 1, num
        kind = pending, num, generated, capacity
        return (pending + weight * known) / capacity, 1.0 / capacity, weight * num_expected / capacity, 0.0, kind

    def _own_tokens(self, request: RequestView) -> float:
        """Output tokens that the request will generate, as expected."""
        return self._output.tokens

    def _to_generate(self, request: RequestView, replica: ReplicaView) -> float:
        """Output tokens yet to generate: those of the request, and those of all requests at the replica."""
        in_flight, mean = replica.num_in_flight, self._output.tokens
        return max(in_flight * mean - replica.tokens_generated, in_flight) + mean

    def learn(self, record: Ended) -> None:
        self._output.learn(record)


class RemainingWorkOracleRouter(RemainingWorkRouter):
    """`remaining-work` with the true output lengths, which only an oracle knows: the bound on the gain from length
    prediction."""

    oracle = True

    def _bounds(self, replica: ReplicaView, capacity: float) -> Bounds:
        weight, pending = self._decode_weight, pending_tokens(replica)
        left = cast("OracleReplicaView", replica).output_tokens_left
        return (pending + weight * left) / capacity, 1.0 / capacity, weight / capacity, 0.0, (pending, left, capacity)

    def _own_tokens(self, request: RequestView) -> float:
        return cast("OracleRequestView", request).output_tokens - request.generated_tokens

    def _to_generate(self, request: RequestView, replica: ReplicaView) -> float:
        known = cast("OracleRequestView", request).output_tokens - request.generated_tokens
        return cast("OracleReplicaView", replica).output_tokens_left + known


def _is_profiled(replica: ReplicaView) -> bool:
    return bool(replica.goodput_rps)


def _capacity(replica: ReplicaView, is_profiled: bool) -> float:
    return (replica.goodput_rps if is_profiled else replica.kv_blocks_total) or 1
