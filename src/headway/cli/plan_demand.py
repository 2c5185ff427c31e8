"""`--demand` of plans: a forecast of headway forecast demand in place of a workload."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from headway.cli.flags import flag, together
from headway.cli.output import PATH, print_json, print_table
from headway.cli.plan_output import INFEASIBLE, PlanOutput, command_line, requests_folder, write, write_html
from headway.config.strict_yaml import Places
from headway.core.errors import HeadwayError
from headway.forecast.demand import DemandForecast
from headway.forecast.demand_file import load
from headway.planning.capacity.plan import CapacityOptions
from headway.planning.demand.page import page
from headway.planning.demand.plan import DemandPlanOptions, plan, scenario_yaml
from headway.planning.demand.problem import DEFAULT_CHANCE, DemandPrices
from headway.planning.demand.text import WEEK_HEADS, render, week_rows
from headway.scenario import Simulator

_PRICE = click.FloatRange(min=0)
demand_options = together((
    click.option("--demand", type=PATH, help="A forecast of headway forecast demand: plan the replicas of each week."),
    click.option(
        "--chance", type=click.FloatRange(0.5, 0.995, max_open=True), default=DEFAULT_CHANCE, show_default=True,
        help="With --demand: least chance that each week's busiest hour meets the targets.",
    ),
    click.option("--reserved-usd", type=_PRICE, help="With --demand: price of a reserved GPU for an hour."),
    click.option("--spot-usd", type=_PRICE, help="With --demand: price of a spot GPU for an hour."),
))  # fmt: skip
DEMAND_FLAGS = ("demand", "chance", "reserved_usd", "spot_usd")
_OF_WORKLOADS = ("trace", "limit", "rate_scale", "concurrency", "workload", "rate", "num_requests", "prompt_tokens",
                 "output_tokens", "warmup_s")  # fmt: skip


def forecast_of(asked: Mapping[str, Any], others: Mapping[str, Any]) -> DemandForecast | None:
    """The forecast of `--demand`; None without it. HeadwayError for options that do not go together."""
    if asked["demand"] is None:
        for name in ("reserved_usd", "spot_usd"):
            if asked[name] is not None:
                raise HeadwayError(f"{flag(name)}: goes with --demand, a forecast")
        return None
    for name in _OF_WORKLOADS:
        if others.get(name) is not None:
            raise HeadwayError(f"{flag(name)}: not with --demand, whose requests are the busiest recorded hour's")
    return load(asked["demand"])


def plan_for_demand(
    forecast: DemandForecast, document: dict[str, Any], places: Places, base_dir: Path, options: CapacityOptions,
    asked: Mapping[str, Any], output: PlanOutput,
) -> int:  # fmt: skip
    """Plan, and write and print the answer. The exit code is that of the command."""
    prices = DemandPrices(reserved_usd_per_gpu_hour=asked["reserved_usd"], spot_usd_per_gpu_hour=asked["spot_usd"])
    wanted = DemandPlanOptions(capacity=options, chance=asked["chance"], prices=prices)
    cache, simulator = output.cache_dir("capacity"), Simulator()
    with output.processes() as pool, output.counting("rehearsing") as progress, requests_folder(cache) as folder:
        found, rehearsal = plan(
            forecast, document, places, base_dir, wanted, simulator, folder, cache, progress, pool
        )  # fmt: skip
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
