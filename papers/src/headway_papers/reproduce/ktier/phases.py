"""K tiers of reasoning requests: urgent answers compared with less urgent reasoning."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from headway.report.run import Run
from headway_papers.reproduce.findings import PaperTable, Row
from headway_papers.reproduce.results import Key, Results, SeedResults
from headway_papers.reproduce.tasks import SimulationTask

ORDERINGS: dict[str, Any] = {
    "tiers alone (priority)": "priority",
    "tiers, then phases": {"name": "tiers-and-phases", "num_tiers": 2},
    "phases, then tiers": {"name": "tiers-and-phases", "num_tiers": 2, "phases_first": True},
    "phases alone (pascal)": "pascal",
}
RATE = 16.0
"""Requests/s, so that all batch slots are in use and requests always wait."""
NUM_REQUESTS = 800


def tasks(seeds: Sequence[int], quick: bool) -> dict[Key, SimulationTask]:
    """All runs of this part."""
    num = NUM_REQUESTS // 2 if quick else NUM_REQUESTS
    return {
        ("phases", name, seed): SimulationTask(scenario(ordering, num), seed, measure)
        for name, ordering in ORDERINGS.items()
        for seed in seeds
    }


def scenario(ordering: Any, num_requests: int) -> dict[str, Any]:
    """AlpacaEval's reasoning and answers in two tiers, on four replicas with few batch slots."""
    tiers = {"num_tiers": 2}
    return {
        "workload": {
            "builtin": "alpaca-eval",
            "num_requests": num_requests,
            "arrivals": RATE,
            "tiers": {"mix": "uniform", **tiers},
        },
        "fleet": [
            {
                "model": "llama-3.1-8b",
                "gpu": "a100-80gb",
                "replicas": 4,
                "engine": {"name": "simulated-0.15", "max_num_seqs": 48},
            }
        ],
        "policies": {
            "routing": {"name": "freest", **tiers},
            "ordering": ordering,
            "migration": {"name": "llumnix", **tiers},
        },
    }


def measure(run: Run) -> dict[str, Any]:
    by_tier = {}
    for tier, metrics in run.summary.tiers.items():
        parts = {"begins": metrics.ttft_s, "answers": metrics.ttfat_s, "ends": metrics.e2e_s}
        by_tier[tier] = {name: part and part.mean for name, part in parts.items()}
    return by_tier


def table(results: Results, seeds: Sequence[int]) -> PaperTable:
    runs, heads = SeedResults(results, seeds), ["ordering"]
    heads += [
        f"tier {tier}: {words}" for tier in (0, 1) for words in ("thinks after (s)", "answers after", "ends after")
    ]
    rows: list[Row] = []
    for name in ORDERINGS:
        row: Row = [name]
        for tier in ("0", "1"):
            row += [fmean(runs.values(("phases", name), tier, part)) for part in ("begins", "answers", "ends")]
        rows.append(row)
    shows = (
        "Means: from arrival to the first thought, from the last thought to the first word of the answer, from arrival "
        "to the end. Tiers first keeps tier 0's answers from waiting for tier 1's thoughts; phases first does not."
    )
    return PaperTable("Headway 6", f"Tiers and phases, {RATE:g} requests/s that reason", shows, heads, rows)
