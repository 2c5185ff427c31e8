"""Chooses a scaler for recorded demand: simulates every candidate, and finds the frontier of GPU-hours against
lateness."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

import msgspec
from msgspec import Struct, structs

from headway.config import strict_yaml
from headway.config.scenario import Scenario, StepTimes, variants, with_absolute_paths
from headway.core.errors import HeadwayError
from headway.core.fleet import Combo, Pool
from headway.core.record import Records
from headway.metrics.interval import interval
from headway.metrics.latency import slo_masks
from headway.metrics.usage import held_gpu_hours
from headway.planning.gpu_hours_bound import gpu_hours_bound
from headway.planning.rehearsals import (
    Rehearsal,
    Rehearsals,
    Resources,
    counted,
    first_policies,
)
from headway.planning.scaling.candidates import BATCH_TIER, LadderInputs, ScalerCandidate, ladders
from headway.planning.scaling.timetable import served_tps, timetables
from headway.workload.generate import generate

Assemble = Callable[[Mapping[str, Any]], Scenario]
NEAR = 0.05
"""An autoscaler of Kubernetes suffices if it uses at most this share more GPU-hours than the chosen scaler."""
KUBERNETES = ("HPA", "KEDA")


class ScalingOptions(Struct, frozen=True):
    scalers: tuple[str, ...]
    startup_s: tuple[float | None, ...] = (None,)
    """Start times to plan for, applied to every pool; None: the scenario's own."""
    max_late: float = 0.01
    num_seeds: int = 1
    forecaster: Mapping[str, Any] | None = None
    clairvoyant: bool = True

    def __post_init__(self) -> None:
        """Raises HeadwayError if `max_late` is not a share."""
        if not 0 <= self.max_late < 1:
            raise HeadwayError(f"max_late: {self.max_late:g}; expected a share of requests, less than 1")


class Rehearsed(Struct, frozen=True, forbid_unknown_fields=True):
    """One candidate with one seed."""

    gpu_hours: float
    """GPU-hours of replicas that serve, drain or start."""
    late: float
    """Share of the requests with SLOs that missed one."""
    num_requests: int
    starts: int
    bound: float | None = None
    """Lower bound of GPU-hours over all plans that serve the trace in time, if requested."""


class ScalerResult(Struct, frozen=True, kw_only=True):
    """One candidate over all seeds."""

    family: str
    setting: str
    scaling: dict[str, Any]
    is_oracle: bool
    gpu_hours: float
    late: float
    starts: float
    by_seed: tuple[Rehearsed, ...]
    on_frontier: bool = False
    """Whether no other scaler has both fewer GPU-hours and fewer late requests."""


class Comparison(Struct, frozen=True):
    """GPU-hours of the chosen scaler compared with those of another family at equal lateness."""

    family: str
    ratio: float
    """GPU-hours of the chosen scaler over those of the other one, mean over the seeds."""
    interval: tuple[float, float] | None
    """95% interval of the mean ratio, paired by seed; None for one seed."""


class StartUpPlan(Struct, frozen=True, kw_only=True):
    """All scalers with one start time."""

    startup_s: float | None
    """Start times to plan for; None: the pools' own."""
    results: tuple[ScalerResult, ...]
    clairvoyant: tuple[ScalerResult, ...]
    """Timetables that were planned with the trace known, one for each headroom."""
    bound_gpu_hours: float | None
    chosen: int | None
    """Index in `results`; None if every scaler is late too often."""
    kubernetes: int | None
    """Index in `results` of the cheapest HPA or KEDA setting that is late seldom enough; None if it uses over `NEAR`
    more GPU-hours than the chosen scaler."""
    clairvoyant_gpu_hours: float | None
    """GPU-hours of the clairvoyant plan with the chosen scaler's lateness."""
    against: tuple[Comparison, ...] = ()
    """The chosen scaler against each other family, and against the clairvoyant plan, where equal lateness exists."""


class ScalingPlan(Struct, frozen=True, kw_only=True):
    name: str
    max_late: float
    num_requests: int
    seeds: tuple[int, ...]
    plans: tuple[StartUpPlan, ...]
    notes: tuple[str, ...]
    num_simulated: int
    num_found: int

    @property
    def is_met(self) -> bool:
        return all(each.chosen is not None for each in self.plans)


def _rehearsed(with_bound: bool, scenario: Scenario, records: Records) -> Rehearsed:
    spec = scenario.spec
    warmup_s = spec.simulation.warmup_s
    has, good = slo_masks(counted(records, warmup_s, spec.slo))["all"]
    if not has.any():
        raise HeadwayError("no request has an SLO, so none can be late; set one, as with --slo ttft=2")
    bound = None
    if with_bound:
        try:
            bound = gpu_hours_bound(
                scenario.fleet,
                records,
                StepTimes(scenario).model,
                warmup_s=warmup_s,
                slo=spec.slo,
                to_the_end=spec.simulation.until_s is None,
            )
        except HeadwayError:
            bound = None  # no plan serves the trace in time
    starts = sum(each.origin != "initial" for each in records.replicas)
    late = 1.0 - float(good[has].mean())
    return Rehearsed(held_gpu_hours(records, warmup_s), late, int(has.sum()), starts, bound)


def plan(document: Mapping[str, Any], options: ScalingOptions, assemble: Assemble, resources: Resources) -> ScalingPlan:
    """Simulate all candidates for a scenario's document, for each start time.

    Results are cached one by one, so that an interrupted plan resumes. Raises HeadwayError if the scenario cannot be
    scaled, or no request has an SLO.
    """
    cases = [StartUpCase(document, startup_s, options, assemble) for startup_s in options.startup_s]
    total = sum(len(case.candidates) for case in cases) * options.num_seeds
    rehearsals = Rehearsals(resources, total)
    plans = tuple(case.answer(rehearsals) for case in cases)
    first = plans[0].results[0]
    return ScalingPlan(
        name=cases[0].scenario.spec.name,
        max_late=options.max_late,
        num_requests=first.by_seed[0].num_requests,
        seeds=tuple(cases[0].seeds),
        plans=plans,
        notes=tuple(dict.fromkeys(note for case in cases for note in case.notes)),
        num_simulated=rehearsals.num_simulated,
        num_found=rehearsals.num_found,
    )


class StartUpCase:
    """One start time with its scenario and candidates."""

    def __init__(
        self,
        document: Mapping[str, Any],
        startup_s: float | None,
        options: ScalingOptions,
        assemble: Assemble,
    ) -> None:
        self.startup_s, self.options = startup_s, options
        self.notes: list[str] = []
        self.document = without_scaling(document) if startup_s is None else with_start(document, startup_s)
        whole = assemble(document)
        self.scenario = variants(assemble(self.document))[0]
        if note := first_policies(whole):
            self.notes.append(note)
        spec, fleet = self.scenario.spec, self.scenario.fleet
        if spec.cascade is not None:
            raise HeadwayError("cascade: a cascade's models are planned by headway plan cascade")
        units: list[Pool | Combo] = [*fleet.pools, *fleet.combos]
        if all(unit.max_replicas == unit.min_replicas for unit in units):
            raise HeadwayError("no pool may be scaled: max_replicas is min_replicas for all of them")
        self.seeds = [spec.seed + i for i in range(options.num_seeds)]
        tps: dict[str, float] = {}

        def known_tps() -> Mapping[str, float]:
            if not tps:
                found, notes = served_tps(self.scenario)
                tps.update(found)
                self.notes += notes
            return tps

        table = generate(spec.workload, spec.seed, self.scenario.base_dir)
        mean_tokens = float((table.prompt_tokens + table.column("output_tokens")).mean())
        batch_tier = None if spec.policies.admission is None else BATCH_TIER
        inputs = LadderInputs(fleet, mean_tokens, batch_tier, known_tps, options.forecaster)
        self.candidates = ladders(options.scalers, inputs)
        if options.clairvoyant and fleet.combos:
            self.notes.append("no clairvoyant plan and no bound: they are of pools, and the fleet has combos")
        elif options.clairvoyant:
            self.candidates += [
                ScalerCandidate("clairvoyant", f"head-room {room}", scaling, is_oracle=True)
                for room, scaling in timetables(self.scenario, known_tps())
            ]

    def answer(self, rehearsals: Rehearsals) -> StartUpPlan:
        wanted = [
            (with_scaling(self.scenario, candidate.scaling, seed), i == 0 and not self.scenario.fleet.combos)
            for i, candidate in enumerate(self.candidates)
            for seed in self.seeds
        ]
        found = rehearsals.all(
            [
                Rehearsal(scenario, partial(_rehearsed, with_bound), Rehearsed, ("scaling", with_bound))
                for scenario, with_bound in wanted
            ]
        )
        results, num = [], len(self.seeds)
        for i, candidate in enumerate(self.candidates):
            by_seed = tuple(found[i * num : (i + 1) * num])
            results.append(_result(candidate, by_seed))
        bounds = [each.bound for each in found[:num] if each.bound is not None]
        own = [each for each in results if not each.is_oracle]
        own = [structs.replace(each, on_frontier=is_on_frontier(each, own)) for each in own]
        oracles = tuple(each for each in results if each.is_oracle)
        chosen = cheapest(own, self.options.max_late)
        late = self.options.max_late if chosen is None else own[chosen].late
        return StartUpPlan(
            startup_s=self.startup_s,
            results=tuple(own),
            clairvoyant=oracles,
            bound_gpu_hours=fmean(bounds) if len(bounds) == num else None,
            chosen=chosen,
            kubernetes=sufficient(own, chosen, self.options.max_late),
            clairvoyant_gpu_hours=hours_at(oracles, late),
            against=() if chosen is None else comparisons(own[chosen], results),
        )


def _result(candidate: ScalerCandidate, by_seed: tuple[Rehearsed, ...]) -> ScalerResult:
    return ScalerResult(
        family=candidate.family,
        setting=candidate.setting,
        scaling=candidate.scaling,
        is_oracle=candidate.is_oracle,
        gpu_hours=fmean(each.gpu_hours for each in by_seed),
        late=fmean(each.late for each in by_seed),
        starts=fmean(each.starts for each in by_seed),
        by_seed=by_seed,
    )


class Point(Protocol):
    @property
    def gpu_hours(self) -> float: ...
    @property
    def late(self) -> float: ...


def comparisons(one: ScalerResult, results: Sequence[ScalerResult]) -> tuple[Comparison, ...]:
    """A setting compared with the other families; families that are always later are left out."""
    families = dict.fromkeys(each.family for each in results if each.family != one.family)
    found = (compared(one, [each for each in results if each.family == family]) for family in families)
    return tuple(each for each in found if each is not None)


def compared(one: ScalerResult, others: Sequence[ScalerResult]) -> Comparison | None:
    """A setting compared with the settings of another family; None if they are always later for some seed."""
    ratios = []
    for i, own in enumerate(one.by_seed):
        hours = hours_at([each.by_seed[i] for each in others], own.late)
        if not hours:
            return None
        ratios.append(own.gpu_hours / hours)
    return Comparison(others[0].family, fmean(ratios), interval(ratios))


def is_on_frontier(one: Point, others: Sequence[Point]) -> bool:
    return not any(
        other.gpu_hours <= one.gpu_hours
        and other.late <= one.late
        and (other.gpu_hours, other.late) != (one.gpu_hours, one.late)
        for other in others
    )


def cheapest(results: Sequence[ScalerResult], max_late: float) -> int | None:
    able = [i for i, each in enumerate(results) if each.late <= max_late]
    return min(able, key=lambda i: (results[i].gpu_hours, results[i].late), default=None)


def sufficient(results: Sequence[ScalerResult], chosen: int | None, max_late: float) -> int | None:
    """Index in `results` of the cheapest autoscaler of Kubernetes that keeps enough requests in time; None if there is
    none, or if it uses over `NEAR` more GPU-hours than the chosen scaler."""
    able = [i for i, each in enumerate(results) if each.family in KUBERNETES and each.late <= max_late]
    best = min(able, key=lambda i: results[i].gpu_hours, default=None)
    if best is None or chosen is None or results[best].gpu_hours > (1.0 + NEAR) * results[chosen].gpu_hours:
        return None
    return best


def hours_at(results: Sequence[Point], late: float) -> float | None:
    """GPU-hours of these settings at this lateness, interpolated linearly on their frontier.

    None if all settings are later. If all are late less often, the fewest GPU-hours.
    """
    frontier = sorted((each for each in results if is_on_frontier(each, results)), key=lambda each: each.gpu_hours)
    for i, each in enumerate(frontier):
        if each.late <= late:
            if i == 0:
                return each.gpu_hours
            before = frontier[i - 1]
            share = (before.late - late) / (before.late - each.late)
            return before.gpu_hours + share * (each.gpu_hours - before.gpu_hours)
    return None


def without_scaling(document: Mapping[str, Any]) -> dict[str, Any]:
    """A copy without variants and scaling; the first variant's other policies apply."""
    made: dict[str, Any] = copy.deepcopy(dict(document))
    variants_ = made.pop("variants", None)
    policies = dict(made.get("policies") or {})
    if variants_:
        policies |= {key: value for key, value in variants_[0].items() if key != "name"}
    policies.pop("scaling", None)
    made["policies"] = {key: value for key, value in policies.items() if value is not None}
    return made


def with_start(document: Mapping[str, Any], startup_s: float) -> dict[str, Any]:
    """A copy in which every replica is new and starts in this many seconds."""
    made = without_scaling(document)
    made.pop("provisioning", None)
    for pool in made.get("fleet") or ():
        if isinstance(pool, dict):
            pool["start_s"] = startup_s
    for combo in made.get("combos") or ():
        for side in ("prefill", "decode", "aggregated"):
            if isinstance(combo, dict) and isinstance(combo.get(side), dict):
                combo[side]["start_s"] = startup_s
    return made


def with_scaling(scenario: Scenario, scaling: Mapping[str, Any], seed: int) -> Scenario:
    policies = structs.replace(scenario.spec.policies, scaling=dict(scaling))
    return dataclasses.replace(scenario, spec=structs.replace(scenario.spec, policies=policies, seed=seed))


def scenario_yaml(answer: StartUpPlan, document: Mapping[str, Any], base_dir: Path) -> str:
    """The chosen scaler as a scenario file. Raises HeadwayError if none is late seldom enough."""
    if answer.chosen is None:
        raise HeadwayError("no scaler is late seldom enough")
    best = answer.results[answer.chosen]
    made = without_scaling(document) if answer.startup_s is None else with_start(document, answer.startup_s)
    made["policies"]["scaling"] = msgspec.to_builtins(best.scaling)
    head = f"# Planned by headway plan scaling: {best.gpu_hours:,.1f} GPU-hours, {best.late:.2%} of requests late\n"
    return head + strict_yaml.dump(with_absolute_paths(made, base_dir))
