"""Runs a system and judges its claims."""

from __future__ import annotations

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
from headway_papers.reproduce.claims import VERDICTS, Claim, Value, Word
from headway_papers.reproduce.findings import Exhibit, Finding, Findings
from headway_papers.reproduce.runner import ReportProgress, Runner


class System(Protocol):
    """The names that a module of `SYSTEMS` must define. A paper's module also has `ABSTRACT`."""

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


class ReadingResult(Struct, frozen=True):
    """A reading of a sentence of the abstract, and the verdict of its claim."""

    claim: str
    reading: str
    chosen: str
    """`before` or `after` a run of any reading of the sentence had been seen."""
    paper: str | float
    headway: str
    verdict: Word


class SentenceResult(Struct, frozen=True):
    """A sentence of the abstract with the readings that were run."""

    says: str
    readings: tuple[ReadingResult, ...]
    experiment: str
    """The single experiment that would change the verdict."""

    @property
    def given_by(self) -> tuple[str, ...]:
        """The claims that show the paper's effect."""
        return tuple(each.claim for each in self.readings if each.verdict == "holds")


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
    with cluster() if ray else processes(jobs) as pool:
        wanted = frozenset(claim.id for claim in claims) if ids else None
        runner = Runner(tuple(range(num_seeds)), quick, data, wanted, cache, report, pool)
        findings = system.run(runner)
    rows = tuple(_row(claim, findings.outcomes[claim.id]) for claim in claims)
    return Reproduced(
        title=system.TITLE,
        result=Reproduction(
            name, quick, num_seeds, time.perf_counter() - began, counts(rows), judged(abstract_of(system), rows), rows
        ),
        exhibits=findings.exhibits,
        num_measured=runner.num_measured,
        num_found=runner.num_found,
    )


def abstract_of(system: System) -> tuple[Sentence, ...]:
    """The sentences of a paper's abstract; empty for a system without a paper."""
    return getattr(system, "ABSTRACT", ())


def counts(rows: Sequence[ClaimResult]) -> dict[Word, int]:
    """Number of claims with each verdict, including 0."""
    return {word: sum(row.verdict == word for row in rows) for word in VERDICTS}


def judged(abstract: Sequence[Sentence], rows: Sequence[ClaimResult]) -> tuple[SentenceResult, ...]:
    """The sentences with their readings' verdicts. Readings that were not run are left out."""
    by_id = {row.id: row for row in rows}
    results = []
    for sentence in abstract:
        readings = tuple(
            ReadingResult(each.claim, each.reading, each.chosen, row.paper, row.headway, row.verdict)
            for each in sentence.readings
            if (row := by_id.get(each.claim)) is not None
        )
        if readings:
            results.append(SentenceResult(sentence.says, readings, sentence.experiment))
    return tuple(results)


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
