"""A plan of GPU combos as a value that the command prints and the API returns, with its page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from headway.planning.combos.plan import ComboAnswer, ComboOptions, plan, scenario_yaml
from headway.planning.combos.problem import ComboCandidate, ComboPlan, Selection, ServiceRehearsal
from headway.planning.combos.rehearsal import ServiceScenario
from headway.planning.planned import Planned
from headway.planning.rehearsals import Resources
from headway.report.blocks import Chart, Facts, Lines, Report, Said, Section, Table, or_dash
from headway.report.charts import layout, points
from headway.report.page import COLORS

HEADS = ("service", "combo", "planned", "$/h", "goodput/s", "tokens/$ served", "Eq. 15", "step times", "not calibrated")
RUN_HEADS = ("service", "router", "", "requests", "in time", "95%", "growth of waits, s/s")
MOST_SHOWN = 20
"""Candidates shown on the console besides the plan's."""
_CAPTION = "A point is one combo. Filled: in the plan. Points to the left and up serve more for less."


def planned(services: Sequence[ServiceScenario], options: ComboOptions, resources: Resources) -> Planned:
    """Which GPUs prefill and which decode, and the number of combos: `headway plan combos`. Raises HeadwayError like
    `plan`.

    The plan has one file per service.
    """
    answer = plan(services, options, resources)
    served = {chosen.service for chosen in answer.plan.combos}
    files = {
        "" if len(services) == 1 else f"{each.service.name}.yaml": partial(scenario_yaml, answer, each)
        for each in services
        if each.service.name in served
    }
    return Planned(
        answer,
        answer.plan.status != "short",
        tuple(_row(answer.plan, each) for each in answer.selection.candidates),
        (f"{options.objective}: {_summary(answer.plan)}", *map(kept, answer.rehearsals.values())),
        tuple(_said(answer, options)),
        files,
        lambda _: report(answer),
        f"profiles: {answer.num_simulated} simulations, {answer.num_found} combos found in the cache",
    )


def _row(plan: ComboPlan, each: ComboCandidate) -> dict[str, Any]:
    return {
        "combo": each.combo.label,
        "usd_per_hour": each.combo.usd_per_hour,
        "goodput_rps": each.goodput_rps,
        "tokens_per_usd": each.tokens_per_usd,
        "is_calibrated": each.calibrated,
        "planned": plan.counts.get((each.service, each.combo.label), 0),
    }


def _said(answer: ComboAnswer, options: ComboOptions) -> Iterator[Said]:
    plan = answer.plan
    yield _candidates(plan, answer.selection, MOST_SHOWN)
    yield ""
    yield f"{options.objective}: {_summary(plan)}"
    yield from map(kept, answer.rehearsals.values())
    yield from (f"{name}: {_summary(other)}" for name, other in answer.others.items())
    yield from (f"binds: {bind.kind} {bind.name}, {bind.used:g} of {bind.limit:g}" for bind in plan.binding)
    yield from caveats(plan)
    yield from filter(None, (plan.why, *plan.notes))


def _summary(deployment: ComboPlan) -> str:
    combos = ", ".join(f"{each.count} {each.combo.label}" for each in deployment.combos) or "nothing"
    gap = "" if deployment.gap is None else f", gap {deployment.gap:.2%}"
    served = ", ".join(
        f"{each.service} {each.goodput_rps:.3g} of {each.demand_rps:.3g}/s" for each in deployment.services
    )
    price = f"${deployment.usd_per_hour:.2f}/h, {millions(deployment.tokens_per_usd)} tokens/$"
    return f"{deployment.status}{gap}: {combos}; {price}; {served}"


def report(answer: ComboAnswer) -> Report:
    plan, selection, rehearsals = answer.plan, answer.selection, answer.rehearsals
    services = list(dict.fromkeys(each.service for each in selection.candidates))
    charts = [Chart(f"service-{i}", name, _picture(plan, selection, name), _CAPTION) for i, name in enumerate(services)]
    words = [line for line in (*map(kept, rehearsals.values()), plan.why, *plan.notes) if line]
    sections = [
        Section("What every candidate costs and serves", charts),
        Section("The plan rehearsed, by router", [_runs(rehearsals)]),
        Section("Candidates", [_candidates(plan, selection)]),
        Section("Other objectives", [_others(answer.others)]),
        Section("Left out", [_left_out(selection)]),
    ]
    head = [Facts(_plan_facts(plan)), Lines(words), Lines(caveats(plan), "note")]
    return Report("combos", headline(plan), head, sections)


def headline(plan: ComboPlan) -> str:
    if not plan.combos:
        return "No combo serves anything in time"
    combos = ", ".join(f"{each.count} x {each.combo.label}" for each in plan.combos)
    return f"{combos}: ${plan.usd_per_hour:,.2f} an hour"


def kept(found: ServiceRehearsal) -> str:
    """One sentence: how a service's part of the plan performs over a long run, and how the routers compare."""
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


def _runs(rehearsals: Mapping[str, ServiceRehearsal]) -> Table:
    """Each router's run; without a comparison, the planned router's longest run."""
    rows = []
    for found in rehearsals.values():
        runs = [(each.routing, each.run, each.is_met, each.ties) for each in found.routers]
        for routing, run, is_met, ties in runs or [(found.routing, found.runs[-1], found.is_met, False)]:
            verdict = "planned" if routing == found.routing else "ties" if ties else "worse" if is_met else "misses"
            interval = f"{run.attainment_low:.1%} to {run.attainment_high:.1%}"
            numbers = [f"{run.num_requests:,}", f"{run.attainment:.1%}", interval, f"{run.wait_growth:.4f}"]
            rows.append([found.service, routing, verdict, *numbers])
    return Table(RUN_HEADS, rows, words=RUN_HEADS[:3])


def _candidates(plan: ComboPlan, selection: Selection, most: int | None = None) -> Table:
    """The first `most` candidates, and the plan's."""
    rows = []
    for i, each in enumerate(selection.candidates):
        count = plan.counts.get((each.service, each.combo.label), 0)
        if most is None or i < most or count:
            efficiencies = (each.tokens_per_usd, each.closed_form_tokens_per_usd, each.step_tokens_per_usd)
            numbers = [f"{each.combo.usd_per_hour:.2f}", f"{each.goodput_rps:.3g}", *map(millions, efficiencies)]
            missing = "; ".join(each.uncalibrated)
            rows.append([each.service, each.combo.label, str(count or ""), *numbers, missing])
    return Table(HEADS, rows, words=HEADS[:3], prose=HEADS[-1:])


def _others(others: Mapping[str, ComboPlan]) -> Table:
    heads = ("objective", "combos", "$/h", "tokens/$")
    rows = [
        [name, headline(other), f"{other.usd_per_hour:.2f}", millions(other.tokens_per_usd)]
        for name, other in others.items()
    ]
    return Table(heads, rows, words=heads[:2])


def _left_out(selection: Selection) -> Table:
    heads = ("service", "what", "why")
    rows = [[service, each.what, each.reason] for service, found in selection.rejected.items() for each in found]
    return Table(heads, rows, words=heads)


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
        marker = {
            "color": COLORS[i % len(COLORS)],
            "size": [14 if chosen else 8 for chosen in planned],
            "symbol": ["circle" if chosen else "circle-open" for chosen in planned],
        }
        names = (each.combo.label + ("" if each.calibrated else ", not calibrated") for each in here)
        at = [(each.combo.usd_per_hour, each.goodput_rps, name) for each, name in zip(here, names, strict=True)]
        hover = "%{text}<br>$%{x:.2f}/h, %{y:.3g} requests/s<extra></extra>"
        traces.append(points(types, at, marker, hover))
    return {"data": traces, "layout": layout("$/h", "goodput (requests/s)", 380, showlegend=True)}


def millions(value: float | None) -> str:
    return or_dash(value and value / 1e6, "{:.3g} M")
