"""How many GPUs each model gets: the least of the largest latency (3.2).

Sets and parameters
    i in 1..C      stages
    f in 0..N      GPUs
    l_i(f)         latency of stage i with f GPUs; infinite where they will not do; l_i(0) = 0 where no request comes
Variables
    x_{i,f}        1 where stage i is given f GPUs, else 0
    L              the largest latency
Minimise           L
Subject to         sum_f x_{i,f} = 1                           for every i
                   sum_i sum_f f x_{i,f} = N (or <= N)
                   L >= sum_f l_i(f) x_{i,f}                   for every i
                   x_{i,f} = 0 where l_i(f) is infinite

With several types of GPU, f is a vector of so many of each, and there is a row sum_i sum_f f_t x_{i,f} <= N_t for every
type t. `least_cost` asks for the least sum of prices in place of L, at a latency that is given.

`least_max` finds the same by bisection over the values of l, as the search asks thousands of times; `least_max_milp`
solves the program as it stands here. Each is the other's test.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np
from msgspec import Struct

from headway.core.errors import HeadwayError
from headway.planning.cascade.gpu_budget import Room, split
from headway.planning.cascade.problem import Floats
from headway.planning.solver import minimise

Gpus = int | Room
"""How many there are: of one type, or of several."""


class Allocation(Struct, frozen=True):
    """GPUs by stage, and the largest latency."""

    gpus: tuple[int, ...]
    """With several types, the number of a cell."""
    latency_s: float
    usd_per_hour: float = 0.0
    """Where prices are known."""


def less(gpus: Gpus, taken: int) -> Gpus:
    """What is left of them."""
    return gpus - taken if isinstance(gpus, int) else gpus.without(taken)


def least_max(tables: Sequence[Floats], num_gpus: Gpus, use_all: bool = False) -> Allocation | None:
    """The best allocation, where `tables[i][f]` is l_i(f); None where there is none."""
    if isinstance(num_gpus, Room):
        return _least_max_of(tables, num_gpus)
    values = np.unique(np.concatenate([table[np.isfinite(table)] for table in tables]))
    if not use_all:
        return _first_within(tables, values, num_gpus)
    low, high = 0, len(values)
    while low < high:
        middle = (low + high) // 2
        if _of_sum([table <= values[middle] for table in tables], num_gpus) is None:
            low = middle + 1
        else:
            high = middle
    gpus = None if low == len(values) else _of_sum([table <= values[low] for table in tables], num_gpus)
    return None if gpus is None else _allocation(tables, gpus)


def _first_within(tables: Sequence[Floats], values: Floats, num_gpus: int) -> Allocation | None:
    """The least value with which few enough GPUs will do, and no more GPUs than it takes."""
    falling = [np.minimum.accumulate(table)[::-1] for table in tables]
    least = [len(table) - np.searchsorted(table, values, side="right") for table in falling]
    good = (sum(least) <= num_gpus) & np.all([f < len(table) for f, table in zip(least, falling, strict=True)], axis=0)
    if not good.any():
        return None
    first = int(good.argmax())
    return _allocation(tables, tuple(int(f[first]) for f in least))


def _of_sum(good: Sequence[np.ndarray], num_gpus: int) -> tuple[int, ...] | None:
    """One allowed number for each stage, `num_gpus` in all: the reachable sums are bits of a number."""
    reach = [1]
    for each in good:
        sums = 0
        for f in np.flatnonzero(each).tolist():
            sums |= reach[-1] << f
        reach.append(sums & ((1 << (num_gpus + 1)) - 1))
    if not reach[-1] >> num_gpus & 1:
        return None
    left, found = num_gpus, []
    for each, before in zip(reversed(good), reversed(reach[:-1]), strict=True):
        f = next(f for f in np.flatnonzero(each).tolist() if f <= left and before >> (left - f) & 1)
        found.append(f)
        left -= f
    return tuple(reversed(found))


def _least_max_of(tables: Sequence[Floats], room: Room) -> Allocation | None:
    """Of those that are best, one that costs least."""
    arrays = [room.of(table) for table in tables]
    floor = max(float(array.min()) for array in arrays)
    if floor == inf:
        return None
    found = split([np.maximum(array, floor) for array in arrays], np.maximum)
    return None if found is None else least_cost(tables, room, found[0])


def least_cost(tables: Sequence[Floats], room: Room, latency_s: float) -> Allocation | None:
    """The cheapest allocation with which every stage is within a latency; None where there is none."""
    found = split([room.of(np.where(table <= latency_s, room.usd, inf)) for table in tables], np.add)
    if found is None:
        return None
    gpus = tuple(int(room.cells(np.array(vector))) for vector in found[1])
    return Allocation(gpus, _allocation(tables, gpus).latency_s, found[0])


def least_max_milp(tables: Sequence[Floats], num_gpus: Gpus, use_all: bool = False) -> Allocation | None:
    """The same by the mixed-integer program, with a row for each type of GPU. HeadwayError without SciPy."""
    places = [(i, f) for i, table in enumerate(tables) for f in np.flatnonzero(np.isfinite(table)).tolist()]
    if {i for i, _ in places} != set(range(len(tables))):
        return None
    num, stages = len(places), len(tables)
    latency_s = np.array([tables[i][f] for i, f in places])
    scale = float(latency_s.max()) or 1.0
    one, below = np.zeros((stages, num + 1)), np.zeros((stages, num + 1))
    for column, (i, _) in enumerate(places):
        one[i, column] = 1.0
        below[i, column] = -latency_s[column] / scale
    below[:, num] = 1.0
    vectors = [(f,) if isinstance(num_gpus, int) else num_gpus.vector(f) for _, f in places]
    there = np.array([num_gpus] if isinstance(num_gpus, int) else num_gpus.left, "f8")
    total = np.hstack([np.array(vectors, "f8").T, np.zeros((len(there), 1))])
    ones, zeros = np.ones(stages), np.zeros(stages)
    found = minimise(
        np.array([0.0] * num + [1.0]),
        np.vstack([one, below, total]),
        np.concatenate([ones, zeros, there if use_all else np.zeros(len(there))]),
        np.concatenate([ones, np.full(stages, inf), there]),
        np.ones(num + 1),
        [True] * num + [False],
    )
    if found.status == "infeasible":
        return None
    if found.status != "optimal":
        raise HeadwayError("the time was over before an allocation was proved best")
    gpus = {i: f for (i, f), value in zip(places, found.values[:num], strict=True) if value > 0.5}
    return _allocation(tables, tuple(gpus[i] for i in range(stages)))


def _allocation(tables: Sequence[Floats], gpus: tuple[int, ...]) -> Allocation:
    return Allocation(gpus, max(float(table[f]) for table, f in zip(tables, gpus, strict=True)))
