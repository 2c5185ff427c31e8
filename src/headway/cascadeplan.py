"""Plans of cascades for scenarios: latencies simulated and kept by content, every plan rehearsed as a whole."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil, inf
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import yaml
from msgspec import Struct, structs

from headway import __version__, catalog, rehearsal, scenario, userfile
from headway.control.policies import Policies
from headway.core.errors import HeadwayError, unknown
from headway.core.fleet import Engine, Fleet, Gpu, Model, Pool
from headway.metrics.summary import summarize
from headway.planner.cascade import baselines
from headway.planner.cascade.bilevel import Effort
from headway.planner.cascade.bounds import StepBounds
from headway.planner.cascade.cascadia import plans, with_held_out
from headway.planner.cascade.latencies import Latencies
from headway.planner.cascade.plan import CascadePlan
from headway.planner.cascade.problem import LatencyBudget, Lengths, Problem, QualityFloor, ReplicaSet, Target
from headway.sim.cluster import simulate
from headway.userfile import Places
from headway.wholefile import write_text
from headway.workload.quality import Scores
from headway.workload.quality_spec import QualitySpec, only, table
from headway.workload.spec import generate
from headway.workload.streams import stream
from headway.workload.table import Workload
from headway.workload.trace import TraceSource

Tell = Callable[[int], None]
ROUNDS = 6
"""Plans that are rehearsed at most, each asked for more than the one before, until one keeps the promise."""
MARGIN = 0.05
"""Points of quality beyond a shortfall, and the share of the time beyond an excess, that the next plan is asked for."""
EFFORT = Effort(stable_rounds=4, gap=0.05, asks=25)
"""Of every search."""
HORIZON_S = 15.0
"""Of arrivals at a stage, as far as `MOST_ROUNDS` go."""
MOST_ROUNDS = 5
HELD_OUT = 0.5
"""The share of the score table that a plan is not made on."""


@dataclass
class Simulated:
    """The evaluator: a stage alone, its requests once each, at the same random times whatever the replicas are."""

    gpu: Gpu
    engine: Engine
    policies: Policies
    seed: int = 0
    rounds: int = 1
    """How many times the lengths are played, one after the other."""

    def p95_latency_s(self, model: Model, replicas: ReplicaSet, rate_rps: float, lengths: Lengths) -> float:
        """As `Evaluator` says. What prefix caches are taken to hold is no part of the prompts."""
        pools = tuple(
            Pool(f"{model.name}-{i}", model, self.gpu, self.engine, part.parallel, part.count)
            for i, part in enumerate(replicas.parts)
        )
        num = len(lengths) * self.rounds
        arrival_s = np.sort(stream(self.seed, "arrivals at a stage").random(num)) * num / rate_rps
        rows = Workload(
            {
                "arrival_s": arrival_s,
                "prompt_tokens": np.tile(lengths.computed_tokens, self.rounds).astype("i8"),
                "output_tokens": np.tile(lengths.output_tokens, self.rounds).astype("i8"),
            }
        )
        done = summarize(simulate(Fleet(pools), TraceSource(rows), self.policies, seed=self.seed))
        return inf if done.num_completed < num or done.e2e_s is None else done.e2e_s.p95


def rounds(problem: Problem) -> int:
    """How many times the sample is played, so that a load that is too high shows."""
    return min(max(ceil(HORIZON_S * problem.rate_rps / len(problem.scores)), 1), MOST_ROUNDS)


def bounds(problem: Problem) -> StepBounds:
    """Those that hold for `evaluator`."""
    return StepBounds(problem.gpu, problem.engine, rounds(problem))


def evaluator(asked: Asked) -> Simulated:
    """What a stage's latency is asked of."""
    problem = asked.problem
    return Simulated(problem.gpu, problem.engine, asked.policies, asked.seed, rounds(problem))


class Rehearsed(Struct, frozen=True, forbid_unknown_fields=True):
    """What a plan came to, simulated as a whole: the scenario's own requests, from stage to stage."""

    quality: float | None
    p95_s: float | None
    """Of finished requests, over all their stages and judges."""
    mean_s: float | None
    num_requests: int
    num_completed: int
    usd_per_request: float | None
    """Of the GPUs for as long as they are there, and of the judge."""

    def keeps(self, target: Target) -> bool:
        """Whether it is what was asked for, for all requests."""
        if self.num_completed < self.num_requests or self.quality is None or self.p95_s is None:
            return False
        if isinstance(target, LatencyBudget):
            return self.p95_s <= target.latency_s
        return self.quality >= target.q_min


class Option(Struct, frozen=True, forbid_unknown_fields=True):
    """A plan, and its rehearsal."""

    plan: CascadePlan
    rehearsed: Rehearsed
    kept: bool
    """Whether the rehearsal is what was asked for."""


class Answer(Struct, frozen=True, forbid_unknown_fields=True):
    """The plan, what else could be done with the GPUs, and quality against latency."""

    target: Target
    chosen: Option
    alternatives: tuple[Option, ...]
    curve: tuple[Option, ...]
    """Plans for qualities from low to high."""
    num_simulated: int
    num_found: int


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


@dataclass
class Known:
    """Latencies in a file, under a digest of all that they depend on."""

    asked: Asked
    folder: Path | None
    latencies: Latencies = field(init=False)

    def __post_init__(self) -> None:
        self.latencies = Latencies(evaluator(self.asked), self._read())

    @property
    def file(self) -> Path | None:
        problem, said = self.asked.problem, self.asked.document.get("policies")
        facts = [problem.models, problem.gpu, problem.engine, said, self.asked.seed, rounds(problem)]
        digest = hashlib.sha256(msgspec.json.encode([__version__, rehearsal.code(), facts])).hexdigest()[:32]
        return None if self.folder is None else self.folder / f"{digest}.json"

    def _read(self) -> dict[str, float]:
        if self.file is None or not self.file.is_file():
            return {}
        try:
            found = msgspec.json.decode(self.file.read_bytes(), type=dict[str, float | None])
        except msgspec.DecodeError:
            return {}
        return {key: inf if value is None else value for key, value in found.items()}

    def write(self) -> None:
        """Keep what is known by now."""
        if self.file is not None:
            write_text(self.file, msgspec.json.encode(self.latencies.known).decode())


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
    rows = generate(spec.workload, spec.seed, base_dir)
    span_s = float(rows.arrival_s[-1] - rows.arrival_s[0]) if len(rows) > 1 else 0.0
    if span_s <= 0:
        raise places.error(("workload",), "expected two requests or more, at different times")
    first = chosen.fleet.pools[0]
    problem = Problem(
        models=models,
        gpu=first.gpu,
        engine=first.engine,
        num_gpus=num_gpus or sum(pool.replicas * pool.parallel.num_gpus for pool in chosen.fleet.pools),
        rate_rps=(len(rows) - 1) / span_s,
        scores=own,
        target=target,
        gpus_per_server=gpus_per_server,
        judge_s=0.27 if spec.cascade is None else spec.cascade.judge_s,
        use_all=True,
        max_kinds=1,  # with two, the same effort finds plans that are twice as slow, in ten times as long
    )
    policies = structs.replace(scenario.policies_of(chosen), cascade=None)
    return Asked(problem, held_out, document, base_dir, policies, spec.seed)


def _stages(said: Any, scores: Scores, places: Places) -> tuple[str, ...]:
    """The cascade's models, else the table's."""
    names = scores.models if said is None else said.models
    for i, name in enumerate(names):
        if name not in scores.models:
            raise unknown("model", name, scores.models, places.where(("cascade", "models", i)))
    return tuple(names)


def plan(
    asked: Asked, folder: Path | None = None, tell: Tell | None = None, compare: bool = True, curve: int = 0
) -> Answer:
    """The best plan that keeps its promise when it is rehearsed; where none does, the one that comes nearest.

    `compare`: plan the alternatives, too; one that turns out better is chosen. `curve`: so many plans from low to
    high quality.
    """
    known = Known(asked, folder)
    known.latencies.tell = tell
    try:
        chosen = kept(asked, known.latencies)
        others = _others(asked, chosen.plan.target, known.latencies) if compare else ()
        chosen = min((chosen, *others), key=lambda each: _missing(asked.problem.target, each))
        line = _curve(asked, known.latencies, curve) if curve else ()
    finally:
        known.write()
    return Answer(asked.problem.target, chosen, others, line, known.latencies.num_asked, known.latencies.num_found)


def kept(asked: Asked, latencies: Latencies) -> Option:
    """Plan, rehearse, and ask for more by as much as was missing."""
    target, tried = asked.problem.target, list[Option]()
    for _ in range(ROUNDS):
        found = _planned(asked.problem.asking(target), latencies)
        tried.append(_option(asked, with_held_out(found, asked.held_out)))
        if tried[-1].kept or found.status == "infeasible":
            break
        target = _stricter(target, asked.problem.target, tried[-1].rehearsed)
    return min(tried, key=lambda each: _missing(asked.problem.target, each))


def _planned(problem: Problem, latencies: Latencies) -> CascadePlan:
    """With all GPUs in use, where that can be: it leaves the search the fewest allocations."""
    try:
        return plans(problem, [problem.target], latencies, bounds(problem), EFFORT)[0]
    except HeadwayError:
        return plans(replace(problem, use_all=False), [problem.target], latencies, bounds(problem), EFFORT)[0]


def _stricter(target: Target, wanted: Target, found: Rehearsed) -> Target:
    if isinstance(target, LatencyBudget):
        assert isinstance(wanted, LatencyBudget)
        return structs.replace(target, latency_s=target.latency_s * wanted.latency_s / (found.p95_s or inf) * 0.95)
    assert isinstance(wanted, QualityFloor)
    short = wanted.q_min - (wanted.q_min if found.quality is None else found.quality)
    return structs.replace(target, q_min=min(100.0, target.q_min + max(short, 0.0) + MARGIN))


def _missing(target: Target, option: Option) -> tuple[bool, float]:
    found = option.rehearsed
    if isinstance(target, LatencyBudget):
        return (not option.kept, -(found.quality or 0.0) if option.kept else found.p95_s or inf)
    return (not option.kept, (found.p95_s or inf) if option.kept else -(found.quality or 0.0))


def _option(asked: Asked, found: CascadePlan) -> Option:
    rehearsed = rehearse(asked, found)
    return Option(found, rehearsed, rehearsed.keeps(asked.problem.target))


def _others(asked: Asked, target: Target, latencies: Latencies) -> tuple[Option, ...]:
    """Each model alone, and the cascade with one of its parts left out, all with the target that the plan had."""
    problem, limits = asked.problem.asking(target), bounds(asked.problem)
    made = [partial(baselines.stand_alone, problem, name) for name in problem.names]
    made += [partial(baselines.uniform_parallelism, problem), partial(baselines.uniform_allocation, problem)]
    if isinstance(problem.target, QualityFloor):
        made.append(partial(baselines.cascade_serve, problem))
    found = list[CascadePlan]()
    for make in made:
        with suppress(HeadwayError):  # what cannot be planned so is no alternative
            found.append(make(latencies, limits, EFFORT))
    return tuple(_option(asked, with_held_out(each, asked.held_out)) for each in found)


def _curve(asked: Asked, latencies: Latencies, num: int) -> tuple[Option, ...]:
    """Quality against latency, from the first model's quality to nearly the last one's."""
    scores = asked.problem.scores
    ends = [float(np.nanmean(scores.scores[:, i])) for i in (0, -1)]
    targets = [QualityFloor(float(q)) for q in np.linspace(min(ends), max(ends) - 0.5, num)]
    return tuple(
        _option(asked, each) for each in plans(asked.problem, targets, latencies, bounds(asked.problem), EFFORT)
    )


def rehearse(asked: Asked, found: CascadePlan, seed: int | None = None) -> Rehearsed:
    """Simulate a plan as `headway simulate` would the scenario that is written of it."""
    document = document_of(asked, found) | ({} if seed is None else {"seed": seed})
    run = scenario.run(scenario.assemble(document, Places(), asked.base_dir))
    done = run.summary
    usd = done.usd + done.judge_usd
    return Rehearsed(
        quality=done.quality,
        p95_s=None if done.e2e_s is None else done.e2e_s.p95,
        mean_s=None if done.e2e_s is None else done.e2e_s.mean,
        num_requests=done.num_requests,
        num_completed=done.num_completed,
        usd_per_request=usd / done.num_completed if done.num_completed else None,
    )


def document_of(asked: Asked, found: CascadePlan) -> dict[str, Any]:
    """The plan as a scenario: its pools, and its thresholds where more than one model is left."""
    kept = {name: asked.document["fleet"][0][name] for name in ("gpu", "engine", "usd_per_gpu_hour")
            if name in asked.document["fleet"][0]}  # fmt: skip
    used = [stage for stage in found.stages if stage.replicas]
    fleet = [
        {**kept, "name": f"{stage.model}-{i}", "model": stage.model, "tp": part.tp, "pp": part.pp,
         "replicas": part.count}
        for stage in used
        for i, part in enumerate(stage.replicas)
    ]  # fmt: skip
    document = {
        name: value for name, value in copy.deepcopy(asked.document).items() if name not in ("variants", "faults")
    }
    models = tuple(stage.model for stage in used)
    quality = only(msgspec.convert(document["workload"]["quality"], QualitySpec), models)
    said = {name: value for name, value in msgspec.to_builtins(quality).items() if value is not None}
    document |= {"workload": {**document["workload"], "quality": said}, "fleet": fleet}
    cascade = document.pop("cascade", {})
    if len(used) > 1:
        document["cascade"] = {**cascade, "models": list(models), "policy": _policy(found, used)}
    return document


def _policy(found: CascadePlan, used: Sequence[Any]) -> dict[str, Any]:
    levels = [stage.threshold for stage in used[:-1]]
    if found.pre_routed:
        return {"name": "pre-routed", "threshold": levels[0]}
    return {"name": "thresholds", "thresholds": levels}


def scenario_yaml(answer: Answer, asked: Asked) -> str:
    """The plan as a scenario file."""
    found, done = answer.chosen.plan, answer.chosen.rehearsed
    head = f"# Planned by headway plan cascade: quality {done.quality or 0:.4g}, p95 latency {done.p95_s or 0:.4g} s\n"
    return head + yaml.safe_dump(document_of(asked, found), sort_keys=False, allow_unicode=True, width=100)


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
