"""`headway autopilot`: what the autopilot of a fleet file does, and its kill switch."""

from __future__ import annotations

from pathlib import Path

import click

from headway.cli.output import PATH, json_option, print_json
from headway.core.errors import HeadwayError
from headway.serving.autopilot_state import AutopilotFiles, shown


@click.group()
def command() -> None:
    """Show and control the autopilot of a fleet file that `headway serve --autopilot` serves on this machine.

    The commands read and write files beside the fleet file, so they work even if the gateway does not answer. From
    elsewhere: GET /autopilot, POST /autopilot/stop, /resume and /now, with one of the `admin_keys`.
    """


@command.command()
@click.argument("fleet", type=PATH)
@json_option
def status(fleet: Path, as_json: bool) -> None:
    """Print the stage of the current or last change, and the results of earlier changes."""
    found = shown(_files(fleet).load())
    if as_json:
        print_json(found)
        return
    click.echo(f"{found.stage}{', stopped' if found.stopped else ''}{f': {found.change}' if found.change else ''}")
    if found.change is not None:
        share = f"{found.share:.0%} of the time" if found.share is not None else ""
        gain = f", {100 * found.gain:+.1f} points of SLO attainment" if found.gain is not None else ""
        saved = f", {found.saved:.1%} of the dollars saved" if found.saved else ""
        click.echo(f"  {found.version}, {share}, {found.pairs} pairs of periods{gain}{saved}")
    if found.reason:
        click.echo(f"  {found.reason}")
    if found.drift:
        click.echo(f"  drift meanwhile, with the change and without it: {', '.join(found.drift)}")
    for each in found.past:
        click.echo(f"  {each.outcome}: {each.change}: {each.reason}")


@command.command()
@click.argument("fleet", type=PATH)
def stop(fleet: Path) -> None:
    """Take back the change on trial, and begin no other until `resume`: the kill switch."""
    _files(fleet).stop()


@command.command()
@click.argument("fleet", type=PATH)
def resume(fleet: Path) -> None:
    """Let changes begin again after `headway autopilot stop`."""
    _files(fleet).resume()


@command.command()
@click.argument("fleet", type=PATH)
def now(fleet: Path) -> None:
    """Look for a change now instead of at the time of day of `autopilot: at`."""
    _files(fleet).look_now()


def _files(fleet: Path) -> AutopilotFiles:
    found = AutopilotFiles(fleet)
    if not found.folder.is_dir():
        raise HeadwayError(f"{found.folder}: no such folder: no headway serve --autopilot has served {fleet.name}")
    return found
