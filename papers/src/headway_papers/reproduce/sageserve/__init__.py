"""SageServe: forecast-aware scaling of LLM serving over regions; reproduction of its evaluation.

Claims are in `claims.yaml`; fleets, workloads and strategies in `scenes`; runs in `runs` and their measurements in
`measures`; findings in `outcomes`, charts in `exhibits`.
"""

from __future__ import annotations

from headway_papers.reproduce.abstract import read_abstract
from headway_papers.reproduce.findings import Finding, Findings
from headway_papers.reproduce.runner import Runner
from headway_papers.reproduce.sageserve import runs
from headway_papers.reproduce.sageserve.exhibits import exhibits
from headway_papers.reproduce.sageserve.outcomes import outcomes
from headway_papers.reproduce.sageserve.published import SERIES
from headway_papers.reproduce.sageserve.runs import CLAIMS
from headway_papers.reproduce.sageserve.speed import PROFILES
from headway_papers.reproduce.sageserve.table import SageServeRuns

TITLE = "SageServe: forecast-aware scaling over regions"
SEEDS, QUICK_SEEDS = 3, 3
ABSTRACT = read_abstract(__package__)
FULL_ONLY = frozenset(claim.id for claim in CLAIMS) - runs.IN_QUICK
__all__ = ["ABSTRACT", "CLAIMS", "FULL_ONLY", "QUICK_SEEDS", "SEEDS", "TITLE", "run"]


def run(runner: Runner) -> Findings:
    """Run what the requested claims need. The readings belong to no claim, and need a full run."""
    measured, served = runs.measure_all(runner)
    results = SageServeRuns(measured, runner.seeds)
    findings = outcomes(results)
    for claim in CLAIMS:
        if runner.wants(claim) and claim.id not in findings:
            file = PROFILES if claim.id in runs.STEPS else SERIES
            findings[claim.id] = Finding([None] * len(runner.seeds), f"Needs {file} in the folder of --data.")
    return Findings(findings, exhibits(results, served))
