"""What a scenario asks of the cascade planner."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from msgspec import structs

from headway import catalog, scenario, userfile
from headway.catalog.coefficients import Coefficients
from headway.control.policies import Policies
from headway.core.errors import unknown
from headway.core.fleet import Pool
from headway.fleetfile import coefficients_of
from headway.planner.cascade.problem import Problem, Target
from headway.userfile import Places
from headway.workload.quality import Scores
from headway.workload.quality_spec import table
from headway.workload.spec import generate

HELD_OUT = 0.5
"""The share of the score table that a plan is not made on."""


@dataclass(frozen=True)
class Asked:
    """One scenario: what is planned for, and what is rehearsed."""

    problem: Problem
    """With the part of the table that plans are made on."""
    held_out: Scores
    document: dict[str, Any]
    base_dir: Path
    policies: Policies
    seed: int
    entries: Mapping[str, int]
    """The pool of the document that a model's new pools are made after, by model: its own, else the first."""
    coefficients: Mapping[str, Coefficients]
    """Of the step-time model, by model: those of the same pool."""
    replan: Any = None
    """What the document said of planning anew; what is rehearsed stays as it is planned."""


def ask(
    document: dict[str, Any],
    places: Places,
    base_dir: Path,
    target: Target,
    *,
    num_gpus: int | None = None,
    gpus_per_server: int | None = None,
    rps: float | None = None,
) -> Asked:
    """What a scenario asks for. HeadwayError where its workload has no scores or its fleet no pool."""
    document = copy.deepcopy(document)
    replan = document["cascade"].pop("replan", None) if isinstance(document.get("cascade"), dict) else None
    if rps is not None:
        document.setdefault("workload", {})["arrivals"] = rps
    chosen = scenario.assemble(copy.deepcopy(document), places, base_dir)
    spec = chosen.spec
    if not chosen.fleet.pools:
        raise places.error(("fleet",), "expected a pool; its GPU and engine are planned with")
    if spec.workload.quality is None or spec.workload.arrivals is None:
        raise places.error(("workload",), "expected arrivals, and quality: what each model's answers score")
    with places.at("workload", "quality"):
        scores = table(spec.workload.quality, base_dir)
    models = tuple(catalog.model(name) for name in _stages(spec.cascade, scores, places))
    own, held_out = scores.stages([model.name for model in models]).split(1 - HELD_OUT, spec.seed)
    first = chosen.fleet.pools[0]
    problem = Problem(
        models=models,
        gpu=first.gpu,
        engine=first.engine,
        num_gpus=num_gpus or sum(pool.replicas * pool.parallel.num_gpus for pool in chosen.fleet.pools),
        rate_rps=_rate_rps(chosen, places),
        scores=own,
        target=target,
        gpus_per_server=gpus_per_server,
        judge_s=0.27 if spec.cascade is None else spec.cascade.judge_s,
        use_all=True,
        max_kinds=1,  # with two, the same effort finds plans that are twice as slow, in ten times as long
    )
    policies = structs.replace(scenario.policies_of(chosen), cascade=None)
    entries = _entries(problem.names, chosen.fleet.pools)
    known = coefficients_of(spec, chosen.fleet, base_dir, places)
    coefficients = {name: known[chosen.fleet.pools[i].name] for name, i in entries.items()}
    return Asked(problem, held_out, document, base_dir, policies, spec.seed, entries, coefficients, replan)


def _stages(said: Any, scores: Scores, places: Places) -> tuple[str, ...]:
    """The cascade's models, else the table's."""
    names = scores.models if said is None else said.models
    for i, name in enumerate(names):
        if name not in scores.models:
            raise unknown("model", name, scores.models, places.where(("cascade", "models", i)))
    return tuple(names)


def _rate_rps(chosen: scenario.Scenario, places: Places) -> float:
    rows = generate(chosen.spec.workload, chosen.spec.seed, chosen.base_dir)
    span_s = float(rows.arrival_s[-1] - rows.arrival_s[0]) if len(rows) > 1 else 0.0
    if span_s <= 0:
        raise places.error(("workload",), "expected two requests or more, at different times")
    return (len(rows) - 1) / span_s


def _entries(names: tuple[str, ...], pools: tuple[Pool, ...]) -> dict[str, int]:
    """Of the pools with the planner's GPU and engine."""
    first, own = pools[0], dict[str, int]()
    for i, pool in enumerate(pools):
        if (pool.gpu, pool.engine) == (first.gpu, first.engine):
            own.setdefault(pool.model.name, i)
    return {name: own.get(name, 0) for name in names}


def read(path: Path) -> tuple[dict[str, Any], Places]:
    """A scenario file, with a name."""
    data, places = userfile.read(path)
    data.setdefault("name", path.stem)
    return data, places


def at_rate(asked: Asked, rate_rps: float) -> Asked:
    """The same requests, arriving at another rate."""
    document = copy.deepcopy(asked.document)
    document["workload"]["arrivals"] = rate_rps
    return replace(asked, document=document, problem=replace(asked.problem, rate_rps=rate_rps))
