"""Turns a fleet file into a gateway's plan: pools, policies and settings, checked against the engines' abilities."""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

from msgspec import structs
from msgspec.structs import replace

from headway import scenario, testing
from headway.config.fleet import coefficients_of
from headway.config.placeholders import resolved
from headway.config.scenario import Scenario, listed, with_policies
from headway.config.scenario import read as read_document
from headway.config.spec import Spec
from headway.config.strict_yaml import Key as PlaceKey
from headway.config.strict_yaml import Places
from headway.control.policies import Policies
from headway.core.policy import Ordering, SteppedOrdering
from headway.gateway.fleet.specs import Kubernetes, Processes, ServedPool, ServingPlan
from headway.gateway.server import web_server
from headway.gateway.server.admin import is_address
from headway.gateway.settings import AutopilotSettings, Judge, Key, PeerSettings, Settings
from headway.gateway.valkey_address import SCHEMES, is_valkey, valkey_address
from headway.gateway.workers.planner_process import PlannerProcesses
from headway.limits.budgets import TokenPrices
from headway.limits.calendar import weekly, zone
from headway.planning.cascade.replan import replanner_of
from headway.policies import ORDERINGS, resolve
from headway.policies.resolve import PolicyChoice
from headway.policies.scaling.hourly_plan import Planning
from headway.scenario.policies import check_followed, knows_future, policies_of
from headway.serving import demand_history, endpoints_file, pools
from headway.serving.pools import DeclaredPool
from headway.sim.replica_resources import kv_blocks

NO_WORKLOAD = {"builtin": "chat"}
"""The workload of a fleet file that has none. The real workload comes from clients."""
_HOST = "replica.kv_blocks_host"
_CLIENTS = dict.fromkeys(("postgresql", "postgres"), ("asyncpg", "postgres")) | dict.fromkeys(
    SCHEMES, ("redis", "valkey")
)
"""Maps each scheme of a database address to (module of the client, extra that installs the module)."""
QUEUE_MANAGER = {"name": "queue-manager", "interval_s": 0.1}
"""The admission policy of batches if the fleet file sets none."""


def read(path: Path) -> Scenario:
    """The scenario of a fleet file. In its section `gateway`, the document keeps placeholders instead of their
    values."""
    data, places = read_document(path)
    data = endpoints_file.filled(data, places, path.parent)
    data.setdefault("workload", NO_WORKLOAD)
    if "gateway" not in data:
        return scenario.assemble(data, places, path.parent)
    settings = resolved(data["gateway"], ("gateway",), places, path.parent, os.environ)
    chosen = scenario.assemble({**data, "gateway": settings}, places, path.parent)
    return dataclasses.replace(chosen, document={**chosen.document, "gateway": data["gateway"]})


def read_engines(path: Path) -> Scenario:
    """The scenario of a fleet file for its engines, which do not need the gateway's secrets."""
    data, places = read_document(path)
    data = endpoints_file.filled(data, places, path.parent)
    data.setdefault("workload", NO_WORKLOAD)
    return scenario.assemble(data, places, path.parent)


def load(
    path: Path, change: Callable[[Scenario], Scenario] = lambda scenario: scenario
) -> tuple[Scenario, ServingPlan]:
    """The scenario of a fleet file after `change`, and its plan. Raises HeadwayError if it cannot be served."""
    chosen = change(read(path))
    return chosen, plan(chosen)


def plan(scenario: Scenario) -> ServingPlan:
    """The gateway's plan. Raises HeadwayError if engines cannot support the scenario."""
    scenario = _with_tenants(scenario)
    spec, places = scenario.spec, scenario.places
    judge = _checked_judge(spec, places)
    declared = pools.declared_pools(scenario)
    pools.check_pools(declared, places)
    starts = pools.starts(scenario, declared)
    check_followed(scenario)
    _check_starts(scenario, declared, starts)
    if spec.autopilot is not None:
        with places.at("autopilot"):
            check_times(spec.autopilot)
    planners = PlannerProcesses()
    policies = _checked_policies(scenario, declared, planners)
    served, replanner = _served_pools(scenario, declared, starts), replanner_of(policies)
    return ServingPlan(
        pools=served,
        names=_names(declared),
        listed=_listed(declared),
        policies=policies,
        pacer=spec.pacer,
        seed=spec.seed,
        settings=_checked_settings(scenario),
        fallbacks=scenario.fleet.fallbacks,
        sends_priority=pools.uses_engine_priority(spec),
        engine_ordering=resolve.identity(policies.ordering) if pools.is_run_by_plugin(spec) else "",
        has_window=spec.policies.window is not None,
        judge=judge,
        gpu_limits=scenario.fleet.gpu_limits,
        network=spec.network,
        roles=spec.roles,
        stop_planners=planners.close,
        planned_gpus=None if replanner is None else _planned_gpus(spec, declared, policies, places),
        planner_messages=lambda: [] if replanner is None else replanner.messages,
        use_corrections=(lambda _: None) if replanner is None else replanner.use_corrections,
    )


def _names(declared: Sequence[DeclaredPool]) -> dict[str, tuple[str, ...]]:
    """The names of each model, in any of its pools."""
    names: dict[str, dict[str, None]] = {}
    for each in declared:
        names.setdefault(each.pool.model.name, {}).update(dict.fromkeys(each.pool.names))
    return {model: tuple(found) for model, found in names.items()}


def _listed(declared: Sequence[DeclaredPool]) -> tuple[str, ...]:
    """The names that clients see. A hosted pool's `served_name` is the service's own."""
    found: dict[str, dict[str, None]] = {}
    for each in declared:
        given = found.setdefault(each.pool.model.name, {})
        if each.spec.served_name and each.pool.hosted is None and not each.pool.is_standby:
            given[each.spec.served_name] = None
    return tuple(dict.fromkeys(name for model, given in found.items() for name in (*given, model)))


def _check_starts(scenario: Scenario, declared: list[DeclaredPool], starts: Sequence[pools.Start]) -> None:
    """Raises HeadwayError if policies or roles need replicas that Headway cannot start."""
    spec, places = scenario.spec, scenario.places
    if spec.policies.scaling is not None:
        own = [each for each in declared if each.pool.hosted is None]
        pools.require_starts(own, ("policies", "scaling"), places)
    pools.require_starts([each for each in declared if _is_planned(spec, each)], ("cascade", "replan"), places)
    if spec.gateway.peers is not None:
        _check_shared_starts(scenario, declared, starts)
    if spec.roles:
        pools.check_roles(declared, places)


def _checked_policies(scenario: Scenario, declared: list[DeclaredPool], planners: PlannerProcesses) -> Policies:
    """The policies, with one for batches. Raises HeadwayError if the policies need abilities that engines lack, or data
    that is not available."""
    spec, places = scenario.spec, scenario.places
    policies = policies_of(scenario, planners)
    batches = spec.gateway.batches
    if batches is not None and policies.admission is None:
        policies = replace(policies, admission=resolve.admission({**QUEUE_MANAGER, "batch_tier": batches.tier}))
    _check_oracles(policies, places)
    _check_forecasts(policies, places)
    demand_history.check(scenario, policies.scaler)
    if spec.policies.ordering_at != "gateway":
        _check_ordering(pools.ordering_name(spec.policies), declared, places)
    if policies.migration is not None:
        _check_continuation(declared, ("policies", "migration"), "nothing can move", places)
    elif spec.policies.preempt_every_s is not None:
        _check_continuation(declared, ("policies", "preempt_every_s"), "nothing can be paused", places)
    elif spec.policies.ordering_at != "replica":
        _check_progress(policies.ordering, places)
    pools.check_phases(declared, policies, places)
    _check_inputs(policies, declared, places)
    return policies


def _served_pools(
    scenario: Scenario, declared: list[DeclaredPool], starts: Sequence[pools.Start]
) -> tuple[ServedPool, ...]:
    """The pools with all data that the gateway needs to start and address replicas and to charge for them."""
    places, folder = scenario.places, scenario.base_dir
    combos = pools.bounded_combos(declared)
    step_times = coefficients_of(scenario.spec, scenario.fleet, folder, places, only_known=True)
    return tuple(
        ServedPool(
            pool=each.bounded(),
            endpoints=each.spec.endpoints,
            api=each.adapter.api,
            kv_blocks=kv_blocks(each.pool),
            start=start,
            slots=pools.slot_folder(each, folder, places),
            combo=None if each.combo is None else combos[each.combo.name],
            api_key=pools.engine_key(each, folder, places),
            prices=TokenPrices(
                each.spec.usd_per_million_input_tokens,
                each.spec.usd_per_million_output_tokens,
                each.spec.usd_per_million_cached_tokens,
            ),
            coefficients=step_times.get(each.pool.name),
            engine_model=pools.engine_model(each),
            kv_events=pools.kv_events(each, folder, places),
        )
        for each, start in zip(declared, starts, strict=True)
    )


# Settings.


def windows(settings: AutopilotSettings) -> Sequence[str]:
    """The times of the week in which an autopilot begins no change."""
    return (settings.freeze,) if isinstance(settings.freeze, str) else settings.freeze


def check_times(settings: AutopilotSettings) -> None:
    """Raises HeadwayError for an invalid time zone or time of the week."""
    zone(settings.time_zone)
    for text in windows(settings):
        weekly(text)


def _with_tenants(scenario: Scenario) -> Scenario:
    """The scenario with the tenants' weights in its ordering, if the ordering has weights.

    With keys, the default ordering is `fair` at the gateway; otherwise requests of all tenants would wait in the
    engines' queues in order of arrival.
    """
    keys = [key for key in scenario.spec.gateway.api_keys if isinstance(key, Key)]
    weights: dict[str, float] = {}
    for key in keys:
        if weights.setdefault(key.tenant, key.weight) != key.weight:
            what = f"{key.tenant!r} has keys of weights {weights[key.tenant]:g} and {key.weight:g}; expected one weight"
            raise scenario.places.error(("gateway", "api_keys"), what)
    policies = scenario.spec.policies
    if scenario.spec.gateway.needs_key and _has_default_order(scenario):
        policies = replace(policies, ordering="fair", ordering_at="gateway")
    if hasattr(ORDERINGS.get(pools.ordering_name(policies)), "set_weights"):
        (ordering,) = listed(policies.ordering)
        arguments: dict[str, Any] = {"name": ordering} if isinstance(ordering, str) else dict(ordering)
        weights = {tenant: weight for tenant, weight in weights.items() if weight != 1}
        if given := {**weights, **arguments.get("weights", {})}:
            arguments["weights"] = given
        policies = replace(policies, ordering=arguments)
    return with_policies(scenario, policies)


def _has_default_order(scenario: Scenario) -> bool:
    """Whether the file leaves the gateway to choose the ordering of requests and the place of the ordering."""
    given: list[Mapping[str, Any]] = [scenario.document.get("policies") or {}]
    given += [structs.asdict(variant) for variant in scenario.spec.variants]
    return not any(each.get("ordering") or each.get("ordering_at") in ("replica", "both") for each in given)


def _checked_judge(spec: Spec, places: Places) -> Judge | None:
    if spec.cascade is None:
        return None
    judge, at = spec.cascade.judge, ("cascade", "judge")
    if judge is None:
        raise places.error(("cascade",), "needs a `judge` to be served: `by: confidence`, or `url` and `model`")
    if judge.by == "confidence":
        return judge
    if not is_address(judge.url):
        raise places.error((*at, "url"), f"{judge.url!r}; expected the judge's address, http://host:port")
    if not judge.model:
        raise places.error((*at, "model"), "missing; expected the judge's own name for its model")
    for placeholder in ("{question}", "{answer}"):
        if judge.prompt and placeholder not in judge.prompt:
            raise places.error((*at, "prompt"), f"has no {placeholder}")
    return judge


def _checked_settings(scenario: Scenario) -> Settings:
    """The gateway's settings, with absolute database paths."""
    settings = scenario.spec.gateway
    if settings.tracing:
        try:
            importlib.import_module("headway.gateway.relay.tracing")
        except ModuleNotFoundError as error:
            raise web_server.not_installed(str(error.name), "otel") from None
    if settings.batches is not None:
        at = "gateway", "batches", "store"
        if is_valkey(settings.batches.store):
            raise scenario.places.error(
                at, "batches are not kept in Valkey or Redis; expected a file, or postgresql://host/database"
            )
        store = _checked_database(settings.batches.store, at, scenario, "multipart")
        settings = replace(settings, batches=replace(settings.batches, store=store))
    if settings.key_store is not None:
        store = _checked_database(settings.key_store.store, ("gateway", "key_store", "store"), scenario)
        settings = replace(settings, key_store=replace(settings.key_store, store=store))
    if settings.peers is not None:
        _check_peers(settings.peers, scenario)
    return settings


def _check_peers(peers: PeerSettings, scenario: Scenario) -> None:
    """Raises HeadwayError if this store cannot serve several gateways of a fleet."""
    places = scenario.places
    if "://" not in peers.store:
        what = f"{peers.store!r} is a file, which gateways of several machines cannot share"
        raise places.error(("gateway", "peers", "store"), f"{what}; expected postgresql:// or redis://host/database")
    _checked_database(peers.store, ("gateway", "peers", "store"), scenario)
    if peers.lease_s < 4 * peers.period_s:
        what = f"{peers.lease_s:g} is less than four times period_s ({peers.period_s:g}); a gateway would seem gone"
        raise places.error(("gateway", "peers", "lease_s"), f"{what} after one late message; expected more")


def _check_shared_starts(scenario: Scenario, declared: Sequence[DeclaredPool], starts: Sequence[object]) -> None:
    """Raises HeadwayError for replicas that several gateways cannot share or scale."""
    spec, places = scenario.spec, scenario.places
    for each, start in zip(declared, starts, strict=True):
        if isinstance(start, Processes):
            what = "of this machine, which no other gateway of `gateway.peers` knows; expected endpoints, or kubernetes"
            raise places.error((*each.at, "processes"), what)
        if isinstance(start, Kubernetes) and start.kind == "StatefulSet" and spec.policies.scaling is not None:
            what = "deletes its last pods, to which other gateways may be sending; expected Deployment"
            raise places.error((*each.at, "kubernetes", "kind"), what)
    is_in_cluster = any(isinstance(start, Kubernetes) for start in starts)
    if spec.gateway.peers is not None and spec.gateway.peers.leader == "kubernetes" and not is_in_cluster:
        raise places.error(("gateway", "peers", "leader"), "no pool has `kubernetes`, whose cluster has the Lease")


def _checked_database(store: str, at: PlaceKey, scenario: Scenario, *modules: str) -> str:
    """A database's address, or its file's absolute path. Raises HeadwayError if the database or a module is missing."""
    places = scenario.places
    kind, marker, _ = store.partition("://")
    if marker and kind not in _CLIENTS:
        what = "expected a file, postgresql://host/database or redis://host/0"
        raise places.error(at, f"{kind!r} is not a known database; {what}")
    client, extra = _CLIENTS[kind] if marker else ("aiosqlite", "gateway")
    for module, installed_by in ((client, extra), *((each, "gateway") for each in ("sqlalchemy", *modules))):
        if find_spec(module) is None:
            raise web_server.not_installed(module, installed_by)
    if marker:
        from headway.gateway.database import postgres_url

        with places.at(*at):
            if kind in SCHEMES:
                valkey_address(store)
            else:
                postgres_url(store)
        return store
    path = scenario.base_dir / store
    if not path.parent.is_dir():
        raise places.error(at, f"{path.parent} is no folder; expected a file in an existing folder")
    return str(path.absolute())


# Policies.


def _is_planned(spec: Spec, each: DeclaredPool) -> bool:
    """Whether replanning determines the number of the pool's replicas."""
    is_replanned = spec.cascade is not None and spec.cascade.replan is not None
    return is_replanned and not set(each.pool.model.names).isdisjoint(spec.cascade.models)  # type: ignore[union-attr]


def _planned_gpus(spec: Spec, declared: Sequence[DeclaredPool], policies: Policies, places: Places) -> int | None:
    """GPUs of this machine that plans divide; None if the GPUs are of several types. Raises HeadwayError if a pool has
    fewer ports than a plan may need.
    """
    if not isinstance(policies.scaler, PolicyChoice):
        return None
    gpus: dict[str, int] = policies.scaler.arguments["gpus"]
    for each in declared:
        most = gpus.get(each.pool.gpu.name, 0) // each.pool.parallel.num_gpus
        if each.num_ports is not None and _is_planned(spec, each) and each.num_ports < most:
            what = f"{each.num_ports} of them; expected {most}, as many replicas as a plan may have"
            raise places.error((*each.at, "processes", "ports"), what)
    return sum(gpus.values()) if len(gpus) == 1 else None


def _check_oracles(policies: Policies, places: Places) -> None:
    choices = {
        "routing": policies.router,
        "ordering": policies.ordering,
        "migration": policies.migration,
        "admission": policies.admission,
        "scaling": policies.scaler,
        "cascade": None if policies.cascade is None else policies.cascade.policy,
    }
    for key, choice in choices.items():
        if choice is not None and getattr(choice(), "oracle", False):
            what = f"{choice} reads what only a simulation knows, such as output lengths; expected another"
            raise places.error(("cascade", "policy") if key == "cascade" else ("policies", key), what)


def _check_forecasts(policies: Policies, places: Places) -> None:
    """Raises HeadwayError for forecasters that know the future, and for plans that must know a replica's capacity.
    Other planners learn the capacity."""
    choice = policies.scaler
    if not isinstance(choice, PolicyChoice):
        return
    parameters = signature(choice.made_by).parameters
    if "forecaster" not in parameters:
        return
    at = ("policies", "scaling")
    if knows_future(choice):
        raise places.error((*at, "forecaster"), "is fitted on demand that is still to come; expected one without -leak")
    if "plan" not in parameters:
        return
    config: Planning = choice.arguments.get("plan") or Planning()
    if not config.tps and "planner" not in choice.arguments:
        what = f"{choice.name} knows of no pool what a replica serves, and would leave them all as they are; expected"
        raise places.error(at, f"{what} `plan: {{tps: ...}}`, or `planner`, which finds it by simulation of `workload`")


def _check_inputs(policies: Policies, declared: Sequence[DeclaredPool], places: Places) -> None:
    """Reject policies that need data which a pool's engine does not report."""
    swapping = [each for each in declared if each.pool.engine.preemption == "swap" and not each.adapter.host_share]
    if not swapping:
        return
    readers = {
        "routing": (policies.router, testing.router_reads),
        "migration": (policies.migration, testing.migration_reads),
        "scaling": (policies.scaler, testing.scaler_reads),
        "admission": (policies.admission, testing.admission_reads),
    }
    for key, (choice, reads) in readers.items():
        if isinstance(choice, PolicyChoice) and _HOST in reads(choice):
            what = (
                f"{choice} reads {_HOST}, which the engine of {swapping[0].where} ({swapping[0].adapter.api}) does not"
            )
            raise places.error(("policies", key), f"{what} report though it swaps; expected another, or `recompute`")


def _check_ordering(name: str, declared: Sequence[DeclaredPool], places: Places) -> None:
    """Check that the engines support the ordering. Engines order their queues by arrival, or by tier if they accept a
    priority.

    A vLLM whose profile accepts another ordering (`orderings`) runs it through `headway.vllm.Scheduler`, and is asked
    whether it does.
    """
    for each in declared:
        if each.adapter.ordering:
            continue
        has_priority = each.adapter.priority_sign is not None
        if name != "fcfs" and not (name == "priority" and has_priority):
            orders = "fcfs or priority" if has_priority else "fcfs"
            what = (
                f"the engine of {each.where} ({each.adapter.api}) supports no order but {orders}, not {name};"
                " with ordering_at gateway, requests wait in order before they are sent"
            )
            raise places.error(("policies", "ordering"), what)


def _check_progress(choice: Callable[[], Ordering], places: Places) -> None:
    """Reject orderings by generated tokens: requests that wait at the gateway have generated none.

    With a migration policy they are accepted, because such a policy reads the lengths of the ordering's queues.
    """
    ordering = choice()
    if ordering.quantum is not None or isinstance(ordering, SteppedOrdering):
        what = (
            f"{choice} orders by the tokens that a request has so far, and a request that waits at the gateway has "
            "none: it would be fcfs, by tier at most; expected `preempt_every_s`, which pauses those that run, or"
            " another, such as fcfs, priority or edf"
        )
        raise places.error(("policies", "ordering"), what)


def _check_continuation(declared: Sequence[DeclaredPool], at: PlaceKey, effect: str, places: Places) -> None:
    """Check that engines can continue a moved or paused request from its tokens."""
    for each in declared:
        adapter = each.adapter
        if not adapter.gives_token_ids and adapter.template is None and adapter.continue_options is None:
            what = f"the engine of {each.where} ({adapter.api}) cannot continue another's answer, so {effect}"
            raise places.error(at, what)
