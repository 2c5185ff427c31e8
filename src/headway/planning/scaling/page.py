"""A plan of scaling as sentences, as rows of a table, and as an HTML page with the frontier."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from headway.planning.scaling.plan import ScalerResult, ScalingPlan, StartUpPlan, is_on_frontier
from headway.report.charts import layout
from headway.report.page import COLORS, DRAW, INK, QUIET, chart, document, facts, literal, table

HEADS = ("scaler", "setting", "", "GPU-hours", "late", "starts")
_CAPTION = (
    "A point is one setting of one scaler over the whole demand; a larger one is on the frontier of all. "
    "The star is chosen. Left and down is better."
)


def title(answer: StartUpPlan) -> str:
    return "start times as in the scenario" if answer.startup_s is None else f"starts of {answer.startup_s:g} s"


def headline(answer: StartUpPlan, max_late: float) -> str:
    if answer.chosen is None:
        least = min(answer.results, key=lambda each: each.late)
        return (
            f"{title(answer)}: no scaler has at most {100 * max_late:g}% of requests late; the least is "
            f"{least.late:.2%}, with {least.family}, {least.setting}, at {least.gpu_hours:,.1f} GPU-hours"
        )
    best = answer.results[answer.chosen]
    return f"{title(answer)}: {best.family}, {best.setting}: {best.gpu_hours:,.1f} GPU-hours, {best.late:.2%} late"


def sentences(answer: StartUpPlan) -> list[str]:
    """What the plan says besides the choice."""
    found = []
    best = None if answer.chosen is None else answer.results[answer.chosen]
    if best is not None and answer.clairvoyant_gpu_hours:
        more = best.gpu_hours / answer.clairvoyant_gpu_hours - 1
        found.append(
            "A plan that knows the demand and changes every quarter of an hour has as few late requests with"
            f" {answer.clairvoyant_gpu_hours:,.1f} GPU-hours: "
            f"the chosen scaler takes {abs(more):.0%} {'more' if more >= 0 else 'less'}."
        )
    if best is not None and any(each.interval for each in answer.against):
        found.append(f"GPU-hours of {best.family} over others with as few late requests: {_ratios(answer)} (95%).")
    if answer.bound_gpu_hours is not None:
        found.append(
            f"No plan that has 95% of each tier in time takes less than {answer.bound_gpu_hours:,.1f} GPU-hours."
        )
    if best is not None and answer.kubernetes is not None:
        other = answer.results[answer.kubernetes]
        found.append(
            f"An autoscaler of Kubernetes suffices: {other.family}, {other.setting}, with {other.gpu_hours:,.1f} "
            f"GPU-hours and {other.late:.2%} late."
        )
    return found


def _ratios(answer: StartUpPlan) -> str:
    shown = ((each.family, each.ratio, each.interval) for each in answer.against)
    return ", ".join(
        f"{family} {ratio:.2f}" + ("" if between is None else f" [{between[0]:.2f}, {between[1]:.2f}]")
        for family, ratio, between in shown
    )


def rows(answer: StartUpPlan) -> list[list[str]]:
    listed = sorted(enumerate(answer.results), key=lambda pair: pair[1].gpu_hours)
    made = [
        _row(each, "chosen" if i == answer.chosen else "frontier" if each.on_frontier else "") for i, each in listed
    ]
    return made + [_row(each, "knows the demand") for each in answer.clairvoyant]


def _row(each: ScalerResult, mark: str) -> list[str]:
    return [each.family, each.setting, mark, f"{each.gpu_hours:,.1f}", f"{each.late:.2%}", f"{each.starts:,.0f}"]


def page(answer: ScalingPlan, command: str) -> str:
    shown = {
        "requests": f"{answer.num_requests:,}",
        "seeds": ", ".join(map(str, answer.seeds)),
        "may be late": f"{100 * answer.max_late:g}%",
    }
    sections, charts = [], {}
    for i, each in enumerate(answer.plans):
        charts[f"frontier{i}"] = _picture(each, answer.max_late)
        paragraphs = "".join(f"<p>{escape(line)}</p>" for line in sentences(each))
        cells = [
            "".join(f'<td class="{"name" if j < 3 else ""}">{escape(cell)}</td>' for j, cell in enumerate(row))
            for row in rows(each)
        ]
        sections.append(
            f"<section><h2>{escape(headline(each, answer.max_late))}</h2>{paragraphs}"
            f"{chart(f'frontier{i}', f'GPU-hours against lateness, {title(each)}', _CAPTION)}"
            f"{table(HEADS, 3, cells)}</section>"
        )
    notes = "".join(f'<p class="quiet">{escape(note)}</p>' for note in answer.notes)
    body = f"""<header>
<div class="brand">Headway · scaling</div>
<h1>{escape(f"{answer.name}: which scaler")}</h1>
{facts(shown)}
</header>
{"".join(sections)}
<footer>{notes}<p class="quiet">Command: <code>{escape(command)}</code></p></footer>"""
    return document("scaling", body, f"const charts = {literal(charts)};\n{DRAW}")


def _picture(answer: StartUpPlan, max_late: float) -> dict[str, Any]:
    families = list(dict.fromkeys(each.family for each in answer.results))
    traces: list[dict[str, Any]] = []
    for i, family in enumerate(families):
        own = [each for each in answer.results if each.family == family]
        traces += _points(family, own, COLORS[i % len(COLORS)])
    if answer.clairvoyant:
        traces += _points("knows the demand", answer.clairvoyant, INK, dash="dot")
    if answer.chosen is not None:
        best = answer.results[answer.chosen]
        star = {"symbol": "star", "size": 18, "color": "#f0b14a", "line": {"width": 1.4, "color": INK}}
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": "chosen",
                "x": [best.gpu_hours],
                "y": [100 * best.late],
                "marker": star,
                "text": [_hover(best)],
                "hovertemplate": "%{text}<extra>chosen</extra>",
            }
        )
    shapes = [
        {
            "type": "line",
            "xref": "paper",
            "x0": 0,
            "x1": 1,
            "y0": 100 * max_late,
            "y1": 100 * max_late,
            "line": {"color": QUIET, "width": 1, "dash": "dot"},
        }
    ]
    if answer.bound_gpu_hours is not None:
        at = answer.bound_gpu_hours
        shapes.append(
            {
                "type": "line",
                "yref": "paper",
                "y0": 0,
                "y1": 1,
                "x0": at,
                "x1": at,
                "line": {"color": INK, "width": 1, "dash": "dash"},
            }
        )
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": "proven bound (95% in time)",
                "x": [at, at],
                "y": [0, 0],
                "line": {"color": INK, "width": 1, "dash": "dash"},
                "hoverinfo": "skip",
            }
        )
    return {
        "data": traces,
        "layout": layout(
            "GPU-hours", "requests late (%)", 460, showlegend=True, shapes=shapes, xaxis={"rangemode": "tozero"}
        ),
    }


def _points(name: str, results: Sequence[ScalerResult], color: str, dash: str = "solid") -> list[dict[str, Any]]:
    """All settings of a scaler, and a line through those that its own other settings do not beat."""
    best = sorted((each for each in results if is_on_frontier(each, results)), key=lambda each: each.gpu_hours)
    line = {
        "type": "scatter",
        "mode": "lines",
        "legendgroup": name,
        "showlegend": False,
        "hoverinfo": "skip",
        "x": [each.gpu_hours for each in best],
        "y": [100 * each.late for each in best],
        "line": {"color": color, "width": 1.2, "dash": dash},
    }
    points = {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "legendgroup": name,
        "x": [each.gpu_hours for each in results],
        "y": [100 * each.late for each in results],
        "marker": {"color": color, "size": [11 if each.on_frontier else 7 for each in results]},
        "text": [_hover(each) for each in results],
        "hovertemplate": "%{text}<extra></extra>",
    }
    return [line, points]


def _hover(each: ScalerResult) -> str:
    return f"{each.family}, {each.setting}<br>{each.gpu_hours:,.1f} GPU-hours, {each.late:.2%} late"
