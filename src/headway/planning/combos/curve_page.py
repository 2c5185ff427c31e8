"""A plan for demand that moves, as rows of a table and as an HTML page."""

from __future__ import annotations

from html import escape

from headway.planning.combos.curve import CurveAnswer, Kept, Sizing
from headway.planning.combos.page import millions
from headway.report.charts import layout
from headway.report.page import COLORS, DRAW, chart, document, facts, literal, table

HEADS = ("", "k", "quantile", "planned/s", "fleet at first", "in time", "other arrivals", "$/h", "tokens/$")
_CAPTION = "A point is one size of one way, over the whole curve. Filled: planned."


def headline(answer: CurveAnswer) -> str:
    best = answer.chosen
    if best is None:
        return "no size keeps enough requests in time"
    kept = best.other or best.run
    how = f"a static plan for the {best.quantile:.0%} quantile" if best.quantile is not None else "scaled combos"
    return f"planned: {how}, k {best.k:.3g}: ${kept.usd_per_hour:,.2f} an hour, {kept.attainment:.1%} in time"


def rows(answer: CurveAnswer) -> list[list[str]]:
    return [_row(each, each is answer.chosen) for each in answer.sizings]


def _row(each: Sizing, is_chosen: bool) -> list[str]:
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


def curve_page(answer: CurveAnswer, command: str) -> str:
    shown = {
        "mean": f"{answer.mean_rps:.3g} requests/s",
        "highest": f"{answer.peak_rps:.3g} requests/s over {answer.window_s:.3g} s",
        "rehearsed": f"{answer.sizings[0].run.num_requests:,} requests each" if answer.sizings else "nothing",
    }
    cells = ["".join(f'<td class="name">{escape(cell)}</td>' for cell in row) for row in rows(answer)]
    body = f"""<header>
<div class="brand">Headway · combos for a demand curve</div>
<h1>{escape(f"{answer.service}: {headline(answer)}")}</h1>
{facts(shown)}
</header>
<section><h2>What every size keeps and costs</h2>{chart("sizes", answer.service, _CAPTION)}</section>
<section><h2>Sizes</h2>{table(HEADS, len(HEADS), cells)}</section>
<footer><p class="quiet">Command: <code>{escape(command)}</code></p></footer>"""
    return document(
        "combos for a demand curve", body, f"const charts = {literal({'sizes': _picture(answer)})};\n{DRAW}"
    )


def _picture(answer: CurveAnswer) -> dict[str, object]:
    traces = []
    for i, way in enumerate(dict.fromkeys(each.way for each in answer.sizings)):
        some = [each for each in answer.sizings if each.way == way]
        kept = [each.other or each.run for each in some]
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": way,
                "x": [each.usd_per_hour for each in kept],
                "y": [100 * each.attainment for each in kept],
                "text": [f"k {each.k:.3g}" for each in some],
                "hovertemplate": "%{text}<br>$%{x:.2f}/h, %{y:.1f}% in time<extra></extra>",
                "marker": {
                    "color": COLORS[i % len(COLORS)],
                    "size": 10,
                    "symbol": ["circle" if each is answer.chosen else "circle-open" for each in some],
                },
            }
        )
    return {"data": traces, "layout": layout("$/h", "requests in time (%)", 380, showlegend=True)}
