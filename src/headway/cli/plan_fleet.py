"""`headway plan fleet`: one fleet for several models on the GPUs at hand; the work is in `planning.fleet`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from headway.cli.flags import assume_option, gpu_file_option, listed, listed_routers, whole, with_gpus
from headway.cli.output import ABOVE_0, PATH, POSITIVE, SEEDS, console, list_option, print_json, print_table
from headway.cli.plan_output import (
    INFEASIBLE,
    PlanOutput,
    command_line,
    gpu_offer,
    jobs_option,
    plan_options,
    requests_folder,
    write,
    write_html,
)
from headway.config.scenario import Changes, read
from headway.config.strict_yaml import Places, change
from headway.core.errors import HeadwayError
from headway.forecast.demand_file import load
from headway.planning.combos.plan import own_gpus
from headway.planning.demand import fleets
from headway.planning.demand.problem import DEFAULT_CHANCE
from headway.planning.fleet.document import of_trace, slo_of
from headway.planning.fleet.page import page
from headway.planning.fleet.plan import ATTAINMENT, ROUTINGS, FleetOptions, FleetQuestion, plan, scenario_yaml
from headway.planning.fleet.problem import FleetPlan
from headway.planning.fleet.text import render
from headway.scenario import Simulator

SCENARIOS = (".yaml", ".yml")


@click.command()
@click.argument("trace", type=click.Path(path_type=Path), required=False)
@click.option(
    "--have", required=True, help="GPUs at hand, as type:count:$/h: a100:8,h100:16:2.8. Count and price may be missing."
)
@click.option("--slo", help="Of requests without SLOs of their own: ttft=2s,tpot=50ms,e2e=30s.")
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
@gpu_file_option
@jobs_option
@plan_options
def fleet(
    trace: Path | None, have: str, slo: str | None, models: tuple[str, ...], engine: str | None, attainment: float,
    limit: int | None, rate_scale: float | None, tp: str, routing: str, no_split: bool, seeds: int | None,
    demand: Path | None, chance: float, gpu_file: Path | None, assume: bool | None, **outputs: Any,
) -> int:  # fmt: skip
    """Find the cheapest fleet of the GPUs at hand for several models, its router, and whether to disaggregate.

    TRACE is a file of requests with a column `model`, or a scenario (.yaml) with a workload and a pool for each model.
    Each model is sized on each type of GPU, and on pairs that prefill and decode; the GPUs are allocated; routers,
    tiers and fleets of one unit more or less are rehearsed whole, on the requests as they are and drawn anew. The
    answer is three sentences, and with --out a fleet file. Simulations are cached, so that an interrupted plan
    resumes. Exit code 3: the GPUs at hand are not enough.

    With --demand, each week of a forecast gets a fleet. The requests are those of the busiest recorded hour, at each
    model's rates; TRACE may then be left out.
    """
    forecast = None if demand is None else load(demand)
    if forecast is not None:
        for option, value in {"--limit": limit, "--rate-scale": rate_scale}.items():
            if value is not None:
                raise HeadwayError(f"{option}: not with --demand, which says the rates")
        trace = Path(forecast.busiest.path) if trace is None else trace
    if trace is None:
        raise HeadwayError("expected a TRACE, or --demand")
    document, places, base_dir = _document(trace, slo, models, engine, limit, rate_scale, gpu_file, assume)
    find = own_gpus([document], places)
    options = FleetOptions(
        offers=tuple(gpu_offer(each, None, find, "--have") for each in listed(have, "--have")),
        attainment=attainment,
        tps=tuple(whole(each, "--tp") for each in listed(tp, "--tp")),
        routings=tuple(listed_routers(routing)),
        split=not no_split,
        seeds=seeds,
    )
    output = PlanOutput(**outputs)
    cache = output.cache_dir("fleets")
    with output.processes() as pool, output.counting("planning, step") as progress, requests_folder(cache) as folder:
        question = FleetQuestion(document, places, base_dir, options, Simulator(), folder, cache, pool, progress)
        by_week = None if forecast is None else fleets.plan(forecast, question, chance)
        answer = plan(question) if by_week is None else by_week[0].largest
    if by_week is not None:
        return _for_demand(*by_week, question, output)
    _write(answer, document, question, output)
    if output.as_json:
        print_json(answer)
    else:
        click.echo(render(answer, width=console().width, color=sys.stdout.isatty()), nl=False)
    click.echo(f"rehearsals: {answer.num_simulated} simulated, {answer.num_found} found in the cache", err=True)
    return 0 if answer.status == "met" else INFEASIBLE


def _write(answer: FleetPlan, document: Mapping[str, Any], question: FleetQuestion, output: PlanOutput) -> None:
    """The page, and the fleet for the requests of `document`."""
    if output.html is not None:
        title = str(question.document.get("name", "fleet"))
        write_html(output.html, page(answer, title, command_line(), output.out))
    if output.out is not None and answer.status == "met":
        write(output.out, scenario_yaml(answer, document, question.base_dir, question.options.offers))


def _for_demand(
    found: fleets.FleetDemandPlan, largest: Mapping[str, Any], question: FleetQuestion, output: PlanOutput
) -> int:
    """The fleets of the weeks of a forecast. The page and the written fleet are those of the week with the most."""
    _write(found.largest, largest, question, output)
    if output.as_json:
        print_json(found)
    else:
        for line in (*fleets.sentences(found), *(f"note: {note}" for note in found.notes)):
            click.echo(line)
        click.echo()
        print_table(fleets.FLEET_WEEK_HEADS, fleets.week_rows(found))
    counted = f"{found.num_simulated} simulated, {found.num_found} found in the cache"
    click.echo(f"plans: {found.num_plans}; rehearsals: {counted}", err=True)
    return 0 if found.status == "met" else INFEASIBLE


def _document(
    trace: Path,
    slo: str | None,
    models: tuple[str, ...],
    engine: str | None,
    limit: int | None,
    rate_scale: float | None,
    gpu_file: Path | None,
    assume: bool | None,
) -> tuple[dict[str, Any], Places, Path]:
    """The scenario to plan for: that of a file with the options' values, or one made from a trace."""
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
    if slo is not None:
        slos: Changes = {("slo", key): ("--slo", value) for key, value in _slo(slo).items()}
        document, places = change({**document, "slo": document.get("slo") or {}}, places, slos)
    return *with_gpus(document, places, gpu_file), base_dir


def _named(models: tuple[str, ...]) -> dict[str, str]:
    """Requested names -> models of the catalog; a name alone is both."""
    pairs = [each.partition("=") for each in models]
    return {name.strip(): (model or name).strip() for name, _, model in pairs}


def _slo(text: str) -> Mapping[str, float]:
    try:
        return slo_of(text)
    except HeadwayError as error:
        raise HeadwayError(f"--slo: {error}") from None
