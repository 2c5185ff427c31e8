"""`headway plan combos`: combos of prefill and decode replicas for a market; the work is in `planning.combos`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from headway.cli.flags import gpu_file_option, listed_routers, with_gpus
from headway.cli.output import POSITIVE, list_option, print_json, print_table
from headway.cli.plan_curve import plan_for_curve
from headway.cli.plan_output import (
    INFEASIBLE,
    PlanOutput,
    command_line,
    gpu_offer,
    jobs_option,
    plan_options,
    write,
    write_html,
)
from headway.config.scenario import read
from headway.config.strict_yaml import Places
from headway.core.counts import MOST_OTHER
from headway.core.errors import HeadwayError
from headway.planning.combos.page import caveats, kept, millions, page
from headway.planning.combos.plan import (
    MOST_RPS,
    ROUTINGS,
    ComboAnswer,
    ComboOptions,
    own_gpus,
    plan,
    scenario_yaml,
    service_scenario,
)
from headway.planning.combos.problem import ComboPlan, Counts
from headway.planning.combos.rehearsal import ATTAINMENT, MOST_REQUESTS
from headway.scenario import Simulator

_path = click.Path(path_type=Path)


@click.command()
@click.argument("scenarios", nargs=-1, type=_path, required=True)
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
@click.option(
    "--attainment",
    type=click.FloatRange(min=0, max=1, min_open=True),
    default=ATTAINMENT,
    show_default=True,
    help="Share of requests in time at which a rate counts as served.",
)
@click.option(
    "--profile-requests",
    type=click.IntRange(20, MOST_OTHER),
    default=MOST_REQUESTS,
    show_default=True,
    help="Most requests of one simulation of a short profile; the plan is rehearsed with up to 16 times as many.",
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

    Each SCENARIO is a service: its workload, the model and engine of its first pool, and its `slo`. Simulations
    measure the goodput of combos within that SLO. All services share the given GPUs. The plan is rehearsed whole, with
    more and more requests until it is clear that it lasts. With several SCENARIOs, --out is a folder. Exit code 3: the
    GPUs cannot meet the demand, and the plan serves what it can.

    With --curve, one SCENARIO's own arrivals are rehearsed: static plans for rising quantiles of their rate, and plans
    of rising size that the scaler `combos` starts and stops with demand, each until enough requests are in time. The
    cheapest is planned. Exit code 3: none is in time.
    """
    if curve and (len(scenarios) > 1 or rps is not None):
        raise HeadwayError("--curve: expected one SCENARIO, whose own arrivals are planned for, and no --rps")
    rates = _rates(rps, len(scenarios))
    simulator = Simulator()
    read_files = [with_gpus(*read(path), gpu_file) for path in scenarios]
    services = [
        service_scenario(document, places, path.parent, simulator, rate)
        for (document, places), path, rate in zip(read_files, scenarios, rates, strict=True)
    ]
    find = own_gpus([document for document, _ in read_files], Places())
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
    if curve:
        return plan_for_curve(services[0], options, simulator, output)
    with output.processes() as pool, output.counting("profiling") as progress:
        answer = plan(services, options, simulator, output.cache_dir("combos"), progress, pool)
    if output.html is not None:
        write_html(output.html, page(answer.plan, answer.selection, answer.others, answer.rehearsals, command_line()))
    planned = {chosen.service for chosen in answer.plan.combos}
    for each in services:
        if output.out is not None and each.service.name in planned:
            file = output.out if len(services) == 1 else output.out / f"{each.service.name}.yaml"
            file.parent.mkdir(parents=True, exist_ok=True)
            write(file, scenario_yaml(answer, each))
    print_json(answer) if output.as_json else _show(answer, options)
    click.echo(f"profiles: {answer.num_simulated} simulations, {answer.num_found} combos found in the cache", err=True)
    return INFEASIBLE if answer.plan.status == "short" else 0


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


def _show(answer: ComboAnswer, options: ComboOptions) -> None:
    heads = ["service", "combo", "$/h", "goodput/s", "tokens/$", "Eq. 15", "step times", "planned", "not calibrated"]
    rows = []
    for each in answer.selection.candidates:
        count = answer.plan.counts.get((each.service, each.combo.label), 0)
        efficiencies = (each.tokens_per_usd, each.closed_form_tokens_per_usd, each.step_tokens_per_usd)
        shown = [millions(value) for value in efficiencies]
        rows.append(
            [
                each.service,
                each.combo.label,
                f"{each.combo.usd_per_hour:.2f}",
                f"{each.goodput_rps:.3g}",
                *shown,
                count or "",
                "; ".join(each.uncalibrated),
            ]
        )
    print_table(heads, [row for i, row in enumerate(rows) if i < 20 or row[-2]])
    click.echo(f"\n{options.objective}: {_summary(answer.plan)}")
    for found in answer.rehearsals.values():
        click.echo(kept(found))
    for name, other in answer.others.items():
        click.echo(f"{name}: {_summary(other)}")
    for bind in answer.plan.binding:
        click.echo(f"binds: {bind.kind} {bind.name}, {bind.used:g} of {bind.limit:g}")
    for line in caveats(answer.plan):
        click.echo(line)
    for note in (answer.plan.why, *answer.plan.notes):
        if note:
            click.echo(note)


def _summary(deployment: ComboPlan) -> str:
    combos = ", ".join(f"{each.count} {each.combo.label}" for each in deployment.combos) or "nothing"
    gap = "" if deployment.gap is None else f", gap {deployment.gap:.2%}"
    served = ", ".join(
        f"{each.service} {each.goodput_rps:.3g} of {each.demand_rps:.3g}/s" for each in deployment.services
    )
    price = f"${deployment.usd_per_hour:.2f}/h, {millions(deployment.tokens_per_usd)} tokens/$"
    return f"{deployment.status}{gap}: {combos}; {price}; {served}"
