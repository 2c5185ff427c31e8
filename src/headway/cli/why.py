"""`headway why`: where the time of a served request went; the work is in `diagnosis`."""

from __future__ import annotations

from pathlib import Path

import click

from headway.cli.output import PATH, POSITIVE, as_json_option, print_json
from headway.core.errors import HeadwayError


@click.command()
@click.argument("request_id", required=False)
@click.option("--records", type=PATH, help="The folder that headway serve --records writes, or has written.")
@click.option("--decisions", type=PATH, help="The decision log of the same gateway (headway serve --decisions).")
@click.option("--slowest", type=POSITIVE, metavar="N", help="Instead of one request, list the N slowest.")
@click.option(
    "--by", type=click.Choice(["e2e", "ttft", "tpot"]), default="e2e", show_default=True, help="Of --slowest."
)
@click.option("--fleet", type=PATH, help="The fleet file. Default: the text of it that the records hold.")
@as_json_option("Print JSON: one object for REQUEST_ID, a list of them for --slowest.")
def command(
    request_id: str | None,
    records: Path | None,
    decisions: Path | None,
    slowest: int | None,
    by: str,
    fleet: Path | None,
    as_json: bool,
) -> None:
    """Explain why a request was slow.

    REQUEST_ID is the x-request-id of its answer, of the access log and of the decision log. Prints where its time went,
    and the times that the step-time model of its replica predicts. With --decisions, also prints the candidate replicas
    and the choices of other routers. For records of headway simulate, REQUEST_ID is a row number.
    """
    if records is None:
        raise HeadwayError("--records is missing; expected the folder of headway serve --records")
    if (request_id is None) == (slowest is None):
        raise HeadwayError("expected REQUEST_ID, or --slowest N")
    from headway import diagnosis
    from headway.diagnosis.text import table, text

    history = diagnosis.read(records)
    if request_id is not None:
        found = diagnosis.explain(history, request_id, decisions, fleet)
        if as_json:
            print_json(found)
        else:
            click.echo(text(found))
        return
    assert slowest is not None
    several = diagnosis.slowest(history, slowest, by, decisions, fleet)
    if as_json:
        print_json(several)
    else:
        click.echo(table(several))
