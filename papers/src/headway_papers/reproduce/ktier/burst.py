"""Bursts of 10,000 and 15,000 requests within seconds: tiers, Tables 2 to 4, Figures 5, 8 and 9 of K-tier Llumnix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp, log
from statistics import fmean
from typing import Any

from headway_papers.reproduce import charts
from headway_papers.reproduce.findings import Figure, Finding, PaperTable, Row
from headway_papers.reproduce.ktier import runs as ktier_runs
from headway_papers.reproduce.ktier.claims import (
    HEADLINES,
    LATENCIES,
    METRICS,
    MIXES,
    PRINTED,
    READINGS,
    SCALES,
    TABLE_TIERS,
    cost_improvement,
    share_of_printed,
)
from headway_papers.reproduce.ktier.runs import INFAAS, LLUMLET, UNBOUNDED, VLLM, ktier_policies, scenario
from headway_papers.reproduce.results import Key, Results, SeedResults, increases, ratios
from headway_papers.reproduce.tasks import SimulationTask

SHOWN_TIERS = (1, 3, 5)
"""K in Figures 5, 8 and 9."""
FIGURES = {"uniform": "Figure 5", "gaussian": "Figure 8", "enterprise": "Figure 9"}
TABLES = {"uniform": "Table 2", "gaussian": "Table 3", "enterprise": "Table 4"}
PUBLIC_SEATS = 64
"""The batch cap in the authors' public scripts."""
BASELINE, KTIER = "INFaaS + vLLM", "+ freeness, headroom, migration (K-tier)"
AT_ONCE = "K-tier, each request placed at once"
FEW = f"INFaaS + vLLM, {PUBLIC_SEATS} seats"
ALL_IN = "K-tier, seats and memory for all"
ALL_SEATED = "K-tier, seats for all"
INFAAS_ALL_IN = "INFaaS, seats and memory for all"
PARTS: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "INFaaS, mixed batches": (INFAAS, LLUMLET),
    "+ one queue by tier": (ktier_runs.queue_only(4), LLUMLET),
    ALL_SEATED: (ktier_policies(4, seats=8192), ktier_runs.ALL_SEATS),
    ALL_IN: (ktier_policies(4, seats=8192), UNBOUNDED),
    INFAAS_ALL_IN: (INFAAS, UNBOUNDED),
    FEW: (INFAAS, VLLM | {"max_num_seqs": PUBLIC_SEATS}),
}
"""Ablations: (policies, engine) with four uniform tiers and 10,000 requests."""


def _settings(reading: str) -> list[tuple[str, str, int]]:
    """(mix, requests, K) of Tables 2 to 4 for this reading. With immediate placement, 15,000 requests only with K=4."""
    settings = [(mix, scale, k) for mix in MIXES for scale in SCALES for k in TABLE_TIERS]
    return [each for each in settings if not reading or each[1:] in (("15k", 4), *(("10k", k) for k in TABLE_TIERS))]


def tiers_swept(quick: bool) -> tuple[int, ...]:
    """Values of K, at 10,000 requests in uniform tiers."""
    return (1, 3, 4, 5, 10) if quick else tuple(range(1, 11))


def tasks(seeds: Sequence[int], quick: bool, readings: Sequence[str] = READINGS) -> dict[Key, SimulationTask]:
    """All runs of this part for some of `READINGS`. Runs without tiers are equal for all mixes."""
    settings = {("uniform", "10k", k) for k in tiers_swept(quick)}
    settings |= {(mix, scale, k) for mix in MIXES for scale in SCALES for k in TABLE_TIERS}
    tasks: dict[Key, SimulationTask] = {}
    for seed in seeds:
        for scale in SCALES:
            document = scenario(INFAAS, VLLM, SCALES[scale], quick=quick)
            tasks["infaas", scale, seed] = SimulationTask(document, seed, ktier_runs.measure)
        for mix, scale, k in sorted(settings):
            document = scenario(ktier_policies(k), LLUMLET, SCALES[scale], mix=mix, num_tiers=k, quick=quick)
            is_shown = scale == "10k" and k in SHOWN_TIERS and seed == seeds[0]
            measure = ktier_runs.measure_curves if is_shown else ktier_runs.measure
            tasks["ktier", mix, scale, k, seed] = SimulationTask(document, seed, measure)
        for name, (policies, engine) in PARTS.items():
            document = scenario(policies, engine, SCALES["10k"], num_tiers=4, quick=quick)
            tasks["part", name, seed] = SimulationTask(document, seed, ktier_runs.measure)
    for mix, scale, k in _settings("-at-once") if "-at-once" in readings else ():
        document = scenario(ktier_runs.at_once(k), LLUMLET, SCALES[scale], mix=mix, num_tiers=k, quick=quick)
        for seed in seeds:
            tasks["ktier-at-once", mix, scale, k, seed] = SimulationTask(document, seed, ktier_runs.measure)
    return tasks


class BurstRuns(SeedResults):
    """The findings of the burst."""

    def __init__(self, results: Results, seeds: Sequence[int], quick: bool, readings: Sequence[str] = READINGS) -> None:
        super().__init__(results, seeds)
        self.quick, self.readings = quick, readings

    def ktier(self, mix: str, scale: str, k: int, *path: str) -> list[Any]:
        """The paper's system, by seed."""
        return self.values(("ktier", "uniform" if k == 1 else mix, scale, k), *path)

    def speed_ups(self, mix: str, scale: str, k: int, metric: str, reading: str = "") -> list[float]:
        """A column of Tables 2 to 4, by seed; `reading` is one of `READINGS`."""
        if metric == "cost":
            return [cost_improvement(value) for value in self.speed_ups(mix, scale, k, "e2e-p99", reading)]
        path = metric.split("-")
        ktier = self.values((f"ktier{reading}", mix, scale, k), *path) if reading else self.ktier(mix, scale, k, *path)
        return ratios(self.values(("infaas", scale), *path), ktier)

    def tier(self, mix: str, k: int, tier: int, name: str, number: str) -> list[float]:
        """The latency of one tier in the runs with 10,000 requests, by seed."""
        return self.ktier(mix, "10k", k, "tiers", str(tier), name, number)

    def all(self, mix: str, k: int, name: str, number: str) -> list[float]:
        """The latency over all tiers in the runs with 10,000 requests, by seed."""
        return self.ktier(mix, "10k", k, name, number)

    def part(self, name: str) -> list[Any]:
        """The runs of one of `PARTS`, the baseline or K-tier."""
        if name == BASELINE:
            return self.values(("infaas", "10k"))
        if name == KTIER:
            return self.ktier("uniform", "10k", 4)
        if name == AT_ONCE:
            return self.values(("ktier-at-once", "uniform", "10k", 4))
        return self.values(("part", name))

    # Claims.

    def outcomes(self) -> dict[str, Finding]:
        tables = {id: each for reading in self.readings for id, each in self._tables(reading).items()}
        return {**self._differentiation(), **tables, **self._discussion()}

    def _differentiation(self) -> dict[str, Finding]:
        median = [self.tier("uniform", 3, tier, "prefill", "p50") for tier in (0, 1, 2)]
        ends = [self.tier("uniform", 5, tier, "e2e", "p99") for tier in range(5)]
        five = [self.tier("uniform", 5, tier, "prefill", "p50") for tier in (1, 2)]
        middle = [self.tier("enterprise", 5, tier, "prefill", "p50") for tier in (1, 2, 4)]
        last3, last5 = self.tier("gaussian", 3, 2, "e2e", "p99"), self.tier("gaussian", 5, 4, "e2e", "p99")
        narrower = [(b - a) < (d - c) for a, b, c, d in zip(*five, *median[1:], strict=True)]
        medians = f"Medians of TTFT, K=3: {', '.join(f'{fmean(each):.2f} s' for each in median)}"
        p99 = {k: self.all("uniform", k, "e2e", "p99") for k in (1, 3, 5, 10)}
        gaps = f"{fmean(median[2]) - fmean(median[1]):.1f} s with K=3, {fmean(five[1]) - fmean(five[0]):.1f} s with K=5"
        p99s = ", ".join(f"{fmean(values):.1f} s with K={k}" for k, values in p99.items())
        return {
            "k1-median": Finding(self.all("uniform", 1, "e2e", "p50"), "With 256 seats; the public scripts have 64."),
            **self._third_tiers(),
            "k3-gap": Finding(ratios(median[0], median[2]), f"{medians}."),
            "k5-ends": Finding(
                [v[0] < min(v[1:]) and v[-1] > max(v[:-1]) for v in zip(*ends, strict=True)], f"{p99s}."
            ),
            "k5-narrower": Finding(narrower, f"Between tiers 1 and 2: {gaps}."),
            "k5-p99": Finding(increases(p99[5], p99[3]), f"E2E P99: {p99s}."),
            "gaussian-tier0": Finding(self.tier("gaussian", 5, 0, "prefill", "p50"), "Tier 0 is a tenth of all."),
            "gaussian-last": Finding(increases(last5, last3), f"{fmean(last3):.1f} s, {fmean(last5):.1f} s."),
            "enterprise-middle": Finding(
                [max(a, b) / c for a, b, c in zip(*middle, strict=True)],
                f"Median TTFT of tiers 1, 2 and 4: {', '.join(f'{fmean(each):.1f} s' for each in middle)}.",
            ),
            "k10-tail": Finding(ratios(p99[10], p99[1]), f"E2E P99: {p99s}."),
        }

    def _third_tiers(self) -> dict[str, Finding]:
        """K=3 in seconds, for both readings."""
        findings = {}
        for reading in self.readings:
            for tier in (0, 2):
                path = ("tiers", str(tier), "prefill", "p50")
                values = self.values((f"ktier{reading}", "uniform", "10k", 3), *path)
                why = (
                    "The fleet serves these requests in about half a minute, and the last third of them wait until the "
                    "others are served; in 3 s it serves a tenth."
                    if tier
                    else "A third of the requests arrive at 417/s, and the fleet serves fewer."
                )
                findings[f"k3-tier{tier}{reading}"] = Finding(values, why)
        return findings

    def _tables(self, reading: str) -> dict[str, Finding]:
        """Tables 2 to 4 as a whole, the abstract's numbers, and the best K, for one reading."""
        cells = [(*setting, metric) for setting in _settings(reading) for metric in LATENCIES]
        columns = {cell: self.speed_ups(*cell, reading=reading) for cell in cells}
        shares = [share_of_printed({c: v[i] for c, v in columns.items()}) for i in range(len(self.seeds))]
        why = self.why_less(reading)
        falls = [(columns[c], columns[c[0], "10k", *c[2:]]) for c in cells if c[1] == "15k"]
        fall = [exp(fmean(log(b[i] / a[i]) for b, a in falls)) for i in range(len(self.seeds))]
        return {
            f"tables{reading}": Finding(shares, f"{len(cells)} latency cells. {why}"),
            **{
                f"headline-{metric}{reading}": Finding(columns[mix, "10k", 4, metric], why)
                for metric, (mix, _) in HEADLINES.items()
            },
            f"peak{reading}": self._peak(reading),
            f"load-effect{reading}": Finding(fall, self._why_fall(reading)),
        }

    def _peak(self, reading: str) -> Finding:
        by_mix = {m: [self.speed_ups(m, "10k", k, "e2e-p99", reading) for k in TABLE_TIERS] for m in MIXES}
        leads = [[b > max(a, c) for a, b, c in zip(*by_tiers, strict=True)] for by_tiers in by_mix.values()]
        ups = "; ".join(
            f"{mix} {', '.join(f'{fmean(v):.2f}x (K={k})' for k, v in zip(TABLE_TIERS, by_tiers, strict=True))}"
            for mix, by_tiers in by_mix.items()
        )
        why = "The last tier waits longest, and more tiers make it wait longer." + (
            "" if reading else " With one queue in front of the fleet this follows from the dispatch."
        )
        return Finding([all(each) for each in zip(*leads, strict=True)], f"{ups}. {why}")

    def _why_fall(self, reading: str) -> str:
        infaas = [self.values(("infaas", scale), "e2e", "mean") for scale in SCALES]
        own = [self.values((f"ktier{reading}", "uniform", scale, 4), "e2e", "mean") for scale in SCALES]
        grows = [fmean(ratios(b, a)) for a, b in (infaas, own)]
        return (
            f"Mean E2E grows with the requests: {grows[0]:.2f}x with INFaaS, {grows[1]:.2f}x with K-tier (uniform, "
            "K=4). A saturated fleet takes 1.5 times as long. The paper's 36 cells all fall, by 1.23 to 1.79x, "
            "so its own system grew by 1.8 to 2.7x: with 10,000 requests it was not saturated."
        )

    def _discussion(self) -> dict[str, Finding]:
        ups = {mix: self.speed_ups(mix, "10k", 4, "e2e-p99") for mix in MIXES}
        base = [run["e2e"]["mean"] for run in self.part(BASELINE)]
        first, last = (self.tier("uniform", 4, tier, "e2e", "mean") for tier in (0, 3))
        means = (
            f"Mean E2E: {fmean(base):.1f} s with INFaaS and vLLM, {fmean(first):.1f} s in tier 0, {fmean(last):.1f} s"
        )
        numbers = ", ".join(f"{mix} {fmean(values):.2f}x" for mix, values in ups.items())
        largest = [e > max(u, g) for u, g, e in zip(*ups.values(), strict=True)]
        return {
            "enterprise-largest": Finding(largest, f"{numbers}."),
            "tier0-gains": Finding([a < b for a, b in zip(first, base, strict=True)], f"{means} in tier 3."),
            "last-tier-pays": Finding([a > b for a, b in zip(last, base, strict=True)], f"{means} in tier 3."),
        }

    def why_less(self, reading: str = "") -> str:
        """Why the speed-ups over all requests stay below the paper's."""
        mixed, ktier = (
            fmean(run["prefill"]["mean"] for run in self.part(name))
            for name in ("INFaaS, mixed batches", AT_ONCE if reading else KTIER)
        )
        return (
            "All seats are busy on both sides, so the order decides who waits, not how long all do: mean prefill takes "
            f"{mixed:.1f} s with INFaaS and the same batches, {ktier:.1f} s with K-tier (10,000 requests). See sweep-* "
            "and seats-*."
        )

    # Figures and tables.

    def figures(self, mix: str) -> list[Figure]:
        """Figure 5, 8 or 9: distributions by tier."""
        names = {"ttft": "TTFT (s)", "tbt": "time between tokens (s)", "e2e": "E2E (s)"}
        figures = []
        for k in SHOWN_TIERS:
            curves = self.ktier(mix, "10k", k)[0]["curves"]
            medians = [self.tier(mix, k, tier, "prefill", "p50") for tier in range(k)]
            shows = f"Median TTFT from tier 0 on: {', '.join(f'{fmean(each):.2f} s' for each in medians)}."
            for name, axis in names.items():
                samples = {f"tier {tier}": curves[str(tier)][name] for tier in range(k)}
                title = f"{mix}, K={k}: {axis.partition(' (')[0]}"
                figures.append(Figure(FIGURES[mix], title, shows, charts.distributions(samples, axis)))
        return figures

    def table(self, mix: str) -> PaperTable:
        """Table 2, 3 or 4, with the paper's numbers beside ours."""
        heads = ["requests wait", "requests", "K", *(text for words in METRICS.values() for text in (words, "paper"))]
        rows: list[Row] = []
        for reading in self.readings:
            for _, scale, k in [each for each in _settings(reading) if each[0] == mix]:
                row: Row = ["at once" if reading else "in front", f"{SCALES[scale]:,}", k]
                for metric in METRICS:
                    value = fmean(self.speed_ups(mix, scale, k, metric, reading))
                    row += [value, PRINTED[mix, scale, k].value(metric)]
                rows.append(row)
        shows = (
            "Over INFaaS and vLLM with the same seats and memory; means over seeds. Cost per latency: 1 - 1 / E2E P99."
        )
        return PaperTable(TABLES[mix], f"Speed-up, {mix}", shows, heads, rows)

    def sweep(self) -> Figure:
        """K from 1 to 10, beyond the paper's three values."""
        lines = {
            words: [(float(k), self.speed_ups("uniform", "10k", k, metric)) for k in tiers_swept(self.quick)]
            for metric, words in METRICS.items()
            if metric != "cost"
        }
        shows = "All requests together gain next to nothing from tiers, and the tail pays little for them."
        chart = charts.curves(lines, "tiers K", "speed-up over INFaaS and vLLM")
        return Figure("Headway 1", "Speed-up over K, uniform, 10,000 requests", shows, chart)

    def parts(self) -> PaperTable:
        """The effect of each part of the system, and of batch slots."""
        heads = [
            "system",
            "prefill mean (s)",
            "prefill P99",
            "E2E mean",
            "E2E P99",
            "tier 0 TTFT p50",
            "tier 3 TTFT p50",
        ]
        rows: list[Row] = []
        at_once = (AT_ONCE,) if "-at-once" in self.readings else ()
        for name in (BASELINE, *list(PARTS)[:2], KTIER, *at_once, *list(PARTS)[2:]):
            runs = self.part(name)
            row: Row = [name]
            row += [
                fmean(run[what][number] for run in runs) for what in ("prefill", "e2e") for number in ("mean", "p99")
            ]
            for tier in ("0", "3"):
                medians = [run["tiers"].get(tier, run["tiers"]["0"])["prefill"]["p50"] for run in runs]
                row.append(fmean(medians))
            rows.append(row)
        shows = (
            f"Uniform, K=4, 10,000 requests. Mixed batches and the queue by tier make the difference. {FEW}: the cap "
            "of the paper's public scripts; seats and memory for all: its public Llumlet counts neither."
        )
        return PaperTable("Headway 2", "Which piece does what", shows, heads, rows)
