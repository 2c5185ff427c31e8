"""`headway plan cascade`: deployments and thresholds of a cascade; the work is in `planning.cascade`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from headway.cli.flags import gpu_file_option, scenario_file, with_gpus
from headway.cli.output import SECONDS_ABOVE_0, list_option, print_json, print_table
from headway.cli.plan_output import INFEASIBLE, PlanOutput, command_line, gpu_offer, plan_options, write, write_html
from headway.config.scenario import read
from headway.core.counts import MOST_SEEDS
from headway.core.errors import HeadwayError
from headway.core.fleet import Gpu
from headway.planning.cascade.best_plan import CascadeAnswer, plan, scenario_yaml
from headway.planning.cascade.page import LOST, caveats, lost, named_plans, numbers_of, page, reached
from headway.planning.cascade.planning_request import make_request
from headway.planning.cascade.problem import Cheapest, LatencyBudget, QualityFloor, Target
from headway.planning.cascade.regret import JudgeError
from headway.planning.combos.plan import own_gpus
from headway.planning.combos.problem import Offer
from headway.scenario import Simulator

_path = click.Path(path_type=Path)


@click.command()
@click.argument("scenario", type=_path, required=False)
@click.option("--builtin", "preset", help="A scenario that comes with Headway, in place of a file: cascadia.")
@click.option("--quality", type=click.FloatRange(0, 100), help="Mean score to reach, at the least p95 latency.")
@click.option(
    "--latency",
    type=SECONDS_ABOVE_0,
    help="Limit of the p95 latency, at the best quality; with --quality: at the least cost.",
)
@list_option("--gpus", help="Number of GPUs, or type:count:$/h separated by commas; default: the fleet's.")
@click.option("--gpus-per-server", type=click.IntRange(min=1), help="Most GPUs of one instance.")
@click.option("--combos", is_flag=True, help="Consider combos, too: replicas that prefill, and others that decode.")
@click.option(
    "--rps",
    type=click.FloatRange(min=0, min_open=True),
    help="Requests per second, in place of `arrivals`.",
)
@click.option(
    "--prefix-hit-rate",
    type=click.FloatRange(0, 1, max_open=True),
    default=0.0,
    help="Share of prompt tokens that prefix caches hold, as measured on a sample of the requests.",
)
@click.option("--curve", type=click.IntRange(0, 100), default=0, help="Plan for this many more qualities, low to high.")
@list_option("--regret", metavar="BIAS:NOISE,...", help="Losses of plans whose judge has such errors, in points.")
@click.option(
    "--fresh-draws",
    type=click.IntRange(0, MOST_SEEDS),
    default=5,
    show_default=True,
    help="Other draws of the requests on which the plan is rehearsed: its p95 there, with an interval.",
)
@click.option(
    "--no-alternatives",
    is_flag=True,
    help="Plan without alternatives to compare with. One that is better is not chosen then.",
)
@gpu_file_option
@plan_options
def cascade(
    scenario: Path | None, preset: str | None, quality: float | None, latency: float | None, gpus: str | None,
    gpus_per_server: int | None, combos: bool, rps: float | None, prefix_hit_rate: float, curve: int,
    regret: str | None, fresh_draws: int, no_alternatives: bool, gpu_file: Path | None, **outputs: Any,
) -> int:  # fmt: skip
    """Find thresholds, GPUs per model and replica shapes of a cascade, for a quality, a latency or both.

    The SCENARIO's workload has the scores of each model's answers (`quality`), or is the `trace` that a served cascade
    left (`requests.parquet`); its first pool has the GPU and the engine. The models are those of its `cascade`, or all
    with scores. Exit code 3: no plan meets the target, and the printed one comes nearest.
    """
    file = scenario_file(scenario, preset)
    if file is None:
        raise HeadwayError("expected a scenario file, or --builtin NAME")
    document, places = with_gpus(*read(file), gpu_file)
    num_gpus, offers = _gpus(gpus, gpus_per_server, own_gpus([document], places))
    request = make_request(
        document,
        places,
        file.parent,
        _target(quality, latency),
        Simulator(),
        num_gpus=num_gpus,
        gpus=offers,
        gpus_per_server=gpus_per_server,
        rps=rps,
        combos=combos,
        prefix_hit_rate=prefix_hit_rate,
    )
    errors = [_judge_error(each) for each in regret.split(",")] if regret else []
    output = PlanOutput(**outputs)
    with output.counting("simulating") as progress:
        answer = plan(
            request,
            output.cache_dir("cascades"),
            progress and (lambda num: progress(num, num)),
            not no_alternatives,
            curve,
            errors,
            fresh_draws,
        )
    if output.out is not None:
        write(output.out, scenario_yaml(answer, request))
    if output.html is not None:
        write_html(output.html, page(answer, command_line()))
    print_json(answer) if output.as_json else _show(answer)
    click.echo(f"latencies: {answer.num_simulated} simulated, {answer.num_cached} known before", err=True)
    return 0 if answer.chosen.is_met else INFEASIBLE


def _gpus(text: str | None, per_server: int | None, find: Callable[[str], Gpu]) -> tuple[int | None, tuple[Offer, ...]]:
    """A number of the first pool's, or types with numbers and prices."""
    if text is None:
        return None, ()
    if text.isdecimal() and int(text):
        return int(text), ()
    return None, tuple(gpu_offer(each, per_server, find) for each in text.split(","))


def _target(quality: float | None, latency: float | None) -> Target:
    if quality is None:
        if latency is None:
            raise HeadwayError("expected --quality or --latency, or both")
        return LatencyBudget(latency)
    return QualityFloor(quality) if latency is None else Cheapest(quality, latency)


def _show(answer: CascadeAnswer) -> None:
    """Print the stages of the plan, and the plans that it is compared with."""
    heads = ["model", "GPUs", "replicas", "accepts from", "requests", "p95 of the stage (s)"]
    rows: list[list[object]] = []
    for stage in answer.chosen.plan.stages:
        level = "-" if stage.threshold is None else f"{stage.threshold:.4g}"
        p95 = "-" if stage.p95_latency_s is None else f"{stage.p95_latency_s:.3g}"
        rows.append([stage.model, stage.gpus, stage.shapes, level, f"{stage.processing_ratio:.0%}", p95])
    print_table(heads, rows)
    heads = ["plan", "GPUs per model", "quality", "p95 (s)", "mean (s)", "$/request", "meets the target"]
    rows = []
    for name, each, _ in named_plans(answer):
        rows.append([name, " + ".join(str(stage.num_gpus) for stage in each.plan.stages), *numbers_of(each)])
    print_table(heads, rows)
    for line in (*reached(answer), *caveats(answer)):
        click.echo(line)
    if answer.confidence is not None:
        low, high = answer.confidence.quality
        click.echo(f"on other draws of as many requests, these thresholds reach {low:.4g} to {high:.4g} (95%)")
    if answer.regrets:
        print_table(list(LOST), lost(answer))


def _judge_error(text: str) -> JudgeError:
    try:
        bias, _, noise = text.strip().partition(":")
        return JudgeError(float(bias), float(noise or 0))
    except ValueError as error:
        raise HeadwayError(f"--regret: {text.strip()!r}; expected points as in -9:8 ({error})") from None
