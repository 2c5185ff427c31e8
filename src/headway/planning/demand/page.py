"""A plan for forecast demand as an HTML page: demand with its interval, what is served, and the weeks."""

from __future__ import annotations

from html import escape
from typing import Any

from headway.forecast.demand import DemandForecast
from headway.planning.demand.problem import DemandPlan
from headway.planning.demand.text import WEEK_HEADS, headline, sentences, week_rows
from headway.report.charts import layout
from headway.report.page import COLORS, DRAW, chart, document, facts, literal, table

_CAPTION = "Requests per second by hour: the median, the 10% to 90% quantiles, and what the planned replicas serve."


def page(plan: DemandPlan, forecast: DemandForecast, command: str) -> str:
    history = forecast.history
    shown = {
        "recorded": f"{history.num_requests:,} requests, {history.num_days} days",
        "growth a month": f"{forecast.growth_per_month:g}",
        "profile": f"{forecast.method}, {forecast.season_hours} h",
        "chance": f"{plan.chance:.0%}",
        "rehearsals": str(plan.num_rehearsals),
    }
    answer = "".join(f"<p>{escape(line)}</p>" for line in sentences(plan))
    cells = [
        "".join(f'<td class="{"name" if i < 2 else ""}">{escape(str(cell))}</td>' for i, cell in enumerate(row))
        for row in week_rows(plan)
    ]
    notes = "".join(f'<p class="quiet">{escape(note)}</p>' for note in (*plan.notes, *forecast.assumptions))
    body = f"""<header>
<div class="brand">Headway · capacity for forecast demand</div>
<h1>{escape(headline(plan))}</h1>
{answer}
{facts(shown)}
</header>
<section>{chart("demand", "Demand and what is served", _CAPTION)}{table(WEEK_HEADS, 2, cells)}</section>
<footer>{notes}<p class="quiet">Command: <code>{escape(command)}</code></p></footer>"""
    return document("capacity for forecast demand", body, f"const charts = {literal(_charts(plan, forecast))};\n{DRAW}")


def _charts(plan: DemandPlan, forecast: DemandForecast) -> dict[str, Any]:
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
    return {"demand": {"data": traces, "layout": layout("", "requests/s", 380, showlegend=True, legend=legend)}}
