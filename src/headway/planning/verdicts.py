"""Rehearsals that end as soon as it is certain that a target is missed.

The number of requests, and the allowed number of late ones, are known before a run. Whether an ended request is late
does not change, and a request that has waited for its first token for longer than its limit is late whatever comes. A
run with more late requests than allowed therefore has a certain verdict, without estimation: the whole run would miss
the same target. A run that may still meet its targets continues to its end.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
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
    rows = source.workload
    counted = rows.arrival_s >= warmup_s
    shares = [_of_quantile(rows, counted, kind, *limit) for kind, limit in limits.items()]
    if attainment is not None:
        slo_s = _slo_s(rows, slo)
        has_any = ~np.isnan(slo_s).all(axis=0) | counts_all
        shares.append(_of_slos(rows, counted & has_any, slo_s, attainment))
    return _WatchedSource(source, warmup_s, shares)


class _WatchedSource:
    """Wraps a source of known requests and counts those that are certain to be late."""

    reactive = True
    """True, so that the run reports the ends of requests. This source adds no arrivals."""

    def __init__(self, source: TraceSource, warmup_s: float, shares: Sequence[_Share]) -> None:
        self.num_requests = source.num_requests
        self._source, self._warmup_s, self._shares = source, warmup_s, shares

    def peek_s(self) -> float | None:
        return self._source.peek_s()

    def pop(self, make: Callable[..., R]) -> R:
        """As of the source. TargetMissedError if by now more requests have waited too long than allowed."""
        made = self._source.pop(make)
        request: Any = made
        if request.arrival_s >= self._warmup_s:
            for each in self._shares:
                if each.is_missed_by(request):
                    raise TargetMissedError(self._source.num_issued)
        return made

    def table(self) -> Workload:
        return self._source.table()

    def ended(self, request: RequestView, now_s: float, outcome: Outcome) -> None:
        """Count an ended request. TargetMissedError if more requests are late than allowed."""
        if request.arrival_s < self._warmup_s:
            return
        latencies_s = _latencies_s(request, now_s) if outcome is Outcome.FINISHED else None
        for each in self._shares:
            if each.is_missed_with(request.id, latencies_s):
                raise TargetMissedError(self._source.num_issued)


class _Share:
    """A number of requests of which too many may be late: those of a quantile, or of the share of SLOs met."""

    def __init__(self, limits_s: Sequence[array[float]], is_decided: bytearray, too_many: int) -> None:
        """`limits_s`: for each kind of latency, each request's limit; infinite means none. `is_decided`: 1 for each
        request that does not count. `too_many`: with so many late requests the target is missed."""
        self._ttft_s, self._tpot_s, self._e2e_s = limits_s
        self._is_decided, self._num_left = is_decided, too_many
        self._waiting: deque[Any] = deque()
        """Requests in order of arrival. The first one has no first token, or was not looked at since it has one."""

    def is_missed_by(self, arriving: Any) -> bool:
        """Whether the target is certain to be missed at a request's arrival. Requests without a first token are late
        from the time of their limit on, since none of their tokens can come earlier than now."""
        now_s, waiting = arriving.arrival_s, self._waiting
        waiting.append(arriving)
        while waiting:
            first = waiting[0]
            if not self._is_decided[first.id] and first.first_token_s != first.first_token_s:
                if now_s - first.arrival_s <= self._ttft_s[first.id]:
                    break
                self._is_decided[first.id] = 1
                self._num_left -= 1
            waiting.popleft()
        return self._num_left <= 0

    def is_missed_with(self, i: int, latencies_s: tuple[float, float, float] | None) -> bool:
        """Whether the target is missed, as request `i` ended. `latencies_s`: None if it did not finish."""
        if self._is_decided[i]:
            return False
        self._is_decided[i] = 1
        if latencies_s is not None:
            ttft_s, tpot_s, e2e_s = latencies_s
            if not (ttft_s > self._ttft_s[i] or tpot_s > self._tpot_s[i] or e2e_s > self._e2e_s[i]):
                return False
        self._num_left -= 1
        return self._num_left <= 0


def _of_quantile(rows: Workload, counts: Any, kind: SloKind, quantile: float, limit_s: float) -> _Share:
    limits_s = np.full((len(SLO_KINDS), len(rows)), np.inf)
    limits_s[SLO_KINDS.index(kind)] = limit_s
    num = int(counts.sum())
    return _share(limits_s, counts, num - floor(quantile * (num - 1)))


def _of_slos(rows: Workload, counts: Any, slo_s: Any, attainment: float) -> _Share:
    num = int(counts.sum())
    too_many = max(int((1 - attainment) * num) - 1, 1)
    while too_many <= num and (num - too_many) / num >= attainment:
        too_many += 1
    return _share(np.where(np.isnan(slo_s), np.inf, slo_s), counts, too_many)


def _share(limits_s: Any, counts: Any, too_many: int) -> _Share:
    return _Share([array("d", of_kind.tobytes()) for of_kind in limits_s], bytearray(~counts), too_many)


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
