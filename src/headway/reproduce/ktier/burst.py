"""10,000 and 15,000 requests within seconds: tiers, Tables 2 to 4, Figures 5, 8 and 9 of K-tier Llumnix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from headway.reproduce import charts
from headway.reproduce.findings import Figure, Finding, PaperTable, Row
from headway.reproduce.ktier import runs as ktier_runs
from headway.reproduce.ktier.claims import METRICS, MIXES, PRINTED, SCALES, TABLE_TIERS, cost_improvement
from headway.reproduce.ktier.runs import INFAAS, LLUMLET, UNBOUNDED, VLLM, ktier_policies, scenario
from headway.reproduce.results import Key, Results, SeedResults, increases, ratios
from headway.reproduce.tasks import SimulationTask

SHOWN_TIERS = (1, 3, 5)
"""K in Figures 5, 8 and 9."""
FIGURES = {"uniform": "Figure 5", "gaussian": "Figure 8", "enterprise": "Figure 9"}
TABLES = {"uniform": "Table 2", "gaussian": "Table 3", "enterprise": "Table 4"}
PUBLIC_SEATS = 64
"""The batch cap in the authors' public scripts."""
BASELINE, KTIER = "INFaaS + vLLM", "+ freeness, headroom, migration (K-tier)"
FEW = f"INFaaS + vLLM, {PUBLIC_SEATS} seats"
ALL_IN = "K-tier, seats and memory for all"
PARTS: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "INFaaS, mixed batches": (INFAAS, LLUMLET),
    "+ one queue by tier": (ktier_runs.queue_only(4), LLUMLET),
    "K-tier, each request placed at once": (ktier_runs.at_once(4), LLUMLET),
    ALL_IN: (ktier_policies(4, seats=8192), UNBOUNDED),
    FEW: (INFAAS, VLLM | {"max_num_seqs": PUBLIC_SEATS}),
}
"""Ablations: (policies, engine), four uniform tiers, 10,000 requests."""


def tiers_swept(quick: bool) -> tuple[int, ...]:
    """K, at 10,000 requests in uniform tiers."""
    return (1, 3, 4, 5, 10) if quick else tuple(range(1, 11))


def tasks(seeds: Sequence[int], quick: bool) -> dict[Key, SimulationTask]:
    """All runs of this part. One without tiers is the same whatever the mix."""
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
    return tasks


class BurstRuns(SeedResults):
    """The findings of the burst."""

    def __init__(self, results: Results, seeds: Sequence[int], quick: bool) -> None:
        super().__init__(results, seeds)
        self.quick = quick

    def ktier(self, mix: str, scale: str, k: int, *path: str) -> list[Any]:
        """By seed: the paper's system."""
        return self.values(("ktier", "uniform" if k == 1 else mix, scale, k), *path)

    def speed_ups(self, mix: str, scale: str, k: int, metric: str) -> list[float]:
        """A column of Tables 2 to 4, a value a seed."""
        if metric == "cost":
            return [cost_improvement(value) for value in self.speed_ups(mix, scale, k, "e2e-p99")]
        path = metric.split("-")
        return ratios(self.values(("infaas", scale), *path), self.ktier(mix, scale, k, *path))

    def tier(self, mix: str, k: int, tier: int, name: str, number: str) -> list[float]:
        """One tier's latency, 10,000 requests, a value a seed."""
        return self.ktier(mix, "10k", k, "tiers", str(tier), name, number)

    def all(self, mix: str, k: int, name: str, number: str) -> list[float]:
        """The latency of all, 10,000 requests, a value a seed."""
        return self.ktier(mix, "10k", k, name, number)

    def part(self, name: str) -> list[Any]:
        """The runs of one of `PARTS`, of the baseline or of K-tier."""
        if name == BASELINE:
            return self.values(("infaas", "10k"))
        if name == KTIER:
            return self.ktier("uniform", "10k", 4)
        return self.values(("part", name))

    # Claims.

    def outcomes(self) -> dict[str, Finding]:
        return {**self._differentiation(), **self._tables(), **self._seats(), **self._discussion()}

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
            "k1-median": Finding(self.all("uniform", 1, "e2e", "p50"), "Nothing is fitted."),
            "k3-gap": Finding(ratios(median[0], median[2]), f"{medians}."),
            "k5-ends": Finding([max(v) == v[-1] and min(v) == v[0] for v in zip(*ends, strict=True)], f"{p99s}."),
            "k5-narrower": Finding(narrower, f"Between tiers 1 and 2: {gaps}."),
            "k5-p99": Finding(increases(p99[5], p99[3]), f"E2E P99: {p99s}."),
            "gaussian-tier0": Finding(self.tier("gaussian", 5, 0, "prefill", "p50"), "Tier 0 is a tenth of all."),
            "gaussian-last": Finding(
                [b > a for a, b in zip(last3, last5, strict=True)], f"{fmean(last3):.1f} s, {fmean(last5):.1f} s."
            ),
            "enterprise-middle": Finding(
                [max(a, b) / c for a, b, c in zip(*middle, strict=True)],
                f"Median TTFT of tiers 1, 2 and 4: {', '.join(f'{fmean(each):.1f} s' for each in middle)}.",
            ),
            "k10-tail": Finding(ratios(p99[10], p99[1]), f"E2E P99: {p99s}."),
        }

    def _tables(self) -> dict[str, Finding]:
        why = self.why_less()
        findings = {}
        for mix in MIXES:
            for scale in SCALES:
                for metric in METRICS:
                    findings[f"{mix}-{scale}-{metric}"] = Finding(self.speed_ups(mix, scale, 4, metric), why)
            by_tiers = [self.speed_ups(mix, "10k", k, "e2e-p99") for k in TABLE_TIERS]
            leads = [four - max(three, five) for three, four, five in zip(*by_tiers, strict=True)]
            ups = ", ".join(f"{fmean(v):.2f}x (K={k})" for k, v in zip(TABLE_TIERS, by_tiers, strict=True))
            numbers = (
                "As many seats serve as many requests, whatever their number of tiers, and the last tier waits longest."
            )
            findings[f"{mix}-peak"] = Finding(leads, f"{ups}. {numbers}")
        return findings

    def _discussion(self) -> dict[str, Finding]:
        ups = {mix: self.speed_ups(mix, "10k", 4, "e2e-p99") for mix in MIXES}
        at_15k = self.speed_ups("uniform", "15k", 4, "e2e-p99")
        base = [run["e2e"]["mean"] for run in self.part(BASELINE)]
        first, last = (self.tier("uniform", 4, tier, "e2e", "mean") for tier in (0, 3))
        means = (
            f"Mean E2E: {fmean(base):.1f} s with INFaaS and vLLM, {fmean(first):.1f} s in tier 0, {fmean(last):.1f} s"
        )
        numbers = ", ".join(f"{mix} {fmean(values):.2f}x" for mix, values in ups.items())
        largest = [e >= max(u, g) for u, g, e in zip(*ups.values(), strict=True)]
        return {
            "enterprise-largest": Finding(largest, f"{numbers}."),
            "tier0-gains": Finding([a < b for a, b in zip(first, base, strict=True)], f"{means} in tier 3."),
            "last-tier-pays": Finding([a > b for a, b in zip(last, base, strict=True)], f"{means} in tier 3."),
            "load-effect": Finding(
                ratios(at_15k, ups["uniform"]),
                f"{fmean(ups['uniform']):.2f}x and {fmean(at_15k):.2f}x: there is little to lose.",
            ),
        }

    def why_less(self) -> str:
        """Why the speed-ups of all requests together stay below the paper's."""
        mixed, ktier = (
            fmean(run["prefill"]["mean"] for run in runs)
            for runs in (self.part("INFaaS, mixed batches"), self.part(KTIER))
        )
        return (
            "All seats are busy on both sides, so the order decides who waits, not how long all do: mean prefill takes "
            f"{mixed:.1f} s with INFaaS and the same batches, {ktier:.1f} s with K-tier (10,000 requests). See seats-*."
        )

    def _seats(self) -> dict[str, Finding]:
        """K-tier with seats for all, INFaaS and vLLM with few."""
        slow, fast = self.part(FEW), self.part(ALL_IN)
        sizes = f"Against {PUBLIC_SEATS} seats: the batches that decode are larger, so that each token takes longer."
        return {
            f"seats-{what}-mean": Finding(
                [a[what]["mean"] / b[what]["mean"] for a, b in zip(slow, fast, strict=True)],
                f"{fmean(a[what]['mean'] for a in slow):.1f} s, {fmean(b[what]['mean'] for b in fast):.1f} s. {sizes}",
            )
            for what in ("prefill", "e2e")
        }

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
        """Table 2, 3 or 4, the paper's numbers beside ours."""
        heads = ["requests", "K", *(text for words in METRICS.values() for text in (words, "paper"))]
        rows: list[Row] = []
        for scale in SCALES:
            for k in TABLE_TIERS:
                row: Row = [f"{SCALES[scale]:,}", k]
                for metric in METRICS:
                    row += [fmean(self.speed_ups(mix, scale, k, metric)), PRINTED[mix, scale, k].value(metric)]
                rows.append(row)
        shows = (
            "Over INFaaS and vLLM with the same seats and memory; means over seeds. Cost per latency: 1 - 1 / E2E P99."
        )
        return PaperTable(TABLES[mix], f"Speed-up, {mix}", shows, heads, rows)

    def sweep(self) -> Figure:
        """Beyond the paper's three: K from 1 to 10."""
        lines = {
            words: [(float(k), self.speed_ups("uniform", "10k", k, metric)) for k in tiers_swept(self.quick)]
            for metric, words in METRICS.items()
            if metric != "cost"
        }
        shows = "All requests together gain next to nothing from tiers, and the tail pays little for them."
        chart = charts.curves(lines, "tiers K", "speed-up over INFaaS and vLLM")
        return Figure("Headway 1", "Speed-up over K, uniform, 10,000 requests", shows, chart)

    def parts(self) -> PaperTable:
        """What each piece of the system does, and what seats do."""
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
        for name in (BASELINE, *list(PARTS)[:2], KTIER, *list(PARTS)[2:]):
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
            "of the paper's public scripts; seats and memory for all: what its public Llumlet has."
        )
        return PaperTable("Headway 2", "Which piece does what", shows, heads, rows)
