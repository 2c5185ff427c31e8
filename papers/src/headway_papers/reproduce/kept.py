"""The retained parts of a results page when only some claims were run: its other rows, their reasons, and its
tables."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct

from headway_papers.reproduce.claims import VERDICTS, Claim, Word
from headway_papers.reproduce.reproduction import ClaimResult

_ROW = re.compile(rf"\| `([\w.-]+)` \| .* \| .* \| (.*) \| \**({'|'.join(VERDICTS)})\** \|")
_REASON = re.compile(r"- `([\w.-]+)`: (.*)")
_TABLE = re.compile(r"\*\*(.+?: .+?)\.\*\* ")


class Written(Struct, frozen=True):
    """The results on a page."""

    rows: Mapping[str, ClaimResult]
    """Rows by claim id. A page contains only the interval of a row's values."""
    tables: Mapping[str, Sequence[str]]
    """The lines of a table with its caption, by label and title."""
    seeds: str
    """Text such as "3 seeds", from the last run of all claims; empty if there was none."""


def read_written(text: str, claims: Sequence[Claim]) -> Written:
    """The results that `markdown` wrote for these claims. Removed claims are left out."""
    lines = text.splitlines()
    reasons = {match[1]: match[2] for line in lines if (match := _REASON.fullmatch(line))}
    found = {match[1]: (match[2], match[3]) for line in lines if (match := _ROW.fullmatch(line))}
    rows = {claim.id: _row(claim, *found[claim.id], reasons.get(claim.id, "")) for claim in claims if claim.id in found}
    seeds = re.search(r" with (\d+ seeds?)[.,]", lines[0] if lines else "")
    return Written(rows, dict(_tables(lines)), seeds[1] if seeds else "")


def _row(claim: Claim, headway: str, word: str, why: str) -> ClaimResult:
    verdict: Word = next(each for each in VERDICTS if each == word)
    holds = None if verdict == "undecided" else verdict == "holds"
    return ClaimResult(
        claim.id,
        claim.claim,
        claim.paper,
        headway=headway,
        rule=str(claim.rule),
        verdict=verdict,
        holds=holds,
        why=why,
        values=(),
    )


def _tables(lines: Sequence[str]) -> Iterator[tuple[str, Sequence[str]]]:
    starts = [(i, match[1]) for i, line in enumerate(lines) if (match := _TABLE.match(line))]
    for i, name in starts:
        end = i + 2
        while end < len(lines) and lines[end].startswith("|"):
            end += 1
        if end > i + 2:  # with a table below the caption
            yield name, lines[i:end]


def merged_tables(old: Mapping[str, Sequence[str]], new: Mapping[str, Sequence[str]]) -> Mapping[str, Sequence[str]]:
    """The page's tables and the new ones. A new table replaces the page's if it has all of its rows, by first cell."""
    replaced = {name: lines for name, lines in new.items() if not _first_cells(old.get(name, [])) - _first_cells(lines)}
    return {**old, **replaced}


def _first_cells(lines: Sequence[str]) -> Counter[str]:
    return Counter(line.split("|")[1].strip() for line in lines if line.startswith("|"))


def merged_rows(old: Written, new: Sequence[ClaimResult], claims: Sequence[Claim]) -> tuple[ClaimResult, ...]:
    """The new rows and the page's other rows, in the order of the claims."""
    by_id = {**old.rows, **{row.id: row for row in new}}
    return tuple(by_id[claim.id] for claim in claims if claim.id in by_id)
