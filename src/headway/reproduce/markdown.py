"""Claims with their verdicts and tables as Markdown, also as a part of a page that is written by hand."""

from __future__ import annotations

from pathlib import Path

from headway import __version__
from headway.core.errors import HeadwayError
from headway.report.table import short_number
from headway.reproduce.findings import PaperTable
from headway.reproduce.reproduction import Reproduced
from headway.reproduce.text import WORDS, counted
from headway.workload.atomic_file import write_text

BEGIN, END = "<!-- headway reproduce: begin -->", "<!-- headway reproduce: end -->"
"""Lines around the written part of a page."""


def markdown(reproduced: Reproduced) -> str:
    """All claims as a table, the reasons of those that do not hold or are undecided, and the paper's tables."""
    result = reproduced.result
    seeds = f"{result.seeds} seed{'' if result.seeds == 1 else 's'}"
    command = f"headway reproduce {result.system}{' --quick' if result.quick else ''} --markdown"
    lines = [f"{counted(result.claims)}. Written by `{command}` of Headway {__version__} with {seeds}.", ""]
    rows = [[f"`{row.id}`", row.claim, str(row.paper), row.headway, _verdict(row.holds)] for row in result.claims]
    lines += _table(["row", "claim", "paper", "Headway", ""], rows)
    lines += ["", "What lies behind the numbers:", ""]
    lines += [f"- `{row.id}`: {row.why}" for row in result.claims if row.why]
    for each in reproduced.exhibits:
        if isinstance(each, PaperTable):
            cells = [[cell if isinstance(cell, str) else _number(cell) for cell in row] for row in each.rows]
            lines += ["", f"**{each.label}: {each.title}.** {each.shows}", "", *_table(list(each.heads), cells)]
    return "\n".join(lines) + "\n"


def around_markers(path: Path) -> tuple[str, str]:
    """What a page has before and after its part between `BEGIN` and `END`; nothing where there is no page.

    HeadwayError where the page lacks one of the lines.
    """
    if not path.exists():
        return "", ""
    before, begin, rest = path.read_text(encoding="utf-8").partition(f"{BEGIN}\n")
    _, end, after = rest.partition(f"{END}\n")
    if not begin or not end:
        raise HeadwayError(f"{path}: has no line {END if begin else BEGIN!r}; expected it, or a new file")
    return before, after


def write_markdown(path: Path, text: str) -> None:
    """Write the text between the lines `BEGIN` and `END` of a page, or a new page that consists of it."""
    before, after = around_markers(path)
    write_text(path, f"{before}{BEGIN}\n\n{text}\n{END}\n{after}")


def _verdict(holds: bool | None) -> str:
    return f"**{WORDS[holds]}**" if holds is False else WORDS[holds]


def _table(heads: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(each.replace('|', '/') for each in row)} |" for row in (heads, ["---"] * len(heads), *rows)]


def _number(value: float | None) -> str:
    return "" if value is None else short_number(value)
