"""`headway reproduce`: a paper's tables, figures and claims; the work is in `reproduce`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from headway.cli.flags import ray_option
from headway.cli.output import (
    PATH,
    POSITIVE,
    as_json_option,
    command_line,
    console,
    counting,
    no_progress_option,
    print_json,
    print_table,
    user_cache,
)
from headway.core.errors import HeadwayError
from headway.planning.rehearsals import RehearsalCache
from headway.report.page import write_page
from headway_papers.reproduce import SYSTEMS
from headway_papers.reproduce.claims import REFUTED
from headway_papers.reproduce.kept import read_written
from headway_papers.reproduce.markdown import around_markers, markdown, write_markdown
from headway_papers.reproduce.page import page
from headway_papers.reproduce.reproduction import chosen, load, reproduce
from headway_papers.reproduce.text import listing, render

FAILED = 1
"""Exit code with --strict if a claim is refuted."""


@click.command()
@click.argument("system", required=False)
@click.option(
    "--list", "listed", is_flag=True, help="List the systems, or the claims and rules of SYSTEM, and run nothing."
)
@click.option("--quick", is_flag=True, help="Use fewer seeds and requests.")
@click.option("--seeds", type=POSITIVE, help="Number of seeds. Default: the system's.")
@click.option("--claim", "ids", multiple=True, metavar="ID", help="Only this claim. Repeatable.")
@click.option("--jobs", type=POSITIVE, help="Number of processes. Default: one for each CPU.")
@ray_option
@click.option(
    "--data",
    type=PATH,
    envvar="HEADWAY_DATA",
    show_envvar=True,
    help="A folder with public traces and measurements, for systems that use them.",
)
@as_json_option("Print JSON instead of the table.")
@click.option("--html", type=PATH, help="Write claims, figures and tables as an HTML page, and plotly.js beside it.")
@click.option(
    "--markdown",
    "markdown_path",
    type=PATH,
    help="Write claims and tables as Markdown, into a page that has the marker lines or a new one. With --claim, "
    "the page's other rows stay.",
)
@click.option("--strict", is_flag=True, help=f"Exit with {FAILED} if a claim is refuted.")
@click.option("--cache", type=PATH, help="Folder of cached measurements. Default: the user's cache.")
@click.option("--fresh", is_flag=True, help="Measure everything again, whatever the cache holds.")
@no_progress_option
def command(
    system: str | None, listed: bool, quick: bool, seeds: int | None, ids: tuple[str, ...], jobs: int | None,
    ray: bool, data: Path | None, as_json: bool, html: Path | None, markdown_path: Path | None, strict: bool,
    cache: Path | None, fresh: bool, no_progress: bool,
) -> int:  # fmt: skip
    """Reproduce the tables and figures of a paper, and check its claims.

    Every claim has a rule: the effect has the paper's direction and, unless the claim gives a reason for another share,
    half of its size, by a 95% confidence interval over seeds. It holds, exceeds the paper, is refuted or undecided. The
    sentences of the paper's abstract come first, with every reading that was run. Measurements are cached, so that an
    interrupted run continues where it stopped. A refuted claim is a result: the exit code is 0, unless --strict.
    """
    if listed:
        _list(system, ids, as_json)
        return 0
    if system is None:
        raise HeadwayError("SYSTEM is missing; headway reproduce --list names the systems")
    written = None
    if markdown_path is not None:
        inside = around_markers(markdown_path)[1]  # checked before hours of work
        written = read_written(inside, load(system).CLAIMS) if ids and not quick else None
    rehearsals = RehearsalCache(cache or user_cache("reproduce"), fresh)
    with counting("measuring", not no_progress) as report:
        reproduced = reproduce(
            system,
            quick=quick,
            seeds=seeds,
            jobs=jobs or os.cpu_count() or 1,
            ids=ids,
            cache=rehearsals,
            data=data,
            report=report,
            ray=ray,
        )
    if html is not None:
        write_page(html, page(reproduced, command_line()))
    if markdown_path is not None:
        write_markdown(markdown_path, markdown(reproduced, written))
    if as_json:
        print_json(reproduced.result)
    else:
        click.echo(render(reproduced, width=console().width, color=sys.stdout.isatty()), nl=False)
    for note in [*rehearsals.notes, *(f"wrote {path}" for path in (html, markdown_path) if path is not None)]:
        click.echo(note, err=True)
    return FAILED if strict and reproduced.result.counts[REFUTED] else 0


def _list(system: str | None, ids: tuple[str, ...], as_json: bool) -> None:
    if system is not None:
        loaded = load(system)
        claims = chosen(loaded, ids)
        if as_json:
            rows = [{"id": c.id, "claim": c.claim, "paper": c.paper, "rule": str(c.rule)} for c in claims]
            print_json({"system": system, "claims": rows})
        else:
            text = listing(loaded.TITLE, claims, width=console().width, color=sys.stdout.isatty())
            click.echo(text, nl=False)
        return
    systems = [(name, load(name)) for name in SYSTEMS]
    if as_json:
        print_json([{"system": name, "title": each.TITLE, "claims": len(each.CLAIMS)} for name, each in systems])
    else:
        table = [(name, each.TITLE, len(each.CLAIMS)) for name, each in systems]
        print_table(["system", "paper", "claims"], table)
