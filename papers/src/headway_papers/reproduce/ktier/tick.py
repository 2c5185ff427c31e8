"""The interval of migration, with immediate placement of each request.

The paper gives no interval. Llumnix's own is 50 ms, in which about sixty requests arrive at 1,250 requests/s. Requests
that wait at a full replica meanwhile stay there, although another replica has a free batch slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from headway_papers.reproduce.findings import Finding
from headway_papers.reproduce.ktier.claims import SCALES
from headway_papers.reproduce.ktier.runs import INFAAS, LLUMLET, VLLM, at_once, measure, scenario
from headway_papers.reproduce.results import Key, SeedResults, ratios, reductions
from headway_papers.reproduce.tasks import SimulationTask

TICKS_S = (0.05, 0.005)
TIERS = 4


def tasks(seeds: Sequence[int]) -> dict[Key, SimulationTask]:
    """The baseline, and K-tier with each interval: uniform tiers, half of the fleet, the requests and the rate."""
    tasks: dict[Key, SimulationTask] = {}
    baseline = scenario(INFAAS, VLLM, SCALES["10k"], quick=True)
    by_tick = {
        tick_s: scenario(at_once(TIERS, interval_s=tick_s), LLUMLET, SCALES["10k"], num_tiers=TIERS, quick=True)
        for tick_s in TICKS_S
    }
    for seed in seeds:
        tasks["tick", "INFaaS", seed] = SimulationTask(baseline, seed, measure)
        for tick_s, document in by_tick.items():
            tasks["tick", tick_s, seed] = SimulationTask(document, seed, measure)
    return tasks


class TickRuns(SeedResults):
    """The findings on the interval."""

    def outcomes(self) -> dict[str, Finding]:
        findings = {}
        for what, number in (("prefill", "mean"), ("e2e", "mean"), ("e2e", "p99")):
            infaas, slow, fast = (self.values(("tick", name), what, number) for name in ("INFaaS", *TICKS_S))
            means = (
                f"{fmean(infaas):.1f} s with INFaaS, {fmean(slow):.1f} s every 50 ms, {fmean(fast):.1f} s every 5 ms."
            )
            findings[f"tick-{what}-{number}"] = Finding(ratios(infaas, fast), means)
            if what == "prefill":
                findings["tick-shorter"] = Finding(reductions(fast, slow), means)
        return findings
