"""An answer of `headway advise` as sentences and tables."""

from __future__ import annotations

from collections.abc import Iterator

from headway.metrics.seeds import Estimate
from headway.planning.advise.judge import MOST_TIMES, Proposal
from headway.planning.advise.plan import Advice
from headway.planning.advise.twin import Residual
from headway.report.blocks import Said, Table
from headway.report.table import seconds

HEADS = ("", "change", "$ a month saved", "SLO attainment", "judged on", "worst")
TWIN_HEADS = ("latency", "day", "measured", "predicted", "9 of 10 within", "")
LEFT_OUT_HEADS = ("kind", "not tried", "why", "what would allow it")
NO_CHANGE = "No change is distinguishable from today's fleet"


def sentences(answer: Advice) -> list[str]:
    """Three sentences: whether the rehearsals are credible, what to change, and what was tried."""
    return [_on_twin(answer), _on_best(answer), _on_trials(answer)]


def _on_twin(answer: Advice) -> str:
    ran = f"{answer.num_requests:,} requests of {', '.join(answer.days)}"
    if not answer.twin.terms:
        return f"The {ran} cannot be compared with a rehearsal."
    off = answer.twin.off
    if off:
        named = ", ".join(
            f"{_name(each.key)} is {_signed(each.error)} (expected within {each.band:.0%})" for each in off
        )
        return f"Rehearsed as they ran, the {ran} do not come out: measured over predicted, {named}."
    close = ", ".join(f"{_name(each.key)} {_signed(each.error)}" for each in answer.twin.terms)
    found = "come out within the error of such predictions"
    return f"Rehearsed as they ran, the {ran} {found}: {close} (measured over predicted).{_on_step_times(answer)}"


def _on_step_times(answer: Advice) -> str:
    found = answer.step_times
    if found is None or not found.by:
        return ""
    return (
        f" Changes are rehearsed with {found.mean:.3f} times the model's step times ({found.low:.3f} to"
        f" {found.high:.3f}), fitted to the E2E latency of these days."
    )


def _on_best(answer: Advice) -> str:
    if answer.is_withheld:
        return (
            "Advice is withheld, as what would have been cannot be believed either; "
            "headway calibrate fits the step times to these records."
        )
    if (each := answer.compared) is not None:
        gained = f"gains {points(each.attainment)} of SLO attainment and saves {dollars(each.usd_per_month)} a month"
        return f"{each.name} {gained}{_today(answer)}."
    if not answer.proposals:
        return f"{NO_CHANGE}{_today(answer)}{_on_undecided(answer)}."
    best = answer.proposals[0]
    usd = best.usd_per_month
    saved = "at the same cost" if usd.low == usd.high == 0 else f"and saves {dollars(usd)} a month"
    return (
        f"{best.name} gains {points(best.attainment)} of SLO attainment {saved}{_today(answer)}; at worst, on "
        f"{best.worst.day}, {100 * best.worst.attainment:+.1f} points and "
        f"{_usd(best.worst.usd_per_hour)} an hour."
    )


def _on_undecided(answer: Advice) -> str:
    """The best uncertain change, and what would make it certain."""
    if not answer.tried.undecided:
        return ""
    best = answer.tried.undecided[0]
    more = f"{MOST_TIMES} times as many requests would not tell"
    if best.times is not None:
        more = f"about {best.times:.1f} times as many requests would tell"
    gains = f"{points(best.attainment)} of SLO attainment and {dollars(best.usd_per_month)} a month"
    return f"; {best.name} may gain {gains}: {more}"


def _today(answer: Advice) -> str:
    if answer.today is None:
        return ""
    return f" (today {answer.today.attainment:.1%} meet their SLOs at ${answer.today.usd_per_hour:,.2f} an hour)"


def _on_trials(answer: Advice) -> str:
    tried = answer.tried
    if answer.is_withheld:
        return f"Nothing was tried beyond {tried.num_rehearsals} rehearsals of what ran."
    pairs = f" and {tried.num_pairs} made together" if tried.num_pairs else ""
    few = sum(each.kind in ("routing", "ordering", "admission", "migration") for each in answer.left_out)
    return (
        f"{tried.num_changes} changes{pairs} were chosen among on {len(tried.chosen_on)} parts and judged on "
        f"{len(tried.judged_on)} others, in {tried.num_rehearsals} rehearsals ({tried.num_simulated} new); "
        f"{len(answer.left_out)} could not be tried{f', {few} of them policies' if few else ''}."
    )


def proposals(answer: Advice) -> Table:
    """The proposals, the best first."""
    judged = _judged(answer)
    rows = [
        [str(i), each.name, dollars(each.usd_per_month), points(each.attainment), judged, _worst(each)]
        for i, each in enumerate(answer.proposals, 1)
    ]
    return Table(HEADS, rows, words=("judged on", "worst"), prose=HEADS[:2])


def _judged(answer: Advice) -> str:
    """The judged days, or the number of judged parts of each day."""
    names, found = answer.tried.judged_on, []
    for day in answer.days:
        num = sum(name.startswith(f"{day} ") for name in names)
        found += [day] if day in names else [f"{num} part{'s' if num > 1 else ''} of {day}"] if num else []
    return ", ".join(found)


def _worst(each: Proposal) -> str:
    return f"{each.worst.day}: {_usd(each.worst.usd_per_hour)}/h, {100 * each.worst.attainment:+.1f} points"


def residuals(answer: Advice) -> Table:
    """The latencies of the days as they ran, and rehearsed."""
    off = {each.key for each in answer.twin.off}
    rows = [_twin_row(each, each.key in off) for each in answer.twin.residuals]
    return Table(TWIN_HEADS, rows, words=("",), prose=TWIN_HEADS[:2])


def _twin_row(each: Residual, is_off: bool) -> list[str]:
    mark = "off" if is_off else "" if each.is_inside else "outside on this day"
    shown = (seconds(value) for value in (each.measured_s, each.predicted_s))
    return [_name(each.key), each.day, *shown, f"{seconds(each.low_s)} to {seconds(each.high_s)}", mark]


def left_out(answer: Advice) -> Table:
    rows = [[each.kind, each.name, each.reason, each.needs or "-"] for each in answer.left_out]
    return Table(LEFT_OUT_HEADS, rows, prose=LEFT_OUT_HEADS)


def said(answer: Advice) -> Iterator[Said]:
    """The answer for a console."""
    yield from sentences(answer)
    if answer.is_withheld:
        yield residuals(answer)
    if answer.proposals:
        yield ""
        yield proposals(answer)
    for i, each in enumerate(answer.proposals, 1):
        yield ""
        yield f"{i}. {each.name}"
        yield each.diff.removesuffix("\n")
    yield ""
    yield left_out(answer)
    yield from (f"note: {note}" for note in answer.notes)


def dollars(found: Estimate) -> str:
    if found.low == found.high == 0:
        return "$0"
    return f"{_usd(found.mean, 0)} [{_usd(found.low, 0)}, {_usd(found.high, 0)}]"


def points(found: Estimate) -> str:
    return f"{100 * found.mean:+.1f} points [{100 * found.low:+.1f}, {100 * found.high:+.1f}]"


def _usd(value: float, digits: int = 2) -> str:
    shown = round(value, digits) + 0.0
    return f"{'-' if shown < 0 else ''}${abs(shown):,.{digits}f}"


def _signed(error: float) -> str:
    return f"{100 * error:+.0f}%"


def _name(key: str) -> str:
    kind, _, statistic = key.partition(".")
    return f"{kind.removesuffix('_s').upper()} {statistic}"
