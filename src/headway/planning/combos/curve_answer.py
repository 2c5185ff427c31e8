"""A plan of combos for a demand curve as a value that the command prints and the API returns, with its page."""

from __future__ import annotations

from typing import Any

from headway.planning.combos.answer import millions
from headway.planning.combos.curve import CurveAnswer, Kept, Sizing, curve_yaml, plan_curve
from headway.planning.combos.plan import ComboOptions
from headway.planning.combos.rehearsal import ServiceScenario
from headway.planning.planned import Planned
from headway.planning.rehearsals import Resources
from headway.report.blocks import Chart, Facts, Report, Section, Table
from headway.report.charts import layout, points
from headway.report.page import COLORS

HEADS = ("", "k", "quantile", "planned/s", "fleet at first", "in time", "other arrivals", "$/h", "tokens/$")
_CAPTION = "A point is one size of one way, over the whole curve. Filled: planned."


def planned(service: ServiceScenario, options: ComboOptions, resources: Resources) -> Planned:
    """The cheapest combos for a demand curve: `headway plan combos --curve`. Raises HeadwayError like `plan_curve`."""
    answer = plan_curve(service, options, resources)
    over = f"{answer.mean_rps:.3g} requests/s in the mean, {answer.peak_rps:.3g} at most over {answer.window_s:.3g} s"
    return Planned(
        answer,
        answer.chosen is not None,
        tuple(_row(each, each is answer.chosen) for each in answer.sizings),
        (headline(answer),),
        (f"{answer.service}: {over}", _sizes(answer), "", headline(answer)),
        {} if answer.chosen is None else {"": lambda: curve_yaml(answer, service, options)},
        lambda _: report(answer),
        f"profiles: {answer.num_simulated} simulations, {answer.num_found} found in the cache",
    )


def _row(each: Sizing, is_chosen: bool) -> dict[str, Any]:
    return {
        "way": each.way,
        "k": each.k,
        "quantile": each.quantile,
        "planned_rps": each.planned_rps,
        "fleet": ", ".join(f"{part.count} {part.combo.label}" for part in each.plan.combos),
        "attainment": each.run.attainment,
        "usd_per_hour": (each.other or each.run).usd_per_hour,
        "is_met": each.is_met,
        "planned": is_chosen,
    }


def report(answer: CurveAnswer) -> Report:
    shown = {
        "mean": f"{answer.mean_rps:.3g} requests/s",
        "highest": f"{answer.peak_rps:.3g} requests/s over {answer.window_s:.3g} s",
        "rehearsed": f"{answer.sizings[0].run.num_requests:,} requests each" if answer.sizings else "nothing",
    }
    chart = Chart("sizes", answer.service, _picture(answer), _CAPTION)
    sections = [Section("What every size keeps and costs", [chart]), Section("Sizes", [_sizes(answer)])]
    return Report("combos for a demand curve", f"{answer.service}: {headline(answer)}", [Facts(shown)], sections)


def headline(answer: CurveAnswer) -> str:
    best = answer.chosen
    if best is None:
        return "no size keeps enough requests in time"
    kept = best.other or best.run
    how = f"a static plan for the {best.quantile:.0%} quantile" if best.quantile is not None else "scaled combos"
    return f"planned: {how}, k {best.k:.3g}: ${kept.usd_per_hour:,.2f} an hour, {kept.attainment:.1%} in time"


def _sizes(answer: CurveAnswer) -> Table:
    return Table(HEADS, [_cells(each, each is answer.chosen) for each in answer.sizings], words=HEADS)


def _cells(each: Sizing, is_chosen: bool) -> list[str]:
    fleet = ", ".join(f"{planned.count} {planned.combo.label}" for planned in each.plan.combos)
    kept = each.other or each.run
    return [
        f"{each.way}{', planned' if is_chosen else ''}",
        f"{each.k:.3g}",
        "" if each.quantile is None else f"{each.quantile:.0%}",
        f"{each.planned_rps:.3g}",
        fleet,
        _in_time(each.run),
        "" if each.other is None else _in_time(each.other),
        f"{kept.usd_per_hour:.2f}",
        millions(kept.tokens_per_usd),
    ]


def _in_time(kept: Kept) -> str:
    half = (kept.attainment_high - kept.attainment_low) / 2
    return f"{kept.attainment:.1%} ± {100 * half:.1f}"


def _picture(answer: CurveAnswer) -> dict[str, object]:
    traces = []
    for i, way in enumerate(dict.fromkeys(each.way for each in answer.sizings)):
        some = [each for each in answer.sizings if each.way == way]
        kept = [(each.other or each.run, f"k {each.k:.3g}") for each in some]
        symbols = ["circle" if each is answer.chosen else "circle-open" for each in some]
        marker = {"color": COLORS[i % len(COLORS)], "size": 10, "symbol": symbols}
        at = [(each.usd_per_hour, 100 * each.attainment, text) for each, text in kept]
        hover = "%{text}<br>$%{x:.2f}/h, %{y:.1f}% in time<extra></extra>"
        traces.append(points(way, at, marker, hover, "lines+markers"))
    return {"data": traces, "layout": layout("$/h", "requests in time (%)", 380, showlegend=True)}
