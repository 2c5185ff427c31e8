"""A plan of a cascade as a value that the command prints and the API returns, with its page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headway.planning.cascade.plan import CascadeAnswer, Interval, plan, scenario_yaml
from headway.planning.cascade.problem import Cheapest, LatencyBudget, Target
from headway.planning.cascade.rehearsal import RehearsedPlan
from headway.planning.cascade.request import CascadeOptions, make_request
from headway.planning.planned import Planned
from headway.planning.rehearsals import Resources, Source
from headway.report.blocks import Chart, Facts, Lines, Report, Said, Section, Table, or_dash
from headway.report.charts import layout, limit, points
from headway.report.page import COLORS

STAGES = ("model", "replicas", "GPUs", "accepts from", "requests", "p95 of the stage (s)")
POINTS = ("plan", "GPUs per model", "quality", "p95 (s)", "mean (s)", "$/request", "what was asked for")
LOST = ("judge off by", "planned", "GPUs per model", "quality", "p95 (s)", "short (points)", "slower (s)")
_HOVER = "%{text}<br>quality %{y:.4g}, p95 %{x:.4g} s<extra></extra>"
_CAPTION = "Every plan that was rehearsed as a whole. To the left and up is better; hollow: not what was asked for."


def planned(source: Source, options: CascadeOptions, resources: Resources) -> Planned:
    """Thresholds, GPUs per model and replica shapes of a cascade: `headway plan cascade`. Raises HeadwayError like
    `make_request`."""
    request = make_request(source, options, resources.simulator)
    answer = plan(request, resources)
    return Planned(
        answer,
        answer.chosen.is_met,
        tuple(_rows(answer)),
        tuple(reached(answer)),
        tuple(_said(answer)),
        {"": lambda: scenario_yaml(answer, request)},
        lambda _: report(answer),
        f"latencies: {answer.num_simulated} simulated, {answer.num_cached} known before",
    )


def _rows(answer: CascadeAnswer) -> Iterator[dict[str, Any]]:
    for stage in answer.chosen.plan.stages:
        yield {
            "model": stage.model,
            "gpus": stage.gpus,
            "replicas": stage.shapes,
            "threshold": stage.threshold,
            "share": stage.processing_ratio,
            "p95_latency_s": stage.p95_latency_s,
        }


def _said(answer: CascadeAnswer) -> Iterator[Said]:
    yield _stages(answer)
    yield _plans(answer)
    yield from reached(answer)
    yield from caveats(answer)
    if answer.confidence is not None:
        low, high = answer.confidence.quality
        yield f"on other draws of as many requests, these thresholds reach {low:.4g} to {high:.4g} (95%)"
    if answer.regrets:
        yield _lost(answer)


def report(answer: CascadeAnswer) -> Report:
    chosen, result = answer.chosen.plan, answer.chosen.rehearsed
    used = " → ".join(f"{stage.model} on {stage.gpus}" for stage in chosen.stages if stage.replicas)
    about = {
        "asked for": _target(answer.target),
        "rehearsal": "keeps it" if answer.chosen.is_met else "does not keep it",
        "status": chosen.status,
        "planner": chosen.planner,
        "GPUs": f"{chosen.gpus_used} of {chosen.num_gpus}",
    }
    sections = [
        Section("Stages", [_stages(answer)]),
        Section("Quality against latency", [Chart("pareto", "Quality and p95 latency", _picture(answer), _CAPTION)]),
        Section("Plans", [_plans(answer)]),
    ]
    sections += [Section("With a judge that is wrong", [_lost(answer)])] if answer.regrets else []
    headline = f"{used} GPUs: quality {number(result.quality)} at a p95 of {number(result.p95_s)} s"
    head = [Facts(about), Lines(reached(answer)), Lines(caveats(answer), "note")]
    return Report("cascade", headline, head, sections)


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


def _lost(answer: CascadeAnswer) -> Table:
    """One row per judge error and way of choosing the plan."""
    rows = []
    for each in answer.regrets:
        plans = {"by its scores": each.by_judge, "by true scores": each.by_truth, "knowing it": each.informed}
        for name, judged in plans.items():
            result, gpus = judged.rehearsed, " + ".join(str(stage.num_gpus) for stage in judged.plan.stages)
            losses = [number(value) for value in (result.quality, result.p95_s, judged.short_points, judged.slower_s)]
            rows.append([f"{each.judge_error.bias:+g}, sd {each.judge_error.noise:g}", name, gpus, *losses])
    return Table(LOST, rows, words=LOST[:3])


def _target(target: Target) -> str:
    if isinstance(target, LatencyBudget):
        return f"p95 {target.latency_s:g} s"
    least = f"quality {target.q_min:g}"
    return f"{least} within {target.latency_s:g} s, cheapest" if isinstance(target, Cheapest) else least


def reached(answer: CascadeAnswer) -> list[str]:
    """The chosen plan's results: in its rehearsal, by the estimate used to choose it, and on fresh draws."""
    result = answer.chosen.rehearsed
    return [
        f"rehearsed as a whole, with scores that the plan was not made on: quality {number(result.quality)} at a p95 of"
        f" {number(result.p95_s)} s",
        f"estimated stage by stage before: {answer.chosen.plan.why}",
        *on_fresh_draws(answer),
    ]


def on_fresh_draws(answer: CascadeAnswer) -> list[str]:
    """One sentence on the plan's results on unseen requests; empty if they were not rehearsed."""
    fresh = answer.fresh
    if fresh is None:
        return []
    num, parts = len(fresh.seeds), []
    for name, each, unit in (("p95", fresh.p95_s, " s"), ("quality", fresh.quality, "")):
        if each is not None:
            parts.append(f"{name} {each.mean:.4g}{unit} ({each.low:.4g} to {each.high:.4g}, 95%)")
    kept = ", ".join(parts) or "not all requests finish"
    return [f"on {num} fresh draws of the requests: {kept}; the target is met on {fresh.num_met} of {num}"]


def _plans(answer: CascadeAnswer) -> Table:
    rows = [
        [name, " + ".join(str(stage.num_gpus) for stage in each.plan.stages), *numbers_of(each)]
        for name, each, _ in named_plans(answer)
    ]
    return Table(POINTS, rows, words=POINTS[:2])


def _stages(answer: CascadeAnswer) -> Table:
    rows, confidence = [], answer.confidence
    for i, stage in enumerate(answer.chosen.plan.stages):
        level = number(stage.threshold)
        share = f"{stage.processing_ratio:.0%}"
        if confidence is not None:
            share += _between(confidence.processing_ratios[i], 100, "%") if i else ""
            if i < len(confidence.thresholds) and (interval := confidence.thresholds[i]) is not None:
                level += _between(interval, 1, "")
        rows.append([stage.model, stage.shapes, stage.gpus, level, share, number(stage.p95_latency_s)])
    return Table(STAGES, rows, words=STAGES[:2])


def _between(interval: Interval, times: float, unit: str) -> str:
    return f" ({interval[0] * times:.3g} to {interval[1] * times:.3g}{unit})"


def _picture(answer: CascadeAnswer) -> dict[str, Any]:
    traces, target, named = [], answer.target, named_plans(answer)
    for i, group in enumerate(("curve", "alternatives", "chosen")):
        own = [
            (each.rehearsed.p95_s, each.rehearsed.quality, name, each.is_met)
            for name, each, its_group in named
            if its_group == group and each.rehearsed.quality is not None and each.rehearsed.p95_s is not None
        ]
        if group == "curve":
            own.sort(key=lambda point: point[0] or 0.0)
        if not own:
            continue
        shape, size = ("star", 15) if group == "chosen" else ("circle", 9)
        symbols = [shape if is_met else f"{shape}-open" for *_, is_met in own]
        marker = {"color": COLORS[i], "size": size, "symbol": symbols}
        mode = "lines+markers" if group == "curve" else "markers"
        line = {"color": COLORS[i], "width": 1.2, "dash": "dot"}
        at = [(p95_s, quality, name) for p95_s, quality, name, _ in own]
        traces.append(points(group, at, marker, _HOVER, mode, line=line))
    axis, value = ("x", target.latency_s) if isinstance(target, LatencyBudget) else ("y", target.q_min)
    free = {"rangemode": "normal"}
    changes = {"showlegend": True, "shapes": [limit(axis, value, "#8a929b", "dash")], "xaxis": free, "yaxis": free}
    return {"data": traces, "layout": layout("p95 latency (s)", "mean score", 420, **changes)}


def number(value: float | None) -> str:
    return or_dash(value, "{:.4g}")
