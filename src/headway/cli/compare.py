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
from headway.scenario.run import compare


@click.command()
@scenario_options
@click.option("--jobs", type=POSITIVE, default=1, show_default=True, help="Number of processes.")
@ray_option
@clairvoyant_option
@output_options
def command(scenario: Path | None, preset: str | None, jobs: int, ray: bool, clairvoyant: bool, **flags: Any) -> None:
    """Run several policies on one workload and fleet, and print one table.

    Workload and fleet come from the SCENARIO file, or from options alone; options override the file.
    Every router runs with every ordering, on the same arrivals and lengths.
    """
    outputs = Outputs.taken_from(flags)
    chosen = choose("compare", scenario, preset, flags)
    with progress("comparing", wanted=not outputs.no_progress) as report, cluster() if ray else nullcontext() as pool:
        runs = compare(chosen, jobs, report, pool, with_bound=True)
    if clairvoyant:
        runs = with_clairvoyant(runs, chosen)
    deliver(runs, chosen, outputs)
