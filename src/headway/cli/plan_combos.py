"""`headway plan combos`: combos of prefill and decode replicas for a market; the work is in `planning.combos`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from headway.cli.flags import F, gpu_file_option, listed_routers, together, with_gpus
from headway.cli.output import PATH, POSITIVE, list_option
from headway.cli.plan_output import PlanOutput, gpu_offer, jobs_option, plan_options
from headway.config.scenario import read
from headway.config.strict_yaml import Places
from headway.core.counts import MOST_OTHER
from headway.core.errors import HeadwayError
from headway.planning.combos import answer, curve_answer
from headway.planning.combos.plan import MOST_RPS, ROUTINGS, ComboOptions, own_gpus, service_scenario
from headway.planning.combos.problem import Counts
from headway.planning.combos.rehearsal import ATTAINMENT, MOST_REQUESTS
from headway.planning.rehearsals import Source
from headway.scenario import Simulator


def profile_options(help_text: str) -> Callable[[F], F]:
    """How combos are profiled. `help_text`: of the option for the number of requests."""
    return together(
        (
            click.option(
                "--attainment",
                type=click.FloatRange(min=0, max=1, min_open=True),
                default=ATTAINMENT,
                show_default=True,
                help="Share of requests in time at which a rate counts as served.",
            ),
            click.option(
                "--profile-requests",
                type=click.IntRange(20, MOST_OTHER),
                default=MOST_REQUESTS,
                show_default=True,
                help=help_text,
            ),
        )
    )


@click.command()
@click.argument("scenarios", nargs=-1, type=PATH, required=True)
@list_option("--gpus", required=True, help="type:count:$/h:interruptions/h, as in h800:8:2.8,h20:8:0.6:0.05.")
@list_option("--rps", help="Requests per second to plan for, one number for each SCENARIO; default: its arrivals.")
@click.option(
    "--objective",
    type=click.Choice(["co", "mc", "mce"]),
    default="co",
    show_default=True,
    help="co: price over cost-efficiency, mc: price, mce: tokens per dollar of the full plan.",
)
@click.option("--gpus-per-server", type=click.IntRange(min=1), help="GPUs that one instance may span.")
@click.option("--aggregated-only", is_flag=True, help="No combos that split prefill from decode.")
@click.option(
    "--sizes",
    type=click.IntRange(0, MOST_OTHER),
    default=2,
    show_default=True,
    help="Sizes of each pair of GPU types to profile, the most promising ones; 0: all.",
)
@click.option(
    "--select",
    "ranking",
    type=click.Choice(["goodput", "eq15"]),
    default="goodput",
    show_default=True,
    help="Rank combos by the tokens that they serve per dollar, or by Cauchy's Eq. 15.",
)
@click.option("--top", type=POSITIVE, help="Plan with so many combos of each service, the best ones; default: all.")
@profile_options(
    "Most requests of one simulation of a short profile; the plan is rehearsed with up to 16 times as many."
)
@click.option(
    "--curve",
    is_flag=True,
    help="Plan for arrivals that move: rehearse plans for quantiles of the rate, and plans that are scaled.",
)
@list_option(
    "--routing", default=",".join(ROUTINGS), show_default=True, help="Routers to rehearse the plan with, best first."
)
@gpu_file_option
@jobs_option
@plan_options
def combos(
    scenarios: tuple[Path, ...], gpus: str, rps: str | None, objective: str, gpus_per_server: int | None,
    aggregated_only: bool, sizes: int, ranking: str, top: int | None, attainment: float, profile_requests: int,
    curve: bool, routing: str, gpu_file: Path | None, **outputs: Any,
) -> int:  # fmt: skip
    """Find which GPUs should prefill and which decode, and how many of such combos, for the most tokens per dollar.

    Each SCENARIO is a service: its workload, the model and engine of its first pool, and its `slo`. Simulations measure
    the goodput of combos within that SLO. All services share the given GPUs. The whole plan is rehearsed with more and
    more requests until its result is stable. With several SCENARIOs, --out is a folder. Exit code 3: the GPUs cannot
    meet the demand, and the plan serves as much of it as possible.

    With --curve, the arrivals of one SCENARIO are rehearsed with static plans for rising quantiles of their rate, and
    with plans of rising size that the scaler `combos` starts and stops with demand. Each search ends when enough
    requests are in time; the cheapest plan is chosen. Exit code 3: no plan serves enough requests in time.
    """
    if curve and (len(scenarios) > 1 or rps is not None):
        raise HeadwayError("--curve: expected one SCENARIO, whose own arrivals are planned for, and no --rps")
    rates = _rates(rps, len(scenarios))
    sources = [Source(*with_gpus(*read(path), gpu_file), path.parent) for path in scenarios]
    services = [service_scenario(each, Simulator(), rate) for each, rate in zip(sources, rates, strict=True)]
    find = own_gpus([each.document for each in sources], Places())
    options = ComboOptions(
        offers=tuple(gpu_offer(each, gpus_per_server, find) for each in gpus.split(",")),
        counts=Counts(prefill=(), decode=()) if aggregated_only else Counts(),
        objective=objective,  # type: ignore[arg-type]  # click has checked it
        attainment=attainment,
        num_requests=profile_requests,
        per_pair=sizes or None,
        ranking=ranking,  # type: ignore[arg-type]  # click has checked it
        top=top,
        routings=tuple(listed_routers(routing)),
    )
    output = PlanOutput(**outputs)
    with output.resources("rehearsing" if curve else "profiling", "combos") as resources:
        if curve:
            found = curve_answer.planned(services[0], options, resources)
        else:
            found = answer.planned(services, options, resources)
    return output.show(found)


def _rates(text: str | None, num: int) -> Sequence[float | None]:
    if text is None:
        return [None] * num
    try:
        rates = [float(each) for each in text.split(",")]
    except ValueError:
        rates = []
    if len(rates) != num or not all(0 < rate <= MOST_RPS for rate in rates):
        numbers = "a number" if num == 1 else f"{num} numbers separated by commas"
        expected = f"expected {numbers}, above 0 and {MOST_RPS:g} at most"
        raise HeadwayError(f"--rps: {text!r}; {expected}")
    return rates
