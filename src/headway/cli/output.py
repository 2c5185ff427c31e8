"""Parts shared by all commands: option types, tables and JSON on stdout, progress on stderr."""

from __future__ import annotations

import os
import shlex
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console

from headway.core.counts import MOST_PROCESSES, MOST_SEEDS
from headway.core.duration import seconds, unlikely
from headway.core.errors import HeadwayError, SloWarning
from headway.report.blocks import Heading, Said, table_of
from headway.report.render import WIDTH, text

POSITIVE = click.IntRange(min=1)
SEEDS = click.IntRange(1, MOST_SEEDS)
JOBS = click.IntRange(1, MOST_PROCESSES)
ABOVE_0 = click.FloatRange(min=0, min_open=True)


class Duration(click.ParamType[float]):
    """Seconds, or a duration with a unit: 450ms, 2s, 1m. Warns of a TTFT or TPOT that probably has the wrong unit."""

    name = "duration"

    def __init__(self, *, is_positive: bool) -> None:
        self.is_positive = is_positive

    def convert(self, value: str | float, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            found = seconds(value)
        except HeadwayError as error:
            self.fail(str(error), param, ctx)
        if self.is_positive and not found:
            self.fail(f"{value!r}; expected more than 0", param, ctx)
        if text := unlikely(param.opts[0] if param is not None else "", found):
            warnings.warn(text, SloWarning, stacklevel=2)
        return found


SECONDS = Duration(is_positive=False)
SECONDS_ABOVE_0 = Duration(is_positive=True)
SEED = click.IntRange(min=0)
PATH = click.Path(path_type=Path)
PORT = click.IntRange(0, 65535)
_LONGEST_SENTENCE = 1000
"""Longest sentence in a command's help, in characters."""


def command_line() -> str:
    """The command as a page names it: without keys."""
    words = list(sys.argv[1:])
    for i, word in enumerate(words):
        if word == "--api-key" and i + 1 < len(words):
            words[i + 1] = "..."
        elif word.startswith("--api-key="):
            words[i] = "--api-key=..."
    return shlex.join(["headway", *words])


class SubCommands(click.Group):
    """A command group whose help shows the whole first sentence of each command."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(
                [
                    (name, each.get_short_help_str(limit=_LONGEST_SENTENCE))
                    for name in self.list_commands(ctx)
                    if (each := self.get_command(ctx, name)) is not None
                ]
            )


def list_option(*names: str, default: str | None = None, **settings: Any) -> Callable[[Any], Any]:
    """An option with comma-separated values, as one text. If it is repeated, the values are joined."""

    def joined(_: click.Context, __: click.Parameter, texts: Sequence[str]) -> str | None:
        return ",".join(texts) if texts else None

    defaults = None if default is None else [default]
    return click.option(*names, multiple=True, default=defaults, callback=joined, **settings)


def as_json_option(help_text: str) -> Callable[[Any], Any]:
    """`--json`, with this help. Other output to `sys.stdout` goes to stderr while the command runs."""

    def begin(context: click.Context, _: click.Parameter, wanted: bool) -> bool:
        if wanted and _STDOUT not in context.meta and not context.resilient_parsing:
            context.meta[_STDOUT] = sys.stdout
            context.with_resource(redirect_stdout(sys.stderr))
        return wanted

    return click.option("--json", "as_json", is_flag=True, is_eager=True, callback=begin, help=help_text)


_STDOUT = "headway.stdout"
json_option = as_json_option("Print JSON.")
no_progress_option = click.option("--no-progress", is_flag=True, help="Show no progress bar.")
decisions_option = click.option(
    "--decisions", type=PATH, help="Write the reason of each routing decision (JSON lines)."
)


def console() -> Console:
    """Stdout; wide if it is not a terminal, so that nothing is cut off."""
    return Console(width=None if sys.stdout.isatty() else WIDTH)


def print_json(value: Any) -> None:
    """Print indented JSON, with null for NaN, on the real stdout."""
    print_pieces([msgspec.json.format(msgspec.json.encode(value), indent=2)])


def print_pieces(text: Iterable[bytes]) -> None:
    """Print a text that comes in pieces, on the real stdout."""
    context = click.get_current_context(silent=True)
    stdout = context.meta.get(_STDOUT) if context else None
    for piece in text:
        click.echo(piece, file=stdout, nl=False)
    click.echo(file=stdout)


def print_table(headers: Sequence[str], rows: Iterable[Sequence[object]], title: str | None = None) -> None:
    """Print a table of values, as `table_of` makes it."""
    print_said([*([] if title is None else [Heading(title)]), table_of(headers, rows)])


def print_said(said: Iterable[Said]) -> None:
    """Print lines and tables, as wide as the terminal."""
    is_terminal = sys.stdout.isatty()
    click.echo(text(said, console().width if is_terminal else None, is_terminal), nl=False)


@contextmanager
def progress(label: str, wanted: bool) -> Iterator[Callable[[float], None] | None]:
    """Show a bar on stderr, if that is a terminal. Yields a function that sets the completed share, or None."""
    with _bar((label, None, "{task.percentage:3.0f}%"), wanted) as update:
        yield update and (lambda share: update(completed=share))


@contextmanager
def counting(doing: str, wanted: bool) -> Iterator[Callable[[int, int], None] | None]:
    """As `progress`, with numbers: "rehearsing 3 of about 20". Yields a function of (done, expected), or None."""
    with _bar((f"{doing} {{task.completed:.0f}} of about {{task.total:.0f}}", None), wanted) as update:
        yield update and (lambda completed, expected: update(completed=completed, total=expected))


@contextmanager
def _bar(words: Sequence[str | None], wanted: bool) -> Iterator[Callable[..., None] | None]:
    """Show texts and times, with the bar in place of None. Yields the function that updates the bar."""
    if not wanted or not sys.stderr.isatty():
        yield None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    shown = [BarColumn() if each is None else TextColumn(each) for each in words]
    times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    with Progress(*shown, *times, console=Console(stderr=True), transient=True) as bar:
        yield partial(bar.update, bar.add_task("", total=1.0))


def user_cache(name: str) -> Path:
    """The user's cache folder of this name."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "headway" / name
