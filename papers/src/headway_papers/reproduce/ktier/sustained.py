"""Open questions of K-tier Llumnix (section 6.5): tiers under sustained load, and the best K and decay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from headway import scenario
from headway.config.strict_yaml import Places
from headway.metrics.interval import interval
from headway.planning.rehearsals import Rehearsals, Resources
from headway.planning.tiers import rehearsal, search
from headway_papers.reproduce import charts
from headway_papers.reproduce.findings import Exhibit, Figure, Finding, PaperTable, Row
from headway_papers.reproduce.ktier import runs
from headway_papers.reproduce.ktier.runs import INFAAS, LLUMLET, VLLM, ktier_policies
from headway_papers.reproduce.results import Key, Results, SeedResults, ratios, reductions
from headway_papers.reproduce.tasks import Call, SimulationTask

HEADROOM = ("K-tier without headroom", "K-tier")
KV_TOKENS = 16_384
"""KV cache of a replica: small, so that headroom concerns a scarce resource."""
RATES = (240.0, 280.0, 300.0)
"""Requests/s. The fleet sustains about 275."""
FULL = 280.0
NUM_REQUESTS = 12_000
SYSTEMS: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "INFaaS + vLLM": (INFAAS, VLLM),
    "INFaaS, mixed batches": (INFAAS, LLUMLET),
    "K-tier without headroom": (ktier_policies(4, headroom="none"), LLUMLET),
    "K-tier": (ktier_policies(4), LLUMLET),
}
RARE_SHARES = (0.01, 0.385, 0.385, 0.22)
"""Shares by tier: as `enterprise`, with a hundredth in tier 0."""
CLASSES = 10
"""Classes of customers, equal except for their promised TTFT: 0.25 s, 0.5 s, 1 s, ... 128 s."""
CLASS_RATE = 600.0
CHOICES = (1, 2, 3, 4, 5, 6, 8, 10)
DECAYS = (0.5, 2.0)
TOLERANCE = 0.01
"""Negligible difference of attainment."""


def load_tasks(seeds: Sequence[int], quick: bool) -> dict[Key, SimulationTask]:
    """All runs under sustained load: enterprise, four tiers."""
    tasks: dict[Key, SimulationTask] = {}
    for name, (policies, engine) in SYSTEMS.items():
        for rate in RATES:
            document = runs.scenario(
                policies,
                engine,
                NUM_REQUESTS,
                mix="enterprise",
                num_tiers=4,
                rate=rate,
                quick=quick,
                kv_capacity_tokens=KV_TOKENS,
            )
            for seed in seeds:
                tasks["load", name, rate, seed] = SimulationTask(document, seed, runs.measure)
    return tasks


def rare_tasks(seeds: Sequence[int], quick: bool) -> dict[Key, SimulationTask]:
    """Runs with a hundredth in tier 0, with and without headroom."""
    tasks: dict[Key, SimulationTask] = {}
    for name in HEADROOM:
        policies, engine = SYSTEMS[name]
        document = runs.scenario(policies, engine, NUM_REQUESTS, rate=FULL, quick=quick, kv_capacity_tokens=KV_TOKENS)
        document["workload"]["tiers"] = [{"tier": tier, "share": share} for tier, share in enumerate(RARE_SHARES)]
        for seed in seeds:
            tasks["rare", name, seed] = SimulationTask(document, seed, runs.measure)
    return tasks


def setting_tasks(seeds: Sequence[int], quick: bool) -> dict[Key, Call]:
    """All runs that search the best K and decay."""
    num = 1000 if quick else 4000
    return {
        ("setting", k, decay, seed): Call(attainment, {"k": k, "decay": decay, "seed": seed, "num_requests": num})
        for k in CHOICES
        for decay in (DECAYS if k > 1 else DECAYS[:1])
        for seed in seeds
    }


def attainment(k: int, decay: float, seed: int, num_requests: int) -> dict[str, Any]:
    """Share of all requests that meet their class's SLO, if K tiers serve ten classes with neighbours together."""
    document = runs.scenario(ktier_policies(k), LLUMLET, num_requests, rate=CLASS_RATE, kv_capacity_tokens=KV_TOKENS)
    document["workload"]["tiers"] = [{"tier": c, "ttft_s": 0.25 * 2**c} for c in range(CLASSES)]
    with TemporaryDirectory() as folder:
        chosen = scenario.assemble(document, Places(), Path())
        evaluate = rehearsal.TierRehearsal(chosen, Rehearsals(Resources(scenario.Simulator())), Path(folder))
        return {"attainment": evaluate(k, decay, seed)}


class SustainedRuns(SeedResults):
    """The findings under sustained load."""

    def tier(self, name: str, rate: float, tier: int, number: str) -> list[float]:
        """TTFT of a tier, by seed."""
        return self.values(("load", name, rate), "tiers", str(tier), "prefill", number)

    def outcomes(self) -> dict[str, Finding]:
        mixed, without, ktier = (self.tier(name, FULL, 0, "p99") for name in list(SYSTEMS)[1:])
        numbers = ", ".join(
            f"{n} {fmean(v) * 1e3:.0f} ms" for n, v in zip(list(SYSTEMS)[1:], (mixed, without, ktier), strict=True)
        )
        presence = (
            "All tiers are present at all replicas all the time, so headroom makes each look as full as the next."
        )
        return {
            "sustained-tier0": Finding(ratios(ktier, mixed), f"{numbers}."),
            "headroom-tier0": Finding(reductions(ktier, without), f"{numbers}. {presence}"),
        }

    def rare(self) -> Finding:
        """The effect of headroom if most replicas have no request of tier 0."""
        without, ktier = (self.values(("rare", name), "tiers", "0", "prefill", "p99") for name in HEADROOM)
        means = [f"{name} {fmean(v) * 1e3:.0f} ms" for name, v in zip(HEADROOM, (without, ktier), strict=True)]
        return Finding(reductions(ktier, without), f"{', '.join(means)}.")

    def figures(self) -> list[Figure]:
        figures = []
        for tier in (0, 1, 3):
            lines = {name: [(rate, self.tier(name, rate, tier, "p99")) for rate in RATES] for name in SYSTEMS}
            at_full = ", ".join(f"{name} {fmean(self.tier(name, FULL, tier, 'p99')):.2f} s" for name in SYSTEMS)
            chart = charts.curves(lines, "requests/s", "TTFT P99 (s)", yaxis={"type": "log"})
            title = f"Sustained load, enterprise, K=4: tier {tier}"
            figures.append(Figure("Headway 3", title, f"At {FULL:g} requests/s: {at_full}.", chart))
        return figures


class SettingRuns:
    """The best K and decay, and their certainty."""

    def __init__(self, results: Results, seeds: Sequence[int]) -> None:
        self.plan = search.plan(
            lambda k, decay, seed: float(results["setting", k, decay, seed]["attainment"]),
            CHOICES,
            DECAYS,
            seeds,
            interval,
            TOLERANCE,
        )

    def exhibits(self) -> list[Exhibit]:
        """The chart and the table."""
        plan = self.plan
        lines = {
            f"decay {decay:g}": [
                (float(s.num_tiers), s.values) for s in plan.settings if s.decay == decay or s.num_tiers == 1
            ]
            for decay in sorted({s.decay for s in plan.settings})
        }
        best, chosen = plan.best, plan.chosen
        shows = (
            f"Ten classes of customers at {CLASS_RATE:g} requests/s. Best: K={best.num_tiers}, decay {best.decay:g}, "
            f"{best.mean:.1%}; {len(plan.tied)} of {len(plan.settings)} settings cannot be told from it. The fewest "
            f"tiers that lose no more than {TOLERANCE:.0%}: K={chosen.num_tiers}, decay {chosen.decay:g}, "
            f"{chosen.mean:.1%}."
        )
        chart = charts.curves(lines, "tiers K", "share of requests that meet their SLO", yaxis={"tickformat": ".0%"})
        heads = [
            "K",
            "decay",
            "attainment",
            "loss, from",
            "to",
            "cannot be told from the best",
            "loses too little to matter",
        ]
        rows: list[Row] = [
            [s.num_tiers, s.decay, s.mean, *s.loss, "yes" if s.is_tied else "no", "yes" if s.is_enough else "no"]
            for s in plan.settings
        ]
        return [
            Figure("Headway 4", "How many tiers do ten classes of customers need?", shows, chart),
            PaperTable(
                "Headway 5", "All settings", "Losses are 95% intervals of paired differences to the best.", heads, rows
            ),
        ]
