"""`headway plan capacity --demand`: the kind of replica for the busiest recorded hour, and the number of replicas by
week."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from math import ceil, sqrt
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct, field, structs

from headway.config import strict_yaml
from headway.config.scenario import with_absolute_paths
from headway.core.errors import HeadwayError
from headway.forecast.demand import HOURS_A_MONTH, DemandForecast
from headway.forecast.recorded_hours import DAY_HOURS, HOUR_S, RecordedHour
from headway.planning.capacity.plan import CapacityOptions, likely_targets
from headway.planning.capacity.plan import plan as capacity_plan
from headway.planning.capacity.problem import CandidateResult, CapacityPlan, Situation
from headway.planning.capacity.rehearsal import CapacityRehearsal, fleet_document, with_load
from headway.planning.demand.problem import (
    DEFAULT_CHANCE,
    DemandPlan,
    DemandPrices,
    DueReplicas,
    ReservePlan,
    ScheduledNumber,
    WeekPlan,
)
from headway.planning.demand.search import STEP, ServedRates, hours_of_day, runs, to_reserve, used_share
from headway.planning.rehearsals import Progress, Resources, Source, content_key
from headway.planning.together import together_in
from headway.workload.files import to_parquet
from headway.workload.generate import generate
from headway.workload.spec import TraceSpec, WorkloadSpec

LOW_LOAD = STEP**-28
"""A quarter of the recorded rate, at which step times and not queues decide the probability."""
SUREST, LEAST_LEVEL = 0.995, 0.001
"""Examined quantiles of the demand."""
START_S = 300.0
"""Start time for the schedule, if a pool does not give one."""


class DemandPlanOptions(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    capacity: CapacityOptions = field(default_factory=CapacityOptions)
    chance: float = DEFAULT_CHANCE
    """Minimum probability that the busiest hour of each week meets the targets."""
    prices: DemandPrices = field(default_factory=DemandPrices)

    def __post_init__(self) -> None:
        if not 0.5 <= self.chance < SUREST:
            raise HeadwayError(f"chance: {self.chance}; expected 0.5 or more, and less than {SUREST}")


def recorded_hour(forecast: DemandForecast) -> dict[str, Any]:
    """The busiest recorded hour as a workload's `trace`. Raises HeadwayError if the records are gone."""
    busiest = forecast.busiest
    if not Path(busiest.path).exists():
        raise HeadwayError(f"{busiest.path}: the recorded hour that is rehearsed is gone; keep it, or forecast anew")
    return {"path": busiest.path, "from_s": busiest.from_s, "to_s": busiest.to_s}


def _workload(document: Mapping[str, Any], trace: Mapping[str, Any]) -> dict[str, Any]:
    own = document.get("workload")
    kept = {key: own[key] for key in ("sampling", "slo", "tiers") if isinstance(own, dict) and key in own}
    return {**kept, "trace": dict(trace)}


def _extracted(trace: Mapping[str, Any], folder: Path) -> Path:
    """The hour's requests in a separate file, so that rehearsals need not read whole days."""
    name = content_key([trace, Path(trace["path"]).stat().st_mtime_ns])
    path = folder / f"{name}.parquet"
    if not path.exists():
        to_parquet(generate(WorkloadSpec(trace=TraceSpec(**trace)), 0, Path()), path)
    return path


def plan(
    forecast: DemandForecast, source: Source, options: DemandPlanOptions, resources: Resources
) -> tuple[DemandPlan, CapacityRehearsal]:
    """The replicas of each week of the forecast, and the rehearsals behind them.

    The kind of replica is the cheapest for the busiest recorded hour, so that it does not change with the growth. Only
    the busiest recorded hour is rehearsed, with its requests at other rates. Raises HeadwayError like capacity plans.
    """
    asked = structs.replace(options.capacity, situations=())
    trace = recorded_hour(forecast)
    if others := _other_models(forecast, source.document):
        trace |= {"without_models": others}
        forecast = forecast.of(_model(source.document))
    with resources.requests() as folder:
        hour = _extracted(trace, folder)
        made = source._replace(
            document={**source.document, "workload": _workload(source.document, {"path": str(hour)})}
        )
        if others:
            forecast = structs.replace(forecast, busiest=_at_rate_of(forecast.busiest, hour))
        best, rehearsal = capacity_plan(made, asked, resources)
        if best.choice is None or best.choice.replicas is None:
            notes = ("no kind of replica meets the targets at the busiest recorded hour",)
            return DemandPlan("infeasible", options.chance, None, None, "", 0, 0.0, best, notes=notes), rehearsal
        planner = _DemandPlanner(forecast, options, best, best.choice, rehearsal, resources.progress, resources.pool)
        return planner.plan(), rehearsal


def _model(document: Mapping[str, Any]) -> str:
    """The name of the model for which replicas are planned."""
    pools = document.get("fleet")
    first = pools[0] if isinstance(pools, list) and pools else {}
    return str(first.get("model", "")) if isinstance(first, Mapping) else ""


def _other_models(forecast: DemandForecast, document: Mapping[str, Any]) -> list[str]:
    """The forecast's models without the planned one; empty if the planned one is not among them."""
    names = [each.model for each in forecast.by_model]
    return [name for name in names if name != _model(document)] if _model(document) in names else []


def _at_rate_of(busiest: RecordedHour, hour: Path) -> RecordedHour:
    """The recorded hour with the number and rate of the requests in the file `hour`, which are those of one model."""
    from headway.workload.read import read  # imports pyarrow; other plans do not need it

    num = len(read(hour))
    share = num / max(busiest.num_requests, 1)
    return structs.replace(busiest, num_requests=num, requests_per_s=share * busiest.requests_per_s)


@dataclass
class _DemandPlanner:
    forecast: DemandForecast
    options: DemandPlanOptions
    best: CapacityPlan
    choice: CandidateResult
    rehearsal: CapacityRehearsal
    progress: Progress | None
    pool: Executor | None

    def __post_init__(self) -> None:
        self.model_chance, self.notes = self._model_chance()
        candidate, most = self.choice.candidate, self.options.capacity.max_replicas
        self.served = ServedRates(
            self._is_met, self.forecast.busiest.requests_per_s, self.choice.replicas or 1, most, together_in(self.pool)
        )
        self.usd = candidate.usd_per_replica_hour
        self.num_gpus = candidate.parallel.num_gpus

    def plan(self) -> DemandPlan:
        chance = self.options.chance
        quantile = chance if self.model_chance is None else chance / self.model_chance
        made = DemandPlan(
            "infeasible",
            chance,
            quantile,
            self.model_chance,
            self.choice.candidate.label,
            self.num_gpus,
            self.usd,
            self.best,
        )
        if quantile > SUREST:
            why = (
                f"the errors of the step times alone leave a chance of {self.model_chance:.0%} at a quarter of the"
                f" load: ask for less than --chance {chance:g}, or fit them with headway calibrate"
            )
            return structs.replace(made, demand_quantile=None, notes=(*self.notes, why))
        rates = self.forecast.rates(quantile)
        weeks = tuple(self._week(steps, float(rates[steps.start : steps.stop].max())) for steps in self.forecast.weeks)
        due, reserve = (), None  # type: tuple[DueReplicas, ...], ReservePlan | None
        is_met = all(week.replicas is not None for week in weeks)
        if is_met:
            due = self._due(rates)
            reserve = self._reserve([self.served.roughly(float(rate)) or 1 for rate in rates])
        else:
            most = self.served.most
            self.notes.append(f"a week needs more than {most} replicas: --max-replicas allows more")
        return structs.replace(
            made,
            status="met" if is_met else "short",
            weeks=weeks,
            due=due,
            reserve=reserve,
            served=tuple((n, float(f"{rate:.5g}")) for n, rate in self.served.known.items()),
            num_rehearsals=self.best.num_rehearsals + self.served.num_rehearsals,
            notes=tuple(self.notes),
        )

    def _model_chance(self) -> tuple[float | None, list[str]]:
        """The required probability that the step times are good enough, and notes on this probability.

        The wanted probability is the product of two factors, for demand and for step times. They are equal, unless the
        step times reach only a lower probability even at a low load.
        """
        candidate, replicas, low = self.choice.candidate, self.choice.replicas or 1, Situation(load=LOW_LOAD)
        found = likely_targets(self.rehearsal, candidate, replicas, self.rehearsal(candidate, replicas, low))
        if not found:
            return None, ["the errors of these predictions are not known: the chance is that of the demand alone"]
        known = {each.slo for each in found}
        targets = structs.asdict(self.rehearsal.targets)
        without = [name for name, value in targets.items() if value is not None and name not in known]
        notes = [f"the error of {', '.join(without)} is not known, and left out of the chance"] if without else []
        return min(sqrt(self.options.chance), min(each.chance for each in found)), notes

    def _is_met(self, replicas: int, load: float) -> bool:
        if self.progress is not None:
            done = self.best.num_rehearsals + self.served.num_rehearsals
            self.progress(done, max(done + 1, self.best.num_rehearsals + 40))
        candidate, situation = self.choice.candidate, Situation(load=load)
        measured = self.rehearsal.if_met(candidate, replicas, situation)
        if measured is None:
            return False
        if self.model_chance is None:
            return True
        found = likely_targets(self.rehearsal, candidate, replicas, measured)
        return all(each.chance >= self.model_chance - 1e-12 for each in found)

    def _week(self, steps: range, planned_rps: float) -> WeekPlan:
        at = slice(steps.start, steps.stop)
        median = self.forecast.rates(0.5)[at]
        replicas = self.served.need(planned_rps)
        before = None if replicas is None or replicas == 1 else replicas - 1
        return WeekPlan(
            begins=self.forecast.hour(steps.start).isoformat(),
            num_hours=len(steps),
            busiest_begins=self.forecast.hour(steps.start + int(median.argmax())).isoformat(),
            p50_requests_per_s=float(median.max()),
            p90_requests_per_s=float(self.forecast.rates(0.9)[at].max()),
            planned_requests_per_s=planned_rps,
            replicas=replicas,
            num_gpus=None if replicas is None else replicas * self.num_gpus,
            chance=None if replicas is None else self._chance(replicas, at),
            chance_with_one_less=None if before is None else self._chance(before, at),
            usd=None if replicas is None else replicas * self.usd * len(steps),
        )

    def _chance(self, replicas: int, at: slice) -> float:
        """The quantile of the busiest hour's demand that these replicas serve, times the probability of the step
        times."""
        most = self.served.rate(replicas) * (1 + 1e-9)

        def serves(quantile: float) -> bool:
            return float(self.forecast.rates(quantile)[at].max()) <= most

        low, high = LEAST_LEVEL, SUREST
        if not serves(low):
            return 0.0
        if serves(high):
            low = high
        while high - low > 1e-4:
            middle = (low + high) / 2
            low, high = (middle, high) if serves(middle) else (low, middle)
        return low * (1.0 if self.model_chance is None else self.model_chance)

    def _due(self, rates: Any) -> tuple[DueReplicas, ...]:
        found: list[DueReplicas] = []
        for first in range(0, len(rates), DAY_HOURS):
            need = self.served.need(float(rates[first : first + DAY_HOURS].max()))
            if need is not None and (not found or need > found[-1].replicas):
                found.append(DueReplicas(self.forecast.hour(first).date().isoformat(), need))
        return tuple(found)

    def _reserve(self, needs: list[int]) -> ReservePlan:
        prices, on_demand = self.options.prices, self.usd / self.num_gpus
        spot = prices.spot_usd_per_gpu_hour
        rented: Literal["on demand", "spot"] = "on demand" if spot is None or spot >= on_demand else "spot"
        rent = on_demand if rented == "on demand" or spot is None else spot
        reserved = prices.reserved_usd_per_gpu_hour
        base = to_reserve(needs, reserved, rent)
        gpu_hours = self.num_gpus * sum(max(need - base, 0) for need in needs) * self.forecast.step_s / HOUR_S
        months = len(needs) / HOURS_A_MONTH
        usd = base * self.num_gpus * HOURS_A_MONTH * (on_demand if reserved is None else reserved)
        if rented == "spot":
            self.notes.append("spot GPUs may be taken away at any time, and the chance does not hold this")
        return ReservePlan(
            reserved_replicas=base,
            num_reserved_gpus=base * self.num_gpus,
            most_rented_gpus=(max(needs) - base) * self.num_gpus,
            rented_gpu_hours=gpu_hours,
            rented=rented,
            on_demand_usd_per_gpu_hour=on_demand,
            reserved_usd_per_gpu_hour=reserved,
            spot_usd_per_gpu_hour=spot,
            break_even_utilisation=None if reserved is None or rent <= 0 else reserved / rent,
            used_share=used_share(needs),
            usd_per_month=usd + gpu_hours * rent / months,
            usd_per_month_all_on_demand=max(needs) * self.num_gpus * on_demand * HOURS_A_MONTH,
            schedule=self._schedule(needs, max(base, min(needs))),
        )

    def _schedule(self, needs: list[int], base: int) -> tuple[ScheduledNumber, ...]:
        """The largest number of replicas at each hour of the day over the forecast. A replica is requested before it is
        needed."""
        hour = [self.forecast.hour(step).hour for step in range(len(needs))]
        start_s = (self.rehearsal.document["fleet"][0] or {}).get("start_s")
        early_s = 60 * ceil((START_S if start_s is None else start_s) / 60)
        found = []
        for first, length, replicas in runs(hours_of_day(needs, hour), base):
            minute = int((first * 60 - early_s // 60) % (DAY_HOURS * 60))
            found.append(
                ScheduledNumber(
                    f"{minute % 60} {minute // 60} * * *", length * HOUR_S + early_s, replicas, self.forecast.time_zone
                )
            )
        return tuple(found)


def scenario_yaml(found: DemandPlan, rehearsal: CapacityRehearsal, forecast: DemandForecast) -> str:
    """The plan as a scenario: the last whole week's busiest hour, on a pool with scheduled minimums for the month.

    Raises HeadwayError if there is no plan.
    """
    choice, reserve = found.at_recorded.choice, found.reserve
    if choice is None or reserve is None:
        raise HeadwayError("no plan meets the targets, so there is none to write")
    most = max(week.replicas or 1 for week in found.weeks)
    peak = max(found.weeks, key=lambda week: week.p50_requests_per_s)
    document = fleet_document(rehearsal.document, choice.candidate, most, rehearsal.regions)
    load = peak.p50_requests_per_s / forecast.busiest.requests_per_s
    document["workload"] = with_load(_workload(document, recorded_hour(forecast)), load)
    document["simulation"] = {**document.get("simulation", {}), "begins": peak.busiest_begins}
    least = max(1, min(reserve.reserved_replicas, most))
    for entry in document["fleet"]:
        entry |= {"min_replicas": least, "max_replicas": most}
        if reserve.schedule:
            entry["scheduled_min_replicas"] = [structs.asdict(each) for each in reserve.schedule]
    document["policies"] = {**document.get("policies", {}), "scaling": "minimum"}
    lines = [
        f"# The fleet of headway plan capacity --demand: {found.replica}, {least} to {most} replicas,",
        f"# ${reserve.usd_per_month:,.0f} a month. The workload is the busiest hour, at its median rate.",
    ]
    return "\n".join(lines) + "\n" + strict_yaml.dump(with_absolute_paths(document, rehearsal.base_dir))
