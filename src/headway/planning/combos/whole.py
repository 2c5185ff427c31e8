"""Rehearses a service's part of a plan as a whole, until it is clear whether it lasts, with every router."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from msgspec import structs

from headway.config.scenario import Scenario, assemble
from headway.config.strict_yaml import Places
from headway.core.record import Records
from headway.metrics.columns import floats
from headway.metrics.latency import DefaultSlo, slo_masks
from headway.planning.combos.problem import PlannedCombo, RouterResult, ServiceRehearsal, ServiceSlo
from headway.planning.combos.rehearsal import ServiceScenario, fleet_sections
from headway.planning.rehearsals import Rehearsal, Rehearsals, counted
from headway.planning.stability import Stability, lasting, lasts, stability
from headway.planning.together import Together, together_in

Planned = Sequence[PlannedCombo]


def planned_document(chosen: ServiceScenario, planned: Planned, routing: str) -> dict[str, Any]:
    """The service's scenario on its part of a plan."""
    named = [(each.combo, each.count, each.goodput_rps, f"combo-{i}") for i, each in enumerate(planned)]
    return {**chosen.document, **fleet_sections(chosen, named, routing)}


def _stability(slo: ServiceSlo, _: Scenario, records: Records) -> Stability:
    measured = counted(records, 0.0, DefaultSlo(slo.ttft_s, slo.tpot_s))
    arrival_s = floats(records.workload, "arrival_s", measured.id)
    return stability(arrival_s, measured.ttft_s, slo_masks(measured)["all"][1])


@dataclass
class WholeRehearsal:
    """Rehearses services' parts of a plan. Several threads may use it at a time."""

    rehearsals: Rehearsals
    attainment: float
    """Share of requests that must be in time."""
    num_requests: int
    """Number of requests of the first run."""
    most_requests: int
    """Number of requests of the longest run."""

    @property
    def together(self) -> Together:
        return together_in(self.rehearsals.resources.pool)

    def rehearse(self, chosen: ServiceScenario, planned: Planned, routings: Sequence[str]) -> ServiceRehearsal:
        """Rehearse one router after the other until a run lasts. Returns the first router that lasts; if none does, the
        one with the highest attainment."""
        tried: list[ServiceRehearsal] = []
        for routing in routings:
            runs = self._lasting(chosen, planned, routing)
            tried.append(ServiceRehearsal(chosen.service.name, routing, runs, lasts(runs[-1], self.attainment)))
            if tried[-1].is_met:
                return tried[-1]
        return max(tried, key=lambda each: each.runs[-1].attainment)

    def compared(
        self, chosen: ServiceScenario, planned: Planned, found: ServiceRehearsal, routings: Sequence[str]
    ) -> ServiceRehearsal:
        """Rehearsals of equal length with every router. The planned router is the first of the best."""
        num = found.runs[-1].num_requests
        results_of = self.together([partial(self._run, chosen, planned, each, num) for each in routings])
        runs: dict[str, Stability] = dict(zip(routings, results_of, strict=True))
        met = [each for each in routings if lasts(runs[each], self.attainment)]
        if not met:
            return found
        best = runs[max(met, key=lambda each: runs[each].attainment)]
        tied = [each for each in met if runs[each].attainment_high >= best.attainment_low]
        if tied[0] != found.routing:
            longer = self.rehearse(chosen, planned, tied[:1])
            found = longer if longer.is_met else found
        rest = sorted((each for each in routings if each not in tied), key=lambda each: -runs[each].attainment)
        order = sorted((*tied, *rest), key=lambda each: each != found.routing)
        results = tuple(RouterResult(each, runs[each], each in met, each in tied) for each in order)
        return structs.replace(found, routers=results)

    def _lasting(self, chosen: ServiceScenario, planned: Planned, routing: str) -> tuple[Stability, ...]:
        most = min(self.most_requests, chosen.most_requests or self.most_requests)
        return lasting(lambda num: self._run(chosen, planned, routing, num), self.attainment, self.num_requests, most)

    def _run(self, chosen: ServiceScenario, planned: Planned, routing: str, num_requests: int) -> Stability:
        document = planned_document(chosen, planned, routing)
        workload = {**document["workload"], "num_requests": num_requests}
        workload.pop("duration_s", None)
        scenario = assemble({**document, "workload": workload}, Places(), chosen.base_dir)
        measure = partial(_stability, chosen.service.slo)
        return self.rehearsals.one(Rehearsal(scenario, measure, Stability, ("whole",)))
