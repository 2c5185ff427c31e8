"""`headway compare`."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click

from headway.cli.flags import ray_option, scenario_options
from headway.cli.output import POSITIVE, progress
from headway.cli.runs import Outputs, choose, clairvoyant_option, deliver, output_options, with_clairvoyant
from headway.scenario.ray_cluster import cluster
from headway.scenario.run import compare, replicate

DEFAULT_SEEDS = 5
QUICK_S = 2.0


@click.command()
@scenario_options
@click.option("--jobs", type=POSITIVE, default=1, show_default=True, help="Number of processes.")
@click.option(
    "--seeds", type=POSITIVE,
    help=f"Run each variant with this many seeds: means, 95% intervals, and the differences that hold. Default:"
         f" {DEFAULT_SEEDS} if a run takes less than {QUICK_S:g} s, else 1.",
)  # fmt: skip
@ray_option
@clairvoyant_option
@output_options
def command(
    scenario: Path | None, preset: str | None, jobs: int, seeds: int | None, ray: bool, clairvoyant: bool, **flags: Any
) -> None:
    """Run several policies on one workload and fleet, and print one table.

    Workload and fleet come from the SCENARIO file, or from options alone; options override the file.
    Every router runs with every ordering, on the same arrivals and lengths.
    """
    outputs = Outputs.taken_from(flags)
    chosen = choose("compare", scenario, preset, flags)
    with progress("comparing", wanted=not outputs.no_progress) as report, cluster() if ray else nullcontext() as pool:
        runs = compare(chosen, jobs, report, pool, with_bound=True)
        num_seeds = seeds or (DEFAULT_SEEDS if max(each.total_s for each in runs) < QUICK_S else 1)
        seeded = None if num_seeds == 1 else replicate(chosen, runs, num_seeds, jobs, report, pool)
    if clairvoyant:
        runs = with_clairvoyant(runs, chosen)
    deliver(runs, chosen, outputs, seeded)
