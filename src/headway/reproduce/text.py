"""Claims as a table for a console."""

from __future__ import annotations

from collections.abc import Sequence
from io import StringIO

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from headway.report.table import seconds
from headway.reproduce.claims import Claim
from headway.reproduce.reproduction import ClaimResult, Reproduced

MARKS = {True: "✓", False: "✗", None: "?"}
WORDS = {True: "holds", False: "does not hold", None: "undecided"}
_SHORT = {True: "yes", False: "no", None: "undecided"}
_STYLES = {True: "green", False: "bold red", None: "yellow"}


def counted(rows: Sequence[ClaimResult]) -> str:
    """Such as "9 hold, 1 does not, 2 undecided"."""
    num = {verdict: sum(row.holds is verdict for row in rows) for verdict in (True, False, None)}
    parts = [f"{num[True]} hold{'s' if num[True] == 1 else ''}"]
    parts += [f"{num[False]} do{'es' if num[False] == 1 else ''} not"] if num[False] else []
    parts += [f"{num[None]} undecided"] if num[None] else []
    return ", ".join(parts)


def effort(reproduced: Reproduced) -> str:
    """Time and work, such as "12.3 s for 40 measurements, 10 more from the cache"."""
    cached = f", {reproduced.num_found:,} more from the cache" if reproduced.num_found else ""
    return f"{seconds(reproduced.result.wall_s)} for {reproduced.num_measured:,} measurements{cached}"


def render(reproduced: Reproduced, *, width: int, color: bool = False) -> str:
    """The claims with their verdicts, and the reasons of those that do not hold."""
    rows = reproduced.result.claims
    table = _table("id", "claim", "paper", "headway", "holds")
    for row in rows:
        holds = Text(f"{MARKS[row.holds]} {_SHORT[row.holds]}", style=_STYLES[row.holds])
        table.add_row(*map(Text, (row.id, row.claim, str(row.paper), row.headway)), holds)
    reasons = [Text(f"{row.id}: asked for {row.rule}. {row.why}") for row in rows if row.holds is not True]
    quick = " Quick: fewer seeds and requests than the full run." if reproduced.result.quick else ""
    last = Text(f"{counted(rows)}. {effort(reproduced)}.{quick}")
    return printed(Group(Text(reproduced.title, style="bold"), table, *reasons, last), width, color)


def listing(title: str, claims: Sequence[Claim], *, width: int, color: bool = False) -> str:
    """Claims and their rules as a table for a terminal of `width` columns."""
    table = _table("id", "claim", "paper", "rule")
    for claim in claims:
        table.add_row(*map(Text, (claim.id, claim.claim, str(claim.paper), str(claim.rule))))
    return printed(Group(Text(title, style="bold"), table), width, color)


def _table(*heads: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in heads:
        table.add_column(head, overflow="fold", no_wrap=head in ("id", "holds"))
    return table


def printed(what: Group, width: int, color: bool) -> str:
    """What a console of this width shows, without spaces at the ends of lines."""
    terminal = Console(width=width, file=StringIO(), force_terminal=color, no_color=not color, highlight=False)
    with terminal.capture() as captured:
        terminal.print(what)
    return "\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n"
