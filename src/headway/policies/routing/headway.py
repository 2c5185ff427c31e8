"""Headway's own router: region, combo and replica by the tokens they still have to hold for each request they serve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

from headway.core.decision import Placement
from headway.core.view import FleetView, ReplicaView, RequestView
from headway.policies.arguments import require_at_least
from headway.policies.routing.cauchy import CauchyRouter
from headway.policies.routing.combos import by_combo, goodput_weights

Combos = Mapping[int, Sequence[ReplicaView]]


@dataclass(frozen=True)
class ComboView:
    """Some replicas of a view, as a view."""

    now: float
    random: Random
    replicas: Sequence[ReplicaView]


class HeadwayRouter:
    """The combo whose KV tokens, held and to come, are the fewest for its goodput; in it, who is idle does it all.

    What five systems look at, in one measure. Tokens are those of KV caches on the GPU and in host memory (PASCAL's
    footprint) and of prompts that have yet to be computed, so that a burst spreads before any of it runs. They are
    divided by profiled goodput, or where nothing is profiled by the KV cache there is, so that unlike combos fill up
    alike (Cauchy's weights, but by what requests turned out to be, not by turns). Combos whose readers of answers run
    dry stand back while others' do not (PASCAL, Algorithm 1). A replica on its own is a combo. Within one, prefill and
    decode are as Cauchy's opportunistic scheduler has them. The scores that the decision log shows are those of combos,
    each under its first replica.

    A combo in another region than the request's counts as `far` times as full, so that requests stay near while load is
    even, and leave before a region is full. (SageServe's threshold on KV cache in use lets a region that is short of
    anything else fill up.)
    """

    pairs = True
    answers_in_place = True
    """It may give all of a request to a replica that is for one phase."""

    def __init__(self, far: float = 1.5) -> None:
        require_at_least("far", far, 1)
        self._far = far
        self._inside = CauchyRouter()

    def route(self, request: RequestView, view: FleetView) -> Placement:
        combos = by_combo(view.replicas)
        # A combo that cannot compute prompts now stands back while another can.
        able = {id: combo for id, combo in combos.items() if any(each.role != "decode" for each in combo)} or combos
        on_pace = {id: combo for id, combo in able.items() if all(each.answers_on_pace for each in combo)} or able
        scores = self._scores(request, on_pace)
        chosen = on_pace[min(scores, key=lambda id: (scores[id], id))]
        told = tuple((on_pace[id][0].id, score) for id, score in scores.items())
        if len(chosen) == 1:
            return Placement(chosen[0].id, scores=told)
        inside = self._inside.route(request, ComboView(view.now, view.random, chosen))
        return Placement(inside.replica, inside.decode, told)

    def _scores(self, request: RequestView, combos: Combos) -> Mapping[int, float]:
        """How full each combo would be."""
        weights = _weights(combos)
        near = {id: 1.0 if combo[0].region == request.region else self._far for id, combo in combos.items()}
        return {id: near[id] * (request.prompt_tokens + _tokens(combo)) / weights[id] for id, combo in combos.items()}


def _tokens(combo: Sequence[ReplicaView]) -> int:
    """KV tokens that its requests hold, and that their prompts will."""
    blocks = sum((each.kv_blocks_used + each.kv_blocks_host) * each.block_size_tokens for each in combo)
    return blocks + sum(each.prefill_tokens_left for each in combo)


def _weights(combos: Combos) -> Mapping[int, float]:
    """What each combo can take: its goodput or, where none is profiled, its KV cache in tokens."""
    if any(combo[0].goodput_rps for combo in combos.values()):
        return goodput_weights(combos)
    return {id: max(_room(combo), 1) for id, combo in combos.items()}


def _room(combo: Sequence[ReplicaView]) -> int:
    """KV tokens that those who decode can hold."""
    return sum(each.kv_blocks_total * each.block_size_tokens for each in combo if each.role != "prefill")
