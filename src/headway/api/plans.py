"""Plans: fleets that meet SLOs, combos, cascades, scalers and tiers. A plan converts to a scenario, table or page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from headway.api.arguments import check_counts, checked
from headway.api.demand import Demand
from headway.api.results import WIDTH, Tabular
from headway.api.scenarios import ScenarioLike, source_of
from headway.config import strict_yaml
from headway.config.proxied import without_proxied
from headway.config.scenario import Scenario
from headway.config.strict_yaml import Places
from headway.core.duration import in_seconds, seconds_of
from headway.core.errors import HeadwayError
from headway.core.fleet import Gpu
from headway.forecast import demand_file
from headway.forecast.demand import DemandForecast
from headway.planning.capacity import answer as capacity
from headway.planning.capacity.plan import CapacityOptions
from headway.planning.capacity.problem import Situation, Speculative, Targets
from headway.planning.cascade import answer as cascade
from headway.planning.cascade.problem import JudgeError, target_of
from headway.planning.cascade.request import CascadeOptions
from headway.planning.combos import answer as combos
from headway.planning.combos import curve_answer, reprofile
from headway.planning.combos.candidates import Ranking
from headway.planning.combos.plan import ROUTINGS, ComboOptions, offer_of, own_gpus, service_scenario
from headway.planning.combos.problem import Counts, Objective, Offer
from headway.planning.combos.rehearsal import ATTAINMENT, MOST_REQUESTS
from headway.planning.combos.reprofile import ReprofileOptions
from headway.planning.demand import answer as weeks
from headway.planning.demand import fleets
from headway.planning.demand.plan import DemandPlanOptions
from headway.planning.demand.problem import DEFAULT_CHANCE, DemandPrices
from headway.planning.fleet import answer as fleet
from headway.planning.fleet.document import of_trace
from headway.planning.fleet.plan import ATTAINMENT as FLEET_ATTAINMENT
from headway.planning.fleet.plan import ROUTINGS as FLEET_ROUTINGS
from headway.planning.fleet.plan import FleetOptions
from headway.planning.planned import Planned
from headway.planning.rehearsals import Resources, Source
from headway.planning.scaling import answer as scaling
from headway.planning.scaling.candidates import FAMILIES
from headway.planning.scaling.demand import with_demand
from headway.planning.scaling.plan import Assemble, ScalingOptions
from headway.planning.tiers import rehearsal as tiers
from headway.report.page import write_page
from headway.report.render import page, text
from headway.scenario import Simulator, assemble
from headway.scenario.processes import processes
from headway.workload.atomic_file import write_text

if TYPE_CHECKING:
    import pyarrow

Gpus = Sequence[str | Offer]
Seconds = float | str
"""Seconds, or a duration such as "450ms"."""


@dataclass(frozen=True, repr=False)
class Plan(Planned, Tabular):
    """A plan of any kind. `answer` holds all values, as `--json` prints them."""

    def scenario(self) -> Scenario:
        """The planned fleet with its workload and policies, to simulate or to serve. Raises HeadwayError if the plan
        has none."""
        return assemble(*strict_yaml.parse(self.yaml(), "plan.yaml"), Path())

    def save(self, path: str | Path) -> Path:
        """Write the plan as a scenario (.yaml) or a page (.html), or its values (.json)."""
        path = Path(path)
        if path.suffix in (".yaml", ".yml"):
            write_text(path, self.yaml())
        elif path.suffix == ".html" and self.report is not None:
            write_page(path, self.html())
        elif path.suffix == ".json":
            write_text(path, msgspec.json.format(msgspec.json.encode(self.answer), indent=2).decode() + "\n")
        else:
            raise HeadwayError(f"{path}: expected a name that ends in .yaml, .json{', .html' if self.report else ''}")
        return path

    def html(self) -> str:
        """The plan as a page. Raises HeadwayError if there is none of this kind of plan."""
        if self.report is None:
            raise HeadwayError("this plan has no page")
        return page(self.report(None), "import headway")

    @property
    def text(self) -> str:
        """The same text as `table`."""
        return self.table()

    def table(self) -> str:
        return text(self.said, WIDTH)

    def to_arrow(self) -> pyarrow.Table:
        """One row for each option."""
        import pyarrow

        return pyarrow.Table.from_pylist(list(self.rows))

    def __repr__(self) -> str:
        return f"<headway.Plan: {self.sentences[0]}>"


def planned(make: Callable[[Resources], Planned], cache: str | Path | None, jobs: int = 1) -> Plan:
    """The plan, made with `jobs` processes. `cache`: a folder for rehearsals."""
    check_counts(jobs=jobs)
    with processes(jobs) as pool:
        found = make(Resources(Simulator(), None if cache is None else Path(cache), None, pool))
    return Plan(**vars(found))


@checked
def plan_capacity(
    scenario: ScenarioLike, *, gpus: Sequence[str] = (), tps: Sequence[int] = (1, 2, 4, 8),
    routings: Sequence[str] = (), orderings: Sequence[str] = (), speculative: Speculative = "on",
    ttft_p99_s: Seconds | None = None, tpot_p99_s: Seconds | None = None, e2e_p99_s: Seconds | None = None,
    attainment: float | None = None, max_replicas: int = 64, situations: Sequence[Situation] = (),
    cache: str | Path | None = None, demand: Demand | str | Path | None = None, chance: float = DEFAULT_CHANCE,
    reserved_usd: float | None = None, spot_usd: float | None = None, jobs: int = 1,
) -> Plan:  # fmt: skip
    """The cheapest GPU type, parallelism, policies and number of replicas that meet SLOs: `headway plan capacity`.

    The scenario gives workload, model and engine; its first pool needs no `gpu`. `speculative`: "on", "off" or "both".
    `situations`: what-ifs. `cache`: a folder that keeps simulations. `demand`: a forecast, or its file, in place of the
    workload. The plan then covers the weeks of the forecast, and each week meets the targets with this `chance`.
    `reserved_usd`, `spot_usd`: price of a GPU per hour.
    """
    check_counts(max_replicas=max_replicas)
    options = CapacityOptions(
        gpus=tuple(gpus),
        tps=tuple(tps),
        routings=tuple(routings),
        orderings=tuple(orderings),
        speculative=speculative,
        targets=Targets(
            seconds_of("ttft_p99_s", ttft_p99_s),
            seconds_of("tpot_p99_s", tpot_p99_s),
            seconds_of("e2e_p99_s", e2e_p99_s),
            attainment,
        ),
        situations=tuple(situations),
        max_replicas=max_replicas,
    )
    if demand is None:
        return planned(partial(capacity.planned, source_of(scenario), options), cache, jobs)
    prices = DemandPrices(reserved_usd_per_gpu_hour=reserved_usd, spot_usd_per_gpu_hour=spot_usd)
    if isinstance(scenario, Mapping) and "workload" not in scenario:
        scenario = {**scenario, "workload": {}}
    by_week = DemandPlanOptions(capacity=options, chance=chance, prices=prices)
    return planned(partial(weeks.planned, _forecast(demand), source_of(scenario), by_week), cache, jobs)


def _forecast(demand: Demand | str | Path) -> DemandForecast:
    return demand.answer if isinstance(demand, Demand) else demand_file.load(Path(demand))


def _offers(gpus: Gpus, find: Callable[[str], Gpu], per_server: int | None = None) -> tuple[Offer, ...]:
    return tuple(each if isinstance(each, Offer) else offer_of(each, per_server, find) for each in gpus)


@checked
def plan_combos(
    scenario: ScenarioLike | Sequence[ScenarioLike], gpus: Gpus, *,
    rps: float | Sequence[float] | None = None, objective: Objective = "co",
    gpus_per_server: int | None = None, aggregated_only: bool = False, sizes: int = 2, select: Ranking = "goodput",
    top: int | None = None, attainment: float = ATTAINMENT, profile_requests: int = MOST_REQUESTS, curve: bool = False,
    routings: Sequence[str] = ROUTINGS, cache: str | Path | None = None, jobs: int = 1,
) -> Plan:  # fmt: skip
    """The GPUs for prefill and for decode, and the number of such combos: `headway plan combos`.

    `scenario`: a service, or several that share the GPUs; the plan is then a scenario for each. `gpus`: offers, or
    texts such as "h800:8:2.8". `rps`: requests per second, of each service; None: the mean of its own arrivals.
    `select`, `top`: plan only with the best combos, by goodput per dollar or by Cauchy's Eq. 15 ("eq15"). `curve`: plan
    for the arrivals' rates over time; rows are then the rehearsed sizes, static and scaled. `routings`: routers to
    rehearse; among equals, the first wins.

    Raises HeadwayError for `curve` with `rps` or several services, and if the arrivals have no curve.
    """
    check_counts(gpus_per_server=gpus_per_server, top=top, profile_requests=profile_requests)
    check_counts(0, sizes=sizes)
    if curve and rps is not None:
        raise HeadwayError("curve, rps: expected one of them; a curve is that of the scenario's own arrivals")
    several = [scenario] if isinstance(scenario, Scenario | Mapping | str | Path) else scenario
    sources = [source_of(each) for each in several]
    rates = list(rps) if isinstance(rps, Sequence) else [rps] * len(sources)
    if len(rates) != len(sources) or (curve and len(sources) > 1):
        raise HeadwayError(f"scenario: {len(sources)} services; expected {1 if curve else len(rates)}")
    options = ComboOptions(
        offers=_offers(gpus, own_gpus([each.document for each in sources], Places()), gpus_per_server),
        counts=Counts(prefill=(), decode=()) if aggregated_only else Counts(),
        objective=objective,
        attainment=attainment,
        per_pair=sizes or None,
        ranking=select,
        top=top,
        num_requests=profile_requests,
        routings=tuple(routings),
    )
    services = [service_scenario(each, Simulator(), rate) for each, rate in zip(sources, rates, strict=True)]
    if curve:
        return planned(partial(curve_answer.planned, services[0], options), cache, jobs)
    return planned(partial(combos.planned, services, options), cache, jobs)


@checked
def plan_goodput(
    fleet: str | Path, requests: str | Path, *, attainment: float = ATTAINMENT, profile_requests: int = MOST_REQUESTS,
    cache: str | Path | None = None, jobs: int = 1,
) -> Plan:  # fmt: skip
    """The goodput of a fleet file's combos, measured again with the requests that it received: `headway plan goodput`.

    `requests`: records of `headway serve --records`, or a trace in any format. The plan as a scenario is the fleet file
    with the new goodputs. It is met if every combo serves something in time.
    """
    check_counts(profile_requests=profile_requests)
    source, content = source_of(fleet), Path(fleet).read_text(encoding="utf-8")
    options = ReprofileOptions(attainment, profile_requests)
    return planned(partial(reprofile.planned, source, content, Path(requests), options), cache, jobs)


@checked
def plan_fleet(
    trace: ScenarioLike | None, have: Gpus, *, slo: Mapping[str, Seconds] | None = None,
    models: Mapping[str, str] | Sequence[str] = (), engine: str | None = None, attainment: float = FLEET_ATTAINMENT,
    tps: Sequence[int] = (1, 2, 4, 8), routings: Sequence[str] = FLEET_ROUTINGS, split: bool = True,
    seeds: int | None = None, jobs: int = 1, cache: str | Path | None = None,
    demand: Demand | str | Path | None = None, chance: float = DEFAULT_CHANCE, coefficients: Sequence[str | Path] = (),
) -> Plan:  # fmt: skip
    """The cheapest fleet of the available GPUs for several models, and its router: `headway plan fleet`.

    `trace`: a file of requests with a column `model`, or a scenario with a pool for each model. `have`: offers, or
    texts such as "h100:16:2.8". `slo`: of requests without their own, as {"ttft_s": 2, "tpot_s": "50ms"}.
    `models`: models of the catalog by the names that requests ask for, or one name for a trace without names. `split`:
    consider separate prefill and decode replicas. `seeds`: of each whole fleet; None: 5, or 3 where a run takes 2 s.
    `demand`: a forecast, or its file: a fleet for each of its weeks, with this `chance` that the busiest hour's demand
    is no higher; `trace` may then be None. `coefficients`: files of `headway calibrate`, for the GPUs in them.
    """
    check_counts(seeds=seeds)
    forecast = None if demand is None else _forecast(demand)
    if forecast is not None:
        fleets.check_chance(chance)
        trace = Path(forecast.busiest.path) if trace is None else trace
    if isinstance(trace, str | Path) and Path(trace).suffix not in (".yaml", ".yml"):
        named = models if isinstance(models, Mapping) else {each: each for each in models}
        source = Source(of_trace(Path(trace), named, engine), Places(), Path())
    elif models or engine:
        raise HeadwayError("models, engine: go with a trace; a scenario says them itself")
    else:
        source = source_of(trace)
    source = source.with_slo(in_seconds("", dict(slo or {})))
    options = FleetOptions(
        offers=_offers(have, own_gpus([source.document], source.places)),
        attainment=attainment,
        tps=tuple(tps),
        routings=tuple(routings),
        split=split,
        seeds=seeds,
        coefficients=tuple(map(Path, coefficients)),
    )
    if forecast is None:
        return planned(partial(fleet.planned, source, options), cache, jobs)
    return planned(partial(fleets.planned, forecast, source, options, chance), cache, jobs)


@checked
def plan_cascade(
    scenario: ScenarioLike, *, quality: float | None = None, latency_s: Seconds | None = None,
    gpus: int | Gpus | None = None, gpus_per_server: int | None = None, rps: float | None = None, combos: bool = False,
    alternatives: bool = True, fresh_draws: int = 5, prefix_hit_rate: float = 0.0, curve: int = 0,
    regret: Sequence[JudgeError] = (), cache: str | Path | None = None,
) -> Plan:  # fmt: skip
    """The thresholds, GPUs per model and replica shapes of a cascade: `headway plan cascade`.

    With `quality`, the least mean score, the p95 latency is minimised. With `latency_s`, the largest p95 latency, the
    quality is maximised. With both, the cost is minimised. `gpus`: their number, or offers as in `plan_combos`.
    `fresh_draws`: other draws of the requests, on which the plan is rehearsed. `prefix_hit_rate`: the share of prompt
    tokens that prefix caches hold. `curve`: the number of further plans, for qualities from low to high. `regret`:
    errors of judges, for each of which the plan's losses are computed.
    """
    target = target_of(quality, seconds_of("latency_s", latency_s))
    check_counts(gpus=gpus if isinstance(gpus, int) else None, gpus_per_server=gpus_per_server)
    check_counts(0, fresh_draws=fresh_draws, curve=curve)
    if not 0 <= prefix_hit_rate < 1:
        raise HeadwayError(f"prefix_hit_rate: {prefix_hit_rate:g}; expected a share of prompt tokens, less than 1")
    source = source_of(scenario)
    offers = () if gpus is None or isinstance(gpus, int) else gpus
    options = CascadeOptions(
        target=target,
        num_gpus=gpus if isinstance(gpus, int) else None,
        gpus=_offers(offers, own_gpus([source.document], source.places), gpus_per_server),
        gpus_per_server=gpus_per_server,
        rps=rps,
        combos=combos,
        prefix_hit_rate=prefix_hit_rate,
        alternatives=alternatives,
        curve=curve,
        errors=tuple(regret),
        fresh_draws=fresh_draws,
    )
    return planned(partial(cascade.planned, source, options), cache)


@checked
def plan_scaling(
    scenario: ScenarioLike, *, demand: str | Path | None = None, per_s: float = 1.0,
    startup_s: Sequence[Seconds] = (), max_late: float = 0.01, slo: Mapping[str, Seconds] | None = None,
    scalers: Sequence[str] = tuple(FAMILIES), forecaster: str | None = None, past_hours: float = 0.0, seeds: int = 1,
    clairvoyant: bool = True, cache: str | Path | None = None, jobs: int = 1,
) -> Plan:  # fmt: skip
    """The scaler that takes the fewest GPU-hours for recorded demand: `headway plan scaling`.

    `scenario`: the fleet, its limits and policies. `demand`: a CSV with a column `time` and one of rates for `per_s`
    seconds, the answer of a Prometheus range query, or a folder of records; None: the scenario's workload. `startup_s`:
    start times to plan for; none: the scenario's own. `max_late`: the share of requests that may miss an SLO. `slo`: of
    requests without their own. `forecaster`: of scalers that forecast; `past_hours` of demand are known to it at the
    start. `clairvoyant`: plan with the demand known, too. With several start times, the plan is several scenarios.
    """
    check_counts(seeds=seeds)
    if per_s <= 0 or past_hours < 0:
        raise HeadwayError(f"per_s, past_hours: {per_s:g}, {past_hours:g}; expected more than 0, and 0 or more")
    if past_hours and forecaster is None:
        raise HeadwayError("past_hours: goes with forecaster, which learns from them")
    source = source_of(scenario).with_slo(in_seconds("", dict(slo or {})))
    if demand is not None:
        source = source._replace(document=with_demand(source.document, str(demand), per_s, past_hours))
    options = ScalingOptions(
        scalers=tuple(scalers),
        startup_s=tuple(dict.fromkeys(seconds_of("startup_s", each) for each in startup_s)) or (None,),
        max_late=max_late,
        num_seeds=seeds,
        forecaster=None if forecaster is None else {"name": forecaster, "past_hours": past_hours},
        clairvoyant=clairvoyant,
    )
    return planned(partial(scaling.planned, source, options, assembling(source)), cache, jobs)


def assembling(source: Source) -> Assemble:
    """Creates scenarios from documents like the source's, without gateway-only settings."""
    return lambda document: assemble(*without_proxied(document, source.places), source.base_dir)


@checked
def plan_tiers(
    scenario: ScenarioLike, *, num_tiers: Sequence[int] = (1, 2, 3, 4, 6, 8), decays: Sequence[float] = (0.5, 1.0, 2.0),
    seeds: int = 5, tolerance: float = 0.01,
) -> Plan:  # fmt: skip
    """The number of service tiers that a workload needs: `headway plan tiers`. `tolerance`: acceptable loss of
    attainment."""
    check_counts(seeds=seeds)
    options = tiers.TierOptions(num_tiers=tuple(num_tiers), decays=tuple(decays), seeds=seeds, tolerance=tolerance)
    return planned(partial(tiers.planned, source_of(scenario), options), None)
