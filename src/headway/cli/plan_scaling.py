"""`headway plan scaling`: scalers compared over a recorded demand; the work is in `planning.scaling`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import click

from headway.cli.flags import gpu_file_option, listed, scenario_file, with_gpus
from headway.cli.output import SECONDS_ABOVE_0, SEEDS, list_option, print_json, print_table
from headway.cli.plan_output import INFEASIBLE, PlanOutput, command_line, jobs_option, plan_options, write, write_html
from headway.config.proxied import without_proxied
from headway.config.scenario import Changes, read
from headway.config.strict_yaml import Places, change
from headway.core.duration import seconds
from headway.core.errors import HeadwayError
from headway.planning.fleet.document import slo_of
from headway.planning.scaling.candidates import FAMILIES
from headway.planning.scaling.demand import with_demand
from headway.planning.scaling.page import HEADS, headline, page, rows, sentences, title
from headway.planning.scaling.plan import (
    Oracle,
    ScalingOptions,
    ScalingPlan,
    StartUpPlan,
    plan,
    scenario_yaml,
    without_scaling,
)
from headway.scenario import Scenario, Simulator
from headway.scenario.oracle_plan import served_tps, timetables
from headway.scenario.run import assemble
from headway.serving.export.autoscalers import autoscalers


@click.command()
@click.argument("scenario", type=click.Path(path_type=Path), required=False)
@click.option("--builtin", "preset", help="A scenario that comes with Headway, in place of a file: sageserve.")
@click.option(
    "--demand",
    help="Recorded demand: a CSV with a column `time` and one of rates, the answer of a Prometheus range query (a file "
    "or its URL), or a folder of records of headway serve. Default: the scenario's workload.",
)
@click.option("--per-s", type=SECONDS_ABOVE_0, default=1.0, show_default=True, help="Time that a rate covers.")
@list_option("--startup-s", help="Start times to plan for: 60s,155s,10m. Default: the scenario's own.")
@click.option("--max-late", default="1%", show_default=True, help="Share of requests that may miss an SLO: 1% or 0.01.")
@click.option("--slo", help="Of requests without SLOs of their own: ttft=2s,tpot=50ms,e2e=30s.")
@list_option("--scalers", default=",".join(FAMILIES), show_default=True, help="Scalers to compare.")
@click.option("--forecaster", help="Of scalers that forecast, as in headway forecast evaluate. Default: their own.")
@click.option(
    "--past-hours",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    help="Hours of demand that the forecaster knows at the start: of a workload of demand those before its "
    "start_hour, of a trace those before its from_s, of --demand FOLDER its first ones.",
)
@click.option("--seeds", type=SEEDS, default=1, show_default=True, help="Seeds of the demand, from the scenario's.")
@click.option("--no-clairvoyant", is_flag=True, help="Leave out the plan that knows the demand.")
@click.option(
    "--manifest",
    type=click.Path(path_type=Path),
    help="Write the autoscaler of Kubernetes or KEDA, where one suffices (5% more GPU-hours at most).",
)
@gpu_file_option
@jobs_option
@plan_options
def scaling(
    scenario: Path | None, preset: str | None, demand: str | None, per_s: float, startup_s: str | None, max_late: str,
    slo: str | None, scalers: str, forecaster: str | None, past_hours: float, seeds: int, no_clairvoyant: bool,
    manifest: Path | None, gpu_file: Path | None, **outputs: Any,
) -> int:  # fmt: skip
    """Find the scaler that takes the fewest GPU-hours for recorded demand with few enough late requests.

    SCENARIO has the fleet, its limits and policies. Each scaler is simulated with several settings of its head-room,
    for each start time, on the same requests; beside them are a plan that knows the demand and the proven bound. With
    several start times, --out is a folder. Simulations are cached, so that an interrupted plan resumes. Exit code 3:
    no scaler is late seldom enough.
    """
    file = scenario_file(scenario, preset)
    if file is None:
        raise HeadwayError("expected a SCENARIO, or --builtin; it has the fleet that is scaled")
    document, places = with_gpus(*read(file), gpu_file)
    if slo is not None:
        slos: Changes = {("slo", key): ("--slo", value) for key, value in _slo(slo).items()}
        document, places = change({**document, "slo": document.get("slo") or {}}, places, slos)
    if demand is not None:
        document = with_demand(document, demand, per_s, past_hours)
    if past_hours and forecaster is None:
        raise HeadwayError("--past-hours: goes with --forecaster, which learns from them")
    options = ScalingOptions(
        scalers=tuple(listed(scalers, "--scalers")),
        startup_s=_start_times(startup_s),
        max_late=_share(max_late),
        num_seeds=seeds,
        forecaster=None if forecaster is None else {"name": forecaster, "past_hours": past_hours},
        clairvoyant=not no_clairvoyant,
    )
    output = PlanOutput(**outputs)
    made = partial(_assembled, places=places, base_dir=file.parent)
    oracle = Oracle(served_tps, timetables)
    with output.processes() as pool, output.counting("simulating") as progress:
        answer = plan(document, options, made, oracle, Simulator(), output.cache_dir("scaling"), progress, pool)
    if output.html is not None:
        write_html(output.html, page(answer, command_line()))
    if output.out is not None:
        _write(answer, document, file.parent, output.out)
    if manifest is not None:
        _write_autoscalers(answer, made(without_scaling(document)), manifest)
    print_json(answer) if output.as_json else _show(answer)
    click.echo(f"simulations: {answer.num_simulated} simulated, {answer.num_found} found in the cache", err=True)
    return 0 if answer.is_met else INFEASIBLE


def _assembled(document: Mapping[str, Any], places: Places, base_dir: Path) -> Scenario:
    return assemble(*without_proxied(document, places), base_dir)


def _start_times(text: str | None) -> tuple[float | None, ...]:
    if text is None:
        return (None,)
    try:
        return tuple(dict.fromkeys(map(seconds, listed(text, "--startup-s"))))
    except HeadwayError:
        expected = "expected durations, separated by commas, as in 60s,155s,10m"
        raise HeadwayError(f"--startup-s: {text!r}; {expected}") from None


def _share(text: str) -> float:
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise HeadwayError(f"--max-late: {text!r}; expected a share of requests, such as 1% or 0.01")
    return share


def _slo(text: str) -> Mapping[str, float]:
    try:
        return slo_of(text)
    except HeadwayError as error:
        raise HeadwayError(f"--slo: {error}") from None


def _write(answer: ScalingPlan, document: Mapping[str, Any], base_dir: Path, out: Path) -> None:
    for each in answer.plans:
        if each.chosen is not None:
            file = out if len(answer.plans) == 1 else out / f"startup-{each.startup_s:g}s.yaml"
            file.parent.mkdir(parents=True, exist_ok=True)
            write(file, scenario_yaml(each, document, base_dir))


def _write_autoscalers(answer: ScalingPlan, scenario: Scenario, manifest: Path) -> None:
    for each in answer.plans:
        if each.kubernetes is None:
            click.echo(f"{title(each)}: no autoscaler of Kubernetes suffices; nothing written", err=True)
            continue
        text = autoscalers(scenario, each.results[each.kubernetes].scaling)
        write(manifest if len(answer.plans) == 1 else manifest / f"startup-{each.startup_s:g}s.yaml", text)


def _show(answer: ScalingPlan) -> None:
    for each in answer.plans:
        _show_one(each, answer.max_late)
    for note in answer.notes:
        click.echo(note)


def _show_one(answer: StartUpPlan, max_late: float) -> None:
    click.echo(headline(answer, max_late))
    for line in sentences(answer):
        click.echo(line)
    print_table(list(HEADS), rows(answer))
    click.echo()
