"""Plans: fleets that meet SLOs, combos, cascades and tiers. A plan converts to a scenario, a table or a page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import msgspec

from headway.api.arguments import check_counts, checked
from headway.api.demand import Demand
from headway.api.results import WIDTH, Tabular
from headway.api.scenarios import ScenarioLike, document_of
from headway.config import strict_yaml
from headway.config.scenario import Scenario
from headway.config.strict_yaml import Places
from headway.core.duration import in_seconds, seconds_of
from headway.core.errors import HeadwayError
from headway.forecast import demand_file
from headway.forecast.demand import DemandForecast
from headway.metrics.interval import interval
from headway.planning.capacity import page as capacity_page
from headway.planning.capacity import plan as capacity
from headway.planning.capacity import text as capacity_text
from headway.planning.capacity.problem import Situation, Targets
from headway.planning.cascade import best_plan as cascade
from headway.planning.cascade import page as cascade_page
from headway.planning.cascade.planning_request import make_request
from headway.planning.cascade.problem import Cheapest, LatencyBudget, QualityFloor, Target
from headway.planning.combos import curve_page
from headway.planning.combos import page as combos_page
from headway.planning.combos import plan as combos
from headway.planning.combos.candidates import Ranking
from headway.planning.combos.curve import curve_yaml, plan_curve
from headway.planning.combos.plan import offer_of, own_gpus
from headway.planning.combos.problem import Counts, Objective, Offer
from headway.planning.combos.rehearsal import ATTAINMENT, MOST_REQUESTS, ServiceScenario
from headway.planning.demand import fleets
from headway.planning.demand import page as demand_page
from headway.planning.demand import plan as by_week
from headway.planning.demand import text as demand_text
from headway.planning.demand.problem import DEFAULT_CHANCE, DemandPrices
from headway.planning.fleet import page as fleet_page
from headway.planning.fleet import plan as fleet
from headway.planning.fleet.document import of_trace
from headway.planning.fleet.problem import FleetPlan
from headway.planning.tiers import rehearsal as tiers
from headway.report.page import write_page
from headway.scenario import Simulator, assemble
from headway.scenario.processes import processes
from headway.workload.atomic_file import write_text

if TYPE_CHECKING:
    import pyarrow

Gpus = Sequence[str | Offer]
Seconds = float | str
"""Seconds, or a duration such as "450ms"."""
_COMMAND = "import headway"


@dataclass(frozen=True, repr=False)
class Plan(Tabular):
    """A plan of any kind. `answer` holds all values, as `--json` prints them."""

    answer: Any
    is_met: bool
    """Whether the targets are met."""
    rows: tuple[dict[str, Any], ...]
    """The options that were considered."""
    text: str
    yaml: Callable[[], str]
    html: Callable[[], str] | None = None

    def scenario(self) -> Scenario:
        """The planned fleet with its workload and policies, to simulate or to serve. HeadwayError if the plan has
        none."""
        return assemble(*strict_yaml.parse(self.yaml(), "plan.yaml"), Path())

    def save(self, path: str | Path) -> Path:
        """Write the plan as a scenario (.yaml) or a page (.html), or its values (.json)."""
        path = Path(path)
        if path.suffix in (".yaml", ".yml"):
            write_text(path, self.yaml())
        elif path.suffix == ".html" and self.html is not None:
            write_page(path, self.html())
        elif path.suffix == ".json":
            write_text(path, msgspec.json.format(msgspec.json.encode(self.answer), indent=2).decode() + "\n")
        else:
            raise HeadwayError(f"{path}: expected a name that ends in .yaml, .json{', .html' if self.html else ''}")
        return path

    def table(self) -> str:
        return self.text

    def to_arrow(self) -> pyarrow.Table:
        """One row for each option."""
        import pyarrow

        return pyarrow.Table.from_pylist(list(self.rows))

    def __repr__(self) -> str:
        return f"<headway.Plan: {self.text.splitlines()[0]}>"


@checked
def plan_capacity(
    scenario: ScenarioLike, *, gpus: Sequence[str] = (), tps: Sequence[int] = (1, 2, 4, 8),
    routings: Sequence[str] = (), orderings: Sequence[str] = (), ttft_p99_s: Seconds | None = None,
    tpot_p99_s: Seconds | None = None, e2e_p99_s: Seconds | None = None, attainment: float | None = None,
    max_replicas: int = 64, situations: Sequence[Situation] = (), cache: str | Path | None = None,
    demand: Demand | str | Path | None = None, chance: float = DEFAULT_CHANCE, reserved_usd: float | None = None,
    spot_usd: float | None = None, jobs: int = 1,
) -> Plan:  # fmt: skip
    """The cheapest GPU type, parallelism, policies and number of replicas that meet SLOs: `headway plan capacity`.

    The scenario gives workload, model and engine; its first pool needs no `gpu`. `situations`: what-ifs. `cache`: a
    folder that keeps simulations. `demand`: a forecast, or its file, in place of the workload. The plan then covers the
    weeks of the forecast, and each week meets the targets with this `chance`. `reserved_usd`, `spot_usd`: price of a
    GPU per hour.
    """
    check_counts(max_replicas=max_replicas, jobs=jobs)
    targets = Targets(
        seconds_of("ttft_p99_s", ttft_p99_s),
        seconds_of("tpot_p99_s", tpot_p99_s),
        seconds_of("e2e_p99_s", e2e_p99_s),
        attainment,
    )
    options = capacity.CapacityOptions(
        gpus=tuple(gpus),
        tps=tuple(tps),
        routings=tuple(routings),
        orderings=tuple(orderings),
        targets=targets,
        situations=tuple(situations),
        max_replicas=max_replicas,
    )
    if demand is not None:
        prices = {"reserved_usd_per_gpu_hour": reserved_usd, "spot_usd_per_gpu_hour": spot_usd}
        return _for_demand(scenario, demand, options, chance, prices, jobs, _folder(cache))
    document, places, base_dir = document_of(scenario)
    with processes(jobs) as pool:
        best, rehearsal = capacity.plan(document, places, base_dir, options, Simulator(), _folder(cache), None, pool)
    rows = [
        {
            "gpu": each.candidate.gpu,
            "tp": each.candidate.parallel.tp,
            "policy": each.candidate.policy,
            "status": each.status,
            "replicas": each.replicas,
            "usd_per_hour": each.usd_per_hour,
            "bound_usd_per_hour": each.bound_usd_per_hour,
            "is_calibrated": not each.uncalibrated,
            "reason": each.reason,
        }
        for each in best.options
    ]
    return Plan(
        best,
        best.choice is not None,
        tuple(rows),
        capacity_text.render(best, width=WIDTH),
        lambda: capacity.scenario_yaml(best, rehearsal),
        lambda: capacity_page.page(best, str(document.get("name", "capacity")), _COMMAND),
    )


def _forecast(demand: Demand | str | Path) -> DemandForecast:
    return demand.answer if isinstance(demand, Demand) else demand_file.load(Path(demand))


def _for_demand(
    scenario: ScenarioLike,
    demand: Demand | str | Path,
    options: capacity.CapacityOptions,
    chance: float,
    prices: Mapping[str, float | None],
    jobs: int,
    folder: Path | None,
) -> Plan:
    """The replicas for each week of a forecast: `headway plan capacity --demand`."""
    forecast = _forecast(demand)
    if isinstance(scenario, Mapping) and "workload" not in scenario:
        scenario = {**scenario, "workload": {}}
    try:
        wanted = by_week.DemandPlanOptions(capacity=options, chance=chance, prices=DemandPrices(**prices))
    except ValueError as error:
        raise HeadwayError(str(error)) from None
    document, places, base_dir = document_of(scenario)
    with TemporaryDirectory() as temporary, processes(jobs) as pool:
        requests = Path(temporary) if folder is None else folder / "requests"
        answer, rehearsal = by_week.plan(
            forecast,
            document,
            places,
            base_dir=base_dir,
            options=wanted,
            simulator=Simulator(),
            requests=requests,
            cache_dir=folder,
            progress=None,
            pool=pool,
        )
    rows = tuple(msgspec.to_builtins(week) for week in answer.weeks)
    return Plan(
        answer,
        answer.status == "met",
        rows,
        demand_text.render(answer),
        lambda: by_week.scenario_yaml(answer, rehearsal, forecast),
        lambda: demand_page.page(answer, forecast, _COMMAND),
    )


@checked
def plan_combos(
    scenario: ScenarioLike, gpus: Gpus, *, rps: float | None = None, objective: Objective = "co",
    gpus_per_server: int | None = None, aggregated_only: bool = False, sizes: int = 2, select: Ranking = "goodput",
    top: int | None = None, attainment: float = ATTAINMENT, profile_requests: int = MOST_REQUESTS, curve: bool = False,
    routings: Sequence[str] = combos.ROUTINGS, cache: str | Path | None = None,
) -> Plan:  # fmt: skip
    """The GPUs for prefill and for decode, and the number of such combos, for one service: `headway plan combos`.

    `gpus`: offers, or texts such as "h800:8:2.8". `rps`: requests per second; None: the mean of the scenario's
    arrivals. `select`, `top`: plan only with the best combos, by goodput per dollar or by Cauchy's Eq. 15 ("eq15").
    `curve`: plan for the arrivals' rates over time; rows are then the rehearsed sizes, static and scaled. `routings`:
    routers to rehearse; among equals, the first wins.

    Raises HeadwayError for `curve` with `rps`, and if the arrivals have no curve.
    """
    check_counts(gpus_per_server=gpus_per_server, top=top, profile_requests=profile_requests)
    check_counts(0, sizes=sizes)
    if curve and rps is not None:
        raise HeadwayError("curve, rps: expected one of them; a curve is that of the scenario's own arrivals")
    simulator, (document, places, base_dir) = Simulator(), document_of(scenario)
    find = own_gpus([document], places)
    offers = tuple(each if isinstance(each, Offer) else offer_of(each, gpus_per_server, find) for each in gpus)
    service = combos.service_scenario(document, places, base_dir, simulator, rps)
    options = combos.ComboOptions(
        offers=offers,
        counts=Counts(prefill=(), decode=()) if aggregated_only else Counts(),
        objective=objective,
        attainment=attainment,
        per_pair=sizes or None,
        ranking=select,
        top=top,
        num_requests=profile_requests,
        routings=tuple(routings),
    )
    if curve:
        return _for_curve(service, options, simulator, _folder(cache))
    answer = combos.plan([service], options, simulator, _folder(cache))
    rows = [
        {
            "combo": each.combo.label,
            "usd_per_hour": each.combo.usd_per_hour,
            "goodput_rps": each.goodput_rps,
            "tokens_per_usd": each.tokens_per_usd,
            "is_calibrated": each.calibrated,
            "planned": answer.plan.counts.get((each.service, each.combo.label), 0),
        }
        for each in answer.selection.candidates
    ]
    planned = ", ".join(f"{each.count} x {each.combo.label}" for each in answer.plan.combos) or "nothing"
    lines = [f"{answer.plan.status}: {planned}; ${answer.plan.usd_per_hour:,.2f} an hour"]
    text = "\n".join([*lines, *map(combos_page.kept, answer.rehearsals.values()), ""])
    return Plan(
        answer,
        answer.plan.status != "short",
        tuple(rows),
        text,
        lambda: combos.scenario_yaml(answer, service),
        lambda: combos_page.page(answer.plan, answer.selection, answer.others, answer.rehearsals, _COMMAND),
    )


def _for_curve(
    service: ServiceScenario, options: combos.ComboOptions, simulator: Simulator, folder: Path | None
) -> Plan:
    """The cheapest combos for arrivals that vary over time: `headway plan combos --curve`."""
    answer = plan_curve(service, options, simulator, folder)
    rows = [
        {
            "way": each.way,
            "k": each.k,
            "quantile": each.quantile,
            "planned_rps": each.planned_rps,
            "fleet": ", ".join(f"{part.count} {part.combo.label}" for part in each.plan.combos),
            "attainment": each.run.attainment,
            "usd_per_hour": (each.other or each.run).usd_per_hour,
            "is_met": each.is_met,
            "planned": each is answer.chosen,
        }
        for each in answer.sizings
    ]
    return Plan(
        answer,
        answer.chosen is not None,
        tuple(rows),
        f"{curve_page.headline(answer)}\n",
        lambda: curve_yaml(answer, service, options),
        lambda: curve_page.curve_page(answer, _COMMAND),
    )


@checked
def plan_fleet(
    trace: ScenarioLike | None, have: Gpus, *, slo: Mapping[str, Seconds] | None = None,
    models: Mapping[str, str] | Sequence[str] = (), engine: str | None = None, attainment: float = fleet.ATTAINMENT,
    tps: Sequence[int] = (1, 2, 4, 8), routings: Sequence[str] = fleet.ROUTINGS, split: bool = True,
    seeds: int | None = None, jobs: int = 1, cache: str | Path | None = None,
    demand: Demand | str | Path | None = None, chance: float = DEFAULT_CHANCE,
) -> Plan:  # fmt: skip
    """The cheapest fleet of the available GPUs for several models, and its router: `headway plan fleet`.

    `trace`: a file of requests with a column `model`, or a scenario with a pool for each model. `have`: offers, or
    texts such as "h100:16:2.8". `slo`: of requests without their own, as {"ttft_s": 2, "tpot_s": "50ms"}.
    `models`: models of the catalog by the names that requests ask for, or one name for a trace without names. `split`:
    consider separate prefill and decode replicas. `seeds`: of each whole fleet; None: 5, or 3 where a run takes 2 s.
    `demand`: a forecast, or its file: a fleet for each of its weeks, with this `chance` that the busiest hour's demand
    is no higher; `trace` may then be None.
    """
    check_counts(seeds=seeds, jobs=jobs)
    forecast = (
        demand.answer if isinstance(demand, Demand) else None if demand is None else demand_file.load(Path(demand))
    )
    if forecast is not None:
        fleets.check_chance(chance)
        trace = Path(forecast.busiest.path) if trace is None else trace
    if isinstance(trace, str | Path) and Path(trace).suffix not in (".yaml", ".yml"):
        named = models if isinstance(models, Mapping) else {each: each for each in models}
        document, places, base_dir = of_trace(Path(trace), named, engine), Places(), Path()
    elif models or engine:
        raise HeadwayError("models, engine: go with a trace; a scenario says them itself")
    else:
        document, places, base_dir = document_of(trace)
    if slo:
        document = {**document, "slo": {**(document.get("slo") or {}), **in_seconds("", dict(slo))}}
    find = own_gpus([document], places)
    offers = tuple(each if isinstance(each, Offer) else offer_of(each, None, find) for each in have)
    options = fleet.FleetOptions(
        offers=offers, attainment=attainment, tps=tuple(tps), routings=tuple(routings), split=split, seeds=seeds
    )
    folder = _folder(cache)
    with TemporaryDirectory() as temporary, processes(jobs) as pool:
        requests = Path(temporary) if folder is None else folder / "requests"
        question = fleet.FleetQuestion(document, places, base_dir, options, Simulator(), requests, folder, pool)
        if forecast is not None:
            return _fleets_by_week(*fleets.plan(forecast, question, chance), question)
        return _fleet(fleet.plan(question), question)


def _fleet(answer: FleetPlan, question: fleet.FleetQuestion) -> Plan:
    """The fleet for the given requests: `headway plan fleet`."""
    document, base_dir, offers = question.document, question.base_dir, question.options.offers
    rows = [
        {
            "fleet": each.label,
            "kind": each.kind,
            "router": each.router,
            "usd_per_hour": each.usd_per_hour,
            "num_gpus": sum(sum(part.gpus.values()) for part in each.parts),
            "attainment": each.attainment,
            "attainment_low": each.interval and each.interval.low,
            "attainment_high": each.interval and each.interval.high,
            "is_met": each.is_met,
            "is_calibrated": all(part.calibrated for part in each.parts),
        }
        for each in answer.points
    ]
    return Plan(
        answer,
        answer.status == "met",
        tuple(rows),
        "\n".join(answer.sentences) + "\n",
        lambda: fleet.scenario_yaml(answer, document, base_dir, offers),
        lambda: fleet_page.page(answer, str(document.get("name", "fleet")), _COMMAND),
    )


def _fleets_by_week(answer: fleets.FleetDemandPlan, largest: Mapping[str, Any], question: fleet.FleetQuestion) -> Plan:
    """The fleets for the weeks of a forecast: `headway plan fleet --demand`."""
    base_dir, offers, title = question.base_dir, question.options.offers, str(question.document.get("name", "fleet"))
    return Plan(
        answer,
        answer.status == "met",
        tuple(msgspec.to_builtins(week) for week in answer.weeks),
        "\n".join(fleets.sentences(answer)) + "\n",
        lambda: fleet.scenario_yaml(answer.largest, largest, base_dir, offers),
        lambda: fleet_page.page(answer.largest, title, _COMMAND),
    )


@checked
def plan_cascade(
    scenario: ScenarioLike,
    *,
    quality: float | None = None,
    latency_s: Seconds | None = None,
    gpus: int | Gpus | None = None,
    gpus_per_server: int | None = None,
    rps: float | None = None,
    combos: bool = False,
    alternatives: bool = True,
    fresh_draws: int = 5,
    cache: str | Path | None = None,
) -> Plan:
    """The thresholds, GPUs per model and replica shapes of a cascade: `headway plan cascade`.

    With `quality`, the least mean score, the p95 latency is minimised. With `latency_s`, the largest p95 latency, the
    quality is maximised. With both, the cost is minimised. `gpus`: their number, or offers as in `plan_combos`.
    `fresh_draws`: other draws of the requests, on which the plan is rehearsed.
    """
    if quality is None and latency_s is None:
        raise HeadwayError("expected quality or latency_s, or both")
    check_counts(gpus=gpus if isinstance(gpus, int) else None, gpus_per_server=gpus_per_server)
    check_counts(0, fresh_draws=fresh_draws)
    offers = () if gpus is None or isinstance(gpus, int) else gpus
    document, places, base_dir = document_of(scenario)
    find = own_gpus([document], places)
    request = make_request(
        document,
        places,
        base_dir,
        _target(quality, seconds_of("latency_s", latency_s)),
        Simulator(),
        num_gpus=gpus if isinstance(gpus, int) else None,
        gpus=tuple(each if isinstance(each, Offer) else offer_of(each, gpus_per_server, find) for each in offers),
        gpus_per_server=gpus_per_server,
        rps=rps,
        combos=combos,
    )
    answer = cascade.plan(request, _folder(cache), None, alternatives, fresh_draws=fresh_draws)
    rows = [
        {
            "model": stage.model,
            "gpus": stage.gpus,
            "replicas": stage.shapes,
            "threshold": stage.threshold,
            "share": stage.processing_ratio,
            "p95_latency_s": stage.p95_latency_s,
        }
        for stage in answer.chosen.plan.stages
    ]
    stages = "\n".join(f"{row['model']}: {row['replicas']} on {row['gpus']} GPUs" for row in rows)
    return Plan(
        answer,
        answer.chosen.is_met,
        tuple(rows),
        "\n".join([*cascade_page.reached(answer), stages, ""]),
        lambda: cascade.scenario_yaml(answer, request),
        lambda: cascade_page.page(answer, _COMMAND),
    )


def _target(quality: float | None, latency_s: float | None) -> Target:
    if quality is not None and not 0 <= quality <= 100:
        raise HeadwayError(f"quality: {quality!r}; expected a mean score from 0 to 100")
    if quality is None:
        assert latency_s is not None
        return LatencyBudget(latency_s)
    return QualityFloor(quality) if latency_s is None else Cheapest(quality, latency_s)


@checked
def plan_tiers(
    scenario: ScenarioLike,
    *,
    num_tiers: Sequence[int] = (1, 2, 3, 4, 6, 8),
    decays: Sequence[float] = (0.5, 1.0, 2.0),
    seeds: int = 5,
    tolerance: float = 0.01,
) -> Plan:
    """The number of service tiers that a workload needs: `headway plan tiers`. `tolerance`: acceptable loss of
    attainment."""
    check_counts(seeds=seeds)
    if tolerance < 0:
        raise HeadwayError(f"tolerance: {tolerance!r}; expected a loss of attainment, from 0")
    document, places, base_dir = document_of(scenario)
    answer = tiers.plan(
        document,
        places,
        base_dir,
        num_tiers=num_tiers,
        decays=decays,
        seeds=range(seeds),
        interval=interval,
        simulator=Simulator(),
        tolerance=tolerance,
        progress=None,
    )
    rows = [
        {
            "num_tiers": each.num_tiers,
            "decay": each.decay,
            "attainment": each.mean,
            "loss_low": each.loss[0],
            "loss_high": each.loss[1],
            "is_tied": each.is_tied,
            "is_enough": each.is_enough,
        }
        for each in answer.settings
    ]
    text = f"{answer.chosen.num_tiers} tiers, decay {answer.chosen.decay:g}: {answer.chosen.mean:.2%} meet their SLOs\n"
    return Plan(answer, True, tuple(rows), text, _no_fleet)


def _no_fleet() -> str:
    raise HeadwayError("a plan of tiers has no fleet")


def _folder(cache: str | Path | None) -> Path | None:
    return None if cache is None else Path(cache)
