"""A fleet plan as an HTML page: the decision as a picture, the answer in words, and the tables behind it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import log10
from pathlib import Path
from typing import Any

from headway.planning.fleet.problem import FleetPlan, FleetPoint, PointKind
from headway.planning.fleet.text import (
    MODEL_HEADS,
    OPTION_HEADS,
    POINT_HEADS,
    describe,
    model_rows,
    option_rows,
    point_rows,
    share,
)
from headway.report.charts import Figure, layout
from headway.report.page import COLORS, DRAW, QUIET, chart, document, literal, scrolled
from headway.report.table import dollars

GROUPS: dict[PointKind, str] = {
    "plan": "the plan",
    "router": "another router",
    "one less": "one unit less",
    "one more": "one unit more",
    "disaggregated": "prefill and decode apart",
    "not disaggregated": "prefill and decode together",
    "one type": "one type of GPU",
    "tiers": "with tiers",
}
SYMBOLS = ("star", "circle", "triangle-down", "triangle-up", "diamond", "square", "hexagon", "cross")
TICKS = (0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999, 0.9999)
MARGIN = 0.06
"""Share of the range of costs that is left free at either side."""


def page(plan: FleetPlan, title: str, command: str, out: Path | None = None) -> str:
    """`out`: the fleet file that was written, if any."""
    charts = {"decision": decision(plan)} if plan.points else {}
    answer = "".join(f'<p class="verdict">{escape(line)}</p>' for line in plan.sentences)
    notes = "".join(f'<p class="note">{escape(note[:1].upper() + note[1:])}.</p>' for note in plan.notes)
    body = f"""<header>
<div class="brand">Headway · fleet</div>
<h1>{escape(headline(plan))}</h1>
{answer}
</header>
{_picture(plan) if plan.points else ""}
{notes}
{_section("The plan, by model", MODEL_HEADS, model_rows(plan), (0, 2)) if plan.points else ""}
{_section("Fleets that were rehearsed whole", POINT_HEADS, point_rows(plan), (0, 1, 9)) if plan.points else ""}
{_section("Each model alone, on each kind of GPUs", OPTION_HEADS, option_rows(plan), (0, 1, 5))}
{_next(out) if plan.points else ""}
<footer><p class="quiet">{escape(title)}: {escape(_request(plan))}.</p>
<p class="quiet">Command: <code>{escape(command)}</code></p></footer>"""
    return document(title, body, f"const charts = {literal(charts)};\n{DRAW}")


def headline(plan: FleetPlan) -> str:
    if plan.usd_per_hour is None:
        return "No fleet serves these requests" if plan.unservable else "The GPUs at hand are not enough"
    number = sum(plan.gpus.values())
    models = f"{len(plan.models)} models" if len(plan.models) > 1 else next(iter(plan.models))
    return f"{number} GPU{'s' if number != 1 else ''} for {models}: {dollars(plan.usd_per_hour)} an hour"


def decision(plan: FleetPlan) -> Figure:
    """Cost against SLO attainment of all fleets that were rehearsed whole, with intervals over seeds."""
    kinds = list(dict.fromkeys(each.kind for each in plan.points))
    traces = [_trace(kind, [each for each in plan.points if each.kind == kind]) for kind in reversed(kinds)]
    target = nines(plan.target)
    line = {
        "type": "line",
        "xref": "paper",
        "x0": 0,
        "x1": 1,
        "y0": target,
        "y1": target,
        "line": {"color": QUIET, "width": 1, "dash": "dot"},
    }
    note = {
        "xref": "paper",
        "x": 1,
        "y": target,
        "text": f"asked for: {share(plan.target)}",
        "showarrow": False,
        "xanchor": "right",
        "yanchor": "top",
        "font": {"size": 12, "color": QUIET},
    }
    costs = [each.usd_per_hour for each in plan.points]
    room = MARGIN * (max(costs) - min(costs)) or 0.1 * max(costs) or 1.0
    reached = [nines(each.interval.low if each.interval else each.attainment) for each in plan.points]
    axes = {
        "xaxis": {"tickprefix": "$", "range": [min(costs) - room, max(costs) + room], "rangemode": "normal"},
        "yaxis": {
            "tickvals": [nines(each) for each in TICKS],
            "ticktext": [share(each) for each in TICKS],
            "range": [max(-0.05, min(*reached, target) - 0.25), nines(1.0) + 0.2],
            "rangemode": "normal",
        },
    }
    legend = {"orientation": "h", "y": -0.17, "x": 0, "traceorder": "reversed"}
    return {
        "data": traces,
        "layout": layout(
            "$ an hour",
            "requests within their SLOs",
            440,
            shapes=[line],
            annotations=[note],
            showlegend=True,
            legend=legend,
            margin={"l": 62, "r": 14, "t": 10, "b": 44},
            **axes,
        ),
    }


def nines(attainment: float) -> float:
    """The height of an attainment: 1 for 90%, 2 for 99%; `TICKS` end at all requests but one in 10,000."""
    return -log10(max(1.0 - attainment, 1.0 - TICKS[-1]))


def _trace(kind: PointKind, points: Sequence[FleetPoint]) -> dict[str, Any]:
    order = list(GROUPS).index(kind)
    color = COLORS[order % len(COLORS)]
    at = [nines(each.attainment) for each in points]
    above = [nines(each.interval.high) - y if each.interval else 0.0 for each, y in zip(points, at, strict=True)]
    below = [y - nines(each.interval.low) if each.interval else 0.0 for each, y in zip(points, at, strict=True)]
    return {
        "type": "scatter", "mode": "markers", "name": GROUPS[kind],
        "x": [each.usd_per_hour for each in points], "y": at,
        "error_y": {"type": "data", "symmetric": False, "array": above, "arrayminus": below, "color": color,
                    "thickness": 1.6, "width": 6},
        "marker": {
            "color": color, "size": 20 if kind == "plan" else 11, "line": {"width": 1.6, "color": color},
            "symbol": [SYMBOLS[order] if each.is_met else f"{SYMBOLS[order]}-open" for each in points],
        },
        "text": [_hover(each) for each in points], "hovertemplate": "%{text}<extra></extra>",
    }  # fmt: skip


def _hover(each: FleetPoint) -> str:
    interval = "" if each.interval is None else f" ({share(each.interval.low)} to {share(each.interval.high)})"
    fleets = [f"{part.model}: {part.label}" for part in each.parts]
    attained = f"{share(each.attainment)}{interval} in time"
    cost = f"{dollars(each.usd_per_hour)} an hour, {attained}"
    return "<br>".join([f"<b>{each.label}</b>, {each.router}", *fleets, cost])


def _picture(plan: FleetPlan) -> str:
    caption = (
        "A point is a fleet, rehearsed whole; its height is the mean over seeds for the model that does worst, with the"
        " 95% interval. Filled: the target is met on the requests as they are. The star is the plan."
    )
    drawn = chart("decision", "What fleets cost, and what they keep in time", caption)
    return f"<section><h2>The decision</h2>{drawn}</section>"


def _section(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], words: Sequence[int]) -> str:
    top = "".join(f'<th class="{"name" if i in words else ""}">{escape(head)}</th>' for i, head in enumerate(heads))
    lines = "\n".join(
        "<tr>" + "".join(_cell(value, i in words, not heads[i]) for i, value in enumerate(row)) + "</tr>"
        for row in rows
    )
    inner = f"<table><thead><tr>{top}</tr></thead>\n<tbody>\n{lines}\n</tbody></table>"
    return f"<section><h2>{escape(title)}</h2>{scrolled(inner)}</section>"


def _cell(value: str, is_word: bool, is_note: bool) -> str:
    best = "best " if value == "the plan" else ""
    return f'<td class="{best}{"text" if is_note else "name" if is_word else ""}">{escape(value)}</td>'


def _next(out: Path | None) -> str:
    if out is None:
        return ""
    commands = f"headway simulate {out}\nheadway serve {out} --emulated"
    hint = "For real engines, add each pool's addresses as <code>endpoints</code>, and leave out --emulated."
    return f'<section><h2>Run it</h2><pre>{escape(commands)}</pre><p class="quiet">{hint}</p></section>'


def _request(plan: FleetPlan) -> str:
    have = ", ".join(gpu if limit is None else f"{limit} {gpu}" for gpu, limit in plan.limits.items())
    return f"{share(plan.target)} of each model's requests within {describe(plan.slo)}; at hand: {have}"
