"""Whether a table of requests makes sense, row by row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from headway.core.errors import HeadwayError

if TYPE_CHECKING:
    from headway.workload.table import Workload

MAX_TOKENS = 10_000_000
"""More than any model's context: a longer prompt or output is a mistake in the file."""


def validate(workload: Workload, where: str = "") -> None:
    """HeadwayError for the first row that cannot be: it names `where`, the row (from 0) and the column."""
    _arrivals(workload, where)
    _tokens(workload, where)
    _seconds(workload, where)
    _codes(workload, where)
    if workload.prefix is not None:
        _prefixes(workload, where)


def _require(good: npt.NDArray[np.bool_], column: str, values: npt.NDArray[Any], expected: str, where: str) -> None:
    if bool(good.all()):
        return
    row = int(np.argmin(good))
    prefix = f"{where}: " if where else ""
    raise HeadwayError(f"{prefix}row {row}, column {column}: {values[row]}; expected {expected}")


def _arrivals(workload: Workload, where: str) -> None:
    arrival_s = workload.arrival_s
    good = np.isfinite(arrival_s) & (arrival_s >= 0)
    _require(good, "arrival_s", arrival_s, "seconds from 0", where)
    if len(arrival_s) > 1:
        good = np.concatenate(([True], np.diff(arrival_s) >= 0))
        expected = "a time not before that of the row above; say sort=True (--sort) to sort by arrival"
        _require(good, "arrival_s", arrival_s, expected, where)


def _tokens(workload: Workload, where: str) -> None:
    for name in ("prompt_tokens", "output_tokens"):
        tokens = workload.columns[name]
        _require((tokens >= 1) & (tokens <= MAX_TOKENS), name, tokens, f"1 to {MAX_TOKENS:,}", where)
    reasoning = workload.columns.get("reasoning_tokens")
    if reasoning is not None:
        good = (reasoning >= 0) & (reasoning <= workload.output_tokens)
        _require(good, "reasoning_tokens", reasoning, "0 to the row's output_tokens", where)


def _seconds(workload: Workload, where: str) -> None:
    for name in ("slo_ttft_s", "slo_tpot_s", "slo_e2e_s", "timeout_s"):
        column = workload.columns.get(name)
        if column is not None:
            good = np.isnan(column) | (np.isfinite(column) & (column > 0))
            _require(good, name, column, "seconds above 0, or nothing", where)
    deadline_s = workload.columns.get("deadline_s")
    if deadline_s is not None:
        good = np.isnan(deadline_s) | (np.isfinite(deadline_s) & (deadline_s >= workload.arrival_s))
        _require(good, "deadline_s", deadline_s, "a time not before the row's arrival_s, or nothing", where)
    for model in workload.quality_models:
        name = f"quality:{model}"
        column = workload.columns[name]
        _require(~np.isinf(column), name, column, "a number, or nothing", where)
    for model in workload.length_models:
        name = f"output_tokens:{model}"
        column = workload.columns[name]
        _require((column == -1) | (column >= 1), name, column, "tokens from 1, or -1 for none", where)


def _codes(workload: Workload, where: str) -> None:
    tier = workload.columns.get("tier")
    if tier is not None:
        _require(tier >= 0, "tier", tier, "0 (most urgent) or more", where)
    for name, names in (("model", workload.models), ("region", workload.regions)):
        codes = workload.columns.get(name)
        if codes is not None:
            _require((codes >= 0) & (codes < len(names)), name, codes, f"a code below {len(names)}", where)
    for name in ("session_id", "output_id"):
        ids = workload.columns.get(name)
        if ids is not None:
            _require(ids >= -1, name, ids, "an id from 0, or -1 for none", where)


def _prefixes(workload: Workload, where: str) -> None:
    prefix = workload.prefix
    assert prefix is not None
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
