"""GPUs of several types that stages share: vectors of so many of each, and the best way to split what there is.

A cell is such a vector, numbered like the cells of an array with an axis for each type. A table of a stage has a value
for every cell. `split` looks for one cell a stage, all of them together within what is left of every type: the first
stages' cells that no smaller one is as good as, in all combinations, and of the last stage the best within the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

import numpy as np
import numpy.typing as npt

from headway.core.errors import HeadwayError
from headway.planning.cascade.problem import Floats

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
