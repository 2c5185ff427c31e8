"""`headway plan goodput`: the goodput of combos, simulated anew; the work is in `planning.combos.reprofile`."""

from __future__ import annotations

from pathlib import Path

import click

from headway.cli.flags import gpu_file_option, with_gpus
from headway.cli.output import as_json_option, counting, print_json, print_table, user_cache
from headway.cli.plan_output import INFEASIBLE, write
from headway.config.scenario import read
from headway.core.counts import MOST_OTHER
from headway.planning.combos.rehearsal import ATTAINMENT, MOST_REQUESTS
from headway.planning.combos.reprofile import reprofile, with_goodputs
from headway.scenario import Simulator

_path = click.Path(path_type=Path)


@click.command()
@click.argument("fleet", type=_path)
@click.argument("requests", type=_path)
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
    help="Most requests of one simulation of a short profile; the last ones have four times as many.",
)
@gpu_file_option
@click.option("-o", "--out", type=_path, help="Write FLEET with the new goodputs; may be FLEET itself.")
@click.option("--cache", type=_path, help="Folder of cached simulations; default: the user's cache folder.")
@click.option("--no-cache", is_flag=True, help="Simulate without the cache.")
@as_json_option("Print JSON in place of a table.")
@click.option("--no-progress", is_flag=True, help="No progress bar.")
def goodput(
    fleet: Path,
    requests: Path,
    attainment: float,
    profile_requests: int,
    gpu_file: Path | None,
    out: Path | None,
    cache: Path | None,
    no_cache: bool,
    as_json: bool,
    no_progress: bool,
) -> int:
    """Measure what the combos of FLEET serve in time of the requests that it got.

    REQUESTS are the records of `headway serve --records`, or a trace in any format. Their lengths are simulated on one
    combo of each kind, within the `slo` of FLEET. A gateway that serves FLEET reloads it when --out replaces it: its
    router weighs combos by the new goodputs, and its scaler counts on them. Exit code 3: a combo serves nothing in
    time, and keeps its old goodput.
    """
    document, places = with_gpus(*read(fleet), gpu_file)
    folder = None if no_cache else cache or user_cache("combos")
    with counting("profiling", not no_progress) as progress:
        answer = reprofile(
            document,
            places,
            fleet.parent,
            requests=requests,
            simulator=Simulator(),
            attainment=attainment,
            num_requests=profile_requests,
            cache_dir=folder,
            progress=progress,
        )
    if out is not None:
        write(out, with_goodputs(fleet.read_text(encoding="utf-8"), answer))
    if as_json:
        print_json(answer)
    else:
        rows = [
            [
                each.combo,
                each.label,
                "-" if each.before_rps is None else f"{each.before_rps:.4g}",
                f"{each.goodput_rps:.4g}",
            ]
            for each in answer.combos
        ]
        print_table(["combo", "", "goodput/s before", "now"], rows)
        means = f"{answer.prompt_tokens:.0f} prompt and {answer.output_tokens:.0f} output tokens"
        click.echo(f"{answer.num_requests:,} requests of {means} in the mean")
    return 0 if all(each.goodput_rps > 0 for each in answer.combos) else INFEASIBLE
