"""Reports as text for a console, and as HTML pages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from html import escape
from io import StringIO

from rich.console import Console, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from headway.report import page as html
from headway.report.blocks import (
    Block,
    Chart,
    Charts,
    Code,
    Facts,
    Folded,
    Heading,
    Legend,
    Lines,
    Raw,
    Report,
    Said,
    Section,
    Table,
)

WIDTH = 200
"""Characters of a table that is not on a terminal, so that nothing is cut off."""


def text(said: Iterable[Said], width: int | None = None, color: bool = False) -> str:
    """Lines and tables for a terminal of `width` characters. None: for a file, where long lines are not wrapped.

    A text of several lines is never wrapped: it may be a patch.
    """
    parts: list[str] = []
    for each in said:
        line = each.text if isinstance(each, Heading) and not color else each
        if isinstance(line, str) and (width is None or "\n" in line):
            parts.append(f"{line}\n")
            continue
        parts += (f"{line.rstrip()}\n" for line in printed([_rich(each)], width or WIDTH, color).splitlines())
    return "".join(parts)


def printed(shown: Iterable[RenderableType], width: int, color: bool) -> str:
    """What a console of `width` characters shows."""
    console = Console(
        width=width, file=StringIO(), force_terminal=color, force_jupyter=False, no_color=not color, highlight=False
    )
    with console.capture() as captured:
        for each in shown:
            console.print(each)
    return captured.get()


def _rich(each: Said) -> Text | RichTable:
    if isinstance(each, str):
        return Text(each)
    if isinstance(each, Heading):
        return Text(each.text, style="bold")
    table = RichTable(box=None, header_style="bold", pad_edge=False)
    for i, head in enumerate(each.heads):
        table.add_column(head, justify="left" if each.kind(i) else "right", overflow="fold")
    for row in each.rows:
        table.add_row(*map(Text, row))
    return table


def page(report: Report, command: str | None) -> str:
    """The report as HTML, for `write_page`; `command`: the command line that made the report; None: unknown."""
    brand = f"Headway · {escape(report.subject)}" if report.subject else "Headway"
    foot = "".join(_paragraph(line, "quiet") for line in report.foot)
    foot += f'<p class="quiet">Command: <code>{escape(command)}</code></p>' if command else ""
    body = "\n".join(
        (
            f'<header>\n<div class="brand">{brand}</div>',
            f"<h1>{escape(report.headline)}</h1>",
            *map(_html, report.head),
            "</header>",
            *map(_html, report.body),
            f"<footer>{foot}{fragment(report.end)}</footer>",
        )
    )
    figures = {chart.name: chart.figure for chart in _charts(report.body)}
    script = f"const charts = {html.literal(figures)};\n{html.DRAW}{report.script}"
    return html.document(report.title or report.subject, body, script)


def fragment(blocks: Iterable[Block]) -> str:
    """Blocks without charts as HTML, for a notebook."""
    return "".join(map(_html, blocks))


def _charts(blocks: Iterable[Block]) -> Iterator[Chart]:
    for each in blocks:
        if isinstance(each, Chart):
            yield each
        elif isinstance(each, Charts):
            yield from each.charts
        elif isinstance(each, Section):
            yield from _charts(each.blocks)


def _html(block: Block, level: int = 3) -> str:
    """`level`: that of headings within the block. A section without a heading leaves its own to them, so that a page
    skips none."""
    match block:
        case Section(title, blocks):
            heading = f"<h2>{escape(title)}</h2>" if title else ""
            inner = "".join(_html(each, 3 if title else 2) for each in blocks)
            return f"<section>{heading}{inner}</section>"
        case Heading(line):
            return f"<h{level}>{escape(line)}</h{level}>"
        case Lines(lines, look):
            return "".join(_paragraph(line, look) for line in lines)
        case Facts(values):
            return html.facts(values)
        case Table():
            return _table(block)
        case Chart(name, title, _, caption):
            return html.chart(name, title, caption, level)
        case Charts(charts, wide):
            return f'<div class="grid{" two" if wide else ""}">{"".join(_html(each, level) for each in charts)}</div>'
        case Legend():
            return _legend(block)
        case Code(content, title):
            return (_html(Heading(title), level) if title else "") + f"<pre>{escape(content)}</pre>"
        case Folded(title, inner):
            return f"<details><summary>{escape(title)}</summary>{_html(inner, level)}</details>"
        case Raw(content):
            return content
        case _:
            raise NotImplementedError(type(block).__name__)


def _paragraph(line: str, look: str) -> str:
    return f'<p class="{look}">{_inline(line)}</p>' if look else f"<p>{_inline(line)}</p>"


def _inline(text: str) -> str:
    """Text between backticks is code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(text))


def _table(each: Table) -> str:
    kinds = [each.kind(j) for j in range(len(each.heads))]
    column, colors = each.colors or (-1, ())

    def cell(i: int, j: int, value: str) -> str:
        looks = " ".join(filter(None, (each.marks.get((i, j), ""), kinds[j])))
        shown = (swatch(colors[i]) if j == column else "") + _inline(value)
        return f'<td class="{looks}">{shown}</td>' if looks else f"<td>{shown}</td>"

    rows = ["".join(cell(i, j, value) for j, value in enumerate(row)) for i, row in enumerate(each.rows)]
    return html.table(each.heads, [j for j, kind in enumerate(kinds) if kind], rows)


def swatch(color: str) -> str:
    return f'<span class="swatch" style="background:{color}"></span>'


def _legend(each: Legend) -> str:
    shown = [f"{swatch(color)}{escape(name)}" for name, color in each.colors]
    shown += [f"{mark} {escape(name)}" for name, mark in each.marks]
    keys = (f'<span style="margin-right:14px">{item}</span>' for item in shown)
    return f'<p class="quiet">{"".join(keys)}</p>'
