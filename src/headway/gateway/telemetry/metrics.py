"""The gateway's counters and histograms, and the page on which Prometheus reads them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import accumulate
from typing import Final, Protocol

from headway.control.live import Live
from headway.core.record import Outcome
from headway.gateway.names import KnownNames
from headway.gateway.telemetry.definitions import DEFINITIONS

_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_LE = (*map(str, _BOUNDS_S), "+Inf")
LAST_TIER: Final = 99
"""Highest tier that is counted separately. Higher tiers are counted as this tier, because clients choose tiers, and
each tier takes memory."""
_E2E, _TTFT = ("headway_request_duration_seconds", ""), ("headway_time_to_first_token_seconds", "")
_TPOT, _HOLD = ("headway_time_per_output_token_seconds", ""), ("headway_hold_seconds", "")
_FINISHED: Final = Outcome.FINISHED
_OUTCOMES: Final = tuple(outcome.name.lower() for outcome in Outcome)
_INTER_TOKEN: Final = "headway_inter_token_seconds"
_OVERHEAD = ("headway_gateway_overhead_seconds", "")
_HISTOGRAMS = [name for name, definition in DEFINITIONS.items() if definition.kind == "histogram"]
_BY_MODEL = {
    f"headway_{name}": DEFINITIONS[f"headway_{name}"].labels[1]
    for name in (
        "tokens_total", "cached_tokens_total", "continued_tokens_total", "slo_requests_total", "retries_total",
        "failovers_total", "judgements_total", "ejections_total", "fallbacks_total", "unread_total", "prefills_total",
        "tenant_requests_total", "tenant_tokens_total",
    )
}  # fmt: skip
"""Counters by model and one more label."""
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
MAX_TENANTS = 1000
"""Maximum number of tenants with their own series. Further tenants are counted together, as `other`."""
Labels = dict[str, str]
Sample = tuple[Labels, float]
Metric = tuple[str, list[Sample]]
"""Name and current values of a metric."""
Exemplar = tuple[str, float, float]
"""(a request's id, its observation, the gateway's time of the observation)."""
ResponseCount = tuple[str, int, int]
"""(path, HTTP status, number of answers)."""
_MAX_EXEMPLAR_CHARS = 128 - len("request_id")
"""OpenMetrics limits the length of an exemplar's labels."""
HistogramCounts = tuple[str, str, int, str, dict[int, int], float]
"""(model, pool, tier, phase, counts by bin, sum of the observations). The phase is "" for the gateway's overhead."""


class Histogram:
    """Counts of observations by bin, and their sum.

    `bounds` are the inclusive upper bounds of the bins, in ascending order; one more bin is open at the top. Only bins
    that hold an observation take memory, so that fine bins are cheap.
    """

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self.counts: defaultdict[int, int] = defaultdict(int)
        self.total = 0.0

    def observe(self, value: float, num: int = 1) -> int:
        """Count one value `num` times, and return its bin."""
        bounds, index, end = self._bounds, 0, len(self._bounds)
        while index < end:  # compiled, a call of `bisect_left` takes longer
            middle = (index + end) >> 1
            if bounds[middle] < value:
                index = middle + 1
            else:
                end = middle
        self.counts[index] += num
        self.total += value * num
        return index

    def merge(self, counts: Mapping[int, int], total: float) -> None:
        """Add the counts and the sum of another histogram that has the same bounds."""
        for index, num in counts.items():
            self.counts[index] += num
        self.total += total

    def clear(self) -> None:
        self.counts.clear()
        self.total = 0.0

    def cumulative(self) -> list[int]:
        """The number of observations in each bin and all lower bins."""
        return list(accumulate(self.counts.get(index, 0) for index in range(len(self._bounds) + 1)))

    def quantile(self, share: float) -> float | None:
        """The geometric middle of the bin that holds this quantile; None without observations."""
        rank, so_far = math.ceil(share * sum(self.counts.values())), 0
        for index in sorted(self.counts):
            so_far += self.counts[index]
            if so_far >= rank:
                low, high = self._bounds[max(index - 1, 0)], self._bounds[min(index, len(self._bounds) - 1)]
                return math.sqrt(low * high)
        return None


def latencies_s(live: Live, now: float) -> tuple[float, float | None, float | None]:
    """(E2E, TTFT, TPOT) of a request that finishes now, in seconds. An unstreamed answer has only an E2E."""
    arrival_s, first_s, tokens = live.arrival_s, live.first_token_s, live.generated_tokens / live.num_sequences
    if first_s != first_s:
        return now - arrival_s, None, None
    has_tpot = tokens > 1 and now > first_s
    return now - arrival_s, first_s - arrival_s, (now - first_s) / (tokens - 1) if has_tpot else None


def has_slo(live: Live) -> bool:
    """Whether a request has an SLO. A request with a deadline has no other SLO: see `Control._add_slo`."""
    return not (live.slo_ttft_s is live.slo_tpot_s is live.slo_e2e_s is live.deadline_s is None)


def met_slos(live: Live, e2e_s: float, ttft_s: float | None, tpot_s: float | None) -> bool:
    """Whether a request that finished met its SLOs. As in the metrics of runs, an answer that is not streamed is judged
    by its duration alone, and a single token has no TPOT."""
    end_s = live.slo_e2e_s
    if end_s is None and live.deadline_s is not None:
        end_s = live.deadline_s - live.arrival_s
    return (
        (end_s is None or e2e_s <= end_s)
        and (live.slo_ttft_s is None or ttft_s is None or ttft_s <= live.slo_ttft_s)
        and (live.slo_tpot_s is None or tpot_s is None or tpot_s <= live.slo_tpot_s)
    )


class _Answering(Protocol):
    """The part of a replica that the metrics read."""

    @property
    def id(self) -> int: ...
    @property
    def pool(self) -> str: ...
    @property
    def is_hosted(self) -> bool: ...


class _Answer(Protocol):
    """The part of the answer's state that the metrics read."""

    @property
    def continued_tokens(self) -> tuple[int, int]: ...
    @property
    def unread(self) -> dict[str, int] | None: ...


class MeasuredRequest(Protocol):
    """The part of a request in flight that the metrics read."""

    @property
    def live(self) -> Live: ...
    @property
    def replica(self) -> _Answering | None: ...
    @property
    def request_id(self) -> str: ...
    @property
    def answer(self) -> _Answer: ...


class _Latency:
    """The histogram of a latency, and the last request in each bin."""

    __slots__ = ("exemplars", "histogram")

    def __init__(self) -> None:
        self.histogram = Histogram(_BOUNDS_S)
        self.exemplars: dict[int, Exemplar] = {}


class _Series:
    """The counters and histograms of one model, pool and tier."""

    __slots__ = (
        "e2e",
        "histograms",
        "hold",
        "input_tokens",
        "labels",
        "latencies",
        "num_by_outcome",
        "output_tokens",
        "overhead",
        "tpot",
        "ttft",
    )

    def __init__(self, model: str, pool: str, tier: int) -> None:
        self.labels = {"model": model, "pool": pool, "tier": str(tier)}
        self.num_by_outcome: dict[str, int] = defaultdict(int)
        self.input_tokens = self.output_tokens = 0
        self.hold, self.e2e, self.ttft, self.tpot = _Latency(), _Latency(), _Latency(), _Latency()
        self.latencies = {_HOLD: self.hold, _E2E: self.e2e, _TTFT: self.ttft, _TPOT: self.tpot}
        self.overhead = Histogram(_BOUNDS_S)
        self.histograms: dict[tuple[str, str], Histogram] = defaultdict(partial(Histogram, _BOUNDS_S))
        """Keyed by metric and phase. Only times between tokens have a phase."""
        self.histograms |= {name: latency.histogram for name, latency in self.latencies.items()}
        self.histograms[_OVERHEAD] = self.overhead


class _AllSeries(dict[tuple[str, str, int], _Series]):
    """The series by model, pool and tier, created on first access."""

    def __missing__(self, key: tuple[str, str, int]) -> _Series:
        series = self[key] = _Series(*key)
        return series


class PrometheusMetrics:
    """Requests that have ended, by model, pool, tier and outcome."""

    def __init__(self) -> None:
        self._series = _AllSeries()
        self._by_model: dict[str, dict[tuple[str, str], int]] = {name: defaultdict(int) for name in _BY_MODEL}
        self.num_responses: defaultdict[tuple[str, int], int] = defaultdict(int)
        """Answers by path and HTTP status."""
        self.hosted_tokens: dict[int, list[int]] = {}
        """Maps each hosted replica to (prompt tokens, cached prompt tokens, output tokens) that it has charged for."""
        self.tenants = KnownNames(MAX_TENANTS)

    def _series_of(self, live: Live, replica: _Answering | None) -> _Series:
        """The series of a request at this replica. The pool is empty if the request was never placed."""
        tier = live.tier
        return self._series[
            live.model, "" if replica is None else replica.pool, tier if tier < LAST_TIER else LAST_TIER
        ]

    def count_end(self, request: MeasuredRequest, outcome: Outcome, now: float) -> None:
        """Count a request that has ended, and its latencies if it finished."""
        live, answer, replica = request.live, request.answer, request.replica
        series = self._series_of(live, replica)
        series.num_by_outcome[_OUTCOMES[outcome]] += 1
        series.input_tokens += live.prompt_tokens
        series.output_tokens += live.generated_tokens
        if live.cached_tokens and replica is not None:
            self._by_model["headway_cached_tokens_total"][live.model, replica.pool] += live.cached_tokens
        computed, cached = answer.continued_tokens
        if computed or cached:
            for kv, tokens in (("computed", computed), ("cached", cached)):
                if tokens:
                    self._by_model["headway_continued_tokens_total"][live.model, kv] += tokens
        unread = answer.unread
        if unread is not None:
            for what, num in unread.items():
                self._by_model["headway_unread_total"][live.model, what] += num
        if live.tenant:
            tenant = self.tenants.known(live.tenant)
            self._by_model["headway_tenant_requests_total"][live.model, tenant] += 1
            total_tokens = live.prompt_tokens + live.generated_tokens
            self._by_model["headway_tenant_tokens_total"][live.model, tenant] += total_tokens
        if replica is not None and replica.is_hosted and live.generated_tokens:
            hosted = self.hosted_tokens.setdefault(replica.id, [0, 0, 0])
            cached = min(live.cached_tokens, live.prompt_tokens)
            hosted[0] += live.prompt_tokens - cached
            hosted[1] += cached
            hosted[2] += live.generated_tokens
        # avoids a call
        is_judged = not (live.slo_ttft_s is live.slo_tpot_s is live.slo_e2e_s is live.deadline_s is None)
        if outcome is not _FINISHED:
            if is_judged:
                self._by_model["headway_slo_requests_total"][live.model, "missed"] += 1
            return
        e2e_s, ttft_s, tpot_s = latencies_s(live, now)
        if is_judged:
            result = "met" if met_slos(live, e2e_s, ttft_s, tpot_s) else "missed"
            self._by_model["headway_slo_requests_total"][live.model, result] += 1
        id = request.request_id
        hold_s = live.placed_s - live.arrival_s
        hold, e2e, ttft, tpot = series.hold, series.e2e, series.ttft, series.tpot
        hold.exemplars[hold.histogram.observe(hold_s)] = id, hold_s, now
        e2e.exemplars[e2e.histogram.observe(e2e_s)] = id, e2e_s, now
        if ttft_s is not None:
            ttft.exemplars[ttft.histogram.observe(ttft_s)] = id, ttft_s, now
        if tpot_s is not None:
            tpot.exemplars[tpot.histogram.observe(tpot_s)] = id, tpot_s, now

    def count_send(self, request: MeasuredRequest, read_s: float, now: float) -> None:
        """Observe the gateway's overhead at a request's first send to a replica. `read_s`: when the request's last byte
        arrived."""
        live = request.live
        overhead_s = live.arrival_s - read_s + now - live.enqueued_s
        self._series_of(live, request.replica).overhead.observe(overhead_s)

    def inter_token(self, request: MeasuredRequest) -> Histogram:
        """The histogram of times between tokens, valid while the request keeps its replica and phase."""
        live = request.live
        return self._series_of(live, request.replica).histograms[_INTER_TOKEN, live.phase.name.lower()]

    def drain(self) -> list[HistogramCounts]:
        """Counts of inter-token times and overheads since the last call. The caller owns them."""
        drained: list[HistogramCounts] = []
        for (model, pool, tier), series in self._series.items():
            for (metric, phase), histogram in series.histograms.items():
                if histogram.counts and (phase or (metric, phase) == _OVERHEAD):
                    drained.append((model, pool, tier, phase, dict(histogram.counts), histogram.total))
                    histogram.clear()
        return drained

    def merge(self, drained: Iterable[HistogramCounts], responses: Iterable[ResponseCount] = ()) -> None:
        """Add the drained counts of another process."""
        for path, status, num in responses:
            self.num_responses[path, status] += num
        for model, pool, tier, phase, counts, total_s in drained:
            key = (_INTER_TOKEN, phase) if phase else _OVERHEAD
            self._series[model, pool, tier].histograms[key].merge(counts, total_s)

    def drain_responses(self) -> list[ResponseCount]:
        """Answer counts since the last call."""
        drained = [(path, status, num) for (path, status), num in self.num_responses.items()]
        self.num_responses.clear()
        return drained

    def count_failure(self, live: Live, pool: str) -> None:
        """Count a request whose replica failed and that is placed again."""
        name = "headway_failovers_total" if live.generated_tokens else "headway_retries_total"
        self._by_model[name][live.model, pool] += 1

    def count_judgement(self, model: str, outcome: str) -> None:
        self._by_model["headway_judgements_total"][model, outcome] += 1

    def count_ejection(self, model: str, reason: str) -> None:
        """Count a replica that is ejected, or that generates no tokens."""
        self._by_model["headway_ejections_total"][model, reason] += 1

    def count_fallback(self, model: str, reason: str) -> None:
        """Count a request that is answered by a fallback model."""
        self._by_model["headway_fallbacks_total"][model, reason] += 1

    def count_prefill(self, model: str, outcome: str) -> None:
        """Count a prompt that one replica computed, or failed to compute, for another replica."""
        self._by_model["headway_prefills_total"][model, outcome] += 1

    def page(self, metrics: Iterable[Metric] = (), wall_start_s: float | None = None) -> str:
        """The whole page as one text. The arguments are those of `lines`."""
        return "\n".join(self.lines(metrics, wall_start_s)) + "\n"

    def lines(self, metrics: Iterable[Metric] = (), wall_start_s: float | None = None) -> Iterator[str]:
        """The lines of the page. The lines of one histogram come one after the other. `metrics`: further metrics, kept
        elsewhere, whose values may change while the lines are read. The format is Prometheus' text format. With
        `wall_start_s`, the format is OpenMetrics with exemplars. `wall_start_s`: the wall clock's time at time 0 of the
        gateway's clock."""
        is_open = wall_start_s is not None
        for name, samples in (*self._counters(), *metrics):
            yield from _head(name, is_open)
            for labels, value in samples:
                yield f"{name}{_labels(labels)} {value:.15g}"
        for name in _HISTOGRAMS:
            yield from _head(name, is_open)
            for series in list(self._series.values()):
                for (metric, phase), histogram in list(series.histograms.items()):
                    if metric == name and (phase or histogram.counts):
                        labels = series.labels | ({"phase": phase} if phase else {})
                        exemplars = {} if wall_start_s is None else _exemplars(series, (metric, phase), wall_start_s)
                        yield "\n".join(_buckets(name, labels, histogram, exemplars))
        if is_open:
            yield "# EOF"

    def _counters(self) -> Iterator[Metric]:
        """The counters that are kept here."""
        ended: list[Sample] = [
            ({**series.labels, "outcome": outcome}, float(num))
            for series in self._series.values()
            for outcome, num in series.num_by_outcome.items()
        ]
        yield "headway_requests_total", ended
        responses: list[Sample] = [
            ({"path": path, "status": str(status)}, float(num)) for (path, status), num in self.num_responses.items()
        ]
        yield "headway_responses_total", responses
        for name, label in _BY_MODEL.items():
            counts = self._tokens() if name == "headway_tokens_total" else self._by_model[name]
            yield name, [({"model": model, label: value}, float(num)) for (model, value), num in counts.items()]

    def _tokens(self) -> dict[tuple[str, str], int]:
        """Tokens of ended requests by model and kind, input or output."""
        tokens: dict[tuple[str, str], int] = defaultdict(int)
        for (model, _, _), series in self._series.items():
            if series.num_by_outcome:
                tokens[model, "input"] += series.input_tokens
                tokens[model, "output"] += series.output_tokens
        return tokens


def _head(name: str, is_open: bool) -> tuple[str, str]:
    definition = DEFINITIONS[name]
    family = name.removesuffix("_total") if is_open else name
    return f"# HELP {family} {definition.help}", f"# TYPE {family} {definition.kind}"


def _exemplars(series: _Series, metric: tuple[str, str], wall_start_s: float) -> dict[int, str]:
    """Exemplars by bin, in OpenMetrics' format. A request with a too long id has no exemplar, because a truncated id
    finds no request."""
    latency = series.latencies.get(metric)
    return {
        index: f" # {_labels({'request_id': id})} {value:.9g} {wall_start_s + time_s:.3f}"
        for index, (id, value, time_s) in ([] if latency is None else list(latency.exemplars.items()))
        if 0 < len(id) <= _MAX_EXEMPLAR_CHARS
    }


def _buckets(name: str, labels: Labels, histogram: Histogram, exemplars: dict[int, str]) -> Iterator[str]:
    num = 0
    for index, num in enumerate(histogram.cumulative()):
        yield f"{name}_bucket{_labels({**labels, 'le': _LE[index]})} {num}{exemplars.get(index, '')}"
    yield f"{name}_sum{_labels(labels)} {histogram.total}"
    yield f"{name}_count{_labels(labels)} {num}"


def _labels(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in labels.items()) + "}"
