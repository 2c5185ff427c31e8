"""`headway calibrate`: coefficients fitted to measurements, with their errors; the work is in `calibration`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headway import catalog
from headway.calibration.runs.run import first_requests
from headway.calibration.serving import ServingExperiment
from headway.calibration.solve import FitResult
from headway.calibration.steps import read as steps_read
from headway.calibration.steps.regions import Region
from headway.catalog.coefficients import Coefficients
from headway.cli import measured_fleet
from headway.cli.flags import together
from headway.cli.output import PATH, json_option, no_progress_option, print_json, print_table, progress
from headway.core.errors import HeadwayError
from headway.core.fleet import Engine, Gpu

if TYPE_CHECKING:
    from headway.calibration.calibrate import Calibration
    from headway.calibration.measurements import Measurements

MOST_REQUESTS = 5_000
"""Number of first requests of a run that a fit uses."""


@click.command()
@click.argument("measurements", nargs=-1, required=True, type=PATH)
@together(measured_fleet.OPTIONS)
@click.option("--engine-version", default="", help="Version of the engine, recorded in the file.")
@click.option("--out", type=PATH, help="Write the coefficients to this file, as JSON.")
@click.option("--source", default="", help="Who measured what, and when, recorded in the file. Required with --out.")
@click.option(
    "--replace",
    multiple=True,
    metavar="FIT",
    help="Let a fit of PyTorch's kernels, such as gemm.bf16, replace an engine's in the catalog; all: every one.",
)
@no_progress_option
@json_option
def command(measurements: tuple[Path, ...], out: Path | None, source: str, **flags: Any) -> None:
    """Fit the step-time coefficients of a GPU and an engine to measurements.

    MEASUREMENTS are logs of an engine's iterations (which vLLM writes with HEADWAY_STEP_LOG=FOLDER), operator tables
    (with AIConfigurator's columns, or written by headway measure), and served runs: results of vllm bench serve,
    guidellm, AIPerf, genai-perf and inference-perf, folders of records of headway serve, or CSV files of headway
    validate. Give --fleet, or --gpu and --engine; for logs of iterations --model, too. Every fifth shape of a table,
    every fifth of the iterations and every single run are held out to compute errors. Use the file with
    --coefficients, or with coefficients: in a scenario's fleet. A failed fit writes nothing.
    """
    from headway.calibration.calibrate import calibrate, write
    from headway.calibration.measurements import read

    if out is not None and not source.strip():
        raise HeadwayError("--source is missing; expected who measured what, and when, to record in the file")
    logs = [steps_read.read(path) for path in measurements if steps_read.is_steps(path)]
    pool = None
    if logs:
        pool, known = measured_fleet.of_steps(logs, measured_fleet.used(flags))
        gpu, profile = pool.gpu, pool.engine
    else:
        gpu, profile, known = _hardware(flags)
    used = measured_fleet.take(flags)

    def runs(path: Path) -> tuple[Sequence[ServingExperiment], Sequence[str]]:
        found, skipped = measured_fleet.found_runs(path, used, lambda run: first_requests(run, MOST_REQUESTS))
        return [one.experiment for one in found], skipped

    measured = read(measurements, gpu, runs)
    origin = source.strip() or "measurements without a source"
    with progress("fitting", wanted=not flags["no_progress"] and bool(measured.experiments)) as report:
        calibration = calibrate(
            measured,
            gpu,
            profile,
            origin,
            version=flags["engine_version"],
            known=known,
            progress=report,
            replaced=flags["replace"],
            pool=pool,
        )
    if out is not None:
        write(out, calibration.file)
    if flags["as_json"]:
        found = {"files": measured.files, "fits": calibration.fits, "notes": calibration.notes}
        regions = {"regions": None if calibration.steps is None else calibration.steps.after}
        wrote = {"coefficients": calibration.file, "out": None if out is None else str(out)}
        print_json({"gpu": gpu.name, "engine": profile.name, **found, **regions, **wrote})
    else:
        _print(calibration, measured, out)


def _print(calibration: Calibration, measured: Measurements, out: Path | None) -> None:
    _print_fits(calibration.fits)
    if calibration.steps is not None:
        print_regions(calibration.steps.before, "Error of the predicted iterations before, %")
        print_regions(calibration.steps.after, "After, on iterations that the fit has not seen, %")
    _print_files(measured.files)
    for note in calibration.notes:
        click.echo(f"* {note}")
    click.echo(f"wrote {out}" if out is not None else "nothing written; --out FILE.json writes the coefficients")


def _hardware(flags: dict[str, Any]) -> tuple[Gpu, Engine, Coefficients]:
    """The GPU and the engine to calibrate, and their step times without measurements."""
    if flags["fleet"] is None:
        for name in ("gpu", "engine"):
            if flags[name] is None:
                raise HeadwayError(f"--{name} is missing; expected it, or --fleet with a pool that has one")
        if flags["gpu_file"] is None:
            gpu, profile = catalog.gpu(flags["gpu"]), catalog.engine(flags["engine"])
            return gpu, profile, catalog.coefficients(gpu.name, profile.name)
    pool, known = measured_fleet.MeasuredFleet(measured_fleet.used(flags)).any_pool()
    return pool.gpu, pool.engine, known


def _print_fits(fits: Sequence[FitResult]) -> None:
    rows = [
        (
            fit.key,
            fit.num_fitted,
            fit.num_held_out,
            f"{fit.residual:.1%}",
            f"{fit.bias:+.1%}",
            ", ".join(f"{name} {value:.3g}" for name, value in fit.values.items()),
        )
        for fit in fits
    ]
    print_table(("operator", "fitted on", "held out", "median error", "bias", "coefficients"), rows)
    click.echo()
    for fit in fits:
        if fit.width:
            print_table(
                ("term", "before", "fitted", "width left"), _term_rows(fit), f"{fit.key}: what the runs determine"
            )
            if not fit.held_out:
                continue
            errors = ((key.split("_")[0].upper(), value) for key, value in fit.held_out.items())
            means = ", ".join(f"{name} {value:.1f}%" for name, value in errors)
            click.echo(f"mean error on runs that were left out in turn: {means}")
            click.echo()


def print_regions(found: Sequence[Region], title: str) -> None:
    rows = [
        (
            each.name,
            each.num_spans,
            f"{1e3 * each.measured_s:.2f}",
            *(f"{100 * value:+.1f}" for value in (each.error, each.median_error, each.low_error, each.high_error)),
        )
        for each in found
    ]
    print_table(("iterations", "spans", "mean, ms", "total", "median", "p10", "p90"), rows, title)
    click.echo()


def _term_rows(fit: FitResult) -> Iterator[tuple[str, str, str, str]]:
    for name, value in fit.values.items():
        yield name, f"{fit.prior[name]:.3g}", f"{value:.3g}", f"{fit.width[name]:.0%}"


def _print_files(files: Any) -> None:
    for each in files:
        click.echo(f"{each.file}: {each.format}, {each.num_used:,} of {each.num_rows:,} used")
        for reason, num in each.left_out.items():
            click.echo(f"  left out: {num:,} {reason}")
        for note in each.notes:
            click.echo(f"  {note}")
