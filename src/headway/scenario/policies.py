"""Resolves the policies of a scenario from names and arguments, and checks them against its fleet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime

from headway.config.scenario import Scenario, StepTimes, listed, variants
from headway.config.spec import PolicySpec
from headway.config.user_modules import loader_of
from headway.control.hold_queue import is_sharing
from headway.control.policies import CascadeConfig, Policies
from headway.core.errors import HeadwayError, unknown
from headway.core.fleet import Combo, Fleet, Pool
from headway.core.policy import Ordering, Scaler
from headway.core.task import TaskFactory
from headway.limits.calendar import moment, zone
from headway.limits.schedules import LeastReplicas
from headway.policies import resolve
from headway.policies.resolve import PolicyChoice
from headway.workload.spec import TraceSpec


def policies_of(scenario: Scenario, tasks: TaskFactory | None = None) -> Policies:
    """The policies of a scenario with one variant. `tasks` runs the planners of scalers; None: inline.

    Raises HeadwayError for several variants, or for a policy that cannot be created.
    """
    chosen = variants(scenario)
    if len(chosen) > 1:
        raise scenario.places.error(("policies",), "several of a kind; expected one routing and one ordering")
    return _resolved(chosen[0], tasks)


def check(scenario: Scenario) -> None:
    """Raise HeadwayError if a policy of any variant cannot be created."""
    for variant in variants(scenario):
        _resolved(variant, None)


def labels(scenario: Scenario, policies: Policies) -> dict[str, str]:
    """Report labels of the policies of a scenario with one variant: kind -> name and arguments."""
    spec = scenario.spec
    if spec.variants:
        return {"policies": spec.variants[0].name}
    names = {"routing": str(policies.router), "ordering": str(policies.ordering)}
    if spec.policies.migration is not None:
        names["migration"] = str(policies.migration)
    if spec.policies.scaling is not None:
        names["scaling"] = str(policies.scaler)
    return names if policies.ordering_at == "replica" else {**names, "ordering_at": policies.ordering_at}


def scaler_of(scenario: Scenario, tasks: TaskFactory | None = None) -> PolicyChoice[Scaler] | None:
    """The scaler, with the forecaster and planner named in its specification."""
    spec = scenario.spec.policies.scaling
    if spec is None:
        return None
    from headway.planning.regions import long_term

    return long_term.scaler(spec, scenario, StepTimes(scenario), tasks)


def knows_future(scaler: Callable[[], Scaler] | None) -> bool:
    """Whether the scaler's forecaster is fitted to the run's own demand."""
    return isinstance(scaler, PolicyChoice) and getattr(scaler.arguments.get("forecaster"), "cheats", False)


def _resolved(scenario: Scenario, tasks: TaskFactory | None) -> Policies:
    spec, places, load = scenario.spec.policies, scenario.places, loader_of(scenario.base_dir)
    (routing,), (ordering,) = listed(spec.routing), listed(spec.ordering)
    with places.at("policies", "routing"):
        router = resolve.router(routing, load)
    with places.at("policies", "ordering"):
        order = resolve.ordering(ordering, load)
        one = order()
        if spec.ordering_at != "gateway":
            _check_engines(scenario.fleet, ordering)
            if is_sharing(one):
                raise HeadwayError(f"{order.name} orders the gateway's queue only; expected `ordering_at: gateway`")
    if spec.preempt_every_s is not None:
        with places.at("policies", "preempt_every_s"):
            _check_preemption(scenario, one)
    migration = scaler = admission = None
    if spec.migration is not None:
        with places.at("policies", "migration"):
            migration = resolve.migration(spec.migration, load)
    if spec.scaling is not None:
        with places.at("policies", "scaling"):
            scaler = scaler_of(scenario, tasks)
    if spec.admission is not None:
        with places.at("policies", "admission"):
            admission = resolve.admission(spec.admission, load)
    least = _least(scenario)
    policies = Policies(
        router,
        order,
        spec.ordering_at,
        _window(scenario),
        spec.preempt_every_s,
        spec.max_hold_s,
        spec.shed_ttft_share,
        migration=migration,
        admission=admission,
        cascade=_cascade(scenario),
        scaler=scaler,
        least=least,
        began_s=_began_s(scenario) if least else None,
        prompt_window=_prompt_window(scenario) if is_sharing(one) else None,
        fallback=spec.fallback,
        slo_ttft_s=scenario.spec.slo.ttft_s,
        slo_tpot_s=scenario.spec.slo.tpot_s,
        slo_e2e_s=scenario.spec.slo.e2e_s,
    )
    if scenario.spec.cascade is None or scenario.spec.cascade.replan is None:
        return policies
    from headway.planning.cascade import replan

    return replan.add_replanning(scenario, policies, tasks)


def check_begins(scenario: Scenario, policies: Policies) -> None:
    """Raise HeadwayError if a simulation has schedules but no start date."""
    if policies.scaler is None and not scenario.document.get("variants"):
        check_followed(scenario)
    if policies.least and policies.began_s is None:
        what = "missing; expected the time at second 0, as in 2026-03-02T00:00:00+01:00, for scheduled_min_replicas"
        raise scenario.places.error(("simulation", "begins"), what)


def check_followed(scenario: Scenario) -> None:
    """Raise HeadwayError if a fleet has schedules but no scaler, because the schedules would be ignored."""
    if scenario.spec.policies.scaling is None:
        for key, i, each in _deployments(scenario):
            if each.scheduled_min_replicas:
                what = "goes with `policies: scaling`; `minimum` has no more than the minimum"
                raise scenario.places.error((key, i, "scheduled_min_replicas"), what)


def _least(scenario: Scenario) -> dict[str, LeastReplicas]:
    """The schedules by pool or combo; empty without a scaler."""
    if scenario.spec.policies.scaling is None:
        return {}
    return {
        each.name: LeastReplicas(each.min_replicas, each.scheduled_min_replicas)
        for _, _, each in _deployments(scenario)
        if each.scheduled_min_replicas
    }


def _deployments(scenario: Scenario) -> list[tuple[str, int, Pool | Combo]]:
    """Pools and combos, with their keys in the file."""
    deployments: list[tuple[str, int, Pool | Combo]] = [
        ("fleet", i, each) for i, each in enumerate(scenario.fleet.pools)
    ]
    deployments += [("combos", i, each) for i, each in enumerate(scenario.fleet.combos)]
    return deployments


def _began_s(scenario: Scenario) -> float | None:
    """Epoch time of the run's time 0, if the scenario or its trace states it."""
    begins, workload = scenario.spec.simulation.begins, scenario.spec.workload
    if begins is not None:
        with scenario.places.at("simulation", "begins"):
            found = moment(begins, zone("UTC"))
            if "T" not in begins.upper().replace(" ", "T") or datetime.fromisoformat(begins.strip()).tzinfo is None:
                raise HeadwayError(f"{begins!r}; expected a time with its offset, as in 2026-03-02T00:00:00+01:00")
            return found.timestamp()
    if workload.trace is None:
        return None
    from headway.forecast.recorded_hours import recorded_began_s  # it imports pyarrow, which few simulations need

    trace = TraceSpec(workload.trace) if isinstance(workload.trace, str) else workload.trace
    began_s = recorded_began_s(scenario.base_dir / trace.path)
    return None if began_s is None else began_s + trace.from_s


def _check_preemption(scenario: Scenario, ordering: Ordering) -> None:
    """Raise HeadwayError if no request would ever be paused."""
    if scenario.spec.policies.ordering_at != "gateway":
        raise HeadwayError("requests wait in the replicas' queues; expected `ordering_at: gateway`")
    if not ordering.preemptive and not is_sharing(ordering):
        name = type(ordering).__name__
        raise HeadwayError(f"{name} never preempts a request that runs; expected another ordering, such as pascal")


def _window(scenario: Scenario) -> int | None:
    """The specified window; None: with an ordering at the gateway, the number of requests that a replica runs at once,
    else no window."""
    spec = scenario.spec.policies
    if spec.window is not None or spec.ordering_at == "replica":
        return spec.window
    return min(pool.engine.max_num_seqs for pool in _own_pools(scenario.fleet))


def _prompt_window(scenario: Scenario) -> int:
    """The prompt tokens of one iteration, which keep an engine busy."""
    return min(pool.engine.max_num_batched_tokens for pool in _own_pools(scenario.fleet))


def _own_pools(fleet: Fleet) -> Sequence[Pool]:
    """The pools that run their own engines; all pools if there is none."""
    return [pool for pool in fleet.all_pools if pool.hosted is None] or fleet.all_pools


def _cascade(scenario: Scenario) -> CascadeConfig | None:
    spec, places = scenario.spec.cascade, scenario.places
    if spec is None:
        return None
    served = {name: pool.model.name for pool in scenario.fleet.all_pools for name in pool.model.names}
    for i, name in enumerate(spec.models):
        if name not in served:
            raise unknown("model", name, served, places.where(("cascade", "models", i)))
    with places.at("cascade", "policy"):
        policy = resolve.cascade(spec.policy, loader_of(scenario.base_dir))
    models = tuple(served[name] for name in spec.models)
    return CascadeConfig(spec.name, models, policy, spec.judge_s, spec.judge_usd, spec.judge_bias, spec.judge_noise)


def _check_engines(fleet: Fleet, ordering: PolicySpec) -> None:
    """Raise HeadwayError if an engine does not support the ordering."""
    name = ordering if isinstance(ordering, str) else str(ordering.get("name"))
    for pool in fleet.all_pools:
        accepted = pool.engine.orderings
        if accepted is not None and name not in accepted:
            raise HeadwayError(
                f"{pool.engine.name} (pool {pool.name}) cannot order by {name} at the replica, only by"
                f" {' or '.join(accepted)}; with ordering_at gateway, requests are ordered in front of it"
            )
