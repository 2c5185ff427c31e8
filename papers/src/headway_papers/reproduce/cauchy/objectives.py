"""Figure 8: the benefit of the objective of Eq. 16.

All objectives get the same demand, and every plan meets it by its goodput. The requested tokens therefore cost least
with MC-LP, which is the cheapest by definition. The share of tokens in time may differ: 4.3 says of MC-LP that its
plans "barely meet goodput thresholds". Plans are therefore simulated with Poisson arrivals at the demand, and tokens in
time per dollar are counted, at demands from a third to all of the cluster's capacity.

MCE-LP "enforces minimum goodput constraints while maximizing overall cost-efficiency": this means the plan's tokens per
dollar. The sum over its combos would rent all GPUs at any demand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from headway.planning.combos.problem import ComboPlan, Objective
from headway.planning.combos.rehearsal import span_s
from headway_papers.reproduce import charts
from headway_papers.reproduce.cauchy.overall import Markets, names_in, plan_text
from headway_papers.reproduce.cauchy.setup import Market, combo, document, measured
from headway_papers.reproduce.findings import Figure, Finding
from headway_papers.reproduce.results import Key, Results, SeedResults, increases, means_by_seed
from headway_papers.reproduce.tasks import Call

OBJECTIVES: tuple[Objective, ...] = ("co", "mc", "mce")
SHARES = (1 / 3, 2 / 3, 1.0)
"""Demands as shares of the capacity of the cluster with Eq. 15's candidates."""
QUICK_SHARES = (1 / 3, 2 / 3)


def planned(markets: Markets, quick: bool) -> dict[tuple[str, float, Objective], ComboPlan]:
    """Plans by workload, share and objective."""
    plans: dict[tuple[str, float, Objective], ComboPlan] = {}
    for workload in names_in(markets):
        market = markets["closed-form", workload]
        reachable_rps = market.reachable_rps
        for share in QUICK_SHARES if quick else SHARES:
            for objective in OBJECTIVES:
                plans[workload, share, objective] = market.plan(objective, rps=share * reachable_rps)
    return plans


def runs(markets: Markets, seeds: Sequence[int], quick: bool) -> dict[Key, Call]:
    """A run for each seed of each distinct plan, because several objectives may have the same plan."""
    tasks: dict[Key, Call] = {}
    for (workload, share, _), plan in planned(markets, quick).items():
        contents = _scenario(markets["closed-form", workload], plan)
        for seed in seeds:
            key = ("objective", workload, share, plan_text(plan), seed)
            tasks[key] = Call(measured, {"document": contents, "seed": seed})
    return tasks


def _scenario(market: Market, plan: ComboPlan) -> dict[str, Any]:
    rps = plan.services[0].demand_rps
    combos = [combo(f"combo-{i}", each.combo, each.count, each.goodput_rps) for i, each in enumerate(plan.combos)]
    num = round(rps * span_s(market.service))
    return document(market.workload, rps, num, fleet=[], combos=combos, policies={"routing": {"name": "cauchy"}})


class ObjectiveRuns(SeedResults):
    """The findings of Figure 8."""

    def __init__(self, results: Results, markets: Markets, seeds: Sequence[int], quick: bool) -> None:
        super().__init__(results, seeds)
        self.plans, self.shares = planned(markets, quick), QUICK_SHARES if quick else SHARES
        self.names = names_in(markets)

    def values_of(self, workload: str, share: float, objective: Objective, name: str) -> list[float]:
        plan = self.plans[workload, share, objective]
        return self.values(("objective", workload, share, plan_text(plan)), name)

    def outcomes(self) -> dict[str, Finding]:
        findings: dict[str, Finding] = {}
        others: tuple[Objective, ...] = ("mce", "mc")
        for workload in self.names:
            for other in others:
                gains = [
                    increases(*(self.values_of(workload, share, o, "in_time_per_usd") for o in ("co", other)))
                    for share in self.shares
                ]
                why = " ".join(self._explanation(workload, share, other) for share in self.shares)
                findings[f"fig8-{other}-{workload}"] = Finding(means_by_seed(gains), why)
        return findings

    def _explanation(self, workload: str, share: float, other: Objective) -> str:
        ours, theirs = self.plans[workload, share, "co"], self.plans[workload, share, other]
        demand = f"At {ours.services[0].demand_rps:.0f} requests/s ({share:.0%} of the cluster)"
        if plan_text(ours) == plan_text(theirs):
            return f"{demand} both plan {plan_text(ours)}."
        tokens, late = (
            [fmean(self.values_of(workload, share, o, name)) for o in ("co", other)]
            for name in ("in_time_per_usd", "attainment")
        )
        return (
            f"{demand} CO plans {plan_text(ours)}, {other.upper()} {plan_text(theirs)}: {tokens[0] / 1e6:.1f} and "
            f"{tokens[1] / 1e6:.1f} M tokens in time/USD, {late[0]:.0%} and {late[1]:.0%} of the requests in time."
        )

    def figure(self) -> Figure:
        names = [f"{name}, {share:.0%}" for name in self.names.values() for share in self.shares]
        series: Mapping[str, list[list[float]]] = {
            f"{o.upper()}-LP": [
                [v / 1e6 for v in self.values_of(w, share, o, "in_time_per_usd")]
                for w in self.names
                for share in self.shares
            ]
            for o in OBJECTIVES
        }
        shows = "Tokens of requests in time for a dollar, at demands of so much of what the cluster can serve."
        return Figure("Figure 8", "Objectives", shows, charts.bars(names, series, "M tokens in time/USD"))
