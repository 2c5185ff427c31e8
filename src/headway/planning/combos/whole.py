"""A service's part of a plan, rehearsed whole: until it is clear whether it lasts, and with every router."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import structs

from headway.config.scenario import assemble
from headway.config.strict_yaml import Places
from headway.metrics.columns import floats
from headway.metrics.latency import DefaultSlo, sample, slo_masks
from headway.planning.combos.problem import PlannedCombo, RouterResult, ServiceRehearsal
from headway.planning.combos.rehearsal import Progress, ServiceScenario, fleet_sections
from headway.planning.rehearsals import RehearsalCache, Simulator, scenario_key
from headway.planning.stability import Stability, lasting, lasts, stability

Planned = Sequence[PlannedCombo]


def planned_document(chosen: ServiceScenario, planned: Planned, routing: str) -> dict[str, Any]:
    """The service's scenario on its part of a plan."""
    named = [(each.combo, each.count, each.goodput_rps, f"combo-{i}") for i, each in enumerate(planned)]
    return {**chosen.document, **fleet_sections(chosen, named, routing)}


@dataclass
class WholeRehearsal:
    simulator: Simulator
    cache: RehearsalCache
    attainment: float
    """Share of requests that must be in time."""
    num_requests: int
    """Of the first run."""
    most_requests: int
    """Of the longest run."""
    progress: Progress | None = None
    num_simulated: int = 0

    def rehearse(self, chosen: ServiceScenario, planned: Planned, routings: Sequence[str]) -> ServiceRehearsal:
        """With the first of the routers that lasts; if none does, with the one that reaches the most."""
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
        """The same with every router at the same length; the planned router is the first of the best ones."""
        num = found.runs[-1].num_requests
        runs = {each: self._run(chosen, planned, each, num) for each in routings}
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
        slo = chosen.service.slo

        def simulated() -> Stability:
            self.num_simulated += 1
            if self.progress is not None:
                self.progress(self.num_simulated, self.num_simulated + 1)
            measured = sample(self.simulator.records(scenario), 0.0, DefaultSlo(slo.ttft_s, slo.tpot_s))
            arrival_s = floats(measured.records.workload, "arrival_s", measured.id)
            return stability(arrival_s, measured.ttft_s, slo_masks(measured)["all"][1])

        return self.cache.get(scenario_key(scenario, "whole"), Stability, simulated)
