"""From a fleet file to a gateway: what is served, by which policies, and what engines cannot be told."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from pathlib import Path
from shutil import which

from msgspec.structs import replace

from headway import scenario, userfile, webserver
from headway.control.policies import Policies
from headway.core.fleet import Pool
from headway.gateway.adapters import ADAPTERS, Adapter, api_of
from headway.gateway.admin import is_address
from headway.gateway.gateway import Plan, Served
from headway.gateway.settings import Judge, Settings
from headway.gateway.starting import Kubernetes, Processes
from headway.policies import resolve
from headway.scenario import Scenario, policies_of
from headway.scenariofile import PolicySpec, PoolSpec, Spec
from headway.sim.makeup import kv_blocks
from headway.userfile import Key, Places

NO_WORKLOAD = {"builtin": "chat"}
"""Stands in where a fleet file has none: clients bring it."""
QUEUE_MANAGER = {"name": "queue-manager", "interval_s": 0.1}
"""Who lets batches go, where a fleet file does not say."""


def load(path: Path) -> tuple[Scenario, Plan]:
    """What a fleet file says. HeadwayError where it cannot be served."""
    data, places = userfile.read(path)
    data.setdefault("name", path.stem)
    data.setdefault("workload", NO_WORKLOAD)
    chosen = scenario.assemble(data, places, path.parent)
    return chosen, plan(chosen)


def plan(chosen: Scenario) -> Plan:
    """What a gateway is to do. HeadwayError where engines cannot act it out."""
    spec, places = chosen.spec, chosen.places
    if spec.roles:
        raise places.error(("roles",), "a gateway cannot tell an engine to prefill or to decode only; leave it out")
    if spec.combos:
        raise places.error(("combos",), "engines that hand KV caches over are not served yet; expected `fleet` alone")
    judge = _judge(spec, places)
    adapters = [_adapter(pool, ("fleet", i), places) for i, pool in enumerate(spec.fleet)]
    starts = _starts(chosen)
    policies = _with_queue_manager(policies_of(chosen), spec.gateway)
    _check_oracles(policies, places)
    if spec.policies.ordering_at != "gateway":
        _check_ordering(spec.policies.ordering, adapters, places)
    if policies.migration is not None:
        _check_migration(adapters, places)
    pools = zip(chosen.fleet.pools, spec.fleet, adapters, starts, strict=True)
    served = tuple(
        Served(_limited(pool, start), said.endpoints, adapter.api, kv_blocks(pool), start)
        for pool, said, adapter, start in pools
    )
    models = [pool.model for pool in chosen.fleet.pools]
    return Plan(
        pools=served,
        names={model.name: (model.name, model.hf_id, *model.aliases) for model in models},
        policies=policies,
        pacer=spec.pacer,
        seed=spec.seed,
        settings=_settings(chosen),
        tell_priority=spec.policies.ordering_at != "gateway" and _name(spec.policies.ordering) == "priority",
        judge=judge,
        gpu_limits=chosen.fleet.gpu_limits,
    )


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
            importlib.import_module("headway.gateway.tracing")
        except ModuleNotFoundError as error:
            raise webserver.needed(str(error.name), "otel") from None
    batches = settings.batches
    if batches is None:
        return settings
    at = ("gateway", "batches", "store")
    kind, marker, _ = batches.store.partition("://")
    if marker and kind not in ("postgresql", "postgres"):
        raise places.error(at, f"{kind!r} is no database that is known; expected a file, or postgresql://host/database")
    for module in ("sqlalchemy", "multipart", "asyncpg" if marker else "aiosqlite"):
        if find_spec(module) is None:
            raise webserver.needed(module, "postgres" if module == "asyncpg" else "gateway")
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


def _adapter(pool: PoolSpec, at: Key, places: Places) -> Adapter:
    """The pool's dialect, once its endpoints make sense."""
    ways = [key for key in ("endpoints", "processes", "kubernetes") if getattr(pool, key)]
    if not ways:
        what = "missing; expected where the pool's replicas listen, http://host:port, or `processes` or `kubernetes`"
        raise places.error((*at, "endpoints"), what)
    if len(ways) > 1:
        raise places.error((*at, ways[1]), f"its replicas are said by `{ways[0]}`; expected one of the two")
    for i, url in enumerate(pool.endpoints):
        if not is_address(url):
            raise places.error((*at, "endpoints", i), f"{url!r}; expected http://host:port")
    engine = pool.engine if isinstance(pool.engine, str) else str(pool.engine.get("name", ""))
    return ADAPTERS[pool.api or api_of(engine)]


def _starts(chosen: Scenario) -> list[Processes | Kubernetes | None]:
    """How each pool's replicas are started. HeadwayError where that cannot be, or is not said and scaling needs it."""
    spec, places = chosen.spec, chosen.places
    made: list[Processes | Kubernetes | None] = []
    taken: dict[int, int] = {}
    for i, pool in enumerate(spec.fleet):
        at: Key = ("fleet", i)
        if pool.processes is not None:
            made.append(_processes(pool, pool.processes, chosen.base_dir, (*at, "processes"), places))
            for port in _ports(pool.processes):
                if taken.setdefault(port, i) != i:
                    raise places.error((*at, "processes", "ports"), f"{port} is fleet[{taken[port]}]'s, too")
        else:
            made.append(pool.kubernetes)
            if pool.kubernetes is not None:
                _check_cluster(pool.kubernetes, (*at, "kubernetes"), places)
        if spec.policies.scaling is not None and made[-1] is None:
            what = f"fleet[{i}] has `endpoints`, where nothing can be started; expected `processes` or `kubernetes`"
            raise places.error(("policies", "scaling"), what)
    return made


def _check_cluster(how: Kubernetes, at: Key, places: Places) -> None:
    """There is one, as far as can be told without asking it."""
    if find_spec("kubernetes") is None:
        raise webserver.needed("kubernetes", "kubernetes")
    from headway.gateway import pods

    with places.at(*at):
        pods.check(how)


def _processes(pool: PoolSpec, how: Processes, base_dir: Path, at: Key, places: Places) -> Processes:
    """As it is said, with its folder for logs where the fleet file is."""
    num = len(_ports(how))
    if not num:
        raise places.error((*at, "ports"), f"{how.ports[0]} to {how.ports[1]}; expected the lower one first")
    for most, key in ((pool.replicas, "replicas"), (pool.max_replicas or 0, "max_replicas")):
        if most > num:
            raise places.error((*at[:2], key), f"{most}; expected {num} at most, as many as `processes.ports`")
    if not any("{port}" in word for word in (*how.command, *how.env.values())):
        raise places.error((*at, "command"), "{port} is nowhere in it; expected it where the engine is told its port")
    if which(how.command[0]) is None:
        raise places.error((*at, "command", 0), f"{how.command[0]!r}: there is no such program here")
    if how.log and not (base_dir / how.log).is_dir():
        raise places.error((*at, "log"), f"{base_dir / how.log} is no folder; expected one that is there")
    return replace(how, log=str((base_dir / how.log).absolute())) if how.log else how


def _ports(how: Processes) -> range:
    return range(how.ports[0], how.ports[1] + 1)


def _limited(pool: Pool, start: Processes | Kubernetes | None) -> Pool:
    """No more replicas than there are ports."""
    if not isinstance(start, Processes) or pool.max_replicas is not None:
        return pool
    return replace(pool, max_replicas=len(_ports(start)))


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


def _check_ordering(ordering: PolicySpec | list[PolicySpec], adapters: list[Adapter], places: Places) -> None:
    """What an engine's own queue can be told: nothing, or a request's tier."""
    name = _name(ordering)
    for i, adapter in enumerate(adapters):
        if name != "fcfs" and not (name == "priority" and adapter.urgent_sign is not None):
            orders = "fcfs" if adapter.urgent_sign is None else "fcfs or priority"
            what = (
                f"the engine of fleet[{i}] ({adapter.api}) can be told no order but {orders}, not {name};"
                " with ordering_at gateway, requests wait in order before they are sent"
            )
            raise places.error(("policies", "ordering"), what)


def _check_migration(adapters: list[Adapter], places: Places) -> None:
    """A request moves by being continued from its tokens."""
    for i, adapter in enumerate(adapters):
        if not adapter.gives_token_ids and adapter.template is None and adapter.continues_chats is None:
            what = f"the engine of fleet[{i}] ({adapter.api}) cannot go on with another's answer, so nothing can move"
            raise places.error(("policies", "migration"), what)


def _name(spec: PolicySpec | list[PolicySpec]) -> str:
    one = spec[0] if isinstance(spec, list) else spec
    return one if isinstance(one, str) else str(one.get("name"))
