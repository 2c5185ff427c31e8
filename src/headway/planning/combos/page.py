"""A plan of GPU combos as an HTML page: the plan, every candidate's cost and goodput, and rejected combos."""

from __future__ import annotations

from html import escape
from typing import Any

from headway.planning.combos.problem import ComboCandidate, ComboPlan, Selection, ServiceRehearsal
from headway.report.charts import layout
from headway.report.page import COLORS, DRAW, chart, document, facts, literal, table

HEADS = (
    "service",
    "combo",
    "planned",
    "$/h",
    "goodput/s",
    "tokens/$ served",
    "Eq. 15",
    "step times",
    "not calibrated",
)
RUN_HEADS = ("service", "router", "", "requests", "in time", "95%", "growth of waits, s/s")


def page(
    plan: ComboPlan,
    selection: Selection,
    others: dict[str, ComboPlan],
    rehearsals: dict[str, ServiceRehearsal],
    command: str,
) -> str:
    other_rows = [
        _cells((name, headline(other)), [f"{other.usd_per_hour:.2f}", millions(other.tokens_per_usd)])
        for name, other in others.items()
    ]
    rejected_rows = [
        _cells((service, each.what, each.reason), [])
        for service, rejected in selection.rejected.items()
        for each in rejected
    ]
    rehearsed = [_cells(words, numbers) for each in rehearsals.values() for words, numbers in _runs(each)]
    services = list(dict.fromkeys(each.service for each in selection.candidates))
    charts = {f"service-{i}": _picture(plan, selection, name) for i, name in enumerate(services)}
    drawn = "".join(chart(f"service-{i}", name, _CAPTION) for i, name in enumerate(services))
    body = f"""<header>
<div class="brand">Headway · combos</div>
<h1>{escape(headline(plan))}</h1>
{facts(_plan_facts(plan))}
{"".join(f"<p>{escape(line)}</p>" for line in (*map(kept, rehearsals.values()), plan.why, *plan.notes) if line)}
{"".join(f'<p class="note">{escape(line)}</p>' for line in caveats(plan))}
</header>
<section><h2>What every candidate costs and serves</h2>{drawn}</section>
<section><h2>The plan rehearsed, by router</h2>{table(RUN_HEADS, 3, rehearsed)}</section>
<section><h2>Candidates</h2>{table(HEADS, 3, _rows(plan, selection))}</section>
<section><h2>Other objectives</h2>{table(("objective", "combos", "$/h", "tokens/$"), 2, other_rows)}</section>
<section><h2>Left out</h2>{table(("service", "what", "why"), 3, rejected_rows)}</section>
<footer><p class="quiet">Command: <code>{escape(command)}</code></p></footer>"""
    return document("combos", body, f"const charts = {literal(charts)};\n{DRAW}")


_CAPTION = "A point is one combo. Filled: in the plan. Points to the left and up serve more for less."


def headline(plan: ComboPlan) -> str:
    if not plan.combos:
        return "No combo serves anything in time"
    combos = ", ".join(f"{each.count} x {each.combo.label}" for each in plan.combos)
    return f"{combos}: ${plan.usd_per_hour:,.2f} an hour"


def kept(found: ServiceRehearsal) -> str:
    """One sentence on a service's part of the plan in a long run, and on the comparison of routers."""
    run = found.runs[-1]
    what = f"{run.attainment:.1%} of {run.num_requests:,} requests are in time with {found.routing}"
    if not found.is_met:
        return f"{found.service}: only {what}{', and waits grow' if run.is_growing else ''}: the plan does not last"
    ties = [each.routing for each in found.routers if each.ties and each.routing != found.routing]
    worse = [f"{each.routing} {each.run.attainment:.1%}" for each in found.routers if not each.ties]
    compared = [f"{', '.join(ties)} {'tie' if len(ties) > 1 else 'ties'}"] if ties else []
    compared += [f"worse: {', '.join(worse)}"] if worse else []
    return f"{found.service}: {'; '.join((what, *compared))}"


def caveats(plan: ComboPlan) -> list[str]:
    """A line for each planned combo whose step times were not measured."""
    marked = {each.combo.label: each.uncalibrated for each in plan.combos if each.uncalibrated}
    return [
        f"step times of {label} are not calibrated ({'; '.join(missing)}): trust the order, not the numbers"
        for label, missing in marked.items()
    ]


def _runs(found: ServiceRehearsal) -> list[tuple[tuple[str, ...], list[str]]]:
    """Label and figures of each router's run; without a comparison, of the planned router's longest run."""
    runs = [(each.routing, each.run, each.is_met, each.ties) for each in found.routers]
    rows: list[tuple[tuple[str, ...], list[str]]] = []
    for routing, run, is_met, ties in runs or [(found.routing, found.runs[-1], found.is_met, False)]:
        verdict = "planned" if routing == found.routing else "ties" if ties else "worse" if is_met else "misses"
        interval = f"{run.attainment_low:.1%} to {run.attainment_high:.1%}"
        numbers = [f"{run.num_requests:,}", f"{run.attainment:.1%}", interval, f"{run.wait_growth:.4f}"]
        rows.append(((found.service, routing, verdict), numbers))
    return rows


def _plan_facts(plan: ComboPlan) -> dict[str, str]:
    shown = {"status": plan.status, "objective": plan.planner}
    if plan.objective is not None:
        shown["value, bound"] = f"{plan.objective:.4g}, {'-' if plan.bound is None else f'{plan.bound:.4g}'}"
    if plan.gap is not None:
        shown["gap"] = f"{plan.gap:.2%}"
    if plan.tokens_per_usd is not None:
        shown["tokens per dollar"] = f"{plan.tokens_per_usd / 1e6:.3g} M"
    shown["GPUs"] = ", ".join(f"{count} {gpu}" for gpu, count in plan.gpus.items()) or "none"
    for service in plan.services:
        shown[service.service] = f"{service.goodput_rps:.3g} of {service.demand_rps:.3g} requests/s"
    for each in plan.binding:
        shown[f"binds: {each.name}"] = f"{each.used:g} of {each.limit:g}"
    return shown


def _gpu_types(candidate: ComboCandidate) -> str:
    groups = [group.gpu for group in candidate.combo.groups]
    return " → ".join(groups) if len(groups) > 1 else f"{groups[0]} (both phases)"


def _picture(plan: ComboPlan, selection: Selection, service: str) -> dict[str, Any]:
    some = [each for each in selection.candidates if each.service == service]
    traces = []
    for i, types in enumerate(dict.fromkeys(map(_gpu_types, some))):
        here = [each for each in some if _gpu_types(each) == types]
        planned = [bool(plan.counts.get((service, each.combo.label))) for each in here]
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": types,
                "x": [each.combo.usd_per_hour for each in here],
                "y": [each.goodput_rps for each in here],
                "text": [each.combo.label + ("" if each.calibrated else ", not calibrated") for each in here],
                "hovertemplate": "%{text}<br>$%{x:.2f}/h, %{y:.3g} requests/s<extra></extra>",
                "marker": {
                    "color": COLORS[i % len(COLORS)],
                    "size": [14 if chosen else 8 for chosen in planned],
                    "symbol": ["circle" if chosen else "circle-open" for chosen in planned],
                },
            }
        )
    return {"data": traces, "layout": layout("$/h", "goodput (requests/s)", 380, showlegend=True)}


def _rows(plan: ComboPlan, selection: Selection) -> list[str]:
    rows = []
    for each in selection.candidates:
        count = plan.counts.get((each.service, each.combo.label), 0)
        words = (each.service, each.combo.label, str(count or ""))
        efficiencies = (each.tokens_per_usd, each.closed_form_tokens_per_usd, each.step_tokens_per_usd)
        numbers = [f"{each.combo.usd_per_hour:.2f}", f"{each.goodput_rps:.3g}", *map(millions, efficiencies)]
        rows.append(f'{_cells(words, numbers)}<td class="text">{escape("; ".join(each.uncalibrated))}</td>')
    return rows


def _cells(words: tuple[str, ...], numbers: list[str]) -> str:
    named = "".join(f'<td class="name">{escape(word)}</td>' for word in words)
    return named + "".join(f"<td>{escape(number)}</td>" for number in numbers)


def millions(value: float | None) -> str:
    return "-" if value is None else f"{value / 1e6:.3g} M"
