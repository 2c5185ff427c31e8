"""Reads a scenario, assembles it, runs it: the only composition root."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import msgspec
import yaml
from msgspec.structs import replace

from headway import __version__, longterm, userfile
from headway.catalog import coefficients, engine, gpu, model, model_from_config
from headway.catalog.coefficients import Coefficients
from headway.catalog.own import coefficients_in
from headway.control.policies import CascadeOf, Policies
from headway.core.errors import HeadwayError, unknown
from headway.core.fleet import Combo, Engine, Fleet, Model, Parallel, Pool, Role
from headway.core.policy import Scaler
from headway.core.record import Outcome, Records
from headway.metrics.summary import summarize
from headway.perf import memory
from headway.perf.step import StepModel
from headway.policies import resolve
from headway.policies.resolve import Choice
from headway.report.run import Provenance, Run
from headway.scenariofile import DEFAULT_ENGINE, ComboSpec, ModelFile, PolicySpec, PolicySpecs, PoolSpec, Spec, Variant
from headway.sim.cluster import simulate
from headway.sim.timeline import Line
from headway.userfile import Key, Places
from headway.workload.source import Source
from headway.workload.spec import build as workload

Progress = Callable[[float], None]
"""Told now and then the share that is done, 0 to 1."""
Changes = Mapping[Key, tuple[str, Any]]
"""Key -> (the flag that says so, the value)."""


@dataclass(frozen=True)
class Scenario:
    """A scenario that holds together: its names are known, its fleet stands."""

    spec: Spec
    fleet: Fleet
    document: dict[str, Any]
    """What the file held."""
    base_dir: Path
    """Relative paths start here."""
    places: Places


def load(path: str | Path, changes: Changes | None = None) -> Scenario:
    """The scenario in a file, with some values set otherwise. HeadwayError where it cannot be run."""
    data, places = userfile.read(Path(path))
    data.setdefault("name", Path(path).stem)
    return assemble(data, places, Path(path).parent, changes)


def assemble(data: dict[str, Any], places: Places, base_dir: Path, changes: Changes | None = None) -> Scenario:
    """A scenario from what a file would hold. `data` and `places` are changed."""
    _importable(base_dir)
    userfile.change(data, places, changes or {})
    spec = userfile.convert(data, Spec, places)
    pools = tuple(_pool(pool, ("fleet", i), f"pool-{i}", base_dir, places) for i, pool in enumerate(spec.fleet))
    combos = tuple(_combo(combo, ("combos", i), base_dir, places) for i, combo in enumerate(spec.combos))
    if not pools and not combos:
        raise places.error((), "no replicas; expected `fleet`, `combos`, or both")
    limits = tuple((limit.region, gpu(limit.gpu).name, limit.count) for limit in spec.gpu_limits)
    fleet = Fleet(pools, combos, spec.network, spec.provisioning, limits)
    scenario = Scenario(spec, fleet, data, base_dir, places)
    _check(scenario)
    return scenario


def variants(scenario: Scenario) -> tuple[Scenario, ...]:
    """One scenario for each variant, or each routing with each ordering, in the order in which they are listed."""
    spec = scenario.spec
    if spec.variants:
        return tuple(_of_variant(scenario, variant) for variant in spec.variants)
    pairs = product(_listed(spec.policies.routing), _listed(spec.policies.ordering))
    return tuple(_with(scenario, replace(spec.policies, routing=r, ordering=o)) for r, o in pairs)


def policies_of(scenario: Scenario) -> Policies:
    """The policies of a scenario that has one of each."""
    if len(variants(scenario)) > 1:
        raise scenario.places.error(("policies",), "several of a kind; expected one routing and one ordering")
    return _policies(variants(scenario)[0])


def _of_variant(scenario: Scenario, variant: Variant) -> Scenario:
    said = {key: value for key in variant.__struct_fields__[1:] if (value := getattr(variant, key)) is not None}
    chosen = _with(scenario, replace(scenario.spec.policies, **said))
    return dataclasses.replace(chosen, spec=replace(chosen.spec, variants=(variant,)))


def run(scenario: Scenario, progress: Progress | None = None) -> Run:
    """Simulate a scenario that has one routing and one ordering."""
    if len(variants(scenario)) > 1:
        key = "routing" if len(_listed(scenario.spec.policies.routing)) > 1 else "ordering"
        at = ("variants",) if scenario.spec.variants else ("policies", key)
        raise scenario.places.error(at, "several are for headway compare; expected one")
    _importable(scenario.base_dir)  # once more, for a process of its own
    chosen = variants(scenario)[0]
    spec, policies, pools = chosen.spec, _policies(chosen), chosen.fleet.all_pools
    began = time.perf_counter()
    known = _known(chosen)
    with scenario.places.at("workload"):
        source = workload(spec.workload, spec.seed, scenario.base_dir)
    started = time.perf_counter()
    records = simulate(
        scenario.fleet, source, policies, seed=spec.seed, step=spec.simulation.step, faults=spec.faults,
        until_s=spec.simulation.until_s, scrape=spec.observe, progress=_share(progress, source, spec),
        line=lambda pool: _line(pool, known[pool.name]), pacer=spec.pacer,
    )  # fmt: skip
    simulated = time.perf_counter()
    return Run(
        name=spec.name,
        policies=_names(chosen),
        records=records,
        summary=summarize(records, warmup_s=spec.simulation.warmup_s, slo=spec.slo, pacer=spec.pacer),
        simulate_s=simulated - started,
        total_s=time.perf_counter() - began,
        calibrated=all(found.calibrated for found in known.values()),
        notes=(*source.table().notes, *_rejections(records, pools), *_cheating(chosen)),
    )


def _known(scenario: Scenario) -> dict[str, Coefficients]:
    """Step-time coefficients by pool."""
    spec, base_dir, places = scenario.spec, scenario.base_dir, scenario.places
    specs: list[tuple[Key, PoolSpec]] = [(("fleet", i), pool) for i, pool in enumerate(spec.fleet)]
    for i, combo in enumerate(spec.combos):
        parts = {"prefill": combo.prefill, "decode": combo.decode, "aggregated": combo.aggregated}
        specs += [(("combos", i, role), part) for role, part in parts.items() if part is not None]
    pairs = zip(specs, scenario.fleet.all_pools, strict=True)
    return {pool.name: _coefficients(said, pool, at, base_dir, places) for (at, said), pool in pairs}


def _coefficients(spec: PoolSpec, pool: Pool, at: Key, base_dir: Path, places: Places) -> Coefficients:
    """Of the pool's own file, else of the catalog."""
    if spec.coefficients is None:
        return coefficients(pool.gpu.name, pool.engine.name)
    with places.at(*at, "coefficients"):
        return coefficients_in(base_dir / spec.coefficients, pool.gpu.name, pool.engine.name)


def line_of(scenario: Scenario) -> Callable[[Pool], Line]:
    """The step-time model of a pool; coefficients are read when it is asked for."""
    known = cache(partial(_known, scenario))
    return lambda pool: _line(pool, known()[pool.name])


def _line(pool: Pool, known: Coefficients) -> Line:
    return StepModel(pool.model, pool.gpu, pool.engine, pool.parallel, known).line


def _rejections(records: Records, pools: tuple[Pool, ...]) -> list[str]:
    """Why requests were turned away."""
    rejected = records.requests["request"][records.requests["outcome"] == Outcome.REJECTED]
    if not len(rejected):
        return []
    contexts = {pool.model.name: pool.model.max_context_tokens for pool in pools}
    limit = max(min(replica.kv_capacity_tokens, contexts[replica.model]) for replica in records.replicas)
    tokens = records.workload["prompt_tokens"][rejected] + records.workload["output_tokens"][rejected]
    too_long = int((tokens > limit).sum())
    notes = [f"rejected: {too_long:,} requests of more than {limit:,} tokens, the most that a replica takes"]
    if too_long < len(rejected):
        notes.append(f"rejected: {len(rejected) - too_long:,} requests that no queue had room for")
    return notes if too_long else notes[1:]


def _cheating(scenario: Scenario) -> list[str]:
    """What a scaler knew that it could not know."""
    if not longterm.cheats(_scaler(scenario)):
        return []
    return ["cheating: the forecaster is fitted on the demand of this very run, its future included"]


def provenance(scenario: Scenario, command: str | None = None) -> Provenance:
    """What made the runs of a scenario: enough to make them again."""
    policies = msgspec.to_builtins(scenario.spec.policies)
    document = {**scenario.document, "seed": scenario.spec.seed, "policies": policies}
    text = yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=100)
    return Provenance(scenario_yaml=text, seed=scenario.spec.seed, version=__version__, command=command)


def compare(scenario: Scenario, jobs: int = 1, progress: Progress | None = None) -> list[Run]:
    """Simulate every variant, on so many processes. All see the same arrivals and lengths."""
    chosen = variants(scenario)
    if jobs == 1:
        return [run(each, _part(progress, i, len(chosen))) for i, each in enumerate(chosen)]
    runs: list[Run] = []
    with ProcessPoolExecutor(min(jobs, len(chosen)), get_context("spawn")) as pool:
        for done in pool.map(run, chosen):
            runs.append(done)
            if progress:
                progress(len(runs) / len(chosen))
    return runs


def _importable(folder: Path) -> None:
    """Let `module:Class` be found beside the scenario."""
    path = str(folder.absolute())
    if path not in sys.path:
        sys.path.append(path)


def _with(scenario: Scenario, policies: PolicySpecs) -> Scenario:
    return dataclasses.replace(scenario, spec=replace(scenario.spec, policies=policies))


def _names(scenario: Scenario) -> dict[str, str]:
    """As reports call them."""
    spec = scenario.spec
    if spec.variants:
        return {"policies": spec.variants[0].name}
    policies = spec.policies
    (routing,), (ordering,) = _listed(policies.routing), _listed(policies.ordering)
    names = {"routing": str(resolve.router(routing)), "ordering": str(resolve.ordering(ordering))}
    if policies.migration is not None:
        names["migration"] = str(resolve.migration(policies.migration))
    if policies.scaling is not None:
        names["scaling"] = str(_scaler(scenario))
    return names if policies.ordering_at == "replica" else {**names, "ordering_at": policies.ordering_at}


def _listed(spec: PolicySpec | list[PolicySpec]) -> list[PolicySpec]:
    return spec if isinstance(spec, list) else [spec]


def _share(progress: Progress | None, source: Source, spec: Spec) -> Callable[[float, int], None] | None:
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


def _combo(spec: ComboSpec, at: Key, base_dir: Path, places: Places) -> Combo:
    roles: dict[str, Role] = {"prefill": "prefill", "decode": "decode", "aggregated": "mixed"}
    named = {key for key in roles if getattr(spec, key) is not None}
    if named not in ({"prefill", "decode"}, {"aggregated"}):
        raise places.error(at, "expected `prefill` and `decode`, or `aggregated`")
    parts = []
    for key, role in roles.items():
        if key in named:
            part = _pool(getattr(spec, key), (*at, key), f"{spec.name}-{key}", base_dir, places)
            parts.append(replace(part, role=role, handover=spec.handover))
    if parts[0].model != parts[-1].model:
        raise places.error(
            (*at, "decode", "model"), f"{parts[1].model.name}; expected {parts[0].model.name}, as prefill"
        )
    return Combo(spec.name, tuple(parts), spec.replicas, spec.min_replicas, spec.max_replicas, spec.goodput_rps)


def _pool(spec: PoolSpec, at: Key, name: str, base_dir: Path, places: Places) -> Pool:
    with places.at(*at, "model"):
        shape = _model(spec.model, base_dir)
    with places.at(*at, "gpu"):
        accelerator = gpu(spec.gpu)
    if spec.endpoints and spec.replicas not in (1, len(spec.endpoints)):
        raise places.error((*at, "replicas"), f"{spec.replicas}; expected {len(spec.endpoints)}, as many as endpoints")
    pool = Pool(
        name=spec.name or name,
        model=shape,
        gpu=accelerator,
        engine=_engine(spec.engine, (*at, "engine"), places),
        parallel=Parallel(spec.tp, spec.pp, spec.ep, spec.dp),
        replicas=len(spec.endpoints) or spec.replicas,
        region=spec.region,
        usd_per_gpu_hour=spec.usd_per_gpu_hour,
        kv_capacity_tokens=spec.kv_capacity_tokens,
        network_bytes_per_s=spec.network_bytes_per_s,
        min_replicas=spec.min_replicas,
        max_replicas=spec.max_replicas,
        start_s=spec.start_s,
    )
    with places.at(*at):
        memory.plan(pool.model, pool.gpu, pool.engine, pool.parallel)
    _coefficients(spec, pool, at, base_dir, places)
    return pool


def _model(spec: str | ModelFile, base_dir: Path) -> Model:
    return model(spec) if isinstance(spec, str) else model_from_config(base_dir / spec.config)


def _engine(spec: str | dict[str, Any], key: Key, places: Places) -> Engine:
    changes = {"name": spec} if isinstance(spec, str) else dict(spec)
    name = changes.pop("name", DEFAULT_ENGINE)
    with places.at(*key):
        profile = engine(str(name))
    changed = userfile.convert({**msgspec.to_builtins(profile), **changes}, Engine, places, key)
    if changed.max_num_batched_tokens < changed.max_num_seqs:
        at = (*key, "max_num_batched_tokens")
        expected = f"at least max_num_seqs ({changed.max_num_seqs}), a token for each sequence that decodes"
        raise places.error(at, f"{changed.max_num_batched_tokens}; expected {expected}")
    if changed.kv_offload_bytes and not changed.prefix_caching:
        raise places.error((*key, "kv_offload_bytes"), "host memory extends the prefix cache; set prefix_caching: true")
    if changed.schedule_lag > 1:
        raise places.error((*key, "schedule_lag"), f"{changed.schedule_lag}; expected 0 or 1")
    for field_name in changes:
        _check_setting(field_name, getattr(changed, field_name), places, (*key, field_name))
    return changed


def _check_setting(name: str, value: object, places: Places, key: Key) -> None:
    """Engine settings that would make no sense."""
    low = {"max_num_seqs": 1, "max_num_batched_tokens": 1, "block_size_tokens": 1, "max_num_waiting": 0}
    low |= {"host_memory_bytes": 0, "kv_offload_bytes": 0, "schedule_lag": 0, "watermark": 0}
    if name in low and isinstance(value, int | float) and value < low[name]:
        raise places.error(key, f"{value}; expected {low[name]} or more")
    if name in ("gpu_memory_utilization", "kv_dtype_bytes") and not (isinstance(value, float | int) and value > 0):
        raise places.error(key, f"{value}; expected more than 0")
    if name in ("gpu_memory_utilization", "watermark") and isinstance(value, float | int) and value > 1:
        raise places.error(key, f"{value}; expected 1 at most")


def _check(scenario: Scenario) -> None:
    """What the parts of a scenario must have to do with each other."""
    spec, places = scenario.spec, scenario.places
    _check_fleet(scenario.fleet, places)
    num_replicas = sum(pool.replicas for pool in scenario.fleet.pools)
    num_replicas += sum(combo.replicas * sum(p.replicas for p in combo.parts) for combo in scenario.fleet.combos)
    for i, fault in enumerate(spec.faults):
        if not 0 <= fault.replica < num_replicas:
            raise places.error(("faults", i, "replica"), f"{fault.replica}; expected 0 to {num_replicas - 1}")
        if fault.at_s < 0 or (fault.down_s is not None and fault.down_s <= 0):
            raise places.error(("faults", i), "expected at_s of 0 or more, and down_s above 0")
    for key in ("ttft_s", "tpot_s", "e2e_s"):
        slo = getattr(spec.slo, key)
        if slo is not None and slo <= 0:
            raise places.error(("slo", key), f"{slo}; expected more than 0")
    if not (_listed(spec.policies.routing) and _listed(spec.policies.ordering)):
        raise places.error(("policies",), "expected at least one routing and one ordering")
    if spec.variants and max(len(_listed(spec.policies.routing)), len(_listed(spec.policies.ordering))) > 1:
        raise places.error(("policies",), "several routings or orderings, and variants; expected one or the other")
    for variant in variants(scenario):
        _policies(variant)


def _check_fleet(fleet: Fleet, places: Places) -> None:
    names: set[str] = set()
    pools: list[tuple[Key, Pool]] = [(("fleet", i), pool) for i, pool in enumerate(fleet.pools)]
    parts: list[tuple[Key, Pool]] = [
        (("combos", i), part) for i, combo in enumerate(fleet.combos) for part in combo.parts
    ]
    for at, pool in (*pools, *parts):
        if pool.name in names:
            raise places.error((*at, "name"), f"{pool.name!r} is the name of another pool, too")
        names.add(pool.name)
    limited: list[tuple[Key, Pool | Combo]] = [*pools, *((("combos", i), c) for i, c in enumerate(fleet.combos))]
    for at, each in limited:
        most = each.replicas if each.max_replicas is None else each.max_replicas
        if not each.min_replicas <= each.replicas <= most:
            raise places.error((*at, "replicas"), f"{each.replicas}; expected {each.min_replicas} to {most}")
    there = {pool.model.name for _, pool in pools}
    there |= {part.model.name for combo in fleet.combos if combo.replicas for part in combo.parts}
    for i, combo in enumerate(fleet.combos):
        if (model := combo.parts[0].model.name) not in there:
            raise places.error(("combos", i, "replicas"), f"0, and nothing else serves {model}; expected at least 1")


def _policies(scenario: Scenario) -> Policies:
    """The policies of a scenario that has one of each."""
    spec, places = scenario.spec.policies, scenario.places
    (routing,), (ordering,) = _listed(spec.routing), _listed(spec.ordering)
    with places.at("policies", "routing"):
        router = resolve.router(routing)
    with places.at("policies", "ordering"):
        order = resolve.ordering(ordering)
        if spec.ordering_at != "gateway":
            _check_engines(scenario.fleet, ordering)
    with places.at("policies", "migration"):
        migration = None if spec.migration is None else resolve.migration(spec.migration)
    with places.at("policies", "scaling"):
        scaler = _scaler(scenario)
    with places.at("policies", "admission"):
        admission = None if spec.admission is None else resolve.admission(spec.admission)
    return Policies(
        router, order, spec.ordering_at, _window(scenario), migration=migration, admission=admission,
        cascade=_cascade(scenario), scaler=scaler,
    )  # fmt: skip


def _window(scenario: Scenario) -> int | None:
    """Unless it is said: as many as a replica can run, where order is to be kept in front of it."""
    spec = scenario.spec.policies
    if spec.window is not None or spec.ordering_at == "replica":
        return spec.window
    return min(pool.engine.max_num_seqs for pool in scenario.fleet.all_pools)


def _scaler(scenario: Scenario) -> Choice[Scaler] | None:
    """With the forecaster and the planner that it asks for."""
    said = scenario.spec.policies.scaling
    if said is None:
        return None
    setting = longterm.Setting(
        scenario.spec.workload, scenario.spec.seed, scenario.base_dir, scenario.fleet, line_of(scenario)
    )  # fmt: skip
    return longterm.scaler(said, setting)


def _cascade(scenario: Scenario) -> CascadeOf | None:
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
    return CascadeOf(spec.name, models, policy, spec.judge_s, spec.judge_usd, spec.judge_bias, spec.judge_noise)


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
