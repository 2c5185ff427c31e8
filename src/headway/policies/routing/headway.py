"""Headway's own router: the region, combo and replica with the fewest KV tokens for its goodput."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Final, NamedTuple

from headway.core.decision import Placement
from headway.core.fleet import Role
from headway.core.record import Ended
from headway.core.view import FleetView, ReplicaView, RequestView
from headway.policies.arguments import require_at_least
from headway.policies.endpoints import grouped
from headway.policies.routing.cauchy import CauchyRouter
from headway.policies.routing.combos import NarrowedView, by_combo, goodput_weights
from headway.policies.routing.work_left import MeanOutput, pending_tokens, uncached_tokens

Combos = Mapping[int, Sequence[ReplicaView]]


class HeadwayRouter:
    """The combo with the fewest KV tokens for its goodput; within the combo, an idle replica serves the whole request.

    One measure combines what five systems look at. Tokens are those of KV caches on the GPU and in host memory
    (PASCAL's footprint) and of prompts yet to be computed, so that a burst spreads before any of it runs. They are
    divided by profiled goodput, or by KV capacity if no combo is profiled, so that unlike combos fill up evenly
    (Cauchy's weights, applied to the actual tokens instead of turns). Combos whose answers fall behind their readers
    are used only if all do (PASCAL, Algorithm 1), by requests that no replica has cached. A replica on its own is a
    combo. Within a combo, prefill and decode replicas are selected as by Cauchy's opportunistic scheduler. The scores
    in the decision log are those of combos, each under the id of its first replica.

    A request whose prefix some replica has cached goes to the combo at which it adds the least time, to itself and to
    the requests there: the prompt tokens to compute before its first one, its own uncached tokens once for each request
    that waits for them, and `kv_cost` for each KV token that an output token reads, its own and those of the others.
    The sum is divided by the square of the combo's weight, since a faster combo both computes it sooner and has more
    requests in flight. So prompts meet where they are cached until that holds up more than computing them elsewhere.

    A combo in another region than the request's counts as `far` times as full. So requests stay near while the load is
    even, and leave before their region is full. (SageServe's threshold on KV use lets a region fill up that is short of
    anything else.)
    """

    pairs = True
    answers_in_place = True
    """A replica for one phase may get a whole request."""

    def __init__(self, far: float = 1.5, kv_cost: float = 3e-4) -> None:
        require_at_least(1, far=far)
        require_at_least(0, kv_cost=kv_cost)
        self._far, self._kv_cost = far, kv_cost
        self._inside = CauchyRouter()
        self._groups: _Groups | None = None
        self._output = MeanOutput()

    def route(self, request: RequestView, view: FleetView) -> Placement:
        # A prompt that no replica holds is served as one without a prefix: live, every prompt has one.
        is_held = bool(request.prefix) and any([each.cached_tokens(request) for each in view.replicas])
        if not (view.wants_scores or is_held):
            kinds = view.map(_kind)
            if self._groups is None or self._groups.kinds != kinds:
                self._groups = _Groups(kinds)
            self._groups.kinds = [*kinds]  # the very objects, which compare faster next time
            if self._groups.of_like:
                return Placement(view.replicas[self._single(request, self._groups, view.map(_tokens_behind))].id)
        combos = by_combo(view.replicas)
        # A combo that cannot compute prompts now stands back while another can.
        able = {id: combo for id, combo in combos.items() if any(each.role != "decode" for each in combo)} or combos
        on_pace = able
        if not is_held:  # Prompts that leave their caches for the pace of answers would slow all answers down.
            on_pace = {id: combo for id, combo in able.items() if all(each.answers_on_pace for each in combo)} or able
        scores = self._scores(request, on_pace, is_held)
        chosen = on_pace[min(scores, key=lambda id: (scores[id], id))]
        scored = tuple((on_pace[id][0].id, score) for id, score in scores.items())
        if len(chosen) == 1:
            return Placement(chosen[0].id, scores=scored)
        inside = self._inside.route(request, NarrowedView(view.now, view.random, chosen))
        return Placement(inside.replica, inside.decode, scored)

    def _single(self, request: RequestView, groups: _Groups, tokens: Sequence[int]) -> int:
        """The position of the same choice, without a score for each: among like replicas, the fewest tokens decide."""
        found: list[tuple[bool, float, int, int]] = []
        for (region, capacity), positions, of_group in groups.of_like:
            counts = of_group(tokens)
            least = min(counts)
            near = 1.0 if region == request.region else self._far
            position = positions[counts.index(least)]
            score = near * (request.prompt_tokens + least % _BEHIND) / capacity
            found.append((least >= _BEHIND, score, groups.kinds[position].combo, position))
        return min(found)[3]

    def _scores(self, request: RequestView, combos: Combos, is_held: bool) -> Mapping[int, float]:
        weights = _weights(combos)
        near = {id: 1.0 if combo[0].region == request.region else self._far for id, combo in combos.items()}
        if not is_held:
            tokens = request.prompt_tokens
            return {id: near[id] * (tokens + _tokens(combo)) / weights[id] for id, combo in combos.items()}
        return {id: near[id] * self._added_work(request, combo) / weights[id] ** 2 for id, combo in combos.items()}

    def _added_work(self, request: RequestView, combo: Sequence[ReplicaView]) -> float:
        """Time that a request adds to itself and to others, in prompt tokens computed."""
        num_in_flight = sum(each.num_in_flight for each in combo)
        able = [each for each in combo if each.role != "decode"] or combo
        uncached = min(uncached_tokens(request, each) for each in able)
        prefill = sum(pending_tokens(each) for each in combo) + uncached * (1 + num_in_flight)
        read_tokens = _tokens(combo) + request.prompt_tokens * (1 + num_in_flight)
        return prefill + self._kv_cost * self._output.tokens * read_tokens

    def learn(self, record: Ended) -> None:
        self._output.learn(record)


_BEHIND: Final = 1 << 60
"""Added to the tokens of a replica whose answers are behind their readers."""


class _Kind(NamedTuple):
    """What is constant of a replica, but for changes of its role."""

    combo: int
    role: Role
    goodput_rps: float | None
    region: str
    kv_tokens: int


def _kind(replica: ReplicaView) -> _Kind:
    kv_tokens = replica.kv_blocks_total * replica.block_size_tokens
    return _Kind(replica.combo, replica.role, replica.goodput_rps, replica.region, kv_tokens)


def _tokens_behind(replica: ReplicaView) -> int:
    tokens = (replica.kv_blocks_used + replica.kv_blocks_host) * replica.block_size_tokens + replica.prefill_tokens_left
    return tokens if replica.answers_on_pace else tokens + _BEHIND


class _Groups:
    """Replicas by region and capacity, if each is a combo of its own for both phases and none is profiled."""

    def __init__(self, kinds: Sequence[_Kind]) -> None:
        self.kinds = list(kinds)
        self.of_like: list[tuple[tuple[str, int], list[int], Callable[[Sequence[int]], Sequence[int]]]] = []
        """((region, capacity in tokens), positions in the order of their combos, the values at these positions)."""
        are_single = len({kind.combo for kind in kinds}) == len(kinds)
        if are_single and all(kind.role == "mixed" and not kind.goodput_rps for kind in kinds):
            in_order = sorted(range(len(kinds)), key=lambda position: kinds[position].combo)
            alike = grouped(in_order, lambda i: (kinds[i].region, max(kinds[i].kv_tokens, 1)))
            self.of_like = [(key, positions, _values_at(positions)) for key, positions in alike.items()]


def _values_at(positions: list[int]) -> Callable[[Sequence[int]], Sequence[int]]:
    first, last = positions[0], positions[-1]
    if positions == list(range(first, last + 1)):
        return itemgetter(slice(first, last + 1))
    return itemgetter(*positions)


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
