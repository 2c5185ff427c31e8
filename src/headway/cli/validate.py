"""`headway validate`: predictions against measured serving runs; the work is in `calibration.validation`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from headway import catalog
from headway.calibration.load_error import load_factor
from headway.calibration.replay import replay
from headway.calibration.scorecard import page
from headway.calibration.serving import ServingExperiment, read
from headway.calibration.steps import read as steps_read
from headway.calibration.steps.fit import SpanTimes
from headway.calibration.steps.regions import regions
from headway.calibration.validation import OVERALL, ExperimentErrors, Validation, compare, validation
from headway.catalog.coefficients import Coefficients
from headway.catalog.load import coefficients_in
from headway.cli import measured_fleet
from headway.cli.calibrate import print_regions
from headway.cli.flags import together
from headway.cli.output import SEEDS, as_json_option, no_progress_option, print_json, print_table, progress
from headway.core.errors import HeadwayError
from headway.report.blocks import or_dash
from headway.workload.atomic_file import write_text

EXCEEDED = 3
"""Exit code if an error is above --max-error."""
JUDGED = ("e2e_mean", "itl_mean", "ttft_mean")


@click.command()
@click.argument("measurements", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@as_json_option("Print JSON: `overall`, and `experiments` with every pair.")
@click.option(
    "--max-error",
    type=click.FloatRange(min=0),
    metavar="PCT",
    help=f"Exit with {EXCEEDED} if the mean absolute error of E2E, ITL or TTFT (means) is above this.",
)
@click.option(
    "--seeds",
    type=SEEDS,
    default=2,
    show_default=True,
    help="Simulate each experiment with this many seeds, and pool the requests.",
)
@click.option("--skip-bad", is_flag=True, help="Skip experiments with bad rows, and name them.")
@click.option(
    "--coefficients",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Step-time coefficients that `headway calibrate` wrote, in place of the catalog's.",
)
@click.option(
    "--load-error",
    is_flag=True,
    help="Find the factor on the arrival rate at which the predicted TTFT of an experiment equals the measured one.",
)
@click.option(
    "--scorecard",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write a Markdown page of errors by file, GPU, model family, engine and load. Implies --load-error.",
)
@together(measured_fleet.OPTIONS)
@no_progress_option
def command(
    measurements: tuple[Path, ...],
    as_json: bool,
    max_error: float | None,
    seeds: int,
    skip_bad: bool,
    coefficients: Path | None,
    load_error: bool,
    scorecard: Path | None,
    no_progress: bool,
    **flags: Any,
) -> int:
    """Replay measured serving runs, and print the errors of the predictions.

    MEASUREMENTS are results of vllm bench serve, guidellm, AIPerf, genai-perf and inference-perf, folders of records of
    headway serve, or CSV files with a row for each stage of load and a summary row for each experiment. Results of load
    generators do not describe the fleet: give --fleet, or --gpu and the settings that differ from the engine's
    defaults. Logs of an engine's iterations are compared iteration by iteration.

    An error is the predicted latency over the measured one, minus 1; `overall` is the mean absolute error over
    experiments. An experiment whose ITL contradicts its own E2E is marked, and the means are printed with and
    without it.
    """
    used_fleet = measured_fleet.take(flags)
    if steps := [path for path in measurements if steps_read.is_steps(path)]:
        if len(steps) < len(measurements):
            raise HeadwayError("logs of iterations and served runs: expected one kind; validate each on its own")
        return _validate_steps(steps, used_fleet, coefficients, as_json, max_error)
    experiments, refused, notes = _experiments(measurements, used_fleet, skip_bad)
    with progress("validating", wanted=not no_progress) as report:
        compared = []
        for i, (path, experiment, own) in enumerate(experiments):
            used = _coefficients(experiment, coefficients, own)
            try:
                compared.append(_compared(experiment, seeds, used, load_error or scorecard is not None, path))
            except HeadwayError as error:
                refused.append(f"experiment {experiment.id}: cannot be replayed: {error}")
            if report is not None:
                report((i + 1) / len(experiments))
    if not compared:
        raise HeadwayError(f"{', '.join(map(str, measurements))}: {'; '.join(refused)}")
    result = validation(compared, refused, notes)
    if as_json:
        print_json(result)
    else:
        _print(result)
    if scorecard is not None:
        names = " ".join(path.name for path in measurements)
        write_text(scorecard, page(compared, f"headway validate {names} --scorecard {scorecard.name}"))
    return _verdict(result, max_error)


def _validate_steps(
    paths: Sequence[Path], flags: Mapping[str, Any], file: Path | None, as_json: bool, max_error: float | None
) -> int:
    """Print the errors of predicted iterations, by region of batches."""
    logs = [steps_read.read(path) for path in paths]
    pool, known = measured_fleet.of_steps(logs, flags)
    if file is not None:
        known = coefficients_in(file, pool.gpu.name, pool.engine.name)
    spans = [span for log in logs for span in log.spans]
    if not spans:
        raise HeadwayError(f"{', '.join(map(str, paths))}: no durations of iterations that are certain")
    found = regions(spans, SpanTimes(spans, pool).seconds(known))
    if as_json:
        print_json({"model": pool.model.name, "gpu": pool.gpu.name, "engine": pool.engine.name, "regions": found})
    else:
        print_regions(found, f"Error of the predicted iterations of {pool.model.name} on {pool.gpu.name}, %")
        for log in logs:
            for reason, num in log.left_out.items():
                click.echo(f"{log.file}: left out: {num:,} iterations {reason}")
    worst = 100 * abs(found[-1].error)
    if max_error is not None and worst > max_error:
        click.echo(f"above --max-error {max_error:g}%: all iterations together {worst:.1f}%", err=True)
        return EXCEEDED
    return 0


Measured = tuple[Path, ServingExperiment, Coefficients | None]
"""A file, one of its experiments, and the step times of the experiment's fleet file; None without a fleet file."""


def _experiments(
    measurements: tuple[Path, ...], flags: Mapping[str, Any], skip_bad: bool
) -> tuple[list[Measured], list[str], list[str]]:
    """The experiments of all files, omissions, and assumptions."""
    experiments: list[Measured] = []
    refused: list[str] = []
    notes: list[str] = []
    runs: list[measured_fleet.FoundRun] = []
    for path in measurements:
        if not measured_fleet.is_runs(path):
            found, reasons = read(path, skip_bad)
            experiments += [(path, experiment, None) for experiment in found]
            refused += reasons
            continue
        more, reasons = measured_fleet.found_runs(path, flags)
        refused += reasons
        for one in more:
            if (same := next((known for known in runs if one.run.is_same(known.run)), None)) is not None:
                if same.run.rows is not None or one.run.rows is None:
                    refused.append(f"{one.run.where}: the same as {same.run.where}")
                    continue
                # the requests contain more information
                refused.append(f"{same.run.where}: the same as {one.run.where}")
                experiments = [each for each in experiments if each[1] is not same.experiment]
                runs.remove(same)
            runs.append(one)
            experiments.append((path, one.experiment, one.coefficients))
            notes += [f"{one.run.where}: {note}" for note in one.run.notes]
    return experiments, refused, notes


def _coefficients(experiment: ServingExperiment, file: Path | None, own: Coefficients | None) -> Coefficients:
    gpu, engine = experiment.gpu.name, experiment.engine
    if file is not None:
        return coefficients_in(file, gpu, engine)
    return own or catalog.coefficients(gpu, engine)


def _compared(
    experiment: ServingExperiment, seeds: int, used: Coefficients, load_error: bool, file: Path
) -> ExperimentErrors:
    factor = load_factor(experiment, used) if load_error else None
    replayed = replay(experiment, range(seeds), coefficients=used)
    return compare(experiment, replayed, used.calibrated, factor, file.name)


def _verdict(result: Validation, max_error: float | None) -> int:
    if max_error is None:
        return 0
    above = [f"{key} {result.overall[key]:.1f}%" for key in JUDGED if result.overall.get(key, 0.0) > max_error]
    if above:
        click.echo(f"above --max-error {max_error:g}%: {', '.join(above)}", err=True)
    return EXCEEDED if above else 0


def _print(result: Validation) -> None:
    rows = [_row(one) for one in result.experiments]
    rows.append(["mean absolute error", *_means(result.overall)])
    rows.append(["bias", *_means(result.bias, signed=True)])
    if result.contradicting and result.consistent:
        rows.append([f"mean absolute error without {', '.join(result.contradicting)}", *_means(result.consistent)])
    print_table(["experiment", *OVERALL], rows, "Error of the prediction, %")
    for one in result.experiments:
        if one.load_factor is not None:
            click.echo(f"experiment {one.id}: the measured TTFT is predicted at {one.load_factor:.2f} times its rate")
        if one.ks_distance:
            distances = ", ".join(f"{kind} {distance:.2f}" for kind, distance in one.ks_distance.items())
            click.echo(f"experiment {one.id}: Kolmogorov-Smirnov distance of the requests' latencies: {distances}")
    for line in _notes(result):
        click.echo(line)


def _notes(result: Validation) -> Iterator[str]:
    for one in result.experiments:
        if one.contradiction is not None:
            yield f"experiment {one.id}: the measurement contradicts itself: {one.contradiction}"
        if one.num_unfinished:
            yield f"experiment {one.id}: {one.num_unfinished} requests could not be served, and are left out"
    rough = [one.id for one in result.experiments if not one.calibrated]
    if rough:
        yield f"step times not measured on this GPU and engine: experiments {', '.join(rough)}"
    for note in result.notes:
        yield f"note: {note}"
    for reason in result.refused:
        yield f"left out: {reason}"


def _row(one: ExperimentErrors) -> list[object]:
    mark = " *" if one.contradiction is not None else ""
    dp = f" dp{one.dp}" if one.dp > 1 else ""
    name = f"{one.id} {one.model} tp{one.tp}{dp} {one.gpu} {one.workload}{mark}"
    return [name, *(or_dash(one.errors.get(key), "{0.error_pct:+.1f}") for key in OVERALL)]


def _means(means: dict[str, float], signed: bool = False) -> list[str]:
    return [or_dash(means.get(key), "{:+.1f}" if signed else "{:.1f}") for key in OVERALL]
