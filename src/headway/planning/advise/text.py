"""An answer of `headway advise` as sentences and tables."""

from __future__ import annotations

from collections.abc import Iterator

from headway.metrics.seeds import Estimate
from headway.planning.advise.candidates import NOT_ASKED
from headway.planning.advise.judge import MOST_TIMES, Proposal
from headway.planning.advise.plan import Advice
from headway.planning.advise.twin import Residual
from headway.report.blocks import Said, Table
from headway.report.table import seconds

HEADS = ("", "change", "$ a month saved", "SLO attainment", "judged on", "worst")
TWIN_HEADS = ("latency", "day", "measured", "predicted", "9 of 10 within", "")
LEFT_OUT_HEADS = ("kind", "not tried", "why", "what would allow it")
_SHOWN = 0.0005
"""Least change of a share that is not printed as 0.0 points."""
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


def headline(answer: Advice) -> str:
    """The answer in a line, for the top of a page."""
    best = answer.compared or (answer.proposals[0] if answer.proposals else None)
    if answer.is_withheld:
        return "Advice is withheld"
    return NO_CHANGE if best is None else f"{best.name} {_effect(best)}"


def _on_best(answer: Advice) -> str:
    if answer.is_withheld:
        withheld = "Advice is withheld, as what would have been cannot be believed either"
        if answer.mended_by is None:
            return f"{withheld}; headway calibrate fits the step times to these records."
        mended = f"`simulation: {{step_time_factor: {answer.mended_by:g}}}` in the fleet file"
        return f"{withheld}; the days come out with {mended}, for engines that are known to differ by as much."
    if (each := answer.compared) is not None:
        return f"{each.name} {_effect(each)}{_today(answer)}."
    if not answer.proposals:
        return f"{NO_CHANGE}{_today(answer)}{_on_undecided(answer)}."
    best = answer.proposals[0]
    worst = f"{100 * best.worst.attainment:+.1f} points and {_usd(best.worst.usd_per_hour)} an hour"
    return f"{best.name} {_effect(best)}{_today(answer)}; at worst, on {best.worst.day}, {worst}."


def _effect(each: Proposal) -> str:
    """The effect of a change on SLO attainment and dollars. A certain gain of attainment comes first."""
    usd, met = each.usd_per_month, each.attainment
    is_same = max(map(abs, (met.mean, met.low, met.high))) < _SHOWN
    gained = f"gains {points(met)} of SLO attainment"
    changed = gained if met.low > 0 else f"changes SLO attainment by {points(met)}"
    if usd.low == usd.high == 0:
        return f"{'has the same SLO attainment' if is_same else changed} at the same cost"
    saved = f"saves {dollars(usd)} a month"
    if usd.high < 0:
        saved = f"costs {dollars(Estimate(-usd.mean, -usd.high, -usd.low))} more a month"
    if is_same:
        return f"{saved} at the same SLO attainment"
    if met.low > 0:
        return f"{gained} and {saved}"
    if abs(met.mean) < _SHOWN:
        return f"{saved} and keeps SLO attainment within {100 * met.low:+.1f} to {100 * met.high:+.1f} points"
    return f"{saved} and {changed}"


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
        num = tried.num_rehearsals
        return f"Nothing was tried beyond {num} rehearsal{'s' if num != 1 else ''} of what ran."
    made = f"in {tried.num_rehearsals} rehearsals ({tried.num_simulated} new)"
    if answer.compared is not None:
        return f"Both were rehearsed on {len(tried.judged_on)} parts of these days, {made}."
    pairs = f" and {tried.num_pairs} made together" if tried.num_pairs else ""
    kinds = [each.kind for each in answer.left_out if each.kind != NOT_ASKED]
    few = sum(kind in ("routing", "ordering", "admission", "migration") for kind in kinds)
    return (
        f"{tried.num_changes} changes{pairs} were chosen among on {len(tried.chosen_on)} parts and judged on "
        f"{len(tried.judged_on)} others, {made}; "
        f"{len(kinds)} could not be tried{f', {few} of them policies' if few else ''}."
    )


def proposals(answer: Advice) -> Table:
    """The proposals, the best first."""
    judged = _judged(answer)
    rows = [
        [str(i), each.name, dollars(each.usd_per_month), points(each.attainment), judged, _worst(each)]
        for i, each in enumerate(answer.proposals, 1)
    ]
    return Table(HEADS, rows, words=("", "judged on", "worst"), prose=("change",))


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
    return Table(TWIN_HEADS, rows, words=("latency", "day", ""))


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
        yield ""
        yield residuals(answer)
    if answer.proposals:
        yield ""
        yield proposals(answer)
    for i, each in enumerate(answer.proposals, 1):
        yield ""
        yield f"{i}. {each.name}"
        yield each.diff.removesuffix("\n")
    if answer.compared is None and not answer.is_withheld:
        yield ""
        yield left_out(answer)
    yield from (f"note: {note}" for note in answer.notes)


def dollars(found: Estimate) -> str:
    if found.low == found.high:
        return _usd(found.mean, 0)
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
