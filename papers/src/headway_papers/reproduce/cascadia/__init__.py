"""Cascadia: an efficient cascade serving system for large language models; reproduction of its evaluation.

Claims are in `claims.yaml`, measurements in `runs`, `judges`, `parts` and `drift`, findings in `outcomes` and
`studies`.
"""

from __future__ import annotations

from headway_papers.reproduce.abstract import read_abstract
from headway_papers.reproduce.cascadia import claims, outcomes
from headway_papers.reproduce.cascadia.claims import CLAIMS
from headway_papers.reproduce.findings import Findings
from headway_papers.reproduce.runner import Runner

TITLE = "Cascadia: cascades of models, deployed and routed together"
SEEDS, QUICK_SEEDS = 3, 3
ABSTRACT = read_abstract(__package__)
FULL_ONLY = frozenset(
    claim.id for claim in CLAIMS if claim not in (*claims.FOR_THROUGHPUT, *claims.FIGURE_2, *claims.TABLE_1)
)
"""Claims that need plans for a rate, each rehearsed on hundreds of seconds of requests. Plans for the most throughput
need none."""
__all__ = ["ABSTRACT", "CLAIMS", "FULL_ONLY", "QUICK_SEEDS", "SEEDS", "TITLE", "run"]


def run(runner: Runner) -> Findings:
    """Run what the requested claims need."""
    return outcomes.findings(runner)
