"""Compares one set of policies with each paper's own on its fleet and workload, and with all of them together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headway_papers.reproduce.findings import Finding, Findings, PaperTable
from headway_papers.reproduce.results import SeedResults
from headway_papers.reproduce.runner import Runner
from headway_papers.reproduce.tasks import SimulationTask
from headway_papers.reproduce.united import runs
from headway_papers.reproduce.united.rows import DIFFERENCE, ROWS, PolicyComparison

TITLE = "Headway: one set of policies for five systems"
SEEDS, QUICK_SEEDS = 5, 2
CLAIMS = tuple(row.claim for row in ROWS)


def run(runner: Runner) -> Findings:
    """Run every part with a requested claim."""
    wanted = [row for row in ROWS if runner.wants(row.claim.id)]
    parts = list(dict.fromkeys(row.part for row in wanted))
    tasks: dict[tuple[Any, ...], SimulationTask] = {}
    for part in parts:
        for name, document in runs.documents(part, runner.quick).items():
            for seed in runner.seeds:
                tasks[part, name, seed] = SimulationTask(document, seed, runs.measure)
    united = _UnitedRuns(runner.run(tasks), runner.seeds)
    return Findings({row.claim.id: united.outcome(row) for row in wanted}, [united.table(part) for part in parts])


LABELS: Mapping[str, str] = {
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


class _UnitedRuns(SeedResults):
    """Findings and tables of the comparisons."""

    def outcome(self, row: PolicyComparison) -> Finding:
        ours, theirs = (self.values((row.part, name), row.number) for name in ("headway", row.other))
        values = [_compared(a, b, row.how) for a, b in zip(ours, theirs, strict=True)]
        label = LABELS.get(row.number, row.number)
        return Finding(values, f"{label}: headway {_mean(ours)}, {row.other} {_mean(theirs)}.")

    def table(self, part: str) -> PaperTable:
        """The policies of a part, with means of their measurements."""
        names = list(dict.fromkeys(name for where, name, _ in self.results if where == part))
        columns = [n for n in LABELS if all(v is not None for name in names for v in self.values((part, name), n))]
        rows = [[name, *(_average(self.values((part, name), number)) for number in columns)] for name in names]
        heads = ["policies", *(LABELS[number] for number in columns)]
        return PaperTable(*runs.PARTS[part], f"Means over {len(self.seeds)} seeds.", heads, rows)


def _compared(ours: float | None, theirs: float | None, how: str) -> float | None:
    if ours is None or theirs is None:
        return None
    if how == DIFFERENCE:
        return ours - theirs
    return ours / theirs if theirs else None


def _average(values: list[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return sum(numbers) / len(numbers) if numbers else None


def _mean(values: list[float | None]) -> str:
    mean = _average(values)
    return "nothing" if mean is None else f"{mean:.3g}"
