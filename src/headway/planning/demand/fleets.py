"""`headway plan fleet --demand`: the cheapest fleet of several models for each week of a forecast."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from msgspec import Struct, structs

from headway.core.errors import HeadwayError
from headway.forecast.demand import HOURS_A_MONTH, DemandForecast
from headway.planning.demand.plan import SUREST, recorded_hour
from headway.planning.demand.text import hour_name, week_name
from headway.planning.fleet.answer import report
from headway.planning.fleet.plan import FleetOptions, scenario_yaml
from headway.planning.fleet.plan import plan as fleet_plan
from headway.planning.fleet.problem import FleetPlan
from headway.planning.planned import Planned
from headway.planning.rehearsals import Progress, Resources, Source
from headway.report.blocks import Table, or_dash
from headway.workload.generate import generate
from headway.workload.spec import TraceSpec, WorkloadSpec

SAME_RATE = 1.02
"""Weeks whose busiest hours differ by a smaller factor share the fleet of the higher rate."""
FLEET_WEEK_HEADS = ("week from", "busiest hour", "p50 rps", "planned rps", "GPUs", "router", "$/h", "$")


class FleetWeek(Struct, frozen=True, forbid_unknown_fields=True):
    """The fleet of one week, sized for its busiest hour."""

    begins: str
    num_hours: int
    busiest_begins: str
    p50_requests_per_s: float
    planned_requests_per_s: float
    by_model_requests_per_s: dict[str, float]
    """Planned rate by model; empty if requests name none."""
    gpus: dict[str, int]
    """Empty if the available GPUs do not suffice."""
    router: str
    usd_per_hour: float | None
    usd: float | None
    """Cost of the whole week."""


class FleetDemandPlan(Struct, frozen=True, forbid_unknown_fields=True):
    status: Literal["met", "short"]
    chance: float
    """The planned quantile of each hour's demand: the probability that demand is no higher. It excludes the error of
    the step times."""
    weeks: tuple[FleetWeek, ...]
    always: dict[str, int]
    """GPUs that every week needs, to be reserved."""
    rented_gpu_hours: dict[str, float]
    """GPU-hours of all other GPUs over the forecast."""
    usd_per_month: float | None
    largest: FleetPlan
    """The fleet of the week with the most demand."""
    num_plans: int
    num_simulated: int
    num_found: int
    notes: tuple[str, ...] = ()


def planned(
    forecast: DemandForecast, source: Source, options: FleetOptions, chance: float, resources: Resources
) -> Planned:
    """The fleets for a forecast's weeks: `headway plan fleet --demand`. Page and file describe the week with the most
    demand. Raises HeadwayError like `plan`."""
    found, largest = plan(forecast, source, options, chance, resources)
    is_met, title = found.status == "met", str(source.document.get("name", "fleet"))
    weeks = Table(FLEET_WEEK_HEADS, week_rows(found), words=("week from", "busiest hour", "GPUs", "router"))
    words = tuple(sentences(found))
    return Planned(
        found,
        is_met,
        tuple(msgspec.to_builtins(week) for week in found.weeks),
        words,
        (*words, *(f"note: {note}" for note in found.notes), "", weeks),
        {"": lambda: scenario_yaml(found.largest, largest, options)} if found.largest.status == "met" else {},
        lambda out: report(found.largest, title, out),
        f"plans: {found.num_plans}; rehearsals: {found.num_simulated} simulated, {found.num_found} found in the cache",
    )


def plan(
    forecast: DemandForecast, source: Source, options: FleetOptions, chance: float, resources: Resources
) -> tuple[FleetDemandPlan, Source]:
    """The fleet of each week, and the scenario of the week with the most demand.

    The requests are those of the busiest recorded hour; each model's rate is its forecast share of the planned rate. A
    fleet that serves more demand at a lower price is also used for weeks with less demand, so that cost never falls
    with demand. HeadwayError as for fleet plans.
    """
    check_chance(chance)
    document, progress = source.document, resources.progress
    own = (document.get("workload") or {}).get("trace") or {}
    names = own.get("models", {}) if isinstance(own, dict) else {}
    trace = recorded_hour(forecast) | ({"models": names} if names else {})
    recorded = _recorded(trace)
    rates = forecast.rates(chance)
    wanted = []
    for steps in forecast.weeks:
        at = steps.start + int(np.argmax(rates[steps.start : steps.stop]))
        wanted.append((steps, at, float(rates[at])))
    plans: dict[int, FleetPlan] = {}
    sources: dict[int, Source] = {}
    taken: dict[int, int] = {}
    done = simulated = found = 0
    highest: float | None = None
    last = -1
    for i in sorted(range(len(wanted)), key=lambda i: -wanted[i][2]):
        _, at, rate = wanted[i]
        if highest is not None and rate * SAME_RATE > highest:
            taken[i] = taken[last]
            continue
        workload = _workload(forecast, trace, recorded, at, rate)
        sources[i] = source._replace(document={**document, "workload": workload})
        add = None if progress is None else partial(_add, progress, done)
        plans[i] = fleet_plan(sources[i], options, replace(resources, progress=add))
        done += plans[i].num_simulated + plans[i].num_found
        simulated, found = simulated + plans[i].num_simulated, found + plans[i].num_found
        cheaper = last >= 0 and _usd(plans[taken[last]]) <= _usd(plans[i])
        taken[i], highest, last = taken[last] if cheaper else i, rate, i
    weeks = tuple(
        _week(forecast, plans[taken[i]], steps, at, rate, _by_model(forecast, names, at, rate))
        for i, (steps, at, rate) in enumerate(wanted)
    )
    first = max(plans, key=lambda i: wanted[i][2])
    made = _costed(weeks, plans[first], chance, forecast.num_steps)
    return structs.replace(made, num_plans=len(plans), num_simulated=simulated, num_found=found), sources[first]


def _add(progress: Progress, before: int, num: int, expected: int) -> None:
    progress(before + num, before + expected)


def _recorded(trace: Mapping[str, Any]) -> dict[str, float]:
    """Requests per second of the recorded hour, by the serving model."""
    rows = generate(WorkloadSpec(trace=TraceSpec(**trace)), 0, Path())
    span_s = max(float(rows.arrival_s[-1] - rows.arrival_s[0]), 1e-9)
    if "model" not in rows.columns:
        return {"": len(rows) / span_s}
    codes = rows.columns["model"]
    return {name: float((codes == i).sum()) / span_s for i, name in enumerate(rows.models) if (codes == i).any()}


def _by_model(forecast: DemandForecast, names: Mapping[str, str], at: int, rate: float) -> dict[str, float]:
    """The planned rate by model, in proportion to the medians of the hour `at`."""
    median = forecast.quantiles.index(0.5)
    medians: dict[str, float] = {}
    for each in forecast.by_model:
        name = names.get(each.model, each.model)
        medians[name] = medians.get(name, 0.0) + each.requests_per_s[median][at]
    total = sum(medians.values())
    return {name: rate * value / total for name, value in medians.items()} if total > 0 else {}


def _workload(
    forecast: DemandForecast, trace: Mapping[str, Any], recorded: Mapping[str, float], at: int, rate: float
) -> dict[str, Any]:
    """The recorded hour with the planned rates of its models."""
    by_model = _by_model(forecast, trace.get("models", {}), at, rate)
    if len(recorded) < 2 or not by_model:
        return {"trace": {**trace, "rate_scale": rate / sum(recorded.values())}}
    ratios = {name: by_model.get(name, 0.0) / value for name, value in recorded.items()}
    # the scale of the model that has grown most: it uses all its requests, the other models only a share
    scale = max(ratios.values())
    return {
        "trace": {**trace, "rate_scale": scale},
        "models": {name: min(ratio / scale, 1.0) for name, ratio in ratios.items() if ratio > 0},
    }


def _usd(found: FleetPlan) -> float:
    return float("inf") if found.status != "met" or found.usd_per_hour is None else found.usd_per_hour


def _week(
    forecast: DemandForecast, found: FleetPlan, steps: range, at: int, rate: float, by_model: dict[str, float]
) -> FleetWeek:
    is_met = found.status == "met"
    return FleetWeek(
        begins=forecast.hour(steps.start).isoformat(),
        num_hours=len(steps),
        busiest_begins=forecast.hour(at).isoformat(),
        p50_requests_per_s=float(forecast.rates(0.5)[at]),
        planned_requests_per_s=rate,
        by_model_requests_per_s=by_model,
        gpus=dict(found.gpus) if is_met else {},
        router=found.points[0].router if is_met else "",
        usd_per_hour=found.usd_per_hour if is_met else None,
        usd=_usd(found) * len(steps) if is_met else None,
    )


def _costed(weeks: tuple[FleetWeek, ...], largest: FleetPlan, chance: float, num_hours: int) -> FleetDemandPlan:
    is_met = all(week.gpus for week in weeks)
    types = {gpu for week in weeks for gpu in week.gpus}
    always = {gpu: min(week.gpus.get(gpu, 0) for week in weeks) for gpu in sorted(types)} if is_met else {}
    rented = {
        gpu: float(sum((week.gpus.get(gpu, 0) - num) * week.num_hours for week in weeks)) for gpu, num in always.items()
    }
    usd = sum(week.usd or 0.0 for week in weeks)
    notes = [
        "the chance is that of the demand alone: the errors of the step times are not in it",
        "within a week the fleet is that of its busiest hour",
    ]
    if not is_met:
        notes.append("the GPUs at hand are not enough in every week")
    return FleetDemandPlan(
        "met" if is_met else "short",
        chance,
        weeks,
        always={gpu: num for gpu, num in always.items() if num},
        rented_gpu_hours={gpu: hours for gpu, hours in rented.items() if hours},
        usd_per_month=usd * HOURS_A_MONTH / num_hours if is_met else None,
        largest=largest,
        num_plans=0,
        num_simulated=0,
        num_found=0,
        notes=tuple(notes),
    )


def sentences(found: FleetDemandPlan) -> list[str]:
    """Sentences on the need of each week, the reservation, and the monthly cost."""
    if found.status == "short":
        without = [week.begins[:10] for week in found.weeks if not week.gpus]
        return [f"The GPUs at hand are not enough in the weeks from {', '.join(without)}: {found.largest.why}"]
    lines = []
    before: dict[str, int] | None = None
    for week in found.weeks:
        if week.gpus != before:
            lines.append(f"From {week.begins[:10]}: {_listed(week.gpus)}, routed by {week.router}.")
            before = week.gpus
    rented = ", ".join(f"{hours:,.0f} hours of {gpu}" for gpu, hours in found.rented_gpu_hours.items())
    lines.append(
        f"Every week has {_listed(found.always) or 'no GPU in common'}: reserve these"
        + (f", and rent {rented}." if rented else ".")
    )
    lines.append(f"A month costs ${found.usd_per_month or 0.0:,.2f}.")
    return lines


def _listed(gpus: Mapping[str, int]) -> str:
    return ", ".join(f"{num} {gpu}" for gpu, num in gpus.items())


def week_rows(found: FleetDemandPlan) -> list[list[str]]:
    return [
        [
            week_name(week.begins, week.num_hours),
            hour_name(week.busiest_begins),
            f"{week.p50_requests_per_s:.4g}",
            f"{week.planned_requests_per_s:.4g}",
            _listed(week.gpus) or "not enough",
            week.router or "-",
            or_dash(week.usd_per_hour, "{:,.2f}"),
            or_dash(week.usd, "{:,.0f}"),
        ]
        for week in found.weeks
    ]


def check_chance(chance: float) -> None:
    """Raises HeadwayError for an invalid quantile."""
    if not 0.5 <= chance < SUREST:
        raise HeadwayError(f"chance: {chance}; expected 0.5 or more, and less than {SUREST}")
