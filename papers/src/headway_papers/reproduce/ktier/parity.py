"""1,000 requests at 10/s: the cost of the mechanisms when nothing is scarce. Figures 6 and 7."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from headway_papers.reproduce import charts
from headway_papers.reproduce.findings import Figure, Finding
from headway_papers.reproduce.ktier import runs
from headway_papers.reproduce.ktier.runs import LLUMLET, ORCA, ROUND_ROBIN, SARATHI, VLLM, ktier_policies, scenario
from headway_papers.reproduce.results import Key, SeedResults, increases
from headway_papers.reproduce.tasks import SimulationTask

BASELINES: dict[str, Mapping[str, Any]] = {"vLLM": VLLM, "Orca": ORCA, "Sarathi": SARATHI}
"""Baselines with round robin, which ignore tiers."""
TIERS = tuple(range(1, 11))
NUM_REQUESTS = 1000
RATE = 10.0


def tasks(seeds: Sequence[int], quick: bool) -> dict[Key, SimulationTask]:
    """All runs of this part."""
    tasks: dict[Key, SimulationTask] = {}
    for seed in seeds:
        for name, engine in BASELINES.items():
            document = scenario(ROUND_ROBIN, engine, NUM_REQUESTS, rate=RATE, quick=quick)
            tasks["parity", name, seed] = SimulationTask(document, seed, runs.measure)
        for k in TIERS:
            document = scenario(ktier_policies(k), LLUMLET, NUM_REQUESTS, num_tiers=k, rate=RATE, quick=quick)
            tasks["parity", k, seed] = SimulationTask(document, seed, runs.measure)
    return tasks


class ParityRuns(SeedResults):
    """The findings at low load."""

    def latencies(self, system: str | int, name: str, number: str) -> list[float]:
        """A latency of a baseline, or of Llumlet with this number of tiers, by seed."""
        return self.values(("parity", system), name, number)

    def outcomes(self) -> dict[str, Finding]:
        systems: tuple[str | int, ...] = (*BASELINES, *TIERS)
        p99 = {system: self.latencies(system, "e2e", "p99") for system in systems}
        vllm, orca, sarathi = (p99[system] for system in BASELINES)
        first = p99[1]
        farthest = [
            max((own / o - 1 for o in baselines), key=abs)
            for own, *baselines in zip(first, vllm, orca, sarathi, strict=True)
        ]
        worst = [max(p99[k][i] for k in TIERS[1:]) / first[i] - 1 for i in range(len(self.seeds))]
        decode = {s: self.latencies(s, "decode", "mean") for s in ("vLLM", 1, 10)}
        prefill = {s: self.latencies(s, "prefill", "mean") for s in (1, 10)}
        growth = [(b / a) - (d / c) for a, b, c, d in zip(prefill[1], prefill[10], decode[1], decode[10], strict=True)]
        numbers = ", ".join(f"{name} {fmean(p99[name]):.3f} s" for name in BASELINES)
        moves = fmean(self.values(("parity", 10), "moves"))
        means = f"From K=1 to K=10, prefill {fmean(prefill[1]) * 1e3:.1f} to {fmean(prefill[10]) * 1e3:.1f} ms, decode"
        return {
            "parity-p99": Finding(first, f"{numbers}."),
            "parity-schedulers": Finding(farthest, f"{numbers}, Llumlet {fmean(first):.3f} s."),
            "parity-vllm": Finding(
                [v / fmean(baselines) - 1 for v, *baselines in zip(vllm, orca, sarathi, first, strict=True)],
                f"{numbers}, Llumlet {fmean(first):.3f} s: vLLM's decoding stands still for every prompt.",
            ),
            "parity-tiers": Finding(worst, f"{moves:.0f} moves with K=10, and hardly anybody waits."),
            "parity-decode": Finding(increases(decode[10], decode["vLLM"]), f"{numbers}."),
            "overhead-prefill": Finding(
                growth,
                f"{means} {fmean(decode[1]) * 1e3:.1f} to {fmean(decode[10]) * 1e3:.1f} ms: neither grows, as no seat "
                "is scarce, and freeness only says where a request goes.",
            ),
        }

    def figures(self) -> list[Figure]:
        """Figures 6 and 7: E2E percentiles by the number of tiers, compared with the baselines."""
        figures = []
        for number in ("p50", "p90", "p99"):
            lines = {name: [(float(k), self.latencies(name, "e2e", number)) for k in TIERS] for name in BASELINES}
            lines["Llumlet"] = [(float(k), self.latencies(k, "e2e", number)) for k in TIERS]
            first, last = (fmean(lines["Llumlet"][i][1]) for i in (0, -1))
            ends = f"Llumlet: {first:.3f} s with K=1, {last:.3f} s with K=10."
            chart = charts.curves(lines, "tiers K", f"E2E {number} (s)", yaxis={"rangemode": "tozero"})
            figures.append(Figure("Figure 6", f"E2E {number}, 10 requests/s", ends, chart))
        for name in ("e2e", "prefill", "decode"):
            for number in ("p99", "mean"):
                lines = {
                    "vLLM, round robin": [(float(k), self.latencies("vLLM", name, number)) for k in TIERS],
                    "Llumlet": [(float(k), self.latencies(k, name, number)) for k in TIERS],
                }
                ends = " and ".join(f"{label} {fmean(points[-1][1]):.3f} s" for label, points in lines.items())
                chart = charts.curves(lines, "tiers K", f"{name} {number} (s)", yaxis={"rangemode": "tozero"})
                figures.append(Figure("Figure 7", f"{name} {number}, 10 requests/s", f"With K=10: {ends}.", chart))
        return figures
