"""One row per request: what it waited for, and whether that met its SLOs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from msgspec import Struct

from headway.core.pacer import Pacer
from headway.core.record import Columns, Outcome, Records
from headway.metrics.columns import Floats, Ints, Mask, Rows, Whole, floats, ints, whole
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
    """The requests that count, one element each in every array. NaN means that it never happened."""

    id: Ints
    outcome: Whole
    replica: Whole
    generated_tokens: Whole
    prompt_tokens: Whole
    cached_prompt_tokens: Whole
    preemptions: Whole
    moves: Whole
    attempts: Whole
    ttft_s: Floats
    answer_s: Floats
    tpot_s: Floats
    e2e_s: Floats
    queueing_s: Floats
    slo_ttft_s: Floats
    slo_tpot_s: Floats
    slo_e2e_s: Floats
    phases: Phases | None
    """None where nothing reasons, or where nobody asked."""

    @property
    def finished(self) -> Mask:
        """Which of them finished."""
        return np.asarray(self.outcome == Outcome.FINISHED)

    def of(self, rows: Rows) -> Sample:
        """Some of them."""
        columns = {name: getattr(self, name)[rows] for name in Sample.__slots__ if name != "phases"}
        return Sample(**columns, phases=None if self.phases is None else self.phases[rows])


def sample(records: Records, warmup_s: float, slo: Slo | None, pacer: Pacer | None = None) -> Sample:
    """The requests that arrived at `warmup_s` or later, whatever became of them; phases only for a pacer."""
    table, workload = records.requests, records.workload
    ended = table
    if warmup_s > 0:
        counted = floats(workload, "arrival_s")[table["request"]] >= warmup_s
        ended = {name: column[counted] for name, column in table.items()}
    ids = ints(ended, "request")
    arrival_s = floats(workload, "arrival_s", ids)
    finished = ended["outcome"] == Outcome.FINISHED
    first_s, end_s = floats(ended, "first_token_s"), floats(ended, "end_s")
    generated = whole(ended, "generated_tokens")
    several = finished & (generated > 1)
    tpot_s = np.full(len(ids), np.nan)
    tpot_s[several] = (end_s[several] - first_s[several]) / (generated[several] - 1)
    slo = slo or Slo()
    return Sample(
        id=ids,
        outcome=whole(ended, "outcome"),
        replica=whole(ended, "replica"),
        generated_tokens=generated,
        prompt_tokens=whole(workload, "prompt_tokens", ids),
        cached_prompt_tokens=whole(ended, "cached_prompt_tokens"),
        preemptions=whole(ended, "preemptions"),
        moves=whole(ended, "moves"),
        attempts=whole(ended, "attempts"),
        ttft_s=first_s - arrival_s,
        answer_s=_answer_s(records, ids, ended, arrival_s),
        tpot_s=tpot_s,
        e2e_s=np.where(finished, end_s - arrival_s, np.nan),
        queueing_s=floats(ended, "admitted_s") - arrival_s,
        slo_ttft_s=_slo(workload, "slo_ttft_s", ids, slo.ttft_s),
        slo_tpot_s=_slo(workload, "slo_tpot_s", ids, slo.tpot_s),
        slo_e2e_s=_slo_e2e(workload, ids, arrival_s, slo.e2e_s),
        phases=phases(records, ended, pacer) if pacer else None,
    )


def _answer_s(records: Records, ids: Ints, ended: Columns, arrival_s: Floats) -> Floats:
    """Time to the first answering token, of requests that reason first."""
    if "reasoning_tokens" not in records.workload:
        return _never(len(ids))
    reasons = ints(records.workload, "reasoning_tokens", ids) > 0
    return np.where(reasons, floats(ended, "answer_s") - arrival_s, np.nan)


def _never(size: int) -> Floats:
    """NaN throughout, without the memory."""
    return np.broadcast_to(np.nan, size)


def _slo(workload: Columns, name: str, ids: Ints, default_s: float | None) -> Floats:
    own = floats(workload, name, ids) if name in workload else _never(len(ids))
    return own if default_s is None else np.where(np.isnan(own), default_s, own)


def _slo_e2e(workload: Columns, ids: Ints, arrival_s: Floats, default_s: float | None) -> Floats:
    """A request's own E2E SLO, else its deadline, else the default."""
    own = _slo(workload, "slo_e2e_s", ids, None)
    if "deadline_s" in workload:
        own = np.where(np.isnan(own), floats(workload, "deadline_s", ids) - arrival_s, own)
    return own if default_s is None else np.where(np.isnan(own), default_s, own)


def met(chosen: Sample) -> dict[str, tuple[Mask, Mask]]:
    """(has such an SLO, met it) by kind; `all` = every SLO that the request has.

    A request that did not finish has missed all its SLOs. One with a single output token has no TPOT to miss.
    """
    finished = chosen.finished
    kinds = {
        "ttft": (chosen.slo_ttft_s, chosen.ttft_s),
        "tpot": (chosen.slo_tpot_s, np.where(np.isnan(chosen.tpot_s), 0.0, chosen.tpot_s)),
        "e2e": (chosen.slo_e2e_s, chosen.e2e_s),
    }
    result = {}
    every, some = finished.copy(), np.zeros(len(finished), dtype=np.bool_)
    for kind, (limit_s, actual_s) in kinds.items():
        has = ~np.isnan(limit_s)
        ok = finished & has & (actual_s <= limit_s)
        every &= ok | ~has
        some |= has
        result[kind] = (has, ok)
    result["all"] = (some, every & some)
    return result


def distribution(values: Floats) -> Distribution | None:
    """Of the values that are not NaN; None if there are none."""
    values = values[~np.isnan(values)]
    if not len(values):
        return None
    p50, p90, p95, p99, top = np.quantile(values, (*FRACTIONS, 1.0)).tolist()
    return Distribution(len(values), float(values.mean()), p50, p90, p95, p99, top)


def gap_distribution(gaps: Gaps | None) -> Distribution | None:
    """Of a weighted sample; None if it is empty."""
    if gaps is None or not gaps.total:
        return None
    p50, p90, p95, p99, top = gaps.quantiles_s((*FRACTIONS, 1.0)).tolist()
    return Distribution(gaps.total, gaps.mean_s(), p50, p90, p95, p99, top)
