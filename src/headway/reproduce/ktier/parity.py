"""1,000 requests at 10/s: the cost of the machinery where nothing is scarce. Figures 6 and 7."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from headway.reproduce import charts
from headway.reproduce.findings import Figure, Finding
from headway.reproduce.ktier import runs
from headway.reproduce.ktier.runs import LLUMLET, ORCA, ROUND_ROBIN, SARATHI, VLLM, ktier_policies, scenario
from headway.reproduce.tasks import SimulationTask

Key = tuple[Any, ...]
BASELINES: dict[str, Mapping[str, Any]] = {"vLLM": VLLM, "Orca": ORCA, "Sarathi": SARATHI}
"""With round robin; tiers are nothing to them."""
TIERS = tuple(range(1, 11))
NUM_REQUESTS = 1000
RATE = 10.0


def tasks(seeds: Sequence[int], quick: bool) -> dict[Key, SimulationTask]:
    """All runs of this part."""
    made: dict[Key, SimulationTask] = {}
    for seed in seeds:
        for name, engine in BASELINES.items():
            document = scenario(ROUND_ROBIN, engine, NUM_REQUESTS, rate=RATE, quick=quick)
            made["parity", name, seed] = SimulationTask(document, seed, runs.measure)
        for k in TIERS:
            document = scenario(ktier_policies(k), LLUMLET, NUM_REQUESTS, num_tiers=k, rate=RATE, quick=quick)
            made["parity", k, seed] = SimulationTask(document, seed, runs.measure)
    return made


class ParityRuns:
    """The findings at low load."""

    def __init__(self, found: Mapping[Key, Any], seeds: Sequence[int]) -> None:
        self.found, self.seeds = found, seeds

    def values(self, system: str | int, name: str, number: str) -> list[float]:
        """Values by seed, of a baseline or of Llumlet with this number of tiers."""
        return [self.found["parity", system, seed][name][number] for seed in self.seeds]

    def outcomes(self) -> dict[str, Finding]:
        systems: tuple[str | int, ...] = (*BASELINES, *TIERS)
        p99 = {system: self.values(system, "e2e", "p99") for system in systems}
        vllm, orca, sarathi = (p99[system] for system in BASELINES)
        first = p99[1]
        farthest = [
            max((own / o - 1 for o in others), key=abs) for own, *others in zip(first, vllm, orca, sarathi, strict=True)
        ]
        worst = [max(p99[k][i] for k in TIERS[1:]) / first[i] - 1 for i in range(len(self.seeds))]
        decode = {s: self.values(s, "decode", "mean") for s in ("vLLM", 1, 10)}
        prefill = {s: self.values(s, "prefill", "mean") for s in (1, 10)}
        growth = [(b / a) - (d / c) for a, b, c, d in zip(prefill[1], prefill[10], decode[1], decode[10], strict=True)]
        numbers = ", ".join(f"{name} {fmean(p99[name]):.3f} s" for name in BASELINES)
        moves = fmean(self.found["parity", 10, seed]["moves"] for seed in self.seeds)
        means = f"From K=1 to K=10, prefill {fmean(prefill[1]) * 1e3:.1f} to {fmean(prefill[10]) * 1e3:.1f} ms, decode"
        return {
            "parity-p99": Finding(first, "Nothing is fitted."),
            "parity-schedulers": Finding(farthest, f"{numbers}, Llumlet {fmean(first):.3f} s."),
            "parity-vllm": Finding(
                [v / fmean(others) - 1 for v, *others in zip(vllm, orca, sarathi, first, strict=True)],
                f"{numbers}, Llumlet {fmean(first):.3f} s: vLLM's decoding stands still for every prompt.",
            ),
            "parity-tiers": Finding(worst, f"{moves:.0f} moves with K=10, and hardly anybody waits."),
            "parity-decode": Finding(
                [b / a - 1 for a, b in zip(decode["vLLM"], decode[10], strict=True)], f"{numbers}."
            ),
            "overhead-prefill": Finding(
                growth,
                f"{means} {fmean(decode[1]) * 1e3:.1f} to {fmean(decode[10]) * 1e3:.1f} ms: neither grows, as no seat "
                "is scarce, and freeness only says where a request goes.",
            ),
        }

    def figures(self) -> list[Figure]:
        """Figures 6 and 7."""
        made = []
        for number in ("p50", "p90", "p99"):
            lines = {name: [(float(k), self.values(name, "e2e", number)) for k in TIERS] for name in BASELINES}
            lines["Llumlet"] = [(float(k), self.values(k, "e2e", number)) for k in TIERS]
            first, last = (fmean(lines["Llumlet"][i][1]) for i in (0, -1))
            ends = f"Llumlet: {first:.3f} s with K=1, {last:.3f} s with K=10."
            chart = charts.curves(lines, "tiers K", f"E2E {number} (s)", yaxis={"rangemode": "tozero"})
            made.append(Figure("Figure 6", f"E2E {number}, 10 requests/s", ends, chart))
        for name in ("e2e", "prefill", "decode"):
            for number in ("p99", "mean"):
                lines = {
                    "vLLM, round robin": [(float(k), self.values("vLLM", name, number)) for k in TIERS],
                    "Llumlet": [(float(k), self.values(k, name, number)) for k in TIERS],
                }
                ends = " and ".join(f"{label} {fmean(points[-1][1]):.3f} s" for label, points in lines.items())
                chart = charts.curves(lines, "tiers K", f"{name} {number} (s)", yaxis={"rangemode": "tozero"})
                made.append(Figure("Figure 7", f"{name} {number}, 10 requests/s", f"With K=10: {ends}.", chart))
        return made
