"""`headway calibrate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from headway import catalog
from headway.cli.output import print_json, print_table
from headway.core.errors import HeadwayError

_path = click.Path(path_type=Path)


@click.command()
@click.argument("measurements", nargs=-1, required=True, type=_path)
@click.option("--gpu", required=True, help="A GPU of the catalog: what was measured.")
@click.option("--engine", required=True, help="An engine profile of the catalog: what served.")
@click.option("--engine-version", default="", help="Which version served: kept in the file.")
@click.option("--out", type=_path, help="Write the coefficients here, as JSON.")
@click.option("--source", default="", help="Who measured what, and when: kept in the file. Needed with --out.")
@click.option("--model", help="The model of benchmark results that name none, or not as the catalog does.")
@click.option("--tp", type=click.IntRange(min=1), help="Tensor parallel ranks of benchmark results that do not say.")
@click.option("--max-num-batched-tokens", type=click.IntRange(min=1), help="Token budget of the benchmarked engine.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(measurements: tuple[Path, ...], gpu: str, engine: str, out: Path | None, source: str, **flags: Any) -> None:
    """Fit step-time coefficients of a GPU and an engine on measurements.

    MEASUREMENTS are operator tables (AIConfigurator's columns, or what headway measure wrote), serving results, or JSON
    of vLLM bench serve and guidellm. Every fifth shape is held out and tells the residual. Use the file with
    --coefficients, or coefficients: in a scenario's fleet. A fit that fails writes nothing.
    """
    from headway.calibration.benchmarks import Told
    from headway.calibration.measurements import read
    from headway.calibration.write import calibrate, write

    if out is not None and not source.strip():
        raise HeadwayError("--source is missing: say who measured what, and when; it is kept in the file")
    accelerator, profile = catalog.gpu(gpu), catalog.engine(engine)
    model = None if flags["model"] is None else catalog.model(flags["model"])
    budget = flags["max_num_batched_tokens"] or profile.max_num_batched_tokens
    measured = read(measurements, accelerator, Told(model, flags["tp"], budget))
    said = source.strip() or "measurements without a source"
    found = calibrate(measured, accelerator, profile.name, said, flags["engine_version"])
    if out is not None:
        write(out, found.file)
    if flags["as_json"]:
        print_json({
            "gpu": accelerator.name, "engine": profile.name, "files": measured.files, "fits": found.fits,
            "notes": found.notes, "coefficients": found.file, "out": None if out is None else str(out),
        })  # fmt: skip
        return
    _print_fits(found.fits)
    _print_files(measured.files)
    for note in found.notes:
        click.echo(f"* {note}")
    click.echo(f"wrote {out}" if out is not None else "nothing written; --out FILE.json keeps the coefficients")


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
        for why, num in each.left_out.items():
            click.echo(f"  left out: {num:,} {why}")
        for note in each.notes:
            click.echo(f"  {note}")
