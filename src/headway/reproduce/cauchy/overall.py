"""Cauchy, CAUCHY* and Melange under demand that moves: Figures 6, 7, 8 and 10.

Demand follows a curve of our own, an hour long as the Azure traces of 2023, which come in no file here: it swings
from 0.6 to 1.45 of its mean. All plans are for the mean. Time runs faster than in the paper where answers are
short: the curve, a start (90 s), the windows (2 and 30 min) and the grace (30 s) shrink by one factor, as section 3.5
allows for where instances are kept warm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import msgspec

from headway.catalog import gpu
from headway.planning.combos.estimate import FluidEstimate
from headway.planning.combos.problem import (
    ComboCandidate,
    ComboPlan,
    Counts,
    GpuCombo,
    Objective,
    ServiceSlo,
    WorkloadPattern,
)
from headway.reproduce import charts
from headway.reproduce.cauchy import melange, setup
from headway.reproduce.cauchy.claims import WORKLOADS
from headway.reproduce.cauchy.setup import LIMITS, Market, combo, document, measure, offers, profiled
from headway.reproduce.findings import Exhibit, Figure, Finding
from headway.reproduce.results import Key, Results, SeedResults, increases, reductions
from headway.reproduce.tasks import Call, SimulationTask
from headway.workload.generate import generate
from headway.workload.spec import WorkloadSpec

CURVE = (0.6, 0.7, 0.85, 1.0, 1.2, 1.35, 1.45, 1.35, 1.15, 1.0, 0.85, 0.75, 0.7, 0.8, 1.0, 1.25)
"""Of the mean, by the step."""
STEP_S = 225.0
PACE = {"cnn-dailymail": 0.04, "sharegpt": 0.05, "longwriter": 0.25}
"""Seconds of a run for one of the paper's: less where answers are shorter."""
SYSTEMS = {"melange": "Melange", "star": "CAUCHY*", "static": "Cauchy without autoscaling", "cauchy": "Cauchy"}
MOST_KINDS = 6
"""Combos that the autoscaler chooses from: the best candidates, and those of the plan."""
OBJECTIVES: tuple[Objective, ...] = ("co", "mc", "mce")


def profiles(quick: bool) -> dict[Key, Call]:
    """The first round: candidates by workload."""
    return {("profiles", workload): Call(profiled, {"workload": workload, "quick": quick}) for workload in WORKLOADS}


def markets(results: Results) -> dict[str, Market]:
    return {workload: Market(workload, results["profiles", workload]) for workload in WORKLOADS}


def runs(markets: Mapping[str, Market], seeds: Sequence[int], quick: bool) -> dict[Key, SimulationTask]:
    tasks: dict[Key, SimulationTask] = {}
    for workload, market in markets.items():
        for system, contents in systems(market, quick).items():
            tasks |= {("overall", workload, system, seed): SimulationTask(contents, seed, measure) for seed in seeds}
    return tasks


def systems(market: Market, quick: bool) -> dict[str, dict[str, Any]]:
    """The scenarios of the four systems on one workload."""
    pace = PACE[market.workload] / (2 if quick else 1)
    step_s = STEP_S * pace
    rates = [round(share * market.demand_rps, 3) for share in CURVE]
    num = round(market.demand_rps * step_s * len(CURVE))
    base = document(market.workload, 1.0, num)
    base["workload"]["arrivals"] = {"kind": "curve", "rates": rates, "step_s": step_s}
    routing = {"name": "cauchy"}
    plain, whole = market.plan(aggregated=True), market.plan()
    # The router does not know output lengths, so goodput is that for the whole mix, not for the plan's buckets.
    goodput_by_label = ScaledEstimate(market).goodput_by_label
    mixed = [(each.combo, each.count, goodput_by_label[each.combo.label]) for each in melange_plan(market).combos]
    start_s = 90 * pace
    star, kinds = _kinds(plain, market.aggregated), _kinds(whole, market.candidates)
    return {
        "melange": base | _fleet(mixed, start_s) | {"policies": {"routing": routing}},
        "star": base | _fleet(star, start_s) | {"policies": {"routing": routing, "scaling": scaling(star, pace)}},
        "static": base | _fleet([k for k in kinds if k[1]], start_s) | {"policies": {"routing": routing}},
        "cauchy": base | _fleet(kinds, start_s) | {"policies": {"routing": routing, "scaling": scaling(kinds, pace)}},
    }


Kinds = list[tuple[GpuCombo, int, float]]
"""(combo, how many at first, goodput of one)."""


def _kinds(plan: ComboPlan, candidates: Sequence[ComboCandidate]) -> Kinds:
    """The combos of the plan, and the best others with 0 replicas."""
    chosen: Kinds = [(each.combo, each.count, each.goodput_rps) for each in plan.combos]
    planned = {each.label for each, _, _ in chosen}
    spares = [(each.combo, 0, each.goodput_rps) for each in candidates if each.combo.label not in planned]
    return chosen + spares[: max(MOST_KINDS - len(chosen), 0)]


def _fleet(kinds: Kinds, start_s: float) -> dict[str, Any]:
    combos = []
    for i, (what, count, goodput_rps) in enumerate(kinds):
        fields = combo(f"combo-{i}", what, count, goodput_rps, min_replicas=0)
        for role in ("prefill", "decode", "aggregated"):
            if role in fields:
                fields[role]["start_s"] = start_s
        combos.append(fields)
    return {"fleet": [], "combos": combos}


def scaling(kinds: Kinds, pace: float) -> dict[str, Any]:
    """Algorithm 1 with the paper's parameters."""
    tokens = {f"combo-{i}": goodput_rps / what.usd_per_hour for i, (what, _, goodput_rps) in enumerate(kinds)}
    gpus_in_use = {name for what, _, _ in kinds for name in what.gpus}
    return {
        "name": "combos",
        "local_window_s": 120 * pace,
        "global_window_s": 1800 * pace,
        "grace_s": 30 * pace,
        "interval_s": 5 * pace,
        "gpu_limits": {name: limit for name, limit in LIMITS.items() if name in gpus_in_use},
        "cost_efficiency": tokens,
    }


class ScaledEstimate:
    """Melange's profiles: the estimate for a bucket, by what a simulation says of the instance on the whole mix."""

    def __init__(self, market: Market) -> None:
        self.service = market.service
        gpus = {name: gpu(name) for name in LIMITS}
        self.estimate = FluidEstimate({self.service.model.name: self.service.model}, gpus, self.service.engine)
        self.goodput_by_label = {each.combo.label: each.goodput_rps for each in market.aggregated}

    def goodput_rps(self, combo: GpuCombo, workload: WorkloadPattern, slo: ServiceSlo) -> float:
        """See `Profiler`; 0 if the instance has no simulated goodput."""
        whole = self.estimate.goodput_rps(combo, self.service.pattern, slo)
        factor = self.goodput_by_label.get(combo.label, 0.0) / whole if whole else 0.0
        return factor * self.estimate.goodput_rps(combo, workload, slo)


def melange_plan(market: Market) -> ComboPlan:
    """The cheapest mix of aggregated instances for the mean demand."""
    spec = msgspec.convert({"builtin": market.workload, "arrivals": 5.0, "num_requests": 4000}, WorkloadSpec)
    rows = generate(spec, 0, setup.BASE_DIR)
    buckets = melange.buckets(rows.prompt_tokens, rows.output_tokens, market.demand_rps)
    sized = melange.sized(market.service, buckets, offers(), ScaledEstimate(market), Counts(aggregated=(1, 2)))
    return melange.plan(melange.MelangeProblem((sized,), LIMITS))


class OverallRuns(SeedResults):
    """The findings under changing demand."""

    def __init__(self, results: Results, markets: Mapping[str, Market], seeds: Sequence[int]) -> None:
        super().__init__(results, seeds)
        self.markets = markets

    def measured(self, workload: str, system: str, name: str) -> list[float]:
        return self.values(("overall", workload, system), name)

    def gain(self, workload: str, system: str, name: str) -> list[float | None]:
        """By seed: the increase over Melange."""
        return increases(self.measured(workload, system, name), self.measured(workload, "melange", name))

    def outcomes(self) -> dict[str, Finding]:
        findings: dict[str, Finding] = {}
        for workload in WORKLOADS:
            findings |= self._efficiency(workload) | self._latencies(workload)
        return findings

    def _efficiency(self, workload: str) -> dict[str, Finding]:
        names = ("melange", "star", "cauchy")
        tokens = {name: self.measured(workload, name, "tokens_per_usd") for name in names}
        numbers = ", ".join(f"{SYSTEMS[name]} {fmean(tokens[name]) / 1e6:.1f}" for name in names)
        in_time = ", ".join(f"{fmean(self.measured(workload, name, 'attainment')):.0%}" for name in names)
        market = self.markets[workload]
        same = market.plan().combos == market.plan(aggregated=True).combos
        note = " No split combo is in Cauchy's plan, so it is CAUCHY*." if same else ""
        why = f"M tokens/USD: {numbers}; requests in time: {in_time}. {self.plans(workload)} {_best(market)}{note}"
        rows = zip(*tokens.values(), strict=True)
        return {
            f"fig7-{workload}": Finding(self.gain(workload, "cauchy", "tokens_per_usd"), why),
            f"fig7-star-{workload}": Finding(self.gain(workload, "star", "tokens_per_usd"), why),
            f"fig7-order-{workload}": Finding([low < middle < high for low, middle, high in rows], why),
        }

    def _latencies(self, workload: str) -> dict[str, Finding]:
        findings = {}
        for key, name in (("e2e", "e2e_s"), ("ttft", "ttft_s"), ("tbt", "tbt_s")):
            ours, theirs = (self.measured(workload, system, name) for system in ("cauchy", "melange"))
            usd = ", ".join(
                f"{SYSTEMS[system]} ${fmean(self.measured(workload, system, 'usd_per_hour')):.2f}"
                for system in ("melange", "cauchy")
            )
            ttft_s, tpot_s = setup.SLOS[workload]
            why = (
                f"Melange {fmean(theirs) * 1e3:.0f} ms, Cauchy {fmean(ours) * 1e3:.0f} ms, at an hourly {usd}. The "
                f"SLO allows {ttft_s:g} s to the first token and {tpot_s * 1e3:g} ms between tokens, plans are for the "
                "mean demand, and Algorithm 1 tolerates 20% more: queues grow as long as they may, or longer."
            )
            findings[f"fig6-{key}-{workload}"] = Finding(reductions(ours, theirs), why)
        before, after = (self.measured(workload, system, "p90_s") for system in ("static", "cauchy"))
        usd = " and ".join(
            f"${fmean(self.measured(workload, system, 'usd_per_hour')):.2f}" for system in ("static", "cauchy")
        )
        why = f"{fmean(before):.2f} s without, {fmean(after):.2f} s with, at {usd} an hour. {self.plans(workload)}"
        return findings | {f"fig10-{workload}": Finding(reductions(after, before), why)}

    def plans(self, workload: str) -> str:
        """The deployments of all systems for the mean demand."""
        market = self.markets[workload]
        plans = {"Melange": melange_plan(market), "CAUCHY*": market.plan(aggregated=True), "Cauchy": market.plan()}
        return (
            f"For {market.demand_rps:.0f} requests/s, "
            + "; ".join(f"{n}: {plan_text(p)}" for n, p in plans.items())
            + "."
        )

    def exhibits(self) -> list[Exhibit]:
        """Figures 6, 7 and 10."""
        names = list(WORKLOADS.values())
        figures: list[Exhibit] = []
        for name, what in (("e2e_s", "E2E"), ("ttft_s", "TTFT"), ("tbt_s", "time per output token")):
            series = {SYSTEMS[s]: [self.measured(w, s, name) for w in WORKLOADS] for s in ("melange", "star", "cauchy")}
            chart = charts.bars(names, series, f"mean {what} (s)", yaxis={"type": "log"})
            figures.append(Figure("Figure 6", f"Mean {what}", "Demand that moves; all plans are for its mean.", chart))
        million = {
            SYSTEMS[s]: [[v / 1e6 for v in self.measured(w, s, "tokens_per_usd")] for w in WORKLOADS]
            for s in ("melange", "star", "cauchy")
        }
        shows = "All tokens processed over all that was paid."
        figures.append(Figure("Figure 7", "Cost-efficiency", shows, charts.bars(names, million, "M tokens/USD")))
        return figures

    def figure_10(self) -> Figure:
        """P90 with and without autoscaling."""
        series = {
            label: [self.measured(w, system, "p90_s") for w in WORKLOADS]
            for system, label in (("static", "without autoscaling"), ("cauchy", "with autoscaling"))
        }
        chart = charts.bars(list(WORKLOADS.values()), series, "P90 E2E (s)", yaxis={"type": "log"})
        return Figure("Figure 10", "Autoscaling", "From the same plan at first.", chart)


def plan_text(plan: ComboPlan) -> str:
    return ", ".join(f"{each.count} {each.combo.label}" for each in plan.combos) + f" (${plan.usd_per_hour:.2f}/h)"


def _best(market: Market) -> str:
    first = market.candidates[0]
    one = market.aggregated[0]
    return (
        f"The best candidate, {first.combo.label}, serves {(first.tokens_per_usd or 0) / 1e6:.1f} M tokens/USD, the "
        f"best aggregated one, {one.combo.label}, {(one.tokens_per_usd or 0) / 1e6:.1f}."
    )


class ObjectivePlans:
    """Figure 8: what the objective of Eq. 16 is worth."""

    def __init__(self, markets: Mapping[str, Market]) -> None:
        self.plans = {w: {o: market.plan(o) for o in OBJECTIVES} for w, market in markets.items()}
        self.tokens = {w: market.tokens for w, market in markets.items()}

    def served(self, workload: str, objective: Objective) -> float:
        """Tokens of the demand for a dollar."""
        return self.plans[workload][objective].tokens_per_usd or 0.0

    def possible(self, workload: str, objective: Objective) -> float:
        """Tokens for a dollar if there were as many requests as the plan can serve."""
        plan = self.plans[workload][objective]
        return 3600 * plan.services[0].goodput_rps * self.tokens[workload] / plan.usd_per_hour

    def outcomes(self) -> dict[str, Finding]:
        findings: dict[str, Finding] = {}
        for workload, plans in self.plans.items():
            full = ", ".join(f"{o.upper()} {self.possible(workload, o) / 1e6:.1f}" for o in OBJECTIVES)
            ours = plan_text(plans["co"])
            for other, what in (
                ("mce", "MCE adds combos for as long as there are GPUs."),
                (
                    "mc",
                    "The demand is the same, and nothing is cheaper than the cheapest plan, so no more is possible.",
                ),
            ):
                theirs = self.served(workload, "mce" if other == "mce" else "mc")
                gain = self.served(workload, "co") / theirs - 1
                why = (
                    f"CO: {ours}; {other.upper()}: {plan_text(plans['mce' if other == 'mce' else 'mc'])}. {what} If "
                    f"demand filled the plans: {full} M tokens/USD."
                )
                findings[f"fig8-{other}-{workload}"] = Finding([gain], why)
        return findings

    def figure(self) -> Figure:
        series = {
            f"{o.upper()}-LP{suffix}": [[value(w, o) / 1e6] for w in self.plans]
            for suffix, value in (("", self.served), (", if full", self.possible))
            for o in OBJECTIVES
        }
        chart = charts.bars([WORKLOADS[w] for w in self.plans], series, "M tokens/USD")
        shows = "Tokens of the demand over the plan's price; and what they would be if demand filled the plans."
        return Figure("Figure 8", "Objectives", shows, chart)
