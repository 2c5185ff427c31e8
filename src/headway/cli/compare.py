"""`headway compare`: the sets of policies of one scenario, run and compared in one table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from headway.cli.flags import ray_option, ray_pool, scenario_options
from headway.cli.output import JOBS, SEEDS, progress
from headway.cli.runs import Outputs, choose, clairvoyant_option, deliver, output_options, with_clairvoyant
from headway.scenario.policies import check
from headway.scenario.run import compare, replicate

DEFAULT_SEEDS = 5
FEW_REQUESTS = 20_000
"""Maximum number of requests of a run that is repeated by default. The choice does not depend on time, so a busy
machine prints the same."""


@click.command()
@scenario_options
@click.option(
    "--jobs",
    type=JOBS,
    help="Number of processes; the results are the same. Default: one for each core if the runs take seconds, else 1.",
)
@click.option(
    "--seeds",
    type=SEEDS,
    help=f"Run each variant with this many seeds: means, 95% intervals, and the differences that hold. Default:"
    f" {DEFAULT_SEEDS} for runs of at most {FEW_REQUESTS:,} requests, else 1.",
)
@ray_option
@clairvoyant_option
@output_options
def command(
    scenario: Path | None,
    preset: str | None,
    jobs: int | None,
    seeds: int | None,
    ray: bool,
    clairvoyant: bool,
    **flags: Any,
) -> None:
    """Run several policies on one workload and fleet, and print one table.

    Workload and fleet come from the SCENARIO file, or from options alone; options override the file.
    Every router runs with every ordering, on the same arrivals and lengths.
    """
    outputs = Outputs.taken_from(flags)
    chosen = choose("compare", scenario, preset, flags)
    check(chosen)
    with progress("comparing", wanted=not outputs.no_progress) as report, ray_pool(ray) as pool:
        runs = compare(chosen, jobs, report, pool, with_bound=True)
        num_requests = max(len(each.records.requests["request"]) for each in runs)
        num_seeds = seeds or (DEFAULT_SEEDS if num_requests <= FEW_REQUESTS else 1)
        by_replica = outputs.as_json or outputs.out is not None
        seeded = None if num_seeds == 1 else replicate(chosen, runs, num_seeds, jobs, report, pool, by_replica)
    if clairvoyant:
        runs = with_clairvoyant(runs, chosen)
    deliver(runs, chosen, outputs, seeded)
