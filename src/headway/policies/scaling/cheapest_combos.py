"""The cheapest combos for a demand, found exactly by branch and bound over a few kinds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil

_LITTLE = 1e-9


@dataclass(frozen=True)
class ComboKind:
    name: str
    goodput_rps: float
    cost: float
    """Amount that one combo adds to the objective."""
    gpus: Mapping[str, int]
    most: int


def cheapest(demand_rps: float, kinds: Sequence[ComboKind], gpus: Mapping[str, int]) -> dict[str, int]:
    """How many combos of each kind to deploy, by name.

    Sets: kinds k, GPU types g. Parameters: goodput q_k, cost c_k, GPUs r_kg, upper bounds u_k, available GPUs G_g
    (types that `gpus` does not name are unlimited). Variables: integers 0 <= n_k <= u_k. Constraints: sum of r_kg n_k
    <= G_g. Objectives, in this order: the uncovered demand max(0, D - sum of q_k n_k); the sum of c_k n_k; among
    solutions whose cost is equal to a millionth, the most goodput.
    """
    usable = [kind for kind in kinds if kind.goodput_rps > 0 and _fitting(kind, gpus) > 0]
    ratios = [kind.cost / kind.goodput_rps for kind in usable if kind.cost > 0]
    bonus = 1e-6 * min(ratios, default=0.0)
    costs = {kind.name: max(kind.cost - bonus * kind.goodput_rps, 0.0) for kind in usable}
    usable.sort(key=lambda kind: (costs[kind.name] / kind.goodput_rps, kind.name))
    search = _BranchAndBound(usable, [costs[kind.name] for kind in usable], gpus)
    search.go(0, (), demand_rps, 0.0, dict(gpus))
    return {kind.name: num for kind, num in zip(usable, search.best, strict=False) if num}


class _BranchAndBound:
    """Branch and bound: kinds in order of cost per goodput, the largest useful count of each kind first."""

    def __init__(self, kinds: Sequence[ComboKind], costs: Sequence[float], gpus: Mapping[str, int]) -> None:
        self._kinds, self._costs = kinds, costs
        self._reach = [0.0]
        """Holds, for each i, an upper bound of the goodput of the kinds from i on. Shared GPUs are counted once for
        each kind."""
        for kind in reversed(kinds):
            self._reach.insert(0, self._reach[0] + kind.goodput_rps * _fitting(kind, gpus))
        self.best: tuple[int, ...] = ()
        self._short, self._cost = float("inf"), float("inf")

    def go(self, i: int, counts: tuple[int, ...], left_rps: float, cost: float, gpus: dict[str, int]) -> None:
        short = left_rps if left_rps > _LITTLE else 0.0
        if self._beats(short, cost):
            self.best, self._short, self._cost = counts, short, cost
        if not short or i == len(self._kinds):
            return
        kind = self._kinds[i]
        covered = min(short, self._reach[i])
        if not self._beats(short - covered, cost + covered * self._costs[i] / kind.goodput_rps):
            return
        most = min(_fitting(kind, gpus), ceil(short / kind.goodput_rps - _LITTLE))
        for num in range(most, -1, -1):
            rest = {gpu: have - num * kind.gpus.get(gpu, 0) for gpu, have in gpus.items()}
            self.go(i + 1, (*counts, num), left_rps - num * kind.goodput_rps, cost + num * self._costs[i], rest)

    def _beats(self, short: float, cost: float) -> bool:
        """Whether a solution covers more demand than the best so far, or the same demand at a lower cost."""
        return short < self._short - _LITTLE or (short <= self._short + _LITTLE and cost < self._cost - _LITTLE)


def _fitting(kind: ComboKind, gpus: Mapping[str, int]) -> int:
    """Upper bound on the number of combos of this kind."""
    rooms = [gpus[gpu] // num for gpu, num in kind.gpus.items() if num and gpu in gpus]
    return max(min([kind.most, *rooms]), 0)
