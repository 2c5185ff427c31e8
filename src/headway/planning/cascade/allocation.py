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
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf, prod

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from headway.core.errors import HeadwayError
from headway.planning.cascade.problem import Floats, Problem
from headway.planning.solver import dot, integers, minimise, new_model, reals

Ints = npt.NDArray[np.int64]
Vector = tuple[int, ...]
MOST_CELLS = 200_000
"""More would take tables of a GB."""


@dataclass(frozen=True)
class Room:
    """GPUs of each type."""

    limits: Vector
    """That there are: how cells are numbered."""
    usd_per_hour: tuple[float, ...]
    """Of one GPU of each type."""
    left: Vector = field(default=())
    """That may be taken."""

    def __post_init__(self) -> None:
        if self.num_cells > MOST_CELLS:
            raise HeadwayError(f"{' x '.join(map(str, self.limits))} GPUs of {len(self.limits)} types: too many "
                               f"combinations; expected {MOST_CELLS:,} at most")  # fmt: skip
        if not self.left:
            object.__setattr__(self, "left", self.limits)

    @property
    def shape(self) -> Vector:
        """Of an array of all cells."""
        return tuple(n + 1 for n in self.limits)

    @property
    def num_cells(self) -> int:
        """Including the one without GPUs."""
        return prod(self.shape)

    def cells(self, vectors: Ints) -> Ints:
        """[..., type] -> [...]."""
        found: Ints = np.ravel_multi_index(tuple(np.moveaxis(vectors, -1, 0)), self.shape)
        return found

    def vector(self, cell: int) -> Vector:
        """GPUs of each type."""
        return tuple(int(n) for n in np.unravel_index(cell, self.shape))

    def without(self, cell: int) -> Room:
        """What is left when these are taken."""
        return replace(self, left=tuple(n - k for n, k in zip(self.left, self.vector(cell), strict=True)))

    @cached_property
    def usd(self) -> Floats:
        """An hour of each cell."""
        found: Floats = np.tensordot(np.array(self.usd_per_hour), np.indices(self.shape), axes=1).ravel()
        return found

    def of(self, table: Floats) -> Floats:
        """A table as such an array, as far as GPUs are left."""
        return table.reshape(self.shape)[tuple(slice(n + 1) for n in self.left)]


def split(arrays: Sequence[Floats], combine: np.ufunc) -> tuple[float, list[Vector]] | None:
    """One cell an array, together within the arrays' size, whose combined values are least; None: none is finite."""
    *firsts, last = arrays
    left = np.array(last.shape) - 1
    taken, values, chosen = np.zeros((1, len(left)), "i8"), np.zeros(1), np.zeros((1, 0, len(left)), "i8")
    for array in firsts:
        cells, own = _front(array)
        sums = taken[:, None] + cells[None]
        first, second = np.nonzero((sums <= left).all(axis=2))
        taken, values = sums[first, second], combine(values[first], own[second])
        chosen = np.concatenate([chosen[first], cells[second][:, None]], axis=1)
        kept = _best_of_each(taken, values, last.shape)
        taken, values, chosen = taken[kept], values[kept], chosen[kept]
    if not len(values):
        return None
    total = combine(values, _least_within(last)[tuple((left - taken).T)])
    best = int(total.argmin())
    if not np.isfinite(total[best]):
        return None
    rest = last[tuple(slice(n + 1) for n in (left - taken[best]).tolist())]
    own_cell = np.unravel_index(int(rest.argmin()), rest.shape)
    return float(total[best]), [*(tuple(each) for each in chosen[best].tolist()), tuple(int(n) for n in own_cell)]


def _front(array: Floats) -> tuple[Ints, Floats]:
    """Cells that are better than every smaller one, and their values."""
    smaller = np.full(array.shape, np.inf)
    within = _least_within(array)
    for axis in range(array.ndim):
        before, after = [slice(None)] * array.ndim, [slice(None)] * array.ndim
        before[axis], after[axis] = slice(None, -1), slice(1, None)
        smaller[tuple(after)] = np.minimum(smaller[tuple(after)], within[tuple(before)])
    at = np.nonzero(array < smaller)
    return np.stack(at, axis=1), array[at]


def _least_within(array: Floats) -> Floats:
    """Of each cell and all smaller ones."""
    for axis in range(array.ndim):
        array = np.minimum.accumulate(array, axis=axis)
    return array


def _best_of_each(taken: Ints, values: Floats, shape: Vector) -> Ints:
    """Of those that take the same, the first of the best."""
    cells = np.ravel_multi_index(tuple(taken.T), shape) if len(taken) else np.zeros(0, "i8")
    order = np.lexsort((values, cells))
    found: Ints = order[np.unique(cells[order], return_index=True)[1]]
    return found


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
    """The same by the mixed-integer program, with a row for each type of GPU. HeadwayError without highspy."""
    places = [(i, f) for i, table in enumerate(tables) for f in np.flatnonzero(np.isfinite(table)).tolist()]
    if {i for i, _ in places} != set(range(len(tables))):
        return None
    scale = max(float(tables[i][f]) for i, f in places) or 1.0
    model = new_model()
    x = dict(zip(places, integers(model, np.ones(len(places))), strict=True))
    (latency,) = reals(model, np.ones(1))
    stages = [[(f, x[i, f]) for f in range(len(table)) if (i, f) in x] for i, table in enumerate(tables)]
    for chosen in stages:
        model.addConstr(dot([1.0] * len(chosen), [variable for _, variable in chosen]) == 1.0)
    for table, chosen in zip(tables, stages, strict=True):
        latencies = dot([table[f] / scale for f, _ in chosen], [variable for _, variable in chosen])
        model.addConstr(latency - latencies >= 0.0)
    available = [num_gpus] if isinstance(num_gpus, int) else num_gpus.left
    for t, most in enumerate(available):
        of_type = [f if isinstance(num_gpus, int) else num_gpus.vector(f)[t] for _, f in places]
        used = dot(of_type, x.values())
        model.addConstr(used == most if use_all else used <= most)
    found = minimise(model, dot([1.0], [latency]))
    if found.status == "infeasible":
        return None
    if found.status != "optimal":
        raise HeadwayError("the time was over before an allocation was proved best")
    gpus = dict(place for place, value in zip(places, found.of(list(x.values())), strict=True) if value > 0.5)
    return _allocation(tables, tuple(gpus[i] for i in range(len(tables))))


def least_sum_allocation(costs: Sequence[Floats], num_gpus: Gpus, use_all: bool) -> tuple[int, ...] | None:
    """One number for each stage, `num_gpus` in all or at most, with the least sum of costs; None: none is finite."""
    if isinstance(num_gpus, Room):
        of_types = split([num_gpus.of(cost) for cost in costs], np.add)
        return None if of_types is None else tuple(int(num_gpus.cells(np.array(each))) for each in of_types[1])
    total, chosen = np.zeros(1), list[np.ndarray]()
    for cost in costs:
        added = np.full((num_gpus + 1, len(cost)), np.inf)
        for f, each in enumerate(cost.tolist()):
            ends = min(len(total), num_gpus + 1 - f)
            added[f : f + ends, f] = total[:ends] + each
        chosen.append(added.argmin(axis=1))
        total = added.min(axis=1)
    left = num_gpus if use_all else int(total.argmin())
    if not np.isfinite(total[left]):
        return None
    found: list[int] = []
    for each in reversed(chosen):
        found.append(int(each[left]))
        left -= found[-1]
    return tuple(reversed(found))


def gpus_of(problem: Problem) -> Gpus:
    """How many there are."""
    return as_room(problem) if problem.others else problem.num_gpus


def as_room(problem: Problem) -> Room:
    """The same with prices."""
    limits = tuple(offer.limit or 0 for offer in problem.offers)
    return Room(limits, tuple(offer.price for offer in problem.offers))


def _allocation(tables: Sequence[Floats], gpus: tuple[int, ...]) -> Allocation:
    return Allocation(gpus, max(float(table[f]) for table, f in zip(tables, gpus, strict=True)))
