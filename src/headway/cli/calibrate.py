"""`headway calibrate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from headway import catalog
from headway.cli.output import PATH, POSITIVE, json_option, print_json, print_table
from headway.core.errors import HeadwayError


@click.command()
@click.argument("measurements", nargs=-1, required=True, type=PATH)
@click.option("--gpu", required=True, help="The measured GPU, by its name in the catalog.")
@click.option("--engine", required=True, help="The measured engine, by its name in the catalog.")
@click.option("--engine-version", default="", help="Version of the engine, recorded in the file.")
@click.option("--out", type=PATH, help="Write the coefficients to this file, as JSON.")
@click.option("--source", default="", help="Who measured what, and when, recorded in the file. Required with --out.")
@click.option("--model", help="The model, if benchmark results do not name one of the catalog.")
@click.option("--tp", type=POSITIVE, help="Tensor parallel ranks, if benchmark results do not give them.")
@click.option("--max-num-batched-tokens", type=POSITIVE, help="Token budget of the benchmarked engine.")
@json_option
def command(measurements: tuple[Path, ...], gpu: str, engine: str, out: Path | None, source: str, **flags: Any) -> None:
    """Fit the step-time coefficients of a GPU and an engine to measurements.

    MEASUREMENTS are operator tables (with AIConfigurator's columns, or written by headway measure), serving results, or
    JSON of vLLM bench serve and guidellm. Every fifth shape is held out to compute the residual. Use the file with
    --coefficients, or with coefficients: in a scenario's fleet. A failed fit writes nothing.
    """
    from headway.calibration.benchmarks import BenchmarkSettings
    from headway.calibration.calibrate import calibrate, write
    from headway.calibration.measurements import read

    if out is not None and not source.strip():
        raise HeadwayError("--source is missing; expected who measured what, and when, to record in the file")
    accelerator, profile = catalog.gpu(gpu), catalog.engine(engine)
    model = None if flags["model"] is None else catalog.model(flags["model"])
    budget = flags["max_num_batched_tokens"] or profile.max_num_batched_tokens
    measured = read(measurements, accelerator, BenchmarkSettings(model, flags["tp"], budget))
    origin = source.strip() or "measurements without a source"
    calibration = calibrate(measured, accelerator, profile.name, origin, flags["engine_version"])
    if out is not None:
        write(out, calibration.file)
    if flags["as_json"]:
        print_json({
            "gpu": accelerator.name, "engine": profile.name, "files": measured.files, "fits": calibration.fits,
            "notes": calibration.notes, "coefficients": calibration.file, "out": None if out is None else str(out),
        })  # fmt: skip
        return
    _print_fits(calibration.fits)
    _print_files(measured.files)
    for note in calibration.notes:
        click.echo(f"* {note}")
    click.echo(f"wrote {out}" if out is not None else "nothing written; --out FILE.json writes the coefficients")


def _print_fits(fits: Any) -> None:
    rows = [
        (fit.key, fit.num_fitted, fit.num_held_out, f"{fit.residual:.1%}", f"{fit.bias:+.1%}",
         ", ".join(f"{name} {value:.3g}" for name, value in fit.values.items()))
        for fit in fits
    ]  # fmt: skip
    print_table(("operator", "fitted on", "held out", "median error", "bias", "coefficients"), rows)
    click.echo()


def _print_files(files: Any) -> None:
    for each in files:
        click.echo(f"{each.file}: {each.format}, {each.num_used:,} of {each.num_rows:,} used")
        for reason, num in each.left_out.items():
            click.echo(f"  left out: {num:,} {reason}")
        for note in each.notes:
            click.echo(f"  {note}")
