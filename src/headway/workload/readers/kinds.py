"""What a cell of a CSV may hold."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headway.workload.check import MAX_TOKENS

Check = Callable[[npt.NDArray[Any]], npt.NDArray[np.bool_]]
WHOLE = re.compile(r"\s*[+-]?\d+\s*")
TIMESTAMP = re.compile(r"\s*\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(\.\d{1,9})?(Z|[+-]\d\d(:?\d\d)?)?\s*")


@dataclass(frozen=True, eq=False)
class Kind:
    """A type of cell: how Arrow reads it, what is good, and how to say what was expected."""

    arrow: Any
    expected: str
    good: Check
    good_cell: Callable[[str], bool]
    """The same check on one cell as text."""
    none: float | int | None = None
    """What an empty cell means; None: it is an error."""
    is_text: bool = False

    def all_good(self, column: pa.ChunkedArray) -> bool:
        """Whether every cell is."""
        if self.is_text:
            return True
        if self.none is None and column.null_count:
            return False
        return bool(self.good(self.to_numpy(column)).all())

    def to_numpy(self, column: pa.ChunkedArray) -> npt.NDArray[Any]:
        """As an array: int32, int64 or float64; times in nanoseconds."""
        if pa.types.is_timestamp(self.arrow):
            column = column.cast(pa.int64())
        if column.null_count:
            column = column.fill_null(self.none)
        values: npt.NDArray[Any] = column.to_numpy()
        return values


def _whole_between(low: int, high: int) -> Callable[[str], bool]:
    return lambda cell: WHOLE.fullmatch(cell) is not None and low <= int(cell) <= high


def _number(good: Callable[[float], bool], empty: bool) -> Callable[[str], bool]:
    def check(cell: str) -> bool:
        if not cell:
            return empty
        try:
            return good(float(cell))
        except ValueError:
            return False

    return check


def has_zone(cell: str) -> bool:
    """Whether a timestamp says its time zone."""
    match = TIMESTAMP.fullmatch(cell)
    return match is not None and match[2] is not None


def _between(low: int, high: int) -> Check:
    return lambda values: (values >= low) & (values <= high)


TOKENS = Kind(
    pa.int32(),
    f"a whole number of tokens, 0 to {MAX_TOKENS:,}",
    _between(0, MAX_TOKENS),
    _whole_between(0, MAX_TOKENS),
)
ID = Kind(
    pa.int64(), "an id from 0, or nothing", _between(-1, 2**63 - 1),
    lambda cell: not cell or _whole_between(-1, 2**63 - 1)(cell), none=-1,
)  # fmt: skip
SMALL = Kind(pa.int16(), "a whole number from 0 to 32767", _between(0, 32767), _whole_between(0, 32767))
SECONDS = Kind(
    pa.float64(), "seconds, 0 or more", lambda v: np.isfinite(v) & (v >= 0),
    _number(lambda v: 0 <= v < float("inf"), empty=False),
)  # fmt: skip
OPTIONAL = Kind(
    pa.float64(), "a number, or nothing", lambda v: ~np.isinf(v),
    _number(lambda v: abs(v) != float("inf"), empty=True), none=float("nan"),
)  # fmt: skip
TIME = Kind(
    pa.timestamp("ns"), "a time such as 2023-11-16 18:15:46.6805900", lambda v: v == v,
    lambda cell: TIMESTAMP.fullmatch(cell) is not None and not has_zone(cell),
)  # fmt: skip
ZONED_TIME = Kind(
    pa.timestamp("ns", "UTC"),
    "a time with its zone, such as 2024-05-10 00:00:00.009930+00:00",
    lambda v: v == v,
    has_zone,
)  # fmt: skip
TEXT = Kind(pa.string(), "text", lambda v: v == v, lambda cell: True, is_text=True)
