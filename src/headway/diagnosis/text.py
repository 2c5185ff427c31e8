"""Explanations as text: one screen for one request, or one line for each of several."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from headway.diagnosis.explain import Explanation, ShownDecision
from headway.report.table import seconds

_MOST_CANDIDATES = 8
"""Replicas shown for a decision: the chosen one and the first others."""


def text(found: Explanation) -> str:
    """The diagnosis of one request, in one screen of text."""
    return "\n".join(
        [*_head(found), "", *_terms(found), "", *_decisions(found), *(f"note: {note}" for note in found.notes)]
    )


def _head(found: Explanation) -> Iterable[str]:
    when = found.arrived or f"{found.arrival_s:.3f} s after the first request"
    tenant = f", tenant {found.tenant}" if found.tenant else ""
    yield f"request {found.request}: {found.model or 'the only model'}, tier {found.tier}{tenant}, arrived {when}"
    where = "at no replica" if found.replica is None else f"at {found.replica}"
    cached = f" ({found.cached_prompt_tokens:,} of them cached)" if found.cached_prompt_tokens else ""
    prompt = f"{found.prompt_tokens:,} prompt tokens{cached}"
    yield f"{found.outcome} {where}: {prompt}, {found.output_tokens:,} output tokens"
    yield f"E2E {seconds(found.e2e_s)}, TTFT {_known(found.ttft_s)}, TPOT {_known(found.tpot_s)}"
    if len(found.stays) > 1:
        stays = (
            f"{stay.replica} from {seconds(stay.from_s)} to {seconds(stay.to_s)} ({stay.ended})" for stay in found.stays
        )
        yield f"{found.attempts} attempts, {found.moves} moves: {', '.join(stays)}"
    if found.same_id:
        others = ", ".join(map(str, found.same_id))
        yield f"the last of {len(found.same_id) + 1} requests with this id; rows of the others: {others}"


def _known(value_s: float | None) -> str:
    return "unknown" if value_s is None else seconds(value_s)


def _terms(found: Explanation) -> Iterable[str]:
    rows = [("", "took", "share", "expected")]
    for each in found.terms:
        name = "queue + prefill" if each.term == "first token" else each.term
        share = "" if each.seconds is None or found.e2e_s <= 0 else f"{each.seconds / found.e2e_s:.0%}"
        rows.append((name, _known(each.seconds), share, _known(each.expected_s)))
    yield from aligned(rows)
    yield f"biggest: {'queue + prefill' if found.biggest == 'first token' else found.biggest}: {found.cause}"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows with columns of equal width; all but the first column are right-aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        name, *cells = row
        lines.append("  ".join([name.ljust(widths[0]), *(map(str.rjust, cells, widths[1:]))]).rstrip())
    return lines


def _decisions(found: Explanation) -> Iterable[str]:
    for each in found.decisions or ():
        held = (
            f" after {seconds(each.held_s)} on hold ({each.why})"
            if each.held_s and each.why
            else f": {each.why}"
            if each.why
            else ""
        )
        attempt = f", attempt {each.attempt + 1}" if each.attempt else ""
        yield f"{_at(each)}{each.what}{'' if each.replica is None else f' at {each.replica}'}{attempt}{held}"
        yield from _candidates(each)
        yield from _others(found, each)
        yield ""


def _at(decision: ShownDecision) -> str:
    return "" if decision.after_s is None else f"+{seconds(max(decision.after_s, 0.0))} "


def _candidates(decision: ShownDecision) -> Iterable[str]:
    if not decision.candidates:
        return
    in_order = sorted(decision.candidates, key=lambda each: not each.is_chosen)
    has_scores = any(each.score is not None for each in in_order)
    rows = [("  candidate", "in flight", "waiting", "KV", "metrics' age", *(["score"] if has_scores else []))]
    for each in in_order[:_MOST_CANDIDATES]:
        age = "never read" if each.age_s is None else seconds(each.age_s)
        score = ["" if each.score is None else f"{each.score:.4g}"] if has_scores else []
        mark = ">" if each.is_chosen else " "
        rows.append(
            (f"{mark} {each.replica}", str(each.in_flight), str(each.waiting), f"{each.kv_share:.0%}", age, *score)
        )
    yield from aligned(rows)
    if len(in_order) > _MOST_CANDIDATES:
        yield f"  and {len(in_order) - _MOST_CANDIDATES} others"


def _others(found: Explanation, decision: ShownDecision) -> Iterable[str]:
    """The choices of other routers, and the routers whose choice is unknown."""
    if not decision.others or len(decision.candidates) < 2:
        return
    chose = sorted((each for each in decision.others if each.replica is not None), key=lambda each: str(each.replica))
    if found.router:
        yield f"  router: {found.router}"
    for replica, routers in groupby(chose, key=lambda each: each.replica):
        same = "the same" if replica == decision.replica else f"{replica}"
        yield f"  {same} by {', '.join(each.router for each in routers)}"
    unknown = sorted((_short(each.unknown), each.router) for each in decision.others if each.replica is None)
    for why, lacking in groupby(unknown, key=lambda each: each[0]):
        yield f"  unknown of {', '.join(router for _, router in lacking)}: {why}"


def _short(why: str) -> str:
    """Why a choice is unknown, without the name of the missing value."""
    return why.partition(":")[0]


def table(found: Sequence[Explanation]) -> str:
    """Several requests as a table, one per line."""
    rows = [("request", "E2E", "TTFT", "TPOT", "biggest", "share")]
    for each in found:
        biggest = next(term for term in each.terms if term.term == each.biggest)
        share = f"{(biggest.seconds or 0.0) / each.e2e_s:.0%}" if each.e2e_s > 0 else ""
        name = "queue + prefill" if each.biggest == "first token" else each.biggest
        rows.append((each.request, seconds(each.e2e_s), _known(each.ttft_s), _known(each.tpot_s), name, share))
    shown = [cells.ljust(len(max(aligned(rows), key=len))) for cells in aligned(rows)]
    causes = ["cause", *(f"{each.cause}{f' ({each.replica})' if each.replica else ''}" for each in found)]
    return "\n".join(f"{cells}  {cause}" for cells, cause in zip(shown, causes, strict=True))
