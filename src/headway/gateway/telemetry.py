"""The gateway's own metrics, as Prometheus reads them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator

from headway.control.live import Live
from headway.core.record import Outcome

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_HISTOGRAMS = {
    "time_to_first_token_seconds": "From a request's arrival to its first token",
    "time_per_output_token_seconds": "Between output tokens after the first, as a request's mean",
    "request_duration_seconds": "From a request's arrival to its end",
    "hold_seconds": "From a request's arrival to its being sent to a replica",
}
Sample = tuple[dict[str, str], float]


class Histogram:
    """Observations of one series."""

    def __init__(self) -> None:
        self.counts = [0] * (len(_SECONDS) + 1)
        self.total_s = 0.0

    def observe(self, value_s: float) -> None:
        """Count one."""
        self.counts[bisect_left(_SECONDS, value_s)] += 1
        self.total_s += value_s


class Telemetry:
    """What has ended so far, by model, tier and outcome."""

    def __init__(self) -> None:
        self._requests: dict[tuple[str, str, str], int] = {}
        self._tokens: dict[tuple[str, str], int] = {}
        self._judgements: dict[tuple[str, str], int] = {}
        self._histograms: dict[tuple[str, str, str], Histogram] = {}

    def ended(self, live: Live, outcome: Outcome, now: float) -> None:
        """A request has."""
        model, tier = live.model, str(live.tier)
        key = (model, tier, outcome.name.lower())
        self._requests[key] = self._requests.get(key, 0) + 1
        for kind, tokens in (("input", live.prompt_tokens), ("output", live.generated_tokens)):
            self._tokens[model, kind] = self._tokens.get((model, kind), 0) + tokens
        if outcome is not Outcome.FINISHED:
            return
        first_s = live.first_token_s
        self._observe("request_duration_seconds", model, tier, now - live.arrival_s)
        self._observe("hold_seconds", model, tier, live.placed_s - live.arrival_s)
        if first_s == first_s:
            self._observe("time_to_first_token_seconds", model, tier, first_s - live.arrival_s)
            if live.generated_tokens > 1 and now > first_s:
                tpot_s = (now - first_s) / (live.generated_tokens - 1)
                self._observe("time_per_output_token_seconds", model, tier, tpot_s)

    def judged(self, model: str, outcome: str) -> None:
        """A cascade's answer has been."""
        self._judgements[model, outcome] = self._judgements.get((model, outcome), 0) + 1

    def _observe(self, name: str, model: str, tier: str, value_s: float) -> None:
        histogram = self._histograms.get((name, model, tier))
        if histogram is None:
            histogram = self._histograms[name, model, tier] = Histogram()
        histogram.observe(value_s)

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
        for (model, tier, outcome), count in self._requests.items():
            yield f"headway_requests_total{_labels({'model': model, 'tier': tier, 'outcome': outcome})} {count}"
        yield "# HELP headway_tokens_total Tokens of requests that have ended"
        yield "# TYPE headway_tokens_total counter"
        for (model, kind), count in self._tokens.items():
            yield f"headway_tokens_total{_labels({'model': model, 'kind': kind})} {count}"

        if self._judgements:
            yield "# HELP headway_judgements_total Answers of a cascade's models, by what became of them"
            yield "# TYPE headway_judgements_total counter"
        for (model, outcome), count in self._judgements.items():
            yield f"headway_judgements_total{_labels({'model': model, 'outcome': outcome})} {count}"

    def _pages(self) -> Iterator[str]:
        for name, what in _HISTOGRAMS.items():
            yield f"# HELP headway_{name} {what}"
            yield f"# TYPE headway_{name} histogram"
            for (series, model, tier), histogram in self._histograms.items():
                if series == name:
                    yield from _buckets(f"headway_{name}", {"model": model, "tier": tier}, histogram)


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
