"""docs/reproduce.md counts every row of the reproductions once, and by the verdicts on their pages."""

from __future__ import annotations

import re
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from headway_papers.reproduce.claims import (
    EXCEEDS,
    HOLDS,
    REFUTED,
    UNDECIDED,
    VERDICTS,
    AtLeast,
    AtMost,
    Between,
    Claim,
    Word,
)
from headway_papers.reproduce.markdown import abstract
from headway_papers.reproduce.reproduction import ClaimResult, SentenceResult, abstract_of, counts, load
from headway_papers.reproduce.reproduction import judged as sentences_of
from headway_papers.reproduce.text import counted

DOCS = Path(__file__).parents[2] / "docs"
SYSTEMS = {
    "PASCAL": "pascal",
    "K-tier Llumnix": "ktier",
    "Cascadia": "cascadia",
    "Cauchy": "cauchy",
    "SageServe": "sageserve",
}
"""By heading."""
ROUNDED = 0.006
"""Of a number on a page, which has three digits."""


def findings(heading: str) -> list[tuple[str, list[str]]]:
    """(verdict, patterns of rows) of a system."""
    section = (DOCS / "reproduce.md").read_text().split(f"\n### {heading}\n")[1].split("\n##")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if "| `" in line]
    return [(verdict, re.findall(r"`([^`]+)`", patterns)) for _, verdict, patterns in rows]


def matching(ids: list[str], patterns: list[str]) -> list[str]:
    return [id for id in ids for pattern in patterns if fnmatchcase(id, pattern)]


@pytest.mark.parametrize("heading", SYSTEMS)
def test_every_row_is_in_one_finding(heading: str) -> None:
    ids = [claim.id for claim in load(SYSTEMS[heading]).CLAIMS]
    counted = Counter(id for _, patterns in findings(heading) for id in matching(ids, patterns))
    assert {id: num for id in ids if (num := counted[id]) != 1} == {}
    unused = [each for _, patterns in findings(heading) for each in patterns if not matching(ids, [each])]
    assert not unused


def rows_of(system: str) -> list[ClaimResult]:
    """The rows of a page, which `headway reproduce --markdown` writes."""
    claims = {claim.id: claim for claim in load(system).CLAIMS}
    rows = []
    for line in (DOCS / f"{system}.md").read_text().splitlines():
        if cells := re.match(rf"\| `([\w-]+)` \| (.*) \| (.*) \| (.*) \| \**({'|'.join(VERDICTS)})\** \|$", line):
            id, text, paper, headway, word = cells.groups()
            verdict: Word = next(each for each in VERDICTS if each == word)
            rows.append(ClaimResult(id, text, paper, headway, str(claims[id].rule), verdict, None, "", ()))
    return rows


@pytest.mark.parametrize("heading", SYSTEMS)
def test_a_page_has_every_claim_with_the_verdict_of_its_numbers(heading: str) -> None:
    claims = {claim.id: claim for claim in load(SYSTEMS[heading]).CLAIMS}
    rows = rows_of(SYSTEMS[heading])
    assert [row.id for row in rows] == list(claims)
    assert not [(row.id, row.headway, row.verdict) for row in rows if row.verdict not in possible(claims[row.id], row)]


def possible(claim: Claim, row: ClaimResult) -> set[Word]:
    """The verdicts that the printed numbers allow."""
    if truths := re.match(r"true for (\d+) of (\d+) ", row.headway):
        return {HOLDS if truths[1] == truths[2] else REFUTED}
    rule = claim.rule
    ends = re.search(r"\[(.*), (-?[\d.].*)\]", row.headway)
    if row.headway.startswith("no value") or not (ends or row.headway.endswith("exact")):
        return {UNDECIDED}
    assert isinstance(rule, AtLeast | AtMost | Between)
    low, high = map(number, ends.groups() if ends else [row.headway] * 2)
    near = [ROUNDED * abs(end) for end in (low, high)]
    return {rule.bounds.word(low + a * near[0], high + b * near[1]) for a in (-1, 0, 1) for b in (-1, 0, 1)}


def number(text: str) -> float:
    """A number with its unit, such as "1,234 s" or "12.3%"."""
    value = float(re.match(r"-?[\d.]+", text.replace(",", ""))[0])  # type: ignore[index]
    return value / 100 if "%" in text else value


@pytest.mark.parametrize("heading", SYSTEMS)
def test_a_page_opens_with_the_abstract_and_counts_its_rows(heading: str) -> None:
    rows = rows_of(SYSTEMS[heading])
    text = (DOCS / f"{SYSTEMS[heading]}.md").read_text()
    assert f"\n{counted(counts(rows))}. Written by `headway reproduce {SYSTEMS[heading]} --markdown`" in text
    sentences = sentences_of(abstract_of(load(SYSTEMS[heading])), rows)
    assert "\n".join(abstract(sentences)) in text
    assert "\n".join(map(opening, sentences)) in text.split("\n## ")[0]


def opening(sentence: SentenceResult) -> str:
    """A sentence of the abstract with the verdicts of its readings, as a page begins with it."""
    num = Counter(reading.verdict for reading in sentence.readings)
    return f"- {sentence.says} *{', '.join(f'{word}: {num[word]}' for word in VERDICTS if num[word])}*"


@pytest.mark.parametrize("heading", SYSTEMS)
def test_a_finding_has_the_verdict_of_its_rows(heading: str) -> None:
    judged = {row.id: row.verdict for row in rows_of(SYSTEMS[heading])}
    for verdict, patterns in findings(heading):
        num = Counter(judged[id] for id in matching(list(judged), patterns))
        expected = (
            "holds"
            if num[HOLDS] > num[EXCEEDS] + num[UNDECIDED] and not num[REFUTED]
            else "in part"
            if num[HOLDS]
            else "refuted"
            if num[REFUTED]
            else "exceeds"
            if num[EXCEEDS] > num[UNDECIDED]
            else "open"
        )
        assert verdict == expected, patterns


def test_findings_are_counted_as_they_are() -> None:
    text = (DOCS / "reproduce.md").read_text()
    num = Counter(verdict for heading in SYSTEMS for verdict, _ in findings(heading))
    sentence = (
        f"Of {num.total()} findings {num['holds']} hold, {num['in part']} hold in part, {num['exceeds']} exceed the "
        f"paper, {num['refuted']} are refuted, and {num['open']} are open."
    )
    assert sentence in re.sub(r"\s+", " ", text)
