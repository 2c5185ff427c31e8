"""The workload as a table with one column per property and one row per request. Ten million rows fit in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise, repeat
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from headway.core.errors import HeadwayError, unknown
from headway.core.request import Request, Segment
from headway.workload.spill import BLOCK_ROWS, LONG_ROWS, taken

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
    "tenant": "i2",
    "acceptance": "f8",
    "lora": "i2",
}
"""NumPy types of the columns, in the order of `core.request.Request`.

A table may also have a prefix and the columns `quality:MODEL` (f8) and `output_tokens:MODEL` (i4; -1 = the value of
`output_tokens`).
"""

REQUIRED = ("arrival_s", "prompt_tokens", "output_tokens")
QUALITY, LENGTH = "quality:", "output_tokens:"
NAMED = {"model": "models", "region": "regions", "tenant": "tenants", "lora": "loras"}
"""Columns of codes -> the attribute of `Workload` with the names that the codes stand for."""
MAX_TOKENS = 10_000_000
"""The longest prompt or output allowed. It exceeds every model's context, so a larger value is a mistake in a file."""
FIRST_ROWS, CHUNK_ROWS = 32, 8192
KEPT_ROWS = 4096
"""A table of at most so many rows keeps their tuples."""

FIELDS = Request.__struct_fields__
FIELD_DEFAULTS = dict(zip(FIELDS[::-1], Request.__struct_defaults__[::-1], strict=False))
FIELD_PREFIXES = {"quality": QUALITY, "lengths": LENGTH}
"""Fields of `Request` with a value for each model, and the prefix of their column names."""


def default_of(name: str) -> float | int:
    """The value of an absent column: NaN or -1 for none, or code 0, which is the name ""."""
    if name.endswith("_s") or name.startswith(QUALITY) or name == "acceptance":
        return float("nan")
    return -1 if name.endswith("_id") or name.startswith(LENGTH) else 0


def dtype_of(name: str) -> str:
    return DTYPES.get(name, "i4" if name.startswith(LENGTH) else "f8")


def is_column(name: str) -> bool:
    """Whether a table may hold a column of this name."""
    return name in DTYPES or name.startswith((QUALITY, LENGTH))


@dataclass(frozen=True, eq=False)
class Prefix:
    """Prompt segments with a content id, as ragged rows: row i owns segments `offsets[i]:offsets[i + 1]`."""

    offsets: Longs
    ids: Longs
    tokens: Ints

    def __getitem__(self, part: slice) -> Prefix:
        start, stop, _ = part.indices(len(self.offsets) - 1)
        bounds = self.offsets[start : max(start, stop) + 1]
        held = slice(int(bounds[0]), int(bounds[-1]))
        return Prefix(bounds - bounds[0], self.ids[held], self.tokens[held])

    def take(self, index: Longs) -> Prefix:
        """The segments of the given rows, in the given order."""
        counts = np.diff(self.offsets)[index]
        offsets = np.concatenate(([0], np.cumsum(counts)))
        at = np.arange(offsets[-1]) + np.repeat(self.offsets[index] - offsets[:-1], counts)
        return Prefix(offsets, self.ids[at], self.tokens[at])


@dataclass(frozen=True, eq=False)
class Workload:
    """Requests as columns. `columns` holds all of `REQUIRED` and any of `DTYPES` and `quality:MODEL`.

    `arrival_s` counts from 0 and does not fall. `output_tokens` includes `reasoning_tokens`. A missing column has its
    default: tier 0, no session (-1), no SLO (NaN). `model`, `region`, `tenant` and `lora` are codes into `models`,
    `regions`, `tenants` and `loras`. `deadline_s` is absolute. `notes` list what a reader skipped or assumed. Slices
    share arrays: do not write to them.
    """

    columns: dict[str, npt.NDArray[Any]]
    models: tuple[str, ...] = ()
    regions: tuple[str, ...] = ()
    prefix: Prefix | None = None
    notes: tuple[str, ...] = field(default=())
    tenants: tuple[str, ...] = ()
    loras: tuple[str, ...] = ()
    _known: dict[str, Any] = field(default_factory=dict, init=False, repr=False)
    """What was computed of the rows, which copies share: planners simulate the same rows many times."""

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
        return self.columns["arrival_s"]

    @property
    def prompt_tokens(self) -> Ints:
        return self.columns["prompt_tokens"]

    @property
    def output_tokens(self) -> Ints:
        return self.columns["output_tokens"]

    def column(self, name: str) -> npt.NDArray[Any]:
        """A column, or an array of its default if the table does not have it."""
        if name in self.columns:
            return self.columns[name]
        if not is_column(name):
            raise unknown("workload column", name, [*DTYPES, f"{QUALITY}MODEL"])
        return np.full(len(self), default_of(name), dtype_of(name))

    def names(self, column: str) -> tuple[str, ...]:
        """The names for the codes of a column in `NAMED`."""
        names: tuple[str, ...] = getattr(self, NAMED[column])
        return names

    def _columns_of(self, prefix: str) -> list[str]:
        """The columns with a value for each model: `prefix` is `QUALITY` or `LENGTH`."""
        return [name for name in self.columns if name.startswith(prefix)]

    def slice(self, start: int, stop: int) -> Workload:
        """Rows `start` to `stop`, as array views."""
        prefix = None if self.prefix is None else self.prefix[start:stop]
        return replace(self, columns={n: c[start:stop] for n, c in self.columns.items()}, prefix=prefix)

    def head(self, num_rows: int) -> Workload:
        return self if num_rows >= len(self) else self.slice(0, num_rows)

    def take(self, index: npt.NDArray[Any]) -> Workload:
        """The rows at these positions in this order, or the rows that a boolean mask selects."""
        at = np.flatnonzero(index) if index.dtype == np.bool_ else index.astype("i8", copy=False)
        prefix = None if self.prefix is None else self.prefix.take(at)
        return replace(self, columns={n: taken(c, at) for n, c in self.columns.items()}, prefix=prefix)

    def of_model(self, model: str) -> tuple[Workload, list[int]]:
        """The rows with requests for a model, and their positions."""
        key = f"model {model}"
        if key not in self._known:
            at = np.flatnonzero(self.columns["model"] == self.models.index(model))
            self._known[key] = self.take(at), at.tolist()
        found: tuple[Workload, list[int]] = self._known[key]
        return found

    def copy(self) -> Workload:
        """The same rows in a dictionary of its own."""
        same = object.__new__(Workload)
        same.__dict__.update(self.__dict__, columns=dict(self.columns))
        return same

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_known": {}}

    def with_columns(self, new: Mapping[str, npt.ArrayLike | None]) -> Workload:
        """A copy with columns added or replaced. A value of None drops the column."""
        columns = {**self.columns, **{n: np.asarray(c) for n, c in new.items() if c is not None}}
        return replace(self, columns={n: c for n, c in columns.items() if new.get(n, c) is not None})

    def with_notes(self, *notes: str) -> Workload:
        return replace(self, notes=self.notes + notes)

    def sorted(self) -> Workload:
        """Rows in order of arrival. Rows with equal arrival times keep their order."""
        if bool(np.all(np.diff(self.arrival_s) >= 0)):
            return self
        return self.take(np.argsort(self.arrival_s, kind="stable"))

    def validate(self, where: str = "", first: int = 0) -> Workload:
        """Return the table itself if every row is valid.

        HeadwayError names `where`, the first bad row (counted from `first`) and the column.
        """
        num = len(self)
        if "is valid" in self._known:
            return self
        if num > LONG_ROWS and self.prefix is None:
            for start in range(0, num, BLOCK_ROWS):
                # with the row before, whose arrival may not be later
                before = min(start, 1)
                self.slice(start - before, start + BLOCK_ROWS).validate(where, start - before)
            return self
        for key, (is_valid, expected) in CHECKS:
            for name in self._columns_of(key) if key.endswith(":") else [key] * (key in self.columns):
                _require(is_valid(self.columns[name], self), name, self.columns[name], expected, where, first)
        for name in NAMED:
            codes, names = self.columns.get(name), self.names(name)
            if codes is not None:
                _require((codes >= 0) & (codes < len(names)), name, codes, f"a code below {len(names)}", where, first)
        if self.prefix is not None:
            _check_prefix(self, self.prefix, where)
        self._known["is valid"] = True
        return self

    def tuples(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[Any, ...]]:
        """The fields of each row in `Request`'s order, without trailing defaults."""
        if start > 0 or stop is not None or len(self) > KEPT_ROWS:
            return self._tuples(start, stop)
        if "tuples" not in self._known:
            self._known["tuples"] = list(self._tuples(0, None))
        return iter(self._known["tuples"])

    def _tuples(self, start: int, stop: int | None) -> Iterator[tuple[Any, ...]]:
        names = _present_fields(self)
        end = len(self) if stop is None else min(stop, len(self))
        a, num_rows = start, FIRST_ROWS
        while a < end:
            b = min(a + num_rows, end)
            # Constant fields repeat without end; the ids end the rows.
            yield from zip(range(a, b), *(_field_values(self, name, a, b) for name in names[1:]), strict=False)
            a, num_rows = b, min(8 * num_rows, CHUNK_ROWS)


def constant(num: int, value: float) -> Floats:
    """A column of `num` equal values."""
    return np.full(num, value) if num <= LONG_ROWS else np.broadcast_to(np.float64(value), num)


def concat(parts: Sequence[Workload]) -> Workload:
    """Concatenate the rows of all parts in order. Arrival times are not shifted."""
    if not parts:
        raise HeadwayError("concat: no workloads given")
    names = list(dict.fromkeys(n for part in parts for n in part.columns))
    named = {c: _merged([p.names(c) if c in p.columns else ("",) for p in parts]) for c in NAMED}
    recoded = list(parts)
    for column, merged in named.items():
        recoded = [_recoded(part, column, merged) for part in recoded]
    prefix = _concat_prefix(parts) if any(p.prefix is not None for p in parts) else None
    notes = tuple(dict.fromkeys(n for p in parts for n in p.notes))
    columns = {n: np.concatenate([p.column(n) for p in recoded]) for n in names}
    return Workload(columns, prefix=prefix, notes=notes, **{NAMED[c]: merged for c, merged in named.items()})


def _merged(names: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    merged = tuple(dict.fromkeys(chain.from_iterable(names)))
    return () if merged == ("",) else merged


def _recoded(part: Workload, column: str, names: tuple[str, ...]) -> Workload:
    """Renumber the codes of `column` so that they index `names`."""
    if not names:
        return part
    own = part.names(column)
    if column not in part.columns:
        return part.with_columns({column: np.full(len(part), names.index(""), "i2")})
    codes = np.array([names.index(n) for n in own] or [0], "i2")
    return part.with_columns({column: codes[part.columns[column].astype("i8")]})


def _concat_prefix(parts: Sequence[Workload]) -> Prefix:
    counts = [np.zeros(len(p), "i8") if p.prefix is None else np.diff(p.prefix.offsets) for p in parts]
    held = [p.prefix for p in parts if p.prefix is not None]
    return Prefix(
        np.concatenate(([0], np.cumsum(np.concatenate(counts)))).astype("i8"),
        np.concatenate([p.ids for p in held]),
        np.concatenate([p.tokens for p in held]),
    )


def _present_fields(workload: Workload) -> tuple[str, ...]:
    """The fields from the start of `FIELDS` up to the last field for which the table has a column."""
    present = {"id", *workload.columns}
    if workload.prefix is not None:
        present.add("prefix")
    present |= {field for field, prefix in FIELD_PREFIXES.items() if workload._columns_of(prefix)}
    last = max(i for i, name in enumerate(FIELDS) if name in present)
    return FIELDS[: last + 1]


def _field_values(workload: Workload, name: str, a: int, b: int) -> Any:
    if name == "prefix" and workload.prefix is not None:
        return _segments(workload, a, b)
    if name in FIELD_PREFIXES and workload._columns_of(FIELD_PREFIXES[name]):
        return _pairs_by_model(workload, FIELD_PREFIXES[name], a, b)
    column = workload.columns.get(name)
    if column is None:
        return repeat(FIELD_DEFAULTS.get(name))
    part: npt.NDArray[Any] = column[a:b]
    if name in NAMED:
        names = workload.names(name)
        return [names[code] for code in part.tolist()]
    if name.endswith("_id"):
        return _none_where(part, part < 0)
    if (name.endswith("_s") and name != "arrival_s") or name == "acceptance":
        return _none_where(part, np.isnan(part))
    return part.tolist()


def _none_where(part: npt.NDArray[Any], absent: npt.NDArray[np.bool_]) -> Any:
    if not absent.any():
        return part.tolist()
    if absent.all():
        return repeat(None)
    values = part.astype(object)
    values[absent] = None
    return values.tolist()


def _segments(workload: Workload, a: int, b: int) -> list[tuple[Segment, ...]]:
    prefix = workload.prefix
    assert prefix is not None
    bounds = prefix.offsets[a : b + 1]
    first = int(bounds[0])
    held = slice(first, int(bounds[-1]))
    segments = list(map(Segment, prefix.ids[held].tolist(), prefix.tokens[held].tolist()))
    ends = (bounds - first).tolist()
    return [tuple(segments[i:j]) for i, j in pairwise(ends)]


def _pairs_by_model(workload: Workload, prefix: str, a: int, b: int) -> list[tuple[tuple[str, Any], ...]]:
    """(model, value) pairs of each row, without the models that have no value."""
    columns = {name.removeprefix(prefix): workload.columns[name][a:b] for name in workload._columns_of(prefix)}
    rows = np.stack(list(columns.values()), axis=1).tolist()
    absent = default_of(prefix)
    # NaN, which is not equal to itself, marks an unknown score.
    return [tuple((m, v) for m, v in zip(columns, row, strict=True) if v == v and v != absent) for row in rows]


def _require(
    good: npt.NDArray[np.bool_], column: str, values: npt.NDArray[Any], expected: str, where: str, first: int = 0
) -> None:
    if bool(good.all()):
        return
    row = int(np.argmin(good))
    prefix = f"{where}: " if where else ""
    raise HeadwayError(f"{prefix}row {first + row}, column {column}: {values[row]}; expected {expected}")


def _is_none_or_positive(seconds: npt.NDArray[Any], _: Workload) -> npt.NDArray[np.bool_]:
    return np.asarray(np.isnan(seconds) | (np.isfinite(seconds) & (seconds > 0)))


_Check = tuple[Callable[[npt.NDArray[Any], Workload], npt.NDArray[np.bool_]], str]
_TOKENS: _Check = (lambda tokens, _: (tokens >= 1) & (tokens <= MAX_TOKENS), f"1 to {MAX_TOKENS:,}")
_SECONDS: _Check = (_is_none_or_positive, "seconds above 0, or nothing")
_ID: _Check = (lambda ids, _: ids >= -1, "an id from 0, or -1 for none")
CHECKS: tuple[tuple[str, _Check], ...] = (
    ("arrival_s", (lambda at_s, _: np.isfinite(at_s) & (at_s >= 0), "seconds from 0")),
    (
        "arrival_s",
        (
            lambda at_s, _: np.diff(at_s, prepend=at_s[:1]) >= 0,
            "a time not before that of the row above; say sort=True (--sort) to sort by arrival",
        ),
    ),
    ("prompt_tokens", _TOKENS),
    ("output_tokens", _TOKENS),
    (
        "reasoning_tokens",
        (
            lambda tokens, w: (tokens >= 0) & (tokens <= w.output_tokens),
            "0 to the row's output_tokens",
        ),
    ),
    ("slo_ttft_s", _SECONDS),
    ("slo_tpot_s", _SECONDS),
    ("slo_e2e_s", _SECONDS),
    ("timeout_s", _SECONDS),
    (
        "deadline_s",
        (
            lambda at_s, w: np.isnan(at_s) | (np.isfinite(at_s) & (at_s >= w.arrival_s)),
            "a time not before the row's arrival_s, or nothing",
        ),
    ),
    (QUALITY, (lambda scores, _: ~np.isinf(scores), "a number, or nothing")),
    (LENGTH, (lambda tokens, _: (tokens == -1) | (tokens >= 1), "tokens from 1, or -1 for none")),
    ("tier", (lambda tiers, _: tiers >= 0, "0 (most urgent) or more")),
    ("session_id", _ID),
    ("output_id", _ID),
    ("acceptance", (lambda rates, _: np.isnan(rates) | ((rates >= 0) & (rates <= 1)), "0 to 1, or nothing")),
)
"""Maps each column or column prefix to a test for valid values, and the text of what is expected."""


def _check_prefix(workload: Workload, prefix: Prefix, where: str) -> None:
    if len(prefix.ids) != len(prefix.tokens) or int(prefix.offsets[-1]) != len(prefix.ids):
        raise HeadwayError(f"{where}: the prefix columns differ in length".lstrip(": "))
    row_of = np.repeat(np.arange(len(workload)), np.diff(prefix.offsets))
    positive = np.ones(len(workload), np.bool_)
    positive[row_of[prefix.tokens < 1]] = False
    least = np.zeros(len(workload), "i8")
    np.minimum.at(least, row_of, prefix.tokens)
    _require(positive, "prefix", least, "segments of 1 token or more", where)
    sums = np.concatenate(([0], np.cumsum(prefix.tokens, dtype="i8")))
    held = sums[prefix.offsets[1:]] - sums[prefix.offsets[:-1]]
    expected = "no more tokens in the prefix than in prompt_tokens"
    _require(held <= workload.prompt_tokens, "prefix", held, expected, where)
