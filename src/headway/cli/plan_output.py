"""Options that `headway plan` commands share: their GPUs, output and cache; and what the options do."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import click
from msgspec import Struct

from headway import catalog
from headway.cli.flags import ray_option, together
from headway.cli.output import JOBS, as_json_option, counting, user_cache
from headway.core.errors import HeadwayError
from headway.core.fleet import Gpu
from headway.planning.combos.plan import offer_of
from headway.planning.combos.problem import Offer
from headway.report.page import write_page
from headway.scenario.processes import available_cores, processes
from headway.workload.atomic_file import write_text

INFEASIBLE = 3
"""Exit code of a command that finds no plan."""
_path = click.Path(path_type=Path)

plan_options = together(
    (
        click.option("-o", "--out", type=_path, help="Write the plan as a scenario that headway simulate runs."),
        click.option("--html", type=_path, help="Write the plan as an HTML page, and plotly.js beside it."),
        click.option("--cache", type=_path, help="Folder of cached simulations; default: the user's cache folder."),
        click.option("--no-cache", is_flag=True, help="Simulate without the cache."),
        as_json_option("Print JSON in place of tables."),
        click.option("--no-progress", is_flag=True, help="No progress bar."),
    )
)

jobs_option = together(
    (
        click.option("--jobs", type=JOBS, help="Number of processes that simulate. Default: one for each core."),
        ray_option,
    )
)


class PlanOutput(Struct, frozen=True):
    """The values of `plan_options`, and of `jobs_option`."""

    out: Path | None
    html: Path | None
    cache: Path | None
    no_cache: bool
    as_json: bool
    no_progress: bool
    jobs: int | None = None
    """Of `jobs_option`; None: one for each core."""
    ray: bool = False
    """Of `jobs_option`: on a Ray cluster, whose machines see the files that the simulations read."""

    def cache_dir(self, name: str) -> Path | None:
        return None if self.no_cache else self.cache or user_cache(name)

    def processes(self) -> AbstractContextManager[Executor | None]:
        """Worker processes. Open it before `counting`, whose thread would keep them from being forks."""
        if self.ray:
            from headway.scenario.ray_cluster import cluster

            return cluster()
        return processes(self.jobs or available_cores())

    def counting(self, doing: str) -> AbstractContextManager[Callable[[int, int], None] | None]:
        return counting(doing, not self.no_progress)


def write(path: Path, text: str) -> None:
    write_text(path, text)
    click.echo(f"wrote {path}", err=True)


def write_html(path: Path, page: str) -> None:
    write_page(path, page)
    click.echo(f"wrote {path}", err=True)


@contextmanager
def requests_folder(cache: Path | None) -> Iterator[Path]:
    """A folder for requests: in the cache, or for as long as the command runs."""
    if cache is not None:
        yield cache / "requests"
    else:
        with TemporaryDirectory() as folder:
            yield Path(folder)


def command_line() -> str:
    return shlex.join(["headway", *sys.argv[1:]])


def gpu_offer(
    text: str, per_server: int | None, find: Callable[[str], Gpu] = catalog.gpu, option: str = "--gpus"
) -> Offer:
    """Parse `type`, `type:count`, `type:count:price` or `type:count:price:interruptions`."""
    try:
        return offer_of(text, per_server, find)
    except HeadwayError as error:
        raise HeadwayError(f"{option}: {error}") from None
