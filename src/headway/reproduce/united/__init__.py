"""One set of policies against each paper's own, on its fleet and workload; then all of it at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headway.reproduce.claims import AtLeast, AtMost, Claim
from headway.reproduce.experiment import Experiment
from headway.reproduce.findings import Findings, Outcome, Table
from headway.reproduce.tasks import Simulation
from headway.reproduce.united import runs

TITLE = "Headway: one set of policies for five systems"
SEEDS, QUICK_SEEDS = 5, 2
OWN, AS_OWN = "the paper's own", "as with the paper's own"

CLAIMS = (
    Claim("pascal-tail", "PASCAL's fleet: P99 of the first answering token, over PASCAL's.", OWN,
          AtMost(1.02, share=1.0, unit="x")),
    Claim("pascal-pace", "PASCAL's fleet: answers behind their reader, less PASCAL's.", OWN,
          AtMost(0.005, share=1.0, unit="%")),
    Claim("ktier-burst", "K-tier's burst: P99 of tier 0's first token, over K-tier Llumnix's.", OWN,
          AtMost(1.02, share=1.0, unit="x")),
    Claim("ktier-steady", "K-tier's fleet at 150 requests/s: P99 of the first token, over K-tier Llumnix's.", OWN,
          AtMost(1.02, share=1.0, unit="x")),
    Claim("ktier-moves", "K-tier's fleet at 150 requests/s: moves, over K-tier Llumnix's.", OWN,
          AtMost(1.0, share=1.0, unit="x")),
    Claim("cauchy-slo", "Cauchy's three unlike combos at 55 requests/s: SLO attainment, less Cauchy's.", OWN,
          AtLeast(0.0, share=1.0, unit="%")),
    Claim("cauchy-e2e", "Cauchy's three unlike combos at 55 requests/s: mean E2E, over Cauchy's.", OWN,
          AtMost(1.0, share=1.0, unit="x")),
    Claim("sageserve-slo", "SageServe's regions under LT-UA: SLO attainment, less that of its routing.", OWN,
          AtLeast(0.0, share=1.0, unit="%")),
    Claim("sageserve-cost", "SageServe's regions under LT-UA: cost, over that of its routing.", OWN,
          AtMost(1.02, share=1.0, unit="x")),
    Claim("cascadia-e2e", "Cascadia's fleet for trace 1: P95 of E2E, over that with the least loaded replica.", OWN,
          AtMost(1.02, share=1.0, unit="x")),
    Claim("all-tiers", "All at once: SLO attainment of tier 0, less that of first come, first served.", "more",
          AtLeast(0.0, share=1.0, unit="%")),
    Claim("all-forecast", "All at once: SLO attainment, less that of scaling by load.", "more",
          AtLeast(0.0, share=1.0, unit="%")),
    Claim("all-forecast-cost", "All at once: GPU hours, over those of scaling by load.", "no more",
          AtMost(1.0, share=1.0, unit="x")),
)  # fmt: skip
"""There is no paper to compare with: the rules ask that nothing be lost by using one set of policies for all."""


def run(experiment: Experiment) -> Findings:
    """Every part of which a claim is asked for."""
    tasks: dict[tuple[Any, ...], Simulation] = {}
    for part in runs.PARTS:
        if experiment.wants(*(claim.id for claim in CLAIMS if claim.id.startswith(part.split(" ")[0]))):
            for name, document in runs.documents(part, experiment.quick).items():
                for seed in experiment.seeds:
                    tasks[part, name, seed] = Simulation(document, seed, runs.measure)
    found = experiment.run(tasks)
    judged = _Judged(found, experiment.seeds)
    outcomes = {claim.id: judged.outcome(claim.id) for claim in CLAIMS if experiment.wants(claim.id)}
    return Findings(outcomes, [judged.table(part) for part in runs.PARTS if (part, "headway", 0) in found])


RATIO, LESS = "over", "less"
ROWS: Mapping[str, tuple[str, str, str, str]] = {
    "pascal-tail": ("pascal", "pascal", "answer_p99_s", RATIO),
    "pascal-pace": ("pascal", "pascal", "behind", LESS),
    "ktier-burst": ("ktier burst", "k-tier", "tier0_ttft_p99_s", RATIO),
    "ktier-steady": ("ktier steady", "k-tier", "ttft_p99_s", RATIO),
    "ktier-moves": ("ktier steady", "k-tier", "moves", RATIO),
    "cauchy-slo": ("cauchy", "cauchy", "slo", LESS),
    "cauchy-e2e": ("cauchy", "cauchy", "e2e_mean_s", RATIO),
    "sageserve-slo": ("sageserve", "sageserve", "slo", LESS),
    "sageserve-cost": ("sageserve", "sageserve", "usd", RATIO),
    "cascadia-e2e": ("cascadia", "least loaded", "e2e_p95_s", RATIO),
    "all-tiers": ("all", "without tiers and phases", "tier0_slo", LESS),
    "all-forecast": ("all", "without a forecast", "slo", LESS),
    "all-forecast-cost": ("all", "without a forecast", "gpu_hours", RATIO),
}
"""By claim: the part, whom to compare with, what, and how."""
SHOWN: Mapping[str, str] = {
    "ttft_p99_s": "TTFT P99 (s)",
    "answer_p99_s": "answer P99 (s)",
    "behind": "behind their reader",
    "e2e_mean_s": "E2E mean (s)",
    "e2e_p95_s": "E2E P95 (s)",
    "slo": "SLO met",
    "tier0_slo": "tier 0's SLO met",
    "moves": "moves",
    "gpu_hours": "GPU hours",
    "usd": "USD",
}


class _Judged:
    """What the runs came to."""

    def __init__(self, found: Mapping[tuple[Any, ...], Any], seeds: tuple[int, ...]) -> None:
        self._found, self._seeds = found, seeds

    def _values(self, part: str, name: str, number: str) -> list[float | None]:
        return [self._found[part, name, seed][number] for seed in self._seeds]

    def outcome(self, claim: str) -> Outcome:
        """Of a claim."""
        part, other, number, how = ROWS[claim]
        ours, theirs = self._values(part, "headway", number), self._values(part, other, number)
        values = [_compared(a, b, how) for a, b in zip(ours, theirs, strict=True)]
        label = SHOWN.get(number, number)
        return Outcome(values, f"{label}: headway {_mean(ours)}, {other} {_mean(theirs)}.")

    def table(self, part: str) -> Table:
        """All that ran in a part, and means of what was measured."""
        names = list(dict.fromkeys(name for where, name, _ in self._found if where == part))
        columns = [n for n in SHOWN if all(v is not None for name in names for v in self._values(part, name, n))]
        rows = [[name, *(_average(self._values(part, name, number)) for number in columns)] for name in names]
        return Table(part, "", f"Means over {len(self._seeds)} seeds.", ["policies", *map(SHOWN.get, columns)], rows)  # type: ignore[list-item]


def _compared(ours: float | None, theirs: float | None, how: str) -> float | None:
    if ours is None or theirs is None:
        return None
    if how == LESS:
        return ours - theirs
    return ours / theirs if theirs else None


def _average(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _mean(values: list[float | None]) -> str:
    mean = _average(values)
    return "nothing" if mean is None else f"{mean:.3g}"
