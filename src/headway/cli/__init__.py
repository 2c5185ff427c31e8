"""The command line. A command's module is imported when the command runs, so that `--help` is fast."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import click

from headway import __version__
from headway.cli.stdout import keep_for_ourselves
from headway.core.errors import HeadwayError, HeadwayWarning, unknown

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

COMMANDS = {
    "simulate": "Run a scenario and print its metrics.",
    "compare": "Run several policies on one workload and print one table.",
    "plan": "Find the cheapest fleet that meets SLOs.",
    "workload": "Describe, convert or generate request traces.",
    "forecast": "Forecast demand from recorded days; compare forecasts, and the cost of scaling by them.",
    "calibrate": "Fit step-time coefficients to your own measurements.",
    "measure": "Time the operators of a model on a local GPU.",
    "validate": "Compare predictions with measured serving.",
    "arena": "Rank policies over a grid of fleets, workloads and loads.",
    "reproduce": "Reproduce the tables and figures of a paper, and check its claims.",
    "catalog": "List GPUs, models and engines; plan a model's memory.",
    "serve": "Serve a fleet of engines as one OpenAI-compatible endpoint.",
    "autopilot": "Show and control the autopilot of headway serve --autopilot.",
    "epp": "Choose endpoints for Envoy: an endpoint picker of the Gateway API Inference Extension.",
    "advise": "Say what to change in a fleet, by recorded days.",
    "why": "Say why a request was slow, or list the slowest.",
    "keys": "Change the keys, teams and budgets of a key store, and report what they have spent.",
    "export": "Write a fleet as manifests for Kubernetes.",
    "emulate": "Emulate an engine in real time, without a GPU.",
    "load": "Send requests to a running engine, and measure its answers.",
    "discover": "Ask running engines what they are, and write a fleet file.",
    "new": "Write a commented scenario to start from.",
    "schema": "Write the JSON schema of fleet files, for editors.",
}

PAPERS = ("arena", "reproduce")
"""Commands of the distribution headway-papers, which declares them as entry points of the group `headway.commands`."""

USER_ERROR = 2
INTERRUPTED = 130
CLOSED_PIPE = 1


class Commands(click.Group):
    """The commands of `COMMANDS`; command NAME is `headway.cli.NAME.command`, unless it is one of `PAPERS`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The installed commands."""
        of_papers = _of_papers()
        return [name for name in COMMANDS if name not in PAPERS or name in of_papers]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
        """Import a command. Raises HeadwayError for an unknown command, or one whose package is not installed."""
        if cmd_name not in COMMANDS:
            raise unknown("command", cmd_name, COMMANDS)
        if cmd_name in PAPERS:
            of_papers = _of_papers()
            if cmd_name not in of_papers:
                what = f"headway {cmd_name} is in another package, headway-papers, which is not installed"
                raise HeadwayError(f"{what}: pip install headway-papers")
            command = of_papers[cmd_name].load()
        else:
            command = import_module(f"headway.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name]) for name in self.list_commands(ctx)])


def _of_papers() -> Mapping[str, EntryPoint]:
    """The installed commands of `PAPERS`."""
    from importlib.metadata import entry_points  # reads the metadata of every package, which other commands do not need

    return {each.name: each for each in entry_points(group="headway.commands") if each.name in PAPERS}


def _print_version(ctx: click.Context, _: click.Parameter, is_requested: bool) -> None:
    """Print the version, and whether the loops of the simulator and gateway are compiled (`setup.py`)."""
    if is_requested and not ctx.resilient_parsing:
        loop = find_spec("headway.sim.kernel")
        is_compiled = loop is not None and str(loop.origin).endswith(tuple(EXTENSION_SUFFIXES))
        click.echo(f"headway {__version__} ({'compiled' if is_compiled else 'pure Python'})")
        ctx.exit()


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Show the version."
)
def commands() -> None:
    """Plan, rehearse and run fleets of LLM serving engines.

    Start with `headway new chat.yaml`, then `headway compare chat.yaml`.
    """


def main(args: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code. A user's error is one line on stderr, and so is a warning.

    Without `args`, the process's own arguments are used, and its stdout is reserved for Headway's output.
    """
    if args is None:
        keep_for_ourselves()
    with warnings.catch_warnings():
        warnings.simplefilter("always", HeadwayWarning)  # the filter "once" forgets when a library changes the filters
        shown: set[str] = set()

        def show(message: Warning | str, *_: Any, **__: Any) -> None:
            if (text := str(message)) not in shown:
                shown.add(text)
                click.echo(f"warning: {text}", err=True)

        warnings.showwarning = show
        return _run(args)


def _run(args: Sequence[str] | None) -> int:
    try:
        code = commands.main(args, prog_name="headway", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except HeadwayError as error:
        return _user_error(str(error))
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return 0
    except click.ClickException as error:
        context = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "headway"
        return _user_error(f"{error.format_message().rstrip('.')} (see: {context} --help)")
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE
    except OSError as error:
        return _user_error(f"{error.filename}: {error.strerror}" if error.filename else str(error))


def _user_error(text: str) -> int:
    click.echo(f"error: {text}", err=True)
    return USER_ERROR
