"""Cauchy, CAUCHY* and Melange under varying demand: Figures 6, 7 and 10.

The Azure hour drives the paper's rows, a curve of our own a second row for each, and the candidates of the step-time
estimate in place of Eq. 15's a third one for Figure 7. Each system has the size at which nine of ten requests are in
time: see `sizing`. In cases for the mean, all systems have plans for the mean demand, however late they are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any, get_args

from msgspec import Struct, structs

from headway.planning.combos.problem import ComboPlan
from headway_papers.reproduce import charts
from headway_papers.reproduce.cauchy.claims import WORKLOADS
from headway_papers.reproduce.cauchy.demand import OWN, PACE, Demand
from headway_papers.reproduce.cauchy.setup import ATTAINED, Market, Ranking, measured, profiled
from headway_papers.reproduce.cauchy.sizing import (
    CHOOSING_SEED,
    COARSE,
    SIZES,
    System,
    first_in_time,
    largest_for,
    melange_plan,
    sized,
)
from headway_papers.reproduce.claims import Value
from headway_papers.reproduce.findings import Exhibit, Figure, Finding, PaperTable, Row
from headway_papers.reproduce.results import Key, Results, SeedResults, increases, reductions
from headway_papers.reproduce.tasks import Call, Measurement

SYSTEMS: dict[System, str] = {
    "melange": "Melange",
    "mix": "Melange by whole-mix goodputs",
    "star": "CAUCHY*",
    "static": "Cauchy without autoscaling",
    "cauchy": "Cauchy",
}
COMPARED: tuple[System, ...] = ("melange", "star", "cauchy")
IN_TIME = 0.88
"""A size also holds on other requests if this share of them is in time: see `in-time` in claims.yaml."""
Markets = Mapping[tuple[Ranking, str], Market]
"""Keyed by ranking and workload."""


class Case(Struct, frozen=True):
    """A demand, and the ranking of candidates."""

    key: str
    """The suffix of its rows' names."""
    demand: Demand
    ranking: Ranking = "closed-form"
    shortened: float = 1.0
    """Factor on the seconds of the hour and on all times that scale with it."""
    for_mean: bool = False
    """Whether all systems have the smallest size."""

    def sized(self, market: Market, system: System, k: float) -> dict[str, Any]:
        return sized(market, self.demand, system, k, PACE[market.workload] * self.shortened)

    @property
    def systems(self) -> tuple[System, ...]:
        if self.for_mean:
            return (*COMPARED, "mix") if self.ranking == "closed-form" else ("cauchy",)
        return (*COMPARED, "static") if self.ranking == "closed-form" else ("cauchy",)


def cases(azure: Demand | None, quick: bool) -> tuple[Case, ...]:
    """All cases. Quick: only the first, in half of the time."""
    own = Case(OWN.key, OWN)
    every = (
        (own,)
        if azure is None
        else (
            Case("", azure),
            own,
            Case("-estimate", azure, "estimate"),
            Case("-mean", azure, for_mean=True),
            Case("-mean-filter", azure, "filter", for_mean=True),
            Case("-mean-ranking", azure, "ranking", for_mean=True),
        )
    )
    return (structs.replace(every[0], shortened=0.5),) if quick else every


def profiles(workloads: Collection[str], quick: bool) -> dict[Key, Call]:
    """The first round: candidates by workload."""
    return {("profiles", workload): Call(profiled, {"workload": workload, "quick": quick}) for workload in workloads}


def markets(results: Results) -> dict[tuple[Ranking, str], Market]:
    """The candidates of all profiled workloads."""
    workloads = [workload for workload in WORKLOADS if ("profiles", workload) in results]
    return {(r, w): Market(w, results["profiles", w], r) for r in get_args(Ranking) for w in workloads}


def names_in(markets: Markets) -> dict[str, str]:
    """The names of the workloads that have candidates."""
    return {workload: WORKLOADS[workload] for _, workload in markets}


def _by_size(markets: Markets, workload: str, case: Case, system: System, some: Sequence[float] = SIZES) -> Measurement:
    market = markets[case.ranking, workload]
    return {f"{k:.4g}": case.sized(market, system, k) for k in some}


def sizes(markets: Markets, some: Sequence[Case]) -> dict[Key, Call]:
    """The second round: the size of each system."""
    return {
        ("size", workload, case.key, system): Call(
            first_in_time, {"documents": _by_size(markets, workload, case, system), "seed": CHOOSING_SEED}
        )
        for case in some
        if not case.for_mean
        for workload in names_in(markets)
        for system in case.systems
        if system != "static"
    }


def size_of(results: Results, workload: str, case: Case, system: System) -> float:
    """The size k. Without autoscaling it equals Cauchy's, so that both begin with one plan."""
    if case.for_mean:
        return float(SIZES[0])
    return float(results["size", workload, case.key, "cauchy" if system == "static" else system]["k"])


def runs(markets: Markets, results: Results, some: Sequence[Case], seeds: Sequence[int]) -> dict[Key, Call]:
    """The third round: all systems in their sizes, on requests that were not used to choose sizes; and Cauchy at
    Melange's cost."""
    tasks: dict[Key, Call] = {}
    for case, workload in ((case, workload) for case in some for workload in names_in(markets)):
        for system in case.systems:
            market, k = markets[case.ranking, workload], size_of(results, workload, case, system)
            contents = case.sized(market, system, k)
            for seed in seeds:
                arguments = {"document": contents, "seed": seed}
                tasks["overall", workload, case.key, system, seed] = Call(measured, arguments)
        if case is some[0] and not case.for_mean:
            found, k = results["size", workload, case.key, "melange"], size_of(results, workload, case, "cauchy")
            arguments = {
                "documents": _by_size(markets, workload, case, "cauchy", [k, *(each for each in COARSE if each > k)]),
                "usd_per_hour": found["tried"][found["k"]]["usd_per_hour"],
                "seed": CHOOSING_SEED,
            }
            tasks["spend", workload] = Call(largest_for, arguments)
    return tasks


class OverallRuns(SeedResults):
    """The findings under varying demand."""

    def __init__(self, results: Results, markets: Markets, seeds: Sequence[int], some: Sequence[Case]) -> None:
        super().__init__(results, seeds)
        self.markets, self.cases, self.names = markets, some, names_in(markets)

    def measured(self, workload: str, case: Case, system: System, name: str) -> list[float]:
        if system not in case.systems:
            case = self._compared_with(case)
        return self.values(("overall", workload, case.key, system), name)

    def _compared_with(self, case: Case) -> Case:
        """The case whose other systems are compared with a case that has only Cauchy."""
        return next(each for each in self.cases if each.for_mean == case.for_mean)

    def mean(self, workload: str, case: Case, system: System, name: str) -> float:
        return fmean(self.measured(workload, case, system, name))

    def outcomes(self) -> dict[str, Finding]:
        findings: dict[str, Finding] = {}
        for workload in self.names:
            for case in self.cases:
                findings |= self._efficiency(workload, case)
                if case.ranking == "closed-form":
                    findings |= self._latencies(workload, case)
                if "static" in case.systems:
                    findings |= self._autoscaling(workload, case)
                if case.for_mean and case.ranking == "closed-form":
                    own = self.measured(workload, case, "cauchy", "attainment")
                    findings[f"in-time-{workload}{case.key}"] = Finding(own, self._numbers(workload, case))
            if self.cases[0].key == "":
                least = [
                    min(each)
                    for each in zip(
                        *(self.measured(workload, self.cases[0], system, "attainment") for system in COMPARED),
                        strict=True,
                    )
                ]
                findings[f"in-time-{workload}"] = Finding(least, self._numbers(workload, self.cases[0]))
        return findings

    def _judged(self, workload: str, case: Case, values: Sequence[Value], *systems: System) -> Sequence[Value]:
        """The values; empty if a system is late at all sizes, because cost is not comparable then.

        If all systems are sized for the mean, lateness does not matter.
        """
        if case.for_mean:
            return values
        late = [s for s in systems if self.mean(workload, case, s, "attainment") < IN_TIME]
        return [None] * len(values) if late else values

    def _gain(self, workload: str, case: Case, system: System, other: System = "melange") -> Sequence[Value]:
        """The increase in tokens per dollar over Melange, by seed."""
        both = [self.measured(workload, case, each, "tokens_per_usd") for each in (system, other)]
        return self._judged(workload, case, increases(*both), system, other)

    def _efficiency(self, workload: str, case: Case) -> dict[str, Finding]:
        why = f"{self._numbers(workload, case)} {self.plans(workload, case)}"
        row = f"fig7-{workload}{case.key}"
        if case.ranking != "closed-form":
            return {row: Finding(self._gain(workload, case, "cauchy"), why)}
        tokens = [self.measured(workload, case, system, "tokens_per_usd") for system in COMPARED]
        order: list[Value] = [low < middle < high for low, middle, high in zip(*tokens, strict=True)]
        further = {
            f"fig7-star-{workload}{case.key}-mix": Finding(self._gain(workload, case, "star", "mix"), why)
            for system in case.systems
            if system == "mix"
        }
        return further | {
            row: Finding(
                self._gain(workload, case, "cauchy"), f"{why} {best_text(self.markets[case.ranking, workload])}"
            ),
            f"fig7-star-{workload}{case.key}": Finding(self._gain(workload, case, "star"), why),
            f"fig7-order-{workload}{case.key}": Finding(self._judged(workload, case, order, *COMPARED), why),
        }

    def _numbers(self, workload: str, case: Case) -> str:
        """Tokens per dollar, size, lateness and price of the systems."""
        parts = []
        some = [each for each in case.systems if each != "static"]
        for system in some if case.ranking == "closed-form" else ("melange", *some):
            like = case if system in case.systems else self._compared_with(case)
            tokens, usd, share = (
                self.mean(workload, case, system, name) for name in ("tokens_per_usd", "usd_per_hour", "attainment")
            )
            k = size_of(self.results, workload, like, system)
            parts.append(f"{SYSTEMS[system]} {tokens / 1e6:.1f} (k {k:g}, {share:.1%} in time, ${usd:.2f} an hour)")
        return f"M tokens/USD: {', '.join(parts)}."

    def _latencies(self, workload: str, case: Case) -> dict[str, Finding]:
        findings = {}
        for key, name in (("e2e", "e2e_s"), ("ttft", "ttft_s"), ("tbt", "tbt_s")):
            ours, theirs = (self.measured(workload, case, system, name) for system in ("cauchy", "melange"))
            usd = [self.mean(workload, case, system, "usd_per_hour") for system in ("melange", "cauchy")]
            why = (
                f"Melange {fmean(theirs) * 1e3:.0f} ms at ${usd[0]:.2f} an hour, Cauchy {fmean(ours) * 1e3:.0f} ms at "
                f"${usd[1]:.2f}. {'' if case.for_mean else ' '.join(self._experiments(workload, case, name))}"
            ).rstrip()
            values = self._judged(workload, case, reductions(ours, theirs), "cauchy", "melange")
            findings[f"fig6-{key}-{workload}{case.key}"] = Finding(values, why)
        return findings

    def _experiments(self, workload: str, case: Case, name: str) -> Iterator[str]:
        """The comparisons at equal latency with both sized for the mean, and with Cauchy at Melange's cost."""
        tried = {s: self.results["size", workload, case.key, s]["tried"] for s in COMPARED}
        first = {s: tried[s][f"{SIZES[0]:.4g}"] for s in ("melange", "cauchy")}
        gain = 1 - first["cauchy"][name] / first["melange"][name]
        late = ", ".join(f"{SYSTEMS[s]} {first[s]['attainment']:.0%}" for s in ("melange", "cauchy"))
        usd = " and ".join(f"${first[s]['usd_per_hour']:.2f}" for s in ("melange", "cauchy"))
        yield f"Both sized for the mean (in time: {late}; {usd}): {gain:.0%} lower."
        if case is self.cases[0]:
            spent = self.results["spend", workload]
            theirs = self.results["size", workload, case.key, "melange"]
            if spent["k"] is not None:
                gain = 1 - spent[name] / theirs["tried"][theirs["k"]][name]
                yield f"Cauchy for Melange's dollars (k {spent['k']}, ${spent['usd_per_hour']:.2f}): {gain:.0%} lower."

    def _autoscaling(self, workload: str, case: Case) -> dict[str, Finding]:
        before, after = (self.measured(workload, case, system, "p90_s") for system in ("static", "cauchy"))
        both: tuple[System, ...] = ("static", "cauchy")
        usd = " and ".join(f"${self.mean(workload, case, s, 'usd_per_hour'):.2f}" for s in both)
        share = " and ".join(f"{self.mean(workload, case, s, 'attainment'):.1%}" for s in both)
        why = f"{fmean(before):.2f} s without, {fmean(after):.2f} s with, at {usd} an hour; in time: {share}."
        return {f"fig10-{workload}{case.key}": Finding(reductions(after, before), why)}

    def plans(self, workload: str, case: Case) -> str:
        """The initial deployments of all systems."""
        market = self.markets[case.ranking, workload]
        rps = {s: market.demand_rps * size_of(self.results, workload, case, s) for s in case.systems if s != "static"}
        plans: dict[System, ComboPlan] = {"cauchy": market.plan(rps=rps["cauchy"])}
        if "melange" in rps:
            plans = {
                "melange": melange_plan(market, rps["melange"]),
                "star": market.plan(aggregated=True, rps=rps["star"]),
                **plans,
            }
        if "mix" in rps:
            plans["mix"] = market.whole_mix_plan(rps["mix"])
        return f"At first: {'; '.join(f'{SYSTEMS[s]} {plan_text(p)}' for s, p in plans.items())}."

    def exhibits(self) -> list[Exhibit]:
        """Figures 6 and 7, and all tried sizes; without cases for the mean only."""
        if self.cases[0].for_mean:
            return []
        names, case = list(self.names.values()), self.cases[0]
        figures: list[Exhibit] = []
        shows = f"Demand: {case.demand.label}. Every system in the size that keeps {ATTAINED:.0%} in time."
        for name, what in (("e2e_s", "E2E"), ("ttft_s", "TTFT"), ("tbt_s", "time per output token")):
            series = {SYSTEMS[s]: [self.measured(w, case, s, name) for w in self.names] for s in COMPARED}
            chart = charts.bars(names, series, f"mean {what} (s)", yaxis={"type": "log"})
            figures.append(Figure("Figure 6", f"Mean {what}", shows, chart))
        million = {
            SYSTEMS[s]: [[v / 1e6 for v in self.measured(w, case, s, "tokens_per_usd")] for w in self.names]
            for s in COMPARED
        }
        figures.append(Figure("Figure 7", "Cost-efficiency", shows, charts.bars(names, million, "M tokens/USD")))
        return [*figures, self._tried()]

    def _tried(self) -> PaperTable:
        rows: list[Row] = []
        for case in (each for each in self.cases if not each.for_mean):
            for workload, system in ((w, s) for w in self.names for s in case.systems if s != "static"):
                tried = self.results["size", workload, case.key, system]["tried"]
                for k, each in sorted(tried.items(), key=lambda item: float(item[0])):
                    tokens = each["tokens_per_usd"] / 1e6
                    shares = [100 * each["attainment"], each["usd_per_hour"], tokens, each["e2e_s"], each["ttft_s"]]
                    by = f"{case.demand.label}, {case.ranking}"
                    rows.append([self.names[workload], by, SYSTEMS[system], float(k), *shares])
        heads = [
            "workload",
            "demand, ranking",
            "system",
            "k",
            "in time (%)",
            "$/h",
            "M tokens/USD",
            "E2E (s)",
            "TTFT (s)",
        ]
        shows = "Each size until one keeps nine of ten requests in time, on the requests that sizes are chosen by."
        return PaperTable("Figure 7", "Sizes", shows, heads, rows)

    def figure_10(self) -> list[Exhibit]:
        """P90 with and without autoscaling; without cases for the mean only."""
        if self.cases[0].for_mean:
            return []
        labels: dict[System, str] = {"static": "without autoscaling", "cauchy": "with autoscaling"}
        series = {
            label: [self.measured(w, self.cases[0], system, "p90_s") for w in self.names]
            for system, label in labels.items()
        }
        chart = charts.bars(list(self.names.values()), series, "P90 E2E (s)", yaxis={"type": "log"})
        return [Figure("Figure 10", "Autoscaling", "From the same plan at first.", chart)]


def plan_text(plan: ComboPlan) -> str:
    return ", ".join(f"{each.count} {each.combo.label}" for each in plan.combos) + f" (${plan.usd_per_hour:.2f}/h)"


def best_text(market: Market) -> str:
    """The highest tokens per dollar of all candidates, and of candidates that do not split phases."""
    first, one = (
        max(some, key=lambda each: each.tokens_per_usd or 0.0) for some in (market.candidates, market.aggregated)
    )
    return (
        f"The best candidate, {first.combo.label}, serves {(first.tokens_per_usd or 0) / 1e6:.1f} M tokens/USD, the "
        f"best aggregated one, {one.combo.label}, {(one.tokens_per_usd or 0) / 1e6:.1f}."
    )
