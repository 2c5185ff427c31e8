"""From a fleet file to a gateway: what is served, by which policies, and what engines cannot be told."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from shutil import which

from msgspec.structs import replace

from headway import scenario
from headway.config.scenario import Scenario
from headway.config.scenario import read as read_document
from headway.config.spec import PolicySpec, Spec
from headway.config.strict_yaml import Places
from headway.control.policies import Policies
from headway.core.fleet import Combo, Pool
from headway.gateway.fleet.starting import Kubernetes, Processes
from headway.gateway.plan import Plan, Served
from headway.gateway.server import web_server
from headway.gateway.server.admin import is_address
from headway.gateway.settings import Judge, Settings
from headway.gateway.upstream.dialects import ADAPTERS, Adapter, api_of
from headway.gateway.workers.planner_process import PlannerProcesses
from headway.planning.cascade.replanning import Replanner
from headway.policies import resolve
from headway.policies.resolve import PolicyChoice
from headway.policies.scaling.hourly_plan import Planning
from headway.scenario.long_term import knows_future
from headway.scenario.policies import policies_of
from headway.scenario.replan import replanner_of
from headway.serving.pools import DeclaredPool, check_halves, check_together, parts_of
from headway.sim.replica_resources import kv_blocks

NO_WORKLOAD = {"builtin": "chat"}
"""Stands in where a fleet file has none: clients bring it."""
_NO_HANDOVER = {
    "sglang": "an SGLang engine is started for one phase and cannot do the other; expected vLLM",
    "llama.cpp": "llama.cpp's server gives its KV cache to no other; expected vLLM, SGLang, or `aggregated`",
    "openai": "OpenAI's API has no words for a KV cache that is handed over; expected vLLM, SGLang, or `aggregated`",
}
"""Why a replica can be no part of a pair."""
QUEUE_MANAGER = {"name": "queue-manager", "interval_s": 0.1}
"""Who lets batches go, where a fleet file does not say."""


def read(path: Path) -> Scenario:
    """What a fleet file says."""
    data, places = read_document(path)
    data.setdefault("workload", NO_WORKLOAD)
    return scenario.assemble(data, places, path.parent)


def load(path: Path, changed: Callable[[Scenario], Scenario] = lambda said: said) -> tuple[Scenario, Plan]:
    """What a fleet file says, with what is to be changed of it. HeadwayError where it cannot be served."""
    chosen = changed(read(path))
    return chosen, plan(chosen)


def plan(chosen: Scenario) -> Plan:
    """What a gateway is to do. HeadwayError where engines cannot act it out."""
    spec, places = chosen.spec, chosen.places
    judge = _judge(spec, places)
    said = parts_of(chosen)
    adapters = [_adapter(each, places) for each in said]
    check_together(said, places)
    starts = _starts(chosen, said)
    if spec.roles:
        _check_roles(said, adapters, places)
    clerks = PlannerProcesses()
    policies = _with_queue_manager(policies_of(chosen, clerks), spec.gateway)
    _check_oracles(policies, places)
    _check_forecasts(policies, places)
    if spec.policies.ordering_at != "gateway":
        _check_ordering(spec.policies.ordering, said, adapters, places)
    if policies.migration is not None:
        _check_migration(said, adapters, places)
    check_halves(said, adapters, policies, places)
    combos = _limited_combos(said)
    served = tuple(
        Served(
            _limited(each, start), each.spec.endpoints, adapter.api, kv_blocks(each.pool), start, slots,
            None if each.combo is None else combos[each.combo.name],
        )
        for each, adapter, start, slots in zip(said, adapters, starts, _slots(chosen, said, adapters), strict=True)
    )  # fmt: skip
    models = [each.pool.model for each in said]
    return Plan(
        pools=served,
        names={model.name: model.names for model in models},
        policies=policies,
        pacer=spec.pacer,
        seed=spec.seed,
        settings=_settings(chosen),
        tell_priority=spec.policies.ordering_at != "gateway" and _name(spec.policies.ordering) == "priority",
        judge=judge,
        gpu_limits=chosen.fleet.gpu_limits,
        roles=spec.roles,
        clerks=clerks,
        planned_gpus=_planned_gpus(spec, said, policies, places),
        news=partial(_news, replanner_of(policies)),
    )


def _news(planner: Replanner | None) -> list[str]:
    """What a planner has had to say."""
    return [] if planner is None else planner.news


def _judge(spec: Spec, places: Places) -> Judge | None:
    """Who scores the cascade's answers. HeadwayError where nobody does."""
    if spec.cascade is None:
        return None
    judge, at = spec.cascade.judge, ("cascade", "judge")
    if judge is None:
        raise places.error(("cascade",), "needs a `judge` to be served: `by: confidence`, or `url` and `model`")
    if judge.by == "confidence":
        return judge
    if not is_address(judge.url):
        raise places.error((*at, "url"), f"{judge.url!r}; expected where the judge listens, http://host:port")
    if not judge.model:
        raise places.error((*at, "model"), "missing; expected what the judge calls its model")
    for part in ("{question}", "{answer}"):
        if judge.prompt and part not in judge.prompt:
            raise places.error((*at, "prompt"), f"has no {part}; expected it where that is to stand")
    return judge


def _settings(chosen: Scenario) -> Settings:
    """The gateway's, with a database that can be used. HeadwayError where it cannot."""
    settings, places = chosen.spec.gateway, chosen.places
    if settings.tracing:
        try:
            importlib.import_module("headway.gateway.telemetry.tracing")
        except ModuleNotFoundError as error:
            raise web_server.not_installed(str(error.name), "otel") from None
    batches = settings.batches
    if batches is None:
        return settings
    at = ("gateway", "batches", "store")
    kind, marker, _ = batches.store.partition("://")
    if marker and kind not in ("postgresql", "postgres"):
        raise places.error(at, f"{kind!r} is no database that is known; expected a file, or postgresql://host/database")
    for module in ("sqlalchemy", "multipart", "asyncpg" if marker else "aiosqlite"):
        if find_spec(module) is None:
            raise web_server.not_installed(module, "postgres" if module == "asyncpg" else "gateway")
    if marker:
        from headway.gateway.batch.store import postgres_url

        with places.at(*at):
            postgres_url(batches.store)
        return settings
    path = chosen.base_dir / batches.store
    if not path.parent.is_dir():
        raise places.error(at, f"{path.parent} is no folder; expected a file in one that is there")
    return replace(settings, batches=replace(batches, store=str(path.absolute())))


def _with_queue_manager(policies: Policies, settings: Settings) -> Policies:
    """Batches are let go by an admission policy: without one, by SageServe's."""
    if settings.batches is None or policies.admission is not None:
        return policies
    return replace(policies, admission=resolve.admission({**QUEUE_MANAGER, "batch_tier": settings.batches.tier}))


def _adapter(said: DeclaredPool, places: Places) -> Adapter:
    """The pool's dialect, once its endpoints make sense."""
    pool, at = said.spec, said.at
    ways = said.ways
    if not ways:
        what = "missing; expected where the pool's replicas listen, http://host:port, or `processes` or `kubernetes`"
        raise places.error((*at, "endpoints"), what)
    if len(ways) > 1:
        raise places.error((*at, ways[1]), f"its replicas are said by `{ways[0]}`; expected one of the two")
    for i, url in enumerate(pool.endpoints):
        if not is_address(url):
            raise places.error((*at, "endpoints", i), f"{url!r}; expected http://host:port")
    engine = pool.engine if isinstance(pool.engine, str) else str(pool.engine.get("name", ""))
    adapter = ADAPTERS[pool.api or api_of(engine)]
    if said.pool.role != "mixed" and not adapter.transfers_kv and not adapter.dual_dispatch:
        raise places.error(at, _NO_HANDOVER.get(adapter.api, _NO_HANDOVER["openai"]))
    return adapter


def _starts(chosen: Scenario, said: list[DeclaredPool]) -> list[Processes | Kubernetes | None]:
    """How each pool's replicas are started. HeadwayError where that cannot be, or is not said and scaling needs it."""
    spec, places = chosen.spec, chosen.places
    made: list[Processes | Kubernetes | None] = []
    taken: dict[int, int] = {}
    for i, each in enumerate(said):
        pool, at = each.spec, each.at
        if pool.processes is not None:
            made.append(_processes(each, pool.processes, chosen.base_dir, places))
            for port in _ports(pool.processes):
                other = said[taken.setdefault(port, i)]
                if other.spec.processes is not pool.processes:
                    raise places.error((*at, "processes", "ports"), f"{port} is {other.where}'s, too")
        else:
            made.append(pool.kubernetes)
            if pool.kubernetes is not None:
                _check_cluster(each, pool.kubernetes, places)
        if made[-1] is None and _is_planned(spec, each):
            what = f"{each.where} has `endpoints`, where nothing can be started; expected `processes` or `kubernetes`"
            raise places.error(("cascade", "replan"), what)
        if spec.policies.scaling is not None and made[-1] is None:
            what = f"{each.where} has `endpoints`, where nothing can be started; expected `processes` or `kubernetes`"
            raise places.error(("policies", "scaling"), what)
    return made


def _is_planned(spec: Spec, said: DeclaredPool) -> bool:
    """Plans say how many replicas the pool has."""
    names = set(said.pool.model.names)
    return spec.cascade is not None and spec.cascade.replan is not None and not names.isdisjoint(spec.cascade.models)


def _planned_gpus(spec: Spec, said: list[DeclaredPool], policies: Policies, places: Places) -> int | None:
    """GPUs of this machine that plans share out. HeadwayError where ports would be wanting."""
    if replanner_of(policies) is None or not isinstance(policies.scaler, PolicyChoice):
        return None
    num_gpus: int = policies.scaler.arguments["num_gpus"]
    for each in said:
        how, size = each.spec.processes, each.pool.parallel.num_gpus
        if how is not None and _is_planned(spec, each) and len(_ports(how)) < num_gpus // size:
            what = f"{len(_ports(how))} of them; expected {num_gpus // size}, as many replicas as a plan may have"
            raise places.error((*each.at, "processes", "ports"), what)
    return num_gpus


def _check_roles(said: list[DeclaredPool], adapters: list[Adapter], places: Places) -> None:
    """Replicas of combos are numbered as the fleet file has them, which processes are not."""
    for each, adapter in zip(said, adapters, strict=True):
        if each.combo is not None and not adapter.transfers_kv:
            raise places.error(("roles",), f"{each.where}: {_NO_HANDOVER.get(adapter.api, _NO_HANDOVER['openai'])}")
        if each.combo is not None and not each.spec.endpoints:
            what = f"{each.where} has no `endpoints`, so its replicas have no numbers beforehand; roles of"
            raise places.error(("roles",), f"{what} those that are started are set by POST /workers/ID/role")


def _check_cluster(said: DeclaredPool, how: Kubernetes, places: Places) -> None:
    """There is one, as far as can be told without asking it."""
    at = (*said.at, "kubernetes")
    if find_spec("kubernetes") is None:
        raise web_server.not_installed("kubernetes", "kubernetes")
    from headway.gateway.fleet import kubernetes

    with places.at(*at):
        kubernetes.check(how)


def _processes(said: DeclaredPool, how: Processes, base_dir: Path, places: Places) -> Processes:
    """As it is said, with its folder for logs where the fleet file is."""
    num, at = len(_ports(how)), (*said.at, "processes")
    if not num:
        raise places.error((*at, "ports"), f"{how.ports[0]} to {how.ports[1]}; expected the lower one first")
    each = said.pool.replicas if said.combo is not None else 1
    limited = said.pool if said.combo is None else said.combo
    for most, key in ((limited.replicas, "replicas"), (limited.max_replicas or 0, "max_replicas")):
        if most * each > num:
            what = f"{most}; expected {num // each} at most, as many as `processes.ports`"
            raise places.error((*said.at[:2], key), what if said.combo is None else f"{what} of {said.where}")
    if not any("{port}" in word for word in (*how.command, *how.env.values())):
        raise places.error((*at, "command"), "{port} is nowhere in it; expected it where the engine is told its port")
    if which(how.command[0]) is None:
        raise places.error((*at, "command", 0), f"{how.command[0]!r}: there is no such program here")
    if how.log and not (base_dir / how.log).is_dir():
        raise places.error((*at, "log"), f"{base_dir / how.log} is no folder; expected one that is there")
    return replace(how, log=str((base_dir / how.log).absolute())) if how.log else how


def _slots(chosen: Scenario, said: list[DeclaredPool], adapters: list[Adapter]) -> list[Path | None]:
    """The folder for each pool's KV caches. HeadwayError where there is none, or engines do not save them."""
    folders: list[Path | None] = []
    for each, adapter in zip(said, adapters, strict=True):
        folder = (chosen.base_dir / each.spec.slots).absolute() if each.spec.slots else None
        if folder is not None and adapter.api != "llama.cpp":
            what = f"engines that speak {adapter.api} have no slots; expected it of `api: llama.cpp` only"
            raise chosen.places.error((*each.at, "slots"), what)
        if folder is not None and not folder.is_dir():
            what = f"{folder} is no folder; expected the one that is the engines' --slot-save-path"
            raise chosen.places.error((*each.at, "slots"), what)
        folders.append(folder)
    return folders


def _ports(how: Processes) -> range:
    return range(how.ports[0], how.ports[1] + 1)


def _limited(said: DeclaredPool, start: Processes | Kubernetes | None) -> Pool:
    """No more replicas than there are ports."""
    if not isinstance(start, Processes) or said.pool.max_replicas is not None:
        return said.pool
    return replace(said.pool, max_replicas=len(_ports(start)))


def _limited_combos(said: list[DeclaredPool]) -> dict[str, Combo]:
    """No more of each than there are ports for all of its parts."""
    limited: dict[str, Combo] = {}
    for each in said:
        if each.combo is None:
            continue
        known, how = limited.setdefault(each.combo.name, each.combo), each.spec.processes
        if how is not None and each.combo.max_replicas is None:
            most = len(_ports(how)) // each.pool.replicas
            limited[known.name] = replace(known, max_replicas=min(most, known.max_replicas or most))
    return limited


def _check_oracles(policies: Policies, places: Places) -> None:
    """Nobody knows how long an answer will be."""
    made = {
        "routing": policies.router, "ordering": policies.ordering, "migration": policies.migration,
        "admission": policies.admission, "scaling": policies.scaler,
        "cascade": None if policies.cascade is None else policies.cascade.policy,
    }  # fmt: skip
    for key, choice in made.items():
        if choice is not None and getattr(choice(), "oracle", False):
            what = f"{choice} reads what only a simulation knows, such as output lengths; expected another"
            raise places.error(("cascade", "policy") if key == "cascade" else ("policies", key), what)


def _check_forecasts(policies: Policies, places: Places) -> None:
    """Nobody knows the demand to come; and a plan needs to know what a replica serves."""
    choice = policies.scaler
    if not isinstance(choice, PolicyChoice) or "forecaster" not in signature(choice.made_by).parameters:
        return
    at = ("policies", "scaling")
    if knows_future(choice):
        raise places.error((*at, "forecaster"), "is fitted on demand that is still to come; expected one without -leak")
    config: Planning = choice.arguments.get("plan") or Planning()
    if not config.tps and "planner" not in choice.arguments:
        what = f"{choice.name} knows of no pool what a replica serves, and would leave them all as they are; expected"
        raise places.error(at, f"{what} `plan: {{tps: ...}}`, or `planner`, which finds it by simulation of `workload`")


def _check_ordering(
    ordering: PolicySpec | list[PolicySpec], said: list[DeclaredPool], adapters: list[Adapter], places: Places
) -> None:
    """What an engine's own queue can be told: nothing, or a request's tier."""
    name = _name(ordering)
    for each, adapter in zip(said, adapters, strict=True):
        if name != "fcfs" and not (name == "priority" and adapter.priority_sign is not None):
            orders = "fcfs" if adapter.priority_sign is None else "fcfs or priority"
            what = (
                f"the engine of {each.where} ({adapter.api}) can be told no order but {orders}, not {name};"
                " with ordering_at gateway, requests wait in order before they are sent"
            )
            raise places.error(("policies", "ordering"), what)


def _check_migration(said: list[DeclaredPool], adapters: list[Adapter], places: Places) -> None:
    """A request moves by being continued from its tokens."""
    for each, adapter in zip(said, adapters, strict=True):
        if not adapter.gives_token_ids and adapter.template is None and adapter.continue_options is None:
            what = f"the engine of {each.where} ({adapter.api}) cannot go on with another's answer, so nothing can move"
            raise places.error(("policies", "migration"), what)


def _name(spec: PolicySpec | list[PolicySpec]) -> str:
    one = spec[0] if isinstance(spec, list) else spec
    return one if isinstance(one, str) else str(one.get("name"))
