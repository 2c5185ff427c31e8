"""A plan of scaling as a value that the command prints and the API returns; its page has the frontier."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from headway.planning.planned import Planned
from headway.planning.rehearsals import Resources, Source
from headway.planning.scaling.plan import (
    Assemble,
    ScalerResult,
    ScalingOptions,
    ScalingPlan,
    StartUpPlan,
    is_on_frontier,
    plan,
    scenario_yaml,
)
from headway.report.blocks import Chart, Facts, Lines, Report, Said, Section, Table
from headway.report.charts import layout, limit, points, star
from headway.report.page import COLORS, INK

HEADS = ("scaler", "setting", "", "GPU-hours", "late", "starts")
_CAPTION = (
    "A point is one setting of one scaler over the whole demand; a larger one is on the frontier of all. "
    "The star is chosen. Left and down is better."
)


def planned(source: Source, options: ScalingOptions, assemble: Assemble, resources: Resources) -> Planned:
    """The scaler with the fewest GPU-hours: `headway plan scaling`. Raises HeadwayError like `plan`.

    The plan has one file per start time.
    """
    document, _, base_dir = source
    answer = plan(document, options, assemble, resources)
    files = {
        name: partial(scenario_yaml, each, document, base_dir)
        for each, name in zip(answer.plans, file_names(answer), strict=True)
        if each.chosen is not None
    }
    return Planned(
        answer,
        answer.is_met,
        tuple(_row(plan, each) for plan in answer.plans for each in plan.results),
        tuple(line for each in answer.plans for line in (headline(each, answer.max_late), *sentences(each))),
        tuple(_said(answer)),
        files,
        lambda _: report(answer),
        f"simulations: {answer.num_simulated} simulated, {answer.num_found} found in the cache",
    )


def file_names(answer: ScalingPlan) -> list[str]:
    """The file name for each start time; "" for a single file, which the user names."""
    return ["" if len(answer.plans) == 1 else f"startup-{each.startup_s:g}s.yaml" for each in answer.plans]


def _row(plan: StartUpPlan, each: ScalerResult) -> dict[str, Any]:
    return {
        "startup_s": plan.startup_s,
        "scaler": each.family,
        "setting": each.setting,
        "gpu_hours": each.gpu_hours,
        "late": each.late,
        "starts": each.starts,
        "on_frontier": each.on_frontier,
        "planned": plan.chosen is not None and each is plan.results[plan.chosen],
    }


def _said(answer: ScalingPlan) -> Iterator[Said]:
    for each in answer.plans:
        yield headline(each, answer.max_late)
        yield from sentences(each)
        yield _scalers(each)
        yield ""
    yield from answer.notes


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
    """The statements of the plan beyond the choice."""
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


def _scalers(answer: StartUpPlan) -> Table:
    listed = sorted(enumerate(answer.results), key=lambda pair: pair[1].gpu_hours)
    marked = [("chosen" if i == answer.chosen else "frontier" if each.on_frontier else "", each) for i, each in listed]
    marked += [("knows the demand", each) for each in answer.clairvoyant]
    settings: dict[tuple[str, ...], list[str]] = {}
    for mark, each in marked:
        figures = (f"{each.gpu_hours:,.1f}", f"{each.late:.2%}", f"{each.starts:,.0f}")
        settings.setdefault((each.family, mark, *figures), []).append(each.setting)
    rows = [[family, _joined(alike), mark, *figures] for (family, mark, *figures), alike in settings.items()]
    return Table(HEADS, rows, words=HEADS[:3])


def _joined(settings: Sequence[str]) -> str:
    """Settings with the same results: "KV use 0.4; 0.55"."""
    first = settings[0].rpartition(" ")[0] + " "
    return "; ".join([settings[0], *(each.removeprefix(first) for each in settings[1:])])


def report(answer: ScalingPlan) -> Report:
    shown = {
        "requests": f"{answer.num_requests:,}",
        "seeds": ", ".join(map(str, answer.seeds)),
        "may be late": f"{100 * answer.max_late:g}%",
    }
    sections = []
    for i, each in enumerate(answer.plans):
        name = f"GPU-hours against lateness, {title(each)}"
        chart = Chart(f"frontier{i}", name, _picture(each, answer.max_late), _CAPTION)
        sections.append(Section(headline(each, answer.max_late), [Lines(sentences(each)), chart, _scalers(each)]))
    return Report("scaling", f"{answer.name}: which scaler", [Facts(shown)], sections, answer.notes)


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
        traces.append(star("chosen", best.gpu_hours, 100 * best.late, _hover(best)))
    shapes = [limit("y", 100 * max_late)]
    if answer.bound_gpu_hours is not None:
        at = answer.bound_gpu_hours
        shapes.append(limit("x", at, INK, "dash"))
        named = {"type": "scatter", "mode": "lines", "name": "proven bound (95% in time)", "x": [at, at], "y": [0, 0]}
        traces.append(named | {"line": {"color": INK, "width": 1, "dash": "dash"}, "hoverinfo": "skip"})
    return {
        "data": traces,
        "layout": layout(
            "GPU-hours", "requests late (%)", 460, showlegend=True, shapes=shapes, xaxis={"rangemode": "tozero"}
        ),
    }


def _points(name: str, results: Sequence[ScalerResult], color: str, dash: str = "solid") -> list[dict[str, Any]]:
    """All settings of a scaler, and a line through its undominated ones."""
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
    at = [(each.gpu_hours, 100 * each.late, _hover(each)) for each in results]
    marker = {"color": color, "size": [11 if each.on_frontier else 7 for each in results]}
    return [line, points(name, at, marker, legendgroup=name)]


def _hover(each: ScalerResult) -> str:
    return f"{each.family}, {each.setting}<br>{each.gpu_hours:,.1f} GPU-hours, {each.late:.2%} late"
