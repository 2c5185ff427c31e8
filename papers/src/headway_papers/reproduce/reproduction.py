"""Runs a system and judges its claims."""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

from msgspec import Struct

from headway.core.errors import HeadwayError, unknown
from headway.planning.rehearsals import RehearsalCache
from headway.scenario.processes import processes
from headway.scenario.ray_cluster import cluster
from headway_papers.reproduce import SYSTEMS
from headway_papers.reproduce.abstract import Sentence
from headway_papers.reproduce.claims import NO_VALUE, VERDICTS, Claim, Value, Word
from headway_papers.reproduce.findings import Exhibit, Finding, Findings
from headway_papers.reproduce.runner import ReportProgress, Runner


class System(Protocol):
    """The names that a module of `SYSTEMS` must define. A paper's module also has `ABSTRACT` and `FULL_ONLY`."""

    TITLE: str
    """The name of the system and its topic."""
    SEEDS: int
    """Number of seeds, unless --seeds is given."""
    QUICK_SEEDS: int
    """Number of seeds with --quick."""
    CLAIMS: tuple[Claim, ...]

    def run(self, runner: Runner) -> Findings:
        """Measure. Returns a finding for every claim that `runner.wants`; others may be left out."""
        ...


class ClaimResult(Struct, frozen=True):
    """A claim and its verdict."""

    id: str
    claim: str
    paper: str | float
    headway: str
    rule: str
    verdict: Word
    holds: bool | None
    """Whether the claim holds. None: undecided. False: refuted or exceeded."""
    why: str
    values: tuple[Value, ...]
    """Values by seed."""

    @property
    def has_value(self) -> bool:
        """Whether a run was made for it."""
        return not self.headway.startswith(NO_VALUE)


class ReadingResult(Struct, frozen=True):
    """A reading of a sentence of the abstract, and the verdict of its claim."""

    claim: str
    reading: str
    chosen: str
    """`before` or `after` a run of any reading of the sentence had been seen."""
    paper: str | float
    headway: str
    verdict: Word
    has_value: bool
    """False if no run was made for it, as a quick run leaves some out."""
    has_papers_number: bool | None
    """Whether our interval contains the paper's number, or meets its range; None if the paper has no number."""


class SentenceResult(Struct, frozen=True):
    """A sentence of the abstract with the readings that were run."""

    says: str
    readings: tuple[ReadingResult, ...]
    experiment: str
    """The single experiment that would change the verdict."""

    @property
    def main(self) -> ReadingResult:
        """The first reading with a value, in the order of the paper's module."""
        return next((each for each in self.readings if each.has_value), self.readings[0])

    @property
    def counts(self) -> dict[Word, int]:
        """Number of readings with each verdict, including 0."""
        return counts(self.readings)


class Reproduction(Struct, frozen=True):
    """The claims of a paper with their verdicts: the output of `headway reproduce --json`."""

    system: str
    quick: bool
    seeds: int
    wall_s: float
    counts: dict[Word, int]
    """Number of claims with each verdict, including 0."""
    abstract: tuple[SentenceResult, ...]
    claims: tuple[ClaimResult, ...]


@dataclass(frozen=True)
class Reproduced:
    """A reproduction with all content of its page."""

    title: str
    result: Reproduction
    exhibits: Sequence[Exhibit]
    num_measured: int
    num_found: int
    """Number of measurements found in the cache."""


def load(name: str) -> System:
    """The module of a system. Raises HeadwayError for an unknown name."""
    if name not in SYSTEMS:
        raise unknown("system", name, SYSTEMS)
    return cast(System, import_module(SYSTEMS[name]))


def chosen(system: System, ids: Collection[str]) -> tuple[Claim, ...]:
    """The claims with these ids, in the system's order; all claims if `ids` is empty."""
    known_ids = {claim.id for claim in system.CLAIMS}
    for each in ids:
        if each not in known_ids:
            raise unknown("claim", each, known_ids)
    return tuple(claim for claim in system.CLAIMS if not ids or claim.id in ids)


def reproduce(
    name: str,
    *,
    quick: bool = False,
    seeds: int | None = None,
    jobs: int = 1,
    ids: Collection[str] = (),
    cache: RehearsalCache | None = None,
    data: Path | None = None,
    report: ReportProgress | None = None,
    ray: bool = False,
) -> Reproduced:
    """Run a system and judge its claims, or those with the given ids, with `jobs` processes or on a Ray cluster."""
    began = time.perf_counter()
    system = load(name)
    claims = chosen(system, ids)
    if data is not None and not data.is_dir():
        raise HeadwayError(f"{data}: no such folder")
    num_seeds = seeds or (system.QUICK_SEEDS if quick else system.SEEDS)
    skipped = {claim.id for claim in claims} & full_only(system) if quick else set()
    with cluster() if ray else processes(jobs) as pool:
        wanted = frozenset(claim.id for claim in claims) - skipped if ids or skipped else None
        runner = Runner(tuple(range(num_seeds)), quick, data, wanted, cache, report, pool)
        findings = system.run(runner)
    undecided = dict.fromkeys(skipped, Finding([None] * num_seeds, "A quick run leaves it to a full run."))
    outcomes = {**findings.outcomes, **undecided}
    rows = tuple(_row(claim, outcomes[claim.id]) for claim in claims)
    return Reproduced(
        title=system.TITLE,
        result=Reproduction(
            name, quick, num_seeds, time.perf_counter() - began, counts(rows), judged(abstract_of(system), rows), rows
        ),
        exhibits=findings.exhibits,
        num_measured=runner.num_measured,
        num_found=runner.num_found,
    )


def full_only(system: System) -> frozenset[str]:
    """Claims that --quick leaves undecided, because its runs are too short or too few for their rules."""
    return getattr(system, "FULL_ONLY", frozenset())


def abstract_of(system: System) -> tuple[Sentence, ...]:
    """The sentences of a paper's abstract; empty for a system without a paper."""
    return getattr(system, "ABSTRACT", ())


def counts(rows: Sequence[ClaimResult | ReadingResult]) -> dict[Word, int]:
    """Number of claims or readings with each verdict, including 0."""
    return {word: sum(row.verdict == word for row in rows) for word in VERDICTS}


def judged(abstract: Sequence[Sentence], rows: Sequence[ClaimResult]) -> tuple[SentenceResult, ...]:
    """The sentences with their readings' verdicts. Readings that were not run are left out."""
    by_id = {row.id: row for row in rows}
    results = []
    for sentence in abstract:
        readings = tuple(
            ReadingResult(
                each.claim,
                each.reading,
                each.chosen,
                row.paper,
                row.headway,
                row.verdict,
                has_value=row.has_value,
                has_papers_number=has_papers_number(row.paper, row.headway),
            )
            for each in sentence.readings
            if (row := by_id.get(each.claim)) is not None
        )
        if readings:
            results.append(SentenceResult(sentence.says, readings, sentence.experiment))
    return tuple(results)


_PAPER = re.compile(r"[+]?(-?[\d.,]+)(?:-([\d.,]+))?( s|x|%)?")
_INTERVAL = re.compile(r"\[(-?[\d.,]+)( s|x|%)?, (-?[\d.,]+)(?: s|x|%)?\]")


def has_papers_number(paper: str | float, headway: str) -> bool | None:
    """Whether the interval that is printed in `headway` contains the paper's number, or meets its range "7.8-17.1%".

    None if `paper` is no number with the interval's unit, such as "> 3 s".
    """
    ours = re.sub(r"^(.+), exact$", r"[\1, \1]", headway)
    number, found = _PAPER.fullmatch(str(paper)), _INTERVAL.search(ours)
    if number is None or (found is not None and found[2] != number[3]):
        return None
    if found is None:
        return False
    ends = (number[1], number[2] or number[1], found[1], found[3])
    least, most, low, high = (float(each.replace(",", "")) for each in ends)
    return low <= most and least <= high


def _row(claim: Claim, outcome: Finding) -> ClaimResult:
    verdict = claim.rule.judge(outcome.values)
    return ClaimResult(
        id=claim.id,
        claim=claim.claim,
        paper=claim.paper,
        headway=verdict.headway,
        rule=str(claim.rule),
        verdict=verdict.word,
        holds=verdict.holds,
        why=" ".join(part for part in (verdict.reason, outcome.why) if part),
        values=tuple(outcome.values),
    )
