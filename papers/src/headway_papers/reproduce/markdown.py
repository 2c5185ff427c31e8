"""Claims with verdicts and tables as Markdown, also as a section of a handwritten page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from headway import __version__
from headway.core.errors import HeadwayError
from headway.report.table import short_number
from headway.workload.atomic_file import write_text
from headway_papers.reproduce.claims import EXCEEDS, REFUTED, Word
from headway_papers.reproduce.findings import PaperTable
from headway_papers.reproduce.kept import Written, merged_rows, merged_tables
from headway_papers.reproduce.reproduction import (
    ReadingResult,
    Reproduced,
    SentenceResult,
    abstract_of,
    counts,
    judged,
    load,
)
from headway_papers.reproduce.text import contains, counted, experiment_of, result_of


def markers(command: str) -> tuple[str, str]:
    """Lines around the section of a page that a command writes."""
    return f"<!-- headway {command}: begin -->", f"<!-- headway {command}: end -->"


REPRODUCE = "reproduce"
BEGIN, END = markers(REPRODUCE)


def markdown(reproduced: Reproduced, written: Written | None = None) -> str:
    """The abstract's sentences, all claims as a table with their reasons, and the paper's tables.

    `written`: the content of the page; its claims that were not run, and its tables, stay.
    """
    result = reproduced.result
    seeds = f"{result.seeds} seed{'' if result.seeds == 1 else 's'}"
    command = f"headway reproduce {result.system}{' --quick' if result.quick else ''} --markdown"
    system, tables = load(result.system), tables_of(reproduced)
    rows, sentences, note = result.claims, result.abstract, ""
    if written is not None and written.rows:
        rows, tables = merged_rows(written, rows, system.CLAIMS), merged_tables(written.tables, tables)
        sentences, seeds = judged(abstract_of(system), rows), written.seeds or seeds
        note = " Some rows were run alone, by `--claim`, later or with other seeds."
    lines = [f"{counted(counts(rows))}. Written by `{command}` of Headway {__version__} with {seeds}.{note}", ""]
    lines += abstract(sentences)
    cells = [[f"`{row.id}`", row.claim, str(row.paper), row.headway, _verdict(row.verdict)] for row in rows]
    lines += table(["row", "claim", "paper", "Headway", ""], cells)
    lines += ["", "What lies behind the numbers:", ""]
    lines += [f"- `{row.id}`: {row.why}" for row in rows if row.why]
    lines += [line for each in tables.values() for line in ("", *each)]
    return "\n".join(lines) + "\n"


def tables_of(reproduced: Reproduced) -> Mapping[str, Sequence[str]]:
    """The lines of each table with its caption, by label and title."""
    found: dict[str, list[str]] = {}
    for each in reproduced.exhibits:
        if isinstance(each, PaperTable):
            cells = [[cell if isinstance(cell, str) else _number(cell) for cell in row] for row in each.rows]
            name = f"{each.label}: {each.title}"
            found[name] = [f"**{name}.** {each.shows}", "", *table(list(each.heads), cells)]
    return found


def around_markers(path: Path, command: str = REPRODUCE) -> tuple[str, str, str]:
    """The page's text before, in and after the section that a command writes; empty without a page.

    Raises HeadwayError if the page lacks one of the marker lines.
    """
    if not path.exists():
        return "", "", ""
    first, last = markers(command)
    before, begin, rest = path.read_text(encoding="utf-8").partition(f"{first}\n")
    inside, end, after = rest.partition(f"{last}\n")
    if not begin or not end:
        raise HeadwayError(f"{path}: has no line {last if begin else first!r}; expected it, or a new file")
    return before, inside.strip("\n"), after


def write_markdown(path: Path, text: str, command: str = REPRODUCE) -> None:
    """Write the text between the command's marker lines of a page, or a new page with only this section."""
    before, _, after = around_markers(path, command)
    first, last = markers(command)
    write_text(path, f"{before}{first}\n\n{text}\n{last}\n{after}")


def abstract(sentences: Sequence[SentenceResult]) -> list[str]:
    """The lines of the abstract's sentences: a table of readings for each, and the experiment that would change it."""
    if not sentences:
        return []
    lines = ["**The abstract**, sentence by sentence", ""]
    lines += [f"- *{each.says}* {result_of(each)} {experiment_of(each)}" for each in sentences]
    lines += ["", _BY_READING, ""]
    for sentence in sentences:
        cells = [
            [each.reading, each.chosen, str(each.paper), each.headway, _verdict(each.verdict), _in(each), each.claim]
            for each in sentence.readings
        ]
        heads = ["reading", "chosen", "paper", "Headway", "", "contains", "row"]
        lines += [f"*{sentence.says}*", "", *table(heads, cells), ""]
    return [*lines, "**All claims**", ""]


_BY_READING = (
    "**By reading**; a reading was chosen before or after a run of it or another was seen. *Contains*: whether our "
    "interval contains the paper's number, or meets its range."
)


def _in(reading: ReadingResult) -> str:
    return f"**{text}**" if (text := contains(reading)) == "yes" else text


def _verdict(word: Word) -> str:
    return f"**{word}**" if word in (EXCEEDS, REFUTED) else word


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    return [
        f"| {' | '.join(each.replace('|', '/') for each in row)} |" for row in (heads, ("---",) * len(heads), *rows)
    ]


def _number(value: float | None) -> str:
    return "" if value is None else short_number(value)
