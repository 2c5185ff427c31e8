"""Capacity plans of a scenario: the requests, the candidates, the plan, and the plan as a scenario file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import UNSET, Struct, UnsetType, field, structs

from headway import catalog
from headway.catalog.coefficients import versions_notes
from headway.catalog.errors import prediction_errors
from headway.config import strict_yaml
from headway.config.fleet import own_of
from headway.config.proxied import without_models
from headway.config.scenario import StepTimes, listed, variants, with_absolute_paths
from headway.config.spec import PolicySpec, Spec
from headway.config.strict_yaml import Places
from headway.core.errors import HeadwayError
from headway.core.fleet import Parallel
from headway.metrics.latency import nothing_measured
from headway.planning.capacity.bounds import ArrivingRequests, Mask, lower_bounds
from headway.planning.capacity.problem import (
    LATENCY_SLOS,
    CandidateBounds,
    CapacityCandidate,
    CapacityPlan,
    CapacityProblem,
    LikelyTarget,
    LongerRun,
    RehearsalMetrics,
    Situation,
    Speculative,
    Targets,
    misses,
)
from headway.planning.capacity.rehearsal import CapacityRehearsal, fleet_document
from headway.planning.capacity.search import cheapest_fleet
from headway.planning.rehearsals import Progress, Rehearsals, Resources, Source
from headway.planning.together import together_in
from headway.report.model_error import error_class
from headway.workload.generate import generate
from headway.workload.spec import WorkloadSpec, resolved
from headway.workload.table import Workload

DEFAULT_GPUS = ("a100-80gb", "h100-80gb-sxm", "h200-141gb-sxm", "l40s")
"""The GPU types with measured step times."""
DEFAULT_ATTAINMENT = 0.99
GROWING = 1.5
"""Largest growth of waits, as a factor from one third of a rehearsal to the next, at which waits count as settled."""


class CapacityOptions(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Candidates, targets and what-ifs. Empty tuples mean the scenario's values, otherwise the defaults."""

    gpus: tuple[str, ...] = ()
    tps: tuple[int, ...] = (1, 2, 4, 8)
    routings: tuple[str, ...] = ()
    orderings: tuple[str, ...] = ()
    speculative: Speculative = "on"
    targets: Targets = field(default_factory=Targets)
    situations: tuple[Situation, ...] = (Situation(load=3.0), Situation(lost_replicas=1))
    max_replicas: int = 64
    longer: int = 4
    """The plan must also meet its targets with this many times the requests; if it does not, all candidates are
    rehearsed with that many requests."""
    most_requests: int = 80_000
    """Maximum number of requests of the longest rehearsal."""


def plan(
    source: Source, options: CapacityOptions, resources: Resources, stops: bool = False
) -> tuple[CapacityPlan, CapacityRehearsal]:
    """The cheapest fleet for a scenario's workload, and the rehearsals behind it.

    The first pool of the document's fleet gives the model and the engine. The plan is the same with any number of
    worker processes. `stops`: rehearsals end as soon as a target is certain to be missed (`stopped`). Raises
    HeadwayError if the document is invalid or there is no target.
    """
    if not options.gpus and not _names_gpu(source.document):
        options = structs.replace(options, gpus=DEFAULT_GPUS)
    asked = _asked(source, options)
    regions = tuple(dict.fromkeys(pool.region for pool in asked.spec.fleet if pool.region))
    rehearsal = CapacityRehearsal(
        asked.document,
        source.places,
        source.base_dir,
        targets=asked.targets,
        regions=regions,
        span_s=asked.requests.span_s or 0.0,
        rehearsals=Rehearsals(replace(resources, progress=None)),
    )
    candidates = tuple(_candidates(asked.spec, options))
    bounds = [_bounds(rehearsal, each, asked.requests) for each in candidates]
    _raise_common_reason(bounds)
    problem = CapacityProblem(
        candidates, asked.targets, max(1, len(regions)), options.max_replicas, _situations(options, regions)
    )
    best = _lasting(problem, bounds, rehearsal, options, resources.progress, stops)
    notes = (*asked.notes, *_caveats(best, rehearsal))
    return structs.replace(best, notes=notes, likely=_likely(best, rehearsal)), rehearsal


@dataclass
class _Asked:
    """The planning task."""

    document: dict[str, Any]
    """The document completed from the options, with the targets as SLOs of requests without their own."""
    spec: Spec
    requests: ArrivingRequests
    targets: Targets
    notes: list[str]


def _asked(source: Source, options: CapacityOptions) -> _Asked:
    document, spec, notes = _checked(*source, options)
    table, left_out = _rows_of_its_model(spec, source.base_dir)
    if left_out:
        notes.append(f"the trace's requests for other models are left out: {', '.join(left_out)}")
        document["workload"] = without_models(document["workload"], left_out)
        spec = structs.replace(spec, workload=strict_yaml.convert(document["workload"], WorkloadSpec, Places()))
    requests, own_slo = arriving(spec, table)
    targets = _targets(options.targets, spec, bool(own_slo.any()))
    own_slos = document.get("slo") or {}
    document["slo"] = _slo(own_slos, targets)
    source.places.warned.update(("slo", key) for key in document["slo"] if key not in own_slos)
    if requests.counted is not None and not any(document["slo"].values()):
        requests = replace(requests, counted=requests.counted & own_slo)
    return _Asked(document, spec, requests, targets, notes)


def _likely(best: CapacityPlan, rehearsal: CapacityRehearsal) -> tuple[LikelyTarget, ...]:
    """The probabilities that measured runs meet the plan's targets, from the longest rehearsal."""
    measured = best.measured if best.longer is None else best.longer.measured
    if best.choice is None or best.choice.replicas is None or measured is None:
        return ()
    return likely_targets(rehearsal, best.choice.candidate, best.choice.replicas, measured)


def likely_targets(
    rehearsal: CapacityRehearsal, candidate: CapacityCandidate, replicas: int, measured: RehearsalMetrics
) -> tuple[LikelyTarget, ...]:
    """The probability that a measured run meets each latency target, if the errors of such predictions are known."""
    chosen = rehearsal.scenario(candidate, replicas, Situation())
    used = StepTimes(chosen).coefficients
    pools = [(pool.model, used[pool.name]) for pool in chosen.fleet.all_pools]
    wanted, found, errors = structs.replace(error_class(pools, 0.0, 0.0), load=measured.load), [], prediction_errors()
    for slo in LATENCY_SLOS:
        target_s, predicted_s = getattr(rehearsal.targets, slo), getattr(measured, slo)
        if target_s is None or not predicted_s:
            continue
        metric = slo.removesuffix("_s")
        band = errors.band(predicted_s, metric, wanted)
        chance = errors.chance(predicted_s, target_s, metric, wanted)
        if band is not None and chance is not None:
            found.append(LikelyTarget(slo, target_s, predicted_s, band, chance))
    return tuple(found)


def _lasting(
    problem: CapacityProblem,
    bounds: list[CandidateBounds],
    rehearsal: CapacityRehearsal,
    options: CapacityOptions,
    progress: Progress | None,
    stops: bool,
) -> CapacityPlan:
    """The cheapest fleet whose plan also meets the targets in a longer run.

    A fleet near saturation builds up its queue over many requests. The plan is therefore rehearsed with `longer` times
    as many requests. If it then misses a target, the search starts again with that length.
    """
    while True:
        together = together_in(rehearsal.rehearsals.resources.pool)
        evaluate = rehearsal.until_missed if stops else rehearsal
        best = cheapest_fleet(problem, bounds, evaluate, progress, rehearsal.meets_targets, together)
        num = rehearsal.num_requests
        more = None if num is None else num * options.longer
        if best.choice is None or best.choice.replicas is None or more is None or options.longer <= 1:
            return best
        longer = rehearsal.longer(options.longer)
        measured = longer(best.choice.candidate, best.choice.replicas, Situation())
        missed = misses(measured, problem.targets)
        if not missed or more * options.longer > options.most_requests:
            return structs.replace(best, longer=LongerRun(measured, missed))
        rehearsal.lengthen(options.longer)


def _caveats(best: CapacityPlan, rehearsal: CapacityRehearsal) -> Iterator[str]:
    """Why the plan may miss its targets in a longer run, or with the engine as configured."""
    if best.longer is not None and best.longer.misses:
        what = ", ".join(best.longer.misses)
        yield f"with {best.longer.measured.num_requests:,} requests the plan misses {what}: take a replica more"
    growth = best.measured.wait_growth if best.measured is not None else None
    if best.longer is None and growth is not None and growth > GROWING:
        yield f"waits still grow at the end of the rehearsal (TTFT x{growth:.1f} from its middle to its last third)"
    if best.choice is None:
        return
    chosen = rehearsal.scenario(best.choice.candidate, best.choice.replicas or 1, Situation())
    yield from versions_notes((each.engine.name, each.engine.version) for each in chosen.fleet.pools)
    if not (best.measured and best.measured.calibrated):
        what = f"step times of {best.choice.candidate.gpu} are not calibrated ({', '.join(best.choice.uncalibrated)})"
        yield f"{what}: trust the order, not the numbers"


def scenario_yaml(best: CapacityPlan, rehearsal: CapacityRehearsal) -> str:
    """The plan as a scenario file for `headway simulate`. Raises HeadwayError if there is no plan."""
    if best.choice is None or best.choice.replicas is None:
        raise HeadwayError("no plan meets the targets, so there is none to write")
    document = fleet_document(rehearsal.document, best.choice.candidate, best.choice.replicas, rehearsal.regions)
    document = with_absolute_paths(document, rehearsal.base_dir)
    targets = structs.asdict(best.targets).items()
    shown = ", ".join(f"{name} {value:g}" for name, value in targets if value is not None)
    lines = [
        f"# The cheapest fleet that headway plan capacity found: ${best.objective_usd_per_hour:,.2f} an hour",
        f"# for {shown}. With one replica less it misses: {', '.join(best.binds) or 'nothing that was looked at'}.",
    ]
    return "\n".join(lines) + "\n" + strict_yaml.dump(document)


def _checked(
    document: Mapping[str, Any], places: Places, base_dir: Path, options: CapacityOptions
) -> tuple[dict[str, Any], Spec, list[str]]:
    """The document completed from the options, its specification, and notes. Whether models fit is not checked here."""
    completed, notes = {**document, "name": document.get("name", "capacity")}, []
    pools = document.get("fleet")
    if not _names_gpu(document) and isinstance(pools, list) and pools:
        completed["fleet"] = [{**pools[0], "gpu": options.gpus[0]}, *pools[1:]]
    if completed.pop("faults", None):
        notes.append("the scenario's faults are left out; ask for --what-if lose=1")
    if completed.get("variants"):
        spec = strict_yaml.convert(completed, Spec, places)
        own = dict(completed["variants"][0]).items()
        if len(spec.variants) > 1:
            what = (
                f"the scenario has {len(spec.variants)} variants: this plan is for the first, {spec.variants[0].name}"
            )
            notes.append(f"{what}; --routing and --ordering compare several")
        completed["policies"] = (completed.get("policies") or {}) | {
            key: value for key, value in own if key not in ("name", "scaling")
        }
        del completed["variants"]
    spec = strict_yaml.convert(completed, Spec, places)
    if len({str(pool.model) for pool in spec.fleet}) > 1:
        what = (
            "several models; a capacity plan is for one: name it (--model), or plan for all with `headway plan fleet`"
        )
        raise places.error(("fleet",), what)
    first = spec.fleet[0]
    with places.at("fleet", 0, "model"):
        if isinstance(first.model, str):
            own_of(spec, places).model(first.model, base_dir)
        else:
            catalog.model_of_config(first.model.config, base_dir, first.model.assume)
    completed["workload"] = strict_yaml.plain(resolved(spec.workload))
    return completed, spec, notes


def _names_gpu(document: Mapping[str, Any]) -> bool:
    """Whether the first pool names a GPU. True if there is no pool, because that error is raised elsewhere."""
    pools = document.get("fleet")
    return not (isinstance(pools, list) and pools and isinstance(pools[0], dict)) or "gpu" in pools[0]


def _candidates(spec: Spec, options: CapacityOptions) -> Iterator[CapacityCandidate]:
    """Every GPU with every tp, routing and ordering. Raises HeadwayError for an unknown name."""
    names, own = options.gpus or tuple(pool.gpu for pool in spec.fleet), own_of(spec, Places())
    gpus = {own.gpu(name).name: own.gpu(name) for name in names}
    routings = options.routings or _names("routing", spec.policies.routing)
    orderings = options.orderings or _names("ordering", spec.policies.ordering)
    first = spec.fleet[0]
    drafts = _drafts(first.speculative is not None, options)
    for gpu in gpus.values():
        own_price = first.usd_per_gpu_hour if own.gpu(first.gpu).name == gpu.name else None
        price = gpu.usd_per_hour if own_price is None else own_price
        for tp in dict.fromkeys(options.tps):
            parallel = Parallel(tp, first.pp, first.ep, first.dp)
            for routing, ordering, each in dict.fromkeys(product(routings, orderings, drafts)):
                yield CapacityCandidate(gpu.name, parallel, routing, price * parallel.num_gpus, ordering, each)


def _drafts(has_drafts: bool, options: CapacityOptions) -> tuple[bool | UnsetType, ...]:
    """Whether to use speculative decoding: the requested cases."""
    if not has_drafts:
        if options.speculative != "on":
            raise HeadwayError("--speculative: the scenario's first pool has no `speculative` to compare with")
        return (UNSET,)
    return {"on": (True,), "off": (False,), "both": (False, True)}[options.speculative]


def _names(key: str, policies: PolicySpec | list[PolicySpec]) -> tuple[str, ...]:
    names = [each for each in listed(policies) if isinstance(each, str)]
    if len(names) < len(listed(policies)):
        raise HeadwayError(f"policies.{key}: a policy with arguments cannot be planned with yet; expected names")
    return tuple(names)


def _bounds(rehearsal: CapacityRehearsal, candidate: CapacityCandidate, requests: ArrivingRequests) -> CandidateBounds:
    try:
        chosen = rehearsal.scenario(candidate, max(1, len(rehearsal.regions)), Situation())
        for variant in variants(chosen):
            rehearsal.rehearsals.resources.simulator.policies(variant)
    except HeadwayError as error:
        return CandidateBounds(reason=str(error).rpartition("fleet[0]: ")[2])
    pool = chosen.fleet.pools[0]
    used = StepTimes(chosen).coefficients[pool.name]
    if not pool.engine.prefix_caching:
        requests = replace(requests, computed_tokens=requests.prompt_tokens)
    return structs.replace(lower_bounds(pool, requests, rehearsal.targets, used), uncalibrated=used.estimated)


def _raise_common_reason(bounds: list[CandidateBounds]) -> None:
    """Raise HeadwayError if one reason rules out every candidate, because that is a mistake in the scenario."""
    reasons = {each.reason for each in bounds if each.ttft_p99_s is None}
    if len(bounds) > 1 and len(reasons) == 1 and None not in reasons and all(b.ttft_p99_s is None for b in bounds):
        raise HeadwayError(str(reasons.pop()))


def _situations(options: CapacityOptions, regions: tuple[str, ...]) -> tuple[Situation, ...]:
    """The requested what-ifs, and the loss of a region if there are several."""
    situations = options.situations
    if any(each.lost_regions for each in situations) and len(regions) < 2:
        raise HeadwayError("--what-if lose-region: the scenario's pools are not in several regions")
    if len(regions) > 1 and not any(each.lost_regions for each in situations):
        situations = (*situations, Situation(lost_regions=1))
    return tuple(dict.fromkeys(situations))


def _rows_of_its_model(spec: Spec, base_dir: Path) -> tuple[Workload, list[str]]:
    """The requests, and the models of a trace that are left out: all except the planned model, if the trace has it."""
    table = generate(spec.workload, spec.seed, base_dir)
    name = spec.fleet[0].model
    if spec.workload.trace is None or name not in table.models:
        return table, []
    codes = table.columns["model"]
    left_out = [code for code, each in enumerate(table.models) if each not in (name, "") and (codes == code).any()]
    if not left_out:
        return table, []
    return table.take(np.flatnonzero(~np.isin(codes, left_out))), [table.models[code] for code in left_out]


def arriving(spec: Spec, table: Workload) -> tuple[ArrivingRequests, Mask]:
    """The workload's requests, and a mask of those with their own SLOs."""
    reactive = resolved(spec.workload).reacts
    prompt = table.prompt_tokens.astype(float)
    computed = prompt.copy()
    if table.prefix is not None:
        shared = np.add.reduceat(np.append(table.prefix.tokens, 0), table.prefix.offsets[:-1]).astype(float)
        shared[np.diff(table.prefix.offsets) == 0] = 0
        computed = np.maximum(prompt - shared, 1.0)
    if not len(table):
        raise HeadwayError(nothing_measured(table.arrival_s, 0.0))
    span = None if reactive else float(table.arrival_s[-1] - table.arrival_s[0])
    counted = None if span is None else table.arrival_s >= spec.simulation.warmup_s
    if counted is not None and not counted.any():
        raise HeadwayError(nothing_measured(table.arrival_s, spec.simulation.warmup_s))
    has_slo = np.zeros(len(table), bool)
    for name in ("slo_ttft_s", "slo_tpot_s", "slo_e2e_s", "deadline_s"):
        if name in table.columns:
            has_slo |= ~np.isnan(table.columns[name])
    return ArrivingRequests(prompt, computed, table.output_tokens.astype(float), span, counted), has_slo


def _targets(targets: Targets, spec: Spec, has_slo: bool) -> Targets:
    """The given targets. Without any: the requests must meet their own SLOs."""
    has_slo = has_slo or any(value is not None for value in structs.asdict(spec.slo).values())
    limits = (targets.ttft_p99_s, targets.tpot_p99_s, targets.e2e_p99_s)
    if targets.attainment is not None and not has_slo and limits == (None,) * 3:
        raise HeadwayError("attainment: requests have no SLO; give --ttft-p99, --tpot-p99 or --e2e-p99, or slo:")
    if targets.attainment is None and limits == (None,) * 3:
        if not has_slo:
            raise HeadwayError("no SLO: give --ttft-p99, --tpot-p99 or --e2e-p99, or slo: in the scenario")
        return Targets(attainment=DEFAULT_ATTAINMENT)
    return targets


def _slo(own: dict[str, Any], targets: Targets) -> dict[str, float]:
    """SLOs of requests without their own: the scenario's, otherwise the targets."""
    limits = {"ttft_s": targets.ttft_p99_s, "tpot_s": targets.tpot_p99_s, "e2e_s": targets.e2e_p99_s}
    return {name: value for name, value in limits.items() if value is not None} | own
