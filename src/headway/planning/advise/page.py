"""An answer of `headway advise` as an HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from headway.planning.advise.judge import Proposal
from headway.planning.advise.plan import Advice
from headway.planning.advise.text import (
    HEADS,
    LEFT_OUT_HEADS,
    TWIN_HEADS,
    left_out_rows,
    rows,
    sentences,
    twin_rows,
)
from headway.report.charts import layout
from headway.report.page import COLORS, DRAW, QUIET, chart, document, facts, literal, table

_CAPTION = (
    "A point is a proposal: what it saves, and how many more requests meet their SLOs. Bars contain the spread over the"
    " judged days and the error of the step times. Today's fleet is at 0."
)


def page(answer: Advice, command: str) -> str:
    first, second, third = sentences(answer)
    shown = {
        "days": ", ".join(answer.days),
        "requests": f"{answer.num_requests:,}",
        "SLO attainment wanted": f"{answer.target:.1%}",
        "today": "-" if answer.today is None else f"{answer.today.attainment:.1%}",
        "today, an hour": "-" if answer.today is None else f"${answer.today.usd_per_hour:,.2f}",
    }
    charts = {"gains": _picture(answer.proposals)} if answer.proposals else {}
    notes = "".join(f'<p class="quiet">{escape(note)}</p>' for note in answer.notes)
    proposals = "".join(
        f"<h3>{i}. {escape(each.name)}</h3><pre>{escape(each.diff)}</pre>" for i, each in enumerate(answer.proposals, 1)
    )
    body = f"""<header>
<div class="brand">Headway · advice</div>
<h1>{escape(second)}</h1>
<p>{escape(first)}</p><p>{escape(third)}</p>
{facts(shown)}
</header>
{_section("Proposals", _table(HEADS, rows(answer), 2)) if answer.proposals else ""}
{chart("gains", "Gains over today's fleet", _CAPTION) if charts else ""}
{_section("Changes of the fleet file", proposals) if proposals else ""}
{_section("The days as they ran, and rehearsed", _table(TWIN_HEADS, twin_rows(answer), 2))}
{_section("Not tried", _table(LEFT_OUT_HEADS, left_out_rows(answer), 4))}
<footer>{notes}<p class="quiet">Command: <code>{escape(command)}</code></p></footer>"""
    return document("advice", body, f"const charts = {literal(charts)};\n{DRAW}")


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def _table(heads: Sequence[str], listed: Sequence[Sequence[str]], names: int) -> str:
    cells = [
        "".join(f'<td class="{"text" if i < names else ""}">{escape(cell)}</td>' for i, cell in enumerate(row))
        for row in listed
    ]
    return table(heads, names, cells)


def _picture(proposals: Sequence[Proposal]) -> dict[str, Any]:
    traces = []
    for i, each in enumerate(proposals):
        usd, met = each.usd_per_month, each.attainment
        traces.append({
            "type": "scatter", "mode": "markers", "name": each.name, "x": [usd.mean], "y": [100 * met.mean],
            "marker": {"color": COLORS[i % len(COLORS)], "size": 10},
            "error_x": {"type": "data", "symmetric": False, "array": [usd.high - usd.mean],
                        "arrayminus": [usd.mean - usd.low]},
            "error_y": {"type": "data", "symmetric": False, "array": [100 * (met.high - met.mean)],
                        "arrayminus": [100 * (met.mean - met.low)]},
        })  # fmt: skip
    cross = {"color": QUIET, "width": 1, "dash": "dot"}
    shapes = [
        {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": 0, "y1": 0, "line": cross},
        {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "x0": 0, "x1": 0, "line": cross},
    ]
    return {
        "data": traces,
        "layout": layout("$ a month saved", "SLO attainment gained (points)", 460, showlegend=True, shapes=shapes),
    }
