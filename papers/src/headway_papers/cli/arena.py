"""`headway arena`: ranks policies over grids of fleets and workloads, or searches their arguments; the work is in
`arena`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import click

from headway.cli.flags import ray_option, together
from headway.cli.output import (
    PATH,
    POSITIVE,
    SEED,
    SubCommands,
    as_json_option,
    command_line,
    console,
    counting,
    no_progress_option,
    print_json,
    user_cache,
)
from headway.core.errors import HeadwayError, unknown
from headway.planning.rehearsals import RehearsalCache
from headway.report.page import write_page
from headway.scenario.processes import processes
from headway.scenario.ray_cluster import cluster
from headway.workload.atomic_file import write_text
from headway_papers.arena.grid import chosen, read
from headway_papers.arena.grids import builtin, is_builtin
from headway_papers.arena.metrics import METRICS
from headway_papers.arena.page import page
from headway_papers.arena.play import play
from headway_papers.arena.search import search
from headway_papers.arena.text import SHOWN, markdown, render, render_search, specification
from headway_papers.reproduce.markdown import around_markers, write_markdown
from headway_papers.reproduce.runner import Runner

PLAY = "play"

grid_options = together(
    (
        click.argument("grid", type=PATH, required=False),
        click.option("--builtin", "preset", help="A built-in grid: quick, held-out, slos, caches or staleness."),
        click.option("--only", multiple=True, metavar="NAME", help="Only this fleet, workload or policy. Repeatable."),
        click.option("--quick", is_flag=True, help="A fifth of the requests, and three seeds."),
        click.option("--seeds", type=POSITIVE, help="Number of seeds. Default: the grid's."),
        click.option("--jobs", type=POSITIVE, help="Number of processes. Default: one for each CPU."),
        ray_option,
        click.option(
            "--data",
            type=PATH,
            envvar="HEADWAY_DATA",
            show_envvar=True,
            help="A folder in which traces are looked for.",
        ),
        click.option("--cache", type=PATH, help="Folder of measurements. Default: the user's cache."),
        click.option("--fresh", is_flag=True, help="Measure everything again, whatever the cache holds."),
        as_json_option("Print JSON instead of the table."),
        no_progress_option,
    )
)


class GridOrCommand(SubCommands):
    """A group whose first word is a grid unless it is one of its commands."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        has_command = not args or args[0] in self.commands or args[0] in ("-h", "--help")
        return super().parse_args(ctx, args if has_command else [PLAY, *args])


@click.group(cls=GridOrCommand)
def command() -> None:
    """Rank policies over a grid of fleets, workloads and loads.

    `headway arena GRID.yaml` runs a grid, `headway arena --builtin quick` one of Headway's own. `headway arena play
    --help` lists the options of both. `headway arena search` looks for the arguments of a policy.
    """


@command.command(PLAY)
@grid_options
@click.option("--html", type=PATH, help="Write ranking, heat map and cells as an HTML page, and plotly.js beside it.")
@click.option("--metric", help="What regret is of: goodput_rps, ttft_s.mean, ttft_s.p99, ... Default: the grid's.")
@click.option("--no-cells", is_flag=True, help="Write the ranking alone as Markdown, and no table by cell.")
@click.option(
    "--table",
    "shown",
    multiple=True,
    metavar="METRIC",
    help=f"In Markdown: a table by cell of this metric. Repeatable. Default: {', '.join(SHOWN)}.",
)
@click.option(
    "--markdown",
    "markdown_path",
    type=PATH,
    help="Write tables as Markdown, into a page with marker lines or a new one.",
)
def play_grid(
    grid: Path | None, preset: str | None, only: tuple[str, ...], quick: bool, seeds: int | None, jobs: int | None,
    ray: bool, data: Path | None, cache: Path | None, fresh: bool, as_json: bool, no_progress: bool, html: Path | None,
    metric: str | None, no_cells: bool, shown: tuple[str, ...], markdown_path: Path | None,
) -> None:  # fmt: skip
    """Run every policy of a grid in every cell with every seed, and rank them by regret.

    All policies get the same requests. Loads are shares of the capacity of the fleet for the workload, which is
    measured first. Measurements are cached, so that an interrupted command goes on where it stopped, and a policy that
    changed is measured again alone. With --only POLICY, the others count as far as the cache has them.
    """
    file = _file(grid, preset)
    found, wanted = chosen(read(file, quick=quick, seeds=seeds, data=_folder(data), metric=metric), only)
    writer = f"arena {found.name}" + (f" {metric}" if metric else "")
    if no_cells and shown:
        raise HeadwayError("--no-cells: expected no --table beside it")
    for each in shown:
        if each not in METRICS:
            raise unknown("metric", each, METRICS, "--table")
    if markdown_path is not None:
        around_markers(markdown_path, writer)  # checked before hours of work
    rehearsals = RehearsalCache(cache or user_cache("arena"), fresh)
    with (
        cluster() if ray else processes(jobs or os.cpu_count() or 1) as pool,
        counting("running", not no_progress) as report,
    ):
        arena = play(found, wanted, Runner(tuple(found.seeds), cache=rehearsals, report=report, pool=pool))
    if html is not None:
        write_page(html, page(arena, command_line()))
    if markdown_path is not None:
        text = markdown(arena, command_line(), () if no_cells else shown or SHOWN)
        write_markdown(markdown_path, text, writer)
    if as_json:
        print_json(arena)
    else:
        click.echo(render(arena, width=console().width, color=sys.stdout.isatty()), nl=False)
    _report(rehearsals, [path for path in (html, markdown_path) if path is not None])


@command.command("search")
@grid_options
@click.option("--policy", required=True, help="The router to search, or module:Class.")
@click.option("--kind", type=click.Choice(["routing", "ordering"]), default="routing", help="What --policy is.")
@click.option(
    "--vary",
    multiple=True,
    metavar="NAME[=LOW:HIGH]",
    help="Only this argument, with this range, or NAME=A,B,C. Repeatable. Default: all numbers, flags and choices.",
)
@click.option("--trials", type=POSITIVE, default=27, show_default=True, help="Points drawn at random.")
@click.option(
    "--hold-out",
    type=click.Choice(["seeds", "cells"]),
    default="seeds",
    show_default=True,
    help="What the test half is made of.",
)
@click.option("--seed", type=SEED, default=0, show_default=True, help="Seed of the draws.")
@click.option("--out", type=PATH, help="Write the winner as `policies` of a scenario.")
def search_grid(
    grid: Path | None, preset: str | None, only: tuple[str, ...], quick: bool, seeds: int | None, jobs: int | None,
    ray: bool, data: Path | None, cache: Path | None, fresh: bool, as_json: bool, no_progress: bool, policy: str,
    kind: Literal["routing", "ordering"], vary: tuple[str, ...], trials: int, hold_out: Literal["seeds", "cells"],
    seed: int, out: Path | None,
) -> None:  # fmt: skip
    """Search the arguments of a policy on half of a grid, and judge the winner once on the other half.

    Points are drawn at random from the constructor's arguments; the better third of them goes on to three times as
    many runs, and so on. Gains are over the policy's own defaults in the same runs. The policies that the grid
    ranks do not matter.
    """
    found, _ = chosen(read(_file(grid, preset), quick=quick, seeds=seeds, data=_folder(data)), only)
    rehearsals = RehearsalCache(cache or user_cache("arena"), fresh)
    with (
        cluster() if ray else processes(jobs or os.cpu_count() or 1) as pool,
        counting("running", not no_progress) as report,
    ):
        runner = Runner(tuple(found.seeds), cache=rehearsals, report=report, pool=pool)
        result = search(found, kind, policy, runner, vary=vary, num_trials=trials, hold_out=hold_out, seed=seed)
    if out is not None:
        write_text(out, specification(result))
    if as_json:
        print_json(result)
    else:
        click.echo(render_search(result, width=console().width, color=sys.stdout.isatty()), nl=False)
        click.echo(specification(result), nl=False)
    _report(rehearsals, [] if out is None else [out])


def _file(grid: Path | None, preset: str | None) -> Path:
    if (grid is None) == (preset is None):
        raise HeadwayError("expected a grid file or --builtin" + (", and not both" if grid is not None else ""))
    if grid is None:
        return builtin(str(preset))
    if is_builtin(str(grid)) and not grid.exists():
        raise HeadwayError(f"{grid}: no such file; did you mean --builtin {grid}?")
    return grid


def _folder(data: Path | None) -> Path | None:
    if data is not None and not data.is_dir():
        raise HeadwayError(f"{data}: no such folder")
    return data


def _report(rehearsals: RehearsalCache, written: Sequence[Path]) -> None:
    for note in [*rehearsals.notes, *(f"wrote {path}" for path in written)]:
        click.echo(note, err=True)
