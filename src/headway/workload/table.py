"""The workload as a table: one column per fact, one row per request. Ten million rows fit in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from headway.core.errors import HeadwayError, unknown
from headway.workload import check, rows
from headway.workload.describe import Description, describe

R = TypeVar("R")
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]

DTYPES: dict[str, str] = {
    "arrival_s": "f8",
    "prompt_tokens": "i4",
    "output_tokens": "i4",
    "model": "i2",
    "tier": "i2",
    "reasoning_tokens": "i4",
    "region": "i2",
    "session_id": "i8",
    "output_id": "i8",
    "slo_ttft_s": "f8",
    "slo_tpot_s": "f8",
    "slo_e2e_s": "f8",
    "deadline_s": "f8",
    "timeout_s": "f8",
}
"""Every column but the prefix, `quality:MODEL` (f8) and `output_tokens:MODEL` (i4; -1 = as `output_tokens`), in the
order of `core.request.Request`."""

REQUIRED = ("arrival_s", "prompt_tokens", "output_tokens")
QUALITY, LENGTH = "quality:", "output_tokens:"


def default_of(name: str) -> float | int:
    """What an absent column stands for: NaN or -1 = none, code 0 of the model (or region) ""."""
    if name.endswith("_s") or name.startswith(QUALITY):
        return float("nan")
    return -1 if name.endswith("_id") or name.startswith(LENGTH) else 0


def dtype_of(name: str) -> str:
    """The type code of a column."""
    return DTYPES.get(name, "i4" if name.startswith(LENGTH) else "f8")


def is_column(name: str) -> bool:
    """Whether a table may hold a column of this name."""
    return name in DTYPES or name.startswith((QUALITY, LENGTH))


@dataclass(frozen=True, eq=False)
class Prefix:
    """Prompt segments with a content identity, ragged: those of row i are `offsets[i]:offsets[i + 1]`."""

    offsets: Longs
    ids: Longs
    tokens: Ints

    def __getitem__(self, part: slice) -> Prefix:
        start, stop, _ = part.indices(len(self.offsets) - 1)
        bounds = self.offsets[start : max(start, stop) + 1]
        held = slice(int(bounds[0]), int(bounds[-1]))
        return Prefix(bounds - bounds[0], self.ids[held], self.tokens[held])

    def take(self, index: Longs) -> Prefix:
        """The segments of these rows, in this order."""
        counts = np.diff(self.offsets)[index]
        offsets = np.concatenate(([0], np.cumsum(counts)))
        at = np.arange(offsets[-1]) + np.repeat(self.offsets[index] - offsets[:-1], counts)
        return Prefix(offsets, self.ids[at], self.tokens[at])


def no_prefix(num_rows: int) -> Prefix:
    """Rows without segments."""
    return Prefix(np.zeros(num_rows + 1, "i8"), np.zeros(0, "i8"), np.zeros(0, "i4"))


@dataclass(frozen=True, eq=False)
class Workload:
    """Requests as columns. `columns` holds `REQUIRED` and any of `DTYPES` and `quality:MODEL`.

    `arrival_s` counts from 0 and does not fall. `output_tokens` includes `reasoning_tokens`. A missing column
    means the default: no tier but 0, no session (-1), no SLO (NaN). `model` and `region` are codes into
    `models` and `regions`. `deadline_s` is absolute. `notes` say what a reader skipped or assumed.
    Arrays are shared between slices: do not write to them.
    """

    columns: dict[str, npt.NDArray[Any]]
    models: tuple[str, ...] = ()
    regions: tuple[str, ...] = ()
    prefix: Prefix | None = None
    notes: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        for name in REQUIRED:
            if name not in self.columns:
                raise HeadwayError(f"workload: the column {name!r} is missing")
        for name in self.columns:
            if not is_column(name):
                raise unknown("workload column", name, [*DTYPES, f"{QUALITY}MODEL"])
        typed = {n: np.asarray(c).astype(dtype_of(n), copy=False) for n, c in self.columns.items()}
        lengths = {len(c) for c in typed.values()}
        if self.prefix is not None:
            lengths.add(len(self.prefix.offsets) - 1)
        if len(lengths) > 1:
            raise HeadwayError(f"workload: columns differ in length: {sorted(lengths)}")
        object.__setattr__(self, "columns", typed)

    def __len__(self) -> int:
        return len(self.columns["arrival_s"])

    @property
    def arrival_s(self) -> Floats:
        """Seconds from 0, not falling."""
        return self.columns["arrival_s"]

    @property
    def prompt_tokens(self) -> Ints:
        """At least 1."""
        return self.columns["prompt_tokens"]

    @property
    def output_tokens(self) -> Ints:
        """At least 1; reasoning and answer together."""
        return self.columns["output_tokens"]

    def column(self, name: str) -> npt.NDArray[Any]:
        """A column, filled with its default where the table has none."""
        if name in self.columns:
            return self.columns[name]
        if not is_column(name):
            raise unknown("workload column", name, [*DTYPES, f"{QUALITY}MODEL"])
        return np.full(len(self), default_of(name), dtype_of(name))

    @property
    def quality_models(self) -> tuple[str, ...]:
        """Models with a quality column."""
        return tuple(n.removeprefix(QUALITY) for n in self.columns if n.startswith(QUALITY))

    @property
    def length_models(self) -> tuple[str, ...]:
        """Models with a column of output lengths of their own."""
        return tuple(n.removeprefix(LENGTH) for n in self.columns if n.startswith(LENGTH))

    def slice(self, start: int, stop: int) -> Workload:
        """Rows `start` to `stop`, as views."""
        prefix = None if self.prefix is None else self.prefix[start:stop]
        return replace(self, columns={n: c[start:stop] for n, c in self.columns.items()}, prefix=prefix)

    def head(self, num_rows: int) -> Workload:
        """The first rows."""
        return self if num_rows >= len(self) else self.slice(0, num_rows)

    def take(self, index: npt.NDArray[Any]) -> Workload:
        """These rows, in this order; a boolean mask is as good."""
        at = np.flatnonzero(index) if index.dtype == np.bool_ else index.astype("i8", copy=False)
        prefix = None if self.prefix is None else self.prefix.take(at)
        return replace(self, columns={n: c[at] for n, c in self.columns.items()}, prefix=prefix)

    def with_columns(self, new: Mapping[str, npt.ArrayLike | None]) -> Workload:
        """With columns added or replaced; None drops one."""
        columns = {**self.columns, **{n: np.asarray(c) for n, c in new.items() if c is not None}}
        return replace(self, columns={n: c for n, c in columns.items() if new.get(n, c) is not None})

    def with_notes(self, *notes: str) -> Workload:
        """With notes added."""
        return replace(self, notes=self.notes + notes)

    def sorted(self) -> Workload:
        """In order of arrival; rows that arrive together keep their order."""
        if bool(np.all(np.diff(self.arrival_s) >= 0)):
            return self
        return self.take(np.argsort(self.arrival_s, kind="stable"))

    def validate(self, where: str = "") -> Workload:
        """Itself, if every row makes sense; otherwise HeadwayError names `where`, row and column."""
        check.validate(self, where)
        return self

    def rows(self, make: Callable[..., R], start: int = 0, stop: int | None = None) -> Iterator[R]:
        """`make(*fields)` for each row: positional, in `Request`'s order, without the defaults at the end."""
        end = len(self) if stop is None else min(stop, len(self))
        return chain.from_iterable(map(make, *part) for part in rows.chunks(self, start, end))

    def tuples(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[Any, ...]]:
        """The same fields as plain tuples."""
        end = len(self) if stop is None else min(stop, len(self))
        return chain.from_iterable(zip(*part, strict=False) for part in rows.chunks(self, start, end))

    def describe(self) -> Description:
        """Counts, rate, burstiness and token percentiles."""
        return describe(self)

    def to_parquet(self, path: str | Path) -> None:
        """Write the table as Parquet. Nothing is left at `path` if this fails."""
        from headway.workload import files  # pyarrow: only who reads or writes files pays for it

        files.to_parquet(self, Path(path))

    @staticmethod
    def from_parquet(path: str | Path) -> Workload:
        """Read what `to_parquet` wrote. Columns of a run's records beside them are left out."""
        from headway.workload import files

        return files.from_parquet(Path(path))

    def to_csv(self, path: str | Path) -> None:
        """Write the table as CSV, columns by name; gzip if the name ends in .gz."""
        from headway.workload import files

        files.to_csv(self, Path(path))

    @staticmethod
    def from_csv(path: str | Path) -> Workload:
        """Read what `to_csv` wrote."""
        from headway.workload.readers.read import read

        return read(path, "headway-csv")


def concat(parts: Sequence[Workload]) -> Workload:
    """The rows of all parts, one after the other, as they stand (arrivals are not shifted)."""
    if not parts:
        raise HeadwayError("concat: no workloads given")
    names = list(dict.fromkeys(n for part in parts for n in part.columns))
    models = _merged([p.models if "model" in p.columns else ("",) for p in parts])
    regions = _merged([p.regions if "region" in p.columns else ("",) for p in parts])
    recoded = [_recoded(_recoded(p, "model", models), "region", regions) for p in parts]
    prefix = _concat_prefix(parts) if any(p.prefix is not None for p in parts) else None
    notes = tuple(dict.fromkeys(n for p in parts for n in p.notes))
    columns = {n: np.concatenate([p.column(n) for p in recoded]) for n in names}
    return Workload(columns, models, regions, prefix, notes)


def _merged(names: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    merged = tuple(dict.fromkeys(chain.from_iterable(names)))
    return () if merged == ("",) else merged


def _recoded(part: Workload, column: str, names: tuple[str, ...]) -> Workload:
    """The part with `column`'s codes pointing into `names`."""
    if not names:
        return part
    own = part.models if column == "model" else part.regions
    if column not in part.columns:
        return part.with_columns({column: np.full(len(part), names.index(""), "i2")})
    codes = np.array([names.index(n) for n in own] or [0], "i2")
    return part.with_columns({column: codes[part.columns[column].astype("i8")]})


def _concat_prefix(parts: Sequence[Workload]) -> Prefix:
    held = [p.prefix if p.prefix is not None else no_prefix(len(p)) for p in parts]
    counts = np.concatenate([np.diff(p.offsets) for p in held])
    return Prefix(
        np.concatenate(([0], np.cumsum(counts))).astype("i8"),
        np.concatenate([p.ids for p in held]),
        np.concatenate([p.tokens for p in held]),
    )
