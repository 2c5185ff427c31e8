"""Our own CSV: columns named as in the workload table, an empty cell = none. It may lack `arrival_s`.

`model` and `region` are names; `prefix` is `id:tokens` pairs separated by spaces.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import numpy as np
from msgspec import structs

from headway.core.errors import HeadwayError, unknown
from headway.workload.readers import kinds
from headway.workload.readers.blocks import first_line
from headway.workload.readers.csvtable import CsvTable, header_of, read_table
from headway.workload.readers.finish import NO_ARRIVALS
from headway.workload.readers.kinds import Kind
from headway.workload.readers.options import Options
from headway.workload.table import DTYPES, QUALITY, Prefix, Workload, is_column

LENGTHS = ("prompt_tokens", "output_tokens")
KINDS: dict[str, Kind] = {
    "arrival_s": kinds.SECONDS,
    "prompt_tokens": kinds.TOKENS,
    "output_tokens": kinds.TOKENS,
    "reasoning_tokens": kinds.TOKENS,
    "model": kinds.TEXT,
    "region": kinds.TEXT,
    "prefix": kinds.TEXT,
    "tier": kinds.SMALL,
    "session_id": kinds.ID,
    "output_id": kinds.ID,
}


def matches(line: str) -> bool:
    """By its header."""
    return set(LENGTHS) <= set(header_of(line))


def read(path: Path, options: Options) -> Workload:
    """The table, checked."""
    header = header_of(first_line(path))
    for name in header:
        if name != "prefix" and not is_column(name):
            raise unknown("column", name, [*DTYPES, "prefix", f"{QUALITY}MODEL"], f"{path}: line 1")
    timed = "arrival_s" in header
    columns = {name: KINDS.get(name, kinds.OPTIONAL) for name in [*LENGTHS, *header]}
    table = read_table(path, columns, "arrival_s", structs.replace(options, sort=options.sort or not timed))
    codes = table.columns.pop("prefix", None)
    workload = Workload(
        {"arrival_s": np.zeros(len(table)), **table.columns},
        table.names.get("model", ()),
        table.names.get("region", ()),
        None if codes is None else _prefix(path, table, codes.tolist()),
        tuple(table.notes) if timed else (*table.notes, NO_ARRIVALS),
    )
    return (workload.sorted() if options.sort else workload).validate(str(path))


def _prefix(path: Path, table: CsvTable, codes: Iterable[int]) -> Prefix:
    parsed = [_segments(path, text) for text in table.names["prefix"]]
    rows = [parsed[code] for code in codes]
    pairs = np.array([pair for row in rows for pair in row], "i8").reshape(-1, 2)
    offsets = np.concatenate(([0], np.cumsum([len(row) for row in rows]))).astype("i8")
    return Prefix(offsets, pairs[:, 0].copy(), pairs[:, 1].astype("i4"))


def _segments(path: Path, text: str) -> list[tuple[int, int]]:
    try:
        return [(int(i), int(t)) for i, t in (pair.split(":") for pair in text.split())]
    except ValueError:
        raise HeadwayError(f"{path}: column prefix: {text!r}; expected id:tokens pairs, as in 7:512 8:40") from None


def prefix_text(workload: Workload) -> list[str] | None:
    """The column as it is written."""
    prefix = workload.prefix
    if prefix is None:
        return None
    pairs = [f"{i}:{t}" for i, t in zip(prefix.ids.tolist(), prefix.tokens.tolist(), strict=True)]
    ends = prefix.offsets.tolist()
    return [" ".join(pairs[a:b]) for a, b in pairwise(ends)]
