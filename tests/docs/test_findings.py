"""docs/findings.md counts every row of the reproductions once, and by the verdicts on their pages."""

from __future__ import annotations

import re
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from headway.reproduce.reproduction import load

DOCS = Path(__file__).parents[2] / "docs"
SYSTEMS = {
    "PASCAL": "pascal",
    "K-tier Llumnix": "ktier",
    "Cascadia": "cascadia",
    "Cauchy": "cauchy",
    "SageServe": "sageserve",
}
"""By heading."""
WORDS = {"holds": True, "does not hold": False, "undecided": None}
"""The last column of the pages that `headway reproduce` writes."""


def findings(heading: str) -> list[tuple[str, list[str]]]:
    """(verdict, patterns of rows) of a system."""
    section = (DOCS / "findings.md").read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
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


@pytest.mark.parametrize("heading", SYSTEMS)
def test_a_finding_has_the_verdict_of_its_rows(heading: str) -> None:
    system = SYSTEMS[heading]
    ids, judged = [claim.id for claim in load(system).CLAIMS], dict[str, bool | None]()
    for line in (DOCS / f"{system}-reproduced.md").read_text().splitlines():
        if row := re.match(rf"\| `([\w-]+)` \|.*\| \**({'|'.join(WORDS)})\** \|$", line):
            judged.setdefault(row[1], WORDS[row[2]])
    assert judged.keys() == set(ids)
    for verdict, patterns in findings(heading):
        num = Counter(judged.get(id) for id in matching(ids, patterns))
        holds, fails, is_open = num[True], num[False], num[None]
        expected = (
            "holds" if holds > is_open and not fails
            else "in part" if holds
            else "does not hold" if fails
            else "open"
        )  # fmt: skip
        assert verdict == expected, patterns


def test_findings_are_counted_as_they_are() -> None:
    text = (DOCS / "findings.md").read_text()
    num = Counter(verdict for heading in SYSTEMS for verdict, _ in findings(heading))
    sentence = (
        f"Of {num.total()} findings {num['holds']} hold, {num['in part']} hold in part, {num['does not hold']} do not "
        f"hold, and {num['open']} are open."
    )
    assert sentence in re.sub(r"\s+", " ", text)
