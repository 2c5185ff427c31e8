"""A plan of a cascade as one HTML page: its stages, and quality against latency of all rehearsed plans."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from headway.planning.cascade.best_plan import CascadeAnswer, Interval, PlanConfidence
from headway.planning.cascade.plan import CascadePlan
from headway.planning.cascade.problem import Cheapest, LatencyBudget, Target
from headway.planning.cascade.rehearsal import RehearsedPlan
from headway.report.charts import layout
from headway.report.page import COLORS, DRAW, chart, document, facts, literal, table

STAGES = ("model", "replicas", "GPUs", "accepts from", "requests", "p95 of the stage (s)")
POINTS = ("plan", "quality", "p95 (s)", "mean (s)", "$/request", "what was asked for")
LOST = ("judge off by", "planned", "GPUs per model", "quality", "p95 (s)", "short (points)", "slower (s)")
_CAPTION = "Every plan that was rehearsed as a whole. To the left and up is better; hollow: not what was asked for."


def page(answer: CascadeAnswer, command: str) -> str:
    """The plan as HTML, for `write_page`; `command` is the one that made it."""
    chosen, result = answer.chosen.plan, answer.chosen.rehearsed
    used = " → ".join(f"{stage.model} on {stage.gpus}" for stage in chosen.stages if stage.replicas)
    about = facts(
        {
            "asked for": _target(answer.target),
            "rehearsal": "keeps it" if answer.chosen.is_met else "does not keep it",
            "status": chosen.status,
            "planner": chosen.planner,
            "GPUs": f"{chosen.gpus_used} of {chosen.num_gpus}",
        }
    )
    rows = [_cells((name,), numbers_of(each)) for name, each, _ in named_plans(answer)]
    losses = [_cells([str(each) for each in row[:3]], [str(each) for each in row[3:]]) for row in lost(answer)]
    regrets = f"<section><h2>With a judge that is wrong</h2>{table(LOST, 3, losses)}</section>" if losses else ""
    body = f"""<header>
<div class="brand">Headway · cascade</div>
<h1>{escape(f"{used} GPUs: quality {number(result.quality)} at a p95 of {number(result.p95_s)} s")}</h1>
{about}
{"".join(f"<p>{escape(line)}</p>" for line in reached(answer))}
{"".join(f'<p class="note">{escape(line)}</p>' for line in caveats(answer))}
</header>
<section><h2>Stages</h2>{table(STAGES, 2, _stages(chosen, answer.confidence))}</section>
<section><h2>Quality against latency</h2>{chart("pareto", "Quality and p95 latency", _CAPTION)}</section>
<section><h2>Plans</h2>{table(POINTS, 1, rows)}</section>
{regrets}
<footer><p class="quiet">Command: <code>{escape(command)}</code></p></footer>"""
    return document("cascade", body, f"const charts = {literal({'pareto': _picture(answer)})};\n{DRAW}")


def named_plans(answer: CascadeAnswer) -> list[tuple[str, RehearsedPlan, str]]:
    """Every rehearsed plan, with its name and group: "chosen", "alternatives" or "curve"."""
    named = [("chosen", answer.chosen, "chosen")]
    named += [(each.plan.planner, each, "alternatives") for each in answer.alternatives]
    return named + [(f"quality {each.plan.quality:.3g}", each, "curve") for each in answer.curve]


def caveats(answer: CascadeAnswer) -> list[str]:
    """A line for each pool of the plan whose step times were not measured."""
    return [
        f"step times of {each.name} on {each.gpu} are not calibrated ({', '.join(each.uncalibrated)}): trust the order,"
        " not the numbers"
        for each in answer.pools
        if each.uncalibrated
    ]


def numbers_of(plan: RehearsedPlan) -> list[str]:
    """Quality, p95, mean, $/request, and whether the target is met."""
    result = plan.rehearsed
    shown = [number(each) for each in (result.quality, result.p95_s, result.mean_s, result.usd_per_request)]
    return [*shown, "yes" if plan.is_met else "no"]


def lost(answer: CascadeAnswer) -> list[list[object]]:
    """A row for each plan with each judge, as of `LOST`."""
    rows: list[list[object]] = []
    for each in answer.regrets:
        plans = {"by its scores": each.by_judge, "by true scores": each.by_truth, "knowing it": each.informed}
        for name, judged in plans.items():
            result, gpus = judged.rehearsed, " + ".join(str(stage.num_gpus) for stage in judged.plan.stages)
            losses = [number(value) for value in (result.quality, result.p95_s, judged.short_points, judged.slower_s)]
            rows.append([f"{each.judge_error.bias:+g}, sd {each.judge_error.noise:g}", name, gpus, *losses])
    return rows


def _target(target: Target) -> str:
    if isinstance(target, LatencyBudget):
        return f"p95 {target.latency_s:g} s"
    least = f"quality {target.q_min:g}"
    return f"{least} within {target.latency_s:g} s, cheapest" if isinstance(target, Cheapest) else least


def reached(answer: CascadeAnswer) -> list[str]:
    """What the chosen plan reaches, and of what: in its rehearsal, by the estimate that it was chosen by, and on fresh
    draws."""
    result = answer.chosen.rehearsed
    return [
        f"rehearsed as a whole, with scores that the plan was not made on: quality {number(result.quality)} at a p95 of"
        f" {number(result.p95_s)} s",
        f"estimated stage by stage before: {answer.chosen.plan.why}",
        *on_fresh_draws(answer),
    ]


def on_fresh_draws(answer: CascadeAnswer) -> list[str]:
    """What the plan keeps on requests that it was not made on, in one sentence; none if that was not rehearsed."""
    fresh = answer.fresh
    if fresh is None:
        return []
    num, parts = len(fresh.seeds), []
    for name, each, unit in (("p95", fresh.p95_s, " s"), ("quality", fresh.quality, "")):
        if each is not None:
            parts.append(f"{name} {each.mean:.4g}{unit} ({each.low:.4g} to {each.high:.4g}, 95%)")
    kept = ", ".join(parts) or "not all requests finish"
    return [f"on {num} fresh draws of the requests: {kept}; the target is met on {fresh.num_met} of {num}"]


def _stages(chosen: CascadePlan, confidence: PlanConfidence | None) -> list[str]:
    rows = []
    for i, stage in enumerate(chosen.stages):
        level = "-" if stage.threshold is None else f"{stage.threshold:.4g}"
        share = f"{stage.processing_ratio:.0%}"
        if confidence is not None:
            share += _between(confidence.processing_ratios[i], 100, "%") if i else ""
            if i < len(confidence.thresholds) and (interval := confidence.thresholds[i]) is not None:
                level += _between(interval, 1, "")
        rows.append(_cells((stage.model, stage.shapes), (stage.gpus, level, share, number(stage.p95_latency_s))))
    return rows


def _between(interval: Interval, times: float, unit: str) -> str:
    return f" ({interval[0] * times:.3g} to {interval[1] * times:.3g}{unit})"


def _picture(answer: CascadeAnswer) -> dict[str, Any]:
    traces, target, named = [], answer.target, named_plans(answer)
    for i, group in enumerate(("curve", "alternatives", "chosen")):
        points = [
            (each.rehearsed.p95_s, each.rehearsed.quality, name, each.is_met)
            for name, each, its_group in named
            if its_group == group and each.rehearsed.quality is not None and each.rehearsed.p95_s is not None
        ]
        if group == "curve":
            points.sort(key=lambda point: point[0] or 0.0)
        if not points:
            continue
        p95_s, quality, names, is_met = zip(*points, strict=True)
        shape = "star" if group == "chosen" else "circle"
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers" if group == "curve" else "markers",
                "name": group,
                "x": p95_s,
                "y": quality,
                "text": names,
                "hovertemplate": "%{text}<br>quality %{y:.4g}, p95 %{x:.4g} s<extra></extra>",
                "line": {"color": COLORS[i], "width": 1.2, "dash": "dot"},
                "marker": {
                    "color": COLORS[i],
                    "size": 15 if group == "chosen" else 9,
                    "symbol": [shape if met else f"{shape}-open" for met in is_met],
                },
            }
        )
    limit: dict[str, Any] = {"type": "line", "line": {"color": "#8a929b", "width": 1, "dash": "dash"}}
    if isinstance(target, LatencyBudget):
        limit |= {"x0": target.latency_s, "x1": target.latency_s, "y0": 0, "y1": 1, "yref": "paper"}
    else:
        limit |= {"y0": target.q_min, "y1": target.q_min, "x0": 0, "x1": 1, "xref": "paper"}
    axis = {"rangemode": "normal"}
    changes = {"showlegend": True, "shapes": [limit], "xaxis": axis, "yaxis": axis}
    return {"data": traces, "layout": layout("p95 latency (s)", "mean score", 420, **changes)}


def _cells(words: Sequence[str], numbers: Sequence[str]) -> str:
    names = "".join(f'<td class="name">{escape(word)}</td>' for word in words)
    return names + "".join(f"<td>{escape(each)}</td>" for each in numbers)


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
