"""`headway simulate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from headway.cli.flags import changes, policy_options, run_options, scenario_file, scenario_options
from headway.cli.output import progress
from headway.cli.results import Outputs, deliver, output_options, trace_option
from headway.core.errors import HeadwayError
from headway.scenario import load, run


@click.command()
@scenario_options
@policy_options
@run_options
@output_options
@trace_option
def command(scenario: Path | None, preset: str | None, **flags: Any) -> None:
    """Run the SCENARIO file, with one routing and one ordering, and print its metrics."""
    outputs = Outputs.taken_from(flags)
    file = scenario_file(scenario, preset)
    if file is None:
        raise HeadwayError("SCENARIO is missing; write one with: headway new")
    chosen = load(file, changes(flags))
    with progress("simulating", wanted=not outputs.no_progress) as tell:
        done = run(chosen, tell)
    deliver([done], chosen, outputs)
