"""The gateway's counters and histograms, and the page on which Prometheus reads them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Protocol

from headway.control.live import Live
from headway.core.record import Outcome
from headway.gateway.names import KnownNames
from headway.gateway.telemetry.histogram import Histogram

_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_LE = (*map(str, _BOUNDS_S), "+Inf")
LAST_TIER = 99
"""Tiers above it are counted as this one: clients choose tiers, and each takes memory."""
_HISTOGRAMS = {
    "time_to_first_token_seconds": "From the arrival of a streamed request to its first token",
    "time_per_output_token_seconds": "Mean time between the output tokens of a streamed request, after the first",
    "inter_token_seconds": "From one output token of a stream to the next",
    "request_duration_seconds": "From a request's arrival to its end",
    "hold_seconds": "From a request's arrival to its placement on a replica",
    "gateway_overhead_seconds": "From a request's last byte to the send to its replica, without the time on hold",
}
_E2E, _TTFT = ("request_duration_seconds", ""), ("time_to_first_token_seconds", "")
_TPOT, _HOLD = ("time_per_output_token_seconds", ""), ("hold_seconds", "")
_OUTCOMES = tuple(outcome.name.lower() for outcome in Outcome)
_INTER_TOKEN, _OVERHEAD = "inter_token_seconds", ("gateway_overhead_seconds", "")
_COUNTERS = {
    "tokens_total": ("kind", "Tokens of requests that have ended"),
    "cached_tokens_total": ("pool", "Tokens of their prompts that were in a prefix cache, by the engines' own counts"),
    "continued_tokens_total": ("kv", "Tokens with which engines began that continue an answer, computed or cached"),
    "judgements_total": ("outcome", "Answers of a cascade's models, by the judgement on them"),
    "ejections_total": ("reason", "Replicas that were taken out of service though they pass their health checks"),
    "fallbacks_total": ("reason", "Requests that a fallback of their model was to answer, by the model asked for"),
    "unread_total": ("what", "Events and answers of engines that were passed on without being read"),
    "prefills_total": ("outcome", "Prompts to be computed by another replica, by the result"),
    "tenant_requests_total": ("tenant", "Requests that have ended, by the tenant of their key"),
    "tenant_tokens_total": ("tenant", "Prompt and output tokens of these requests"),
}
"""Counters by model and by one more label."""
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
MAX_TENANTS = 1000
"""Tenants with a series of their own. Further ones are counted together, as `other`."""
Labels = dict[str, str]
Sample = tuple[Labels, float]
Metric = tuple[str, str, list[Sample]]
"""Name, help and values of this moment."""
HistogramCounts = tuple[str, str, int, str, dict[int, int], float]
"""Model, pool, tier, phase ("" for the gateway's overhead), counts by bin, and the sum of the observations."""


def latencies_s(live: Live, now: float) -> tuple[float, float | None, float | None]:
    """E2E, TTFT and TPOT of a request that finishes now; of an answer that came at once, only the first is known."""
    arrival_s, first_s, tokens = live.arrival_s, live.first_token_s, live.generated_tokens
    if first_s != first_s:
        return now - arrival_s, None, None
    has_tpot = tokens > 1 and now > first_s
    return now - arrival_s, first_s - arrival_s, (now - first_s) / (tokens - 1) if has_tpot else None


class _Pooled(Protocol):
    @property
    def pool(self) -> str: ...


class MeasuredRequest(Protocol):
    """What the metrics read of a request in flight."""

    @property
    def live(self) -> Live: ...
    @property
    def replica(self) -> _Pooled | None: ...
    @property
    def continued_tokens(self) -> tuple[int, int]: ...
    @property
    def unread(self) -> dict[str, int] | None: ...


class _Series:
    """The counters and histograms of one model, pool and tier."""

    __slots__ = ("histograms", "input_tokens", "labels", "num_by_outcome", "output_tokens")

    def __init__(self, model: str, pool: str, tier: int) -> None:
        self.labels = {"model": model, "pool": pool, "tier": str(tier)}
        self.num_by_outcome: dict[str, int] = defaultdict(int)
        self.input_tokens = self.output_tokens = 0
        self.histograms: dict[tuple[str, str], Histogram] = defaultdict(partial(Histogram, _BOUNDS_S))
        """By metric and phase; only times between tokens have a phase."""


class _AllSeries(dict[tuple[str, str, int], _Series]):
    """The series by model, pool and tier, created when they are first read."""

    def __missing__(self, key: tuple[str, str, int]) -> _Series:
        series = self[key] = _Series(*key)
        return series


class PrometheusMetrics:
    """Requests that have ended, by model, pool, tier and outcome."""

    def __init__(self) -> None:
        self._series = _AllSeries()
        self._by_model: dict[str, dict[tuple[str, str], int]] = {name: defaultdict(int) for name in _COUNTERS}
        self.tenants = KnownNames(MAX_TENANTS)

    def _series_of(self, request: MeasuredRequest) -> _Series:
        """The pool is empty for a request that was never placed."""
        live, replica = request.live, request.replica
        tier = live.tier
        return self._series[
            live.model, "" if replica is None else replica.pool, tier if tier < LAST_TIER else LAST_TIER
        ]

    def count_end(self, request: MeasuredRequest, outcome: Outcome, now: float) -> None:
        """Count a request that has ended, and its latencies if it finished."""
        live, series = request.live, self._series_of(request)
        series.num_by_outcome[_OUTCOMES[outcome]] += 1
        series.input_tokens += live.prompt_tokens
        series.output_tokens += live.generated_tokens
        if live.cached_tokens and request.replica is not None:
            self._by_model["cached_tokens_total"][live.model, request.replica.pool] += live.cached_tokens
        for kv, tokens in zip(("computed", "cached"), request.continued_tokens, strict=True):
            if tokens:
                self._by_model["continued_tokens_total"][live.model, kv] += tokens
        if request.unread is not None:
            for what, num in request.unread.items():
                self._by_model["unread_total"][live.model, what] += num
        if live.tenant:
            tenant = self.tenants.known(live.tenant)
            self._by_model["tenant_requests_total"][live.model, tenant] += 1
            total_tokens = live.prompt_tokens + live.generated_tokens
            self._by_model["tenant_tokens_total"][live.model, tenant] += total_tokens
        if outcome is not Outcome.FINISHED:
            return
        histograms = series.histograms
        e2e_s, ttft_s, tpot_s = latencies_s(live, now)
        histograms[_HOLD].observe(live.placed_s - live.arrival_s)
        histograms[_E2E].observe(e2e_s)
        if ttft_s is not None:
            histograms[_TTFT].observe(ttft_s)
        if tpot_s is not None:
            histograms[_TPOT].observe(tpot_s)

    def count_send(self, request: MeasuredRequest, read_s: float, now: float) -> None:
        """Observe the gateway's overhead on a request's first send to a replica; its last byte came at `read_s`."""
        live = request.live
        overhead_s = live.arrival_s - read_s + now - live.enqueued_s
        self._series_of(request).histograms[_OVERHEAD].observe(overhead_s)

    def inter_token(self, request: MeasuredRequest) -> Histogram:
        """The histogram of times between tokens, valid while the request keeps its replica and its phase."""
        return self._series_of(request).histograms[_INTER_TOKEN, request.live.phase.name.lower()]

    def drain(self) -> list[HistogramCounts]:
        """Counts of inter-token times and overheads since the last call; the caller owns them from now on."""
        drained: list[HistogramCounts] = []
        for (model, pool, tier), series in self._series.items():
            for (metric, phase), histogram in series.histograms.items():
                if histogram.counts and (phase or (metric, phase) == _OVERHEAD):
                    drained.append((model, pool, tier, phase, dict(histogram.counts), histogram.total))
                    histogram.clear()
        return drained

    def merge(self, drained: Iterable[HistogramCounts]) -> None:
        """Add counts that another process has drained."""
        for model, pool, tier, phase, counts, total_s in drained:
            key = (_INTER_TOKEN, phase) if phase else _OVERHEAD
            self._series[model, pool, tier].histograms[key].merge(counts, total_s)

    def count_judgement(self, model: str, outcome: str) -> None:
        self._by_model["judgements_total"][model, outcome] += 1

    def count_ejection(self, model: str, reason: str) -> None:
        """Count a replica that is ejected, or that generates nothing."""
        self._by_model["ejections_total"][model, reason] += 1

    def count_fallback(self, model: str, reason: str) -> None:
        """Count a request for a model that another one was to answer."""
        self._by_model["fallbacks_total"][model, reason] += 1

    def count_prefill(self, model: str, outcome: str) -> None:
        """Count a prompt that one replica computed, or failed to compute, for another."""
        self._by_model["prefills_total"][model, outcome] += 1

    def page(self, gauges: Iterable[Metric], counters: Iterable[Metric] = ()) -> str:
        """All metrics in Prometheus' text format, with gauges and counters that are kept elsewhere."""
        return "\n".join(self.lines(gauges, counters)) + "\n"

    def lines(self, gauges: Iterable[Metric], counters: Iterable[Metric] = ()) -> Iterator[str]:
        """The lines of the page, the lines of one histogram together. Metrics may change meanwhile."""
        yield from self._counters()
        for name, help, samples in counters:
            if samples:
                yield from _head(name, help, "counter")
                yield from [f"headway_{name}{_labels(labels)} {value:.15g}" for labels, value in samples]
        yield from self._histograms()
        for name, help, samples in gauges:
            yield from _head(name, help, "gauge")
            yield from [f"headway_{name}{_labels(labels)} {value:g}" for labels, value in samples]

    def _counters(self) -> Iterator[str]:
        yield from _head("requests_total", "Requests that have ended", "counter")
        for series in list(self._series.values()):
            for outcome, num in list(series.num_by_outcome.items()):
                yield f"headway_requests_total{_labels({**series.labels, 'outcome': outcome})} {num}"
        for name, (label, help) in _COUNTERS.items():
            counts = self._tokens() if name == "tokens_total" else self._by_model[name]
            if counts or name == "tokens_total":
                yield from _head(name, help, "counter")
            for (model, value), num in list(counts.items()):
                yield f"headway_{name}{_labels({'model': model, label: value})} {num}"

    def _tokens(self) -> dict[tuple[str, str], int]:
        """Tokens of ended requests by model and kind, input or output."""
        tokens: dict[tuple[str, str], int] = defaultdict(int)
        for (model, _, _), series in self._series.items():
            if series.num_by_outcome:
                tokens[model, "input"] += series.input_tokens
                tokens[model, "output"] += series.output_tokens
        return tokens

    def _histograms(self) -> Iterator[str]:
        for name, help in _HISTOGRAMS.items():
            yield from _head(name, help, "histogram")
            for series in list(self._series.values()):
                for (metric, phase), histogram in list(series.histograms.items()):
                    if metric == name and (phase or histogram.counts):
                        labels = series.labels | ({"phase": phase} if phase else {})
                        yield "\n".join(_buckets(f"headway_{name}", labels, histogram))


def _head(name: str, help: str, kind: str) -> tuple[str, str]:
    return f"# HELP headway_{name} {help}", f"# TYPE headway_{name} {kind}"


def _buckets(name: str, labels: Labels, histogram: Histogram) -> Iterator[str]:
    num = 0
    for bound, num in zip(_LE, histogram.cumulative(), strict=True):
        yield f"{name}_bucket{_labels({**labels, 'le': bound})} {num}"
    yield f"{name}_sum{_labels(labels)} {histogram.total}"
    yield f"{name}_count{_labels(labels)} {num}"


def _labels(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in labels.items()) + "}"
