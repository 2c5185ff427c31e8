"""Cauchy (Zhang et al., SoCC 2025): GPU combos for the most tokens per dollar; reproduction of its evaluation."""

from __future__ import annotations

from headway.reproduce.cauchy import beyond, claims, model, scheduling
from headway.reproduce.cauchy import overall as cauchy_overall
from headway.reproduce.cauchy import transfer as cauchy_transfer
from headway.reproduce.cauchy.claims import CLAIMS
from headway.reproduce.findings import Findings
from headway.reproduce.runner import Runner

TITLE = "Cauchy: GPU combos, tokens per dollar"
SEEDS, QUICK_SEEDS = 3, 2
REPEATS = 20
"""As in the paper, of what takes seconds: Figure 9. Profiles, searches and an hour of demand have `SEEDS`."""
__all__ = ["CLAIMS", "QUICK_SEEDS", "SEEDS", "TITLE", "run"]


def run(runner: Runner) -> Findings:
    """Run the requested parts: goodputs first, then simulations at these rates."""
    seeds, quick, wants = runner.seeds, runner.quick, runner.wants
    pairs, between, within = wants(*claims.PAIRS), wants(*claims.BETWEEN), wants(*claims.WITHIN)
    programs, overall = wants(*claims.OBJECTIVES), wants(*claims.OVERALL, *claims.AUTOSCALING)
    transfer = wants(*claims.TRANSFERS)
    repeats = seeds if quick else tuple(range(max(REPEATS, len(seeds))))
    first = scheduling.searches(seeds, quick, pairs, between, within)
    first |= cauchy_overall.profiles(quick) if programs or overall else {}
    first_results = runner.run({**first, **(cauchy_transfer.tasks() if transfer else {})})
    markets = cauchy_overall.markets(first_results) if programs or overall else {}
    second = scheduling.runs(first_results, seeds, repeats, quick, between, within)
    second |= cauchy_overall.runs(markets, seeds, quick) if overall else {}
    results = {**first_results, **runner.run(second)}

    findings = Findings(model.outcomes(), [*model.exhibits(), model.worked_table()])
    if pairs:
        two = scheduling.PairRuns(results, seeds)
        findings += Findings(two.outcomes(), [two.figure()])
    whole = cauchy_overall.OverallRuns(results, markets, seeds)
    if overall:
        findings += Findings(whole.outcomes(), whole.exhibits())
    if programs:
        objectives = cauchy_overall.ObjectivePlans(markets)
        findings += Findings(objectives.outcomes(), [objectives.figure()])
    if between:
        turns = scheduling.BetweenRuns(results, repeats)
        findings += Findings(turns.outcomes(), [turns.figure()])
    if within:
        inside = scheduling.WithinRuns(results, seeds)
        findings += Findings(inside.outcomes(), [inside.table()])
    if overall:
        findings += Findings({}, [whole.figure_10()])
    if transfer:
        moves = cauchy_transfer.TransferRuns(results)
        findings += Findings(moves.outcomes(), moves.figures())
    further = beyond.exhibits(markets, whole) if runner.claims is None else []
    return findings + Findings({}, [model.network_table(), *further])
