"""Headway's own router: the region, combo and replica with the fewest KV tokens for its goodput."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headway.core.decision import Placement
from headway.core.view import FleetView, ReplicaView, RequestView
from headway.policies.arguments import require_at_least
from headway.policies.routing.cauchy import CauchyRouter
from headway.policies.routing.combos import NarrowedView, by_combo, goodput_weights

Combos = Mapping[int, Sequence[ReplicaView]]


class HeadwayRouter:
    """The combo with the fewest KV tokens for its goodput; within the combo, an idle replica serves the whole request.

    One measure combines what five systems look at. Tokens are those of KV caches on the GPU and in host memory
    (PASCAL's footprint) and of prompts yet to be computed, so that a burst spreads before any of it runs. They are
    divided by profiled goodput, or by KV capacity if no combo is profiled, so that unlike combos fill up evenly
    (Cauchy's weights, applied to the actual tokens instead of turns). Combos whose answers fall behind their readers
    are used only if all do (PASCAL, Algorithm 1). A replica on its own is a combo. Within a combo, prefill and decode
    replicas are selected as by Cauchy's opportunistic scheduler. The scores in the decision log are those of combos,
    each under the id of its first replica.

    A combo in another region than the request's counts as `far` times as full. So requests stay near while the load is
    even, and leave before their region is full. (SageServe's threshold on KV use lets a region fill up that is short of
    anything else.)
    """

    pairs = True
    answers_in_place = True
    """A replica for one phase may get a whole request."""

    def __init__(self, far: float = 1.5) -> None:
        require_at_least(1, far=far)
        self._far = far
        self._inside = CauchyRouter()

    def route(self, request: RequestView, view: FleetView) -> Placement:
        combos = by_combo(view.replicas)
        # A combo that cannot compute prompts now stands back while another can.
        able = {id: combo for id, combo in combos.items() if any(each.role != "decode" for each in combo)} or combos
        on_pace = {id: combo for id, combo in able.items() if all(each.answers_on_pace for each in combo)} or able
        scores = self._scores(request, on_pace)
        chosen = on_pace[min(scores, key=lambda id: (scores[id], id))]
        scored = tuple((on_pace[id][0].id, score) for id, score in scores.items())
        if len(chosen) == 1:
            return Placement(chosen[0].id, scores=scored)
        inside = self._inside.route(request, NarrowedView(view.now, view.random, chosen))
        return Placement(inside.replica, inside.decode, scored)

    def _scores(self, request: RequestView, combos: Combos) -> Mapping[int, float]:
        weights = _weights(combos)
        near = {id: 1.0 if combo[0].region == request.region else self._far for id, combo in combos.items()}
        return {id: near[id] * (request.prompt_tokens + _tokens(combo)) / weights[id] for id, combo in combos.items()}


def _tokens(combo: Sequence[ReplicaView]) -> int:
    """KV tokens held by the combo's requests, and prompt tokens yet to compute."""
    blocks = sum((each.kv_blocks_used + each.kv_blocks_host) * each.block_size_tokens for each in combo)
    return blocks + sum(each.prefill_tokens_left for each in combo)


def _weights(combos: Combos) -> Mapping[int, float]:
    """The capacity of each combo: its goodput, or its KV cache in tokens if no combo is profiled."""
    if any(combo[0].goodput_rps for combo in combos.values()):
        return goodput_weights(combos)
    return {
        id: max(sum(each.kv_blocks_total * each.block_size_tokens for each in combo if each.role != "prefill"), 1)
        for id, combo in combos.items()
    }
