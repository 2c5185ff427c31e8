"""A fleet plan in three sentences, and as tables for a console and a page."""

from __future__ import annotations

from collections.abc import Iterator
from math import floor

from headway.metrics.seeds import Estimate
from headway.planning.fleet.allocation import Parts, by_model
from headway.planning.fleet.problem import WORTH, FleetPlan, FleetPoint, FleetRun, SizedOption, SplitVerdict
from headway.report.blocks import Heading, Said, Table, or_dash, sentence
from headway.report.model_error import so_much_longer
from headway.report.table import dollars, seconds, short_number

NAMES = {"ttft_s": "TTFT", "tpot_s": "TPOT", "e2e_s": "E2E"}
NOT_CALIBRATED = "not calibrated"
POINT_HEADS = ("fleet", "router", "GPUs", "$/h", "kWh/day", "in time", "95% over seeds", "TTFT p99", "TPOT p99", "")
OPTION_HEADS = ("model", "GPUs of one unit", "units needed", "$/h", "in time", "")
MODEL_HEADS = ("model", "requests", "GPUs", "$/h", "in time", "over seeds")


def share(value: float) -> str:
    """A share such as "99.9%", rounded down, because 99.97% is not all; with one more digit above 99.9%."""
    digits = 2 if 0.999 < value < 1 else 1
    return f"{floor(value * 100 * 10**digits + 1e-6) / 10**digits:.{digits}f}%".replace(".0%", "%")


def sentences(plan: FleetPlan) -> tuple[str, ...]:
    """What to run, whether to separate prefill from decode, and whether to use tiers."""
    return _fleet(plan), _split(plan), _tiers(plan)


def if_longest(run: FleetRun) -> Iterator[str]:
    """The remaining attainment if latencies are as long as the errors of measured runs allow."""
    if run.by_model_if_longest:
        worst = share(min(run.by_model_if_longest.values()))
        of = "at least {} of each model's" if len(run.by_model_if_longest) > 1 else "{} of the"
        yield f"{so_much_longer(run.longest)}, {of.format(worst)} requests would be in time"


def short(plan: FleetPlan) -> tuple[str, ...]:
    if plan.unservable:
        reasons = "; ".join(f"{model}: {reason}" for model, reason in plan.unservable.items())
        return (f"No fleet keeps {share(plan.target)} of each model's requests in time: {reasons}.",)
    return (f"The GPUs at hand do not keep {share(plan.target)} of each model's requests in time: {plan.why}.",)


def _fleet(plan: FleetPlan) -> str:
    served = "; ".join(f"{model} on {_gpus(own)}" for model, own in by_model(plan.parts).items())
    number, price = sum(plan.gpus.values()), dollars(plan.usd_per_hour or 0.0)
    best = plan.points[0]
    attained = f"{share(best.runs[0].worst)} of {'each' if len(plan.models) > 1 else 'the'} model's requests"
    at_least = "at least " if len(plan.models) > 1 and best.runs[0].worst < 1 else ""
    drawn = f" ({_interval(best.interval)} over {len(best.runs)} seeds)" if best.interval is not None else ""
    gpus, keep = (f"{number} GPUs", "keep") if number != 1 else ("1 GPU", "keeps")
    kwh = best.runs[0].kwh_per_day
    power = "" if kwh is None else f" and {short_number(kwh)} kWh a day"
    return (
        f"Serve {served}, with the router {best.router}: {gpus} for {price} an hour{power} {keep} {at_least}{attained}"
        f" within {describe(plan.slo)}{drawn}."
    )


def _gpus(parts: Parts) -> str:
    return " and ".join(part.label for part in parts)


def describe(slo: dict[str, float]) -> str:
    """SLOs as in "TTFT 2 s, TPOT 50 ms"."""
    return ", ".join(f"{NAMES[key]} {seconds(value)}" for key, value in slo.items()) or "their own SLOs"


def _split(plan: FleetPlan) -> str:
    verdict = plan.split
    together, apart = (dollars(each or 0.0) for each in (verdict.usd_per_hour_together, verdict.usd_per_hour_split))
    what = "Separate prefill and decode replicas"
    if verdict.status == "worth it" and verdict.usd_per_hour_together is None:
        return f"{what} are worth it: without them the GPUs at hand are not enough."
    if verdict.status == "worth it":
        return f"{what} are worth it: without them the fleet costs {together} an hour."
    if verdict.status == "not worth it":
        cost = f"as much, {apart} an hour" if apart == together else f"{apart} an hour{_saving(verdict)}"
        return f"{what} are not worth it: the cheapest fleet that has them costs {cost}."
    if verdict.status == "impossible":
        return f"{what} are not worth it: no such fleet of these GPUs keeps enough requests in time."
    return f"{what} were not considered."


def _saving(verdict: SplitVerdict) -> str:
    """Why a cheaper fleet was not chosen; empty for a fleet that costs at least as much."""
    apart, together = verdict.usd_per_hour_split or 0.0, verdict.usd_per_hour_together or 0.0
    if apart >= together:
        return ""
    if not verdict.is_met:
        return " and keeps too few requests in time"
    return f", which saves {1 - apart / together:.2%}, and less than {WORTH:.0%} is not worth two kinds of replicas"


def _tiers(plan: FleetPlan) -> str:
    verdict = plan.tiers
    if verdict.status == "one class" or verdict.gain is None:
        return "Tiers of service are not needed: all requests are of one class."
    low, high = (f"{100 * each:+.1f}" for each in (verdict.gain.low, verdict.gain.high))
    change = f"changes the share of requests in time by {low} to {high} points (95%)"
    if verdict.gain.low == verdict.gain.high == 0:
        change = "changes nothing"
    if verdict.status == "worth it":
        return f"Serve the {verdict.num_tiers} tiers of the requests differently: that {change}."
    return f"Do not serve the {verdict.num_classes} tiers of the requests differently: that {change}."


def _interval(each: Estimate | None) -> str:
    if each is None:
        return "-"
    low, high = share(each.low), share(each.high)
    return low if low == high else f"{low} to {high}"


def point_rows(plan: FleetPlan) -> list[list[str]]:
    """One row for each completely rehearsed fleet, the plan first, then by price."""
    first, *rest = plan.points
    return [_point(each, plan.target) for each in (first, *sorted(rest, key=lambda each: each.usd_per_hour))]


def _point(each: FleetPoint, target: float) -> list[str]:
    run = each.runs[0]
    note = "" if each.is_met else f"below {share(target)}"
    latencies = ["never" if value is None else seconds(value) for value in (run.ttft_p99_s, run.tpot_p99_s)]
    number = sum(sum(part.gpus.values()) for part in each.parts)
    return [
        each.label,
        each.router,
        str(number),
        dollars(each.usd_per_hour),
        or_dash(run.kwh_per_day, short_number),
        share(run.worst),
        _interval(each.interval),
        *latencies,
        note,
    ]


def option_rows(plan: FleetPlan) -> list[list[str]]:
    """One row for each model and kind of GPUs: the number of units that serve all of the model's requests alone, or a
    lower bound of it."""
    ordered = sorted(plan.options, key=lambda each: (each.model, each.usd_per_hour or float("inf")))
    return [_option(each) for each in ordered]


def _option(each: SizedOption) -> list[str]:
    notes = [each.reason] if each.least is None and each.reason else []
    notes += [f"{NOT_CALIBRATED}: {', '.join(each.uncalibrated)}"] if each.uncalibrated else []
    units, price = or_dash(each.fewest), or_dash(each.usd_per_hour, dollars)
    if each.at_least is not None:
        units, price = f"≥ {units}", f"≥ {price}"
    return [each.model, _unit(each), units, price, or_dash(each.attainment, share), "; ".join(notes)]


def _unit(each: SizedOption) -> str:
    """A text such as "1 x l40s", or "1 x l40s prefill, 3 x l40s decode"."""
    phases = (" prefill", " decode") if each.is_split else ("",)
    return ", ".join(f"{group.label}{phase}" for group, phase in zip(each.unit.groups, phases, strict=True))


def model_rows(plan: FleetPlan) -> list[list[str]]:
    """One row per model: requests, GPUs, price, attainment with the first seed, and its range over all seeds."""
    runs, rows = plan.points[0].runs, []
    for model, own in by_model(plan.parts).items():
        values = [run.by_model[model] for run in runs if model in run.by_model]
        spread = f"{share(min(values))} to {share(max(values))}"
        price = dollars(sum(part.usd_per_hour for part in own))
        rows.append([model, f"{plan.models[model]:,}", _gpus(own), price, share(values[0]), spread])
    return rows


def points_table(plan: FleetPlan) -> Table:
    return Table(POINT_HEADS, point_rows(plan), words=("fleet", "router"), prose=("",), marks={(0, 0): "best"})


def options_table(plan: FleetPlan) -> Table:
    return Table(OPTION_HEADS, option_rows(plan), words=("model", "GPUs of one unit"), prose=("",))


def said(plan: FleetPlan) -> Iterator[Said]:
    """The plan for a console: tables first, the answer last."""
    yield Heading("Each model alone")
    yield options_table(plan)
    if plan.points:
        yield ""
        yield Heading("Whole fleets")
        yield points_table(plan)
    for note in plan.notes:
        yield ""
        yield sentence(note)
    yield ""
    first, *rest = plan.sentences
    yield Heading(first)
    yield from rest
