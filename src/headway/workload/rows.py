"""From columns to requests: a chunk at a time, at C speed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise, repeat
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from headway.core.request import Segment

if TYPE_CHECKING:
    from headway.workload.table import Workload

CHUNK_ROWS = 8192
LENGTH = "output_tokens:"

FIELDS = (
    "id", "arrival_s", "prompt_tokens", "output_tokens", "model", "tier", "reasoning_tokens", "region",
    "session_id", "prefix", "output_id", "slo_ttft_s", "slo_tpot_s", "slo_e2e_s", "deadline_s", "timeout_s",
    "quality", "lengths",
)  # fmt: skip
"""The fields of `core.request.Request`, in its order."""

DEFAULTS: dict[str, Any] = {
    "model": "", "tier": 0, "reasoning_tokens": 0, "region": "", "prefix": (), "quality": (), "lengths": (),
}  # fmt: skip


def present_fields(workload: Workload) -> tuple[str, ...]:
    """`FIELDS` up to the last one that the table says something about."""
    held = {"id", *workload.columns}
    if workload.prefix is not None:
        held.add("prefix")
    if workload.quality_models:
        held.add("quality")
    if workload.length_models:
        held.add("lengths")
    last = max(i for i, name in enumerate(FIELDS) if name in held)
    return FIELDS[: last + 1]


def chunks(workload: Workload, start: int, stop: int) -> Iterator[list[Iterable[Any]]]:
    """For each chunk of rows, its fields: one iterable each, the first (ids) of the chunk's length."""
    names = present_fields(workload)
    for a in range(start, stop, CHUNK_ROWS):
        b = min(a + CHUNK_ROWS, stop)
        yield [range(a, b), *(_values(workload, name, a, b) for name in names[1:])]


def _values(workload: Workload, name: str, a: int, b: int) -> Any:
    if name == "prefix" and workload.prefix is not None:
        return _segments(workload, a, b)
    if name == "quality" and workload.quality_models:
        return _quality(workload, a, b)
    if name == "lengths" and workload.length_models:
        return _lengths(workload, a, b)
    column = workload.columns.get(name)
    if column is None:
        return repeat(DEFAULTS.get(name))
    part: npt.NDArray[Any] = column[a:b]
    if name == "model" or name == "region":
        names = workload.models if name == "model" else workload.regions
        return [names[code] for code in part.tolist()]
    if name.endswith("_id"):
        return _none_where(part, part < 0)
    if name.endswith("_s") and name != "arrival_s":
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


def _quality(workload: Workload, a: int, b: int) -> list[tuple[tuple[str, float], ...]]:
    models = workload.quality_models
    scores = np.stack([workload.columns[f"quality:{m}"][a:b] for m in models], axis=1).tolist()
    # A score that is NaN (not itself) is unknown, and left out.
    return [tuple((m, s) for m, s in zip(models, row, strict=True) if s == s) for row in scores]


def _lengths(workload: Workload, a: int, b: int) -> list[tuple[tuple[str, int], ...]]:
    models = workload.length_models
    tokens = np.stack([workload.columns[f"{LENGTH}{m}"][a:b] for m in models], axis=1).tolist()
    return [tuple((m, n) for m, n in zip(models, row, strict=True) if n >= 0) for row in tokens]
