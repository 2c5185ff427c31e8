"""A sweep of the load, with rates relative to the measured capacities of INFaaS with vLLM and of Llumlet's batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from headway_papers.reproduce import charts
from headway_papers.reproduce.findings import Figure, Finding
from headway_papers.reproduce.ktier import runs
from headway_papers.reproduce.ktier.runs import INFAAS, LLUMLET, VLLM, ktier_policies, scenario
from headway_papers.reproduce.results import Key, Results, SeedResults, ratios
from headway_papers.reproduce.runner import Runner
from headway_papers.reproduce.tasks import SimulationTask

NUM_REQUESTS = 10_000
BASE, MIXED, KTIER = "INFaaS + vLLM", "INFaaS, mixed batches", "K-tier"
SYSTEMS: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    BASE: (INFAAS, VLLM),
    MIXED: (INFAAS, LLUMLET),
    KTIER: (ktier_policies(4), LLUMLET),
}
FACTORS = (0.8, 0.9, 1.0, 1.25, 1.6)
"""Factors on the rate between the two capacities."""
SEARCH_SEED = 1_000_000
"""A seed that no claim uses."""


def between(runner: Runner) -> float:
    """The geometric mean of two capacities in requests/s: requests of the burst over the time until all are served."""
    tasks = {
        name: SimulationTask(scenario(*SYSTEMS[name], NUM_REQUESTS, quick=runner.quick), SEARCH_SEED, runs.measure)
        for name in (BASE, MIXED)
    }
    num = NUM_REQUESTS / (2 if runner.quick else 1)
    first, second = (num / run["end_s"] for run in runner.run(tasks).values())
    whole_fleet = 2 if runner.quick else 1
    return float(f"{whole_fleet * (first * second) ** 0.5:.4g}")


def tasks(seeds: Sequence[int], quick: bool, rate: float) -> dict[Key, SimulationTask]:
    """All runs of this part: four uniform tiers."""
    return {
        ("sweep", name, factor, seed): SimulationTask(
            scenario(policies, engine, NUM_REQUESTS, num_tiers=4, rate=factor * rate, quick=quick), seed, runs.measure
        )
        for name, (policies, engine) in SYSTEMS.items()
        for factor in FACTORS
        for seed in seeds
    }


class SweepRuns(SeedResults):
    """The findings of the sweep."""

    def __init__(self, results: Results, seeds: Sequence[int], rate: float) -> None:
        super().__init__(results, seeds)
        self.rate = rate

    def means(self, name: str, factor: float, what: str, number: str = "mean") -> list[float]:
        """Mean latency by seed, or another number of its distribution."""
        return self.values(("sweep", name, factor), what, number)

    def outcomes(self) -> dict[str, Finding]:
        prefill = {name: self.means(name, 1.0, "prefill") for name in SYSTEMS}
        e2e = {name: self.means(name, 1.0, "e2e") for name in SYSTEMS}
        p99 = {name: self.means(name, 1.0, "e2e", "p99") for name in SYSTEMS}
        texts = [
            f"{kind}: " + ", ".join(f"{name} {fmean(values):.2f} s" for name, values in of.items())
            for kind, of in (("Prefill", prefill), ("E2E", e2e), ("E2E P99", p99))
        ]
        where = f"At {self.rate:.4g} requests/s, where vLLM's queue grows and that of mixed batches does not."
        return {
            "sweep-prefill-mean": Finding(ratios(prefill[BASE], prefill[KTIER]), f"{where} {texts[0]}."),
            "sweep-e2e-mean": Finding(ratios(e2e[BASE], e2e[KTIER]), f"{where} {texts[1]}."),
            "sweep-e2e-p99": Finding(ratios(p99[BASE], p99[KTIER]), f"{where} {texts[2]}."),
            "sweep-batches": Finding(ratios(prefill[MIXED], prefill[KTIER]), f"{where} {texts[0]}."),
        }

    def figures(self) -> list[Figure]:
        figures = []
        for what, words in (("prefill", "prefill"), ("e2e", "E2E")):
            lines = {
                name: [(f * self.rate, ratios(self.means(BASE, f, what), self.means(name, f, what))) for f in FACTORS]
                for name in (MIXED, KTIER)
            }
            shows = "Over INFaaS and vLLM, all requests together. What mixed batches reach alone, tiers do not add to."
            chart = charts.curves(lines, "requests/s", f"speed-up of mean {words}")
            figures.append(Figure("Headway 7", f"Load and speed-up: mean {words}", shows, chart))
        return figures
