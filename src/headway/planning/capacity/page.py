"""A capacity plan as one page: the answer, cost against what every candidate reached, tables."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from headway.planning.capacity.problem import SLOS, CandidateResult, CapacityPlan, RehearsedSize
from headway.planning.capacity.text import NAMES, asked, facts, headline, shown, table_of_options, table_of_what_ifs
from headway.report.page import COLORS, DRAW, INK, QUIET, RULE, document, literal

SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "hexagon")
GLYPHS = "●■◆▲✚⬢"
"""By tp, in the charts and in the legend."""


def page(plan: CapacityPlan, title: str, command: str) -> str:
    """A self-contained page."""
    picture = _picture(plan)
    charts = {"attainment": _chart(plan, "attainment"), "goodput": _chart(plan, "goodput_rps")} if picture else {}
    answer = "".join(f"<p>{escape(line)}</p>" for line in facts(plan))
    heads = _table(*table_of_options(plan), names=("GPU", "policy", ""))
    what_ifs = _table(*table_of_what_ifs(plan), names=("what if", "still met"))
    body = f"""<header>
<div class="brand">Headway · capacity</div>
<h1>{escape(headline(plan))}</h1>
{answer}
</header>
{picture}
{f"<section><h2>The plan and the runners-up</h2>{heads}</section>" if plan.choice else ""}
{f"<section><h2>What if</h2>{what_ifs}</section>" if plan.what_ifs else ""}
<section><h2>All candidates</h2>{_table(*_every(plan), names=("GPU", "policy", "status", "why"))}</section>
<footer><p class="quiet">{escape(title)}: {escape(asked(plan.targets))}. {plan.num_rehearsals} rehearsals, all on the
same arrivals and lengths.</p><p class="quiet">Command: <code>{escape(command)}</code></p></footer>"""
    return document(title, body, f"const charts = {literal(charts)};\n{DRAW}")


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], names: Sequence[str]) -> str:
    """A table; columns of these heads hold words."""
    kinds = ["name" if head in names else "" for head in heads]
    top = "".join(f'<th class="{kind}">{escape(head)}</th>' for head, kind in zip(heads, kinds, strict=True))
    lines = "\n".join(
        "<tr>" + "".join(_cell(v, head, kind) for v, head, kind in zip(row, heads, kinds, strict=True)) + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead>\n<tbody>\n{lines}\n</tbody></table></div>'


def _cell(value: str, head: str, kind: str) -> str:
    if head in ("", "why"):
        return f'<td class="{"best" if value == "the plan" else ""} text">{escape(value)}</td>'
    return f'<td class="{kind}">{escape(value)}</td>'


def _every(plan: CapacityPlan) -> tuple[list[str], list[list[str]]]:
    """Every candidate and what became of it."""
    rows = []
    for option in plan.options:
        bound = "-" if option.bound_usd_per_hour is None else f"${option.bound_usd_per_hour:,.2f}"
        number = "-" if option.replicas is None else str(option.replicas)
        rows.append([
            option.candidate.gpu, str(option.candidate.parallel.tp), option.candidate.policy, option.status, number,
            bound, str(len(option.points)), option.reason,
        ])  # fmt: skip
    return ["GPU", "tp", "policy", "status", "replicas", "at least $/h", "rehearsals", "why"], rows


def _picture(plan: CapacityPlan) -> str:
    """Both charts; nothing where nothing was rehearsed."""
    if not any(option.points for option in plan.options):
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
    """Colours are GPUs, shapes are tensor parallel degrees."""
    gpus = list(dict.fromkeys(option.candidate.gpu for option in plan.options))
    tps = sorted({option.candidate.parallel.tp for option in plan.options})
    colors = [
        f'<span class="swatch" style="background:{COLORS[i % len(COLORS)]};margin-left:14px"></span>{escape(gpu)}'
        for i, gpu in enumerate(gpus)
    ]
    shapes = [f"<span style='margin-left:14px'>{GLYPHS[i % len(GLYPHS)]} tp {tp}</span>" for i, tp in enumerate(tps)]
    return "".join([*colors, *shapes]).replace("margin-left:14px", "", 1)


def _chart(plan: CapacityPlan, key: str) -> dict[str, Any]:
    """Cost against one value, a line a candidate."""
    gpus = list(dict.fromkeys(option.candidate.gpu for option in plan.options))
    tps = sorted({option.candidate.parallel.tp for option in plan.options})
    lines = []
    for option in plan.options:
        if option.points:
            color = COLORS[gpus.index(option.candidate.gpu) % len(COLORS)]
            symbol = SYMBOLS[tps.index(option.candidate.parallel.tp) % len(SYMBOLS)]
            lines.append(_line(option, key, color, symbol))
    shapes = []
    target = plan.targets.attainment
    if key == "attainment" and target is not None:
        shapes.append({"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": 100 * target, "y1": 100 * target,
                       "line": {"color": QUIET, "width": 1, "dash": "dot"}})  # fmt: skip
    if plan.choice is not None:
        lines += [_star(plan.choice, each, key) for each in plan.choice.points if each.replicas == plan.choice.replicas]
    layout = _layout(key) | {"shapes": shapes}
    layout["xaxis"] |= {"range": [0, _widest_usd(plan)]}
    return {"data": lines, "layout": layout}


def _widest_usd(plan: CapacityPlan) -> float:
    """Where the axis ends: a little beyond the plan and the runners-up; without a plan, the dearest rehearsal."""
    costs = [each.usd_per_hour for each in (plan.choice, *plan.runners_up) if each and each.usd_per_hour is not None]
    points = [p.replicas * each.candidate.usd_per_replica_hour for each in plan.options for p in each.points]
    return 1.25 * max(costs or points or [1.0])


def _line(option: CandidateResult, key: str, color: str, symbol: str) -> dict[str, Any]:
    """Its rehearsals, by cost."""
    group = f"{option.candidate.gpu} tp {option.candidate.parallel.tp}"
    usd = option.candidate.usd_per_replica_hour
    return {
        "type": "scatter", "mode": "lines+markers", "name": group, 
        "x": [point.replicas * usd for point in option.points], "y": [_y(point, key) for point in option.points],
        "line": {"color": color, "width": 1.2},
        "marker": {
            "symbol": [symbol if not point.misses else f"{symbol}-open" for point in option.points], "size": 9,
            "color": color, "line": {"width": 1.6, "color": color},
        },
        "text": [_hover(option, point) for point in option.points],
        "hovertemplate": "%{text}<extra></extra>",
    }  # fmt: skip


def _star(option: CandidateResult, point: RehearsedSize, key: str) -> dict[str, Any]:
    """The plan."""
    return {
        "type": "scatter", "mode": "markers", "name": "the plan", "x": [option.usd_per_hour], "y": [_y(point, key)],
        "marker": {"symbol": "star", "size": 19, "color": "#f0b14a", "line": {"width": 1.4, "color": INK}},
        "text": [_hover(option, point)], "hovertemplate": "%{text}<extra>the plan</extra>",
    }  # fmt: skip


def _y(point: RehearsedSize, key: str) -> float | None:
    value: float | None = getattr(point.measured, key)
    return None if value is None else 100 * value if key == "attainment" else value


def _hover(option: CandidateResult, point: RehearsedSize) -> str:
    """One rehearsal in full."""
    cost = point.replicas * option.candidate.usd_per_replica_hour
    values = [f"{NAMES[name]}: {shown(name, getattr(point.measured, name))}" for name in SLOS]
    missed = "misses " + ", ".join(NAMES[name] for name in point.misses) if point.misses else "meets all"
    return "<br>".join(
        [f"<b>{point.replicas} x {option.candidate.label}</b>", f"${cost:,.2f} an hour", *values, missed]
    )


def _layout(key: str) -> dict[str, Any]:
    axis = {
        "gridcolor": RULE, "zeroline": False, "linecolor": "#c9ced4", "showline": True, "ticks": "outside",
        "tickcolor": "#c9ced4", "ticklen": 4, "automargin": True,
    }  # fmt: skip
    title = "requests that meet their SLOs" if key == "attainment" else "goodput, requests a second"
    y = {"ticksuffix": "%", "range": [-3, 107]} if key == "attainment" else {"rangemode": "tozero"}
    words = {"color": QUIET}
    return {
        "height": 380, "margin": {"l": 56, "r": 10, "t": 8, "b": 44}, "paper_bgcolor": "#fff", "plot_bgcolor": "#fff",
        "font": {"family": "system-ui, -apple-system, Segoe UI, Roboto, Arial, sans-serif", "size": 12, "color": INK},
        "hovermode": "closest", "hoverlabel": {"bgcolor": "#fff", "bordercolor": "#c9ced4"},
        "showlegend": False,
        "xaxis": axis | {"title": {"text": "$ an hour", "font": words}, "rangemode": "tozero", "tickprefix": "$"},
        "yaxis": axis | {"title": {"text": title, "font": words}} | y,
    }  # fmt: skip
