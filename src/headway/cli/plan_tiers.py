"""`headway plan tiers`: the number of tiers and their windows; the work is in `planning.tiers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from headway.cli.flags import scenario_file
from headway.cli.output import as_json_option, counting, list_option, print_json, print_table
from headway.config.scenario import read
from headway.core.counts import MOST_SEEDS
from headway.core.errors import HeadwayError
from headway.metrics.interval import interval
from headway.planning.tiers import rehearsal
from headway.planning.tiers.search import TierPlan, TierSetting
from headway.scenario import Simulator

_path = click.Path(path_type=Path)


@click.command()
@click.argument("scenario", type=_path, required=False)
@click.option("--builtin", "preset", help="A scenario that comes with Headway, in place of a file.")
@list_option("--tiers", default="1,2,3,4,6,8", show_default=True, help="Numbers of tiers to try.")
@list_option("--decay", default="0.5,1,2", show_default=True, help="Decays of the headroom to try.")
@click.option(
    "--seeds", type=click.IntRange(2, MOST_SEEDS), default=5, show_default=True, help="Seeds to simulate with."
)
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0),
    default=0.01,
    show_default=True,
    help="An acceptable loss of attainment.",
)
@as_json_option("Print JSON in place of a table.")
@click.option("--no-progress", is_flag=True, help="No progress bar.")
def tiers(scenario: Path | None, preset: str | None, as_json: bool, no_progress: bool, **flags: Any) -> int:
    """Find how many tiers of service a workload needs, and how steeply their headroom should fall.

    The tiers of the SCENARIO's workload are classes of customers with SLOs of their own. Neighbouring classes are
    merged into fewer tiers, and every setting is simulated with the same requests. The measure is the share of
    requests that meet their SLOs; settings that the seeds do not distinguish from the best are marked as tied.
    """
    file = scenario_file(scenario, preset)
    if file is None:
        raise HeadwayError("expected a scenario file, or --builtin NAME")
    document, places = read(file)
    ks = [_number(each, "--tiers", int) for each in flags["tiers"].split(",")]
    decays = [_number(each, "--decay", float) for each in flags["decay"].split(",")]
    seeds, tolerance = range(flags["seeds"]), flags["tolerance"]
    with counting("rehearsing", not no_progress) as progress:
        simulator = Simulator()
        plan = rehearsal.plan(
            document,
            places,
            file.parent,
            num_tiers=ks,
            decays=decays,
            seeds=seeds,
            interval=interval,
            simulator=simulator,
            tolerance=tolerance,
            progress=progress,
        )
    if as_json:
        print_json(plan)
    else:
        _show(plan, tolerance)
    return 0


def _number(text: str, option: str, kind: type) -> Any:
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or value < 0 or (kind is int and value < 1):
        raise HeadwayError(
            f"{option}: {text.strip()!r}; expected numbers{' from 1' if kind is int else ''}, separated by commas"
        )
    return value


def _show(plan: TierPlan, tolerance: float) -> None:
    """Print a row for each setting, and the best and the simplest sufficient one."""
    heads = ["tiers", "decay", "attainment", "loss to the best, 95%", "tied with the best", "enough"]
    print_table(heads, [_row(setting) for setting in plan.settings])
    chosen, best = plan.chosen, plan.best
    click.echo(f"\nbest: {_named(best)}; {len(plan.tied)} of {len(plan.settings)} settings are tied with it")
    click.echo(f"fewest tiers that lose {tolerance:.1%} at most: {_named(chosen)}")


def _row(setting: TierSetting) -> list[object]:
    loss = f"{setting.loss[0]:.2%} to {setting.loss[1]:.2%}"
    return [setting.num_tiers, setting.decay, f"{setting.mean:.2%}", loss, setting.is_tied, setting.is_enough]


def _named(setting: TierSetting) -> str:
    number = "1 tier" if setting.num_tiers == 1 else f"{setting.num_tiers} tiers"
    return f"{number}, decay {setting.decay:g} ({setting.mean:.2%} of requests meet their SLOs)"
