"""Common parts of `simulate` and `compare`: the choice of a scenario, and the output of its runs."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import click
from msgspec import Struct, json, structs

from headway.catalog.coefficients import PoolCalibration
from headway.catalog.errors import Band
from headway.cli.flags import changes, check_complete, check_trace, scenario_file, together, used_flags
from headway.cli.output import PATH, as_json_option, command_line, console, no_progress_option, print_pieces
from headway.cli.own_policies import broken_rules
from headway.config import strict_yaml
from headway.config.policy_preset import explained
from headway.config.proxied import without_proxied
from headway.config.scenario import Scenario, read, variants
from headway.config.scenario import variant as variant_of
from headway.core.errors import HeadwayError
from headway.metrics.seeds import Estimate, SeededMetrics, Verdict
from headway.metrics.summary import Summary, flat_replicas, flatten
from headway.report.run import Run
from headway.report.table import COLUMNS, render
from headway.scenario.run import Simulator, assemble_unresolved, provenance
from headway.workload.atomic_file import write_text

F = TypeVar("F", bound=Callable[..., Any])

output_options = together(
    (
        as_json_option("Print JSON instead of a table."),
        click.option(
            "--out", type=PATH, help="Write results.json and the records of every run (Parquet) to this folder."
        ),
        click.option("--html", type=PATH, help="Write a report as an HTML page, and plotly.js beside it."),
        no_progress_option,
    )
)
clairvoyant_option = click.option(
    "--clairvoyant", is_flag=True, help="Also show the GPU hours of a plan that knows the trace."
)
trace_option = click.option("--trace-out", type=PATH, help="Write a trace for Perfetto or Chrome.")


def choose(
    name: str, scenario: Path | None, preset: str | None, flags: dict[str, Any], variant: str | None = None
) -> Scenario:
    """The scenario of a file or of options alone; options override the file. `name` is used without a file.

    Explains the preset of policies on stderr; with variants, for the first one that uses it.
    """
    chosen = _chosen(name, scenario, preset, flags)
    if variant is not None:
        chosen = variant_of(chosen, variant)
    explanations = (explained(each.spec.policies, each.fleet) for each in variants(chosen))
    for line in next(filter(None, explanations), ()):
        click.echo(line, err=True)
    return chosen


def _chosen(name: str, scenario: Path | None, preset: str | None, flags: dict[str, Any]) -> Scenario:
    file = scenario_file(scenario, preset)
    if file is not None:
        data, places = read(file)
        pools = data.get("fleet")
        num_pools = len(pools) if isinstance(pools, list) else 0
        changed = strict_yaml.change(data, places, changes(flags, num_pools))
        check_trace(changed[0], flags)
        return assemble_unresolved(*without_proxied(*changed), file.parent)
    check_complete(used_flags(flags))
    if flags.get("gpu") is None:
        raise HeadwayError("--gpu is missing; headway catalog gpus lists names")
    data = {"name": name, "workload": {}, "fleet": [{}]}
    changed = strict_yaml.change(data, strict_yaml.Places(), changes(flags))
    check_trace(changed[0], flags)
    return assemble_unresolved(*changed, Path())


class Outputs(Struct, frozen=True):
    """The values of the output options."""

    as_json: bool
    out: Path | None
    html: Path | None
    no_progress: bool
    trace_out: Path | None = None

    @staticmethod
    def taken_from(flags: dict[str, Any]) -> Outputs:
        """Remove the output options from a command's flags."""
        return Outputs(**{name: flags.pop(name) for name in Outputs.__struct_fields__ if name in flags})


class RunResult(Struct, frozen=True, omit_defaults=True):
    """One run in the JSON output."""

    policies: dict[str, str]
    num_requests: int
    num_completed: int
    simulate_s: float
    total_s: float
    calibrated: bool
    pools: tuple[PoolCalibration, ...]
    """Whether each pool is calibrated."""
    notes: tuple[str, ...]
    metrics: dict[str, float | int | None]
    """Without those of single replicas, which `results_text` adds."""
    intervals: dict[str, Estimate] = {}
    """Intervals of metrics over several seeds."""
    verdicts: dict[str, Verdict] = {}
    """Verdicts on metrics over several seeds, against the best run."""
    bands: dict[str, Band] = {}
    """Bands of latencies, given the error of the step times."""


class RunResults(Struct, frozen=True, omit_defaults=True):
    """The output of `--json` for one scenario: a result for each run."""

    version: str
    name: str
    seed: int
    scenario: str
    results: list[RunResult]
    seeds: tuple[int, ...] = ()
    """Seeds of the intervals; `metrics` come from the first seed."""


def results(runs: Sequence[Run], scenario: Scenario, seeded: SeededMetrics | None = None) -> RunResults:
    """The runs of a scenario for JSON output."""
    origin = provenance(scenario)
    intervals, verdicts = ([{} for _ in runs], [{} for _ in runs]) if seeded is None else _over_seeds(seeded)
    return RunResults(
        version=origin.version,
        name=scenario.spec.name,
        seed=origin.seed,
        scenario=origin.scenario_yaml,
        results=[
            RunResult(
                policies=run.policies,
                num_requests=run.summary.num_requests,
                num_completed=run.summary.num_completed,
                simulate_s=run.simulate_s,
                total_s=run.total_s,
                calibrated=run.calibrated,
                pools=run.pools,
                notes=run.notes,
                metrics=flatten(run.summary, replicas=False),
                intervals=intervals[i],
                verdicts=verdicts[i],
                bands=run.bands,
            )
            for i, run in enumerate(runs)
        ],
        seeds=() if seeded is None else seeded.seeds,
    )


def results_text(runs: Sequence[Run], scenario: Scenario, seeded: SeededMetrics | None = None) -> Iterator[bytes]:
    """The JSON output, indented, in pieces: a fleet has hundreds of thousands of metrics of single replicas."""
    text, at = json.format(json.encode(results(runs, scenario, seeded)), indent=2), 0
    for run in runs:
        end = text.index(b"\n      }", text.index(b'\n      "metrics": {', at))
        yield text[at:end]
        yield from _replicas_text(run.summary)
        at = end
    yield text[at:]


def _replicas_text(summary: Summary) -> Iterator[bytes]:
    """The metrics of each replica, as further items of the indented metrics."""
    pattern, of = b"", None
    for name, keys, values in flat_replicas(summary.replicas):
        if keys is not of:
            pattern, of = b"".join([b',\n        "replica.*.%b": %%b' % key.encode() for key in keys]), keys
        yield pattern.replace(b"*", name.encode()) % tuple(json.encode(values)[1:-1].split(b","))


def _over_seeds(seeded: SeededMetrics) -> tuple[list[dict[str, Estimate]], list[dict[str, Verdict]]]:
    """Returns, for each run, the intervals of its metrics, and verdicts on the table's metrics."""
    runs = range(len(seeded.flat))
    estimates = [{key: seeded.estimate(i, key) for key in seeded.flat[i][0]} for i in runs]
    intervals = [{key: each for key, each in of_run.items() if each is not None} for of_run in estimates]
    verdicts: list[dict[str, Verdict]] = [{} for _ in runs]
    for column in COLUMNS:
        for i, verdict in enumerate(seeded.verdicts(column.key, column.better) if column.better else ()):
            if verdict is not None:
                verdicts[i][column.key] = verdict
    return intervals, verdicts


def with_clairvoyant(runs: Sequence[Run], scenario: Scenario) -> list[Run]:
    """The runs, each with the GPU hours of the best timetable found for their common trace."""
    if scenario.fleet.combos or all(run.summary.gpu_hours_bound is None for run in runs):
        raise HeadwayError("--clairvoyant: needs a scaler, and a fleet of pools")
    from headway.planning.scaling.timetable import best_timetable

    timetable = best_timetable(scenario, Simulator())
    hours = None if timetable is None else timetable.gpu_hours
    return [replace(run, summary=structs.replace(run.summary, gpu_hours_clairvoyant=hours)) for run in runs]


def deliver(runs: Sequence[Run], scenario: Scenario, outputs: Outputs, seeded: SeededMetrics | None = None) -> None:
    """Write the requested files, then print; at last, report the user's policies that break a rule."""
    command = command_line()
    if outputs.out is not None:
        _write_folder(runs, scenario, outputs.out, seeded)
    if outputs.html is not None:
        from headway.report import html

        html.write(runs, provenance(scenario, command), _with_folder(outputs.html), seeded)
    if outputs.trace_out is not None:
        from headway.report import trace

        trace.write(runs[0], provenance(scenario, command), _with_folder(outputs.trace_out))
    if outputs.as_json:
        print_pieces(results_text(runs, scenario, seeded))
    else:
        terminal = console()
        click.echo(render(runs, width=terminal.width, color=sys.stdout.isatty(), seeded=seeded))
    for path in (outputs.out, outputs.html, outputs.trace_out):
        if path is not None:
            click.echo(f"wrote {path}", err=True)
    for line in broken_rules(scenario):
        click.echo(f"note: {line}", err=True)


def _with_folder(path: Path) -> Path:
    """The path, after creating its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _write_folder(runs: Sequence[Run], scenario: Scenario, folder: Path, seeded: SeededMetrics | None) -> None:
    """Write `results.json` and the records: for a single run into the folder, for several runs into one subfolder
    each."""
    from headway import records  # imports pyarrow; a table does not need it

    for run, variant in zip(runs, variants(scenario), strict=True):
        own = folder if len(runs) == 1 else folder / re.sub(r"[^\w.-]+", "-", "--".join(run.policies.values()))
        records.save(run.records, own, asdict(provenance(variant)))
    text = b"".join(results_text(runs, scenario, seeded)).decode()
    write_text(folder / "results.json", text + "\n")
