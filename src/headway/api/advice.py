"""Proposed changes to a fleet, as printed by `headway advise`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from headway.api.arguments import check_counts, checked
from headway.api.plans import Plan, Seconds, assembling, planned
from headway.api.scenarios import ScenarioLike, source_of
from headway.config import strict_yaml
from headway.core.duration import in_seconds
from headway.core.errors import HeadwayError
from headway.planning.advise import answer
from headway.planning.advise.candidates import KINDS
from headway.planning.advise.plan import (
    ATTAINMENT,
    MOST_REHEARSALS,
    MOST_REQUESTS,
    AdviceOptions,
    FleetFile,
    policies_of,
)
from headway.planning.rehearsals import Source
from headway.scenario import assemble
from headway.serving import endpoints_file, gateway


@checked
def advise(
    fleet: ScenarioLike, records: Sequence[str], *, attainment: float = ATTAINMENT,
    slo: Mapping[str, Seconds] | None = None, kinds: Sequence[str] = KINDS, max_rehearsals: int = MOST_REHEARSALS,
    max_requests: int = MOST_REQUESTS, candidate: str | Path | None = None, jobs: int = 1,
    cache: str | Path | None = None,
) -> Plan:  # fmt: skip
    """Proposes changes to a fleet from the records of days that it served: `headway advise`.

    `fleet`: the current fleet file. `records`: folders, one day each. `attainment`: the share of requests that should
    meet their SLOs. `slo`: of requests without their own, as {"ttft_s": 2, "tpot_s": "50ms"}. `kinds`: of changes to
    try. `max_requests`: of one rehearsal; longer days are cut. `candidate`: a fleet file whose policies are compared
    with today's; nothing else is tried. `cache`: a folder that keeps rehearsals. The plan is met if rehearsals of the
    days as they ran agree with the records; otherwise it has no proposals.
    """
    check_counts(max_rehearsals=max_rehearsals, max_requests=max_requests)
    options = AdviceOptions(attainment, tuple(kinds), max_rehearsals, max_requests)
    file = fleet_file(fleet, in_seconds("", dict(slo or {})))
    other = None if candidate is None else policies_of(fleet_file(candidate, {}).document, Path(candidate).name)
    ask = partial(answer.planned, file, [Path(each) for each in records], options, candidate=other)
    return planned(ask, cache, jobs)


def fleet_file(given: ScenarioLike, slo: Mapping[str, float]) -> FleetFile:
    """The fleet to advise on, with SLOs of requests without their own. Raises HeadwayError for an invalid file."""
    source = source_of(given)
    is_file = isinstance(given, str | Path)
    text = Path(given).read_text(encoding="utf-8") if is_file else strict_yaml.dump(source.document)  # type: ignore[arg-type]
    document = source.document
    if slo:
        document = {**document, "slo": {**(document.get("slo") or {}), **slo}}
    why_not_served = partial(_why_not_served, source)
    return FleetFile(
        document,
        text,
        Path(given).name if is_file else "fleet.yaml",  # type: ignore[arg-type]
        assembling(source),
        None if why_not_served(document) else why_not_served,
    )


def _why_not_served(source: Source, changed: Mapping[str, Any]) -> str:
    """Why `headway serve` rejects a fleet; empty if it serves it."""
    _, places, base_dir = source
    try:
        filled = endpoints_file.filled(dict(changed), places, base_dir)
        filled.setdefault("workload", gateway.NO_WORKLOAD)
        gateway.plan(assemble(filled, places, base_dir)).stop_planners()
    except HeadwayError as error:
        return str(error)
    return ""
