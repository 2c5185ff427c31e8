"""Latencies of requests, one array element each, and SLO attainment."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from headway.core.errors import HeadwayError
from headway.core.pacer import Pacer
from headway.core.record import NUM_SEQUENCES, REFUSED, Outcome, Records
from headway.metrics.columns import Floats, Integers, Mask, Rows, floats, integers, ints
from headway.metrics.gaps import (
    Codes,
    GapHistogram,
    GapRuns,
    Gaps,
    QuantileReader,
    SmallSamples,
    single_gaps,
    sums_by_part,
)
from headway.metrics.qoe import Phases, phases

QUANTILES = (0.5, 0.9, 0.95, 0.99, 1.0)
"""The quantiles of `Distribution`, in order."""
BLOCK_ROWS = 1 << 18
"""Requests whose latencies are computed at once."""
SloKind = Literal["ttft", "tpot", "e2e"]
SLO_KINDS: tuple[SloKind, ...] = ("ttft", "tpot", "e2e")


class Distribution(Struct, frozen=True):
    """Distribution of one latency, in seconds. Percentiles interpolate linearly between order statistics."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


class DefaultSlo(Struct, frozen=True, forbid_unknown_fields=True):
    """SLOs of requests without their own. None = no SLO."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    program_s: float | None = None
    """SLO of whole agent programs, or sessions: from the first arrival to the last token. If set, runs have program
    metrics."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The measured requests. Properties are arrays with one element per request, computed on access; NaN = never."""

    records: Records
    rows: Rows | slice
    """Rows of `records.requests`."""
    slo: DefaultSlo
    """SLOs of requests without their own."""
    phases: Phases | None
    """Latencies of reasoning and answering; None if no request reasons, or phases were not requested."""

    def __len__(self) -> int:
        is_slice = isinstance(self.rows, slice)
        return len(self.records.requests["request"][self.rows] if is_slice else self.rows)  # type: ignore[arg-type]

    def subset(self, rows: Rows | slice) -> Sample:
        own = rows if isinstance(self.rows, slice) else self.rows[rows]
        return Sample(self.records, own, self.slo, None if self.phases is None else self.phases[rows])

    def blocks(self) -> Sequence[Sample]:
        """Consecutive parts of at most `BLOCK_ROWS` requests; bounds the memory of computed columns."""
        num = len(self)
        if num <= BLOCK_ROWS:
            return (self,)
        return [self.subset(slice(low, low + BLOCK_ROWS)) for low in range(0, num, BLOCK_ROWS)]

    def column(self, name: str) -> Integers:
        """The sample's part of a column of `Records.requests`."""
        return integers(self.records.requests, name, self.rows)

    def distribution(self, name: str) -> Distribution | None:
        """The distribution of a latency: a property of the sample, or of its phases."""
        if len(self) <= BLOCK_ROWS:
            return distribution(getattr(self if name in _LATENCIES else self.phases, name))
        parts = self.blocks()
        return blocks_distribution(
            lambda: (getattr(each if name in _LATENCIES else each.phases, name) for each in parts)
        )

    @property
    def refused(self) -> Integers | None:
        """Code of the limit that denied each request, 0 if none did; None unless tenants have limits."""
        return self.column(REFUSED) if REFUSED in self.records.requests else None

    @property
    def attained(self) -> dict[str, tuple[Mask, Mask]]:
        """Masks (has this SLO, met it) of the measured requests by kind of SLO (`slo_masks`)."""
        return slo_masks(self)

    @property
    def id(self) -> Integers:
        """Request ids, which are rows of the workload table."""
        return self.column("request")

    @property
    def finished(self) -> Mask:
        return np.asarray(self.column("outcome") == Outcome.FINISHED)

    @property
    def prompt_tokens(self) -> Integers:
        return integers(self.records.workload, "prompt_tokens", self.id)

    @property
    def ttft_s(self) -> Floats:
        return self._since_arrival_s("first_token_s")

    @property
    def answer_s(self) -> Floats:
        """Seconds from arrival to the first answering token, for reasoning requests."""
        workload = self.records.workload
        if "reasoning_tokens" not in workload:
            return _no_values(len(self))
        reasons = integers(workload, "reasoning_tokens", self.id) > 0
        return np.where(reasons, self._since_arrival_s("answer_s"), np.nan)

    @property
    def tpot_s(self) -> Floats:
        """Mean time between the tokens of a sequence, for finished requests with several tokens."""
        generated: npt.NDArray[Any] = self.column("generated_tokens")
        if NUM_SEQUENCES in self.records.requests:
            generated = generated / np.maximum(self.column(NUM_SEQUENCES), 1)
        table = self.records.requests
        values_s = floats(table, "end_s", self.rows) - floats(table, "first_token_s", self.rows)
        np.divide(values_s, generated - 1, out=values_s, where=generated > 1)
        values_s[~(self.finished & (generated > 1))] = np.nan
        return values_s

    @property
    def e2e_s(self) -> Floats:
        """Seconds from arrival to end, for finished requests."""
        values_s = self._since_arrival_s("end_s")
        values_s[~self.finished] = np.nan
        return values_s

    @property
    def queueing_s(self) -> Floats:
        return self._since_arrival_s("admitted_s")

    def slo_s(self, kind: SloKind) -> Floats:
        """A request's own SLO (for E2E, its deadline as the second choice), otherwise the default. NaN = no SLO."""
        workload, ids, name = self.records.workload, self.id, f"slo_{kind}_s"
        own = floats(workload, name, ids) if name in workload else _no_values(len(self))
        if kind == "e2e" and "deadline_s" in workload:
            own = np.where(np.isnan(own), floats(workload, "deadline_s", ids) - floats(workload, "arrival_s", ids), own)
        default_s = getattr(self.slo, f"{kind}_s")
        return own if default_s is None else np.where(np.isnan(own), default_s, own)

    def _since_arrival_s(self, name: str) -> Floats:
        values_s = floats(self.records.workload, "arrival_s", self.id)
        return np.subtract(floats(self.records.requests, name, self.rows), values_s, out=values_s)


class ComputedSample:
    """A `Sample` whose columns and latencies are computed once, for reading many small parts of it."""

    __slots__ = ("_columns", "_distributions", "answer_s", "attained", "e2e_s", "phases", "prompt_tokens", "queueing_s",
                 "refused", "tpot_s", "ttft_s")  # fmt: skip

    def __init__(self, chosen: Sample | ComputedSample, columns: dict[str, Integers], rows: slice) -> None:
        self._columns = columns
        self._distributions: dict[str, Distribution | None] = {}
        self.phases: Phases | None = None if chosen.phases is None else chosen.phases[rows]
        self.prompt_tokens: Integers = chosen.prompt_tokens[rows]
        self.ttft_s: Floats = chosen.ttft_s[rows]
        self.answer_s: Floats = chosen.answer_s[rows]
        self.tpot_s: Floats = chosen.tpot_s[rows]
        self.e2e_s: Floats = chosen.e2e_s[rows]
        self.queueing_s: Floats = chosen.queueing_s[rows]
        refused, attained = chosen.refused, chosen.attained
        self.refused: Integers | None = None if refused is None else refused[rows]
        self.attained: dict[str, tuple[Mask, Mask]] = {
            kind: (has[rows], met[rows]) for kind, (has, met) in attained.items()
        }

    @classmethod
    def of(cls, chosen: Sample) -> ComputedSample:
        return cls(chosen, {name: chosen.column(name) for name in _COUNTED}, slice(None))

    def parts(self, ends: Sequence[int]) -> Iterator[ComputedSample]:
        """The consecutive parts that end before these rows. Their distributions are computed at once."""
        latencies = {name: getattr(self, name) for name in _LATENCIES}
        if self.phases is not None:
            latencies |= {name: getattr(self.phases, name) for name in ("reasoning_s", "ttfat_s", "blocking_s")}
        found = {name: distributions(values, ends) for name, values in latencies.items()}
        for i, end in enumerate(ends):
            rows = slice(ends[i - 1] if i else 0, end)
            part = ComputedSample(self, {name: column[rows] for name, column in self._columns.items()}, rows)
            part._distributions = {name: of_parts[i] for name, of_parts in found.items()}
            yield part

    def distribution(self, name: str) -> Distribution | None:
        """See `Sample.distribution`; only for `parts`."""
        return self._distributions[name]

    def blocks(self) -> Sequence[ComputedSample]:
        """See `Sample.blocks`."""
        return (self,)

    def __len__(self) -> int:
        return len(self.ttft_s)

    def column(self, name: str) -> Integers:
        """A column of the measured requests, one of `_COUNTED`."""
        return self._columns[name]


_COUNTED = ("outcome", "generated_tokens", "cached_prompt_tokens", "preemptions", "moves", "attempts")
"""Columns from which request metrics are counted."""
_LATENCIES = ("ttft_s", "answer_s", "tpot_s", "e2e_s", "queueing_s")


def nothing_measured(arrival_s: npt.NDArray[Any], warmup_s: float) -> str:
    """The message for a run in which no request arrived after the warm-up."""
    if not len(arrival_s):
        return "nothing is measured: the workload has no requests"
    return (
        f"nothing is measured: all requests arrived in the first {arrival_s.max():.3g} s, within the warm-up of"
        f" {warmup_s:g} s (simulation.warmup_s, or --warmup-s)"
    )


def sample(
    records: Records, warmup_s: float, slo: DefaultSlo | None, pacer: Pacer | None = None, until_s: float = inf
) -> Sample:
    """The requests that arrived from `warmup_s` to `until_s`, with any outcome; with phases if a pacer is given.

    Raises HeadwayError for a negative or infinite warm-up.
    """
    if not 0.0 <= warmup_s < float("inf"):
        raise HeadwayError(f"warm-up is {warmup_s}; expected seconds, 0 or more")
    table = records.requests
    rows: Rows | slice = slice(None)
    if warmup_s > 0 or until_s < inf:
        arrival_s = floats(records.workload, "arrival_s", ints(table, "request"))
        rows = np.flatnonzero((arrival_s >= warmup_s) & (arrival_s <= until_s))
    computed = None
    if pacer and "reasoning_tokens" in records.workload:
        computed = phases(records, {name: column[rows] for name, column in table.items()}, pacer)
    return Sample(records, rows, slo or DefaultSlo(), computed)


def _no_values(size: int) -> Floats:
    """An array of NaN, which takes no memory if it is long."""
    return np.full(size, np.nan) if size < _FEW_VALUES else np.broadcast_to(np.nan, size)


def slo_ranges(chosen: Sample) -> dict[SloKind, tuple[float, float]]:
    """The smallest and the largest SLO over the requests that have one, in seconds, by kind."""
    found: dict[SloKind, tuple[float, float]] = {}
    for kind in SLO_KINDS:
        limits_s = chosen.slo_s(kind)
        if len(limits_s) and not np.isnan(limits_s).all():
            found[kind] = float(np.nanmin(limits_s)), float(np.nanmax(limits_s))
    return found


def slo_masks(chosen: Sample, factors: Mapping[str, float] | None = None) -> dict[str, tuple[Mask, Mask]]:
    """Masks (has this SLO, met it) by kind of SLO; `all` = all SLOs of the request.

    `factors` multiply the latencies of a kind, to show the attainment if predictions were off by these factors.

    A request that did not finish missed all its SLOs. A request with a single output token cannot miss a TPOT SLO. An
    answer that was not streamed is judged only by the SLO of its duration, because its TTFT and TPOT are unknown.
    """
    finished = chosen.finished
    is_unstreamed = finished & np.isnan(floats(chosen.records.requests, "first_token_s", chosen.rows))
    hides_some = bool(is_unstreamed.any())
    all_met, has_any = finished.copy(), np.zeros(len(finished), dtype=np.bool_)
    result: dict[str, tuple[Mask, Mask]] = {}
    for kind in SLO_KINDS:
        limit_s = chosen.slo_s(kind)
        has = ~np.isnan(limit_s)
        if hides_some and kind != "e2e":
            has &= ~is_unstreamed
        most_s = limit_s if factors is None else limit_s / factors.get(kind, 1.0)
        ok = _within(chosen, kind, most_s) & finished & has if has.any() else has
        all_met &= ok | ~has
        has_any |= has
        result[kind] = (has, ok)
    result["all"] = (has_any, all_met & has_any)
    return result


def _within(chosen: Sample, kind: str, limit_s: Floats) -> Mask:
    actual_s = getattr(chosen, f"{kind}_s")
    if kind == "tpot":
        actual_s[np.isnan(actual_s)] = 0.0
    return np.asarray(actual_s <= limit_s)


def distribution(values: Floats) -> Distribution | None:
    """Distribution of the values that are not NaN; None if there are none."""
    values = values[~np.isnan(values)]
    if not len(values):
        return None
    mean = float(values.mean())  # before the values are reordered, which may change the rounding
    if len(values) > _FEW_VALUES:
        return Distribution(len(values), mean, *np.quantile(values, QUANTILES, overwrite_input=True).tolist())
    values.sort()
    return Distribution(len(values), mean, *(_interpolated(values, (len(values) - 1) * each) for each in QUANTILES))


def blocks_distribution(blocks: Callable[[], Iterable[Floats]]) -> Distribution | None:
    """The `distribution` of values that are read twice, a block at a time; bounds memory. The mean may round
    differently."""
    histogram = GapHistogram(map(_known_gaps, blocks()))
    if not histogram.total:
        return None
    reader = QuantileReader(histogram, QUANTILES)
    for values in blocks():
        reader.read(_known_gaps(values))
    return Distribution(histogram.total, histogram.mean_s, *reader.values_s().tolist())


def _known_gaps(values: Floats) -> GapRuns:
    return single_gaps(values[~np.isnan(values)])


def distributions(values: Floats, ends: Sequence[int]) -> list[Distribution | None]:
    """The `distribution` of each consecutive part that ends before a row of `ends`."""
    found: list[Distribution | None] = [None] * len(ends)
    part = np.searchsorted(ends, np.arange(len(values)), side="right")
    known = ~np.isnan(values)
    values, part = values[known], part[known]
    if not len(values):
        return found
    parts, sums = sums_by_part(values, part)
    counts = np.bincount(part)[parts]
    values = values[np.lexsort((values, part))]
    position = (counts[:, None] - 1) * np.array(QUANTILES)
    below = position.astype(np.int64)
    first, share = (np.cumsum(counts) - counts)[:, None], position - below
    low, high = values[first + below], values[first + np.minimum(below + 1, counts[:, None] - 1)]
    quantiles = np.where(share >= 0.5, high - (high - low) * (1 - share), low + (high - low) * share)
    rows = zip(parts.tolist(), counts.tolist(), (sums / counts).tolist(), quantiles.tolist(), strict=True)
    for i, count, mean, of_part in rows:
        found[i] = Distribution(count, mean, *of_part)
    return found


_FEW_VALUES = 1000
"""Sorting this many values takes less time than NumPy's quantile functions."""


def _interpolated(ordered: Floats, position: float) -> float:
    """An interpolated order statistic, rounded like `numpy.quantile`."""
    below = int(position)
    low, high, part = float(ordered[below]), float(ordered[min(below + 1, len(ordered) - 1)]), position - below
    return high - (high - low) * (1 - part) if part >= 0.5 else low + (high - low) * part


def gap_distribution(gaps: Gaps) -> Distribution | None:
    """Distribution of a weighted sample; None if it is empty."""
    if not gaps.total:
        return None
    return Distribution(gaps.total, gaps.histogram.mean_s, *gaps.quantiles_s(QUANTILES).tolist())


def gap_distributions(parts: Sequence[tuple[GapRuns, Codes]]) -> dict[int, Distribution]:
    """The distribution of the runs of each code, as from `gap_distribution`. Codes ascend in each part."""
    samples = SmallSamples(parts)
    rows = zip(samples.totals.tolist(), samples.means_s(), samples.quantiles_s(QUANTILES).tolist(), strict=True)
    small = (Distribution(total, mean_s, *quantiles_s) for total, mean_s, quantiles_s in rows)
    found: dict[int, Distribution] = dict(zip(samples.codes.tolist(), small, strict=True))
    for code in samples.large.tolist():
        own = []
        for (first, step, count, weight), codes in parts:
            at = slice(*np.searchsorted(codes, [code, code + 1]).tolist())
            own.append((first[at], step[at], count[at], weight[at]))
        if (large := gap_distribution(Gaps(own))) is not None:
            found[code] = large
    return found
