"""Options that `headway plan` commands share, and how their answers are printed and written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click
from msgspec import Struct

from headway import catalog
from headway.cli.flags import ray_option, ray_pool, scenario_file, together, with_gpus
from headway.cli.output import (
    JOBS,
    PATH,
    as_json_option,
    command_line,
    counting,
    no_progress_option,
    print_json,
    print_said,
    user_cache,
)
from headway.config.scenario import read
from headway.core.errors import HeadwayError
from headway.core.fleet import Gpu
from headway.planning.combos.problem import Offer
from headway.planning.planned import Planned
from headway.planning.rehearsals import Resources, Source
from headway.report.page import write_page
from headway.report.render import page
from headway.scenario import Simulator
from headway.scenario.processes import available_cores, processes
from headway.workload.atomic_file import write_text

if TYPE_CHECKING:
    from concurrent.futures import Executor

INFEASIBLE = 3
"""Exit code of a command that finds no plan."""

cache_options = together(
    (
        click.option("--cache", type=PATH, help="Folder of cached simulations; default: the user's cache folder."),
        click.option("--no-cache", is_flag=True, help="Simulate without the cache."),
    )
)
plan_options = together(
    (
        click.option("-o", "--out", type=PATH, help="Write the plan as a scenario that headway simulate runs."),
        click.option("--html", type=PATH, help="Write the plan as an HTML page, and plotly.js beside it."),
        cache_options,
        as_json_option("Print JSON in place of tables."),
        no_progress_option,
    )
)

jobs_option = together(
    (
        click.option("--jobs", type=JOBS, help="Number of processes that simulate. Default: one for each core."),
        ray_option,
    )
)


class PlanOutput(Struct, frozen=True):
    """The values of `plan_options` and `jobs_option` that a command has."""

    out: Path | None = None
    html: Path | None = None
    cache: Path | None = None
    no_cache: bool = False
    as_json: bool = False
    no_progress: bool = False
    jobs: int | None = 1
    """Number of processes; None: one per core."""
    ray: bool = False
    """Whether to use a Ray cluster, whose machines can read the simulations' files."""

    @contextmanager
    def resources(self, doing: str, cache: str) -> Iterator[Resources]:
        """The resources of a plan's rehearsals. `cache`: name of the user's cache folder."""
        folder = None if self.no_cache else self.cache or user_cache(cache)
        # Start the processes before the progress bar, whose thread would prevent forking.
        with self._processes() as pool, counting(doing, not self.no_progress) as progress:
            yield Resources(Simulator(), folder, progress, pool)

    def _processes(self) -> AbstractContextManager[Executor | None]:
        return ray_pool(True) if self.ray else processes(self.jobs or available_cores())

    def show(self, found: Planned) -> int:
        """Write and print a plan. Returns the exit code."""
        if self.as_json:
            print_json(found.answer)
        else:
            print_said(found.said)
        if self.html is not None and found.report is not None:
            write_page(self.html, page(found.report(self.out if found.files else None), command_line()))
            click.echo(f"wrote {self.html}", err=True)
        if self.out is not None:
            for name, made in found.files.items():
                if name and self.out.is_file():
                    raise HeadwayError(f"--out {self.out}: is a file; this plan has several, and needs a folder")
                if name:
                    self.out.mkdir(parents=True, exist_ok=True)
                write(self.out / name, made())
            if not found.files:
                click.echo(f"not written: {self.out} (the answer has no fleet file)", err=True)
        if found.counted:
            click.echo(found.counted, err=True)
        return 0 if found.is_met else INFEASIBLE


def write(path: Path, text: str) -> None:
    write_text(path, text)
    click.echo(f"wrote {path}", err=True)


def scenario_source(
    file: Path | None,
    preset: str | None,
    gpu_file: Path | None = None,
    expected: str = "a scenario file, or --builtin NAME",
) -> Source:
    """The scenario of a file, or a built-in one, with the GPUs of `gpu_file`. Raises HeadwayError if there is
    neither."""
    found = scenario_file(file, preset)
    if found is None:
        raise HeadwayError(f"expected {expected}")
    return Source(*with_gpus(*read(found), gpu_file), found.parent)


def gpu_offer(
    text: str, per_server: int | None, find: Callable[[str], Gpu] = catalog.gpu, option: str = "--gpus"
) -> Offer:
    """Parse `type`, `type:count`, `type:count:price` or `type:count:price:interruptions`."""
    from headway.planning.combos.plan import offer_of  # capacity plans do without combos

    try:
        return offer_of(text, per_server, find)
    except HeadwayError as error:
        raise HeadwayError(f"{option}: {error}") from None
