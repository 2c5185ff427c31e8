"""Cauchy (Zhang et al., SoCC 2025): GPU combos for the most tokens per dollar; reproduction of its evaluation."""

from __future__ import annotations

from headway_papers.reproduce.abstract import read_abstract
from headway_papers.reproduce.cauchy import beyond, demand, model, scheduling
from headway_papers.reproduce.cauchy import objectives as cauchy_objectives
from headway_papers.reproduce.cauchy import overall as cauchy_overall
from headway_papers.reproduce.cauchy import transfer as cauchy_transfer
from headway_papers.reproduce.cauchy.claims import CLAIMS, GROUPS, WORKLOADS
from headway_papers.reproduce.claims import ids_like
from headway_papers.reproduce.findings import Finding, Findings
from headway_papers.reproduce.runner import Runner

TITLE = "Cauchy: GPU combos, tokens per dollar"
SEEDS, QUICK_SEEDS = 5, 3
REPEATS = 20
"""Repeats in Figure 9, whose runs take seconds, as in the paper. Profiles, searches and an hour of demand use
`SEEDS`."""
MOVING = ("overall", "in_time", "own_curve", "estimated", "for_mean", "by_ranking", "autoscaling", "own_autoscaling")
"""Groups of claims on varying demand."""
FOR_MEAN = {"for_mean", "by_ranking"}
"""Groups that need only plans for the mean demand, and no sizes."""
FURTHER = {
    "-curve": {"own_curve", "own_autoscaling"},
    "-estimate": {"estimated"},
    "-mean": FOR_MEAN,
    "-mean-filter": {"by_ranking"},
    "-mean-ranking": {"by_ranking"},
}
"""Groups that need a further case."""
FULL_ONLY = frozenset(claim.id for claim in CLAIMS) - ids_like(
    CLAIMS, "fig1-*", "example-*", "fig11-*", "eq18-*", "*-cnn-dailymail", "*-cnn-dailymail-curve"
) | ids_like(CLAIMS, "fig7-star-*", "fig9-*", "fig10-*")
"""Claims on plans for ShareGPT and LongWriter, which need sizes of combos that a quick run omits; on searches for
goodput; on tails of an hour that it shortens; and on the savings of scaling alone."""
ABSTRACT = read_abstract(__package__)
__all__ = ["ABSTRACT", "CLAIMS", "FULL_ONLY", "QUICK_SEEDS", "SEEDS", "TITLE", "run"]


def run(runner: Runner) -> Findings:
    """Run the requested parts: goodputs first, then sizes of fleets, then simulations at these rates and sizes."""
    wanted = {name for name, group in GROUPS.items() if runner.wants(*group)}
    seeds, quick = runner.seeds, runner.quick
    overall = bool(wanted & set(MOVING))
    markets_wanted = overall or bool(wanted & {"objectives", "between"})
    swept = "thresholds" in wanted
    repeats = seeds if quick else tuple(range(max(REPEATS, len(seeds))))
    first = scheduling.searches(seeds, quick, "pairs" in wanted, "within" in wanted, swept)
    between = "between" in wanted  # which compares combos of all workloads
    workloads = [name for name in WORKLOADS if between or runner.wants(*ids_like(CLAIMS, f"*-{name}*"))]
    first |= cauchy_overall.profiles(workloads, quick) if markets_wanted else {}
    first |= cauchy_transfer.tasks() if "transfers" in wanted else {}
    results = runner.run(first)
    markets = cauchy_overall.markets(results) if markets_wanted else {}
    every = cauchy_overall.cases(demand.azure(runner.file(demand.TRACE)), quick)
    cases = tuple(each for each in every[1:] if wanted & FURTHER[each.key])
    if wanted & set(MOVING) - FOR_MEAN or not cases:
        cases = (every[0], *cases)
    results |= runner.run(cauchy_overall.sizes(markets, cases)) if overall else {}
    last = scheduling.runs(results, markets, seeds, repeats, quick, between, "within" in wanted)
    last |= cauchy_objectives.runs(markets, seeds, quick) if "objectives" in wanted else {}
    last |= cauchy_overall.runs(markets, results, cases, seeds) if overall else {}
    results |= runner.run(last)

    findings = Findings(model.outcomes(), [*model.exhibits(), model.worked_table()])
    if "pairs" in wanted:
        two = scheduling.PairRuns(results, seeds)
        findings += Findings(two.outcomes(), [two.figure()])
    whole = cauchy_overall.OverallRuns(results, markets, seeds, cases)
    if overall:
        findings += Findings(not_run(runner, cases) | whole.outcomes(), whole.exhibits())
    if "objectives" in wanted:
        objectives = cauchy_objectives.ObjectiveRuns(results, markets, seeds, quick)
        findings += Findings(objectives.outcomes(), [objectives.figure()])
    if between:
        turns = scheduling.BetweenRuns(results, markets, repeats, seeds)
        findings += Findings(turns.outcomes(), [turns.figure()])
    if "within" in wanted:
        inside = scheduling.WithinRuns(results, seeds)
        findings += Findings(inside.outcomes(), [inside.table()])
    if swept:
        findings += Findings(scheduling.WithinRuns(results, seeds).thresholds())
    if overall:
        findings += Findings({}, whole.figure_10())
    if "transfers" in wanted:
        moves = cauchy_transfer.TransferRuns(results)
        findings += Findings(moves.outcomes(), moves.figures())
    by_estimate = {workload: market for (ranking, workload), market in markets.items() if ranking == "estimate"}
    further = beyond.exhibits(by_estimate, whole) if runner.claims is None else []
    return findings + Findings({}, [model.network_table(), *further])


def not_run(runner: Runner, cases: tuple[cauchy_overall.Case, ...]) -> dict[str, Finding]:
    """Undecided rows on varying demand: without a trace or, in a quick run, without time."""
    has_trace = cases[0].key == ""
    lacking = f"No trace was given: --data names the folder that has {demand.TRACE}."
    reason = "A quick run has one demand: see the full run." if has_trace or runner.quick else lacking
    return {
        claim.id: Finding([None] * len(runner.seeds), reason if has_trace or claim.id.endswith("-curve") else lacking)
        for name in MOVING
        for claim in GROUPS[name]
    }
