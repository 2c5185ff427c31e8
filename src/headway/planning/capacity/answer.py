"""A capacity plan as a value that the command prints and the API returns, with its page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headway.planning.capacity.plan import CapacityOptions, plan, scenario_yaml
from headway.planning.capacity.problem import SLOS, CandidateResult, CapacityPlan, RehearsedSize
from headway.planning.capacity.text import (
    LEGEND,
    NAMES,
    candidates_table,
    describe,
    headline,
    said,
    sentences,
    shown,
    what_ifs_table,
)
from headway.planning.planned import Planned
from headway.planning.rehearsals import Resources, Source
from headway.report.blocks import Block, Chart, Charts, Legend, Lines, Report, Section, Table, or_dash
from headway.report.charts import layout, limit, points, star
from headway.report.page import COLORS

SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "hexagon")
GLYPHS = "●■◆▲✚⬢"
"""Marks by tensor parallel degree, in charts and legend."""


def planned(source: Source, options: CapacityOptions, resources: Resources) -> Planned:
    """The cheapest fleet for a scenario's workload: `headway plan capacity`. Raises HeadwayError like `plan`."""
    best, rehearsal = plan(source, options, resources)
    title = str(source.document.get("name", "capacity"))
    return Planned(
        best,
        best.choice is not None,
        tuple(_row(each) for each in best.options),
        (headline(best), *sentences(best)),
        tuple(said(best)),
        {} if best.choice is None else {"": lambda: scenario_yaml(best, rehearsal)},
        lambda _: report(best, title),
        f"rehearsals: {rehearsal.rehearsals.counted}",
    )


def _row(each: CandidateResult) -> dict[str, Any]:
    return {
        "gpu": each.candidate.gpu,
        "tp": each.candidate.parallel.tp,
        "policy": each.candidate.policy,
        "status": each.status,
        "replicas": each.replicas,
        "usd_per_hour": each.usd_per_hour,
        "bound_usd_per_hour": each.bound_usd_per_hour,
        "is_calibrated": not each.uncalibrated,
        "reason": each.reason,
    }


def report(plan: CapacityPlan, title: str) -> Report:
    asked = (
        f"{title}: {describe(plan.targets)}. {plan.num_rehearsals} rehearsals, all on the same arrivals and lengths."
    )
    return Report("capacity", headline(plan), [Lines(list(sentences(plan)))], list(_body(plan)), [asked], title)


def _body(plan: CapacityPlan) -> Iterator[Block]:
    if any(result.points for result in plan.options):
        yield _picture(plan)
    if plan.choice:
        yield Section("The plan and the runners-up", [candidates_table(plan)])
    if plan.what_ifs:
        yield Section("What if", [what_ifs_table(plan)])
    if plan.choice:
        yield Lines([LEGEND], "quiet")
    yield Section("All candidates", [_all_candidates(plan)])


def _all_candidates(plan: CapacityPlan) -> Table:
    heads = ("GPU", "tp", "policy", "status", "replicas", "at least $/h", "rehearsals", "why")
    rows = [
        [
            result.candidate.gpu,
            str(result.candidate.parallel.tp),
            result.candidate.policy,
            result.status,
            or_dash(result.replicas),
            or_dash(result.bound_usd_per_hour, "${:,.2f}"),
            str(len(result.points)),
            result.reason,
        ]
        for result in plan.options
    ]
    return Table(heads, rows, words=("GPU", "policy", "status"), prose=("why",))


def _picture(plan: CapacityPlan) -> Section:
    gpus, tps = _gpus(plan), _tps(plan)
    legend = Legend(
        [(gpu, COLORS[i % len(COLORS)]) for i, gpu in enumerate(gpus)],
        [(f"tp {tp}", GLYPHS[i % len(GLYPHS)]) for i, tp in enumerate(tps)],
    )
    caption = (
        "A point is a rehearsal of so many replicas, a line one GPU with one tp and policy. Filled: every target"
        " is met. The star is the plan. Points to the left and up are better."
    )
    charts = [
        Chart("attainment", "SLO attainment", _chart(plan, "attainment")),
        Chart("goodput", "Goodput", _chart(plan, "goodput_rps")),
    ]
    blocks = [Lines([caption], "quiet"), legend, Charts(charts, wide=True)]
    return Section("What every candidate costs and reaches", blocks)


def _gpus(plan: CapacityPlan) -> list[str]:
    """The types, each with a colour."""
    return list(dict.fromkeys(result.candidate.gpu for result in plan.options))


def _tps(plan: CapacityPlan) -> list[int]:
    """The tensor parallel degrees, each with a shape."""
    return sorted({result.candidate.parallel.tp for result in plan.options})


def _chart(plan: CapacityPlan, key: str) -> dict[str, Any]:
    gpus, tps, lines = _gpus(plan), _tps(plan), []
    for result in plan.options:
        if result.points:
            color = COLORS[gpus.index(result.candidate.gpu) % len(COLORS)]
            symbol = SYMBOLS[tps.index(result.candidate.parallel.tp) % len(SYMBOLS)]
            lines.append(_line(result, key, color, symbol))
    target = plan.targets.attainment
    shapes = [limit("y", 100 * target)] if key == "attainment" and target is not None else []
    if plan.choice is not None:
        chosen = [point for point in plan.choice.points if point.replicas == plan.choice.replicas]
        lines += [
            star("the plan", plan.choice.usd_per_hour, _y(point, key), _hover(plan.choice, point)) for point in chosen
        ]
    axes = _layout(key)
    axes["xaxis"] |= {"range": [0, _widest_usd(plan)]}
    return {"data": lines, "layout": axes | {"shapes": shapes}}


def _widest_usd(plan: CapacityPlan) -> float:
    """The end of the cost axis: beyond the plan and the runners-up; without a plan, beyond all rehearsals."""
    costs = [each.usd_per_hour for each in (plan.choice, *plan.runners_up) if each and each.usd_per_hour is not None]
    rehearsed = [p.replicas * each.candidate.usd_per_replica_hour for each in plan.options for p in each.points]
    return 1.25 * max(costs or rehearsed or [1.0])


def _line(result: CandidateResult, key: str, color: str, symbol: str) -> dict[str, Any]:
    group = f"{result.candidate.gpu} tp {result.candidate.parallel.tp}"
    usd = result.candidate.usd_per_replica_hour
    at = [(point.replicas * usd, _y(point, key), _hover(result, point)) for point in result.points]
    symbols = [f"{symbol}-open" if point.misses else symbol for point in result.points]
    marker = {"symbol": symbols, "size": 9, "color": color, "line": {"width": 1.6, "color": color}}
    return points(group, at, marker, mode="lines+markers", line={"color": color, "width": 1.2})


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
