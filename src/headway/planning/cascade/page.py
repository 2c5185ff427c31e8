"""A plan of a cascade as one HTML page: its stages, and quality against latency of all rehearsed plans."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from msgspec import Struct

from headway.planning.cascade.best_plan import PlanConfidence
from headway.planning.cascade.plan import CascadePlan
from headway.planning.cascade.problem import Cheapest, LatencyBudget, Target
from headway.report.charts import layout
from headway.report.page import COLORS, DRAW, chart, document, facts, literal, table

STAGES = ("model", "replicas", "GPUs", "accepts from", "requests", "p95 of the stage (s)")
POINTS = ("plan", "quality", "p95 (s)", "mean (s)", "$/request", "what was asked for")
LOST = ("judge off by", "planned", "GPUs per model", "quality", "p95 (s)", "short (points)", "slower (s)")
_CAPTION = "Every plan that was rehearsed as a whole. To the left and up is better; hollow: not what was asked for."


class PlottedPlan(Struct, frozen=True):
    """A rehearsed plan, as a point of the chart and a row of the table."""

    name: str
    quality: float | None
    p95_s: float | None
    mean_s: float | None
    usd_per_request: float | None
    is_met: bool
    group: str
    """"chosen", "alternatives" or "curve"."""


def page(
    target: Target, chosen: CascadePlan, points: Sequence[PlottedPlan], confidence: PlanConfidence | None, command: str,
    lost: Sequence[Sequence[object]] = (),
) -> str:  # fmt: skip
    """A self-contained HTML page. `lost`: rows of the table of regrets."""
    first = next(each for each in points if each.group == "chosen")
    body = f"""<header>
<div class="brand">Headway · cascade</div>
<h1>{escape(headline(chosen, first))}</h1>
{facts(_facts(target, chosen, first))}
<p>{escape(chosen.why)}</p>
</header>
<section><h2>Stages</h2>{table(STAGES, 2, _stages(chosen, confidence))}</section>
<section><h2>Quality against latency</h2>{chart("pareto", "Quality and p95 latency", _CAPTION)}</section>
<section><h2>Plans</h2>{table(POINTS, 1, [_row(each) for each in points])}</section>
{_lost(lost)}
<footer><p class="quiet">Command: <code>{escape(command)}</code></p></footer>"""
    return document("cascade", body, f"const charts = {literal({'pareto': _picture(target, points)})};\n{DRAW}")


def _lost(rows: Sequence[Sequence[object]]) -> str:
    """The table of regrets; empty where there are none."""
    if not rows:
        return ""
    cells = [_cells([str(each) for each in row[:3]], [str(each) for each in row[3:]]) for row in rows]
    return f"<section><h2>With a judge that is wrong</h2>{table(LOST, 3, cells)}</section>"


def headline(chosen: CascadePlan, first: PlottedPlan) -> str:
    used = " → ".join(f"{stage.model} on {stage.gpus}" for stage in chosen.stages if stage.replicas)
    return f"{used} GPUs: quality {_number(first.quality)} at a p95 of {_number(first.p95_s)} s"


def _facts(target: Target, chosen: CascadePlan, first: PlottedPlan) -> dict[str, str]:
    return {
        "asked for": _target(target),
        "rehearsal": "keeps it" if first.is_met else "does not keep it",
        "status": chosen.status,
        "planner": chosen.planner,
        "GPUs": f"{chosen.gpus_used} of {chosen.num_gpus}",
    }


def _target(target: Target) -> str:
    if isinstance(target, LatencyBudget):
        return f"p95 {target.latency_s:g} s"
    least = f"quality {target.q_min:g}"
    return f"{least} within {target.latency_s:g} s, cheapest" if isinstance(target, Cheapest) else least


def _stages(chosen: CascadePlan, confidence: PlanConfidence | None) -> list[str]:
    rows = []
    for i, stage in enumerate(chosen.stages):
        level = "-" if stage.threshold is None else f"{stage.threshold:.4g}"
        share = f"{stage.processing_ratio:.0%}"
        if confidence is not None:
            share += _between(confidence.processing_ratios[i], 100, "%") if i else ""
            if i < len(confidence.thresholds) and (found := confidence.thresholds[i]) is not None:
                level += _between(found, 1, "")
        rows.append(_cells((stage.model, stage.shapes), (stage.gpus, level, share, _number(stage.p95_latency_s))))
    return rows


def _between(found: tuple[float, float], times: float, unit: str) -> str:
    return f" ({found[0] * times:.3g} to {found[1] * times:.3g}{unit})"


def _picture(target: Target, points: Sequence[PlottedPlan]) -> dict[str, Any]:
    traces = []
    for i, group in enumerate(("curve", "alternatives", "chosen")):
        here = [each for each in points if each.group == group and each.quality is not None and each.p95_s is not None]
        if group == "curve":
            here.sort(key=lambda each: each.p95_s or 0.0)
        if not here:
            continue
        shape = "star" if group == "chosen" else "circle"
        traces.append({
            "type": "scatter", "mode": "lines+markers" if group == "curve" else "markers", "name": group,
            "x": [each.p95_s for each in here], "y": [each.quality for each in here],
            "text": [each.name for each in here],
            "hovertemplate": "%{text}<br>quality %{y:.4g}, p95 %{x:.4g} s<extra></extra>",
            "line": {"color": COLORS[i], "width": 1.2, "dash": "dot"},
            "marker": {
                "color": COLORS[i], "size": 15 if group == "chosen" else 9,
                "symbol": [shape if each.is_met else f"{shape}-open" for each in here],
            },
        })  # fmt: skip
    asked: dict[str, Any] = {"type": "line", "line": {"color": "#8a929b", "width": 1, "dash": "dash"}}
    if isinstance(target, LatencyBudget):
        asked |= {"x0": target.latency_s, "x1": target.latency_s, "y0": 0, "y1": 1, "yref": "paper"}
    else:
        asked |= {"y0": target.q_min, "y1": target.q_min, "x0": 0, "x1": 1, "xref": "paper"}
    near = {"rangemode": "normal"}
    more = {"showlegend": True, "shapes": [asked], "xaxis": near, "yaxis": near}
    return {"data": traces, "layout": layout("p95 latency (s)", "mean score", 420, **more)}


def _row(point: PlottedPlan) -> str:
    shown = [_number(each) for each in (point.quality, point.p95_s, point.mean_s, point.usd_per_request)]
    return _cells((point.name,), (*shown, "yes" if point.is_met else "no"))


def _cells(words: Sequence[str], numbers: Sequence[str]) -> str:
    named = "".join(f'<td class="name">{escape(word)}</td>' for word in words)
    return named + "".join(f"<td>{escape(number)}</td>" for number in numbers)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
