"""A capacity plan as sentences and tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headway.planning.capacity.problem import (
    SLO_NAMES,
    SLOS,
    CandidateResult,
    CapacityPlan,
    LikelyTarget,
    PolicyResult,
    RehearsalMetrics,
    Targets,
)
from headway.report.blocks import Heading, Said, Table, or_dash, sentence
from headway.report.model_error import so_much_longer
from headway.report.table import dollars, percent, seconds, short_number

NAMES = SLO_NAMES | {"attainment": "SLO met"}
NOT_CALIBRATED = "not calibrated"
"""Marks candidates whose step times were not measured."""

LEGEND = (
    "SLO met: requests within their own SLOs (of tier or trace), else within the targets. goodput/s: the same per"
    " second until the last answer ends."
)
"""Explanation of the columns. Goodput counts until the last answer, because a short rehearsal ends well after its last
arrival."""


def shown(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    return percent(value) if name == "attainment" else seconds(value)


def describe(targets: Targets) -> str:
    """Targets as in "TTFT p99 <= 2 s, SLO met >= 99.0%"."""
    signs = {"attainment": "≥"}
    limits = {name: value for name in SLOS if (value := getattr(targets, name)) is not None}
    return ", ".join(f"{NAMES[name]} {signs.get(name, '≤')} {shown(name, value)}" for name, value in limits.items())


def headline(plan: CapacityPlan) -> str:
    if plan.choice is None:
        return f"No candidate meets {describe(plan.targets)}."
    chosen, replicas = plan.choice.candidate, plan.choice.replicas
    gpus = (replicas or 0) * chosen.parallel.num_gpus
    each = f", {chosen.parallel.num_gpus} GPUs each" if chosen.parallel.num_gpus > 1 else ""
    number = f"{replicas} replica{'s' if replicas != 1 else ''} on {chosen.gpu}{each}"
    price = dollars(plan.objective_usd_per_hour or 0.0)
    return f"{number}, {chosen.policy}: {gpus} GPU{'s' if gpus != 1 else ''}, {price} an hour."


def sentences(plan: CapacityPlan) -> Iterator[str]:
    if plan.choice is None:
        yield from (
            f"{NAMES[each.slo]}: the best is {shown(each.slo, each.best)} ({each.where}); asked for"
            f" {shown(each.slo, each.target)}."
            for each in plan.reach
        )
    else:
        yield f"Meets {describe(plan.targets)}. {_bound(plan)}"
        if plan.binds and plan.one_less:
            missed = (f"{NAMES[name]} {shown(name, getattr(plan.one_less, name))}" for name in plan.binds)
            yield f"With one replica less it misses: {', '.join(missed)}."
        else:
            yield "It is the smallest number allowed, so nothing binds."
        over = "" if plan.longer is None else f" over {plan.longer.measured.num_requests:,} requests"
        yield from (_likely(each, over) for each in plan.likely)
        yield from _if_longest(plan)
        if plan.measured is not None and plan.measured.kwh_per_day is not None:
            yield f"Its GPUs take {short_number(plan.measured.kwh_per_day)} kWh a day under this load."
        yield from _policies(plan)
        if plan.longer is not None and not plan.longer.misses:
            yield f"It also meets them over {plan.longer.measured.num_requests:,} requests."
        if plan.monotone is False:
            verdicts = _verdicts(plan.choice)
            yield f"More replicas did not always do better, so all cheaper numbers were rehearsed ({verdicts})."
    yield from map(sentence, plan.notes)


def _likely(each: LikelyTarget, over: str) -> str:
    """A sentence such as "TPOT p99 ≤ 50 ms is 9 of 10 likely: predicted 41 ms, with the error of 13 measured runs 36 to
    47 ms."."""
    tenths = int(10 * each.chance + 1e-9)
    chance = f"{tenths} of 10" if tenths else "less than 1 of 10"
    band = f"{seconds(each.band.low)} to {seconds(each.band.high)}"
    return (
        f"{NAMES[each.slo]} ≤ {seconds(each.target_s)} is {chance} likely: predicted {seconds(each.predicted_s)}{over},"
        f" with the error of {each.band.num_runs} measured runs {band}."
    )


def _if_longest(plan: CapacityPlan) -> Iterator[str]:
    """The remaining attainment if latencies are as long as the errors of measured runs allow."""
    measured = plan.measured if plan.longer is None else plan.longer.measured
    if plan.targets.attainment is not None and measured is not None and measured.attainment_if_longest is not None:
        left = percent(measured.attainment_if_longest)
        yield f"{so_much_longer(measured.longest)}, {left} of the requests would meet their SLOs."


def _bound(plan: CapacityPlan) -> str:
    """A sentence on the lower bound of the plan's cost."""
    if not plan.num_assumed:
        return f"No candidate can cost less than {dollars(plan.objective_usd_per_hour or 0.0)}."
    fleets = f"{plan.num_assumed} cheaper fleets were" if plan.num_assumed > 1 else "One cheaper fleet was"
    least = dollars(plan.bound_usd_per_hour or 0.0)
    return f"{fleets} not rehearsed ({least} and more): larger ones miss a target, and none is taken to do better."


def _verdicts(choice: CandidateResult) -> str:
    """A text with the verdict on each rehearsed number of replicas."""
    meet, miss = (
        ", ".join(str(point.replicas) for point in choice.points if bool(point.misses) == misses)
        for misses in (False, True)
    )
    return f"replicas that meet all targets: {meet}; that do not: {miss or 'none'}"


def _policies(plan: CapacityPlan) -> Iterator[str]:
    """The comparison of policies on the plan's replicas."""
    if not plan.policies:
        return
    names = [name for name in SLOS if getattr(plan.targets, name) is not None]

    def summary(each: PolicyResult) -> str:
        values = ", ".join(f"{NAMES[name]} {_latency(name, each.measured)}" for name in names)
        return f"{each.policy} ({values}{'; misses' if each.misses else ''})"

    tied = [each for each in plan.policies if each.ties]
    others = "; ".join(summary(each) for each in plan.policies if not each.ties)
    if len(tied) > 1:
        rest = f" Worse: {others}." if others else ""
        yield f"At this cost, these policies tie, and the first is taken: {'; '.join(map(summary, tied))}.{rest}"
    else:
        yield f"At this cost, {summary(tied[0])} is best of the policies compared; then {others}."


def _values(measured: RehearsalMetrics | None, names: Sequence[str]) -> list[str]:
    if measured is None:
        return ["-"] * (len(names) + 1)
    return [*(_latency(name, measured) for name in names), or_dash(measured.goodput_rps, short_number)]


def _latency(name: str, measured: RehearsalMetrics) -> str:
    value = getattr(measured, name)
    return "never" if value is None and name != "attainment" else shown(name, value)


def _shown_slos(plan: CapacityPlan) -> list[str]:
    """SLOs with a column. Attainment is shown only if requests have SLOs."""
    has = plan.measured is None or plan.measured.attainment is not None
    return [name for name in SLOS if name != "attainment" or has]


def candidates_table(plan: CapacityPlan) -> Table:
    """The plan and the cheapest of each other GPU; without a plan, why each GPU and tp is ruled out."""
    if plan.choice is None:
        firsts: dict[tuple[str, int], CandidateResult] = {}
        for each in plan.options:
            firsts.setdefault((each.candidate.gpu, each.candidate.parallel.tp), each)
        reasons = [[gpu, str(tp), each.candidate.policy, each.reason] for (gpu, tp), each in firsts.items()]
        return Table(("GPU", "tp", "policy", ""), reasons, words=("GPU", "policy"), prose=("",))
    names = _shown_slos(plan)
    heads = ["GPU", "tp", "policy", "replicas", "GPUs", "$/h", "kWh/day",
             *(NAMES[name] for name in names), "goodput/s", ""]  # fmt: skip
    rows = []
    for result in (plan.choice, *plan.runners_up):
        number = result.replicas
        planned = next((point.measured for point in result.points if point.replicas == number), None)
        notes = ["the plan" if result is plan.choice else result.reason]
        notes += [f"{NOT_CALIBRATED}: {', '.join(result.uncalibrated)}"] if result.uncalibrated else []
        note = "; ".join(filter(None, notes))
        rows.append(
            [
                result.candidate.gpu,
                str(result.candidate.parallel.tp),
                result.candidate.policy,
                or_dash(number),
                or_dash(number and number * result.candidate.parallel.num_gpus),
                or_dash(result.usd_per_hour, dollars),
                or_dash(planned.kwh_per_day if planned else None, short_number),
                *_values(planned, names),
                note,
            ]
        )
    return Table(heads, rows, words=("GPU", "policy"), prose=("",), marks={(0, len(heads) - 1): "best"})


def what_ifs_table(plan: CapacityPlan) -> Table:
    names = _shown_slos(plan)
    heads = ["what if", *(NAMES[name] for name in names), "goodput/s", "still met", "replicas needed", "$/h then"]
    rows = []
    for each in plan.what_ifs:
        needed = "more than were tried" if each.replicas_needed is None else str(each.replicas_needed)
        cost = or_dash(each.usd_per_hour_needed, dollars)
        met = "no: " + ", ".join(NAMES[name] for name in each.misses) if each.misses else "yes"
        rows.append([each.situation.label, *_values(each.measured, names), met, needed, cost])
    return Table(heads, rows, words=("what if", "still met"))


def said(plan: CapacityPlan) -> Iterator[Said]:
    """The plan for a console."""
    yield Heading(headline(plan))
    yield from sentences(plan)
    yield ""
    yield candidates_table(plan)
    if plan.what_ifs:
        yield ""
        yield what_ifs_table(plan)
    if plan.choice is not None:
        yield ""
        yield LEGEND
