"""Rehearses a service's part of a plan as a whole, until it is clear whether it lasts, with every router."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Any

from msgspec import structs

from headway.config.scenario import Scenario, assemble
from headway.config.strict_yaml import Places
from headway.metrics.columns import floats
from headway.metrics.latency import DefaultSlo, slo_masks
from headway.planning.combos.problem import PlannedCombo, RouterResult, ServiceRehearsal, ServiceSlo
from headway.planning.combos.rehearsal import ServiceScenario, fleet_sections
from headway.planning.rehearsals import Progress, RehearsalCache, Simulator, counted, scenario_key
from headway.planning.stability import Stability, lasting, lasts, stability
from headway.planning.together import Together, together_in

Planned = Sequence[PlannedCombo]


def planned_document(chosen: ServiceScenario, planned: Planned, routing: str) -> dict[str, Any]:
    """The service's scenario on its part of a plan."""
    named = [(each.combo, each.count, each.goodput_rps, f"combo-{i}") for i, each in enumerate(planned)]
    return {**chosen.document, **fleet_sections(chosen, named, routing)}


@dataclass(frozen=True)
class WholeTask:
    """A service's part of a plan, to simulate in any process."""

    scenario: Scenario
    slo: ServiceSlo
    simulator: Simulator

    def stability(self) -> Stability:
        measured = counted(self.simulator.records(self.scenario), 0.0, DefaultSlo(self.slo.ttft_s, self.slo.tpot_s))
        arrival_s = floats(measured.records.workload, "arrival_s", measured.id)
        return stability(arrival_s, measured.ttft_s, slo_masks(measured)["all"][1])


@dataclass
class WholeRehearsal:
    """Rehearses in worker processes if it has any, and then for several threads at a time."""

    simulator: Simulator
    cache: RehearsalCache
    attainment: float
    """Required share of requests in time."""
    num_requests: int
    """Requests of the first run."""
    most_requests: int
    """Requests of the longest run."""
    progress: Progress | None = None
    num_simulated: int = 0
    pool: Executor | None = None
    _lock: Lock = field(default_factory=Lock)
    """Held while the cache or the counter is used."""
    _rehearsed: dict[str, Stability] = field(default_factory=dict)
    """This object's runs by key, for plans without a cache."""

    @property
    def together(self) -> Together:
        return together_in(self.pool)

    def rehearse(self, chosen: ServiceScenario, planned: Planned, routings: Sequence[str]) -> ServiceRehearsal:
        """Rehearse with the first router that lasts; if none does, with the one that reaches the most."""
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
        """The same rehearsal with every router at the same length. The planned router is the first of the best."""
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
        key = scenario_key(scenario, "whole")
        with self._lock:
            found: Stability | None = self._rehearsed.get(key) or self.cache.find(key, Stability)
            if found is not None:
                return found
            self.num_simulated += 1
            if self.progress is not None:
                self.progress(self.num_simulated, self.num_simulated + 1)
        task = WholeTask(scenario, chosen.service.slo, self.simulator)
        result = task.stability() if self.pool is None else self.pool.submit(WholeTask.stability, task).result()
        with self._lock:
            self.cache.keep(key, result)
            self._rehearsed[key] = result
        return result
