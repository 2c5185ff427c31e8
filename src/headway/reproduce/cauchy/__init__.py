"""Cauchy (Zhang et al., SoCC 2025): GPU combos for the most tokens per dollar; reproduction of its evaluation."""

from __future__ import annotations

from headway.reproduce.cauchy import beyond, model, scheduling
from headway.reproduce.cauchy import overall as cauchy_overall
from headway.reproduce.cauchy import transfer as cauchy_transfer
from headway.reproduce.cauchy.claims import CLAIMS
from headway.reproduce.findings import Figure, Finding, Findings, PaperTable
from headway.reproduce.runner import Runner

TITLE = "Cauchy: GPU combos, tokens per dollar"
SEEDS, QUICK_SEEDS = 3, 2
REPEATS = 20
"""As in the paper, of what takes seconds: Figure 9. Profiles, searches and an hour of demand have `SEEDS`."""
__all__ = ["CLAIMS", "QUICK_SEEDS", "SEEDS", "TITLE", "run"]


def _ids(*prefixes: str) -> tuple[str, ...]:
    return tuple(claim.id for claim in CLAIMS if claim.id.startswith(prefixes))


def run(runner: Runner) -> Findings:
    """Run the requested parts: goodputs first, then simulations at these rates."""
    seeds, quick, wants = runner.seeds, runner.quick, runner.wants
    pairs, between, within = (wants(*_ids(prefix)) for prefix in ("fig2-", "fig9-", "table3-"))
    programs, overall = wants(*_ids("fig8-")), wants(*_ids("fig6-", "fig7-", "fig10-"))
    transfer = wants(*_ids("fig11-"))
    repeats = seeds if quick else tuple(range(max(REPEATS, len(seeds))))
    first = scheduling.searches(seeds, quick, pairs, between, within)
    first |= cauchy_overall.profiles(quick) if programs or overall else {}
    first_results = runner.run({**first, **(cauchy_transfer.tasks() if transfer else {})})
    markets = cauchy_overall.markets(first_results) if programs or overall else {}
    second = scheduling.runs(first_results, seeds, repeats, quick, between, within)
    second |= cauchy_overall.runs(markets, seeds, quick) if overall else {}
    results = {**first_results, **runner.run(second)}

    outcomes: dict[str, Finding] = model.outcomes()
    exhibits: list[Figure | PaperTable] = [*model.exhibits(), model.worked_table()]
    if pairs:
        two = scheduling.PairRuns(results, seeds)
        outcomes |= two.outcomes()
        exhibits.append(two.figure())
    whole = cauchy_overall.OverallRuns(results, markets, seeds)
    if overall:
        outcomes |= whole.outcomes()
        exhibits += whole.exhibits()
    if programs:
        objectives = cauchy_overall.ObjectivePlans(markets)
        outcomes |= objectives.outcomes()
        exhibits.append(objectives.figure())
    if between:
        turns = scheduling.BetweenRuns(results, repeats)
        outcomes |= turns.outcomes()
        exhibits.append(turns.figure())
    if within:
        inside = scheduling.WithinRuns(results, seeds)
        outcomes |= inside.outcomes()
        exhibits.append(inside.table())
    if overall:
        exhibits.append(whole.figure_10())
    if transfer:
        moves = cauchy_transfer.TransferRuns(results)
        outcomes |= moves.outcomes()
        exhibits += moves.figures()
    exhibits.append(model.network_table())
    if runner.claims is None:
        exhibits += beyond.exhibits(markets, whole)
    return Findings(outcomes, exhibits)
