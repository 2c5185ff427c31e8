"""`headway plan combos --curve`: the least price for each rate; the work is in `planning.combos.curve`."""

from __future__ import annotations

import click

from headway.cli.output import print_json, print_table
from headway.cli.plan_output import INFEASIBLE, PlanOutput, command_line, write, write_html
from headway.planning.combos.curve import CurveAnswer, curve_yaml, plan_curve
from headway.planning.combos.curve_page import HEADS, curve_page, headline, rows
from headway.planning.combos.plan import ComboOptions
from headway.planning.combos.rehearsal import ServiceScenario
from headway.planning.rehearsals import Simulator


def plan_for_curve(service: ServiceScenario, options: ComboOptions, simulator: Simulator, output: PlanOutput) -> int:
    """Plan, write and print. Returns the exit code."""
    with output.processes() as pool, output.counting("rehearsing") as progress:
        answer = plan_curve(service, options, simulator, output.cache_dir("combos"), progress, pool)
    if output.html is not None:
        write_html(output.html, curve_page(answer, command_line()))
    if output.out is not None and answer.chosen is not None:
        write(output.out, curve_yaml(answer, service, options))
    print_json(answer) if output.as_json else _show(answer)
    click.echo(f"profiles: {answer.num_simulated} simulations, {answer.num_found} found in the cache", err=True)
    return 0 if answer.chosen is not None else INFEASIBLE


def _show(answer: CurveAnswer) -> None:
    click.echo(
        f"{answer.service}: {answer.mean_rps:.3g} requests/s in the mean, {answer.peak_rps:.3g} at most over "
        f"{answer.window_s:.3g} s"
    )
    print_table(list(HEADS), rows(answer))
    click.echo(f"\n{headline(answer)}")
