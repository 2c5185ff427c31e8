"""Proposed changes to a fleet, as printed by `headway advise`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from headway.api.arguments import check_counts, checked
from headway.api.plans import Plan, Seconds
from headway.api.scenarios import ScenarioLike, document_of
from headway.config import strict_yaml
from headway.config.proxied import without_proxied
from headway.config.strict_yaml import Places
from headway.core.duration import in_seconds
from headway.core.errors import HeadwayError
from headway.planning.advise.candidates import KINDS
from headway.planning.advise.page import page
from headway.planning.advise.plan import (
    ATTAINMENT,
    MOST_REHEARSALS,
    MOST_REQUESTS,
    AdviceOptions,
    FleetFile,
    fleet_yaml,
)
from headway.planning.advise.plan import advise as planned
from headway.planning.advise.text import sentences
from headway.scenario import Simulator, assemble
from headway.scenario.processes import processes
from headway.serving import endpoints_file, gateway


@checked
def advise(
    fleet: ScenarioLike,
    records: Sequence[str],
    *,
    attainment: float = ATTAINMENT,
    slo: Mapping[str, Seconds] | None = None,
    kinds: Sequence[str] = KINDS,
    max_rehearsals: int = MOST_REHEARSALS,
    max_requests: int = MOST_REQUESTS,
    jobs: int = 1,
    cache: str | Path | None = None,
) -> Plan:
    """Proposes changes to a fleet from the records of days that it served: `headway advise`.

    `fleet`: the current fleet file. `records`: folders, one day each. `attainment`: the share of requests that should
    meet their SLOs. `slo`: of requests without their own, as {"ttft_s": 2, "tpot_s": "50ms"}. `kinds`: of changes to
    try. `max_requests`: of one rehearsal; longer days are cut. `cache`: a folder that keeps rehearsals. The plan is met
    if rehearsals of the days as they ran agree with the records; otherwise it has no proposals.
    """
    check_counts(jobs=jobs, max_rehearsals=max_rehearsals, max_requests=max_requests)
    options = AdviceOptions(attainment, tuple(kinds), max_rehearsals, max_requests)
    file = fleet_file(fleet, in_seconds("", dict(slo or {})))
    with processes(jobs) as pool:
        answer = planned(
            file,
            [Path(each) for each in records],
            options,
            Simulator(),
            None if cache is None else Path(cache),
            None,
            pool,
        )
    rows = [
        {
            "change": each.name,
            "kinds": list(each.kinds),
            "usd_per_month": each.usd_per_month.mean,
            "usd_per_month_low": each.usd_per_month.low,
            "usd_per_month_high": each.usd_per_month.high,
            "attainment": each.attainment.mean,
            "attainment_low": each.attainment.low,
            "attainment_high": each.attainment.high,
            "worst_day": each.worst.day,
            "diff": each.diff,
        }
        for each in answer.proposals
    ]
    return Plan(
        answer,
        not answer.is_withheld,
        tuple(rows),
        "\n".join(sentences(answer)) + "\n",
        lambda: fleet_yaml(answer, file.text),
        lambda: page(answer, "import headway"),
    )


def fleet_file(source: ScenarioLike, slo: Mapping[str, float]) -> FleetFile:
    """The fleet to advise on, with SLOs of requests without their own. HeadwayError for an invalid file."""
    document, places, base_dir = document_of(source)
    is_file = isinstance(source, str | Path)
    text = Path(source).read_text(encoding="utf-8") if is_file else strict_yaml.dump(document)  # type: ignore[arg-type]
    if slo:
        document = {**document, "slo": {**(document.get("slo") or {}), **slo}}

    def why_not_served(changed: Mapping[str, Any]) -> str:
        return _why_not_served(changed, places, base_dir)

    is_served = not why_not_served(document)
    return FleetFile(
        document,
        text,
        Path(source).name if is_file else "fleet.yaml",  # type: ignore[arg-type]
        _assembling(places, base_dir),
        why_not_served if is_served else None,
    )


def _assembling(places: Places, base_dir: Path) -> Callable[[Mapping[str, Any]], Any]:
    return lambda document: assemble(*without_proxied(document, places), base_dir)


def _why_not_served(document: Mapping[str, Any], places: Places, base_dir: Path) -> str:
    """Why `headway serve` rejects a fleet; empty if it serves it."""
    try:
        filled = endpoints_file.filled(dict(document), places, base_dir)
        filled.setdefault("workload", gateway.NO_WORKLOAD)
        gateway.plan(assemble(filled, places, base_dir)).stop_planners()
    except HeadwayError as error:
        return str(error)
    return ""
