"""Unlimited batch slots and memory, as in the authors' public Llumlet."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from headway_papers.reproduce.findings import Finding
from headway_papers.reproduce.ktier.burst import ALL_IN, ALL_SEATED, FEW, INFAAS_ALL_IN, PARTS, PUBLIC_SEATS
from headway_papers.reproduce.ktier.claims import SCALES, cost_improvement
from headway_papers.reproduce.ktier.runs import UNBOUNDED, ktier_policies, measure, scenario
from headway_papers.reproduce.results import Key, SeedResults, ratios
from headway_papers.reproduce.tasks import SimulationTask

SEATED_TIERS = (1, 3)
"""Values of K for further runs with unlimited batch slots and memory."""


def tasks(seeds: Sequence[int], quick: bool) -> dict[Key, SimulationTask]:
    """Runs with unlimited batch slots: the parts of Headway 2, and K-tier with one and three tiers."""
    tasks: dict[Key, SimulationTask] = {}
    for seed in seeds:
        for name in (FEW, ALL_SEATED, ALL_IN, INFAAS_ALL_IN):
            policies, engine = PARTS[name]
            document = scenario(policies, engine, SCALES["10k"], num_tiers=4, quick=quick)
            tasks["part", name, seed] = SimulationTask(document, seed, measure)
        for k in SEATED_TIERS:
            document = scenario(ktier_policies(k, seats=8192), UNBOUNDED, SCALES["10k"], num_tiers=k, quick=quick)
            tasks["seats", k, seed] = SimulationTask(document, seed, measure)
    return tasks


class SeatRuns(SeedResults):
    """The findings with unlimited batch slots."""

    def outcomes(self) -> dict[str, Finding]:
        few = f"Against {PUBLIC_SEATS} seats: the batches that decode are larger, so that each token takes longer."
        same = "The same seats and memory on both sides."
        findings = {}
        for name, slow, fast, sizes in (
            ("seats", FEW, ALL_IN, few),
            ("seats-counted", FEW, ALL_SEATED, few),
            ("seats-same", INFAAS_ALL_IN, ALL_IN, same),
        ):
            for what, number in (("prefill", "mean"), ("e2e", "mean"), ("e2e", "p99")):
                both = [self.values(("part", part), what, number) for part in (slow, fast)]
                why = f"{', '.join(f'{fmean(each):.1f} s' for each in both)}. {sizes}"
                times = ratios(*both)
                if number == "p99":
                    better = fmean(map(cost_improvement, times))
                    why += f" Cost per latency: {abs(better):.0%} {'better' if better > 0 else 'worse'}."
                findings[f"{name}-{what}-{number}"] = Finding(times, why)
        medians = {tier: self.values(("seats", 3), "tiers", str(tier), "prefill", "p50") for tier in range(3)}
        listed = ", ".join(f"{fmean(each):.2f} s" for each in medians.values())
        k1 = {number: self.values(("seats", 1), "e2e", number) for number in ("p50", "mean")}
        findings["seats-k1-median"] = Finding(k1["p50"], f"Mean {fmean(k1['mean']):.1f} s.")
        for tier in (0, 2):
            findings[f"seats-k3-tier{tier}"] = Finding(medians[tier], f"Medians of TTFT, K=3: {listed}.")
        return findings
