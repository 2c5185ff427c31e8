"""Whole fleets, rehearsed model by model: the metrics of one simulation, and fleets share what they have in common.

Models whose requests never meet (`Simulator.couples`) share nothing in a simulation. So a whole fleet's records are
those of its models, each simulated with its own replicas and with its requests at their own times and numbers. Fleets
that differ in one model differ in one simulation; and replicas that are alone get the same requests from every router.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec import structs

from headway.config.scenario import Scenario
from headway.core.errors import HeadwayError
from headway.core.record import Columns, Outcome, Records, ReplicaRecord
from headway.metrics.usage import ReplicaUsage, usage
from headway.planning.fleet.allocation import Parts, by_model
from headway.planning.fleet.problem import FleetRun
from headway.planning.fleet.rehearsal import FORMAT, FleetTemplate, fleet_run, rehearsal
from headway.planning.rehearsals import Rehearsal, Rehearsals
from headway.workload.generate import generate
from headway.workload.sources import RequestSource, TraceSource
from headway.workload.spec import TraceSpec, WorkloadSpec

MEASURED = ("request", "outcome", "placed_s", "admitted_s", "first_token_s", "end_s", "generated_tokens")
"""The columns of requests that metrics of a fleet read."""
MOST_ROWS = 2_000_000
"""Requests of the simulated models that are kept in memory: 100 MB."""


class WholeFleet(NamedTuple):
    """A whole fleet with policies and a file of requests."""

    parts: Parts
    policies: Mapping[str, Any]
    requests: Path


@dataclass(frozen=True)
class ModelRun:
    """The rehearsal of one model of a fleet."""

    requests: Columns
    """`MEASURED`; request ids are those of the whole workload."""
    replicas: tuple[ReplicaRecord, ...]
    used: ReplicaUsage
    """Without the time until the end of the whole fleet's run."""
    end_s: float


class ApartRehearsals:
    """Rehearses whole fleets, each model apart where that gives the same metrics."""

    def __init__(self, template: FleetTemplate, rehearsals: Rehearsals) -> None:
        self._template, self._rehearsals = template, rehearsals
        self._kept: OrderedDict[str, ModelRun] = OrderedDict()
        self._num_rows = 0
        """Requests of the kept runs."""
        self._scenarios: dict[str, tuple[Scenario, bool]] = {}
        """Scenarios by fleet and policies, each with any of its files of requests, and whether its models may affect
        each other."""

    def runs(self, fleets: Sequence[WholeFleet]) -> list[FleetRun]:
        """The runs of whole fleets, in order: from the cache, or simulated."""
        wanted = [rehearsal(self._scenario(each)[0]) for each in fleets]
        found: dict[int, FleetRun] = {}
        for i, each in enumerate(wanted):
            if (known := self._rehearsals.find(each)) is not None:
                found[i] = known
        left = [i for i in range(len(fleets)) if i not in found]
        for i, run in self._apart([i for i in left if not self._scenario(fleets[i])[1]], fleets):
            found[i] = run
            self._rehearsals.keep_result(wanted[i], run)
        whole = [i for i in left if i not in found]
        found |= zip(whole, self._rehearsals.all([wanted[i] for i in whole]), strict=True)
        return [found[i] for i in range(len(fleets))]

    def at_most(self, wanted: Sequence[tuple[WholeFleet, str]]) -> list[float]:
        """For each fleet and one of its models, an upper bound of the attainment of the model that does worst: that of
        the named model, or 1 if its requests may meet those of others."""
        alone = [fleet._replace(parts=by_model(fleet.parts)[model]) for fleet, model in wanted]
        bounds = [_bound(self._of_model(each)) for each in alone]
        couples = [self._scenario(fleet)[1] for fleet, _ in wanted]
        found = [1.0 if each else self._rehearsals.find(bound) for each, bound in zip(couples, bounds, strict=True)]
        left = [i for i, known in enumerate(found) if known is None]
        for j, run in self._rehearsals.each([self._of_model(alone[i]) for i in left]):
            i = left[j]
            self._keep(_key(alone[i]), run)
            share = 1.0 if run is None else _merged(self._scenario(alone[i])[0], [run]).worst
            self._rehearsals.keep_result(bounds[i], share)
            found[i] = share
        return [1.0 if known is None else known for known in found]

    def _apart(self, chosen: Sequence[int], fleets: Sequence[WholeFleet]) -> Iterator[tuple[int, FleetRun]]:
        """The runs of the chosen fleets, as soon as they are known; without those that must be simulated whole."""
        models = {i: [fleets[i]._replace(parts=own) for own in by_model(fleets[i].parts).values()] for i in chosen}
        keys = {i: [_key(each) for each in alone] for i, alone in models.items()}
        all_keys = {key: each for i in chosen for key, each in zip(keys[i], models[i], strict=True)}
        known: dict[str, ModelRun | None] = {key: self._kept[key] for key in all_keys if key in self._kept}
        new = {key: each for key, each in all_keys.items() if key not in known}
        waiting: dict[str, list[int]] = {key: [] for key in new}
        num_missing = {i: len({key for key in keys[i] if key in new}) for i in chosen}
        for i in chosen:
            for key in set(keys[i]) & new.keys():
                waiting[key].append(i)
        ready = [i for i in chosen if not num_missing[i]]
        order = sorted(new, key=lambda key: new[key].requests)  # so that a process reads few files of requests
        results = self._rehearsals.each([self._of_model(new[key]) for key in order])
        while True:
            for i in ready:
                runs = [run for key in keys[i] if (run := known[key]) is not None]
                if len(runs) == len(keys[i]):
                    yield i, _merged(self._scenario(fleets[i])[0], runs)
            done = next(results, None)
            if done is None:
                return
            key = order[done[0]]
            known[key] = done[1]
            self._keep(key, done[1])
            for i in waiting[key]:
                num_missing[i] -= 1
            ready = [i for i in waiting[key] if not num_missing[i]]

    def _keep(self, key: str, run: ModelRun | None) -> None:
        if run is None:
            return
        self._kept[key] = run
        self._num_rows += len(run.requests["request"])
        while self._num_rows > MOST_ROWS:
            _, oldest = self._kept.popitem(last=False)
            self._num_rows -= len(oldest.requests["request"])

    def _scenario(self, fleet: WholeFleet) -> tuple[Scenario, bool]:
        """The fleet's scenario, and whether its models may affect each other."""
        key = msgspec.json.encode([fleet.parts, fleet.policies]).decode()
        if key not in self._scenarios:
            made = self._template.scenario(*fleet)
            self._scenarios[key] = made, self._rehearsals.resources.simulator.couples(made)
        made, couples = self._scenarios[key]
        workload = WorkloadSpec(trace=TraceSpec(str(fleet.requests.absolute()), FORMAT))
        return replace(made, spec=structs.replace(made.spec, workload=workload)), couples

    def _of_model(self, fleet: WholeFleet) -> Rehearsal[ModelRun | None]:
        watch = partial(_only, fleet.parts[0].model)
        return Rehearsal(self._scenario(fleet)[0], _model_run, kind=None, failed=_unknown, watch=watch)


def _key(fleet: WholeFleet) -> str:
    """What the run of one model's fleet depends on."""
    policies = dict(fleet.policies)
    first = fleet.parts[0]
    if (
        len(fleet.parts) == first.count == 1
        and first.unit.aggregated is not None
        and first.unit.aggregated.instances == 1
    ):
        del policies["routing"]
    return f"{fleet.requests}|{msgspec.json.encode([fleet.parts, policies]).decode()}"


def _only(model: str, source: RequestSource) -> RequestSource:
    """The requests of one model, with their ids in the whole workload."""
    assert isinstance(source, TraceSource)
    return TraceSource(*source.workload.of_model(model))


def _bound(of_model: Rehearsal[ModelRun | None]) -> Rehearsal[float]:
    """The attainment of one model as a result that is kept."""
    return Rehearsal(of_model.scenario, _attainment, float, ("one model of the requests",), watch=of_model.watch)


def _attainment(scenario: Scenario, records: Records) -> float:
    return fleet_run(scenario, records).worst


def _unknown(_: HeadwayError) -> None:
    """A model that cannot be simulated apart: the whole fleet says why."""


def _model_run(scenario: Scenario, records: Records) -> ModelRun | None:
    """What the whole fleet's metrics need; None if a request never ends: whether it does depends on the other
    models."""
    if (records.requests["outcome"] == Outcome.UNFINISHED).any():
        return None
    unpaid = structs.replace(records, replicas=tuple(structs.replace(each, up=()) for each in records.replicas))
    used = usage(unpaid, scenario.spec.simulation.warmup_s)
    requests = {name: np.array(records.requests[name]) for name in MEASURED}
    return ModelRun(requests, records.replicas, used, records.end_s)


def _merged(scenario: Scenario, runs: Sequence[ModelRun]) -> FleetRun:
    """The metrics of the whole fleet."""
    rows = generate(scenario.spec.workload, scenario.spec.seed, scenario.base_dir)
    end_s, warmup_s = max(run.end_s for run in runs), scenario.spec.simulation.warmup_s
    unordered = [each for run in runs for each in run.replicas]
    pools = {pool.name for pool in scenario.fleet.pools}
    order = np.argsort([each.pool not in pools for each in unordered], kind="stable")  # combos come last
    replicas = [unordered[i] for i in order.tolist()]
    records = Records(
        workload=rows.columns,
        models=rows.models,
        regions=rows.regions,
        requests={name: np.concatenate([run.requests[name] for run in runs]) for name in MEASURED},
        segments={},
        stretches={},
        replicas=tuple(structs.replace(each, id=i, up=((0.0, end_s),)) for i, each in enumerate(replicas)),
        end_s=end_s,
    )
    used = ReplicaUsage(
        **{name: np.concatenate([getattr(run.used, name) for run in runs])[order] for name in ReplicaUsage.__slots__}
    )
    idle_w = np.array([np.nan if each.power is None else each.power.idle_w for each in replicas])
    return fleet_run(scenario, records, replace(used, joules=used.joules + idle_w * (end_s - warmup_s)))
