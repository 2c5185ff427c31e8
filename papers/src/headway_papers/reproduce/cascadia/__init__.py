"""Cascadia: an efficient cascade serving system for large language models; reproduction of its evaluation.

Claims are in `claims.yaml`, measurements in `runs`, `judges`, `parts` and `drift`, findings in `outcomes` and
`studies`.
"""

from __future__ import annotations

from headway_papers.reproduce.abstract import read_abstract
from headway_papers.reproduce.cascadia import outcomes
from headway_papers.reproduce.cascadia.claims import CLAIMS
from headway_papers.reproduce.findings import Findings
from headway_papers.reproduce.runner import Runner

TITLE = "Cascadia: cascades of models, deployed and routed together"
SEEDS, QUICK_SEEDS = 3, 2
ABSTRACT = read_abstract(__package__)
__all__ = ["ABSTRACT", "CLAIMS", "QUICK_SEEDS", "SEEDS", "TITLE", "run"]


def run(runner: Runner) -> Findings:
    """Run what the requested claims need."""
    return outcomes.findings(runner)
