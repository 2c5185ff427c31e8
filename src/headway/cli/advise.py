"""`headway advise`: what to change in a fleet, from recorded days; the work is in `planning.advise`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from headway.api.advice import fleet_file
from headway.cli.flags import listed
from headway.cli.output import PATH, POSITIVE, SECONDS_ABOVE_0, list_option, print_json, print_table
from headway.cli.plan_output import INFEASIBLE, PlanOutput, command_line, jobs_option, plan_options, write, write_html
from headway.core.errors import HeadwayError
from headway.planning.advise.candidates import KINDS
from headway.planning.advise.page import page
from headway.planning.advise.plan import (
    ATTAINMENT,
    MOST_REHEARSALS,
    MOST_REQUESTS,
    Advice,
    AdviceOptions,
    advise,
    fleet_yaml,
    policies_of,
)
from headway.planning.advise.text import (
    HEADS,
    LEFT_OUT_HEADS,
    TWIN_HEADS,
    left_out_rows,
    rows,
    sentences,
    twin_rows,
)
from headway.planning.fleet.document import slo_of
from headway.records.parts import snapshot
from headway.scenario import Simulator


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
@click.option("--slo", help="Of requests without SLOs of their own: ttft=2s,tpot=50ms,e2e=30s.")
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
    """Say what to change in a fleet, by recorded days.

    FLEET is the fleet file as it is served today. Each day is rehearsed as it ran; if its latencies do not come out,
    advice is withheld (exit code 3). Then changes are rehearsed on some days and judged on others that the choice never
    saw: routers, orderings, admission, migration, scalers, numbers of replicas and limits of engines. What is not
    distinguishable from today's fleet is not proposed. Rehearsals are cached, so that an interrupted answer resumes.
    """
    folders = [*first_days, *days]
    if not folders:
        raise HeadwayError("--records is missing; expected folders of headway serve --records, each a day")
    try:
        slos = {} if slo is None else slo_of(slo)
    except HeadwayError as error:
        raise HeadwayError(f"--slo: {error}") from None
    options = AdviceOptions(attainment, tuple(listed(kinds, "--kinds")), max_rehearsals, max_requests)
    file, output = fleet_file(fleet, slos), PlanOutput(**outputs)
    compared = None
    if candidate is not None:
        compared = policies_of(fleet_file(candidate, {}).document, candidate.name)
    with ExitStack() as stack:
        if last_s is not None:
            folders = _snapshots(folders, last_s, stack)
        pool, progress = stack.enter_context(output.processes()), stack.enter_context(output.counting("rehearsing"))
        answer = advise(file, folders, options, Simulator(), output.cache_dir("advise"), progress, pool, compared)
    if output.html is not None:
        write_html(output.html, page(answer, command_line()))
    if output.out is not None and answer.proposals:
        write(output.out, fleet_yaml(answer, file.text))
    print_json(answer) if output.as_json else _show(answer)
    return INFEASIBLE if answer.is_withheld else 0


def _snapshots(folders: Sequence[Path], last_s: float, stack: ExitStack) -> list[Path]:
    """Records of the last seconds of each run, which are deleted in the end."""
    made = [Path(stack.enter_context(TemporaryDirectory())) / folder.name for folder in folders]
    for folder, target in zip(folders, made, strict=True):
        snapshot(folder, target, last_s)
    return made


def _show(answer: Advice) -> None:
    for line in sentences(answer):
        click.echo(line)
    if answer.is_withheld:
        print_table(list(TWIN_HEADS), twin_rows(answer))
    if answer.proposals:
        click.echo()
        print_table(list(HEADS), rows(answer))
    for i, each in enumerate(answer.proposals, 1):
        click.echo(f"\n{i}. {each.name}\n{each.diff}", nl=False)
    click.echo()
    print_table(list(LEFT_OUT_HEADS), left_out_rows(answer))
    for note in answer.notes:
        click.echo(f"note: {note}")
