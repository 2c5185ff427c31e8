"""Join the shortest queue in tokens, with every output length known."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import cast

from headway.core.decision import Placement
from headway.core.view import FleetView, OracleReplicaView, RequestView


class JsqTokensOracleRouter:
    """The replica with the fewest tokens left, prompt and output, which only an oracle knows.

    This is `jsq-tokens` with perfect estimates: the bound on what length prediction can gain. Among equals, the first
    in the view wins.
    """

    oracle = True

    def route(self, request: RequestView, view: FleetView) -> Placement:
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
