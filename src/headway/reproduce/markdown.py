"""Claims with their verdicts and tables as Markdown, also as a part of a page that is written by hand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from headway import __version__
from headway.core.errors import HeadwayError
from headway.report.table import short_number
from headway.reproduce.claims import EXCEEDS, REFUTED, Word
from headway.reproduce.findings import PaperTable
from headway.reproduce.reproduction import Reproduced, SentenceResult
from headway.reproduce.text import counted, given
from headway.workload.atomic_file import write_text


def markers(command: str) -> tuple[str, str]:
    """Lines around the part of a page that a command writes."""
    return f"<!-- headway {command}: begin -->", f"<!-- headway {command}: end -->"


REPRODUCE = "reproduce"
BEGIN, END = markers(REPRODUCE)


def markdown(reproduced: Reproduced) -> str:
    """The abstract's sentences, all claims as a table with their reasons, and the paper's tables."""
    result = reproduced.result
    seeds = f"{result.seeds} seed{'' if result.seeds == 1 else 's'}"
    command = f"headway reproduce {result.system}{' --quick' if result.quick else ''} --markdown"
    lines = [f"{counted(result.counts)}. Written by `{command}` of Headway {__version__} with {seeds}.", ""]
    lines += abstract(result.abstract)
    rows = [[f"`{row.id}`", row.claim, str(row.paper), row.headway, _verdict(row.verdict)] for row in result.claims]
    lines += table(["row", "claim", "paper", "Headway", ""], rows)
    lines += ["", "What lies behind the numbers:", ""]
    lines += [f"- `{row.id}`: {row.why}" for row in result.claims if row.why]
    for each in reproduced.exhibits:
        if isinstance(each, PaperTable):
            cells = [[cell if isinstance(cell, str) else _number(cell) for cell in row] for row in each.rows]
            lines += ["", f"**{each.label}: {each.title}.** {each.shows}", "", *table(list(each.heads), cells)]
    return "\n".join(lines) + "\n"


def around_markers(path: Path, command: str = REPRODUCE) -> tuple[str, str]:
    """What a page has before and after the part that a command writes; nothing where there is no page.

    HeadwayError where the page lacks one of the lines.
    """
    if not path.exists():
        return "", ""
    first, last = markers(command)
    before, begin, rest = path.read_text(encoding="utf-8").partition(f"{first}\n")
    _, end, after = rest.partition(f"{last}\n")
    if not begin or not end:
        raise HeadwayError(f"{path}: has no line {last if begin else first!r}; expected it, or a new file")
    return before, after


def write_markdown(path: Path, text: str, command: str = REPRODUCE) -> None:
    """Write the text between the command's lines of a page, or a new page that consists of it."""
    before, after = around_markers(path, command)
    first, last = markers(command)
    write_text(path, f"{before}{first}\n\n{text}\n{last}\n{after}")


def abstract(sentences: Sequence[SentenceResult]) -> list[str]:
    """The lines of the abstract's sentences: a table of readings each, and the experiment that would change it."""
    if not sentences:
        return []
    lines = ["**The abstract**, by reading; a reading was chosen before or after a run of it or another was seen.", ""]
    for sentence in sentences:
        cells = [
            [each.reading, each.chosen, str(each.paper), each.headway, _verdict(each.verdict), each.claim]
            for each in sentence.readings
        ]
        lines += [f"*{sentence.says}*", "", *table(["reading", "chosen", "paper", "Headway", "", "row"], cells), ""]
        lines += [f"{given(sentence)} What would change this: {sentence.experiment}", ""]
    return [*lines, "**All claims**", ""]


def _verdict(word: Word) -> str:
    return f"**{word}**" if word in (EXCEEDS, REFUTED) else word


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    return [
        f"| {' | '.join(each.replace('|', '/') for each in row)} |" for row in (heads, ("---",) * len(heads), *rows)
    ]


def _number(value: float | None) -> str:
    return "" if value is None else short_number(value)
