"""`headway workload`: request traces described, converted or generated; the work is in `workload`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec

from headway.cli.flags import changes, seed_option, synthetic_options, together, used_flags
from headway.cli.output import PATH, POSITIVE, SubCommands, json_option, print_json, print_table
from headway.config import strict_yaml
from headway.core.errors import HeadwayError
from headway.workload.describe import Description, Spread
from headway.workload.describe import describe as describe_workload
from headway.workload.files import to_csv, to_parquet
from headway.workload.generate import generate
from headway.workload.read import FORMATS, read
from headway.workload.spec import WorkloadSpec
from headway.workload.table import Workload

trace_options = together(
    (
        click.option("--format", type=click.Choice(list(FORMATS)), help="Default: detected from the first line."),
        click.option("--limit", type=POSITIVE, help="Read at most this many requests."),
        click.option("--sort", is_flag=True, help="Sort by arrival. Without it, rows out of order are an error."),
        click.option("--skip-bad", is_flag=True, help="Skip and count bad lines. Without it, they are an error."),
        click.option(
            "--timestamp-unit",
            type=click.Choice(["s", "ms"]),
            help="Of JSON lines with Mooncake's keys. Default: whole numbers are ms, fractions s.",
        ),
        click.option(
            "--block-tokens", type=POSITIVE, help="Tokens of one of their hash ids. Default: the size that fits."
        ),
        click.option(
            "--spread-ticks", is_flag=True, help="Spread requests that share a tick of a coarse clock over it."
        ),
    )
)


@click.group(cls=SubCommands)
def command() -> None:
    """Describe, convert or generate request traces."""


@command.command()
@click.argument("file", type=PATH)
@trace_options
@json_option
def describe(file: Path, as_json: bool, **options: Any) -> None:
    """Print the lengths, arrivals and tiers of the requests in the trace FILE."""
    described = describe_workload(read(file, **options))
    if as_json:
        print_json(described)
    else:
        _print(described, str(file))


@command.command()
@click.argument("file", type=PATH)
@click.argument("out", type=PATH)
@trace_options
def convert(file: Path, out: Path, **options: Any) -> None:
    """Read the trace FILE and write it to OUT: .parquet, .csv or .csv.gz."""
    _check_name(out)
    _write(read(file, **options), out)


@command.command("generate")
@click.argument("out", type=PATH)
@synthetic_options
@seed_option
@click.option("--spec", type=PATH, help="A YAML file with the `workload` section of a scenario.")
def generate_(out: Path, spec: Path | None, seed: int | None, **flags: Any) -> None:
    """Write a synthetic workload to OUT: .parquet, .csv or .csv.gz."""
    _check_name(out)
    if spec is not None:
        if used_flags(flags):
            raise HeadwayError("--spec: expected no other options")
        data, places = strict_yaml.read(spec)
        base_dir = spec.parent
    else:
        document, places = strict_yaml.change({"workload": {}}, strict_yaml.Places(), changes(flags))
        data, base_dir = document["workload"], Path()
    parsed = strict_yaml.convert(data, WorkloadSpec, places)
    with places.at():
        _write(generate(parsed, seed or 0, base_dir), out)


def _check_name(out: Path) -> None:
    if not out.name.endswith((".parquet", ".csv", ".csv.gz")):
        raise HeadwayError(f"{out}: the suffix selects the format; expected .parquet, .csv or .csv.gz")


def _write(workload: Workload, out: Path) -> None:
    if out.suffix == ".parquet":
        to_parquet(workload, out)
    else:
        to_csv(workload, out)
    for note in workload.notes:
        click.echo(f"note: {note}", err=True)
    click.echo(f"wrote {out}: {len(workload):,} requests", err=True)


def _print(described: Description, title: str) -> None:
    values = msgspec.structs.asdict(described)
    spreads = {name: value for name, value in values.items() if isinstance(value, Spread)}
    notes = values.pop("notes")
    print_table((title, ""), [(name, value) for name, value in values.items() if value and name not in spreads])
    click.echo()
    columns = Spread.__struct_fields__
    print_table(("tokens", *columns), [(name, *msgspec.structs.astuple(s)) for name, s in spreads.items()])
    for note in notes:
        click.echo(f"note: {note}", err=True)
