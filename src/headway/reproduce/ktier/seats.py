"""Seats and memory that nobody counts, as in the authors' public Llumlet; and the time between its migrations."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from headway.reproduce.findings import Finding
from headway.reproduce.ktier.burst import (
    ALL_IN,
    ALL_SEATED,
    FEW,
    INFAAS_ALL_IN,
    PARTS,
    PUBLIC_SEATS,
    SEEDS_AT_ONCE,
)
from headway.reproduce.ktier.claims import HEADLINES, SCALES
from headway.reproduce.ktier.runs import (
    INFAAS,
    LLUMLET,
    UNBOUNDED,
    VLLM,
    at_once,
    ktier_policies,
    measure,
    scenario,
)
from headway.reproduce.results import Key, SeedResults, ratios
from headway.reproduce.tasks import SimulationTask

SEATED_TIERS = (1, 3)
"""K of further runs with seats and memory for all."""
TICK_S = 0.005
"""Between migrations, where each request is placed at once; 0.05 in the paper."""
TICKS = tuple(f"headline-{metric}-5ms" for metric in HEADLINES)


def tasks(seeds: Sequence[int], quick: bool) -> dict[Key, SimulationTask]:
    """Runs with seats for all: the parts of Headway 2, and K-tier with one and three tiers."""
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


def tick_tasks(seeds: Sequence[int], quick: bool) -> dict[Key, SimulationTask]:
    """Runs with migrations ten times as often, and the baseline."""
    tasks: dict[Key, SimulationTask] = {}
    for seed in seeds[:SEEDS_AT_ONCE]:
        document = scenario(INFAAS, VLLM, SCALES["10k"], quick=quick)
        tasks["infaas", "10k", seed] = SimulationTask(document, seed, measure)
        for mix, _ in HEADLINES.values():
            policies = at_once(4)
            policies["migration"] |= {"interval_s": TICK_S}
            document = scenario(policies, LLUMLET, SCALES["10k"], mix=mix, num_tiers=4, quick=quick)
            tasks["tick", mix, seed] = SimulationTask(document, seed, measure)
    return tasks


class SeatRuns(SeedResults):
    """The findings of seats for all."""

    def outcomes(self) -> dict[str, Finding]:
        few = f"Against {PUBLIC_SEATS} seats: the batches that decode are larger, so that each token takes longer."
        same = "The same seats and memory on both sides."
        findings = {}
        for name, slow, fast, sizes in (
            ("seats", FEW, ALL_IN, few),
            ("seats-counted", FEW, ALL_SEATED, few),
            ("seats-same", INFAAS_ALL_IN, ALL_IN, same),
        ):
            for what in ("prefill", "e2e"):
                both = [self.values(("part", part), what, "mean") for part in (slow, fast)]
                means = ", ".join(f"{fmean(each):.1f} s" for each in both)
                findings[f"{name}-{what}-mean"] = Finding(ratios(*both), f"{means}. {sizes}")
        medians = {tier: self.values(("seats", 3), "tiers", str(tier), "prefill", "p50") for tier in range(3)}
        listed = ", ".join(f"{fmean(each):.2f} s" for each in medians.values())
        k1 = {number: self.values(("seats", 1), "e2e", number) for number in ("p50", "mean")}
        findings["seats-k1-median"] = Finding(k1["p50"], f"Mean {fmean(k1['mean']):.1f} s.")
        for tier in (0, 2):
            findings[f"seats-k3-tier{tier}"] = Finding(medians[tier], f"Medians of TTFT, K=3: {listed}.")
        return findings


class TickRuns(SeedResults):
    """The findings of shorter ticks, with the seeds of the reading that places each request at once."""

    def outcomes(self) -> dict[str, Finding]:
        findings = {}
        for metric, (mix, _) in HEADLINES.items():
            what, number = metric.split("-")
            base, ktier = (self.values(key, what, number) for key in (("infaas", "10k"), ("tick", mix)))
            moves = fmean(self.values(("tick", mix), "moves"))
            why = (
                f"{fmean(base):.1f} s with INFaaS and vLLM, {fmean(ktier):.1f} s with K-tier and {moves:,.0f} moves a "
                "run. At 50 ms: headline-*-at-once."
            )
            findings[f"headline-{metric}-5ms"] = Finding(ratios(base, ktier), why)
        return findings
