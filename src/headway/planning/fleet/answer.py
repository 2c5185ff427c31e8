"""A fleet plan as a value that the command prints and the API returns; its page has the decision as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import log10
from pathlib import Path
from typing import Any

from headway.planning.fleet.plan import FleetOptions, plan, scenario_yaml
from headway.planning.fleet.problem import FleetPlan, FleetPoint, PointKind
from headway.planning.fleet.text import MODEL_HEADS, describe, model_rows, options_table, points_table, said, share
from headway.planning.planned import Planned
from headway.planning.rehearsals import Resources, Source
from headway.report.blocks import Block, Chart, Code, Lines, Report, Section, Table, sentence
from headway.report.charts import Figure, layout, limit
from headway.report.page import COLORS, QUIET
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
"""Free share of the range of costs at either side."""


def planned(source: Source, options: FleetOptions, resources: Resources) -> Planned:
    """The cheapest fleet of the available GPUs: `headway plan fleet`. Raises HeadwayError like `plan`."""
    found = plan(source, options, resources)
    is_met, title = found.status == "met", str(source.document.get("name", "fleet"))
    made = {"": lambda: scenario_yaml(found, source, options)} if is_met else {}
    return Planned(
        found,
        is_met,
        tuple(_row(each) for each in found.points),
        found.sentences,
        tuple(said(found)),
        made,
        lambda out: report(found, title, out),
        f"rehearsals: {found.num_simulated} simulated, {found.num_found} found in the cache",
    )


def _row(each: FleetPoint) -> dict[str, Any]:
    return {
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


def report(plan: FleetPlan, title: str, out: Path | None = None) -> Report:
    """`out`: the fleet file that was written, if any."""
    asked = f"{title}: {_request(plan)}."
    return Report("fleet", headline(plan), [Lines(plan.sentences, "verdict")], list(_body(plan, out)), [asked], title)


def _body(plan: FleetPlan, out: Path | None) -> Iterator[Block]:
    if plan.points:
        yield Section("The decision", [Chart("decision", _TITLE, decision(plan), _CAPTION)])
    yield Lines([sentence(note) for note in plan.notes], "note")
    if plan.points:
        models = Table(MODEL_HEADS, model_rows(plan), words=("model", "GPUs"))
        yield Section("The plan, by model", [models])
        yield Section("Fleets that were rehearsed whole", [points_table(plan)])
    yield Section("Each model alone, on each kind of GPUs", [options_table(plan)])
    if plan.points and out is not None:
        commands = f"headway simulate {out}\nheadway serve {out} --emulated"
        hint = "For real engines, add each pool's addresses as `endpoints`, and leave out --emulated."
        yield Section("Run it", [Code(commands), Lines([hint], "quiet")])


_TITLE = "What fleets cost, and what they keep in time"
_CAPTION = (
    "A point is a fleet, rehearsed whole; its height is the mean over seeds for the model that does worst, with the"
    " 95% interval. Filled: the target is met on the requests as they are. The star is the plan."
)


def headline(plan: FleetPlan) -> str:
    if plan.usd_per_hour is None:
        return "No fleet serves these requests" if plan.unservable else "The GPUs at hand are not enough"
    number = sum(plan.gpus.values())
    models = f"{len(plan.models)} models" if len(plan.models) > 1 else next(iter(plan.models))
    return f"{number} GPU{'s' if number != 1 else ''} for {models}: {dollars(plan.usd_per_hour)} an hour"


def decision(plan: FleetPlan) -> Figure:
    """Cost against SLO attainment of all completely rehearsed fleets, with intervals over seeds."""
    kinds = list(dict.fromkeys(each.kind for each in plan.points))
    traces = [_trace(kind, [each for each in plan.points if each.kind == kind]) for kind in reversed(kinds)]
    target = nines(plan.target)
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
            shapes=[limit("y", target)],
            annotations=[note],
            showlegend=True,
            legend=legend,
            margin={"l": 62, "r": 14, "t": 10, "b": 44},
            **axes,
        ),
    }


def nines(attainment: float) -> float:
    """The plot height of an attainment: 1 for 90%, 2 for 99%; `TICKS` end at one miss in 10,000 requests."""
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


def _request(plan: FleetPlan) -> str:
    have = ", ".join(gpu if limit is None else f"{limit} {gpu}" for gpu, limit in plan.limits.items())
    return f"{share(plan.target)} of each model's requests within {describe(plan.slo)}; at hand: {have}"
