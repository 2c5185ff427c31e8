"""A plan for forecast demand as a value that the command prints and the API returns, with its page."""

from __future__ import annotations

from typing import Any

import msgspec

from headway.forecast.demand import DemandForecast
from headway.planning.demand.plan import DemandPlanOptions, plan, scenario_yaml
from headway.planning.demand.problem import DemandPlan
from headway.planning.demand.text import headline, sentences, weeks_table
from headway.planning.planned import Planned
from headway.planning.rehearsals import Resources, Source
from headway.report.blocks import Chart, Facts, Lines, Report, Section
from headway.report.charts import layout
from headway.report.page import COLORS

_CAPTION = "Requests per second by hour: the median, the 10% to 90% quantiles, and what the planned replicas serve."


def planned(forecast: DemandForecast, source: Source, options: DemandPlanOptions, resources: Resources) -> Planned:
    """The replicas for each week of a forecast: `headway plan capacity --demand`. Raises HeadwayError like `plan`."""
    found, rehearsal = plan(forecast, source, options, resources)
    is_met = found.status == "met"
    words = (headline(found), *sentences(found))
    return Planned(
        found,
        is_met,
        tuple(msgspec.to_builtins(week) for week in found.weeks),
        words,
        (*words, *(f"note: {note}" for note in found.notes), "", weeks_table(found)),
        {"": lambda: scenario_yaml(found, rehearsal, forecast)} if is_met else {},
        lambda _: report(found, forecast),
        f"rehearsals: {rehearsal.rehearsals.counted}",
    )


def report(plan: DemandPlan, forecast: DemandForecast) -> Report:
    history = forecast.history
    shown = {
        "recorded": f"{history.num_requests:,} requests, {history.num_days} days",
        "growth a month": f"{forecast.growth_per_month:g}",
        "profile": f"{forecast.method}, {forecast.season_hours} h",
        "chance": f"{plan.chance:.0%}",
        "rehearsals": str(plan.num_rehearsals),
    }
    chart = Chart("demand", "Demand and what is served", _picture(plan, forecast), _CAPTION)
    return Report(
        "capacity for forecast demand",
        headline(plan),
        [Lines(sentences(plan)), Facts(shown)],
        [Section("", [chart, weeks_table(plan)])],
        [*plan.notes, *forecast.assumptions],
    )


def _picture(plan: DemandPlan, forecast: DemandForecast) -> dict[str, Any]:
    hours = [forecast.hour(step).strftime("%Y-%m-%d %H:%M") for step in range(forecast.num_steps)]
    low, median, high = ([float(f"{rate:.4g}") for rate in forecast.rates(q)] for q in (0.1, 0.5, 0.9))
    line = {"type": "scatter", "mode": "lines", "x": hours}
    traces = [
        {**line, "y": low, "line": {"width": 0}, "hoverinfo": "skip", "showlegend": False},
        {
            **line,
            "y": high,
            "line": {"width": 0},
            "fill": "tonexty",
            "fillcolor": "rgba(47, 109, 179, 0.2)",
            "hoverinfo": "skip",
            "name": "10% to 90%",
        },
        {**line, "y": median, "line": {"width": 1.4, "color": COLORS[0]}, "name": "median"},
    ]
    rates, served = dict(plan.served), list[float | None]()
    for week in plan.weeks:
        served += [None if week.replicas is None else rates.get(week.replicas)] * week.num_hours
    if any(each is not None for each in served):
        traces.append(
            {
                **line,
                "y": served,
                "line": {"width": 1.6, "color": COLORS[1], "shape": "hv"},
                "name": "served by the week's replicas",
            }
        )
    legend = {"orientation": "h", "y": -0.2, "x": 0}
    return {"data": traces, "layout": layout("", "requests/s", 380, showlegend=True, legend=legend)}
