"""Capacity plans of a scenario: what arrives, the candidates, rehearsals by the simulator, and a cache of them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace as with_
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import yaml
from msgspec import Struct, field, structs

from headway import catalog
from headway.catalog.load import coefficients_in
from headway.config import strict_yaml
from headway.config.spec import Spec
from headway.config.strict_yaml import Places
from headway.core.errors import HeadwayError
from headway.core.fleet import Parallel
from headway.planning.capacity import search as planner
from headway.planning.capacity.bounds import Demand, lower_bounds
from headway.planning.capacity.problem import Candidate, Evaluator, Floor, Plan, Problem, Situation, Targets
from headway.planning.capacity.rehearsal import Rehearsal, fleet_of
from headway.workload.generate import generate
from headway.workload.spec import resolved

DEFAULT_GPUS = ("a100-80gb", "h100-80gb-sxm", "h200-141gb-sxm", "l40s")
"""Those whose step times are measured."""
DEFAULT_ATTAINMENT = 0.99


class Question(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What to plan for. Empty lists: what the scenario says, else the defaults."""

    gpus: tuple[str, ...] = ()
    tps: tuple[int, ...] = (1, 2, 4, 8)
    routings: tuple[str, ...] = ()
    orderings: tuple[str, ...] = ()
    targets: Targets = field(default_factory=Targets)
    situations: tuple[Situation, ...] = (Situation(load=3.0), Situation(lost_replicas=1))
    max_replicas: int = 64


def plan(
    document: dict[str, Any],
    places: Places,
    base_dir: Path,
    question: Question,
    cache_dir: Path | None = None,
    tell: planner.Tell | None = None,
) -> tuple[Plan, Rehearsal]:
    """The cheapest fleet for a scenario's workload, and the rehearsals that it rests on.

    `document` is what a scenario file holds; of its fleet, the first pool says the model and the engine.
    HeadwayError where it does not hold together, or nothing is asked.
    """
    if not question.gpus and not _names_gpu(document):
        question = structs.replace(question, gpus=DEFAULT_GPUS)
    document, spec, notes = _base(document, places, base_dir, question)
    demand, has_slo = _demand(spec, base_dir)
    targets = _targets(question.targets, spec, has_slo)
    document["slo"] = _slo(document.get("slo"), targets)
    regions = tuple(dict.fromkeys(pool.region for pool in spec.fleet if pool.region))
    rehearsal = Rehearsal(document, places, base_dir, targets, regions, demand.span_s or 0.0, cache_dir)
    candidates = tuple(_candidates(document, spec, question))
    floors = [_floor(rehearsal, each, demand) for each in candidates]
    _same_mistake(floors)
    problem = Problem(
        candidates, targets, max(1, len(regions)), question.max_replicas, _situations(question, regions)
    )  # fmt: skip
    evaluate: Evaluator = rehearsal
    found = planner.plan(problem, floors, evaluate, tell)
    if found.choice is not None and not (found.measured and found.measured.calibrated):
        notes.append("step times of the plan's GPU are not calibrated: trust the order, not the numbers")
    return structs.replace(found, notes=tuple(notes)), rehearsal


def scenario_yaml(found: Plan, rehearsal: Rehearsal) -> str:
    """The plan as a scenario file that `headway simulate` runs. HeadwayError where there is no plan."""
    if found.choice is None or found.choice.replicas is None:
        raise HeadwayError("no plan meets the targets, so there is none to write")
    chosen, replicas = found.choice.candidate, found.choice.replicas
    document = fleet_of(rehearsal.document, chosen, replicas, rehearsal.regions)
    _absolute(document, rehearsal.base_dir)
    asked = ", ".join(f"{name} {value:g}" for name, value in structs.asdict(found.targets).items() if value is not None)
    lines = [
        f"# The cheapest fleet that headway plan capacity found: ${found.objective_usd_per_hour:,.2f} an hour",
        f"# for {asked}. With one replica less it misses: {', '.join(found.binds) or 'nothing that was looked at'}.",
    ]
    return "\n".join(lines) + "\n" + yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=100)


def _base(
    document: dict[str, Any], places: Places, base_dir: Path, question: Question
) -> tuple[dict[str, Any], Spec, list[str]]:
    """The document with what the question says filled in, checked but for its fleet's fit."""
    made, notes = copy.deepcopy(document), []
    made.setdefault("name", "capacity")
    if not _names_gpu(made) and isinstance(made.get("fleet"), list) and made["fleet"]:
        made["fleet"][0]["gpu"] = question.gpus[0]
    if made.pop("faults", None):
        notes.append("the scenario's faults are left out; ask for --what-if lose=1")
    spec = strict_yaml.convert(made, Spec, places)
    if len({str(pool.model) for pool in spec.fleet}) > 1:
        raise places.error(("fleet",), "several models; a capacity plan is for one")
    first = spec.fleet[0]
    with places.at("fleet", 0, "model"):
        if isinstance(first.model, str):
            catalog.model(first.model)
        else:
            catalog.model_from_config(base_dir / first.model.config)
    made["workload"] = _said(msgspec.to_builtins(resolved(spec.workload)))
    return made, spec, notes


def _said(section: Any) -> Any:
    """Without what is None."""
    if isinstance(section, dict):
        return {name: _said(value) for name, value in section.items() if value is not None}
    return [_said(each) for each in section] if isinstance(section, list | tuple) else section


def _names_gpu(document: dict[str, Any]) -> bool:
    """Whether the first pool says a GPU; True where there is no pool to say it, which is an error of its own."""
    pools = document.get("fleet")
    return not (isinstance(pools, list) and pools and isinstance(pools[0], dict)) or "gpu" in pools[0]


def _candidates(document: dict[str, Any], spec: Spec, question: Question) -> Iterator[Candidate]:
    """Every GPU with every tp, routing and ordering; a name that there is not is an error."""
    own = tuple(pool.gpu for pool in spec.fleet) if not question.gpus else question.gpus
    gpus = {catalog.gpu(name).name: catalog.gpu(name) for name in own}
    routings = question.routings or _listed("routing", spec.policies.routing)
    orderings = question.orderings or _listed("ordering", spec.policies.ordering)
    first = spec.fleet[0]
    for gpu in gpus.values():
        own_price = first.usd_per_gpu_hour if catalog.gpu(first.gpu).name == gpu.name else None
        price = gpu.usd_per_hour if own_price is None else own_price
        for tp in dict.fromkeys(question.tps):
            parallel = Parallel(tp, first.pp, first.ep, first.dp)
            for routing, ordering in dict.fromkeys(product(routings, orderings)):
                yield Candidate(gpu.name, parallel, routing, price * parallel.num_gpus, ordering)


def _listed(key: str, policies: Any) -> tuple[str, ...]:
    """The names of a scenario's policies of one kind."""
    names = policies if isinstance(policies, list) else [policies]
    if not all(isinstance(name, str) for name in names):
        raise HeadwayError(f"policies.{key}: a policy with arguments cannot be planned with yet; expected names")
    return tuple(names)


def _floor(rehearsal: Rehearsal, candidate: Candidate, demand: Demand) -> Floor:
    try:
        chosen = rehearsal.scenario(candidate, max(1, len(rehearsal.regions)), Situation())
    except HeadwayError as error:
        return Floor(reason=str(error).rpartition("fleet[0]: ")[2])
    pool, known = chosen.fleet.pools[0], chosen.spec.fleet[0].coefficients
    own = None if known is None else coefficients_in(rehearsal.base_dir / known, pool.gpu.name, pool.engine.name)
    if not pool.engine.prefix_caching:
        demand = with_(demand, computed_tokens=demand.prompt_tokens)
    return lower_bounds(pool, demand, rehearsal.targets, own)


def _same_mistake(floors: list[Floor]) -> None:
    """A mistake in the scenario rules every candidate out in the same words."""
    reasons = {floor.reason for floor in floors if floor.ttft_p99_s is None}
    if len(floors) > 1 and len(reasons) == 1 and None not in reasons and all(f.ttft_p99_s is None for f in floors):
        raise HeadwayError(str(reasons.pop()))


def _situations(question: Question, regions: tuple[str, ...]) -> tuple[Situation, ...]:
    """Those asked for, and a region lost where there are several."""
    asked = question.situations
    if any(each.lost_regions for each in asked) and len(regions) < 2:
        raise HeadwayError("--what-if lose-region: the scenario's pools are not in several regions")
    if len(regions) > 1 and not any(each.lost_regions for each in asked):
        asked = (*asked, Situation(lost_regions=1))
    return tuple(dict.fromkeys(asked))


def _demand(spec: Spec, base_dir: Path) -> tuple[Demand, bool]:
    """What arrives, and whether requests bring SLOs of their own."""
    table = generate(spec.workload, spec.seed, base_dir)
    reactive = resolved(spec.workload).sessions is not None or spec.workload.concurrency is not None
    prompt = table.prompt_tokens.astype(float)
    computed = prompt.copy()
    if table.prefix is not None:
        shared = np.add.reduceat(np.append(table.prefix.tokens, 0), table.prefix.offsets[:-1]).astype(float)
        shared[np.diff(table.prefix.offsets) == 0] = 0
        computed = np.maximum(prompt - shared, 1.0)
    span = None if reactive or not len(table) else float(table.arrival_s[-1] - table.arrival_s[0])
    has_slo = any(name in table.columns for name in ("slo_ttft_s", "slo_tpot_s", "slo_e2e_s", "deadline_s"))
    return Demand(prompt, computed, table.output_tokens.astype(float), span), has_slo


def _targets(asked: Targets, spec: Spec, has_slo: bool) -> Targets:
    """What is asked; without any, that requests meet their own SLOs."""
    has_slo = has_slo or any(value is not None for value in structs.asdict(spec.slo).values())
    limits = (asked.ttft_p99_s, asked.tpot_p99_s, asked.e2e_p99_s)
    if asked.attainment is not None and not has_slo and limits == (None,) * 3:
        raise HeadwayError("attainment: requests have no SLO; give --ttft-p99, --tpot-p99 or --e2e-p99, or slo:")
    if asked.attainment is None and limits == (None,) * 3:
        if not has_slo:
            raise HeadwayError("no SLO: give --ttft-p99, --tpot-p99 or --e2e-p99, or slo: in the scenario")
        return Targets(attainment=DEFAULT_ATTAINMENT)
    return asked


def _slo(own: dict[str, Any] | None, targets: Targets) -> dict[str, float]:
    """What requests without an SLO of their own are held to: the scenario's, else the targets."""
    asked = {"ttft_s": targets.ttft_p99_s, "tpot_s": targets.tpot_p99_s, "e2e_s": targets.e2e_p99_s}
    return {name: value for name, value in asked.items() if value is not None} | (own or {})


def _absolute(document: dict[str, Any], base_dir: Path) -> None:
    """Paths that hold from any folder. Changes the document."""
    workload = document["workload"]
    if isinstance(workload.get("trace"), str):
        workload["trace"] = {"path": workload["trace"]}
    fleet = document["fleet"]
    for section in (workload.get("trace"), workload.get("arrivals"), *fleet, *(pool["model"] for pool in fleet)):
        for name in ("path", "config", "coefficients"):
            if isinstance(section, dict) and name in section:
                section[name] = str((base_dir / section[name]).absolute())
