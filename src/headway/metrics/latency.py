"""One row per request: what it waited for, and whether that met its SLOs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from msgspec import Struct

from headway.core.pacer import Pacer
from headway.core.record import Outcome, Records
from headway.metrics.columns import Floats, Mask, Rows, Whole, floats, ints, whole
from headway.metrics.gaps import Gaps
from headway.metrics.qoe import Phases, phases

FRACTIONS = (0.5, 0.9, 0.95, 0.99)


class Distribution(Struct, frozen=True):
    """Of one latency, in seconds. Percentiles interpolate linearly between order statistics."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


class Slo(Struct, frozen=True, forbid_unknown_fields=True):
    """What to hold requests to that bring no SLO of their own. Durations; None = none."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """The requests that count, one element each in every array, made when it is asked for. NaN: it never happened."""

    records: Records
    rows: Rows | slice
    """Which of `records.requests`."""
    slo: Slo
    """For requests without one."""
    phases: Phases | None
    """None where nothing reasons, or where nobody asked."""

    def __len__(self) -> int:
        return len(self.records.requests["request"][self.rows])

    def of(self, rows: Rows) -> Sample:
        """Some of them."""
        kept = rows if isinstance(self.rows, slice) else self.rows[rows]
        return Sample(self.records, kept, self.slo, None if self.phases is None else self.phases[rows])

    @property
    def id(self) -> Whole:
        """Row of the workload table."""
        return self._whole("request")

    @property
    def outcome(self) -> Whole:
        """An `Outcome`."""
        return self._whole("outcome")

    @property
    def finished(self) -> Mask:
        """Which of them finished."""
        return np.asarray(self.outcome == Outcome.FINISHED)

    @property
    def replica(self) -> Whole:
        """The last one; -1: none."""
        return self._whole("replica")

    @property
    def generated_tokens(self) -> Whole:
        """By the model that answered."""
        return self._whole("generated_tokens")

    @property
    def prompt_tokens(self) -> Whole:
        """As they came."""
        return whole(self.records.workload, "prompt_tokens", self.id)

    @property
    def cached_prompt_tokens(self) -> Whole:
        """At the first admission."""
        return self._whole("cached_prompt_tokens")

    @property
    def preemptions(self) -> Whole:
        """How often each was preempted."""
        return self._whole("preemptions")

    @property
    def moves(self) -> Whole:
        """How often each went on elsewhere."""
        return self._whole("moves")

    @property
    def attempts(self) -> Whole:
        """One, and one more for each crash."""
        return self._whole("attempts")

    @property
    def ttft_s(self) -> Floats:
        """Arrival to first token."""
        return self._since_arrival_s("first_token_s")

    @property
    def answer_s(self) -> Floats:
        """Arrival to first answering token, of requests that reason first."""
        workload = self.records.workload
        if "reasoning_tokens" not in workload:
            return _never(len(self))
        reasons = whole(workload, "reasoning_tokens", self.id) > 0
        return np.where(reasons, self._since_arrival_s("answer_s"), np.nan)

    @property
    def tpot_s(self) -> Floats:
        """Between tokens on average, of requests that finished with several."""
        generated = self.generated_tokens
        table = self.records.requests
        found = floats(table, "end_s", self.rows) - floats(table, "first_token_s", self.rows)
        np.divide(found, generated - 1, out=found, where=generated > 1)
        found[~(self.finished & (generated > 1))] = np.nan
        return found

    @property
    def e2e_s(self) -> Floats:
        """Arrival to end, of requests that finished."""
        found = self._since_arrival_s("end_s")
        found[~self.finished] = np.nan
        return found

    @property
    def queueing_s(self) -> Floats:
        """Arrival to first admission."""
        return self._since_arrival_s("admitted_s")

    @property
    def slo_ttft_s(self) -> Floats:
        """NaN: none, here as below."""
        return self._slo("slo_ttft_s", self.slo.ttft_s)

    @property
    def slo_tpot_s(self) -> Floats:
        """Of the mean time between tokens."""
        return self._slo("slo_tpot_s", self.slo.tpot_s)

    @property
    def slo_e2e_s(self) -> Floats:
        """A request's own E2E SLO, else its deadline, else the default."""
        own, workload = self._slo("slo_e2e_s", None), self.records.workload
        if "deadline_s" in workload:
            ids = self.id
            own = np.where(np.isnan(own), floats(workload, "deadline_s", ids) - floats(workload, "arrival_s", ids), own)
        return _or(own, self.slo.e2e_s)

    def _whole(self, name: str) -> Whole:
        return whole(self.records.requests, name, self.rows)

    def _since_arrival_s(self, name: str) -> Floats:
        found = floats(self.records.workload, "arrival_s", self.id)
        return np.subtract(floats(self.records.requests, name, self.rows), found, out=found)

    def _slo(self, name: str, default_s: float | None) -> Floats:
        workload = self.records.workload
        return _or(floats(workload, name, self.id) if name in workload else _never(len(self)), default_s)


def sample(records: Records, warmup_s: float, slo: Slo | None, pacer: Pacer | None = None) -> Sample:
    """The requests that arrived at `warmup_s` or later, whatever became of them; phases only for a pacer."""
    table = records.requests
    rows: Rows | slice = slice(None)
    if warmup_s > 0:
        rows = np.flatnonzero(floats(records.workload, "arrival_s", ints(table, "request")) >= warmup_s)
    found = None
    if pacer and "reasoning_tokens" in records.workload:
        found = phases(records, {name: column[rows] for name, column in table.items()}, pacer)
    return Sample(records, rows, slo or Slo(), found)


def _never(size: int) -> Floats:
    """NaN throughout, without the memory."""
    return np.broadcast_to(np.nan, size)


def _or(own: Floats, default_s: float | None) -> Floats:
    return own if default_s is None else np.where(np.isnan(own), default_s, own)


def met(chosen: Sample) -> dict[str, tuple[Mask, Mask]]:
    """(has such an SLO, met it) by kind; `all` = every SLO that the request has.

    A request that did not finish has missed all its SLOs. One with a single output token has no TPOT to miss.
    """
    finished = chosen.finished
    every, some = finished.copy(), np.zeros(len(finished), dtype=np.bool_)
    result = {}
    for kind in ("ttft", "tpot", "e2e"):
        limit_s = getattr(chosen, f"slo_{kind}_s")
        has = ~np.isnan(limit_s)
        ok = _within(chosen, kind, limit_s) & finished & has if has.any() else has
        every &= ok | ~has
        some |= has
        result[kind] = (has, ok)
    result["all"] = (some, every & some)
    return result


def _within(chosen: Sample, kind: str, limit_s: Floats) -> Mask:
    actual_s = getattr(chosen, f"{kind}_s")
    if kind == "tpot":
        actual_s[np.isnan(actual_s)] = 0.0
    return np.asarray(actual_s <= limit_s)


def distribution(values: Floats) -> Distribution | None:
    """Of the values that are not NaN; None if there are none."""
    values = values[~np.isnan(values)]
    if not len(values):
        return None
    mean = float(values.mean())  # before the values are put in another order, which may round differently
    p50, p90, p95, p99, top = np.quantile(values, (*FRACTIONS, 1.0), overwrite_input=True).tolist()
    return Distribution(len(values), mean, p50, p90, p95, p99, top)


def gap_distribution(gaps: Gaps | None) -> Distribution | None:
    """Of a weighted sample; None if it is empty."""
    if gaps is None or not gaps.total:
        return None
    p50, p90, p95, p99, top = gaps.quantiles_s((*FRACTIONS, 1.0)).tolist()
    return Distribution(gaps.total, gaps.mean_s(), p50, p90, p95, p99, top)
