"""Allocates GPUs to stages with the smallest largest latency (3.2), the lowest cost, or the smallest sum.

Sets and parameters
    i in 1..C      stages
    f in 0..N      GPUs
    l_i(f)         latency of stage i with f GPUs; infinite where they are too few; l_i(0) = 0 where no request comes
Variables
    x_{i,f}        1 where stage i is given f GPUs, else 0
    L              the largest latency
Minimise           L
Subject to         sum_f x_{i,f} = 1                           for every i
                   sum_i sum_f f x_{i,f} = N (or <= N)
                   L >= sum_f l_i(f) x_{i,f}                   for every i
                   x_{i,f} = 0 where l_i(f) is infinite

With several types of GPU, f is a vector of a number for each type, and there is a row sum_i sum_f f_t x_{i,f} <= N_t
for every type t. Such a vector is a *cell*, numbered like the cells of an array with an axis for each type.

`least_max` finds the optimum by dynamic programs and bisection over the values of l, as the search needs thousands of
allocations. Tests compare it with a solver of the program as it is written here.
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
from headway.planning.cascade.problem import CascadeProblem, Floats

Ints = npt.NDArray[np.int64]
Vector = tuple[int, ...]
MOST_CELLS = 200_000
"""Maximum number of cells: the tables for more cells would take a GB."""


@dataclass(frozen=True)
class GpuBudget:
    """GPUs of several types, shared by stages."""

    limits: Vector
    """Total GPUs of each type. The limits define how cells are numbered."""
    usd_per_hour: tuple[float, ...]
    """Price of one GPU of each type."""
    left: Vector = field(default=())
    """GPUs of each type that may still be taken; empty: all."""

    def __post_init__(self) -> None:
        if self.num_cells > MOST_CELLS:
            raise HeadwayError(
                f"{' x '.join(map(str, self.limits))} GPUs of {len(self.limits)} types: too many "
                f"combinations; expected {MOST_CELLS:,} at most"
            )
        if not self.left:
            object.__setattr__(self, "left", self.limits)

    @property
    def shape(self) -> Vector:
        """Shape of an array of all cells."""
        return tuple(n + 1 for n in self.limits)

    @property
    def num_cells(self) -> int:
        """Number of cells, including the cell without GPUs."""
        return prod(self.shape)

    def cells(self, vectors: Ints) -> Ints:
        """The cells of vectors: [..., type] -> [...]."""
        return np.asarray(np.ravel_multi_index(tuple(np.moveaxis(vectors, -1, 0)), self.shape))

    def vector(self, cell: int) -> Vector:
        return tuple(int(n) for n in np.unravel_index(cell, self.shape))

    def without(self, cell: int) -> GpuBudget:
        """The remaining budget after a cell is taken."""
        return replace(self, left=tuple(n - k for n, k in zip(self.left, self.vector(cell), strict=True)))

    @cached_property
    def usd(self) -> Floats:
        """The price per hour of each cell."""
        return np.asarray(np.tensordot(np.array(self.usd_per_hour), np.indices(self.shape), axes=1).ravel())

    def grid(self, table: Floats) -> Floats:
        """The values of the cells within the remaining GPUs, as an array with one axis for each GPU type."""
        return table.reshape(self.shape)[tuple(slice(n + 1) for n in self.left)]


Gpus = int | GpuBudget
"""GPUs of one type, or of several types."""


def budget_of(problem: CascadeProblem) -> GpuBudget:
    """All GPUs of a problem, with their prices."""
    limits = tuple(offer.limit or 0 for offer in problem.offers)
    return GpuBudget(limits, tuple(offer.price for offer in problem.offers))


class Allocation(Struct, frozen=True):
    """GPUs by stage, and the largest latency."""

    gpus: tuple[int, ...]
    """Numbers of GPUs; with several types, cells."""
    latency_s: float
    usd_per_hour: float = 0.0
    """Price; 0 with one type of GPU."""


def least_max(tables: Sequence[Floats], num_gpus: Gpus, use_all: bool = False) -> Allocation | None:
    """The allocation with the smallest largest latency, where `tables[i][f]` is l_i(f); None if there is none.

    With several types of GPU, the cheapest of those allocations.
    """
    if isinstance(num_gpus, GpuBudget):
        arrays = [num_gpus.grid(table) for table in tables]
        floor = max(float(array.min()) for array in arrays)
        best = None if floor == inf else _split([np.maximum(array, floor) for array in arrays], np.maximum)
        return None if best is None else least_cost(tables, num_gpus, best[0])
    if use_all:
        latency_s = _by_total(tables, num_gpus, np.maximum)[0][num_gpus]
        within = [np.where(table <= latency_s, 0.0, inf) for table in tables]
        gpus = None if latency_s == inf else least_sum(within, num_gpus, use_all)
        return None if gpus is None else _allocation(tables, gpus)
    # The smallest value at which the needed GPUs suffice. No stage gets more GPUs than it needs.
    values = np.unique(np.concatenate([table[np.isfinite(table)] for table in tables]))
    falling = [np.minimum.accumulate(table)[::-1] for table in tables]
    least = [len(table) - np.searchsorted(table, values, side="right") for table in falling]
    good = (sum(least) <= num_gpus) & np.all([f < len(table) for f, table in zip(least, falling, strict=True)], axis=0)
    if not good.any():
        return None
    first = int(good.argmax())
    return _allocation(tables, tuple(int(f[first]) for f in least))


def least_cost(tables: Sequence[Floats], budget: GpuBudget, latency_s: float) -> Allocation | None:
    """The cheapest allocation with every stage within a latency; None if there is none."""
    best = _split([budget.grid(np.where(table <= latency_s, budget.usd, inf)) for table in tables], np.add)
    if best is None:
        return None
    gpus = tuple(int(budget.cells(np.array(vector))) for vector in best[1])
    return Allocation(gpus, _allocation(tables, gpus).latency_s, best[0])


def least_sum(costs: Sequence[Floats], num_gpus: Gpus, use_all: bool) -> tuple[int, ...] | None:
    """The GPUs of each stage with the smallest sum of `costs[i][f]`; None if no sum is finite."""
    if isinstance(num_gpus, GpuBudget):
        best = _split([num_gpus.grid(cost) for cost in costs], np.add)
        return None if best is None else tuple(int(num_gpus.cells(np.array(each))) for each in best[1])
    total, chosen = _by_total(costs, num_gpus, np.add)
    left = num_gpus if use_all else int(total.argmin())
    if not np.isfinite(total[left]):
        return None
    gpus: list[int] = []
    for each in reversed(chosen):
        gpus.append(int(each[left]))
        left -= gpus[-1]
    return tuple(reversed(gpus))


def _by_total(costs: Sequence[Floats], num_gpus: int, combine: np.ufunc) -> tuple[Floats, list[Ints]]:
    """The best combined cost by total number of GPUs; and for each stage, its GPUs by the total of itself and all
    earlier stages."""
    total, chosen = np.append(0.0, np.full(num_gpus, inf)), list[Ints]()
    for cost in costs:
        padded = np.append(np.full(len(cost) - 1, inf), total)
        combined = combine(np.lib.stride_tricks.sliding_window_view(padded, len(cost))[:, ::-1], cost)
        chosen.append(combined.argmin(axis=1))
        total = combined.min(axis=1)
    return total, chosen


def _split(arrays: Sequence[Floats], combine: np.ufunc) -> tuple[float, list[Vector]] | None:
    """One cell of each array, together within the arrays' size, with the smallest combined value; None if none is
    finite.

    For the first stages, all combinations of cells that are better than every smaller one are tried; for the last
    stage, the best cell within the rest.
    """
    *firsts, last = arrays
    left = np.array(last.shape) - 1
    taken, values, chosen = np.zeros((1, len(left)), "i8"), np.zeros(1), np.zeros((1, 0, len(left)), "i8")
    for array in firsts:
        cells, own = _front(array)
        sums = taken[:, None] + cells[None]
        first, second = np.nonzero((sums <= left).all(axis=2))
        taken, values = sums[first, second], combine(values[first], own[second])
        chosen = np.concatenate([chosen[first], cells[second][:, None]], axis=1)
        best_rows = _best_of_each(taken, values, last.shape)
        taken, values, chosen = taken[best_rows], values[best_rows], chosen[best_rows]
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
    """Cells that are better than every smaller cell, and their values."""
    smaller = np.full(array.shape, np.inf)
    within = _least_within(array)
    for axis in range(array.ndim):
        before, after = [slice(None)] * array.ndim, [slice(None)] * array.ndim
        before[axis], after[axis] = slice(None, -1), slice(1, None)
        smaller[tuple(after)] = np.minimum(smaller[tuple(after)], within[tuple(before)])
    at = np.nonzero(array < smaller)
    return np.stack(at, axis=1), array[at]


def _least_within(array: Floats) -> Floats:
    """The smallest value among each cell and all smaller cells."""
    for axis in range(array.ndim):
        array = np.minimum.accumulate(array, axis=axis)
    return array


def _best_of_each(taken: Ints, values: Floats, shape: Vector) -> Ints:
    """The first best row among rows that take the same cell."""
    cells = np.ravel_multi_index(tuple(taken.T), shape) if len(taken) else np.zeros(0, "i8")
    order = np.lexsort((values, cells))
    return np.asarray(order[np.unique(cells[order], return_index=True)[1]])


def _allocation(tables: Sequence[Floats], gpus: tuple[int, ...]) -> Allocation:
    return Allocation(gpus, max(float(table[f]) for table, f in zip(tables, gpus, strict=True)))
