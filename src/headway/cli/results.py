"""What a command does with the runs that it made: print them, write files."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import click
from msgspec import Struct, json, structs

from headway import records
from headway.cli.flags import together
from headway.cli.output import console, print_json
from headway.config.scenario import Scenario, variants
from headway.core.errors import HeadwayError
from headway.metrics.summary import flatten
from headway.planning.oracle_plan import find
from headway.report import html, trace
from headway.report.run import Run
from headway.report.table import render
from headway.scenario.run import provenance
from headway.workload.atomic_file import write_text

F = TypeVar("F", bound=Callable[..., Any])
_path = click.Path(path_type=Path)

output_options = together((
    click.option("--json", "as_json", is_flag=True, help="Print JSON in place of the table."),
    click.option("--out", type=_path, help="A folder for results.json and every run's records (Parquet)."),
    click.option("--html", type=_path, help="Write a report that opens in any browser."),
    click.option("--no-progress", is_flag=True, help="No progress bar."),
))  # fmt: skip
clairvoyant_option = click.option(
    "--clairvoyant", is_flag=True, help="Beside a scaler's GPU hours, those of a plan that knows the trace."
)
ray_option = click.option("--ray", is_flag=True, help="Run on the Ray cluster of RAY_ADDRESS, or on a local one.")
trace_option = click.option("--trace-out", type=_path, help="Write a trace that Perfetto and Chrome open.")


class Outputs(Struct, frozen=True):
    """What the output options say."""

    as_json: bool
    out: Path | None
    html: Path | None
    no_progress: bool
    trace_out: Path | None = None

    @staticmethod
    def taken_from(flags: dict[str, Any]) -> Outputs:
        """Takes the output options out of a command's flags."""
        return Outputs(**{name: flags.pop(name) for name in Outputs.__struct_fields__ if name in flags})


class Result(Struct, frozen=True):
    """One run, in JSON."""

    policies: dict[str, str]
    num_requests: int
    num_completed: int
    simulate_s: float
    total_s: float
    calibrated: bool
    notes: tuple[str, ...]
    metrics: dict[str, float | int | None]


class Results(Struct, frozen=True):
    """What `--json` prints."""

    version: str
    name: str
    seed: int
    scenario: str
    results: list[Result]


def results(runs: Sequence[Run], scenario: Scenario) -> Results:
    """The runs of a scenario, as JSON shows them."""
    made_by = provenance(scenario)
    return Results(
        version=made_by.version,
        name=scenario.spec.name,
        seed=made_by.seed,
        scenario=made_by.scenario_yaml,
        results=[
            Result(
                policies=run.policies,
                num_requests=run.summary.num_requests,
                num_completed=run.summary.num_completed,
                simulate_s=run.simulate_s,
                total_s=run.total_s,
                calibrated=run.calibrated,
                notes=run.notes,
                metrics=flatten(run.summary),
            )
            for run in runs
        ],
    )


def with_clairvoyant(runs: Sequence[Run], scenario: Scenario) -> list[Run]:
    """The runs, each with the GPU hours of the best timetable found for the trace that all of them saw."""
    if scenario.fleet.combos or all(run.summary.gpu_hours_bound is None for run in runs):
        raise HeadwayError("--clairvoyant: goes with a scaler, and a fleet of pools")
    found = find(scenario)
    hours = None if found is None else found.gpu_hours
    return [replace(run, summary=structs.replace(run.summary, gpu_hours_clairvoyant=hours)) for run in runs]


def deliver(runs: Sequence[Run], scenario: Scenario, outputs: Outputs) -> None:
    """Write the files that were asked for, then print."""
    command = " ".join(["headway", *sys.argv[1:]])
    if outputs.out is not None:
        _write_folder(runs, scenario, outputs.out)
    if outputs.html is not None:
        html.write(runs, provenance(scenario, command), _placed(outputs.html))
    if outputs.trace_out is not None:
        trace.write(runs[0], provenance(scenario, command), _placed(outputs.trace_out))
    if outputs.as_json:
        print_json(results(runs, scenario))
    else:
        terminal = console()
        click.echo(render(runs, width=terminal.width, color=sys.stdout.isatty()))
    for path in (outputs.out, outputs.html, outputs.trace_out):
        if path is not None:
            click.echo(f"wrote {path}", err=True)


def _placed(path: Path) -> Path:
    """The path, its folder made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _write_folder(runs: Sequence[Run], scenario: Scenario, folder: Path) -> None:
    """`results.json` and the records: of a single run in the folder itself, of several in a folder each."""
    for run, variant in zip(runs, variants(scenario), strict=True):
        own = folder if len(runs) == 1 else folder / re.sub(r"[^\w.-]+", "-", "--".join(run.policies.values()))
        records.save(run.records, own, asdict(provenance(variant)))
    text = json.format(json.encode(results(runs, scenario)), indent=2).decode()
    write_text(folder / "results.json", text + "\n")
