"""Claims as a table for a console."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from io import StringIO

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from headway.report.table import seconds
from headway_papers.reproduce.claims import EXCEEDS, HOLDS, REFUTED, UNDECIDED, VERDICTS, Claim, Word
from headway_papers.reproduce.reproduction import ReadingResult, Reproduced, SentenceResult

MARKS: dict[Word, str] = {HOLDS: "✓", EXCEEDS: "»", REFUTED: "✗", UNDECIDED: "?"}
_STYLES: dict[Word, str] = {HOLDS: "green", EXCEEDS: "cyan", REFUTED: "bold red", UNDECIDED: "yellow"}
_PLURAL: dict[Word, str] = {HOLDS: "hold", EXCEEDS: "exceed"}


def counted(counts: Mapping[Word, int]) -> str:
    """Text such as "9 hold, 1 exceed, 1 refuted, 2 undecided"."""
    return ", ".join(f"{counts[word]} {_PLURAL.get(word, word)}" for word in VERDICTS)


def result_of(sentence: SentenceResult) -> str:
    """The paper's number and ours by the main reading, and the verdicts of all readings."""
    main, num = sentence.main, len(sentence.readings)
    words = ", ".join(f"{count} {_PLURAL.get(word, word)}" for word, count in sentence.counts.items() if count)
    known = [each.has_papers_number for each in sentence.readings if each.has_papers_number is not None]
    near = f"; the intervals of {sum(known) or 'none'} contain the paper's number" if known else ""
    tally = f" Of {num} readings: {words}{near}." if num > 1 else ""
    return f"{main.verdict}. Paper: {main.paper}. Headway: {main.headway} ({main.reading}).{tally}"


def contains(reading: ReadingResult) -> str:
    """Whether our interval contains the paper's number: "yes", "no", or "" if the paper has none."""
    return {True: "yes", False: "no", None: ""}[reading.has_papers_number if reading.has_value else None]


def experiment_of(sentence: SentenceResult) -> str:
    """The experiment that would change the verdict."""
    return f"What would change this: {sentence.experiment}"


def effort(reproduced: Reproduced) -> str:
    """Time and work, such as "12.3 s for 40 measurements, 10 more from the cache"."""
    cached = f", {reproduced.num_found:,} more from the cache" if reproduced.num_found else ""
    return f"{seconds(reproduced.result.wall_s)} for {reproduced.num_measured:,} measurements{cached}"


def render(reproduced: Reproduced, *, width: int, color: bool = False) -> str:
    """The abstract's sentences, the claims with their verdicts, and the reasons of claims that do not hold."""
    result = reproduced.result
    table = _table("id", "claim", "paper", "headway", "verdict")
    for row in result.claims:
        table.add_row(*map(Text, (row.id, row.claim, str(row.paper), row.headway)), _marked(row.verdict))
    reasons = [Text(f"{row.id}: asked for {row.rule}. {row.why}") for row in result.claims if row.verdict != HOLDS]
    quick = " Quick: fewer seeds and requests than the full run." if result.quick else ""
    last = Text(f"{counted(result.counts)}. {effort(reproduced)}.{quick}")
    title = Text(reproduced.title, style="bold")
    return printed(Group(title, *_abstract(result.abstract), table, *reasons, last), width, color)


def _abstract(sentences: Sequence[SentenceResult]) -> Iterator[Text | Table]:
    """Each sentence with its result and the experiment that would change it; then the readings of each."""
    for sentence in sentences:
        yield Text(f"\n{sentence.says}", style="bold")
        main = sentence.main.verdict
        yield Text.assemble((f"{MARKS[main]} ", _STYLES[main]), result_of(sentence))
        yield Text(experiment_of(sentence))
    for sentence in sentences:
        yield Text(f"\n{sentence.says} By reading:", style="bold")
        table = _table("reading", "chosen", "paper", "headway", "verdict", "contains", "id")
        for each in sentence.readings:
            cells = (each.reading, each.chosen, str(each.paper), each.headway)
            table.add_row(*map(Text, cells), _marked(each.verdict), Text(contains(each)), Text(each.claim))
        yield table
    if sentences:
        yield Text("\nAll claims", style="bold")


def _marked(verdict: Word) -> Text:
    return Text(f"{MARKS[verdict]} {verdict}", style=_STYLES[verdict])


def listing(title: str, claims: Sequence[Claim], *, width: int, color: bool = False) -> str:
    """Claims and their rules as a table for a terminal of `width` columns."""
    table = _table("id", "claim", "paper", "rule")
    for claim in claims:
        table.add_row(*map(Text, (claim.id, claim.claim, str(claim.paper), str(claim.rule))))
    return printed(Group(Text(title, style="bold"), table), width, color)


def _table(*heads: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in heads:
        table.add_column(head, overflow="fold", no_wrap=head in ("id", "verdict"))
    return table


def printed(what: Group, width: int, color: bool) -> str:
    """The console output at this width, without trailing spaces."""
    terminal = Console(
        width=width, file=StringIO(), force_terminal=color, force_jupyter=False, no_color=not color, highlight=False
    )
    with terminal.capture() as captured:
        terminal.print(what)
    return "\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n"
