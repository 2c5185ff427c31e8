"""`headway simulate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from headway.cli.choose import choose
from headway.cli.flags import scenario_options
from headway.cli.output import progress
from headway.cli.results import Outputs, clairvoyant_option, deliver, output_options, trace_option, with_clairvoyant
from headway.scenario import run


@click.command()
@scenario_options
@clairvoyant_option
@output_options
@trace_option
def command(scenario: Path | None, preset: str | None, clairvoyant: bool, **flags: Any) -> None:
    """Run one routing with one ordering, and print its metrics.

    Workload and fleet come from the SCENARIO file, or from options alone; options override the file.
    """
    outputs = Outputs.taken_from(flags)
    chosen = choose("simulate", scenario, preset, flags)
    with progress("simulating", wanted=not outputs.no_progress) as tell:
        done = run(chosen, tell)
    deliver(with_clairvoyant([done], chosen) if clairvoyant else [done], chosen, outputs)
