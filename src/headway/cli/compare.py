"""`headway compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from headway import userfile
from headway.cli.flags import (
    changes,
    flag,
    fleet_options,
    given,
    policy_options,
    run_options,
    scenario_file,
    scenario_options,
    synthetic_options,
    trace_options,
)
from headway.cli.output import progress
from headway.cli.results import Outputs, deliver, output_options
from headway.core.errors import HeadwayError
from headway.scenario import Scenario, assemble, compare


@click.command()
@scenario_options
@trace_options
@synthetic_options
@fleet_options
@policy_options
@run_options
@click.option("--jobs", type=click.IntRange(min=1), default=1, show_default=True, help="Processes to run on.")
@output_options
def command(scenario: Path | None, preset: str | None, jobs: int, **flags: Any) -> None:
    """Run several policies on one workload and fleet, and print one table.

    Workload and fleet come from the SCENARIO file, or from options alone; options override the file.
    Every routing is run with every ordering, all on the same arrivals and lengths.
    """
    outputs = Outputs.taken_from(flags)
    chosen = _scenario(scenario_file(scenario, preset), flags)
    with progress("comparing", wanted=not outputs.no_progress) as tell:
        runs = compare(chosen, jobs, tell)
    deliver(runs, chosen, outputs)


def _scenario(file: Path | None, flags: dict[str, Any]) -> Scenario:
    if file is not None:
        data, places = userfile.read(file)
        data.setdefault("name", file.stem)
        pools = data.get("fleet")
        num_pools = len(pools) if isinstance(pools, list) else 0
        return assemble(data, places, file.parent, changes(flags, num_pools))
    _check_complete(given(flags))
    data = {"name": "compare", "workload": {}, "fleet": [{}]}
    return assemble(data, userfile.Places(), Path(), changes(flags))


def _check_complete(used: dict[str, Any]) -> None:
    """Without a scenario, the options must say it all."""
    for name in ("limit", "rate_scale"):
        if name in used and "trace" not in used:
            raise HeadwayError(f"{flag(name)}: goes with --trace")
    if not used.keys() & {"trace", "workload", "prompt_tokens", "output_tokens"}:
        raise HeadwayError(
            "no workload: give a SCENARIO, --trace, --workload,"
            " or --rate, --num-requests, --prompt-tokens and --output-tokens"
        )
    if not used.keys() & {"model", "model_config"}:
        raise HeadwayError("--model or --model-config is missing; headway catalog models lists names")
    if "gpu" not in used:
        raise HeadwayError("--gpu is missing; headway catalog gpus lists names")
