"""Rereads a fleet file while its gateway runs, and checks which parts may change."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from headway.config.scenario import Scenario
from headway.config.spec import ComboSpec, PolicySpec, PoolSpec, Spec
from headway.control.policies import Policies
from headway.control.shadow import ShadowPlan
from headway.core.errors import HeadwayError
from headway.gateway.fleet.specs import ServingPlan
from headway.gateway.scheduling.shadows import comparable
from headway.policies.resolve import PolicyChoice
from headway.serving.gateway import plan, read

_RESTART = "cannot change while the gateway runs; expected what it was, or a restart"
_FIXED = ("gpu_limits", "cascade", "pacer", "roles", "seed", "network", "provisioning", "kv_store")
"""Sections that only a restart can change. In `combos`, goodputs may change."""
_FIXED_SETTINGS = (
    "batches",
    "key_store",
    "peers",
    "tracing",
    "dashboard",
    "hosts",
    "cors",
    "hang_s",
    "max_decisions_bytes",
    "demand_history",
)
_SECRET_FILE = re.compile(r"\$\{file:([^{}]+)\}")


class FleetFile:
    """A fleet file in its last read version."""

    def __init__(self, path: Path, change: Callable[[Scenario], Scenario], is_fleet_fixed: bool = False) -> None:
        """`change` is applied to the scenario after reading. `is_fleet_fixed`: the fleet cannot change while the
        gateway runs. Raises HeadwayError if the file cannot be served."""
        self.path, self._change, self._is_fleet_fixed = path, change, is_fleet_fixed
        self._read = read(path)
        self.scenario = change(self._read)
        self.plan = plan(self.scenario)

    def signature(self) -> tuple[object, ...]:
        """A value that changes when the file, or one of its files of secrets and endpoints, changes. Never fails."""
        try:
            text = self.path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return ()
        secrets = [self.path.parent / name for name in _SECRET_FILE.findall(text)]
        listed = [self.path.parent / each.endpoints_file for each in _pools(self._read.spec) if each.endpoints_file]
        return (text, *map(_stamp, [*secrets, *listed]))

    def read_again(self, present: ServingPlan) -> ServingPlan:
        """The file's plan, to replace the current plan. Raises HeadwayError if the file cannot be served, or needs a
        restart."""
        self._read, self.scenario, changed = self._checked(self.path, present)
        return changed

    def policies_of(self, version: Path, present: ServingPlan) -> Policies:
        """The policies of another version of the file, to replace the current policies. Raises HeadwayError if the
        version cannot be served, needs a restart, or differs in more than policies."""
        found, _, changed = self._checked(version, present)
        if replace(self._read.spec, policies=found.spec.policies, name=found.spec.name) != found.spec:
            raise HeadwayError(f"{version}: differs from {self.path.name} in more than its policies")
        return changed.policies

    def _checked(self, path: Path, present: ServingPlan) -> tuple[Scenario, Scenario, ServingPlan]:
        """Read the file. Returns its scenario, the scenario after `change`, and the plan that would replace the current
        one. Raises HeadwayError if the file cannot be served, or needs a restart."""
        found = read(path)
        before, after = self._read.spec, found.spec
        places = found.places

        def check(is_same: bool, *key: str | int) -> None:
            if not is_same:
                raise places.error(key, _RESTART)

        for name in _FIXED:
            check(getattr(before, name) == getattr(after, name), name)
        check(_unprofiled(before.combos) == _unprofiled(after.combos), "combos")
        for name in _FIXED_SETTINGS:
            check(getattr(before.gateway, name) == getattr(after.gateway, name), "gateway", name)
        check(before.gateway.needs_key == after.gateway.needs_key, "gateway", "api_keys")
        check(before.gateway.has_dashboard == after.gateway.has_dashboard, "gateway", "admin_keys")
        changed = self._change(found)
        self._check_pools(before, after, check)
        new = plan(changed)
        scaling = _changed(self.scenario.spec.policies.scaling, changed.spec.policies.scaling)
        scaler = _scaler(present.policies, new.policies, scaling, check)
        kept = {each.pool.name: each for each in present.pools if self._is_fleet_fixed or each.start is not None}
        return (
            found,
            changed,
            replace(
                new,
                pools=tuple(
                    replace(kept[each.pool.name], combo=each.combo) if each.pool.name in kept else each
                    for each in new.pools
                ),
                policies=replace(_policies(present.policies, new.policies), scaler=scaler),
                settings=replace(
                    new.settings,
                    hosts=present.settings.hosts,
                    batches=present.settings.batches,
                    key_store=present.settings.key_store,
                    peers=present.settings.peers,
                ),
                stop_planners=present.stop_planners,
                planned_gpus=present.planned_gpus,
                planner_messages=present.planner_messages,
                past_demand=present.past_demand,
                shadow=present.shadow,
            ),
        )

    def candidate(self, path: Path) -> tuple[ShadowPlan, list[str]]:
        """The policies of a shadow candidate for this fleet, and a list of its parts that cannot be compared live.
        Raises HeadwayError if it could not be served, or has no policy that can be compared."""
        candidate = plan(self._change(read(path)))
        candidate.stop_planners()
        if set(candidate.names) != set(self.plan.names):
            expected, found = (", ".join(sorted(each.names)) for each in (self.plan, candidate))
            raise HeadwayError(f"{path}: serves {found}; expected the models of {self.path.name}: {expected}")
        kinds, notes = comparable(self.plan.policies, candidate.policies)
        if not kinds:
            why = "; ".join(notes) or "its routing, ordering and admission are those of the fleet"
            raise HeadwayError(f"{path}: nothing to compare: {why}")
        return ShadowPlan(path.name, candidate.policies, kinds), notes

    def _check_pools(self, before: Spec, after: Spec, check: Callable[..., None]) -> None:
        """Raises HeadwayError if a pool changes whose replicas the gateway starts, or if the first pool gets
        `kv_events`."""
        if self._is_fleet_fixed:
            check(before.fleet == after.fleet, "fleet")
        started_before = [pool for pool in before.fleet if pool.processes or pool.kubernetes or pool.inference_pool]
        started_after = [pool for pool in after.fleet if pool.processes or pool.kubernetes or pool.inference_pool]
        check(started_before == started_after, "fleet")
        if not any(pool.kv_events for pool in _pools(before)):
            for i, pool in enumerate(after.fleet):
                check(pool.kv_events is None, "fleet", i, "kv_events")


def _pools(spec: Spec) -> list[PoolSpec]:
    """The pools, and the parts of combos."""
    return [*spec.fleet, *(part for combo in spec.combos for part in combo.parts.values())]


def _unprofiled(combos: Sequence[ComboSpec]) -> list[ComboSpec]:
    """Combos without their goodputs, which may change during service."""
    return [replace(each, goodput_rps=None) for each in combos]


def _stamp(path: Path) -> object:
    try:
        return path.read_bytes()
    except OSError:
        return None


def _policies(before: Policies, after: Policies) -> Policies:
    """The new policies. Unchanged choices keep the current policy object; the cascade stays."""
    names = ("router", "ordering", "migration", "admission")
    same = {name: getattr(before, name) for name in names if _is_same(getattr(before, name), getattr(after, name))}
    return replace(after, cascade=before.cascade, **same)


def _scaler(before: Policies, after: Policies, changed: Collection[str], check: Callable[..., None]) -> Any:
    """The current scaler with the new values of arguments that may change at run time.

    `changed`: the arguments that differ in the file. Raises HeadwayError if another argument or the scaler itself
    differs.
    """
    old, new = before.scaler, after.scaler
    live: Collection[str] = getattr(old.made_by, "live_settings", ()) if isinstance(old, PolicyChoice) else ()
    check(set(changed) <= set(live), "policies", "scaling")
    if not isinstance(old, PolicyChoice) or not isinstance(new, PolicyChoice):
        return old
    arguments = {key: value for key, value in old.arguments.items() if key not in live}
    arguments |= {key: value for key, value in new.arguments.items() if key in live}
    return old if arguments == old.arguments else dataclasses.replace(old, arguments=arguments)


def _changed(before: PolicySpec | None, after: PolicySpec | None) -> set[str]:
    """The keys, including `name`, in which two policies differ."""
    one, other = ({"name": each} if each is None or isinstance(each, str) else each for each in (before, after))
    return {key for key in one.keys() | other.keys() if one.get(key) != other.get(key)}


def _is_same(before: object, after: object) -> bool:
    """Whether two choices name the same policy with the same arguments. Compared by name, because each read loads the
    policy's code again."""
    if isinstance(before, PolicyChoice) and isinstance(after, PolicyChoice):
        return (before.name, before.arguments) == (after.name, after.arguments)
    return before == after
