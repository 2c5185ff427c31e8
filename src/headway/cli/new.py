"""`headway new`: writes a commented scenario to start with."""

from __future__ import annotations

import json
from pathlib import Path

import click

from headway.cli.output import PATH
from headway.config.editor_schema import COMMENT, FILE_NAME, editor_schema
from headway.core.errors import HeadwayError
from headway.scenario.presets import builtin
from headway.workload.atomic_file import write_text


@click.command()
@click.argument("file", type=PATH, default="scenario.yaml")
@click.option("--force", is_flag=True, help="Overwrite existing files.")
def command(file: Path, force: bool) -> None:
    """Write a commented scenario to FILE (scenario.yaml), and its schema for editors beside it."""
    if file.exists() and not force:
        raise HeadwayError(f"{file}: exists already; give another name, or --force to overwrite it")
    schema, text = file.parent / FILE_NAME, json.dumps(editor_schema(), indent=1) + "\n"
    is_kept = schema.exists() and not force
    if not is_kept:
        write_text(schema, text)
    write_text(file, COMMENT + builtin("chat").read_text(encoding="utf-8"))
    beside = "" if is_kept else f" and {schema}, by which editors check it"
    click.echo(f"wrote {file}{beside}; try: headway compare {file}")
    if is_kept and schema.read_bytes() != text.encode():
        click.echo(f"{schema} is not that of this version, and is kept; --force overwrites it", err=True)
