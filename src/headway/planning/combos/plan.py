"""Plans of GPU combos for scenarios: goodput profiled by simulation and kept by content, the plan as a fleet."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import yaml
from msgspec import Struct

from headway import __version__, catalog, scenario
from headway.config import strict_yaml
from headway.config.strict_yaml import Places
from headway.core.errors import HeadwayError
from headway.metrics.latency import DefaultSlo as Limits
from headway.metrics.latency import Sample, sample
from headway.planning.capacity.rehearsal import code
from headway.planning.combos.candidates import Candidate, Directions, Selection, Service, select
from headway.planning.combos.combos import Counts, GpuCombo, Group, Offer
from headway.planning.combos.deployment import plan as deploy
from headway.planning.combos.problem import Demand, Efficiency, Objective, Plan, Problem
from headway.planning.combos.speeds import Estimate, Pattern, Slo
from headway.planning.highest_rate import SLOPE, Strains, highest
from headway.planning.solver import Floats
from headway.workload.atomic_file import write_text
from headway.workload.generate import generate
from headway.workload.spec import WorkloadSpec, resolved

Tell = Callable[[int, int], None]
"""Told how many combos are profiled, of how many so far known."""
HORIZON_S = 10.0
"""Of one simulation of a profile, at least, as far as `MOST_REQUESTS` go."""
LIVES = 4
"""Of a request that is as slow as its SLO allows: a profile is so long, and its first life is not counted. In a
shorter run fewer requests wait and decode than would in the long term, and any rate looks as if it were kept."""
PATIENCE_S = 0.05
"""A token, for the length of a life, where the SLO has no limit."""
MOST_REQUESTS = 6000
FEWEST_REQUESTS = 150
ATTAINMENT = 0.9
"""Share of requests in time at which a rate still counts as served, as DistServe has it."""
START, LOWEST, HIGHEST = 0.97, 1 / 16, 2.0
"""Of the fluid estimate, where a profile looks."""
PRECISION = 1.06
"""Between a rate that is served and one that is not, where a profile stops."""
GROWTH = 0.02
"""Of waits, in seconds a second, up to which a rate counts as kept: about as much as it is too high."""
LITTLE_S = 0.05
"""By which waits may grow at any time."""


class Question(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What to plan with."""

    offers: tuple[Offer, ...]
    counts: Counts
    objective: Objective = "co"
    efficiency: Efficiency = "served"
    attainment: float = ATTAINMENT
    num_requests: int = MOST_REQUESTS
    per_pair: int | None = 2
    """Sizes of each pair of GPU types that are profiled, the likeliest ones; None: all."""
    directions: Directions = "estimate"
    """How the better direction of a pair of types is told."""


class Answer(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The plan, the candidates that it chose from, and plans with each of the other objectives."""

    plan: Plan
    selection: Selection
    others: dict[str, Plan]
    num_simulated: int
    num_found: int


@dataclass
class Asked:
    """One scenario: a service, and what is simulated for it."""

    service: Service
    document: dict[str, Any]
    base_dir: Path
    rps: float
    handover: dict[str, Any]


@dataclass
class Profiles:
    """The profiler: for each combo, the highest rate at which enough requests are in time."""

    asked: dict[str, Asked]
    question: Question
    folder: Path | None
    tell: Tell | None = None
    num_simulated: int = 0
    num_found: int = 0

    def goodput_rps(self, combo: GpuCombo, workload: Pattern, slo: Slo) -> float:
        """As `Profiler` says; `workload.name` is the service. Without one, all requests are of the mean lengths."""
        asked = self._asked(combo, workload, slo)
        file = None if self.folder is None else self.folder / f"{self._key(asked, combo)}.json"
        if file is not None and file.is_file():
            try:
                known = msgspec.json.decode(file.read_bytes(), type=float)
            except msgspec.DecodeError:
                pass
            else:
                self.num_found += 1
                return known
        found = self._search(asked, combo)
        if file is not None:
            write_text(file, msgspec.json.encode(found).decode())
        if self.tell is not None:
            self.tell(self.num_simulated, self.num_simulated)
        return found

    def _asked(self, combo: GpuCombo, workload: Pattern, slo: Slo) -> Asked:
        if workload.name is not None:
            return self.asked[workload.name]
        like = next(each for each in self.asked.values() if each.service.model.name == combo.model)
        lengths = {"prompt_tokens": round(workload.prompt_tokens), "output_tokens": round(workload.output_tokens)}
        service = msgspec.structs.replace(like.service, pattern=workload, slo=slo)
        return replace(like, service=service, document={**like.document, "workload": lengths})

    def _key(self, asked: Asked, combo: GpuCombo) -> str:
        said = [__version__, code(), self._document(asked, combo, 1.0), self.question.attainment]
        facts = [catalog.gpu(group.gpu) for group in combo.groups]
        return hashlib.sha256(msgspec.json.encode([said, facts])).hexdigest()[:32]

    def _search(self, asked: Asked, combo: GpuCombo) -> float:
        """From a fluid estimate. Every rate has the same requests."""
        service = asked.service
        gpus = {group.gpu: catalog.gpu(group.gpu) for group in combo.groups}
        fluid = Estimate({service.model.name: service.model}, gpus, service.engine, service.network_bytes_per_s)
        most = fluid.goodput_rps(combo, service.pattern, service.slo)
        if most <= 0:
            return 0.0

        def at(rate: float) -> Strains:
            self.num_simulated += 1
            chosen = scenario.assemble(self._document(asked, combo, rate), Places(), asked.base_dir)
            records = scenario.run(chosen).records
            end_s = float(records.workload["arrival_s"][-1])
            found = sample(records, end_s / LIVES, Limits(service.slo.ttft_s, service.slo.tpot_s))
            return strains(found, end_s, self.question.attainment)

        return highest(at, START * most, LOWEST * most, HIGHEST * most, PRECISION)

    def _document(self, asked: Asked, combo: GpuCombo, rate: float) -> dict[str, Any]:
        made = copy.deepcopy(asked.document)
        num = min(max(round(rate * span_s(asked.service)), FEWEST_REQUESTS), self.question.num_requests)
        made["workload"] |= {"arrivals": rate, "num_requests": num}
        made["workload"].pop("duration_s", None)
        return made | fleet_of([(combo, 1, None, "profiled")], asked)


def span_s(service: Service) -> float:
    """How long a profile's arrivals go on."""
    decode_s = service.pattern.output_tokens * (service.slo.tpot_s or PATIENCE_S)
    return max(HORIZON_S, LIVES * ((service.slo.ttft_s or 0.0) + decode_s))


def strains(found: Sample, end_s: float, attainment: float) -> Strains:
    """How near a run is to what counts as served: its latencies, the first token's alone, and how waits grow.

    A latency counts by what it is of its SLO, at the quantile `attainment`: the worst of a request's, at first. Waits
    that grow with time show that a rate is too high before SLOs are missed. `end_s`: of arrivals; the first life is
    not counted.
    """
    ttft = _over(found.ttft_s, found.slo_ttft_s)
    every = np.maximum(ttft, np.maximum(_over(found.tpot_s, found.slo_tpot_s), _over(found.e2e_s, found.slo_e2e_s)))
    every[~found.finished] = inf
    late = [float(np.quantile(each, attainment, method="inverted_cdf")) for each in (every, ttft)]
    waits_s = found.ttft_s[np.argsort(found.id)]
    quarter = len(waits_s) // 4
    grown_s = float(np.nanmedian(waits_s[-quarter:]) - np.nanmedian(waits_s[quarter : 2 * quarter]))
    growth = (grown_s - LITTLE_S) / (end_s * (1 - 1 / LIVES) / 2)
    return (*late, SLOPE * (growth - GROWTH))


def _over(values_s: Floats, limits_s: Floats) -> Floats:
    """Logarithm of each over its limit; where one of the two is not there, it is not over it."""
    with np.errstate(divide="ignore"):
        found = np.log(values_s / limits_s)
    return np.asarray(np.where(np.isnan(found), -inf, found))


def fleet_of(chosen: Sequence[tuple[GpuCombo, int, float | None, str]], asked: Asked) -> dict[str, Any]:
    """`fleet`, `combos` and routing of a scenario: (combo, how many, goodput of one, name).

    What is aggregated is a pool, which can be served live; beside other types or split combos, it is a combo with a
    goodput, so that it gets its share of the requests.
    """
    fleet, combos = [], []
    for combo, count, goodput_rps, name in chosen:
        group = combo.aggregated
        if group is not None and len(chosen) == 1:
            fleet.append({**_pool(asked, group), "replicas": count * group.instances, "name": name})
        else:
            roles = ("aggregated",) if group is not None else ("prefill", "decode")
            parts = {role: _pool(asked, each) for role, each in zip(roles, combo.groups, strict=True)}
            said: dict[str, Any] = {} if goodput_rps is None else {"goodput_rps": round(goodput_rps, 4)}
            said |= {} if group is not None else {"handover": asked.handover}
            combos.append({"name": name, "replicas": count, **parts, **said})
    return {"fleet": fleet, "combos": combos, "policies": {"routing": "cauchy"}}


def _pool(asked: Asked, group: Group) -> dict[str, Any]:
    first = asked.document["fleet"][0]
    kept = {name: first[name] for name in ("model", "engine", "network_bytes_per_s") if name in first}
    return {**kept, "gpu": group.gpu, "tp": group.tp, "replicas": group.instances}


def ask(document: dict[str, Any], places: Places, base_dir: Path, rps: float | None) -> Asked:
    """What one scenario asks for. HeadwayError where it says no SLO, no rate, or nothing that could be planned."""
    document = copy.deepcopy(document)
    handover = document.pop("handover", {"mode": "layerwise", "degree": 8})
    spec = scenario.assemble(copy.deepcopy(document), places, base_dir).spec
    if not spec.fleet:
        raise places.error(("fleet",), "expected a pool; its model and engine are planned for")
    if spec.slo.ttft_s is None and spec.slo.tpot_s is None:
        raise places.error(("slo",), "expected ttft_s, tpot_s, or both: goodput is what is served in time")
    workload = resolved(spec.workload)
    if workload.arrivals is None or workload.sessions is not None or workload.concurrency is not None:
        raise places.error(("workload",), "expected arrivals at a rate, without sessions or concurrency")
    chosen = scenario.assemble(copy.deepcopy(document), places, base_dir)
    pool = chosen.fleet.pools[0]
    prompt, output, rate = _means(workload, spec.seed, base_dir)
    pattern = Pattern(spec.name, prompt, output)
    slo = Slo(spec.slo.ttft_s, spec.slo.tpot_s)
    service = Service(spec.name, pool.model, pool.engine, pattern, slo, pool.network_bytes_per_s)
    document["workload"] = _said(msgspec.to_builtins(workload))
    document = {
        name: value for name, value in document.items() if name not in ("variants", "faults", "roles", "combos")
    }
    return Asked(service, document, base_dir, rate if rps is None else rps, handover)


def _said(section: Any) -> Any:
    """Without what is None."""
    if isinstance(section, dict):
        return {name: _said(value) for name, value in section.items() if value is not None}
    return [_said(each) for each in section] if isinstance(section, list | tuple) else section


def _means(workload: WorkloadSpec, seed: int, base_dir: Path) -> tuple[float, float, float]:
    """Mean prompt and output tokens, and requests per second."""
    rows = generate(workload, seed, base_dir)
    span_s = float(rows.arrival_s[-1] - rows.arrival_s[0]) if len(rows) > 1 else 0.0
    rate = (len(rows) - 1) / span_s if span_s > 0 else 0.0
    return float(rows.prompt_tokens.mean()), float(rows.output_tokens.mean()), rate


def plan(asked: Sequence[Asked], question: Question, cache_dir: Path | None = None, tell: Tell | None = None) -> Answer:
    """The deployment for these services together."""
    profiles = Profiles({each.service.name: each for each in asked}, question, cache_dir, tell)
    services = [each.service for each in asked]
    selection = select(
        services, question.offers, profiles, question.counts, None, question.per_pair, question.directions
    )
    problem = problem_of(asked, selection.candidates, question)
    others: dict[str, Plan] = {}
    objectives: tuple[Objective, ...] = ("co", "mc", "mce")
    for objective in objectives:
        if objective != question.objective:
            try:
                others[objective] = deploy(msgspec.structs.replace(problem, objective=objective), explain=False)
            except HeadwayError:
                continue  # mce cannot weigh what costs nothing, or has no limit
    return Answer(
        plan=deploy(problem),
        selection=selection,
        others=others,
        num_simulated=profiles.num_simulated,
        num_found=profiles.num_found,
    )


def problem_of(asked: Sequence[Asked], candidates: Sequence[Candidate], question: Question) -> Problem:
    """The program that is solved."""
    demands = []
    for each in asked:
        pattern = each.service.pattern
        demands.append(Demand(each.service.name, each.rps, pattern.prompt_tokens + pattern.output_tokens))
    limits = {offer.gpu.name: offer.limit for offer in question.offers if offer.limit is not None}
    return Problem(tuple(demands), tuple(candidates), limits, question.objective, question.efficiency)


def scenario_yaml(answer: Answer, asked: Asked) -> str:
    """What the plan gives to one service, as a scenario file. HeadwayError where it gives nothing."""
    chosen = [each for each in answer.plan.combos if each.service == asked.service.name]
    if not chosen:
        raise HeadwayError(f"{asked.service.name}: the plan has nothing for it")
    named = [(each.combo, each.count, each.goodput_rps, f"combo-{i}") for i, each in enumerate(chosen)]
    document = {**asked.document, **fleet_of(named, asked)}
    usd = sum(each.usd_per_hour * each.count for each in chosen)
    head = f"# Planned by headway plan combos: ${usd:,.2f} an hour for {asked.rps:.4g} requests/s\n"
    return head + yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=100)


def read(path: Path) -> tuple[dict[str, Any], Places]:
    """A scenario file, with a name."""
    data, places = strict_yaml.read(path)
    data.setdefault("name", path.stem)
    return data, places
