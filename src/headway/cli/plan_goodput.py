"""`headway plan goodput`: the goodput of combos, simulated anew; the work is in `planning.combos.reprofile`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from headway.cli.flags import gpu_file_option
from headway.cli.output import PATH, as_json_option, no_progress_option
from headway.cli.plan_combos import profile_options
from headway.cli.plan_output import PlanOutput, cache_options, scenario_source
from headway.planning.combos.reprofile import ReprofileOptions, planned


@click.command()
@click.argument("fleet", type=PATH)
@click.argument("requests", type=PATH)
@profile_options("Most requests of one simulation of a short profile; the last ones have four times as many.")
@gpu_file_option
@click.option("-o", "--out", type=PATH, help="Write FLEET with the new goodputs; may be FLEET itself.")
@cache_options
@as_json_option("Print JSON in place of a table.")
@no_progress_option
def goodput(
    fleet: Path, requests: Path, attainment: float, profile_requests: int, gpu_file: Path | None, **outputs: Any
) -> int:
    """Measure again how many requests per second the combos of FLEET serve in time.

    REQUESTS are the records of `headway serve --records`, or a trace in any format. Requests with these lengths are
    simulated on one combo of each kind, within the `slo` of FLEET. A gateway that serves FLEET reloads it when --out
    replaces it: its router weighs combos by the new goodputs, and its scaler uses them. Exit code 3: a combo serves no
    rate in time, and keeps its old goodput.
    """
    source = scenario_source(fleet, None, gpu_file)
    options, output = ReprofileOptions(attainment, profile_requests), PlanOutput(**outputs)
    with output.resources("profiling", "combos") as resources:
        found = planned(source, fleet.read_text(encoding="utf-8"), requests, options, resources)
    return output.show(found)
