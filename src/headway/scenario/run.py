"""Reads a scenario, assembles it, runs it: the only composition root."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import msgspec
import yaml
from msgspec.structs import replace

from headway import __version__
from headway.catalog.coefficients import Coefficients
from headway.config import scenario as config
from headway.config.fleet import coefficients_of, fleet_of
from headway.config.scenario import Changes, Scenario, listed, only_variant, read, variants
from headway.config.spec import PolicySpec, Spec
from headway.config.strict_yaml import Places
from headway.control.decisions import DecisionObserver
from headway.control.policies import CascadeConfig, Policies
from headway.core.errors import HeadwayError, unknown
from headway.core.fleet import Fleet, Model, Pool
from headway.core.policy import Scaler
from headway.core.record import Records
from headway.core.task import TaskFactory
from headway.metrics.summary import summarize
from headway.perf.step import StepModel
from headway.planning.gpu_hours_bound import gpu_hours_bound
from headway.policies import resolve
from headway.policies.resolve import Choice
from headway.report.run import Provenance, Run
from headway.scenario import long_term, notes, replan
from headway.sim.cluster import simulate
from headway.sim.timeline import Line
from headway.workload.generate import build as workload
from headway.workload.sources import RequestSource

Progress = Callable[[float], None]
"""Told now and then the share that is done, 0 to 1."""


class Simulator:
    """Simulates scenarios for planners. Satisfies `planning.simulator.Simulator`."""

    def run(self, scenario: Scenario) -> Run:
        return run(_expanded(scenario))

    def records(self, scenario: Scenario) -> Records:
        return records_of(_expanded(scenario))

    def policies(self, scenario: Scenario) -> Policies:
        return policies_of(_expanded(scenario))


def load(path: str | Path, changes: Changes | None = None) -> Scenario:
    """The scenario in a file, with some values set otherwise. HeadwayError where it cannot be run."""
    return assemble(*read(Path(path)), Path(path).parent, changes)


def assemble(data: Mapping[str, Any], places: Places, base_dir: Path, changes: Changes | None = None) -> Scenario:
    """The scenario of a document, with pools for replanning added. HeadwayError where it cannot be run."""
    scenario = _expanded(config.assemble(data, places, base_dir, changes))
    for variant in variants(scenario):
        _policies(variant)
    return scenario


def _expanded(scenario: Scenario) -> Scenario:
    """With the empty pools that replanning may fill."""
    spec = replan.expanded(scenario.spec, scenario.fleet, scenario.places)
    if spec is scenario.spec:
        return scenario
    return dataclasses.replace(scenario, spec=spec, fleet=fleet_of(spec, scenario.base_dir, scenario.places))


def policies_of(scenario: Scenario, desk: TaskFactory | None = None) -> Policies:
    """The policies of a scenario that has one of each. `desk`: where plans are worked out while it serves."""
    if len(variants(scenario)) > 1:
        raise scenario.places.error(("policies",), "several of a kind; expected one routing and one ordering")
    return _policies(variants(scenario)[0], desk)


def run(scenario: Scenario, progress: Progress | None = None, decisions: DecisionObserver | None = None) -> Run:
    """Simulate a scenario that has one routing and one ordering. `decisions` hears what policies chose."""
    chosen = only_variant(scenario)
    spec, policies, pools = chosen.spec, _policies(chosen), chosen.fleet.all_pools
    began = time.perf_counter()
    known, source = _known(chosen), _source(chosen)
    started = time.perf_counter()
    records = _simulated(chosen, policies, known, source, progress, decisions)
    simulated = time.perf_counter()
    summary = summarize(records, warmup_s=spec.simulation.warmup_s, slo=spec.slo, pacer=spec.pacer)
    bound, missing = _bound(chosen, records, known)
    return Run(
        name=spec.name,
        policies=_names(chosen),
        records=records,
        summary=replace(summary, gpu_hours_bound=bound),
        simulate_s=simulated - started,
        total_s=time.perf_counter() - began,
        calibrated=all(found.calibrated for found in known.values()),
        notes=(
            *source.table().notes,
            *notes.rejections(records, pools),
            *notes.cheating(_scaler(chosen)),
            *notes.replanned(policies),
            *missing,
        ),
    )


def records_of(scenario: Scenario) -> Records:
    """Of such a run, for who asks less of them than a summary has."""
    chosen = only_variant(scenario)
    return _simulated(chosen, _policies(chosen), _known(chosen), _source(chosen))


def _source(scenario: Scenario) -> RequestSource:
    with scenario.places.at("workload"):
        return workload(scenario.spec.workload, scenario.spec.seed, scenario.base_dir)


def _simulated(
    chosen: Scenario, policies: Policies, known: Mapping[str, Coefficients], source: RequestSource,
    progress: Progress | None = None, decisions: DecisionObserver | None = None,
) -> Records:  # fmt: skip
    spec = chosen.spec
    return simulate(
        chosen.fleet, source, policies, seed=spec.seed, step=spec.simulation.step, faults=spec.faults,
        roles=spec.roles, until_s=spec.simulation.until_s, scrape=spec.observe, progress=_share(progress, source, spec),
        line=lambda pool: _steps(pool, known[pool.name]).line, pacer=spec.pacer, decisions=decisions,
    )  # fmt: skip


def _known(scenario: Scenario) -> dict[str, Coefficients]:
    return coefficients_of(scenario.spec, scenario.fleet, scenario.base_dir, scenario.places)


@dataclass(frozen=True)
class Lines:
    """The step-time model of a pool; coefficients are read when it is asked for. Fit to be sent to another process."""

    scenario: Scenario

    @cached_property
    def _known(self) -> Mapping[str, Coefficients]:
        return _known(self.scenario)

    def __call__(self, pool: Pool) -> Line:
        return _steps(pool, self._known[pool.name]).line


def _steps(pool: Pool, known: Coefficients) -> StepModel:
    return StepModel(pool.model, pool.gpu, pool.engine, pool.parallel, known)


def _bound(
    scenario: Scenario, records: Records, known: Mapping[str, Coefficients]
) -> tuple[float | None, tuple[str, ...]]:
    """What no plan goes below, of a run that scales; or why that is not known."""
    spec = scenario.spec
    if spec.policies.scaling is None or spec.cascade is not None:
        return None, ()
    try:
        found = gpu_hours_bound(
            scenario.fleet, records, lambda pool: _steps(pool, known[pool.name]), warmup_s=spec.simulation.warmup_s,
            slo=spec.slo, to_the_end=spec.simulation.until_s is None,
        )  # fmt: skip
    except HeadwayError as error:
        return None, (f"no bound on GPU hours: {error}",)
    return found, ()


def provenance(scenario: Scenario, command: str | None = None) -> Provenance:
    """What made the runs of a scenario: enough to make them again."""
    policies = msgspec.to_builtins(scenario.spec.policies)
    document = {**scenario.document, "seed": scenario.spec.seed, "policies": policies}
    text = yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=100)
    return Provenance(scenario_yaml=text, seed=scenario.spec.seed, version=__version__, command=command)


def compare(
    scenario: Scenario, jobs: int = 1, progress: Progress | None = None, pool: Executor | None = None
) -> list[Run]:
    """Simulate every variant, on so many processes or in a pool. All see the same arrivals and lengths."""
    chosen = variants(scenario)
    if pool is None and jobs == 1:
        return [run(each, _part(progress, i, len(chosen))) for i, each in enumerate(chosen)]
    own = ProcessPoolExecutor(min(jobs, len(chosen)), get_context("spawn")) if pool is None else nullcontext(pool)
    runs: list[Run] = []
    with own as workers:
        for done in workers.map(run, chosen):
            runs.append(done)
            if progress:
                progress(len(runs) / len(chosen))
    return runs


def _importable(folder: Path) -> None:
    """Let `module:Class` be found beside the scenario."""
    path = str(folder.absolute())
    if path not in sys.path:
        sys.path.append(path)


def _names(scenario: Scenario) -> dict[str, str]:
    """As reports call them."""
    spec = scenario.spec
    if spec.variants:
        return {"policies": spec.variants[0].name}
    policies = spec.policies
    (routing,), (ordering,) = listed(policies.routing), listed(policies.ordering)
    names = {"routing": str(resolve.router(routing)), "ordering": str(resolve.ordering(ordering))}
    if policies.migration is not None:
        names["migration"] = str(resolve.migration(policies.migration))
    if policies.scaling is not None:
        names["scaling"] = str(_scaler(scenario))
    return names if policies.ordering_at == "replica" else {**names, "ordering_at": policies.ordering_at}


def _share(progress: Progress | None, source: RequestSource, spec: Spec) -> Callable[[float, int], None] | None:
    """What the simulator tells, as a share that is done."""
    if progress is None:
        return None
    num_requests, until_s = source.num_requests, spec.simulation.until_s

    def tell(now_s: float, num: int) -> None:
        shares = (num / num_requests if num_requests else 0.0, now_s / until_s if until_s else 0.0)
        progress(min(max(shares), 1.0))

    return tell


def _part(progress: Progress | None, i: int, num: int) -> Progress | None:
    return progress and (lambda share: progress((i + share) / num))


def _policies(scenario: Scenario, desk: TaskFactory | None = None) -> Policies:
    """The policies of a scenario that has one of each."""
    _importable(scenario.base_dir)  # again, for a worker process
    spec, places = scenario.spec.policies, scenario.places
    (routing,), (ordering,) = listed(spec.routing), listed(spec.ordering)
    with places.at("policies", "routing"):
        router = resolve.router(routing)
    with places.at("policies", "ordering"):
        order = resolve.ordering(ordering)
        if spec.ordering_at != "gateway":
            _check_engines(scenario.fleet, ordering)
    with places.at("policies", "migration"):
        migration = None if spec.migration is None else resolve.migration(spec.migration)
    with places.at("policies", "scaling"):
        scaler = _scaler(scenario, desk)
    with places.at("policies", "admission"):
        admission = None if spec.admission is None else resolve.admission(spec.admission)
    chosen = Policies(
        router, order, spec.ordering_at, _window(scenario), migration=migration, admission=admission,
        cascade=_cascade(scenario), scaler=scaler,
    )  # fmt: skip
    said = scenario.spec.cascade
    if chosen.cascade is None or said is None or said.replan is None:
        return chosen
    return replan.follow(
        scenario.spec, scenario.fleet, scenario.base_dir, places, chosen, chosen.cascade, _known(scenario), desk
    )


def _window(scenario: Scenario) -> int | None:
    """Unless it is said: as many as a replica can run, where order is to be kept in front of it."""
    spec = scenario.spec.policies
    if spec.window is not None or spec.ordering_at == "replica":
        return spec.window
    return min(pool.engine.max_num_seqs for pool in scenario.fleet.all_pools)


def _scaler(scenario: Scenario, desk: TaskFactory | None = None) -> Choice[Scaler] | None:
    """With the forecaster and the planner that it asks for."""
    said = scenario.spec.policies.scaling
    if said is None:
        return None
    setting = long_term.Setting(
        scenario.spec.workload, scenario.spec.seed, scenario.base_dir, scenario.fleet, Lines(scenario)
    )  # fmt: skip
    return long_term.scaler(said, setting, desk)


def _cascade(scenario: Scenario) -> CascadeConfig | None:
    spec, places = scenario.spec.cascade, scenario.places
    if spec is None:
        return None
    served = {name: pool.model.name for pool in scenario.fleet.all_pools for name in _names_of(pool.model)}
    for i, name in enumerate(spec.models):
        if name not in served:
            raise unknown("model", name, served, places.where(("cascade", "models", i)))
    with places.at("cascade", "policy"):
        policy = resolve.cascade(spec.policy)
    models = tuple(served[name] for name in spec.models)
    return CascadeConfig(spec.name, models, policy, spec.judge_s, spec.judge_usd, spec.judge_bias, spec.judge_noise)


def _names_of(model: Model) -> tuple[str, ...]:
    return (model.name, model.hf_id, *model.aliases)


def _check_engines(fleet: Fleet, ordering: PolicySpec) -> None:
    """Raises HeadwayError where an engine cannot act out an ordering."""
    name = ordering if isinstance(ordering, str) else str(ordering.get("name"))
    for pool in fleet.all_pools:
        accepted = pool.engine.orderings
        if accepted is not None and name not in accepted:
            raise HeadwayError(
                f"{pool.engine.name} (pool {pool.name}) cannot order by {name} at the replica, only by"
                f" {' or '.join(accepted)}; with ordering_at gateway, requests are ordered in front of it"
            )
