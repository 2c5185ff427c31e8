"""`headway plan tiers`: the number of tiers and their windows; the work is in `planning.tiers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from headway.cli.output import PATH, as_json_option, list_option, no_progress_option
from headway.cli.plan_output import PlanOutput, scenario_source
from headway.core.counts import MOST_SEEDS
from headway.core.errors import HeadwayError
from headway.planning.tiers.rehearsal import TierOptions, planned


@click.command()
@click.argument("scenario", type=PATH, required=False)
@click.option("--builtin", "preset", help="A scenario that comes with Headway, in place of a file.")
@list_option("--tiers", default="1,2,3,4,6,8", show_default=True, help="Numbers of tiers to try.")
@list_option("--decay", default="0.5,1,2", show_default=True, help="Decays of the headroom to try.")
@click.option(
    "--seeds", type=click.IntRange(2, MOST_SEEDS), default=5, show_default=True, help="Seeds to simulate with."
)
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0),
    default=0.01,
    show_default=True,
    help="An acceptable loss of attainment.",
)
@as_json_option("Print JSON in place of a table.")
@no_progress_option
def tiers(scenario: Path | None, preset: str | None, as_json: bool, no_progress: bool, **flags: Any) -> int:
    """Find how many tiers of service a workload needs, and how steeply their headroom should fall.

    The tiers of the SCENARIO's workload are classes of customers with SLOs of their own. Neighbouring classes are
    merged into fewer tiers, and every setting is simulated with the same requests. The measure is the share of
    requests that meet their SLOs; settings that the seeds do not distinguish from the best are marked as tied.
    """
    source = scenario_source(scenario, preset)
    options = TierOptions(
        num_tiers=tuple(_number(each, "--tiers", int) for each in flags["tiers"].split(",")),
        decays=tuple(_number(each, "--decay", float) for each in flags["decay"].split(",")),
        seeds=flags["seeds"],
        tolerance=flags["tolerance"],
    )
    output = PlanOutput(no_cache=True, as_json=as_json, no_progress=no_progress)
    with output.resources("rehearsing", "tiers") as resources:
        found = planned(source, options, resources)
    return output.show(found)


def _number(text: str, option: str, kind: type) -> Any:
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or value < 0 or (kind is int and value < 1):
        raise HeadwayError(
            f"{option}: {text.strip()!r}; expected numbers{' from 1' if kind is int else ''}, separated by commas"
        )
    return value
