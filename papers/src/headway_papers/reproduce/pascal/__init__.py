"""PASCAL: a phase-aware scheduling algorithm for reasoning-based LLMs; reproduction of its sections III and V.

Claims are in `claims.yaml`, scenarios and measurements in `runs`, the search for arrival rates in `load`, findings in
`outcomes`, charts in `figures`.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from headway_papers.reproduce.abstract import read_abstract
from headway_papers.reproduce.claims import Claim, ids_like, read_claims
from headway_papers.reproduce.findings import Exhibit, Findings
from headway_papers.reproduce.pascal import figures, outcomes
from headway_papers.reproduce.pascal.bench import ALPACA, ARENA, Bench
from headway_papers.reproduce.runner import Runner

TITLE = "PASCAL: reasoning before answering"
SEEDS, QUICK_SEEDS = 10, 3
ABSTRACT = read_abstract(__package__)
_GROUPS = read_claims(__package__)
CLAIMS = tuple(claim for group in _GROUPS.values() for claim in group)
FULL_ONLY = ids_like(CLAIMS, "*-tail-rr*", "*-worse-*", "*-slo-high*", "*-pair", "*-by-pace", "trace-*")
"""Claims whose verdict may differ with half of the requests: on the bin in which the other seeds gain or lose most, as
two other seeds choose another bin than nine; on lateness at high rates, as memory is short longer in a whole run; at
the rate for the paper's pair of violations, which needs a search; with other schedulers' pacers; and on production
requests, where each seed has another part of the day."""
Part = tuple[tuple[Claim, ...], Callable[[Bench], outcomes.Outcomes], Callable[[Bench], figures.Exhibits]]
"""The claims of a part, and what makes its findings and its figures."""
__all__ = ["ABSTRACT", "CLAIMS", "FULL_ONLY", "QUICK_SEEDS", "SEEDS", "TITLE", "run"]


def run(runner: Runner) -> Findings:
    """Run what the requested claims need."""
    bench = Bench(runner)
    parts: tuple[Part, ...] = (
        (_GROUPS["phases"], outcomes.phases, figures.phases),
        (_GROUPS["simulator"], outcomes.simulator, figures.simulator),
        (_GROUPS["alpaca"] + _GROUPS["worse"], lambda b: outcomes.chat(b, ALPACA), lambda b: figures.chat(b, ALPACA)),
        (_GROUPS["arena"], lambda b: outcomes.chat(b, ARENA), lambda b: figures.chat(b, ARENA)),
        (_GROUPS["migration"], outcomes.migration, figures.migration),
        (_GROUPS["heavy"], outcomes.heavy, figures.heavy),
        (_GROUPS["oracle"], lambda b: outcomes.oracle(b, ALPACA, "oracle-gap"), figures.readings),
        (_GROUPS["trace"], lambda b: outcomes.trace(b, [each.id for each in _GROUPS["trace"]]), figures.trace),
        (_GROUPS["pair"], outcomes.pair, lambda b: []),
        (_GROUPS["pace"], outcomes.by_pace, lambda b: []),
    )
    wanted = [part for part in parts if runner.wants(*part[0])]
    findings = {name: outcome for _, values, _ in wanted for name, outcome in values(bench).items()}
    exhibits = [each for _, _, charts in wanted for each in charts(bench)]
    return Findings(findings, sorted(exhibits, key=_number))


def _number(exhibit: Exhibit) -> tuple[int, str]:
    """The position in the paper's order; additions come last."""
    match = re.match(r"Figure (\d+)(.*)", exhibit.label)
    return (int(match[1]), match[2]) if match else (99, "")
