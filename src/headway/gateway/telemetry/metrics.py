"""The gateway's own metrics, as Prometheus reads them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator

from headway.core.record import Outcome
from headway.gateway.scheduling.in_flight import InFlightRequest

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_LAST_TIER = 99
"""Those after it are counted with it: clients name tiers, and each takes memory."""
_HISTOGRAMS = {
    "time_to_first_token_seconds": "From a request's arrival to its first token",
    "time_per_output_token_seconds": "Between output tokens after the first, as a streamed request's mean",
    "inter_token_seconds": "From one output token of a stream to the next",
    "request_duration_seconds": "From a request's arrival to its end",
    "hold_seconds": "From a request's arrival to its being given to a replica",
    "gateway_overhead_seconds": "From a request's last byte to its being sent on, without its being held",
}
Sample = tuple[dict[str, str], float]
Counts = tuple[str, str, int, str, list[int], float]
"""Model, pool, tier, phase ("": the gateway's overhead), observations by bin, and their sum."""


class Histogram:
    """Observations of one series."""

    def __init__(self) -> None:
        self.counts = [0] * (len(_SECONDS) + 1)
        self.total_s = 0.0

    def observe(self, value_s: float, num: int = 1) -> None:
        """Count one, or several."""
        self.counts[bisect_left(_SECONDS, value_s)] += num
        self.total_s += value_s * num


class _Series:
    """What one model, pool and tier has; looked up once for all that is counted at a time."""

    __slots__ = ("duration", "gaps", "hold", "labels", "num_by_outcome", "overhead", "tpot", "ttft")

    def __init__(self, model: str, pool: str, tier: int) -> None:
        self.labels = {"model": model, "pool": pool, "tier": str(tier)}
        self.num_by_outcome: dict[str, int] = {}
        self.ttft, self.tpot, self.duration, self.hold, self.overhead = (Histogram() for _ in range(5))
        self.gaps: dict[str, Histogram] = {}
        """Between tokens, by phase."""

    def histograms(self) -> dict[str, list[tuple[dict[str, str], Histogram]]]:
        """Each metric's, with their labels; those that have observed nothing are left out."""
        one = {
            "time_to_first_token_seconds": self.ttft, "time_per_output_token_seconds": self.tpot,
            "request_duration_seconds": self.duration, "hold_seconds": self.hold,
            "gateway_overhead_seconds": self.overhead,
        }  # fmt: skip
        made = {name: [(self.labels, histogram)] for name, histogram in one.items() if any(histogram.counts)}
        phases = [({**self.labels, "phase": phase}, histogram) for phase, histogram in self.gaps.items()]
        return made | {"inter_token_seconds": phases}


class Telemetry:
    """What has ended so far, by model, pool, tier and outcome."""

    def __init__(self) -> None:
        self._series: dict[tuple[str, str, int], _Series] = {}
        self._tokens: dict[tuple[str, str], int] = {}
        self._judgements: dict[tuple[str, str], int] = {}
        self._prefills: dict[tuple[str, str], int] = {}

    def _of(self, ticket: InFlightRequest) -> _Series:
        """No pool: the request was with none yet."""
        live, replica = ticket.live, ticket.replica
        return self._at(live.model, "" if replica is None else replica.pool, min(live.tier, _LAST_TIER))

    def _at(self, *key: *tuple[str, str, int]) -> _Series:
        found = self._series.get(key)
        if found is None:
            found = self._series[key] = _Series(*key)
        return found

    def ended(self, ticket: InFlightRequest, outcome: Outcome, now: float) -> None:
        """A request has."""
        live, series = ticket.live, self._of(ticket)
        name = outcome.name.lower()
        series.num_by_outcome[name] = series.num_by_outcome.get(name, 0) + 1
        for kind, tokens in (("input", live.prompt_tokens), ("output", live.generated_tokens)):
            self._tokens[live.model, kind] = self._tokens.get((live.model, kind), 0) + tokens
        if outcome is not Outcome.FINISHED:
            return
        first_s = live.first_token_s
        series.duration.observe(now - live.arrival_s)
        series.hold.observe(live.placed_s - live.arrival_s)
        if first_s == first_s:
            series.ttft.observe(first_s - live.arrival_s)
            if live.generated_tokens > 1 and now > first_s and not ticket.is_whole:
                series.tpot.observe((now - first_s) / (live.generated_tokens - 1))

    def sending(self, ticket: InFlightRequest, read_s: float, now: float) -> None:
        """A request that had come by `read_s` goes to a replica for the first time."""
        live = ticket.live
        self._of(ticket).overhead.observe(live.arrival_s - read_s + now - live.enqueued_s)

    def gaps(self, ticket: InFlightRequest) -> Histogram:
        """Where times between tokens are counted, while a request is where it is and in its present phase."""
        gaps, phase = self._of(ticket).gaps, ticket.live.phase.name.lower()
        if phase not in gaps:
            gaps[phase] = Histogram()
        return gaps[phase]

    def take(self) -> list[Counts]:
        """What exchanges have counted here since this was last asked: it is another's to keep."""
        taken: list[Counts] = []
        for (model, pool, tier), series in self._series.items():
            for phase, histogram in (("", series.overhead), *series.gaps.items()):
                if any(histogram.counts):
                    taken.append((model, pool, tier, phase, histogram.counts[:], histogram.total_s))
                    histogram.counts[:] = [0] * len(histogram.counts)
                    histogram.total_s = 0.0
        return taken

    def add(self, taken: Iterable[Counts]) -> None:
        """What was counted elsewhere."""
        for model, pool, tier, phase, counts, total_s in taken:
            series = self._at(model, pool, tier)
            histogram = series.gaps.setdefault(phase, Histogram()) if phase else series.overhead
            histogram.counts = [a + b for a, b in zip(histogram.counts, counts, strict=True)]
            histogram.total_s += total_s

    def judged(self, model: str, outcome: str) -> None:
        """A cascade's answer has been."""
        self._judgements[model, outcome] = self._judgements.get((model, outcome), 0) + 1

    def prefilled(self, model: str, outcome: str) -> None:
        """A prompt was to be computed for another replica."""
        self._prefills[model, outcome] = self._prefills.get((model, outcome), 0) + 1

    def text(self, gauges: Iterable[tuple[str, str, list[Sample]]]) -> str:
        """A page of all, and of these gauges: (name, what it is, samples)."""
        lines = [*self._counters(), *self._pages()]
        for name, what, samples in gauges:
            lines += [f"# HELP headway_{name} {what}", f"# TYPE headway_{name} gauge"]
            lines += [f"headway_{name}{_labels(labels)} {value:g}" for labels, value in samples]
        return "\n".join(lines) + "\n"

    def _counters(self) -> Iterator[str]:
        yield "# HELP headway_requests_total Requests that have ended"
        yield "# TYPE headway_requests_total counter"
        for series in self._series.values():
            for outcome, count in series.num_by_outcome.items():
                yield f"headway_requests_total{_labels({**series.labels, 'outcome': outcome})} {count}"
        yield "# HELP headway_tokens_total Tokens of requests that have ended"
        yield "# TYPE headway_tokens_total counter"
        for (model, kind), count in self._tokens.items():
            yield f"headway_tokens_total{_labels({'model': model, 'kind': kind})} {count}"

        what = "Answers of a cascade's models, by what became of them"
        yield from _by_outcome("judgements_total", what, self._judgements)
        what = "Prompts that another replica was to compute, by what came of it"
        yield from _by_outcome("prefills_total", what, self._prefills)

    def _pages(self) -> Iterator[str]:
        all_series = [series.histograms() for series in self._series.values()]
        for name, what in _HISTOGRAMS.items():
            yield f"# HELP headway_{name} {what}"
            yield f"# TYPE headway_{name} histogram"
            for histograms in all_series:
                for labels, histogram in histograms.get(name, ()):
                    yield from _buckets(f"headway_{name}", labels, histogram)


def _by_outcome(name: str, what: str, counts: dict[tuple[str, str], int]) -> Iterator[str]:
    """A counter by model and outcome, if it has counted anything."""
    if counts:
        yield f"# HELP headway_{name} {what}"
        yield f"# TYPE headway_{name} counter"
    for (model, outcome), count in counts.items():
        yield f"headway_{name}{_labels({'model': model, 'outcome': outcome})} {count}"


def _buckets(name: str, labels: dict[str, str], histogram: Histogram) -> Iterator[str]:
    so_far = 0
    for bound, count in zip((*map(str, _SECONDS), "+Inf"), histogram.counts, strict=True):
        so_far += count
        yield f"{name}_bucket{_labels({**labels, 'le': bound})} {so_far}"
    yield f"{name}_sum{_labels(labels)} {histogram.total_s}"
    yield f"{name}_count{_labels(labels)} {so_far}"


def _labels(labels: dict[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
