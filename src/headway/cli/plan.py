"""`headway plan`: the group of planners, and the capacity planner itself, which works in `planning.capacity`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headway import catalog
from headway.cli.flags import (
    assume_option,
    changes,
    check_complete,
    check_name,
    flag,
    gpu_file_option,
    listed,
    scenario_file,
    synthetic_options,
    together,
    trace_options,
    used_flags,
    whole,
)
from headway.cli.output import PATH, SECONDS, SECONDS_ABOVE_0, SEED, SubCommands, list_option
from headway.cli.plan_output import PlanOutput, jobs_option, plan_options
from headway.config import strict_yaml
from headway.config.scenario import read
from headway.config.strict_yaml import Places
from headway.core.counts import MOST_REPLICAS
from headway.core.errors import HeadwayError
from headway.planning.capacity.answer import planned
from headway.planning.capacity.plan import CapacityOptions
from headway.planning.capacity.problem import Situation, Targets
from headway.planning.demand.problem import DEFAULT_CHANCE, DemandPrices
from headway.planning.rehearsals import Source
from headway.policies import resolve

if TYPE_CHECKING:
    from headway.forecast.demand import DemandForecast

_positive = click.IntRange(min=1)
DEFAULT_NUM_REQUESTS = 2000


class _Plans(SubCommands):
    """`capacity`, and the commands `plan_NAME.NAME`, each imported when it is used."""

    _OTHERS = ("cascade", "combos", "fleet", "goodput", "scaling", "tiers")

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *self._OTHERS])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._OTHERS:
            return super().get_command(ctx, cmd_name)
        command = getattr(import_module(f"headway.cli.plan_{cmd_name}"), cmd_name)
        assert isinstance(command, click.Command)
        return command


@click.group(cls=_Plans)
def command() -> None:
    """Plan fleets: how many GPUs of which type."""


_PRICE = click.FloatRange(min=0)
demand_options = together(
    (
        click.option(
            "--demand", type=PATH, help="A forecast of headway forecast demand: plan the replicas of each week."
        ),
        click.option(
            "--chance",
            type=click.FloatRange(0.5, 0.995, max_open=True),
            default=DEFAULT_CHANCE,
            show_default=True,
            help="With --demand: least chance that each week's busiest hour meets the targets.",
        ),
        click.option("--reserved-usd", type=_PRICE, help="With --demand: price of a reserved GPU for an hour."),
        click.option("--spot-usd", type=_PRICE, help="With --demand: price of a spot GPU for an hour."),
    )
)
DEMAND_FLAGS = ("demand", "chance", "reserved_usd", "spot_usd")
_OF_WORKLOADS = ("trace", "limit", "rate_scale", "concurrency", "workload", "rate", "num_requests", "prompt_tokens",
                 "output_tokens", "warmup_s")  # fmt: skip


@command.command()
@click.argument("scenario", type=PATH, required=False)
@click.option("--builtin", "preset", help="A scenario that comes with Headway, in place of a file: chat.")
@trace_options
@synthetic_options
@click.option("--model", help="A model of the catalog.")
@click.option(
    "--model-config", type=PATH, help="A Hugging Face config.json in place of --model, its folder, or a GGUF file."
)
@assume_option
@gpu_file_option
@click.option("--engine", help="An engine of the catalog: vllm, sglang, ... Default: the file's, else simulated.")
@click.option("--coefficients", type=PATH, help="A file of headway calibrate, for the first GPU listed.")
@click.option("--max-num-seqs", type=_positive, help="Sequences that a replica runs at once.")
@click.option("--max-num-batched-tokens", type=_positive, help="Token budget of an iteration.")
@click.option("--warmup-s", type=SECONDS, help="Targets ignore requests that arrive before.")
@click.option("--seed", type=SEED, help="Random seed; default: 0.")
@list_option("--gpus", help="GPU types to choose from, separated by commas; default: the scenario's.")
@list_option("--tp", default="1,2,4,8", show_default=True, help="Tensor parallel degrees to choose from.")
@list_option("--routing", help="Routers to choose from, separated by commas.")
@list_option("--ordering", help="Orderings to choose from, separated by commas.")
@click.option(
    "--speculative",
    type=click.Choice(["on", "off", "both"]),
    default="on",
    show_default=True,
    help="Use the scenario's speculative decoding, leave it out, or choose between the two.",
)
@click.option(
    "--max-replicas", type=click.IntRange(1, MOST_REPLICAS), default=64, show_default=True, help="Most replicas to try."
)
@click.option("--ttft-p99", type=SECONDS_ABOVE_0, help="99th percentile of the time to the first token.")
@click.option("--tpot-p99", type=SECONDS_ABOVE_0, help="The same of the mean time per output token after the first.")
@click.option("--e2e-p99", type=SECONDS_ABOVE_0, help="The same of the time to the last token.")
@click.option(
    "--attainment",
    type=click.FloatRange(min=0, max=1, min_open=True),
    help="Least share of requests that meet all of their SLOs; 0.99 without any target.",
)
@list_option(
    "--what-if",
    default="load=3,lose=1",
    show_default=True,
    help="Repeat with load=N times the requests, lose=N replicas, lose-region=N regions.",
)
@demand_options
@jobs_option
@plan_options
def capacity(scenario: Path | None, preset: str | None, **flags: Any) -> int:
    """Find the cheapest GPU type, parallelism, policies and number of replicas that meet SLOs for a workload.

    Workload, model and engine come from the SCENARIO file, or from options alone; options override the file.
    Every candidate that analytic bounds do not rule out is simulated, with the same arrivals and lengths.
    Simulations are cached, so that an interrupted search resumes where it ended. Exit code 3: no candidate meets
    the targets.

    With --demand, the plan is for the weeks of a forecast: how many replicas, when the next one is due, what to reserve
    and what to rent. The requests are those of the busiest recorded hour, at the forecast's rates.
    """
    output = PlanOutput(**{name: flags.pop(name) for name in PlanOutput.__struct_fields__})
    asked = {name: flags.pop(name) for name in DEMAND_FLAGS}
    forecast = _forecast_of(asked, flags)
    choices = {name: flags.pop(name) for name in _CHOICES}
    source = _source(scenario, preset, flags, forecast)
    options = _options(choices, source.document.get("gpus") or ())
    with output.resources("rehearsing", "capacity") as resources:
        if forecast is None:
            found = planned(source, options, resources)
        else:
            from headway.planning.demand import answer, plan

            prices = DemandPrices(
                reserved_usd_per_gpu_hour=asked["reserved_usd"], spot_usd_per_gpu_hour=asked["spot_usd"]
            )
            by_week = plan.DemandPlanOptions(capacity=options, chance=asked["chance"], prices=prices)
            found = answer.planned(forecast, source, by_week, resources)
    return output.show(found)


_CHOICES = (
    "ttft_p99",
    "tpot_p99",
    "e2e_p99",
    "attainment",
    "gpus",
    "tp",
    "routing",
    "ordering",
    "what_if",
    "max_replicas",
    "speculative",
)
"""Options of the search; other options change the scenario."""


def _forecast_of(asked: Mapping[str, Any], others: Mapping[str, Any]) -> DemandForecast | None:
    """The forecast of `--demand`; None without it. Raises HeadwayError for incompatible options."""
    if asked["demand"] is None:
        for name in ("reserved_usd", "spot_usd"):
            if asked[name] is not None:
                raise HeadwayError(f"{flag(name)}: goes with --demand, a forecast")
        return None
    for name in _OF_WORKLOADS:
        if others.get(name) is not None:
            raise HeadwayError(f"{flag(name)}: not with --demand, whose requests are the busiest recorded hour's")
    from headway.forecast.demand_file import load  # imports pyarrow; other plans do not need it

    return load(asked["demand"])


def _options(flags: dict[str, Any], own_gpus: Sequence[Mapping[str, Any]]) -> CapacityOptions:
    limits = {name: flags.pop(name) for name in ("ttft_p99", "tpot_p99", "e2e_p99")}
    gpus, routings, orderings = (listed(flags.pop(name), f"--{name}") for name in ("gpus", "routing", "ordering"))
    own = {str(each.get("name")) for each in own_gpus if isinstance(each, dict)}
    for name in gpus:
        if name not in own:
            check_name(catalog.gpu, name, "--gpus")
    for name in routings:
        check_name(resolve.router, name, "--routing")
    for name in orderings:
        check_name(resolve.ordering, name, "--ordering")
    return CapacityOptions(
        gpus=tuple(gpus),
        tps=tuple(whole(each, "--tp") for each in listed(flags.pop("tp"), "--tp")),
        routings=tuple(routings),
        orderings=tuple(orderings),
        targets=Targets(**{f"{name}_s": value for name, value in limits.items()}, attainment=flags.pop("attainment")),
        situations=tuple(_situations(flags.pop("what_if"))),
        max_replicas=flags.pop("max_replicas"),
        speculative=flags.pop("speculative"),
    )


def _situations(text: str) -> Iterator[Situation]:
    """The situations in the option, such as "load=3,lose=1,lose-region=1"."""
    for each in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = each.partition("=")
        if name == "load":
            try:
                load = float(value)
            except ValueError:
                load = 0.0
            if not 0 < load < float("inf"):
                raise HeadwayError(f"--what-if {each}: expected a number above 0")
            yield Situation(load=load)
        elif name == "lose":
            yield Situation(lost_replicas=whole(value, f"--what-if {name}"))
        elif name == "lose-region":
            yield Situation(lost_regions=whole(value, f"--what-if {name}"))
        else:
            raise HeadwayError(f"--what-if {each!r}: expected load=N, lose=N or lose-region=N")


def _source(
    scenario: Path | None, preset: str | None, flags: dict[str, Any], forecast: DemandForecast | None
) -> Source:
    file = scenario_file(scenario, preset)
    if file is not None:
        data, places = read(file)
        pools = data.get("fleet")
        num_pools, base_dir = len(pools) if isinstance(pools, list) else 0, file.parent
    else:
        hour = {} if forecast is None else {"trace": forecast.busiest.path}
        check_complete(used_flags(flags) | hour)
        data, places, num_pools, base_dir = {"name": "capacity", "workload": {}, "fleet": [{}]}, Places(), 1, Path()
    data, places = strict_yaml.change(data, places, changes(flags, num_pools))
    if forecast is not None:
        return Source(data | {"workload": {}}, places, base_dir)
    if file is None and "builtin" not in data["workload"] and "trace" not in data["workload"]:
        data["workload"].setdefault("num_requests", DEFAULT_NUM_REQUESTS)
    return Source(data, places, base_dir)
