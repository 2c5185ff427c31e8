"""`headway new`: a commented scenario to begin with."""

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
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
def command(file: Path, force: bool) -> None:
    """Write a commented scenario to FILE (scenario.yaml), and its schema for editors beside it."""
    if file.exists() and not force:
        raise HeadwayError(f"{file}: exists already; give another name, or --force to overwrite it")
    write_text(file.parent / FILE_NAME, json.dumps(editor_schema(), indent=1) + "\n")
    write_text(file, COMMENT + builtin("chat").read_text(encoding="utf-8"))
    click.echo(f"wrote {file}; try: headway compare {file}")
