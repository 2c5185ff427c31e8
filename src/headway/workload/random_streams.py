"""Named streams of random numbers, and columns of draws. Draws from one stream do not depend on draws from the others.

A long column is drawn in blocks and kept in a temporary file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt
from numpy.random import PCG64, Generator, SeedSequence

from headway.core.column import Column
from headway.core.errors import HeadwayError
from headway.workload.spill import BLOCK_ROWS, LONG_ROWS, SpillFile


def stream(seed: int, name: str) -> Generator:
    """The generator of this name under this seed. It draws the same numbers on every machine."""
    return Generator(PCG64(SeedSequence([seed, crc32(name.encode())])))


def draw(values: Sequence[int], shares: Sequence[float], num: int, seed: int, name: str) -> npt.NDArray[np.int64]:
    """Draw `num` of `values` from the named stream, as `drawing` does."""
    return drawing(values, shares, seed, name)(num)


def drawing(
    values: Sequence[int], shares: Sequence[float], seed: int, name: str
) -> Callable[[int], npt.NDArray[np.int64]]:
    """Returns a function that draws the next n of `values` from the named stream, each with a probability proportional
    to its share.

    HeadwayError, which names the stream, for a negative share or shares that are all 0.
    """
    weights = np.asarray(shares, "f8")
    if len(weights) == 0 or not bool(np.isfinite(weights).all()) or weights.min() < 0 or weights.sum() <= 0:
        raise HeadwayError(f"{name}: shares {shares}; expected numbers from 0, not all of them 0")
    bounds = np.cumsum(weights) / weights.sum()
    bounds[-1] = 1.0
    random, choices = stream(seed, name), np.asarray(values, "i8")
    return lambda num: np.asarray(choices[np.searchsorted(bounds, random.random(num), side="right")])


def column_of(num: int, dtype: str, make: Callable[[int], npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """A column of `num` values. `make(n)` returns the next n values: those of a random stream, for example.

    Raises HeadwayError if a long column does not fit on the disk.
    """
    if num <= LONG_ROWS:
        return make(num).astype(dtype, copy=False)
    column = Column(np.dtype(dtype), SpillFile)
    for start in range(0, num, BLOCK_ROWS):
        column.extend(make(min(BLOCK_ROWS, num - start)).astype(dtype, copy=False))
    return column.values()
