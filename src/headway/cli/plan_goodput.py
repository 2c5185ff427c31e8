"""`headway plan goodput`: the goodput of combos, simulated anew; the work is in `planning.combos.reprofile`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from headway.cli.flags import gpu_file_option
from headway.cli.output import as_json_option
from headway.cli.plan_output import PlanOutput, scenario_source
from headway.core.counts import MOST_OTHER
from headway.planning.combos.rehearsal import ATTAINMENT, MOST_REQUESTS
from headway.planning.combos.reprofile import ReprofileOptions, planned

_path = click.Path(path_type=Path)


@click.command()
@click.argument("fleet", type=_path)
@click.argument("requests", type=_path)
@click.option(
    "--attainment",
    type=click.FloatRange(min=0, max=1, min_open=True),
    default=ATTAINMENT,
    show_default=True,
    help="Share of requests in time at which a rate counts as served.",
)
@click.option(
    "--profile-requests",
    type=click.IntRange(20, MOST_OTHER),
    default=MOST_REQUESTS,
    show_default=True,
    help="Most requests of one simulation of a short profile; the last ones have four times as many.",
)
@gpu_file_option
@click.option("-o", "--out", type=_path, help="Write FLEET with the new goodputs; may be FLEET itself.")
@click.option("--cache", type=_path, help="Folder of cached simulations; default: the user's cache folder.")
@click.option("--no-cache", is_flag=True, help="Simulate without the cache.")
@as_json_option("Print JSON in place of a table.")
@click.option("--no-progress", is_flag=True, help="No progress bar.")
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
