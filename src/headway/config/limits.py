"""The limits of a scenario's tenants, from the simulation's settings and the gateway's keys."""

from __future__ import annotations

from collections.abc import Sequence

from headway.config.scenario import Scenario
from headway.config.spec import Spec
from headway.core.errors import unknown
from headway.gateway.settings import Key
from headway.limits.tenants import TenantLimits, rates_of_keys


def limits_of(spec: Spec) -> dict[str, TenantLimits]:
    """Limits by tenant, without tenants that have none."""
    keys: dict[str, list[Key]] = {}
    for key in spec.gateway.api_keys:
        if isinstance(key, Key):
            keys.setdefault(key.tenant, []).append(key)
    found = {
        tenant: TenantLimits(
            requests_per_minute=rates_of_keys([key.requests_per_minute for key in own]),
            tokens_per_minute=rates_of_keys([key.tokens_per_minute for key in own]),
        )
        for tenant, own in keys.items()
    }
    return {tenant: each for tenant, each in {**found, **spec.simulation.limits}.items() if each != TenantLimits()}


def check_tenants(scenario: Scenario, tenants: Sequence[str]) -> None:
    """Raise HeadwayError if the simulation limits a tenant that the workload does not contain."""
    for name in scenario.spec.simulation.limits:
        if name in tenants:
            continue
        at = ("simulation", "limits", name)
        if not tenants:
            raise scenario.places.error(at, "the workload has no tenants; expected `workload: tenants`, or a trace's")
        raise unknown("tenant", name, tenants, scenario.places.where(at))
