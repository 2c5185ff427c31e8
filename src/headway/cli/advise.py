"""`headway advise`: what to change in a fleet, from recorded days; the work is in `planning.advise`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from headway.api.advice import fleet_file
from headway.cli.flags import listed, slo_of, slo_option
from headway.cli.output import PATH, POSITIVE, SECONDS_ABOVE_0, list_option
from headway.cli.plan_output import PlanOutput, jobs_option, plan_options
from headway.core.errors import HeadwayError
from headway.planning.advise.answer import planned
from headway.planning.advise.candidates import KINDS
from headway.planning.advise.plan import ATTAINMENT, MOST_REHEARSALS, MOST_REQUESTS, AdviceOptions, policies_of
from headway.records.parts import snapshot


@click.command()
@click.argument("fleet", type=PATH)
@click.argument("days", type=PATH, nargs=-1)
@click.option(
    "--records",
    "first_days",
    type=PATH,
    multiple=True,
    metavar="DAY...",
    help="Folders that headway serve --records wrote, each a day. Several: after one --records, or one after each.",
)
@click.option(
    "--attainment",
    type=click.FloatRange(0, 1, min_open=True),
    default=ATTAINMENT,
    show_default=True,
    help="Share of requests that should meet their SLOs.",
)
@slo_option
@list_option("--kinds", default=",".join(KINDS), show_default=True, help="Kinds of changes to try.")
@click.option(
    "--max-rehearsals",
    type=POSITIVE,
    default=MOST_REHEARSALS,
    show_default=True,
    help="Rehearsals at most; what is cut is printed.",
)
@click.option(
    "--max-requests",
    type=POSITIVE,
    default=MOST_REQUESTS,
    show_default=True,
    help="Requests of one rehearsal of a change at most; longer days are cut into parts.",
)
@click.option(
    "--candidate",
    type=PATH,
    help="Compare the policies of this fleet file with today's, in place of trying others.",
)
@click.option(
    "--last",
    "last_s",
    type=SECONDS_ABOVE_0,
    help="Of runs that are under way: the requests of the last time, such as 1h or 90min.",
)
@jobs_option
@plan_options
def command(
    fleet: Path,
    days: tuple[Path, ...],
    first_days: tuple[Path, ...],
    attainment: float,
    slo: str | None,
    kinds: str,
    max_rehearsals: int,
    max_requests: int,
    candidate: Path | None,
    last_s: float | None,
    **outputs: Any,
) -> int:
    """Propose changes to a fleet from recorded days.

    FLEET is the fleet file that is served today. Each day is rehearsed as it ran; if the rehearsal does not reproduce
    its latencies, advice is withheld (exit code 3). Then changes are rehearsed on some days and judged on the others:
    routers, orderings, admission, migration, scalers, numbers of replicas and limits of engines. A change that cannot
    be distinguished from today's fleet is not proposed. Rehearsals are cached, so an interrupted command resumes.
    """
    folders = [*first_days, *days]
    if not folders:
        raise HeadwayError("--records is missing; expected folders of headway serve --records, each a day")
    options = AdviceOptions(attainment, tuple(listed(kinds, "--kinds")), max_rehearsals, max_requests)
    file, output = fleet_file(fleet, slo_of(slo)), PlanOutput(**outputs)
    compared = None
    if candidate is not None:
        compared = policies_of(fleet_file(candidate, {}).document, candidate.name)
    with ExitStack() as stack:
        if last_s is not None:
            folders = _snapshots(folders, last_s, stack)
        resources = stack.enter_context(output.resources("rehearsing", "advise"))
        found = planned(file, folders, options, resources, compared)
    return output.show(found)


def _snapshots(folders: Sequence[Path], last_s: float, stack: ExitStack) -> list[Path]:
    """Records of the last seconds of each run, which are deleted in the end."""
    made = [Path(stack.enter_context(TemporaryDirectory())) / folder.name for folder in folders]
    for folder, target in zip(folders, made, strict=True):
        snapshot(folder, target, last_s)
    return made
