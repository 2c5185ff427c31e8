"""Combos in a router's view: their replicas, goodput weights and turns (Cauchy, section 3.4)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from statistics import fmean

from headway.core.view import ReplicaView
from headway.policies.endpoints import grouped

_COMBO = attrgetter("combo")
_LITTLE = 1e-9


def by_combo(replicas: Iterable[ReplicaView]) -> dict[int, list[ReplicaView]]:
    """Replicas by combo, combos in ascending order."""
    groups = grouped(replicas, _COMBO)
    return groups if len(groups) == 1 else dict(sorted(groups.items()))


def goodput_weights(combos: Mapping[int, Sequence[ReplicaView]]) -> dict[int, float]:
    """Each combo's share of the total goodput. A combo without a profile counts as the mean of the profiled ones."""
    profiled = {combo: replicas[0].goodput_rps or 0.0 for combo, replicas in combos.items()}
    positive = [goodput_rps for goodput_rps in profiled.values() if goodput_rps > 0]
    mean = fmean(positive) if positive else 1.0
    weights = {combo: goodput_rps if goodput_rps > 0 else mean for combo, goodput_rps in profiled.items()}
    total = sum(weights.values())
    return {combo: weight / total for combo, weight in weights.items()}


def tokens_left(replicas: Sequence[ReplicaView]) -> int:
    """Free KV tokens of a combo, less the prompt tokens that it has yet to compute."""
    return sum(
        (replica.kv_blocks_total - replica.kv_blocks_used) * replica.block_size_tokens - replica.prefill_tokens_left
        for replica in replicas
    )


class WeightedRoundRobin:
    """Smooth weighted round robin: at any time, each id has had its share of the turns to within one.

    At each turn every id is credited with its weight, and the served id pays 1. Of the ids with positive credit, the
    one that would reach a whole turn first is served. This is earliest deadline first for unit jobs: with constant
    weights, each id is at most one turn ahead or behind. New ids start without credit, and the credit of removed ids is
    divided among the others, so that credits always sum to zero.
    """

    def __init__(self) -> None:
        self._credits: dict[int, float] = {}

    def next(self, weights: Mapping[int, float]) -> int:
        """The id whose turn it is; `weights` sum to 1."""
        before = self._credits
        if len(weights) == 1 and before == dict.fromkeys(weights, 0.0):
            return next(iter(weights))  # the credit of the only combo and its payment would cancel
        owed = 1.0 - sum(before.get(one, 0.0) for one in weights)
        credits = {one: before.get(one, 0.0) + owed * weight for one, weight in weights.items()}
        due = [one for one, credit in credits.items() if credit > _LITTLE] or list(weights)
        chosen = min(due, key=lambda one: (round((1.0 - credits[one]) / weights[one], 9), one))
        credits[chosen] -= 1.0
        self._credits = credits
        return chosen


def next_after(ids: Sequence[int], last: int) -> int:
    """The lowest id above `last`, or the lowest id overall."""
    higher = [id for id in ids if id > last]
    return min(higher or ids)
