"""A report as a value: sentences, facts, tables and charts, in reading order."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

T = TypeVar("T")
Look = Literal["", "verdict", "note", "quiet"]


class Block:
    """A part of a page."""


@dataclass(frozen=True)
class Heading(Block):
    """A line in bold."""

    text: str


@dataclass(frozen=True)
class Lines(Block):
    """Paragraphs of a page. `look`: the style of the paragraphs, one of those in `report.page.CSS`."""

    lines: Sequence[str]
    look: Look = ""


@dataclass(frozen=True)
class Facts(Block):
    """Short named values."""

    values: Mapping[str, str]


@dataclass(frozen=True)
class Table(Block):
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: Collection[str | int] = ()
    """Columns of names, by head or position, aligned to the left. Others are numbers, aligned to the right."""
    prose: Collection[str | int] = ()
    """Columns of text, which may wrap."""
    marks: Mapping[tuple[int, int], Literal["best", "same"]] = field(default_factory=dict)
    """Maps (row, column) of a cell to its mark: "best" value of the column, or "same" if it is not distinguishable from
    the best."""
    colors: tuple[int, Sequence[str]] | None = None
    """The number of a column, and the colour of its cell in each row."""

    def kind(self, column: int) -> Literal["name", "text", ""]:
        """The kind of a column's cells; "": numbers."""
        either = {column, self.heads[column]}
        return "text" if either & {*self.prose} else "name" if either & {*self.words} else ""


def table_of(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """A table of values. Columns whose first value is a number are aligned to the right."""
    rows = list(rows)
    words = [i for i in range(len(heads)) if not rows or not isinstance(rows[0][i], int | float)]
    return Table(heads, [[cell(value) for value in row] for row in rows], words)


def sentence(note: str) -> str:
    """A note with a capital and one full stop."""
    return f"{note[:1].upper()}{note[1:].removesuffix('.')}."


def or_dash(value: T | None, show: str | Callable[[T], str] = "{}") -> str:
    """A value in a format or as a function shows it; a dash for None."""
    if value is None:
        return "-"
    return show.format(value) if isinstance(show, str) else show(value)


def cell(value: object) -> str:
    """A readable text of a value; a dash for None."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {cell(inner)}" for key, inner in value.items())
    if isinstance(value, tuple | list):
        return ", ".join(map(cell, value))
    if isinstance(value, float):
        return f"{value:,.0f}" if value == round(value) or abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


@dataclass(frozen=True)
class Chart(Block):
    name: str
    """Id of the chart within the page."""
    title: str
    figure: Mapping[str, Any]
    """Plotly's `data` and `layout`."""
    caption: str = ""


@dataclass(frozen=True)
class Charts(Block):
    """Charts side by side. `wide`: two in a row at most."""

    charts: Sequence[Chart]
    wide: bool = False


@dataclass(frozen=True)
class Legend(Block):
    """The legend of several charts: names with colours and marks."""

    colors: Sequence[tuple[str, str]]
    marks: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class Code(Block):
    """Text as in a file, below its `title`."""

    text: str
    title: str = ""


@dataclass(frozen=True)
class Folded(Block):
    """A block that opens with a click."""

    title: str
    block: Block


@dataclass(frozen=True)
class Raw(Block):
    """HTML as it is."""

    html: str


Said = str | Heading | Table
"""Console output: a line, a bold line, or a table."""


@dataclass(frozen=True)
class Section(Block):
    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Report:
    """A report: a page with its subject and blocks."""

    subject: str
    """The topic in a word or two, such as "capacity"."""
    headline: str
    head: Sequence[Block]
    body: Sequence[Block]
    foot: Sequence[str] = ()
    title: str = ""
    """Title of the browser window; "": the subject."""
    end: Sequence[Block] = ()
    """Blocks after the foot."""
    script: str = ""
    """JavaScript that runs after the charts are drawn."""
