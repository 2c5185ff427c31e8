"""An arena as one HTML page: the ranking, a heat map of regret, a table for each cell."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np

from headway import __version__
from headway.metrics.interval import LEVEL
from headway.report.charts import SCALE, Figure, layout, numbers
from headway.report.page import COLORS, DRAW, chart, document, facts, literal, table
from headway.report.table import seconds
from headway_papers.arena.metrics import METRICS
from headway_papers.arena.play import Arena, CellResult
from headway_papers.arena.text import HEADS, row, shown, with_interval

CSS = """
details { margin: 10px 0; } summary { cursor: pointer; font-weight: 600; }
.arena .grid { grid-template-columns: 1fr; }
"""
MOST_SHOWN = 0.5
"""Regret at the dark end of the heat map's scale; larger values look the same."""
ROW_PX = 21
"""Height of a row of the charts."""


def page(arena: Arena, command: str) -> str:
    names = [each.name for each in arena.ranking if each.num_cells]
    figures = {"ranking": _dots(arena), "regret": _heatmap(arena, names)}
    parts = [_header(arena), _ranking(arena), _charts(arena), _cells(arena), _method(arena, command)]
    body = f'<div class="arena">{"".join(parts)}</div>'
    return document(f"Arena {arena.grid}", body, f"const charts = {literal(figures)};\n{DRAW}", CSS)


def _header(arena: Arena) -> str:
    about = {
        "Cells": str(len(arena.cells)),
        "Policies": str(len(arena.ranking)),
        "Seeds": str(arena.seeds),
        "Runs": f"{arena.num_measured + arena.num_found:,}",
        "Took": seconds(arena.wall_s),
        "Headway": __version__,
    }
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in arena.notes)
    brand = '<div class="brand">Headway · arena</div>'
    return f"<header>\n{brand}\n<h1>{escape(arena.grid)}</h1>\n{facts(about)}{notes}\n</header>"


def _ranking(arena: Arena) -> str:
    rows = [_row(row(each)) for each in arena.ranking]
    return f"<section>\n<h2>Ranking</h2>\n{table(HEADS, (0,), rows)}\n</section>"


def _row(cells: Sequence[str]) -> str:
    first, *others = (escape(each) for each in cells)
    return f'<td class="name">{first}</td>{"".join(f"<td>{each}</td>" for each in others)}'


def _charts(arena: Arena) -> str:
    title = METRICS[arena.metric].title
    dots = chart(
        "ranking", "Mean regret", f"Loss of {title} against each cell's best policy, with intervals over seeds."
    )
    heat = chart("regret", "Regret by cell", f"% of the best policy's {title}; colours end at {100 * MOST_SHOWN:g}%.")
    return f'<section>\n<h2>Regret</h2>\n<div class="grid">{dots}{heat}</div>\n</section>'


def _dots(arena: Arena) -> Figure:
    known = [each for each in arena.ranking if each.regret is not None]
    mean = np.array([each.regret.mean for each in known if each.regret is not None])
    half = np.array([each.regret.half for each in known if each.regret is not None])
    trace = {
        "type": "scatter",
        "mode": "markers",
        "x": numbers(100 * mean),
        "y": [each.name for each in known],
        "error_x": {"type": "data", "array": numbers(100 * half), "thickness": 1.4, "color": COLORS[0]},
        "marker": {"size": 8, "color": COLORS[0]},
        "hovertemplate": "%{y}: %{x:.2f}%<extra></extra>",
    }
    axis: dict[str, Any] = {"autorange": "reversed", "type": "category", "rangemode": "normal"}
    return {"data": [trace], "layout": layout("mean regret (%)", "", 90 + ROW_PX * len(known), yaxis=axis)}


def _heatmap(arena: Arena, names: Sequence[str]) -> Figure:
    shares = np.array(
        [[cell.regret[name].mean if name in cell.regret else np.nan for name in names] for cell in arena.cells]
    )
    percent = 100 * shares.reshape(len(arena.cells), len(names))
    trace = {
        "type": "heatmap",
        "x": list(names),
        "y": [cell.name for cell in arena.cells],
        "z": [numbers(row, 4) for row in percent],
        "zmin": 0,
        "zmax": 100 * MOST_SHOWN,
        "colorscale": SCALE,
        "xgap": 1,
        "ygap": 1,
        "hovertemplate": "%{x}<br>%{y}: %{z:.2f}%<extra></extra>",
        "texttemplate": "%{z:.0f}",
        "textfont": {"size": 10},
        "colorbar": {"title": {"text": "regret (%)"}, "thickness": 12},
    }
    x = {"side": "top", "tickangle": -40, "type": "category", "showgrid": False}
    y = {"autorange": "reversed", "type": "category", "showgrid": False, "rangemode": "normal"}
    height = 190 + ROW_PX * len(arena.cells)
    margin = {"l": 52, "r": 10, "t": 130, "b": 16}
    return {"data": [trace], "layout": layout("", "", height, xaxis=x, yaxis=y, margin=margin)}


def _cells(arena: Arena) -> str:
    names = [each.name for each in arena.ranking if each.num_cells]
    return f"<section>\n<h2>Cells</h2>\n{''.join(_cell(cell, names) for cell in arena.cells)}</section>"


def _cell(cell: CellResult, names: Sequence[str]) -> str:
    present = [name for name in names if name in cell.regret]
    present.sort(key=lambda name: cell.regret[name].mean)
    columns = [metric for metric in METRICS if any(metric in cell.metrics[name] for name in present)]
    rows = []
    for name in present:
        regret = cell.regret[name]
        bounds = "" if regret.low is None or regret.high is None else f" ± {50 * (regret.high - regret.low):.1f}"
        measured = cell.metrics[name]
        values = [with_interval(metric, measured.get(metric)) for metric in columns]
        rows.append(_row([name, f"{100 * regret.mean:.1f}{bounds}", *values]))
    heads = ["policy", "regret (%)", *(METRICS[metric].title for metric in columns)]
    best = "" if cell.best is None else f", best: {escape(cell.best)}"
    title = f"{escape(cell.name)}: {shown('goodput_rps', cell.requests_per_s)} requests/s{best}"
    return f"<details><summary>{title}</summary>{table(heads, (0,), rows)}</details>"


def _method(arena: Arena, command: str) -> str:
    capacities = [
        _row([each.fleet, each.workload, f"{each.requests_per_s:.3g}", f"{each.load:.3g}"]) for each in arena.capacities
    ]
    heads = ["fleet", "workload", "requests/s", "times the workload's own rate"]
    return f"""<footer>
<h2>Method</h2>
<p>A cell is a fleet with a workload at a share of their capacity: the rate at which the router
<code>{escape(arena.reference)}</code> completes requests while 1.3 times as many arrive. All policies get the same
requests with a seed. Regret is the difference from the policy with the best mean in the cell, seed by seed, over that
mean; intervals are Student's t at {100 * LEVEL:.0f}%, over seeds. A policy ties with the best one where its interval
holds 0. An oracle never counts as the best policy; where its regret is negative, that is what its knowledge would gain.
Goodput is the requests that met all of their SLOs, per second of arrivals.</p>
{table(heads, (0, 1), capacities)}
<p class="quiet">Command: <code>{escape(command)}</code></p>
</footer>"""
