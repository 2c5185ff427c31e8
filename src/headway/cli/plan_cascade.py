"""`headway plan cascade`: deployments and thresholds of a cascade; the work is in `planning.cascade`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from headway.cli.flags import gpu_file_option
from headway.cli.output import PATH, SECONDS_ABOVE_0, list_option
from headway.cli.plan_output import PlanOutput, gpu_offer, plan_options, scenario_source
from headway.core.counts import MOST_SEEDS
from headway.core.errors import HeadwayError
from headway.core.fleet import Gpu
from headway.planning.cascade.answer import planned
from headway.planning.cascade.problem import JudgeError, target_of
from headway.planning.cascade.request import CascadeOptions
from headway.planning.combos.plan import own_gpus
from headway.planning.combos.problem import Offer


@click.command()
@click.argument("scenario", type=PATH, required=False)
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
    left (`requests.parquet`); its first pool has the GPU and the engine. The plan uses the models of its `cascade`, or
    all models with scores. Exit code 3: no plan meets the target; the closest one is printed.
    """
    source = scenario_source(scenario, preset, gpu_file)
    num_gpus, offers = _gpus(gpus, gpus_per_server, own_gpus([source.document], source.places))
    if quality is None and latency is None:
        raise HeadwayError("expected --quality or --latency, or both")
    options = CascadeOptions(
        target=target_of(quality, latency),
        num_gpus=num_gpus,
        gpus=offers,
        gpus_per_server=gpus_per_server,
        rps=rps,
        combos=combos,
        prefix_hit_rate=prefix_hit_rate,
        alternatives=not no_alternatives,
        curve=curve,
        errors=tuple(map(_judge_error, regret.split(","))) if regret else (),
        fresh_draws=fresh_draws,
    )
    output = PlanOutput(**outputs)
    with output.resources("simulating", "cascades") as resources:
        found = planned(source, options, resources)
    return output.show(found)


def _gpus(text: str | None, per_server: int | None, find: Callable[[str], Gpu]) -> tuple[int | None, tuple[Offer, ...]]:
    """A number of the first pool's GPUs, or types with numbers and prices."""
    if text is None:
        return None, ()
    if text.isdecimal() and int(text):
        return int(text), ()
    return None, tuple(gpu_offer(each, per_server, find) for each in text.split(","))


def _judge_error(text: str) -> JudgeError:
    try:
        bias, _, noise = text.strip().partition(":")
        return JudgeError(float(bias), float(noise or 0))
    except ValueError as error:
        raise HeadwayError(f"--regret: {text.strip()!r}; expected points as in -9:8 ({error})") from None
