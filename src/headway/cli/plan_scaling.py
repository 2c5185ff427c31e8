"""`headway plan scaling`: scalers compared over a recorded demand; the work is in `planning.scaling`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from headway.api.plans import assembling
from headway.cli.flags import gpu_file_option, listed, slo_of, slo_option
from headway.cli.output import PATH, SECONDS_ABOVE_0, SEEDS, list_option
from headway.cli.plan_output import PlanOutput, jobs_option, plan_options, scenario_source, write
from headway.core.duration import seconds
from headway.core.errors import HeadwayError
from headway.planning.scaling.answer import file_names, planned, title
from headway.planning.scaling.candidates import FAMILIES
from headway.planning.scaling.demand import with_demand
from headway.planning.scaling.plan import ScalingOptions, ScalingPlan, without_scaling
from headway.scenario import Scenario
from headway.serving.export.autoscalers import autoscalers


@click.command()
@click.argument("scenario", type=PATH, required=False)
@click.option("--builtin", "preset", help="A scenario that comes with Headway, in place of a file: sageserve.")
@click.option(
    "--demand",
    help="Recorded demand: a CSV with a column `time` and one of rates, the answer of a Prometheus range query (a file "
    "or its URL), or a folder of records of headway serve. Default: the scenario's workload.",
)
@click.option("--per-s", type=SECONDS_ABOVE_0, default=1.0, show_default=True, help="Time that a rate covers.")
@list_option("--startup-s", help="Start times to plan for: 60s,155s,10m. Default: the scenario's own.")
@click.option("--max-late", default="1%", show_default=True, help="Share of requests that may miss an SLO: 1% or 0.01.")
@slo_option
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
    type=PATH,
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
    """Find the scaler with the fewest GPU-hours for recorded demand that keeps enough requests in time.

    SCENARIO has the fleet, its limits and policies. Each scaler is simulated with several settings of its head-room,
    for each start time, on the same requests. The result also shows a plan that knows the demand, and the proven bound.
    With several start times, --out is a folder. Simulations are cached, so an interrupted plan resumes. Exit code 3:
    every scaler is late too often.
    """
    expected = "a SCENARIO, or --builtin; it has the fleet that is scaled"
    source = scenario_source(scenario, preset, gpu_file, expected).with_slo(slo_of(slo), "--slo")
    if demand is not None:
        source = source._replace(document=with_demand(source.document, demand, per_s, past_hours))
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
    made = assembling(source)
    with output.resources("simulating", "scaling") as resources:
        found = planned(source, options, made, resources)
    if manifest is not None:
        _write_autoscalers(found.answer, made(without_scaling(source.document)), manifest)
    return output.show(found)


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


def _write_autoscalers(answer: ScalingPlan, scenario: Scenario, manifest: Path) -> None:
    for each, name in zip(answer.plans, file_names(answer), strict=True):
        if each.kubernetes is None:
            click.echo(f"{title(each)}: no autoscaler of Kubernetes suffices; nothing written", err=True)
            continue
        text = autoscalers(scenario, each.results[each.kubernetes].scaling)
        write(manifest / name, text)
