"""Rehearsals that end as soon as it is certain that a target is missed.

The number of requests, and the allowed number of late ones, are known before a run. Whether an ended request is late
does not change. A run with more late requests than allowed therefore has a certain verdict, without estimation: the
whole run would miss the same target. A run that may still meet its targets continues to its end.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from math import floor
from typing import Any, TypeVar

import numpy as np

from headway.core.errors import HeadwayError
from headway.core.record import Outcome, Records
from headway.core.view import RequestView
from headway.metrics.latency import SLO_KINDS, DefaultSlo, Sample, SloKind
from headway.workload.sources import RequestSource, TraceSource
from headway.workload.table import Workload

R = TypeVar("R")
Limits = Mapping[SloKind, tuple[float, float]]
"""Maps each latency to a quantile of the requests, and its limit in seconds."""


class TargetMissedError(HeadwayError):
    """Ends a run whose verdict is certain."""

    def __init__(self, num_requests: int) -> None:
        """`num_requests`: arrivals until then."""
        super().__init__(f"a target is missed after {num_requests} arrivals")
        self.num_requests = num_requests


def watched(
    source: RequestSource,
    limits: Limits,
    attainment: float | None,
    warmup_s: float,
    slo: DefaultSlo,
    counts_all: bool = False,
) -> RequestSource:
    """The source, which raises `TargetMissedError` as soon as a quantile or the share of SLOs met is out of reach.

    `counts_all`: requests without an SLO belong to the share, too; they must finish. Sources that react to answers stay
    unchanged, because their number of requests is unknown.
    """
    if not isinstance(source, TraceSource):
        return source
    return _WatchedSource(source, limits, attainment, warmup_s, slo, counts_all)


class _WatchedSource:
    """Wraps a source of known requests and counts those that ended late."""

    reactive = True
    """True, so that the run reports the ends of requests. This source adds no arrivals."""

    def __init__(
        self,
        source: TraceSource,
        limits: Limits,
        attainment: float | None,
        warmup_s: float,
        slo: DefaultSlo,
        counts_all: bool,
    ) -> None:
        rows = source.workload
        self.num_requests = source.num_requests
        self._source, self._warmup_s, self._attainment = source, warmup_s, attainment
        num = int((rows.arrival_s >= warmup_s).sum())
        self._limits = [
            (SLO_KINDS.index(kind), limit_s, num - floor(quantile * (num - 1)))
            for kind, (quantile, limit_s) in limits.items()
        ]
        self._num_late = [0] * len(self._limits)
        slo_s = _slo_s(rows, slo)
        has_any = ~np.isnan(slo_s).all(axis=0) | counts_all
        self._counts = has_any.tolist()
        """For each request, whether it belongs to the share of SLOs met."""
        self._slo_s = [array("d", of_kind.tobytes()) for of_kind in np.where(np.isnan(slo_s), np.inf, slo_s)]
        """Maps each kind to each request's SLO; infinite means none."""
        self._num_with_slo = int((has_any & (rows.arrival_s >= warmup_s)).sum())
        self._num_missed = 0

    def peek_s(self) -> float | None:
        return self._source.peek_s()

    def pop(self, make: Callable[..., R]) -> R:
        return self._source.pop(make)

    def table(self) -> Workload:
        return self._source.table()

    def ended(self, request: RequestView, now_s: float, outcome: Outcome) -> None:
        """Count an ended request. TargetMissedError if more requests are late than allowed."""
        if request.arrival_s < self._warmup_s:
            return
        latencies_s = _latencies_s(request, now_s) if outcome is Outcome.FINISHED else None
        for i, (kind, limit_s, too_many) in enumerate(self._limits):
            if latencies_s is None or latencies_s[kind] > limit_s:
                self._num_late[i] += 1
                if self._num_late[i] >= too_many:
                    raise TargetMissedError(self._source.num_issued)
        i = request.id
        if self._attainment is None or not self._counts[i]:
            return
        ttft_s, tpot_s, e2e_s = self._slo_s
        if latencies_s is None or latencies_s[0] > ttft_s[i] or latencies_s[1] > tpot_s[i] or latencies_s[2] > e2e_s[i]:
            self._num_missed += 1
            if (self._num_with_slo - self._num_missed) / self._num_with_slo < self._attainment:
                raise TargetMissedError(self._source.num_issued)


def _latencies_s(request: Any, end_s: float) -> tuple[float, float, float]:
    """TTFT, TPOT and E2E of a finished request, computed as in the metrics; a single token has a TPOT of 0."""
    later = request.generated_tokens - 1
    tpot_s = (end_s - request.first_token_s) / later if later > 0 else 0.0
    return request.first_token_s - request.arrival_s, tpot_s, end_s - request.arrival_s


def _slo_s(rows: Workload, slo: DefaultSlo) -> Any:
    """[kind, request]: the SLOs, by the rule of the metrics."""
    records = Records(rows.columns, (), (), {"request": np.arange(len(rows))}, {}, {}, (), 0.0)
    every = Sample(records, slice(None), slo, None)
    return np.stack([every.slo_s(kind) for kind in SLO_KINDS])
