"""Combos as routers see them: which there are, what they are worth, and whose turn it is (Cauchy, section 3.4)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from headway.core.view import ReplicaView

_LITTLE = 1e-9


def by_combo(replicas: Iterable[ReplicaView]) -> dict[int, list[ReplicaView]]:
    """Replicas by their combo, combos in ascending order."""
    found: dict[int, list[ReplicaView]] = {}
    for replica in replicas:
        found.setdefault(replica.combo, []).append(replica)
    return dict(sorted(found.items()))


def goodput_weights(combos: Mapping[int, Sequence[ReplicaView]]) -> dict[int, float]:
    """Each combo's goodput as a share of all; one without a profile counts as the mean of those that have one."""
    profiled = {combo: replicas[0].goodput_rps or 0.0 for combo, replicas in combos.items()}
    known = [goodput_rps for goodput_rps in profiled.values() if goodput_rps > 0]
    mean = fmean(known) if known else 1.0
    weights = {combo: goodput_rps if goodput_rps > 0 else mean for combo, goodput_rps in profiled.items()}
    total = sum(weights.values())
    return {combo: weight / total for combo, weight in weights.items()}


def tokens_left(replicas: Sequence[ReplicaView]) -> int:
    """KV tokens that a combo has room for, less the prompt tokens that it has yet to compute."""
    return sum(
        (replica.kv_blocks_total - replica.kv_blocks_used) * replica.block_size_tokens - replica.prefill_tokens_left
        for replica in replicas
    )


class WeightedRoundRobin:
    """Weighted round robin, smooth: at every instant each has had its share of the turns to within one.

    Each turn, everybody is credited with their weight, and who is served pays 1. Of those in credit the one is
    served that would be in credit with a whole turn first: as unit jobs by earliest deadline, which keeps each
    between one turn ahead and one behind while weights stay as they are. Those that come begin with nothing, and what
    those that went were owed goes to the others: credits always add up to nothing.
    """

    def __init__(self) -> None:
        self._credits: dict[int, float] = {}

    def next(self, weights: Mapping[int, float]) -> int:
        """Whose turn it is, of these; weights add up to 1."""
        before = self._credits
        owed = 1.0 - sum(before.get(one, 0.0) for one in weights)
        credits = {one: before.get(one, 0.0) + owed * weight for one, weight in weights.items()}
        due = [one for one, credit in credits.items() if credit > _LITTLE] or list(weights)
        chosen = min(due, key=lambda one: (round((1.0 - credits[one]) / weights[one], 9), one))
        credits[chosen] -= 1.0
        self._credits = credits
        return chosen


def next_after(ids: Sequence[int], last: int) -> int:
    """Round robin: the next id above the last one, or the lowest."""
    higher = [id for id in ids if id > last]
    return min(higher or ids)
