"""The option `--demand` of plans: a forecast in place of a workload."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from headway.cli.output import print_json, print_table
from headway.cli.plan_output import INFEASIBLE, PlanOutput, command_line, requests_folder, write, write_html
from headway.config.strict_yaml import Places
from headway.forecast.demand import DemandForecast
from headway.planning.capacity.plan import CapacityOptions
from headway.planning.demand.page import page
from headway.planning.demand.plan import DemandPlanOptions, plan, scenario_yaml
from headway.planning.demand.problem import DemandPrices
from headway.planning.demand.text import WEEK_HEADS, render, week_rows
from headway.scenario import Simulator


def plan_for_demand(
    forecast: DemandForecast,
    document: dict[str, Any],
    places: Places,
    base_dir: Path,
    options: CapacityOptions,
    asked: Mapping[str, Any],
    output: PlanOutput,
) -> int:
    """Make the plan, write and print it. Returns the command's exit code."""
    prices = DemandPrices(reserved_usd_per_gpu_hour=asked["reserved_usd"], spot_usd_per_gpu_hour=asked["spot_usd"])
    wanted = DemandPlanOptions(capacity=options, chance=asked["chance"], prices=prices)
    cache, simulator = output.cache_dir("capacity"), Simulator()
    with output.processes() as pool, output.counting("rehearsing") as progress, requests_folder(cache) as folder:
        found, rehearsal = plan(
            forecast,
            document,
            places,
            base_dir=base_dir,
            options=wanted,
            simulator=simulator,
            requests=folder,
            cache_dir=cache,
            progress=progress,
            pool=pool,
        )
    if output.html is not None:
        write_html(output.html, page(found, forecast, command_line()))
    if output.out is not None and found.status == "met":
        write(output.out, scenario_yaml(found, rehearsal, forecast))
    if output.as_json:
        print_json(found)
    else:
        click.echo(render(found))
        print_table(WEEK_HEADS, week_rows(found))
    counted = f"{rehearsal.num_simulated} simulated, {rehearsal.num_found} found in the cache"
    click.echo(f"rehearsals: {counted}", err=True)
    return 0 if found.status == "met" else INFEASIBLE
