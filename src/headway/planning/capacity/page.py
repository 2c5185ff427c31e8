"""A capacity plan as an HTML page: the plan, charts of cost against attainment and goodput, and tables."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from headway.planning.capacity.problem import SLOS, CandidateResult, CapacityPlan, RehearsedSize
from headway.planning.capacity.text import (
    LEGEND,
    NAMES,
    candidates_table,
    describe,
    headline,
    sentences,
    shown,
    what_ifs_table,
)
from headway.report.charts import layout
from headway.report.page import COLORS, DRAW, INK, QUIET, document, literal, scrolled

SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "hexagon")
GLYPHS = "●■◆▲✚⬢"
"""Symbols of tensor parallel degrees, in the charts and in the legend."""


def page(plan: CapacityPlan, title: str, command: str) -> str:
    picture = _picture(plan)
    charts = {"attainment": _chart(plan, "attainment"), "goodput": _chart(plan, "goodput_rps")} if picture else {}
    answer = "".join(f"<p>{escape(line)}</p>" for line in sentences(plan))
    heads = _table(*candidates_table(plan), names=("GPU", "policy", ""))
    what_ifs = _table(*what_ifs_table(plan), names=("what if", "still met"))
    body = f"""<header>
<div class="brand">Headway · capacity</div>
<h1>{escape(headline(plan))}</h1>
{answer}
</header>
{picture}
{f"<section><h2>The plan and the runners-up</h2>{heads}</section>" if plan.choice else ""}
{f"<section><h2>What if</h2>{what_ifs}</section>" if plan.what_ifs else ""}
{f'<p class="quiet">{escape(LEGEND)}</p>' if plan.choice else ""}
<section><h2>All candidates</h2>{_table(*_all_candidates(plan), names=("GPU", "policy", "status", "why"))}</section>
<footer><p class="quiet">{escape(title)}: {escape(describe(plan.targets))}. {plan.num_rehearsals} rehearsals, all on the
same arrivals and lengths.</p><p class="quiet">Command: <code>{escape(command)}</code></p></footer>"""
    return document(title, body, f"const charts = {literal(charts)};\n{DRAW}")


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], names: Sequence[str]) -> str:
    kinds = ["name" if head in names else "" for head in heads]
    top = "".join(f'<th class="{kind}">{escape(head)}</th>' for head, kind in zip(heads, kinds, strict=True))
    lines = "\n".join(
        "<tr>" + "".join(_cell(v, head, kind) for v, head, kind in zip(row, heads, kinds, strict=True)) + "</tr>"
        for row in rows
    )
    return scrolled(f"<table><thead><tr>{top}</tr></thead>\n<tbody>\n{lines}\n</tbody></table>")


def _cell(value: str, head: str, kind: str) -> str:
    if head in ("", "why"):
        return f'<td class="{"best" if value.startswith("the plan") else ""} text">{escape(value)}</td>'
    return f'<td class="{kind}">{escape(value)}</td>'


def _all_candidates(plan: CapacityPlan) -> tuple[list[str], list[list[str]]]:
    rows = []
    for result in plan.options:
        bound = "-" if result.bound_usd_per_hour is None else f"${result.bound_usd_per_hour:,.2f}"
        number = "-" if result.replicas is None else str(result.replicas)
        rows.append(
            [
                result.candidate.gpu,
                str(result.candidate.parallel.tp),
                result.candidate.policy,
                result.status,
                number,
                bound,
                str(len(result.points)),
                result.reason,
            ]
        )
    return ["GPU", "tp", "policy", "status", "replicas", "at least $/h", "rehearsals", "why"], rows


def _picture(plan: CapacityPlan) -> str:
    if not any(result.points for result in plan.options):
        return ""
    return f"""<section><h2>What every candidate costs and reaches</h2>
<p class="quiet">A point is a rehearsal of so many replicas, a line one GPU with one tp and policy. Filled: every
target is met. The star is the plan. Points to the left and up are better.</p>
<p class="quiet legend">{_legend(plan)}</p>
<div class="grid two">
<figure><h3>SLO attainment</h3><div class="chart" id="attainment"></div></figure>
<figure><h3>Goodput</h3><div class="chart" id="goodput"></div></figure>
</div></section>"""


def _legend(plan: CapacityPlan) -> str:
    """The legend: colours for GPUs, shapes for tensor parallel degrees."""
    gpus = list(dict.fromkeys(result.candidate.gpu for result in plan.options))
    tps = sorted({result.candidate.parallel.tp for result in plan.options})
    colors = [
        f'<span class="swatch" style="background:{COLORS[i % len(COLORS)]};margin-left:14px"></span>{escape(gpu)}'
        for i, gpu in enumerate(gpus)
    ]
    shapes = [f"<span style='margin-left:14px'>{GLYPHS[i % len(GLYPHS)]} tp {tp}</span>" for i, tp in enumerate(tps)]
    return "".join([*colors, *shapes]).replace("margin-left:14px", "", 1)


def _chart(plan: CapacityPlan, key: str) -> dict[str, Any]:
    gpus = list(dict.fromkeys(result.candidate.gpu for result in plan.options))
    tps = sorted({result.candidate.parallel.tp for result in plan.options})
    lines = []
    for result in plan.options:
        if result.points:
            color = COLORS[gpus.index(result.candidate.gpu) % len(COLORS)]
            symbol = SYMBOLS[tps.index(result.candidate.parallel.tp) % len(SYMBOLS)]
            lines.append(_line(result, key, color, symbol))
    shapes = []
    target = plan.targets.attainment
    if key == "attainment" and target is not None:
        shapes.append(
            {
                "type": "line",
                "xref": "paper",
                "x0": 0,
                "x1": 1,
                "y0": 100 * target,
                "y1": 100 * target,
                "line": {"color": QUIET, "width": 1, "dash": "dot"},
            }
        )
    if plan.choice is not None:
        chosen = [point for point in plan.choice.points if point.replicas == plan.choice.replicas]
        lines += [
            {
                "type": "scatter",
                "mode": "markers",
                "name": "the plan",
                "x": [plan.choice.usd_per_hour],
                "y": [_y(point, key)],
                "marker": {"symbol": "star", "size": 19, "color": "#f0b14a", "line": {"width": 1.4, "color": INK}},
                "text": [_hover(plan.choice, point)],
                "hovertemplate": "%{text}<extra>the plan</extra>",
            }
            for point in chosen
        ]
    axes = _layout(key)
    axes["xaxis"] |= {"range": [0, _widest_usd(plan)]}
    return {"data": lines, "layout": axes | {"shapes": shapes}}


def _widest_usd(plan: CapacityPlan) -> float:
    """The end of the cost axis: beyond the plan and the runners-up; without a plan, beyond all rehearsals."""
    costs = [each.usd_per_hour for each in (plan.choice, *plan.runners_up) if each and each.usd_per_hour is not None]
    points = [p.replicas * each.candidate.usd_per_replica_hour for each in plan.options for p in each.points]
    return 1.25 * max(costs or points or [1.0])


def _line(result: CandidateResult, key: str, color: str, symbol: str) -> dict[str, Any]:
    group = f"{result.candidate.gpu} tp {result.candidate.parallel.tp}"
    usd = result.candidate.usd_per_replica_hour
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": group,
        "x": [point.replicas * usd for point in result.points],
        "y": [_y(point, key) for point in result.points],
        "line": {"color": color, "width": 1.2},
        "marker": {
            "symbol": [symbol if not point.misses else f"{symbol}-open" for point in result.points],
            "size": 9,
            "color": color,
            "line": {"width": 1.6, "color": color},
        },
        "text": [_hover(result, point) for point in result.points],
        "hovertemplate": "%{text}<extra></extra>",
    }


def _y(point: RehearsedSize, key: str) -> float | None:
    value: float | None = getattr(point.measured, key)
    return None if value is None else 100 * value if key == "attainment" else value


def _hover(result: CandidateResult, point: RehearsedSize) -> str:
    cost = point.replicas * result.candidate.usd_per_replica_hour
    values = [f"{NAMES[name]}: {shown(name, getattr(point.measured, name))}" for name in SLOS]
    missed = "misses " + ", ".join(NAMES[name] for name in point.misses) if point.misses else "meets all"
    return "<br>".join(
        [f"<b>{point.replicas} x {result.candidate.label}</b>", f"${cost:,.2f} an hour", *values, missed]
    )


def _layout(key: str) -> dict[str, Any]:
    title = "requests that meet their SLOs" if key == "attainment" else "goodput, requests a second"
    y = {"ticksuffix": "%", "range": [-3, 107]} if key == "attainment" else {}
    x = {"rangemode": "tozero", "tickprefix": "$"}
    return layout("$ an hour", title, 380, margin={"l": 56, "r": 10, "t": 8, "b": 44}, xaxis=x, yaxis=y)
