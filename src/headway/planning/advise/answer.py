"""Advice as a value that the command prints and the API returns, with its page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headway.planning.advise.changes import Candidate
from headway.planning.advise.judge import Proposal
from headway.planning.advise.plan import Advice, AdviceOptions, FleetFile, advise, fleet_yaml
from headway.planning.advise.text import headline, left_out, proposals, residuals, said, sentences
from headway.planning.planned import Planned
from headway.planning.rehearsals import Resources
from headway.report.blocks import Block, Chart, Code, Facts, Lines, Report, Section, or_dash
from headway.report.charts import layout, limit
from headway.report.page import COLORS

_CAPTION = (
    "A point is a proposal: what it saves, and how many more requests meet their SLOs. Bars contain the spread over the"
    " judged days and the error of the step times. Today's fleet is at 0."
)


def planned(
    fleet: FleetFile,
    folders: Sequence[Path],
    options: AdviceOptions,
    resources: Resources,
    candidate: Candidate | None = None,
) -> Planned:
    """Changes to make to a fleet: `headway advise`. The plan is met unless the advice is withheld. Raises HeadwayError
    like `advise`."""
    answer = advise(fleet, folders, options, resources, candidate)
    return Planned(
        answer,
        not answer.is_withheld,
        tuple(map(_row, answer.proposals)),
        tuple(sentences(answer)),
        tuple(said(answer)),
        {"": lambda: fleet_yaml(answer, fleet.text)} if answer.proposals else {},
        lambda _: report(answer),
    )


def _row(each: Proposal) -> dict[str, Any]:
    return {
        "change": each.name,
        "kinds": list(each.kinds),
        "usd_per_month": each.usd_per_month.mean,
        "usd_per_month_low": each.usd_per_month.low,
        "usd_per_month_high": each.usd_per_month.high,
        "attainment": each.attainment.mean,
        "attainment_low": each.attainment.low,
        "attainment_high": each.attainment.high,
        "worst_day": each.worst.day,
        "diff": each.diff,
    }


def report(answer: Advice) -> Report:
    shown = {
        "days": ", ".join(answer.days),
        "requests": f"{answer.num_requests:,}",
        "SLO attainment wanted": f"{answer.target:.1%}",
        "today": or_dash(answer.today, "{0.attainment:.1%}"),
        "today, an hour": or_dash(answer.today, "${0.usd_per_hour:,.2f}"),
    }
    body: list[Block] = []
    if answer.proposals:
        changes = [Code(each.diff, f"{i}. {each.name}") for i, each in enumerate(answer.proposals, 1)]
        body += [
            Section("Proposals", [proposals(answer)]),
            Section(
                "Gains over today's fleet", [Chart("gains", "Each proposal", _picture(answer.proposals), _CAPTION)]
            ),
            Section("Changes of the fleet file", changes),
        ]
    body.append(Section("The days as they ran, and rehearsed", [residuals(answer)]))
    if answer.compared is None and not answer.is_withheld:
        body.append(Section("Not tried", [left_out(answer)]))
    return Report("advice", headline(answer), [Lines(sentences(answer)), Facts(shown)], body, answer.notes)


def _picture(proposals: Sequence[Proposal]) -> dict[str, Any]:
    traces = []
    for i, each in enumerate(proposals):
        usd, met = each.usd_per_month, each.attainment
        traces.append({
            "type": "scatter", "mode": "markers", "name": each.name, "x": [usd.mean], "y": [100 * met.mean],
            "marker": {"color": COLORS[i % len(COLORS)], "size": 10},
            "error_x": {"type": "data", "symmetric": False, "array": [usd.high - usd.mean],
                        "arrayminus": [usd.mean - usd.low]},
            "error_y": {"type": "data", "symmetric": False, "array": [100 * (met.high - met.mean)],
                        "arrayminus": [100 * (met.mean - met.low)]},
        })  # fmt: skip
    shapes = [limit("y", 0), limit("x", 0)]
    titles, padded = ("$ a month saved", "SLO attainment gained (points)"), {"rangemode": "normal"}
    legend = {"orientation": "h", "y": -0.2, "x": 0}
    drawn = layout(*titles, 460, showlegend=True, legend=legend, shapes=shapes, xaxis=padded, yaxis=padded)
    return {"data": traces, "layout": drawn}
