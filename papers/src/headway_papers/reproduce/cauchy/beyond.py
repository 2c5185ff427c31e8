"""Beyond the paper: when mixing GPU types pays off, the cost of certainty, and energy beside dollars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import structs

from headway import catalog
from headway.planning.combos.cost_efficiency import served_tokens_per_usd
from headway.planning.combos.problem import ComboCandidate, ComboPlan, ComboProblem
from headway.planning.combos.search import deploy
from headway.planning.combos.uncertainty import UncertainDemand
from headway_papers.reproduce import charts
from headway_papers.reproduce.cauchy.certainty import frontier
from headway_papers.reproduce.cauchy.claims import WORKLOADS
from headway_papers.reproduce.cauchy.demand import CURVE
from headway_papers.reproduce.cauchy.overall import SYSTEMS, OverallRuns
from headway_papers.reproduce.cauchy.setup import GPUS, LIMITS, Market
from headway_papers.reproduce.findings import Exhibit, Figure, PaperTable, Row

FACTORS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0)
"""Factors on a price."""
NUMBERS = (0, 2, 4, 6, 8)
"""Numbers of GPUs of a scarce type."""


def prices(markets: Mapping[str, Market], gpu: str) -> Figure:
    """Plans over one type's price, compared with the best plan of equal GPUs."""
    lines: dict[str, list[tuple[float, list[float | None]]]] = {}
    best_prices = []
    for workload, market in markets.items():
        points: list[tuple[float, list[float | None]]] = []
        for factor in FACTORS:
            some = repriced(market, gpu, factor)
            points.append((factor * catalog.gpu(gpu).usd_per_hour, [saving(market, some)]))
        lines[WORKLOADS[workload]] = points
        best = max(points, key=lambda point: point[1][0] or 0.0)
        best_prices.append(f"{WORKLOADS[workload]} {best[1][0] or 0.0:.0f}% at ${best[0]:.2f}")
    chart = charts.curves(lines, f"price of a {gpu} ($/h)", "saved by mixing types (%)")
    shows = f"Against the cheapest plan with one type of GPU (MC-LP). Most: {', '.join(best_prices)}."
    return Figure("Headway 1", f"When mixing types pays: the price of a {gpu}", shows, chart)


def repriced(market: Market, gpu: str, factor: float) -> tuple[ComboCandidate, ...]:
    """Candidates with another price of one type; goodputs stay."""
    pattern, candidates = market.service.pattern, []
    extra_usd = catalog.gpu(gpu).usd_per_hour * (factor - 1)
    for each in market.candidates:
        usd = each.combo.usd_per_hour + extra_usd * each.combo.gpus.get(gpu, 0)
        served = served_tokens_per_usd(each.goodput_rps, pattern.prompt_tokens, pattern.output_tokens, usd)
        combo = structs.replace(each.combo, usd_per_hour=usd)
        candidates.append(structs.replace(each, combo=combo, tokens_per_usd=served))
    return tuple(candidates)


def saving(market: Market, candidates: Sequence[ComboCandidate]) -> float | None:
    """Savings in percent against the cheapest plan of one type. No GPUs are scarce, so only the price matters."""
    whole = cheapest(market, candidates)
    uniform = [
        cheapest(market, [each for each in candidates if set(each.combo.gpus) == {gpu}])
        for gpu in GPUS.values()
        if any(set(each.combo.gpus) == {gpu} for each in candidates)
    ]
    least = min((each.usd_per_hour for each in uniform), default=None)
    return None if least is None else 100 * (1 - whole.usd_per_hour / least)


def cheapest(
    market: Market, candidates: Sequence[ComboCandidate], limits: Mapping[str, int] | None = None
) -> ComboPlan:
    """MC-LP for the mean demand, without limits unless given."""
    return deploy(ComboProblem((market.demand,), tuple(candidates), dict(limits or {}), "mc"), explain=False)


def limits(markets: Mapping[str, Market]) -> Figure:
    """Cost of a plan if the type that serves most per dollar is scarce."""
    lines: dict[str, list[tuple[float, list[float | None]]]] = {}
    for workload, market in markets.items():
        gpu = max(market.candidates[0].combo.gpus.items(), key=lambda item: item[1])[0]
        points: list[tuple[float, list[float | None]]] = []
        for num in NUMBERS:
            plan = cheapest(market, market.candidates, {**LIMITS, gpu: num})
            points.append((float(num), [None if plan.status == "short" else plan.usd_per_hour]))
        lines[f"{WORKLOADS[workload]}: {gpu}"] = points
    chart = charts.curves(lines, "GPUs of this type", "cheapest plan ($/h)", yaxis={"rangemode": "tozero"})
    shows = "Of the type that the best candidate has most of; eight of each other. No point: demand cannot be met."
    return Figure("Headway 2", "When a type is scarce", shows, chart)


def certainty(markets: Mapping[str, Market]) -> PaperTable:
    """Plans for quantiles of the demand curve."""
    quantiles = (0.5, 0.75, 0.9, 1.0)
    rows: list[Row] = []
    levels = sorted(CURVE)
    at = [i / (len(levels) - 1) for i in range(len(levels))]
    for workload, market in markets.items():
        rates = tuple(level * market.demand_rps for level in levels)
        demand = UncertainDemand(workload, tuple(at), rates)
        problem = ComboProblem((market.demand,), market.candidates, LIMITS, "mc")
        for each in frontier(problem, [demand], quantiles):
            rps = each.plan.services[0].goodput_rps
            rows.append([WORKLOADS[workload], each.quantile, demand.at(each.quantile), rps, each.usd_per_hour])
            rows[-1].append(each.chances[workload])
    heads = ["workload", "quantile", "demand (req/s)", "goodput", "$/h", "chance of being enough"]
    return PaperTable("Headway 3", "What it costs to be sure", "Static plans for quantiles of the curve.", heads, rows)


def energy(overall: OverallRuns) -> PaperTable:
    rows: list[Row] = []
    for workload, name in WORKLOADS.items():
        for system in (each for each in SYSTEMS if each in overall.cases[0].systems):
            values = [
                overall.mean(workload, overall.cases[0], system, key) for key in ("tokens_per_usd", "joules_per_token")
            ]
            rows.append([name, SYSTEMS[system], values[0] / 1e6, values[1]])
    shows = "Joules by the boards' rated power for as long as they are paid for: an upper bound."
    heads = ["workload", "system", "M tokens/USD", "J/token"]
    return PaperTable("Headway 4", "Energy beside dollars", shows, heads, rows)


def one_type(markets: Mapping[str, Market]) -> PaperTable:
    """Clusters of one GPU type, as many GPUs as needed."""
    rows: list[Row] = []
    for workload, market in markets.items():
        mixed = cheapest(market, market.candidates).usd_per_hour
        for gpu in GPUS.values():
            own = [each for each in market.candidates if set(each.combo.gpus) == {gpu}]
            whole = [each for each in own if each.combo.aggregated is not None]
            costs = [cheapest(market, some).usd_per_hour if some else None for some in (own, whole)]
            rows.append([WORKLOADS[workload], gpu, *costs, mixed])
    heads = ["workload", "GPU", "$/h", "without split combos", "all types mixed"]
    return PaperTable(
        "Headway 5", "Homogeneous clusters", "The cheapest plan (MC-LP), no GPUs being short.", heads, rows
    )


def exhibits(markets: Mapping[str, Market], overall: OverallRuns) -> list[Exhibit]:
    return [prices(markets, GPUS["h20"]), limits(markets), certainty(markets), energy(overall), one_type(markets)]
