"""`headway schema`: the JSON schema of fleet files and scenarios, for editors."""

from __future__ import annotations

import json
from pathlib import Path

import click

from headway.cli.output import PATH
from headway.config.editor_schema import COMMENT, editor_schema
from headway.workload.atomic_file import write_text


@click.command()
@click.option("-o", "--out", type=PATH, help="File for the schema; default: stdout.")
def command(out: Path | None) -> None:
    """Write the JSON schema of fleet files and scenarios.

    Editors with a YAML language server use it to complete keys and mark mistakes in files whose first line names it.
    `headway new` writes both.
    """
    text = json.dumps(editor_schema(), indent=1) + "\n"
    if out is None:
        click.echo(text, nl=False)
        return
    write_text(out, text)
    click.echo(f"wrote {out}; a file's first line names it: {COMMENT.rstrip()}")
