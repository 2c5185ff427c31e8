"""`headway plan fleet`: one fleet for several models on the available GPUs; the work is in `planning.fleet`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from headway.cli.flags import (
    assume_option,
    gpu_file_option,
    listed,
    listed_routers,
    slo_of,
    slo_option,
    whole,
    with_gpus,
)
from headway.cli.output import ABOVE_0, PATH, POSITIVE, SEEDS, list_option
from headway.cli.plan_output import PlanOutput, gpu_offer, jobs_option, plan_options
from headway.config.scenario import read
from headway.config.strict_yaml import Places
from headway.core.errors import HeadwayError
from headway.forecast.demand_file import load
from headway.planning.combos.plan import own_gpus
from headway.planning.demand import fleets
from headway.planning.demand.problem import DEFAULT_CHANCE
from headway.planning.fleet.answer import planned
from headway.planning.fleet.document import of_trace
from headway.planning.fleet.plan import ATTAINMENT, ROUTINGS, FleetOptions
from headway.planning.rehearsals import Source

SCENARIOS = (".yaml", ".yml")


@click.command()
@click.argument("trace", type=PATH, required=False)
@click.option(
    "--have", required=True, help="GPUs at hand, as type:count:$/h: a100:8,h100:16:2.8. Count and price may be missing."
)
@slo_option
@click.option(
    "--model",
    "models",
    multiple=True,
    help="A model of the catalog, of a folder, or of the hub's cache; or NAME=MODEL for requests that ask for NAME. "
    "Default: the trace's own names.",
)
@assume_option
@click.option("--engine", help="An engine of the catalog: vllm, sglang, ... Default: the file's, else simulated.")
@click.option(
    "--attainment",
    type=click.FloatRange(min=0, max=1, min_open=True),
    default=ATTAINMENT,
    show_default=True,
    help="Share of each model's requests that must meet their SLOs.",
)
@click.option("--limit", type=POSITIVE, help="Read at most this many requests of the trace.")
@click.option("--rate-scale", type=ABOVE_0, help="Multiply the trace's rate; 2 is twice the rate.")
@list_option("--tp", default="1,2,4,8", show_default=True, help="Tensor parallel degrees to choose from.")
@list_option("--routing", default=",".join(ROUTINGS), show_default=True, help="Routers to compare.")
@click.option("--no-split", is_flag=True, help="No separate prefill and decode replicas.")
@click.option("--seeds", type=SEEDS, help="Seeds of every whole fleet. Default: 5, or 3 of over 20,000 requests.")
@click.option("--demand", type=PATH, help="A forecast of headway forecast demand: plan the fleet of each week.")
@click.option(
    "--chance",
    type=click.FloatRange(0.5, 0.995, max_open=True),
    default=DEFAULT_CHANCE,
    show_default=True,
    help="With --demand: quantile of each week's busiest hour that is planned for.",
)
@click.option(
    "--coefficients", type=PATH, multiple=True, help="A file of headway calibrate, for the GPUs in it. Repeatable."
)
@gpu_file_option
@jobs_option
@plan_options
def fleet(
    trace: Path | None, have: str, slo: str | None, models: tuple[str, ...], engine: str | None, attainment: float,
    limit: int | None, rate_scale: float | None, tp: str, routing: str, no_split: bool, seeds: int | None,
    demand: Path | None, chance: float, coefficients: tuple[Path, ...],
    gpu_file: Path | None, assume: bool | None, **outputs: Any,
) -> int:  # fmt: skip
    """Find the cheapest fleet of the GPUs at hand for several models, its router, and whether to disaggregate.

    TRACE is a file of requests with a column `model`, or a scenario (.yaml) with a workload and a pool for each model.
    First each model is sized on each type of GPU, and on pairs for prefill and decode; then the GPUs are allocated.
    Finally whole fleets are rehearsed, with different routers, tiers, and one unit more or less, on the original and on
    redrawn requests. The answer is three sentences, and with --out a fleet file. Simulations are cached, so an
    interrupted plan resumes. Exit code 3: the GPUs at hand are not enough.

    With --demand, each week of a forecast gets a fleet. The requests are those of the busiest recorded hour, at each
    model's forecast rate; TRACE may be omitted.
    """
    forecast = None if demand is None else load(demand)
    if forecast is not None:
        for option, value in {"--limit": limit, "--rate-scale": rate_scale}.items():
            if value is not None:
                raise HeadwayError(f"{option}: not with --demand, which says the rates")
        trace = Path(forecast.busiest.path) if trace is None else trace
    if trace is None:
        raise HeadwayError("expected a TRACE, or --demand")
    source = _source(trace, models, engine, limit, rate_scale, gpu_file, assume).with_slo(slo_of(slo), "--slo")
    find = own_gpus([source.document], source.places)
    options = FleetOptions(
        offers=tuple(gpu_offer(each, None, find, "--have") for each in listed(have, "--have")),
        attainment=attainment,
        tps=tuple(whole(each, "--tp") for each in listed(tp, "--tp")),
        routings=tuple(listed_routers(routing)),
        split=not no_split,
        seeds=seeds,
        coefficients=coefficients,
    )
    output = PlanOutput(**outputs)
    with output.resources("planning, step", "fleets") as resources:
        if forecast is None:
            found = planned(source, options, resources)
        else:
            found = fleets.planned(forecast, source, options, chance, resources)
    return output.show(found)


def _source(
    trace: Path,
    models: tuple[str, ...],
    engine: str | None,
    limit: int | None,
    rate_scale: float | None,
    gpu_file: Path | None,
    assume: bool | None,
) -> Source:
    """The scenario to plan for: a file's with the options' values, or one made from a trace."""
    if trace.suffix in SCENARIOS:
        given = {
            "--model": models,
            "--engine": engine,
            "--limit": limit,
            "--rate-scale": rate_scale,
            "--assume": assume,
        }
        for option, value in given.items():
            if value:
                raise HeadwayError(f"{option}: goes with a trace; {trace} is a scenario, which says it itself")
        document, places = read(trace)
        base_dir = trace.parent
    else:
        named = _named(models)
        document, places, base_dir = of_trace(trace, named, engine, limit, rate_scale, bool(assume)), Places(), Path()
    return Source(*with_gpus(document, places, gpu_file), base_dir)


def _named(models: tuple[str, ...]) -> dict[str, str]:
    """Requested names and their catalog models; a bare name is both."""
    pairs = [each.partition("=") for each in models]
    return {name.strip(): (model or name).strip() for name, _, model in pairs}
