"""`headway simulate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from headway.cli.choose import choose
from headway.cli.flags import scenario_options
from headway.cli.output import progress
from headway.cli.results import Outputs, clairvoyant_option, deliver, output_options, trace_option, with_clairvoyant
from headway.config.scenario import Scenario
from headway.config.scenario import variant as variant_of
from headway.control.decisions import DecisionObserver
from headway.records.decision_log import DecisionFile
from headway.report.run import Run
from headway.scenario.run import Progress, run


@click.command()
@scenario_options
@click.option("--variant", help="Which of a scenario's sets of policies, if it has several.")
@clairvoyant_option
@output_options
@trace_option
@click.option("--decisions", type=click.Path(path_type=Path), help="Write why each replica was chosen (JSON lines).")
def command(
    scenario: Path | None, preset: str | None, variant: str | None, clairvoyant: bool, decisions: Path | None,
    **flags: Any,
) -> None:  # fmt: skip
    """Run one routing with one ordering, and print its metrics.

    Workload and fleet come from the SCENARIO file, or from options alone; options override the file.
    """
    outputs = Outputs.taken_from(flags)
    chosen = choose("simulate", scenario, preset, flags)
    if variant is not None:
        chosen = variant_of(chosen, variant)
    with progress("simulating", wanted=not outputs.no_progress) as tell:
        done = run(chosen, tell, with_bound=True) if decisions is None else _told(chosen, tell, decisions)
    deliver(with_clairvoyant([done], chosen) if clairvoyant else [done], chosen, outputs)


def _told(chosen: Scenario, tell: Progress | None, path: Path) -> Run:
    """A run, and its decisions in a file."""
    file, decisions = DecisionFile(path), DecisionObserver()
    decisions.listeners.append(file.write)
    try:
        return run(chosen, tell, decisions, with_bound=True)
    finally:
        file.close()
