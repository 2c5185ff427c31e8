"""`headway simulate`: one run of a scenario, and its metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from headway.cli.flags import ray_option, ray_pool, scenario_options
from headway.cli.output import JOBS, decisions_option, progress
from headway.cli.runs import (
    Outputs,
    choose,
    clairvoyant_option,
    deliver,
    output_options,
    trace_option,
    with_clairvoyant,
)
from headway.config.scenario import Scenario
from headway.control.decisions import DecisionObserver
from headway.core.errors import HeadwayError
from headway.records.json_lines import JsonLinesFile
from headway.report.run import Run
from headway.scenario.run import Progress, run
from headway.scenario.sharding import LONG_REQUESTS


@click.command()
@scenario_options
@click.option("--variant", help="One of the scenario's sets of policies, if it has several.")
@click.option(
    "--jobs",
    type=JOBS,
    help="Number of processes, for models that do not affect each other; the records are the same. Default: one for"
    f" each core from {LONG_REQUESTS:,} requests on, else 1.",
)
@ray_option
@clairvoyant_option
@output_options
@trace_option
@decisions_option
def command(
    scenario: Path | None,
    preset: str | None,
    variant: str | None,
    jobs: int | None,
    ray: bool,
    clairvoyant: bool,
    decisions: Path | None,
    **flags: Any,
) -> None:
    """Run one set of policies, and print its metrics.

    Workload and fleet come from the SCENARIO file, or from options alone; options override the file.
    """
    if ray and decisions is not None:
        raise HeadwayError("--decisions: one process records them; expected no --ray")
    outputs = Outputs.taken_from(flags)
    chosen = choose("simulate", scenario, preset, flags, variant)
    with progress("simulating", wanted=not outputs.no_progress) as report:
        if decisions is None:
            with ray_pool(ray) as pool:
                result = run(chosen, report, with_bound=True, jobs=jobs, pool=pool)
        else:
            result = _run_logged(chosen, report, decisions, jobs)
    deliver(with_clairvoyant([result], chosen) if clairvoyant else [result], chosen, outputs)


def _run_logged(chosen: Scenario, report: Progress | None, path: Path, jobs: int | None) -> Run:
    file, decisions = JsonLinesFile(path), DecisionObserver()
    decisions.listeners.append(file.write)
    try:
        return run(chosen, report, decisions, with_bound=True, jobs=jobs)
    finally:
        file.close()
